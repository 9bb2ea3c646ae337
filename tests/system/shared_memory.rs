//! Weights and gradients by shared memory, whole and in 16 bits: a worker's client and a ps, each
//! with a memory and a thread of its own.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use kernels::cpu::cast;
use model::weights::Weights;
use net::bulk::{self, PULL, PUSH};
use net::channel::{Channel, Dialer, Listener, Purpose};
use net::memory::attach::{Attachment, Offer};
use net::memory::{Memory, Regions};
use net::security::door::{Door, Limits};
use net::security::{Keys, Options as KeyOptions, TokenRole, tokens};
use proto::ids::{ChunkId, Era, JobId, PartitionId, Step, Version};
use proto::parameters::{Address, Outcome, Parameters, Pull, Target, Want};
use proto::pb;
use proto::pb::PartitionAddress;
use proto::pb::parameters_client::ParametersClient;
use proto::pb::push_request::Part;
use proto::placement::Layout;
use proto::spec::JobSpec;
use proto::status::{Failure, Kind};
use proto::tensor::{TensorRole, TensorSpec, Values};
use proto::tree::{Node, StepNode};
use proto::wire::WireType;
use ps::{Opening, Options, Ps};
use store::Stores;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use worker::Metrics;
use worker::exchange::{Connector, Partitions};

const JOB: JobId = JobId(1);
const ADDRESS: Address = Address { job: JOB, partition: PartitionId(0), era: Era(0) };
/// M of every step.
const OF: u32 = 4;
/// Lengths of the tensors: two chunks, and three values, which are too few for a region.
const LENS: [usize; 2] = [300_000, 3];

fn spec(wire: WireType) -> JobSpec {
    let text = format!(
        r#"{{
            "name": "test", "epochs": 1, "model": {{ "builtin": "linear" }},
            "data": {{ "format": "idx", "train": {{ "features": ["x"], "labels": ["y"] }} }},
            "batch": {{ "micro": 1, "effective": {OF} }},
            "optimizer": {{ "kind": "adam", "learning_rate": 0.1 }},
            "exchange": {{ "dtype": "{wire}" }}
        }}"#
    );
    JobSpec::from_json(&text).unwrap()
}

fn tensors() -> Vec<TensorSpec> {
    ["weight", "bias"].into_iter().zip(LENS).map(|(name, len)| TensorSpec::parameter(name, [len])).collect()
}

/// Returns values of all tensors that depend on the element and on `seed`.
pub(crate) fn values(seed: u32) -> Vec<Values> {
    let value =
        |at: usize| ((at as u32).wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)) as f32 / 1e9;
    LENS.into_iter().map(|len| Values::F32((0..len).map(value).collect())).collect()
}

pub(crate) fn leaf(step: u64, index: u32) -> Target {
    Target::Node { node: StepNode { step: Step(step), node: Node::leaf(index), of: OF }, samples: 1 }
}

/// A ps with one partition. It serves in a thread of its own until it is dropped.
pub(crate) struct Served {
    pub(crate) ps: Ps,
    wire: WireType,
    pub(crate) url: String,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn new(memory: Option<Memory>) -> Self {
        Self::with(memory, Options::default())
    }

    fn with(memory: Option<Memory>, options: Options) -> Self {
        Self::exchanging(WireType::F32, memory, options)
    }

    pub(crate) fn exchanging(wire: WireType, memory: Option<Memory>, options: Options) -> Self {
        Self::behind(Door::default(), wire, memory, options)
    }

    fn behind(door: Door, wire: WireType, memory: Option<Memory>, options: Options) -> Self {
        let ps = Ps::with(options, Stores::default(), memory).unwrap();
        let spec = spec(wire);
        let plan = spec.plan(1 << 20);
        ps.open(Opening {
            address: ADDRESS,
            partitions: 1,
            tensors: tensors(),
            plan,
            spec,
            restore: None,
            homes: vec![],
            placement: 0,
            script: None,
        })
        .unwrap();
        let stop = CancellationToken::new();
        let (served, stopping) = (ps.clone(), stop.clone());
        let (address_tx, address) = std::sync::mpsc::channel();
        let serving = async move {
            let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let listener = Listener::beside(tcp).unwrap().behind(door);
            address_tx.send(listener.address().unwrap()).unwrap();
            let serving = ps::server::serve(served, listener.accept().unwrap(), CancellationToken::new());
            // Connections are cut as when the process dies.
            stopping.run_until_cancelled(serving).await;
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let thread = Some(std::thread::spawn(move || runtime.block_on(serving)));
        Self { ps, wire, url: format!("http://{}", address.recv().unwrap()), stop, thread }
    }

    fn channel(&self) -> Channel {
        Dialer::nearest().channel(&self.url, Purpose::Bulk).unwrap()
    }

    pub(crate) fn client(&self, connector: &Connector) -> Partitions {
        self.client_at(connector, &self.url)
    }

    fn client_at(&self, connector: &Connector, url: &str) -> Partitions {
        let layout = Arc::new(Layout::new(tensors(), 1).unwrap());
        let address = PartitionAddress { ps: "ps".to_owned(), url: url.to_owned() };
        let limits = spec(self.wire).limits;
        Partitions::new(connector, JOB, layout, &[address], limits, 1).unwrap().exchanging(self.wire)
    }

    /// Returns whether bytes were pushed and pulled without a socket.
    pub(crate) fn shared(&self) -> [bool; 2] {
        let metrics = self.ps.metrics();
        [&metrics.push_bytes_shared, &metrics.pull_bytes_shared].map(|bytes| bytes.get() > 0)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

pub(crate) fn memory() -> Memory {
    Memory::with_bytes(1 << 28).unwrap()
}

pub(crate) fn near(memory: Memory) -> (Connector, Arc<Metrics>) {
    let metrics = Arc::<Metrics>::default();
    (Connector::shared_memory(Dialer::nearest(), memory, metrics.clone()), metrics)
}

/// Waits for a state.
pub(crate) async fn until(mut reached: impl FnMut() -> bool) {
    while !reached() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Pushes version 0 and `steps` steps, each as four leaves of which two pairs wait for each other;
/// answers the last weights.
async fn train(client: &Partitions, steps: u64) -> Weights {
    train_in(WireType::F32, client, steps).await
}

/// Pushes version 0 and `steps` steps with leaves rounded to `wire`, as the trainer does, and
/// returns the last weights.
pub(crate) async fn train_in(wire: WireType, client: &Partitions, steps: u64) -> Weights {
    client.push(Target::Initial, values(0)).await.unwrap();
    for step in 0..steps {
        client.pull(Want::Exact(Version(step))).await.unwrap().unwrap();
        for index in [2, 0, 3, 1] {
            let seed = 1 + 7 * step as u32 + index;
            let mut values = values(seed);
            values.iter_mut().for_each(|values| cast::round(wire, values.as_f32_mut().unwrap()));
            assert_eq!(client.push(leaf(step, index), values).await.unwrap(), Outcome::Merged);
        }
    }
    client.pull(Want::Exact(Version(steps))).await.unwrap().unwrap()
}

#[tokio::test]
async fn every_way_gives_the_same_bits() {
    let reference = every_way(WireType::F32).await;
    for wire in [WireType::Bf16, WireType::F16] {
        assert!(*every_way(wire).await != *reference, "{wire} must show in the weights");
    }
}

async fn every_way(wire: WireType) -> Weights {
    let served = |memory| Served::exchanging(wire, memory, Options::default());
    let reference = train_in(wire, &served(None).client(&Connector::socket(Dialer::tcp())), 5).await;
    let small = Memory::with_bytes(8 << 10).unwrap();
    for (what, ps, worker, shared) in [
        ("shared memory", Some(memory()), Some(memory()), [true; 2]),
        ("a ps without", None, Some(memory()), [false; 2]),
        ("a worker without", Some(memory()), None, [false; 2]),
        ("a ps whose memory is full", Some(small.clone()), Some(memory()), [true, false]),
        ("a worker whose memory is full", Some(memory()), Some(small), [false, true]),
    ] {
        let served = served(ps);
        let connector = worker.map_or_else(|| Connector::socket(Dialer::nearest()), |memory| near(memory).0);
        one_way(what, wire, &served.client(&connector), &reference).await;
        assert_eq!(served.shared(), shared, "{what}, {wire}: pushes and pulls by shared memory");
    }
    let served = served(None);
    let embedded: Arc<dyn Parameters> = Arc::new(served.ps.clone());
    let connector = Connector::embedded(BTreeMap::from([(served.url.clone(), embedded)]));
    one_way("a ps of the same process", wire, &served.client(&connector), &reference).await;
    reference
}

// The memory of a ps has the weights of all jobs.
#[tokio::test]
async fn a_program_of_a_user_shares_no_memory_with_a_ps_and_gets_the_same_bits() {
    let (dir, token) = (tempfile::tempdir().unwrap(), "a-token-of-somebody-0123");
    let reference = train(&Served::new(None).client(&Connector::socket(Dialer::tcp())), 3).await;
    for (role, shared) in [(TokenRole::Worker, [true; 2]), (TokenRole::Script, [false; 2])] {
        let [list, file] = ["tokens.toml", "token"].map(|name| dir.path().join(name));
        std::fs::write(&list, tokens::entry("somebody", role, token, None, None, false)).unwrap();
        std::fs::write(&file, token).unwrap();
        let keys = |options| Keys::load(options).unwrap();
        let server = keys(KeyOptions { tokens: Some(list), ..KeyOptions::default() });
        let own = keys(KeyOptions { token: Some(file), ..KeyOptions::default() });
        let door = Door::new(server, Limits::default());
        let served = Served::behind(door, WireType::F32, Some(memory()), Options::default());
        let dialer = Dialer::nearest().with(own);
        let connector = Connector::shared_memory(dialer.clone(), memory(), Arc::default());
        let trained = train(&served.client(&connector), 3).await;
        assert!(*trained == *reference, "{role}: other bits");
        assert_eq!(served.shared(), shared, "{role}: pushes and pulls by shared memory");
        let mut client = ParametersClient::new(dialer.channel(&served.url, Purpose::Bulk).unwrap());
        let asked = client.attach(pb::AttachRequest::default()).await;
        let refused = asked.is_err_and(|status| status.message().contains("may not `Parameters/Attach`"));
        assert_eq!(refused, role == TokenRole::Script, "{role}");
    }
}

async fn one_way(what: &str, wire: WireType, client: &Partitions, reference: &Weights) {
    let trained = train_in(wire, client, 5).await;
    assert!(*trained == **reference, "{what}, {wire}: other bits");
    let pulled = client.pull_rounded(Want::Exact(Version(5))).await.unwrap().unwrap();
    for (pulled, values) in pulled.iter().zip(&**reference) {
        let mut expected = values.clone();
        cast::round(wire, expected.as_f32_mut().unwrap());
        assert!(*pulled == expected, "{what}, {wire}: other bits in weights for training");
    }
}

/// Forwards connections to a server, and counts the bytes: up, down.
async fn counted(url: &str) -> (String, Arc<[AtomicU64; 2]>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let counts = Arc::<[AtomicU64; 2]>::default();
    let (here, to) = (format!("http://{}", listener.local_addr().unwrap()), url.replace("http://", ""));
    let counting = counts.clone();
    tokio::spawn(async move {
        while let Ok((from, _)) = listener.accept().await {
            let to = tokio::net::TcpStream::connect(&to).await.unwrap();
            let ((up_from, down_to), (down_from, up_to)) = (from.into_split(), to.into_split());
            tokio::spawn(forward(up_from, up_to, counting.clone(), 0));
            tokio::spawn(forward(down_from, down_to, counting.clone(), 1));
        }
    });
    (here, counts)
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, counts: Arc<[AtomicU64; 2]>, way: usize) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(bytes @ 1..) = from.read(&mut buffer).await {
        counts[way].fetch_add(bytes as u64, Ordering::Relaxed);
        if to.write_all(&buffer[..bytes]).await.is_err() {
            break;
        }
    }
}

#[tokio::test]
async fn a_16_bit_exchange_takes_half_of_the_bytes_of_a_connection() {
    let whole = 4 * LENS.iter().sum::<usize>() as u64;
    for (wire, bytes) in [(WireType::F32, whole), (WireType::Bf16, whole / 2), (WireType::F16, whole / 2)] {
        let served = Served::exchanging(wire, None, Options::default());
        let (url, counts) = counted(&served.url).await;
        let client = served.client_at(&Connector::socket(Dialer::tcp()), &url);
        client.push(Target::Initial, values(0)).await.unwrap();
        let taken = || [0, 1].map(|way| counts[way].swap(0, Ordering::Relaxed));
        // With frames, headers and HTTP/2's own messages.
        let about = |bytes: u64, taken: u64| (bytes..bytes + bytes / 20).contains(&taken);
        let [up, _] = taken();
        assert!(about(whole, up), "{wire}: version 0 takes {up} bytes");
        client.push(leaf(0, 0), values(1)).await.unwrap();
        let [up, _] = taken();
        assert!(about(bytes, up), "{wire}: a push takes {up} bytes, the values have {bytes}");
        client.pull_rounded(Want::Exact(Version(0))).await.unwrap().unwrap();
        let [_, down] = taken();
        assert!(about(bytes, down), "{wire}: a pull takes {down} bytes, the values have {bytes}");
        client.pull(Want::Exact(Version(0))).await.unwrap().unwrap();
        let [_, down] = taken();
        assert!(about(whole, down), "{wire}: a pull for export takes {down} bytes");
    }
}

/// Attaches as a worker does.
async fn attached(served: &Served, memory: &Memory) -> (Channel, Attachment) {
    let channel = served.channel();
    let offer = Offer::new(memory).unwrap();
    let request = pb::AttachRequest { name: offer.name(), ..Default::default() };
    let mut client = ParametersClient::new(channel.clone());
    let (reply, attachment) = tokio::join!(client.attach(request), offer.taken());
    assert!(reply.unwrap().into_inner().attached);
    (channel, attachment.unwrap())
}

fn first_of(target: Target, attachment: Bytes) -> pb::PushRequest {
    let mut header = pb::PushHeader::from((ADDRESS, target));
    header.attachment = attachment;
    pb::PushRequest { part: Some(Part::Header(header)) }
}

async fn push_regions(channel: &Channel, attachment: Bytes, regions: &[Option<pb::Region>]) -> Failure {
    let chunk = |(id, region): (usize, &Option<pb::Region>)| pb::Chunk {
        id: id as u32,
        values: Bytes::new(),
        region: *region,
    };
    let chunks = pb::Chunks { chunks: regions.iter().enumerate().map(chunk).collect() };
    let messages =
        vec![first_of(leaf(0, 0), attachment), pb::PushRequest { part: Some(Part::Chunks(chunks)) }];
    let mut replies = bulk::call(channel, PUSH, messages.into_iter()).await.unwrap();
    replies.message::<pb::PushReply>().await.unwrap_err().into()
}

#[tokio::test]
async fn regions_that_are_none_are_refused_and_change_nothing() {
    let (served, memory) = (Served::new(Some(memory())), memory());
    served.client(&Connector::socket(Dialer::tcp())).push(Target::Initial, values(0)).await.unwrap();
    let (channel, attachment) = attached(&served, &memory).await;
    let name = attachment.name();
    let good = Some(pb::Region { offset: 0, bytes: 1 << 20 });
    for (bad, says) in [
        (pb::Region { offset: 1 << 28, bytes: 1 << 20 }, "region"),
        (pb::Region { offset: u64::MAX, bytes: 1 << 20 }, "region"),
        (pb::Region { offset: 0, bytes: 0 }, "region"),
        (pb::Region { offset: 0, bytes: 1 << 10 }, "1024"),
    ] {
        for regions in [vec![Some(bad)], vec![good, Some(bad)]] {
            let failure = push_regions(&channel, name.clone(), &regions).await;
            assert!(failure.kind == Kind::Malformed && failure.message.contains(says), "{bad:?}: {failure}");
        }
    }
    for unknown in [Bytes::new(), Bytes::from_static(&[7; 16])] {
        let failure = push_regions(&channel, unknown, &[good]).await;
        assert!(failure.kind == Kind::Unavailable && failure.message.contains("attach again"), "{failure}");
    }
    let applied = &served.ps.ledger(JOB).unwrap()[0];
    assert!(applied.version == Some(Version(0)) && applied.ledger.duplicates_dropped() == 0);
    // The refused pushes left nothing behind.
    assert_eq!(served.ps.metrics().push_bytes_in_flight.get(), 0);
}

#[tokio::test]
async fn a_ps_on_the_host_refuses_memory_of_a_device_and_goes_on() {
    let (served, memory) = (Served::new(Some(memory())), memory());
    served.client(&Connector::socket(Dialer::tcp())).push(Target::Initial, values(0)).await.unwrap();
    let (channel, attachment) = attached(&served, &memory).await;
    let name = attachment.name().clone();
    let request = pb::AttachRequest { name: name.clone(), device_memory: Bytes::from_static(&[7; 88]) };
    let reply = ParametersClient::new(channel.clone()).attach(request).await.unwrap().into_inner();
    assert!(!reply.attached && reply.device.is_empty(), "{reply:?}");
    assert!(reply.refused.contains("the processor of the host"), "{}", reply.refused);

    let region = Some(pb::Region { offset: 0, bytes: 1 << 20 });
    for attachment in [name.clone(), Bytes::new()] {
        let mut first = first_of(leaf(0, 0), attachment);
        let Some(Part::Header(header)) = &mut first.part else { panic!("a header") };
        header.on_device = true;
        let chunks = pb::Chunks { chunks: vec![pb::Chunk { id: 0, values: Bytes::new(), region }] };
        let messages = vec![first, pb::PushRequest { part: Some(Part::Chunks(chunks)) }];
        let mut replies = bulk::call(&channel, PUSH, messages.into_iter()).await.unwrap();
        let failure = Failure::from(replies.message::<pb::PushReply>().await.unwrap_err());
        assert!(failure.kind == Kind::Unavailable && failure.message.contains("attach again"), "{failure}");
    }
    assert_eq!(served.ps.metrics().push_bytes_in_flight.get(), 0);
    // Room for the answer to a pull stays unused.
    for attachment in [name.clone(), Bytes::from_static(&[7; 16])] {
        let (want, wait) = (Want::Exact(Version(0)), Duration::from_secs(9));
        let pull = Pull { address: ADDRESS, want, wait, wire: WireType::F32, on_device: false };
        let request = pb::PullRequest { attachment, part: region, ..pull.into() };
        let mut replies = bulk::call(&channel, PULL, std::iter::once(request)).await.unwrap();
        let first = replies.message::<pb::PullReply>().await.unwrap().and_then(|reply| reply.part);
        let Some(pb::pull_reply::Part::Header(header)) = first else { panic!("a header") };
        assert!(!header.on_device && header.chunks > 0, "{header:?}");
        while replies.message::<pb::PullReply>().await.unwrap().is_some() {}
    }
    assert_eq!(served.ps.metrics().pull_bytes_device.get(), 0);
    // The attachment is as it was: a region is too short for its chunk, and not unknown.
    let failure = push_regions(&channel, name, &[Some(pb::Region { offset: 0, bytes: 1 << 10 })]).await;
    assert!(failure.kind == Kind::Malformed, "{failure}");
}

#[tokio::test]
async fn gradients_in_the_memory_are_lent_without_a_copy_and_come_back() {
    // The memory has no room for copies.
    let bytes = 4 * LENS[0];
    let memory = Memory::with_bytes(OF as usize * bytes.next_multiple_of(4 << 10)).unwrap();
    let regions = Regions::new(memory.clone());
    let steps = 20;
    let reference = train(&Served::new(None).client(&Connector::socket(Dialer::tcp())), steps).await;

    let served = Served::new(Some(self::memory()));
    served.client(&Connector::socket(Dialer::tcp())).push(Target::Initial, values(0)).await.unwrap();
    let client = served.client(&near(memory).0);
    for step in 0..steps {
        client.pull(Want::Exact(Version(step))).await.unwrap().unwrap();
        for index in [2, 0, 3, 1] {
            let mut values = values(1 + 7 * step as u32 + index);
            let mut shared = None;
            until(|| {
                shared = regions.floats(LENS[0]);
                shared.is_some()
            })
            .await;
            let mut shared = shared.unwrap();
            shared.bytes_mut().copy_from_slice(values[0].bytes());
            values[0] = shared;
            assert_eq!(client.push(leaf(step, index), values).await.unwrap(), Outcome::Merged);
        }
    }
    assert!(*client.pull(Want::Exact(Version(steps))).await.unwrap().unwrap() == *reference, "other bits");
    assert_eq!(served.ps.metrics().push_bytes_shared.get(), steps * u64::from(OF) * bytes as u64);
}

#[tokio::test]
async fn a_push_stays_as_it_is_until_its_sibling_has_come() {
    let (served, memory) = (Served::new(Some(memory())), memory());
    let (connector, metrics) = near(memory.clone());
    let client = served.client(&connector);
    client.push(Target::Initial, values(0)).await.unwrap();
    client.push(leaf(0, 0), values(1)).await.unwrap();
    // The bits depend on the first push, of which nothing was copied on the way.
    for index in 1..OF {
        client.push(leaf(0, index), values(1 + index)).await.unwrap();
    }
    let trained = client.pull(Want::Exact(Version(1))).await.unwrap().unwrap();
    let other = Served::new(None);
    let reference = other.client(&Connector::socket(Dialer::tcp()));
    reference.push(Target::Initial, values(0)).await.unwrap();
    for index in 0..OF {
        reference.push(leaf(0, index), values(1 + index)).await.unwrap();
    }
    assert!(*trained == *reference.pull(Want::Exact(Version(1))).await.unwrap().unwrap());
    assert_eq!(metrics.push_bytes_lost.get(), 0);
}

#[tokio::test]
async fn what_a_dead_ps_was_told_of_rests_until_it_is_gone() {
    let served = Served::new(Some(memory()));
    let (connector, metrics) = near(memory());
    let client = served.client(&connector);
    client.push(Target::Initial, values(0)).await.unwrap();
    client.pull(Want::Exact(Version(0))).await.unwrap().unwrap();
    client.push(leaf(0, 0), values(1)).await.unwrap();
    assert_eq!(served.shared(), [true; 2]);
    let ps = served.ps.clone();
    // The connections are cut while the first half of a sum is held: the ps could still read it.
    drop(served);
    until(|| metrics.push_bytes_lost.get() == 1_200_000).await;
    let pull = client.pull(Want::Exact(Version(0)));
    assert!(tokio::time::timeout(Duration::from_millis(200), pull).await.is_err(), "nobody is there");
    assert_eq!(metrics.push_bytes_lost.get(), 1_200_000, "it is still held");
    drop(ps);
    until(|| metrics.push_bytes_lost.get() == 0).await;
}

#[tokio::test]
async fn a_worker_that_reads_for_too_long_pulls_again() {
    // A busy machine may need some seconds for a push.
    let options = Options { push_timeout: Duration::from_secs(6), ..Options::default() };
    let (served, memory) = (Served::with(Some(memory()), options), memory());
    let client = served.client(&Connector::socket(Dialer::tcp()));
    client.push(Target::Initial, values(0)).await.unwrap();
    let (channel, attachment) = attached(&served, &memory).await;
    let pull = Pull {
        address: ADDRESS,
        want: Want::Exact(Version(0)),
        wait: Duration::from_secs(9),
        wire: WireType::F32,
        on_device: false,
    };
    let mut request = pb::PullRequest::from(pull);
    request.attachment = attachment.name().clone();
    let (_reading, never) = oneshot::channel::<()>();
    let never = Box::pin(async move {
        let _ = never.await;
        None
    });
    let mut replies = bulk::call_until(&channel, PULL, std::iter::once(request), Some(never)).await.unwrap();
    let mut regions = Vec::new();
    let end = loop {
        match replies.message::<pb::PullReply>().await {
            Ok(Some(pb::PullReply { part: Some(pb::pull_reply::Part::Chunks(message)) })) => {
                regions.extend(message.chunks.into_iter().filter_map(|chunk| chunk.region));
            }
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended well while the worker reads"),
            Err(status) => break Failure::from(status),
        }
    };
    assert!(end.kind == Kind::Unavailable && end.message.contains("not read within"), "{end}");
    assert_eq!(regions.len(), 2, "three values are not worth a region");
    let before = attachment.read(regions[0]).unwrap().to_vec();
    assert_eq!(before, values(0)[0].bytes()[..1 << 20]);
    // Versions come and go. The buffers of the first are written to, and the worker learns it in
    // time.
    for step in 0..4 {
        for index in 0..OF {
            client.push(leaf(step, index), values(9 + index)).await.unwrap();
        }
    }
    client.pull(Want::Exact(Version(4))).await.unwrap().unwrap();
    assert_ne!(attachment.read(regions[0]).unwrap(), before, "it is still held");
}

#[tokio::test]
async fn a_version_is_held_as_long_as_it_is_read() {
    let (served, memory) = (Served::new(Some(memory())), memory());
    let trainer = served.client(&Connector::socket(Dialer::tcp()));
    trainer.push(Target::Initial, values(0)).await.unwrap();
    let (channel, attachment) = attached(&served, &memory).await;
    let pull = Pull {
        address: ADDRESS,
        want: Want::Exact(Version(0)),
        wait: Duration::from_secs(9),
        wire: WireType::F32,
        on_device: false,
    };
    let mut request = pb::PullRequest::from(pull);
    request.attachment = attachment.name().clone();
    let (reading, read) = oneshot::channel::<()>();
    let read = Box::pin(async move {
        let _ = read.await;
        None
    });
    let mut replies = bulk::call_until(&channel, PULL, std::iter::once(request), Some(read)).await.unwrap();
    let mut regions = Vec::new();
    while regions.len() < 2 {
        let reply = replies.message::<pb::PullReply>().await.unwrap().unwrap();
        if let Some(pb::pull_reply::Part::Chunks(message)) = reply.part {
            regions.extend(message.chunks.into_iter().filter_map(|chunk| chunk.region));
        }
    }
    for step in 0..4 {
        for index in 0..OF {
            trainer.push(leaf(step, index), values(9 + index)).await.unwrap();
        }
    }
    let read = attachment.read(regions[0]).unwrap().to_vec();
    drop(reading);
    while replies.message::<pb::PullReply>().await.unwrap().is_some() {}
    assert_eq!(read, values(0)[0].bytes()[..1 << 20], "the ends says that it is good, and it is");
}

#[tokio::test]
async fn a_ps_of_the_same_process_is_read_where_it_lies() {
    let served = Served::new(Some(memory()));
    served.ps.push(initial()).await.unwrap();
    let pull = Pull {
        address: ADDRESS,
        want: Want::Exact(Version(0)),
        wait: Duration::ZERO,
        wire: WireType::F32,
        on_device: false,
    };
    let pulled = served.ps.pull(pull).await.unwrap();
    assert_eq!(pulled.chunks[0].values.host(), &values(0)[0].bytes()[..1 << 20]);
}

fn initial() -> proto::parameters::Push {
    let layout = Layout::new(tensors(), 1).unwrap();
    let values = values(0);
    let chunk = |&id: &ChunkId| {
        let chunk = layout.chunk(id);
        let bytes = &values[chunk.tensor].bytes()[chunk.offset * 4..(chunk.offset + chunk.len) * 4];
        proto::tensor::Chunk { id, role: TensorRole::Parameter, values: bytes.to_vec().into() }
    };
    let chunks = layout.members(PartitionId(0)).iter().map(chunk).collect();
    proto::parameters::Push { address: ADDRESS, target: Target::Initial, wire: WireType::F32, chunks }
}

#[test]
fn a_push_outlives_the_worker_that_leaves() {
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (served, other, memory) = (Served::new(Some(memory())), Served::new(None), memory());
    let leaving = runtime();
    leaving.block_on(async {
        for client in
            [served.client(&near(memory.clone()).0), other.client(&Connector::socket(Dialer::tcp()))]
        {
            client.push(Target::Initial, values(0)).await.unwrap();
            client.push(leaf(0, 0), values(1)).await.unwrap();
        }
    });
    // As in a worker that drains: tasks that wait for the ps to release its memory end first.
    drop(leaving);
    let trained = runtime().block_on(async {
        let mut trained = Vec::new();
        for served in [&served, &other] {
            let client = served.client(&Connector::socket(Dialer::tcp()));
            for index in 1..OF {
                client.push(leaf(0, index), values(1 + index)).await.unwrap();
            }
            trained.push(client.pull(Want::Exact(Version(1))).await.unwrap().unwrap());
        }
        trained
    });
    assert!(served.shared()[0] && *trained[0] == *trained[1], "other bits");
    drop(memory);
}

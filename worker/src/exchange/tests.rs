//! Calls that fail are counted, named and bounded in time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt as _;
use proto::ids::Version;
use proto::parameters::{ComingChunks, GivenValues, Pushed, Take};
use proto::placement::CHUNK_LEN;
use proto::tensor::TensorSpec;

use super::*;

const URL: &str = "http://ps-0:1";

/// A ps of one tensor `[2]` that does not answer so many pulls.
struct Silent(AtomicU64);

#[async_trait::async_trait]
impl Parameters for Silent {
    async fn push(&self, _: Push) -> Result<Pushed, Failure> {
        Err(Failure::new(Kind::Full, "no room"))
    }

    async fn pull_into(&self, _: Pull, take: &mut Take<'_>) -> Result<Version, Failure> {
        let less = |left: u64| left.checked_sub(1);
        if self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            std::future::pending::<()>().await;
        }
        take(ChunkId(0), WireType::F32, GivenValues::Host(&[0; 8]))?;
        Ok(Version(3))
    }
}

fn partitions(silent: u64, metrics: &Arc<Metrics>) -> Partitions {
    let ps: Arc<dyn Parameters> = Arc::new(Silent(silent.into()));
    let connector = Connector::embedded(BTreeMap::from([(URL.to_owned(), ps)]));
    let layout = Layout::new(vec![TensorSpec::parameter("w", [2])], 1).unwrap();
    let address = pb::PartitionAddress { ps: "ps-0".to_owned(), url: URL.to_owned() };
    let limits =
        LimitsSpec { pull_timeout: Duration::from_secs(10), pull_attempts_max: 3, ..LimitsSpec::default() };
    let made = Partitions::new(&connector, JobId(1), Arc::new(layout), &[address], limits, 7);
    made.unwrap().counting(metrics.clone())
}

// S0-07, S0-08
// Time that is paused moves on when nothing else can happen.
#[tokio::test(start_paused = true)]
async fn a_pull_that_fails_is_named_counted_and_repeated() {
    let metrics = Arc::<Metrics>::default();
    let partitions = partitions(1, &metrics);
    assert!(partitions.pull(Want::Exact(Version(3))).await.unwrap().is_some());
    assert_eq!(metrics.pull_failures.get(), 1);
    assert_eq!(
        Repeated::Pull.warning(&partitions.partitions[0].name, Duration::from_secs(30)),
        "PULL_FAILED: pull from partition 0 on ps `ps-0` at http://ps-0:1: trying again for 30s"
    );
}

// S0-09
#[tokio::test(start_paused = true)]
async fn pulls_that_fail_for_too_long_end_with_the_partition() {
    let (metrics, begin) = (Arc::<Metrics>::default(), Instant::now());
    let error = partitions(u64::MAX, &metrics).pull(Want::Exact(Version(3))).await.unwrap_err();
    assert!(error.to_string().contains("pull from partition 0 on ps `ps-0`"), "{error}");
    // Each attempt takes two time-outs at most, and 30 s are not over after the first one.
    assert_eq!(metrics.pull_failures.get(), 2);
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_full_ps_is_no_failure() {
    let metrics = Arc::<Metrics>::default();
    let partitions = partitions(0, &metrics);
    let push = partitions.push(Target::Initial, vec![Values::F32(vec![0.0; 2])]);
    tokio::time::timeout(Duration::from_secs(600), push).await.unwrap_err();
    assert_eq!(metrics.push_failures.get(), 0);
}

/// A ps that counts the chunks of pushes that come.
struct Counting(AtomicU64);

#[async_trait::async_trait]
impl Parameters for Counting {
    async fn push(&self, _: Push) -> Result<Pushed, Failure> {
        Err(Failure::new(Kind::Internal, "only what comes is taken"))
    }

    async fn push_coming(&self, _: Push, mut coming: ComingChunks) -> Result<Pushed, Failure> {
        while let Some(chunks) = coming.next().await {
            self.0.fetch_add(chunks?.len() as u64, Ordering::Relaxed);
        }
        Ok(Pushed { outcome: Outcome::Merged, version: Version(0) })
    }

    async fn pull_into(&self, _: Pull, _: &mut Take<'_>) -> Result<Version, Failure> {
        Err(Failure::new(Kind::Internal, "nobody pulls"))
    }
}

#[tokio::test]
async fn each_partition_lacks_its_last_chunk_until_the_sum_is_whole() {
    let ps = [(); 3].map(|()| Arc::new(Counting(AtomicU64::new(0))));
    let url = |at: usize| format!("http://ps-{at}:1");
    let carriers = ps.iter().enumerate().map(|(at, ps)| (url(at), ps.clone() as Arc<dyn Parameters>));
    let connector = Connector::embedded(carriers.collect());
    // The third partition has no chunk.
    let tensors = ["a", "b"].map(|name| TensorSpec::parameter(name, [CHUNK_LEN]));
    let layout = Layout::new(vec![tensors[0].clone(), tensors[1].clone()], 3).unwrap();
    assert_eq!([0, 1, 2].map(|at| layout.members(PartitionId(at)).len()), [1, 1, 0]);
    let address = |at| pb::PartitionAddress { ps: format!("ps-{at}"), url: url(at) };
    let addresses = [0, 1, 2].map(address);
    let limits = LimitsSpec::default();
    let client = Partitions::new(&connector, JobId(1), Arc::new(layout), &addresses, limits, 7).unwrap();
    let came = || ps.each_ref().map(|ps| ps.0.load(Ordering::Relaxed));
    let (maker, sum) = ComingSum::new();
    let mut push = Box::pin(client.push_coming(Target::Initial, &sum));
    for tensor in [1, 0] {
        maker.tell(tensor, Values::F32(vec![0.0; CHUNK_LEN]));
        assert!((&mut push).now_or_never().is_none());
        assert_eq!(came(), [0; 3], "all values are told, and may not count");
    }
    maker.finish();
    let error = push.await.unwrap_err().to_string();
    assert_eq!(came(), [1, 1, 0]);
    assert!(error.contains("partition 2") && error.contains("only what comes is taken"), "{error}");
}

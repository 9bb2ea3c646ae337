//! Cost of the data plane, against raw TCP and memcpy in the same run.
//!
//! A worker and a ps run in two processes of one host. Each round takes every figure once, so that
//! the ratio of a row compares adjacent measurements.
//!
//! - *Pull*: 64 MiB from the ps's weights into the worker's tensors.
//! - *Push*: from the worker's tensors until the ps has acknowledged. Without an optimizer it is
//!   the mean of two pushes of a step, of which the second is added to the first.
//! - *Lent*: gradients in memory that the ps may read, as those of a TorchScript module.
//! - *Raw TCP*: a blocking write of 64 MiB, one reader into one buffer, an answer of one byte; same
//!   congestion control.
//! - *Raw ping-pong*: a blocking write and a blocking read of a request's bytes. Both ends have a
//!   core of their own, or share one, because the choice of the scheduler differs from run to run.
//! - *Embedded*: the worker's calls without a socket.
//! - *bf16*: the same 64 MiB of f32 in memory, of which half as many bytes travel.
//!
//! Expected: the bytes cross the kernel once in (copy) and once out (copy), each bound by memory,
//! so raw TCP is at most half of what two threads copy. Pull and push add one pass each on the
//! receiver's side (into the tensors; into the sum for every second push), from memory that the
//! socket was just read into. Adam moves 28 bytes for each weight (448 MiB), which two threads do
//! at the speed of memory.
//!
//! `cargo bench --no-default-features --bench data_plane` takes a minute.
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

mod exchange;
mod peer;
#[path = "../support/report.rs"]
mod report;
mod requests;
mod served;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use exchange::{Case, Exchange};
use kernels::Device;
use net::channel::Dialer;
use net::memory::{Memory, Regions};
use proto::parameters::Parameters;
use proto::wire::WireType;
use report::{Figure, Target as Goal, median};
use requests::Requests;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use served::Served;
use tokio::runtime::Runtime;
use worker::exchange::Connector;

/// Allocator of `ebb`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BYTES: usize = 64 << 20;
/// The exchange without an optimizer.
const SUMS: Case = Case { optimizer: "sgd", tensors: 1, wire: WireType::F32, bytes: BYTES };
/// The exchange without an optimizer, in 16 bits.
const NARROW: Case = Case { wire: WireType::Bf16, ..SUMS };
/// The exchange in which each push is a step of Adam.
const ADAM: Case = Case { optimizer: "adam", ..SUMS };
/// The exchange with Adam and a model of many small tensors.
const TINY: Case = Case { tensors: 10_000, ..ADAM };
/// Small requests of one sample.
const REQUESTS: usize = 96;

fn main() -> ExitCode {
    ebbflow::allocator::keep_free_memory(u64::MAX);
    match std::env::args().nth(1).as_deref() {
        Some("serve-sums") => SUMS.serve(Device::default()),
        Some("serve-narrow") => NARROW.serve(Device::default()),
        Some("serve-adam") => ADAM.serve(Device::default()),
        Some("serve-tiny") => TINY.serve(Device::default()),
        Some("serve-requests") => requests::serve(),
        Some("serve-raw") => peer::serve(BYTES),
        _ => {
            let full = std::env::args().any(|arg| arg == "--bench");
            let rounds = if full { 31 } else { 2 };
            let mut figures = bulk(rounds);
            figures.extend(small(rounds));
            figures.extend(steps(if full { 11 } else { 1 }));
            report::print(&figures);
            if full {
                report::write(
                    &figures,
                    &Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench/data_plane.json"),
                );
            }
            ExitCode::SUCCESS
        }
    }
}

/// Returns a runtime like that of `ebb worker`.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn raw() -> (peer::Client, Served) {
    let served = Served::start(["serve-raw"]);
    (peer::Client::connect(&served.address, BYTES).expect("the raw peer answers"), served)
}

/// Returns the seconds of a copy of `from` by `threads` threads.
fn copy(from: &[u8], to: &mut [u8], threads: usize) -> f64 {
    let part = from.len().div_ceil(threads);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let mut parts = from.chunks(part).zip(to.chunks_mut(part));
        let first = parts.next();
        parts.for_each(|(from, to)| drop(scope.spawn(|| to.copy_from_slice(std::hint::black_box(from)))));
        first.into_iter().for_each(|(from, to)| to.copy_from_slice(std::hint::black_box(from)));
    });
    std::hint::black_box(to);
    begin.elapsed().as_secs_f64()
}

/// Measures a model of 64 MiB.
fn bulk(rounds: usize) -> Vec<Figure> {
    let runtime = runtime();
    let [ps, nearby, sharing] = [(); 3].map(|()| Served::start(["serve-sums"]));
    let mut raw = raw();
    let mut remote = Exchange::new(SUMS, &Connector::socket(Dialer::tcp()), &ps.url(), &runtime);
    let mut unix = Exchange::new(SUMS, &Connector::socket(Dialer::nearest()), &nearby.url(), &runtime);
    let halved = Served::start(["serve-narrow"]);
    let mut narrow = Exchange::new(NARROW, &Connector::socket(Dialer::tcp()), &halved.url(), &runtime);
    let memory = Memory::new().expect("Linux has shared memory");
    let connector = Connector::shared_memory(Dialer::nearest(), memory.clone(), Arc::default());
    let mut shared = Exchange::new(SUMS, &connector, &sharing.url(), &runtime);
    let reading = Served::start(["serve-sums"]);
    let mut lent = Exchange::new(SUMS, &connector, &reading.url(), &runtime).lending(Regions::new(memory));
    let embedded: Arc<dyn Parameters> = Arc::new(SUMS.partition(Device::default(), None));
    let url = "http://embedded";
    let connector = Connector::embedded(BTreeMap::from([(url.to_owned(), embedded)]));
    let mut local = Exchange::new(SUMS, &connector, url, &runtime);
    let mut memory = (vec![1_u8; BYTES], vec![2_u8; BYTES]);
    let mut rows: [Vec<f64>; 14] = Default::default();
    // The first round warms up.
    for round in 0..=rounds {
        let raw_pull = raw.0.pull().expect("raw TCP");
        let pull = remote.pull(&runtime);
        let raw_push = raw.0.push().expect("raw TCP");
        let push = remote.push(&runtime);
        let memcpy = copy(&memory.0, &mut memory.1, 1);
        let taken = [
            BYTES as f64 / raw_pull / f64::from(1 << 30),
            BYTES as f64 / memcpy / f64::from(1 << 30),
            raw_pull / pull,
            raw_push / push,
            raw_pull / unix.pull(&runtime),
            raw_push / unix.push(&runtime),
            raw_pull / shared.pull(&runtime),
            raw_push / shared.push(&runtime),
            raw_push / lent.push(&runtime),
            raw_pull / local.pull(&runtime),
            memcpy / local.pull(&runtime),
            memcpy / local.push(&runtime),
            raw_pull / narrow.pull(&runtime),
            raw_push / narrow.push(&runtime),
        ];
        if round > 0 {
            rows.iter_mut().zip(taken).for_each(|(row, one)| row.push(one));
        }
    }
    let [
        raw,
        memcpy,
        pull,
        push,
        unix_pull,
        unix_push,
        shared_pull,
        shared_push,
        lent_push,
        local_tcp,
        local_pull,
        local_push,
        narrow_pull,
        narrow_push,
    ] = rows;
    vec![
        Figure::new("raw TCP, 64 MiB from memory to memory", "GiB/s", raw, 0.0, None),
        Figure::new("memcpy, 64 MiB", "GiB/s", memcpy, 0.0, None),
        Figure::new("pull over gRPC/TCP, of raw TCP", "ratio", pull, 1.0, Some(Goal::AtLeast(0.95))),
        Figure::new("push over gRPC/TCP, of raw TCP", "ratio", push, 1.0, Some(Goal::AtLeast(0.95))),
        Figure::new("pull over a Unix socket, of raw TCP", "ratio", unix_pull, 0.0, None),
        Figure::new("push over a Unix socket, of raw TCP", "ratio", unix_push, 0.0, None),
        Figure::new("pull of bf16 over gRPC/TCP, of raw TCP with f32", "ratio", narrow_pull, 0.0, None),
        Figure::new("push of bf16 over gRPC/TCP, of raw TCP with f32", "ratio", narrow_push, 0.0, None),
        Figure::new("pull by shared memory, of raw TCP", "ratio", shared_pull, 0.0, Some(Goal::AtLeast(2.5))),
        Figure::new("push by shared memory, of raw TCP", "ratio", shared_push, 0.0, Some(Goal::AtLeast(2.5))),
        Figure::new(
            "push by shared memory, lent, of raw TCP",
            "ratio",
            lent_push,
            0.0,
            Some(Goal::AtLeast(2.5)),
        ),
        Figure::new("pull embedded, of raw TCP", "ratio", local_tcp, 0.0, None),
        Figure::new("pull embedded, of memcpy", "ratio", local_pull, 1.0, None),
        Figure::new("push embedded, of memcpy", "ratio", local_push, 1.0, Some(Goal::AtLeast(0.9))),
    ]
}

/// Measures small requests.
fn small(rounds: usize) -> Vec<Figure> {
    let runtime = runtime();
    let (served, mut raw) = (Served::start(["serve-requests"]), raw());
    let _entered = runtime.enter();
    let empty = [Dialer::tcp(), Dialer::nearest()].map(|dialer| Requests::new(&dialer, &served.address, 0));
    let rows_of = Requests::new(&Dialer::tcp(), &served.address, requests::UP);
    let last_core = std::thread::available_parallelism().map_or(0, |cores| cores.get() - 1);
    let mut rows: [Vec<f64>; 8] = Default::default();
    for round in 0..=rounds {
        let mut ping = |up, down| {
            median(&(0..REQUESTS).map(|_| raw.0.ping(up, down).expect("raw TCP")).collect::<Vec<_>>())
        };
        let calls = || [&empty[0], &empty[1]].map(|empty| median(&runtime.block_on(empty.each(REQUESTS))));
        let both = [raw.1.child.id(), served.child.id()];
        place(0, both);
        let (one_core, [tcp_on_one, unix_on_one]) = (ping(1, 1), calls());
        place(last_core.min(1), both);
        let (two_cores, [tcp, unix]) = (ping(1, 1), calls());
        let raw_rows = ping(requests::UP, requests::DOWN);
        let alone = median(&runtime.block_on(rows_of.each(REQUESTS)));
        let together = runtime.block_on(rows_of.together(REQUESTS, 32));
        let taken = [
            one_core * 1e6,
            two_cores * 1e6,
            raw_rows / alone,
            raw_rows / together,
            tcp_on_one / one_core,
            tcp / two_cores,
            unix_on_one * 1e6,
            unix * 1e6,
        ];
        if round > 0 {
            rows.iter_mut().zip(taken).for_each(|(row, one)| row.push(one));
        }
    }
    anywhere();
    let [ping_on_one, ping, alone, together, tcp_on_one, tcp, unix_on_one, unix] = rows;
    let (calls, ratio) = (Some(Goal::Below(1.5)), "ratio");
    vec![
        Figure::new("raw ping-pong of one byte, both ends on one core", "us", ping_on_one, 0.0, None),
        Figure::new("raw ping-pong of one byte, on two", "us", ping, 0.0, None),
        Figure::new("8 KiB up, 256 KiB down: of raw ping-pong", ratio, alone, 1.0, Some(Goal::AtLeast(0.55))),
        Figure::new("the same, 32 at once", ratio, together, 1.0, Some(Goal::AtLeast(1.1))),
        Figure::new("empty call over TCP, on one core, of raw ping-pong", ratio, tcp_on_one, 1.0, calls),
        Figure::new("empty call over TCP, on two, of raw ping-pong", ratio, tcp, 1.0, calls),
        Figure::new(
            "empty call over a Unix socket, on one core",
            "us",
            unix_on_one,
            0.0,
            Some(Goal::Below(40.0)),
        ),
        Figure::new("empty call over a Unix socket, on two", "us", unix, 0.0, Some(Goal::Below(40.0))),
    ]
}

/// Places this thread on core 0, and `others`, which have one thread each, on `core`.
fn place(core: usize, others: [u32; 2]) {
    let on = |core| {
        let mut cores = CpuSet::new();
        cores.set(core);
        cores
    };
    sched_setaffinity(None, &on(0)).expect("a thread may be placed");
    for other in others {
        let other = Pid::from_raw(other as i32);
        sched_setaffinity(other, &on(core)).expect("a child may be placed");
    }
}

/// Lets the scheduler place this thread.
fn anywhere() {
    let mut cores = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|core| cores.set(core));
    sched_setaffinity(None, &cores).expect("a thread may be placed");
}

/// Measures steps of Adam: each push is one.
fn steps(rounds: usize) -> Vec<Figure> {
    let runtime = runtime();
    let (one, many, mut raw) = (Served::start(["serve-adam"]), Served::start(["serve-tiny"]), raw());
    let connector = Connector::socket(Dialer::tcp());
    let mut exchange = Exchange::new(ADAM, &connector, &one.url(), &runtime);
    let mut tiny = Exchange::new(TINY, &connector, &many.url(), &runtime);
    let mut memory = (vec![1_u8; BYTES], vec![2_u8; BYTES]);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut rows: [Vec<f64>; 2] = Default::default();
    for round in 0..=rounds {
        let raw_push = raw.0.push().expect("raw TCP");
        let push = exchange.push(&runtime);
        // A copy moves 8 bytes for each weight, Adam 28.
        let bound = copy(&memory.0, &mut memory.1, threads) * 28.0 / 8.0;
        let step = push + exchange.pull(&runtime);
        let tiny_step = tiny.push(&runtime) + tiny.pull(&runtime);
        if round > 0 {
            let taken = [raw_push.max(bound) / push, step / tiny_step];
            rows.iter_mut().zip(taken).for_each(|(row, one)| row.push(one));
        }
    }
    let [push, tiny] = rows;
    // Weights, two slots, one gradient.
    let peak = vec![one.peak_bytes() / (4 * BYTES) as f64];
    vec![
        Figure::new(
            "push with Adam, of the slower of raw TCP and memory",
            "ratio",
            push,
            1.0,
            Some(Goal::AtLeast(0.75)),
        ),
        Figure::new(
            "steps of 10,000 tensors, of those of one tensor",
            "ratio",
            tiny,
            1.0,
            Some(Goal::AtLeast(0.8)),
        ),
        Figure::new(
            "peak memory of that ps, of its weights, slots, gradient",
            "ratio",
            peak,
            1.0,
            Some(Goal::Below(1.25)),
        ),
    ]
}

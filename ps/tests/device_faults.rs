//! A call of the driver that fails, at each of its places in a short job: the same bits, or a
//! refusal, or a ps that ends with the reason and a job that goes on after a restart.

use std::path::Path;
use std::time::Duration;

use net::channel::Dialer;
use proto::ids::{PartitionId, Step, Version};
use proto::parameters::{Parameters, Want};
use proto::tree::Node;
use ps::{Device, Options, Ps};
use serde_json::json;
use store::Stores;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::fake::Driver;
use self::harness::{Job, Shape};

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/fake.rs"]
mod fake;
#[allow(dead_code, reason = "shared with the tests of one ps")]
#[path = "integration/harness.rs"]
mod harness;
#[allow(unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/library.rs"]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

const PARTITION: PartitionId = PartitionId(0);
/// Errors of the driver. After the second one the device refuses everything.
const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;

/// What became of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// It has the bits of the reference.
    Same,
    /// The device, the ps or the partition was refused.
    Refused(String),
    /// The ps ended.
    Ended(String),
}

/// The harness starts no ps here.
fn device() -> Device {
    Device::default()
}

/// Two steps with sums, norms, and every kind of tensor.
fn job() -> Job {
    let optimizer = json!({ "kind": "lamb", "learning_rate": 0.01 });
    Job::new(Shape { epochs: 1, optimizer, ..Shape::default() })
}

/// Trains a job on a new device and a new ps.
async fn trained(job: &Job, cache: &Path) -> Outcome {
    let device = match Device::cuda(0, Some(cache)) {
        Ok(device) => device,
        Err(error) => return Outcome::Refused(error.to_string()),
    };
    // Nobody answers there.
    let master = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("an address"));
    let options = Options { master: url(&master), url: url(&listener), threads: 1, ..Options::default() };
    let ps = match Ps::on(device, options, Stores::default(), None) {
        Ok(ps) => ps,
        Err(error) => return Outcome::Refused(error.to_string()),
    };
    let stop = CancellationToken::new();
    let running =
        tokio::spawn(ps::run(ps.clone(), net::channel::accept(listener), Dialer::tcp(), stop.clone()));
    let pushed = push_and_pull(&ps, job).await;
    if let Ok(None) = pushed {
        stop.cancel();
        running.await.expect("no panic").expect("a ps that works ends in good order");
        return Outcome::Same;
    }
    if let Ok(Some(refused)) = pushed {
        stop.cancel();
        // A device that failed meanwhile is a reason too.
        let _ = running.await.expect("no panic");
        return Outcome::Refused(refused);
    }
    let ended = tokio::time::timeout(Duration::from_secs(120), running).await.expect("it ends");
    Outcome::Ended(ended.expect("no panic").expect_err("the device's failure").to_string())
}

/// Pushes all steps and compares each version. Returns why the partition was refused, or an error
/// if something else was.
async fn push_and_pull(ps: &Ps, job: &Job) -> Result<Option<String>, proto::status::Failure> {
    if let Err(refused) = ps.open(job.opening(PARTITION)) {
        return Ok(Some(refused.to_string()));
    }
    ps.push(job.push_initial(PARTITION)).await?;
    let reference = job.reference(Version(job.plan.steps()));
    for step in (0..job.plan.steps()).map(Step) {
        let of = job.plan.of(step);
        // Every second one at first, so that sums wait.
        for leaf in (0..of).step_by(2).chain((1..of).step_by(2)) {
            ps.push(job.push(PARTITION, step, Node::leaf(leaf))).await?;
        }
        let pulled = ps.pull(job.pull(PARTITION, Want::Exact(step.produces()))).await?;
        job.assert_pulled(PARTITION, &pulled, &reference[step.produces().get() as usize]);
    }
    Ok(None)
}

/// One test, because it changes the driver of this process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_fails_changes_no_bit_and_is_named() {
    library::load_nvrtc();
    let driver = Driver::load();
    let cache = tempfile::tempdir().expect("a folder");
    match Device::cuda(0, Some(cache.path())) {
        Ok(_) => {}
        Err(kernels::Error::NoCompiler) => {
            return skip::skipped(skip::Lacks::Package, "no NVRTC: no ps used a device");
        }
        Err(error) => panic!("{error}"),
    }
    let job = job();
    let none = c"";
    for (function, error, times) in [
        (c"cuMemAllocAsync", OUT_OF_MEMORY, 1),
        (c"cuMemAllocAsync", OUT_OF_MEMORY, 2),
        (c"cuMemHostAlloc", OUT_OF_MEMORY, 1_000),
        (c"cuEventCreate", OUT_OF_MEMORY, 1),
        (c"cuMemAllocAsync", ILLEGAL_ADDRESS, 1),
        (c"cuMemcpyHtoDAsync_v2", ILLEGAL_ADDRESS, 1),
        (c"cuMemcpyDtoHAsync_v2", ILLEGAL_ADDRESS, 1),
        (c"cuMemsetD8Async", ILLEGAL_ADDRESS, 1),
        (c"cuLaunchKernel", ILLEGAL_ADDRESS, 1),
        (c"cuStreamSynchronize", ILLEGAL_ADDRESS, 1),
        (c"cuMemFreeAsync", ILLEGAL_ADDRESS, 1),
    ] {
        driver.fail(none, 0, 0, 0);
        assert_eq!(trained(&job, cache.path()).await, Outcome::Same, "nothing fails");
        let calls = driver.calls(function);
        assert!(calls > 0, "{function:?} is called");
        let mut counts = [0; 3];
        for call in 0..calls {
            driver.fail(function, call, times, error);
            driver.mutate(fake::Mutation::Nothing, 0);
            let what = format!("{function:?} {call} of {calls}, {times} times, error {error}");
            let outcome = trained(&job, cache.path()).await;
            assert_eq!(driver.harm(), None, "{what}: {outcome:?}");
            let place = match &outcome {
                Outcome::Same => 0,
                Outcome::Refused(reason) => {
                    assert!(reason.contains("CUDA device 0 "), "{what}: {reason}");
                    1
                }
                Outcome::Ended(reason) => {
                    let says = "the device of this ps failed, and its partitions are lost: CUDA device 0 ";
                    assert!(reason.starts_with(says), "{what}: {reason}");
                    2
                }
            };
            counts[place] += 1;
            if (error, times) == (OUT_OF_MEMORY, 1) && function == c"cuMemAllocAsync" {
                assert_eq!(outcome, Outcome::Same, "{what}: operations that ended give their memory back");
            }
            if outcome != Outcome::Same {
                driver.fail(none, 0, 0, 0);
                assert_eq!(trained(&job, cache.path()).await, Outcome::Same, "{what}: after a restart");
            }
        }
        println!("{function:?}, {times} times, error {error}: same, refused, ended: {counts:?}");
    }
}

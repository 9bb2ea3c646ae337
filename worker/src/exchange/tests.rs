//! Calls that fail are counted, named and bounded in time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::ids::Version;
use proto::parameters::{GivenValues, Pushed, Take};
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

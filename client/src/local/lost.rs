//! A worker whose device is lost: a cluster in this process goes on with the other workers, and
//! fails when none is left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use data::Batch;
use model::{Evaluation, Gradients, Model};

use super::*;
use crate::fake::job_file;
use crate::{Followed, JobState, Submission};

const JOB: &str = r#"
name = "lost"
epochs = 2
model = { builtin = "lossy" }
data = { format = "csv", header = false, train = { features = ["x.csv"] } }
batch = { micro = 1, effective = 4 }
optimizer = { kind = "sgd", learning_rate = 0.1 }
"#;

/// `softmax` on a device that is lost in the first gradient, for so many models.
struct Lossy {
    inner: Box<dyn Model>,
    left: Arc<AtomicU32>,
    lost: bool,
}

impl Model for Lossy {
    fn tensors(&self) -> Vec<proto::tensor::TensorSpec> {
        self.inner.tensors()
    }

    fn initial(&mut self, seed: u64) -> model::Result<Vec<proto::tensor::Values>> {
        self.inner.initial(seed)
    }

    fn load(&mut self, weights: &[proto::tensor::Values]) -> model::Result<()> {
        self.inner.load(weights)
    }

    fn gradients(&mut self, batch: &Batch, key: u64) -> model::Result<Gradients> {
        let take = |left: u32| left.checked_sub(1);
        // Key 0 is the trial of the worker that describes the model.
        if key != 0 && !self.lost {
            self.lost = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        }
        if self.lost {
            let reason = "CUDA error: uncorrectable ECC error encountered".to_owned();
            return Err(model::Error::Engine { what: "gradients".to_owned(), reason });
        }
        self.inner.gradients(batch, key)
    }

    fn evaluate(&mut self, batch: &Batch) -> model::Result<Evaluation> {
        self.inner.evaluate(batch)
    }
}

fn lossy(losses: u32) -> Registry {
    let (known, left) = (Registry::default(), Arc::new(AtomicU32::new(losses)));
    Registry::default().with("lossy", move |context| {
        let mut spec = (*context.spec).clone();
        spec.model.builtin = Some("softmax".to_owned());
        let inner = known.build(&model::Context { spec: Arc::new(spec), ..context.clone() })?;
        Ok(Box::new(Lossy { inner, left: left.clone(), lost: false }))
    })
}

/// Runs the job on two workers, of which so many lose their device. Returns the state of the job at
/// its end, or the failure of the cluster.
async fn run(losses: u32) -> std::result::Result<JobState, Error> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let lines: String = (0..24u32).map(|i| format!("{},{},{}\n", i % 5, i % 7, i % 3)).collect();
    std::fs::write(dir.path().join("x.csv"), lines).expect("a file");
    let submission = Submission::read(&job_file(dir.path(), JOB), &[]).expect("a good job");
    let options = Options { devices: vec![Device::Cpu; 2], ..Options::default() };
    let mut local = Local::start(options, Stores::default(), lossy(losses)).await.expect("a cluster");
    let client = local.client(Duration::from_secs(30));
    let training = async {
        let job = client.submit(submission).await.expect("a good job").name;
        let mut follow = client.follow(&job);
        loop {
            if let Followed::Ended(status) = follow.next().await.expect("an answer") {
                return status.state();
            }
        }
    };
    let ended = tokio::select! {
        state = training => Ok(state),
        error = local.failure() => Err(error),
    };
    local.stop().await;
    ended
}

#[tokio::test(flavor = "multi_thread")]
async fn the_others_go_on_when_one_worker_loses_its_device() {
    assert_eq!(run(1).await.expect("one worker is left"), JobState::Succeeded);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_whose_workers_all_lost_their_devices_fails_by_that_name() {
    let error = run(2).await.expect_err("no worker is left");
    assert!(error.is_device_lost() && error.to_string().contains("uncorrectable ECC error"), "{error}");
}

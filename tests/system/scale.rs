//! Users scale, pause and resume a job of real processes, one of which dies meanwhile. The bits
//! stay the same.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::{Duration, Instant};

use crate::harness::{Cluster, ebb, example, model, program, root, text};
use serde_json::Value;

/// Deadline of every wait, far longer than needed.
const PATIENCE: Duration = Duration::from_secs(120);

/// Settings of both runs. A microbatch takes at least 2 ms, so that no machine finishes before the
/// test does.
const SETTINGS: [&str; 10] = [
    "--set",
    "epochs=60",
    "--set",
    "consistency.mode=pipelined",
    "--set",
    "fleet.ps=1",
    "--set",
    "model.builtin=paced",
    "--set",
    r#"model.options={ of = "mlp", millis = 5, hidden = [128] }"#,
];

/// A job on a cluster, as its user sees it.
struct User {
    cluster: Cluster,
    job: String,
}

impl User {
    fn submit(cluster: Cluster, settings: &[&str]) -> Self {
        let mut user = Self { cluster, job: root().join("examples/digits/job.toml").display().to_string() };
        user.job = user.ask("submit", settings)["job"].as_str().unwrap().to_owned();
        user
    }

    /// Runs a command, which must succeed, and returns its facts.
    fn ask(&self, verb: &str, more: &[&str]) -> Value {
        let args = [verb, &self.job, "--json", "--master", &self.cluster.url];
        let output = ebb(args).args(more).output().unwrap();
        assert!(output.status.success(), "{verb}: {}", text(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Waits until the job is as wanted.
    fn until(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        #[expect(clippy::disallowed_methods, reason = "the deadline of a wait for real processes")]
        let begin = Instant::now();
        loop {
            let status = self.ask("status", &[]);
            if is_so(&status) {
                return status;
            }
            assert!(begin.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}; the job is {status}");
            let ended = ["succeeded", "failed", "cancelled"].iter().any(|end| status["status"] == *end);
            assert!(!ended, "ended before {what}: {status}");
        }
    }

    /// Lets a paused job train for a moment. The time of other requests costs it no steps, so that
    /// it never finishes before the test does.
    fn train_some(&self) {
        let before = self.ask("resume", &[])["steps_done"].as_u64();
        self.until("some training", |status| status["steps_done"].as_u64() > before);
        assert_eq!(self.ask("pause", &[])["status"], "paused");
    }
}

/// Returns how many workers take part and stand by.
fn workers(status: &Value) -> (u64, u64) {
    (status["workers"].as_u64().unwrap(), status["workers_standby"].as_u64().unwrap())
}

#[test]
fn scaled_paused_and_resumed_it_trains_the_same_bits() {
    let calm = tempfile::tempdir().unwrap();
    let calm_out = calm.path().join("out");
    let paced = example("oracle");
    let mut run = program(&paced, ["run", "--workers", "8", "--out"]);
    run.arg(&calm_out).arg(root().join("examples/digits/job.toml")).args(SETTINGS);
    let output = run.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));

    let settings = [&SETTINGS[..], &["--set", "fleet.workers.max=2"]].concat();
    let mut user = User::submit(Cluster::of(&paced, 1, 0), &settings);
    // Before there is a worker, so that nothing is done before the test has looked.
    assert_eq!(user.ask("pause", &[])["status"], "paused");
    user.cluster.add_worker();
    user.until("worker-0 takes part, as the first", |status| workers(status) == (1, 0));
    user.cluster.add_worker();
    user.cluster.add_worker();
    let status = user.until("two take part, one stands by", |status| workers(status) == (2, 1));
    assert_eq!((&status["workers_min"], &status["workers_max"]), (&1.into(), &2.into()));
    assert_eq!(status["steps_done"], 0);
    user.train_some();

    assert_eq!(workers(&user.ask("scale", &["--workers", "3"])), (3, 0));
    user.train_some();
    assert_eq!(workers(&user.ask("scale", &["--workers", "1"])), (1, 2));
    user.train_some();

    // The only worker that takes part dies while it trains.
    let before = user.ask("resume", &[])["steps_done"].as_u64();
    user.cluster.workers[0].signal("KILL");
    user.until("somebody takes over", |status| {
        let is_seen = status["workers_seen"].as_u64() >= Some(2);
        workers(status) == (1, 1) && status["steps_done"].as_u64() > before && is_seen
    });

    assert_eq!(workers(&user.ask("scale", &["--workers", "8"])), (2, 0));
    let watched = ebb(["watch", &user.job, "--master", &user.cluster.url]).output().unwrap();
    assert!(watched.status.success(), "{}", text(&watched));
    let said = text(&watched);
    // The progress names workers that stand by, and is printed only from time to time.
    for part in ["paused: a user paused it", "a user scaled the job to 3 workers"] {
        assert!(said.contains(part), "{part} missing in {said}");
    }
    let out = user.cluster.dir.path().join("out");
    user.ask("fetch", &["--out", &out.display().to_string()]);
    assert!(model(&out) == model(&calm_out), "other bits than an undisturbed run");

    let refused =
        ebb(["scale", &user.job, "--workers", "2", "--master", &user.cluster.url]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused).contains("cannot be scaled any more, it is succeeded"), "{}", text(&refused));
}

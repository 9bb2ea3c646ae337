//! What users see: jobs from submission to their files, and every way to end.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::pb;
use proto::pb::JobState;
use proto::pb::event::Kind as Event;
use proto::pb::lease::Work;
use proto::status::{Failure, Kind};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job, microbatches, soon};

/// Two quiet heartbeats: the worker has heard that the job stops.
async fn hear(worker: &mut Worker) {
    worker.beat(&[], false).await;
    worker.beat(&[], false).await;
}

#[tokio::test]
async fn a_job_runs_to_success_and_leaves_its_files() {
    let cluster = Cluster::start().await;
    let name = cluster.submit(&job(|spec| spec.fleet.ps = 2), &[]).await.expect("a good job");
    assert_eq!(name, "digits-1");
    assert_eq!(cluster.status("1").await.expect("a job").state(), JobState::Pending);
    let missing = cluster.fetch("digits-1").await.unwrap_err();
    assert!(missing.kind == Kind::NotFound && missing.message.contains("it is pending"), "{missing}");

    let ps = [FakePs::start(&cluster.url, "ps-0").await, FakePs::start(&cluster.url, "ps-1").await];
    for (number, ps) in ps.iter().enumerate() {
        ps.accounts.lock().expect("unpoisoned").version = 4 + number as u64;
    }
    let mut worker = Worker::join(&cluster, "a").await;
    worker.until_exported().await;
    assert_eq!(cluster.reach(&name, JobState::Succeeded).await, "trained 2 epochs");

    let status = cluster.status("digits").await.expect("a job");
    assert_eq!((status.steps, status.steps_done, status.samples_applied), (4, 4, 16));
    assert_eq!((status.duplicates_dropped, status.final_metrics["accuracy"]), (2, 0.5));
    assert_eq!(cluster.fetch(&name).await.expect("files")["model.safetensors"], b"weights");
    for (number, ps) in ps.iter().enumerate() {
        // Nobody waits for these two.
        ps.called("unpin 2 of job 1").await;
        ps.called("close job 1").await;
        let calls = ps.calls();
        assert_eq!(calls[0], format!("open {number} of job 1"));
        let last = calls.iter().filter(|call| !call.starts_with("unpin")).rev().take(2);
        assert!(last.eq(["close job 1", "ledger of job 1"]), "{calls:?}");
    }
    let list = cluster.jobs().list(pb::ListRequest::default()).await.expect("a list").into_inner().jobs;
    assert_eq!(list, [cluster.status("1").await.expect("a job")]);
}

#[tokio::test]
async fn all_calls_to_one_ps_share_a_connection() {
    let cluster = Cluster::start().await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    for _ in 0..2 {
        let name = cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
        worker.until_exported().await;
        cluster.reach(&name, JobState::Succeeded).await;
    }
    ps.called("close job 2").await;
    let calls = ps.calls();
    assert!(calls.len() > 6, "{calls:?}");
    assert_eq!(ps.accounts.lock().expect("unpoisoned").connections, 1);
}

#[tokio::test]
async fn events_are_numbered_replayed_and_end_with_the_job() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let name = cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let mut live = cluster.watch(&name, 0).await;
    let watching = tokio::spawn(async move {
        let mut events = Vec::new();
        while let Some(event) = live.message().await.expect("events") {
            events.push(event);
        }
        events
    });
    Worker::join(&cluster, "a").await.until_exported().await;
    let live = soon("the end of the events", watching).await.expect("no panic");
    let numbers: Vec<_> = live.iter().map(|event| event.sequence).collect();
    assert_eq!(numbers, (1..=live.len() as u64).collect::<Vec<_>>());
    assert_eq!(cluster.events(&name).await, live, "who watches later sees the same");
    let last = live.last().and_then(|event| event.kind.clone());
    assert!(matches!(last, Some(Event::State(state)) if state.state() == JobState::Succeeded));
    assert!(live.iter().all(|event| event.unix_ms > 1_700_000_000_000));
    for kind in ["Train", "Evaluation", "Fleet", "State"] {
        assert!(live.iter().any(|event| format!("{:?}", event.kind).contains(kind)), "{kind}");
    }
    let mut rest = cluster.watch(&name, live.len() as u64 - 1).await;
    assert_eq!(rest.message().await.expect("events"), live.last().cloned());
    assert_eq!(rest.message().await.expect("the end"), None);
}

#[tokio::test]
async fn two_jobs_run_one_after_the_other_and_share_who_is_idle() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut a = Worker::join(&cluster, "a").await;
    let spec = job(|spec| {
        spec.name = "first".to_owned();
        spec.batch.effective = Some(8);
    });
    cluster.submit(&spec, &[]).await.expect("a good job");
    let step = a.until_training().await;
    cluster.submit(&job(|spec| spec.name = "second".to_owned()), &[]).await.expect("a good job");
    // If the speed of `a` were known, `b` would get a copy of what `a` holds while the second job
    // has nothing for a moment.
    a.hand_back(&step, 8).await;
    let first = a.until_training().await;
    assert_eq!((step.job, microbatches(&step)), (1, (0, 8)));
    assert_eq!((first.job, microbatches(&first)), (1, (8, 8)));
    // All of the first job is handed out, so who asks next works on the second.
    let mut b = Worker::join(&cluster, "b").await;
    let second = b.lease().await;
    assert!(second.job == 2 && matches!(second.work, Some(Work::Index(_))), "{second:?}");
    b.do_task(&second).await;
    b.until_exported().await;
    cluster.reach("second", JobState::Succeeded).await;
    assert_eq!(cluster.status("first").await.expect("a job").state(), JobState::Running);
    a.do_task(&first).await;
    a.until_exported().await;
    cluster.reach("first", JobState::Succeeded).await;
}

#[tokio::test]
async fn what_fails_again_and_again_ends_the_job_with_the_message() {
    let cluster = Cluster::start().await;
    let mut worker = Worker::join(&cluster, "a").await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    for attempt in 1..=2 {
        let lease = worker.lease().await;
        assert_eq!(lease.attempt, attempt);
        worker.fail(&lease, "x.gz: no such file", false, None).await;
    }
    let reason = cluster.reach("digits", JobState::Failed).await;
    assert!(reason.ends_with("last error: worker `a`: x.gz: no such file"), "{reason}");
    let events = cluster.events("digits").await;
    let warned = |event: &pb::Event| matches!(&event.kind, Some(Event::Warning(warning)) if warning.message.contains("no such file"));
    assert_eq!(events.iter().filter(|event| warned(event)).count(), 2, "each attempt is told");
}

#[tokio::test]
async fn a_fatal_failure_ends_the_job_at_once() {
    let cluster = Cluster::start().await;
    let mut worker = Worker::join(&cluster, "a").await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let lease = worker.lease().await;
    worker.fail(&lease, "no network `softmax`", true, None).await;
    assert_eq!(cluster.reach("digits", JobState::Failed).await, "worker `a`: no network `softmax`");
}

#[tokio::test]
async fn a_diverged_job_fails_with_its_last_good_version_saved() {
    let cluster = Cluster::start().await;
    let mut worker = Worker::join(&cluster, "a").await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    ps.accounts.lock().expect("unpoisoned").version = 3;
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let lease = worker.until_training().await;
    worker.fail(&lease, "the loss of step 3 is NaN", true, Some(3)).await;
    hear(&mut worker).await;
    let export = worker.lease().await;
    // Step 3 was computed from version 3, which may be what is bad.
    assert_eq!(export.work, Some(Work::Export(pb::ExportTask { version: Some(2), era: 0 })));
    worker.do_task(&export).await;
    let reason = cluster.reach("digits", JobState::Failed).await;
    assert_eq!(reason, "worker `a`: the loss of step 3 is NaN");
    assert_eq!(cluster.fetch("digits").await.expect("files").len(), 1);
    ps.called("close job 1").await;
    assert_eq!(ps.calls().last().map(String::as_str), Some("close job 1"));
}

#[tokio::test]
async fn a_cancelled_job_saves_what_is_trained() {
    let cluster = Cluster::start().await;
    let mut worker = Worker::join(&cluster, "a").await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    ps.accounts.lock().expect("unpoisoned").version = 2;
    cluster.submit(&job(|spec| spec.epochs = 100), &[]).await.expect("a good job");
    let lease = worker.until_training().await;
    worker.do_task(&lease).await;
    let held = worker.until_training().await;
    let cancel = pb::CancelRequest { job: "digits".to_owned(), force: false };
    let status = cluster.jobs().cancel(cancel).await.expect("a job").into_inner();
    assert_eq!(status.state(), JobState::Exporting);
    assert_eq!(worker.beat(&[&held], false).await.leases_lost, [held.id]);
    hear(&mut worker).await;
    let export = worker.lease().await;
    assert_eq!(export.work, Some(Work::Export(pb::ExportTask { version: Some(2), era: 0 })));
    worker.do_task(&export).await;
    assert_eq!(cluster.reach("digits", JobState::Cancelled).await, "cancelled by a user");
    let status = cluster.status("digits").await.expect("a job");
    assert_eq!((status.steps_done, status.artifacts.len()), (2, 1));
}

#[tokio::test]
async fn a_forced_cancel_saves_nothing_and_waits_for_nobody() {
    let cluster = Cluster::start().await;
    let mut worker = Worker::join(&cluster, "a").await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    worker.until_training().await;
    let cancel = pb::CancelRequest { job: "1".to_owned(), force: true };
    cluster.jobs().cancel(cancel).await.expect("a job");
    cluster.reach("digits", JobState::Cancelled).await;
    ps.called("close job 1").await;
    assert_eq!(cluster.status("digits").await.expect("a job").artifacts, []);
}

#[tokio::test]
async fn a_step_is_shared_by_all_workers() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let (mut a, mut b) = (Worker::join(&cluster, "a").await, Worker::join(&cluster, "b").await);
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    assert_eq!(microbatches(&a.until_training().await), (0, 2));
    // One of them goes to `a` if `a` seems to be fast.
    let (first, count) = microbatches(&b.lease().await);
    assert!(first == 2 && (1..=2).contains(&count), "{first}, {count}");
}

#[tokio::test]
async fn files_and_specifications_that_cannot_be_are_refused() {
    let cluster = Cluster::with(|options| options.artifact_bytes_max = 10).await;
    let refuse = async |spec: &proto::spec::JobSpec, files: &[(&str, &[u8])], expected: &str| {
        let failure = cluster.submit(spec, files).await.unwrap_err();
        assert!(failure.kind == Kind::Malformed && failure.message.contains(expected), "{failure}");
    };
    let plain = job(|_| ());
    let script = job(|spec| {
        spec.model.script = Some("net.pt".to_owned());
        spec.model.builtin = None;
    });
    refuse(&plain, &[("../model.pt", b"x")], "plain file name").await;
    refuse(&plain, &[("a", b"12345678901")], "artifact_bytes_max").await;
    refuse(&script, &[], "no file `model.pt`").await;
    refuse(&script, &[("net.pt", b"x")], "no file `model.pt`").await;
    refuse(&job(|spec| spec.epochs = 0), &[], "epochs: 0").await;
    refuse(&job(|spec| spec.limits.lease = Duration::from_millis(1500)), &[], "two heartbeats").await;
    let empty = cluster.jobs().submit(tokio_stream::iter([])).await.unwrap_err();
    assert_eq!(Failure::from(empty).kind, Kind::Malformed);
    let list = cluster.jobs().list(pb::ListRequest::default()).await.expect("a list").into_inner();
    assert_eq!(list.jobs, [], "none of them became a job");
}

#[tokio::test]
async fn an_unknown_job_is_answered_with_those_that_exist() {
    let cluster = Cluster::start().await;
    let failure = cluster.status("digits").await.unwrap_err();
    assert!(failure.kind == Kind::NotFound && failure.message.contains("this master has none"), "{failure}");
    for _ in 0..2 {
        cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    }
    let failure = cluster.status("digit").await.unwrap_err();
    assert!(failure.message.contains("no job `digit`; there are digits-2, digits-1"), "{failure}");
    for (name, id) in [("1", 1), ("digits-1", 1), ("digits-2", 2), ("digits", 2)] {
        assert_eq!(cluster.status(name).await.expect("a job").job, id, "{name}");
    }
}

#[tokio::test]
async fn a_full_master_forgets_what_has_ended_and_refuses_when_nothing_has() {
    let cluster = Cluster::with(|options| options.jobs_max = 2).await;
    for _ in 0..2 {
        cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    }
    let full = cluster.submit(&job(|_| ()), &[]).await.unwrap_err();
    assert!(full.kind == Kind::Full && full.message.contains("jobs_max"), "{full}");
    let cancel = pb::CancelRequest { job: "1".to_owned(), force: false };
    cluster.jobs().cancel(cancel).await.expect("a job");
    assert_eq!(cluster.submit(&job(|_| ()), &[]).await.as_deref(), Ok("digits-3"));
    assert!(cluster.status("1").await.is_err());
}

#[tokio::test]
async fn health_answers_and_a_shutdown_ends_long_calls() {
    let warnings = Warnings::default();
    let _logging = tracing::subscriber::set_default(warnings.clone());
    let cluster = Cluster::start().await;
    HealthClient::new(cluster.channel()).check(HealthCheckRequest::default()).await.expect("healthy");
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let mut watch = cluster.watch("digits", 1).await;
    let (incarnation, mut fleet) = (worker.incarnation, worker.fleet.clone());
    let waiting =
        tokio::spawn(async move { fleet.lease(pb::LeaseRequest { incarnation, wait_ms: 60_000 }).await });
    worker.beat(&[], false).await;
    cluster.shutdown.cancel();
    let ended = soon("the end of a long call", waiting).await.expect("no panic");
    assert!(Failure::from(ended.unwrap_err()).is_retryable());
    let ended = soon("the end of the events", async {
        loop {
            match watch.message().await {
                Ok(event) => assert_ne!(event, None, "the job has not ended"),
                Err(status) => return Failure::from(status),
            }
        }
    });
    assert!(ended.await.is_retryable());
    soon("the end of the master", async {
        while !cluster.served.is_finished() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // It does not wait for idle connections until its patience ends, which it would say.
    let said = warnings.0.lock().expect("nobody panics").clone();
    assert!(!said.iter().any(|warning| warning.contains("still open")), "{said:?}");
}

/// Remembers the warnings of this thread.
#[derive(Clone, Debug, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = String::new();
        event.record(&mut |_: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            text += &format!("{value:?} ");
        });
        self.0.lock().expect("nobody panics").push(text);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

//! Checkpoints that a ps reports and the master must see: one store for all, and a manifest only of
//! what is there.

use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::checkpoint::AppliedSteps;
use proto::checkpoint::data::Partition;
use proto::ids::{PartitionId, Step, Version};
use proto::pb;
use proto::pb::event::Kind as Event;
use proto::pb::lease::Work;
use proto::pb::{HeartbeatRequest, JobState};
use proto::spec::JobSpec;
use proto::status::{Failure, Kind};

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job, soon};

/// Returns a job that saves each step to a folder, and keeps one checkpoint.
pub(crate) fn saving(folder: &Path) -> JobSpec {
    job(|spec| {
        let text = format!(r#"{{ "url": "{}", "every_steps": 1, "keep": 1 }}"#, folder.display());
        spec.checkpoint = Some(serde_json::from_str(&text).expect("a good section"));
    })
}

/// Returns a data file without any values, and how its ps reports it.
pub(crate) fn file(version: u64) -> (Vec<u8>, pb::SavedPartition) {
    let header = Partition {
        version: Version(version),
        partition: PartitionId(0),
        partitions: 1,
        applied: AppliedSteps { watermark: Step(version), ..AppliedSteps::default() },
        entries: Vec::new(),
    };
    let bytes = header.encode().to_vec();
    let saved = pb::SavedPartition {
        report: version,
        job: 1,
        version,
        file: "partition-0".to_owned(),
        bytes: bytes.len() as u64,
        crc32c: crc32c::crc32c(&bytes),
        watermark: version,
        ..Default::default()
    };
    (bytes, saved)
}

/// Returns the folder of a version.
pub(crate) fn place(folder: &Path, version: u64) -> PathBuf {
    folder.join(format!("digits/v{version:010}"))
}

/// Reports the file again and again, as a ps does, until the master has taken the report.
pub(crate) async fn report(ps: &FakePs, saved: pb::SavedPartition) {
    let mut replies = ps.session.replies();
    let number = saved.report;
    ps.session.report(|beat: &mut HeartbeatRequest| {
        beat.saved = vec![saved];
        true
    });
    // The next heartbeat is due in seconds.
    let taken = async {
        loop {
            let reply = replies.wait_for(|reply| reply.reports_taken == [number]);
            match tokio::time::timeout(Duration::from_millis(20), reply).await {
                Ok(taken) => break drop(taken.expect("open")),
                Err(_) => ps.session.report(|_| true),
            }
        }
    };
    soon("the report is taken", taken).await;
}

#[tokio::test]
async fn a_job_whose_ps_writes_elsewhere_fails_at_its_beginning_and_says_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = Cluster::start().await;
    let (near, far) = (FakePs::start(&cluster.url, "near").await, FakePs::start(&cluster.url, "far").await);
    far.accounts.lock().expect("unpoisoned").elsewhere = true;
    let mut worker = Worker::join(&cluster, "a").await;
    let mut spec = saving(folder.path());
    spec.fleet.ps = 2;
    cluster.submit(&spec, &[]).await.expect("a good job");
    let index = worker.lease().await;
    worker.do_task(&index).await;
    let init = worker.lease().await;
    assert!(matches!(init.work, Some(Work::Init(_))), "{init:?}");
    let tensors = vec![(&proto::tensor::TensorSpec::parameter("w", [3])).into()];
    let request = pb::DescribeRequest { incarnation: worker.incarnation, lease: init.id, tensors };
    let refused = Failure::from(worker.fleet.describe(request).await.unwrap_err());
    assert_eq!(refused.kind, Kind::Fenced, "{refused}");
    let reason = cluster.reach("digits", JobState::Failed).await;
    for part in ["ps `far` and the master do not see one store", "digits/probe-", "an object store"] {
        assert!(reason.contains(part), "{part} is missing: {reason}");
    }
    assert!(
        near.calls().iter().chain(&far.calls()).all(|call| !call.starts_with("open")),
        "{:?}",
        far.calls()
    );
    // An empty folder goes with its last file.
    let left = std::fs::read_dir(folder.path().join("digits")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "what the near one wrote is removed");
}

#[tokio::test]
async fn a_manifest_is_of_files_that_are_there_as_they_were_reported_and_only_then_others_go() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = Cluster::start().await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    let mut spec = JobSpec { epochs: 100, ..saving(folder.path()) };
    // Nothing waits for an epoch to be measured.
    spec.data.validation_fraction = None;
    cluster.submit(&spec, &[]).await.expect("a good job");
    worker.until_training().await;
    let (bytes, saved) = file(1);
    std::fs::create_dir_all(place(folder.path(), 1)).expect("a folder");
    std::fs::write(place(folder.path(), 1).join("partition-0"), &bytes).expect("written");
    report(&ps, saved).await;
    let checkpoint = async || cluster.status("digits").await.expect("a job").checkpoint;
    assert_eq!(checkpoint().await, Some(1));

    let missing: fn(&[u8]) -> Option<Vec<u8>> = |_| None;
    for (version, spoil, what) in [
        (2, missing, "is missing"),
        (3, |bytes| Some(bytes[..bytes.len() - 1].to_vec()), "it was not written to its end"),
        (4, |bytes| Some([&bytes[..bytes.len() - 1], b"#"].concat()), "is damaged"),
    ] {
        let (bytes, saved) = file(version);
        std::fs::create_dir_all(place(folder.path(), version)).expect("a folder");
        if let Some(bytes) = spoil(&bytes) {
            std::fs::write(place(folder.path(), version).join("partition-0"), bytes).expect("written");
        }
        report(&ps, saved).await;
        assert_eq!(checkpoint().await, Some(1), "version {version}, whose file {what}");
        assert!(!place(folder.path(), version).join("manifest.json").exists());
        let mut events = cluster.watch("digits", 0).await;
        let warned = async {
            loop {
                let event = events.message().await.expect("events").expect("one more");
                if matches!(event.kind, Some(Event::Warning(warning)) if warning.message.contains(what)) {
                    break;
                }
            }
        };
        soon(what, warned).await;
    }
    assert!(place(folder.path(), 1).join("manifest.json").exists(), "the last one that can be restored");

    let (bytes, saved) = file(5);
    std::fs::create_dir_all(place(folder.path(), 5)).expect("a folder");
    std::fs::write(place(folder.path(), 5).join("partition-0"), &bytes).expect("written");
    report(&ps, saved).await;
    assert_eq!(checkpoint().await, Some(5));
    assert!(!place(folder.path(), 1).exists(), "now it may go");
}

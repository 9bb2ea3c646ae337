//! Checkpoints: what is cut, written and reported, and what comes back from it. The tests play the
//! master that writes manifests.

use std::sync::Arc;

use proto::checkpoint::manifest::{File, Manifest, digest, oldest};
use proto::checkpoint::{MANIFEST, folder};
use proto::ids::{Era, PartitionId, Step, Version};
use proto::loss_scale::LossScale;
use proto::parameters::{Outcome, Parameters, Restore, Want};
use proto::placement::{CHUNK_LEN, Layout};
use proto::status::{Failure, Kind};
use proto::tensor::TensorSpec;
use proto::tree::Node;
use ps::checkpoint::{Report, SaveFailed, Saved};
use ps::{Opening, Ps};
use serde_json::json;
use store::Stores;

use crate::faulty::Faulty;
use crate::harness::{self, Job, Shape, options, soon};

const URL: &str = "memory://ck";
const PARTITION: PartitionId = PartitionId(0);

fn every(steps: u64) -> serde_json::Value {
    json!({ "url": URL, "every_steps": steps })
}

/// Returns a job that saves, in an era.
fn job(era: u64, shape: Shape) -> Job {
    Job { era: Era(era), ..Job::new(shape) }
}

/// Returns a ps with all partitions of a job at version 0.
async fn started(job: &Job, stores: Stores) -> Ps {
    let ps = harness::ps_with(options(), stores).expect("as the test arranged");
    for partition in job.partitions() {
        ps.open(job.opening(partition)).expect("as the test arranged");
        ps.push(job.push_initial(partition)).await.expect("as the test arranged");
    }
    ps
}

/// Applies steps to all partitions.
async fn train(ps: &Ps, job: &Job, steps: impl Iterator<Item = u64>) {
    for step in steps.map(Step) {
        for partition in job.partitions() {
            let pushed = ps.push(job.push_step(partition, step)).await.expect("as the test arranged");
            assert_eq!(pushed.outcome, Outcome::Completed);
        }
    }
}

/// Returns the first `count` reports.
async fn reports(ps: &Ps, count: usize) -> Vec<Report> {
    let mut reports = ps.reports();
    let reported = soon(reports.wait_for(|reported| reported.reports().count() >= count))
        .await
        .expect("as the test arranged");
    reported.reports().cloned().collect()
}

async fn saved(ps: &Ps, count: usize) -> Vec<Saved> {
    let saved = |report| match report {
        Report::Saved(saved) => saved,
        Report::Failed(failed) => panic!("{failed:?}"),
    };
    reports(ps, count).await.into_iter().map(saved).collect()
}

/// What a master does when all partitions have reported.
async fn complete(stores: &Stores, job: &Job, version: u64, saved: &[Saved]) -> Restore {
    let version = Version(version);
    let mut of_version: Vec<_> = saved.iter().filter(|saved| saved.version == version).collect();
    of_version.sort_by_key(|saved| saved.place);
    assert_eq!(of_version.len(), job.layout.partitions());
    let file = |saved: &&Saved| File {
        name: saved.file.clone(),
        bytes: saved.bytes,
        crc32c: saved.crc32c,
        applied: saved.applied.clone(),
    };
    let consistency = job.spec.consistency.resolve();
    let manifest = Manifest {
        job: job.spec.name.clone(),
        run: "run".to_owned(),
        digest: digest(&job.spec),
        version,
        oldest: oldest(consistency.order, consistency.delay, version),
        era: job.era,
        order: consistency.order,
        plan: job.plan,
        tensors: job.layout.tensors().to_vec(),
        optimizer: job.spec.optimizer.kind,
        slots: job
            .spec
            .optimizer
            .validate()
            .expect("as the test arranged")
            .slot_names()
            .iter()
            .map(ToString::to_string)
            .collect(),
        files: of_version.iter().map(file).collect(),
        script: None,
        numerics: Vec::new(),
        trained_on: None,
        selection: None,
        created_unix_secs: 0,
    };
    let url = format!(
        "{}/{}",
        job.spec.checkpoint.as_ref().expect("as the test arranged").url,
        folder("test", version)
    );
    stores
        .open(&url)
        .expect("as the test arranged")
        .write(MANIFEST, manifest.encode().into())
        .await
        .expect("as the test arranged");
    Restore { url, version }
}

fn restoring(job: &Job, partition: PartitionId, restore: &Restore) -> Opening {
    Opening { restore: Some(restore.clone()), ..job.opening(partition) }
}

/// Opens all partitions of a job with a checkpoint and waits until each has it, or cannot.
async fn restore(ps: &Ps, job: &Job, restore: &Restore) -> Result<(), String> {
    for partition in job.partitions() {
        assert_eq!(ps.open(restoring(job, partition, restore)).expect("as the test arranged"), None);
    }
    let settled = async {
        loop {
            let ledger = ps.ledger(job.id).expect("as the test arranged");
            if let Some(error) = ledger.iter().find_map(|applied| applied.restore_error.clone()) {
                return Err(error);
            }
            if ledger.iter().all(|applied| applied.version.is_some()) {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
    };
    // Not with a paused clock's deadline, which would run out while this waits for threads.
    settled.await
}

async fn assert_version(ps: &Ps, job: &Job, reference: &[Vec<proto::tensor::Values>], version: u64) {
    for partition in job.partitions() {
        let pulled =
            ps.pull(job.pull(partition, Want::Exact(Version(version)))).await.expect("as the test arranged");
        job.assert_pulled(partition, &pulled, &reference[version as usize]);
    }
}

/// Returns a chunk for each, every role, and a name that is hard to take apart.
fn small() -> Vec<TensorSpec> {
    vec![
        TensorSpec::parameter("weight", [5, 3]),
        TensorSpec::state("mean/odd@name", [7]),
        TensorSpec::counter("batches", []),
        TensorSpec::parameter("bias", [3]),
    ]
}

/// Several chunks of one tensor, the last of them shorter.
fn large() -> Vec<TensorSpec> {
    vec![TensorSpec::parameter("weight", [CHUNK_LEN + 5]), TensorSpec::counter("batches", [])]
}

#[tokio::test]
async fn training_goes_on_from_a_checkpoint_as_if_nothing_had_happened_with_any_number_of_partitions() {
    for consistency in [json!({ "mode": "sync" }), json!({ "mode": "pipelined", "delay": 2 })] {
        for (before, after) in [(1, 1), (1, 3), (3, 1), (2, 3)] {
            let stores = Stores::default();
            let shape = |partitions| Shape {
                tensors: small(),
                partitions,
                consistency: consistency.clone(),
                checkpoint: every(3),
                optimizer: json!({
                    "kind": "adam",
                    "learning_rate": 0.01,
                    "groups": [{ "tensors": ["weight"], "weight_decay": 0.1, "betas": [0.5, 0.9] }],
                }),
                ..Shape::default()
            };
            let old = job(0, shape(before));
            let ps = started(&old, stores.clone()).await;
            train(&ps, &old, 0..4).await;
            let checkpoint = complete(&stores, &old, 3, &saved(&ps, before as usize).await).await;

            let new = job(1, shape(after));
            let ps = harness::ps_with(options(), stores).unwrap();
            restore(&ps, &new, &checkpoint).await.unwrap();
            let reference = new.reference(new.plan.final_version());
            let delay = consistency["delay"].as_u64().unwrap_or(0);
            for version in 3 - delay..=3 {
                assert_version(&ps, &new, &reference, version).await;
            }
            for applied in ps.ledger(new.id).unwrap() {
                assert_eq!((applied.version, applied.ledger.watermark()), (Some(Version(3)), Step(3)));
                assert_eq!(applied.ledger.samples_applied(), new.plan.samples_before(Step(3)));
            }
            let repeat = ps.push(new.push_step(PARTITION, Step(2))).await.unwrap();
            assert_eq!(repeat.outcome, Outcome::Duplicate);
            train(&ps, &new, 3..new.plan.steps()).await;
            assert_version(&ps, &new, &reference, new.plan.steps()).await;
        }
    }
}

#[tokio::test]
async fn a_loss_scale_and_the_steps_that_overflowed_come_back_from_a_checkpoint() {
    let stores = Stores::default();
    let shape = || Shape {
        tensors: [small(), vec![LossScale::tensor()]].concat(),
        checkpoint: every(3),
        // The first one is before the checkpoint. The rule does not count it afterwards.
        overflows: vec![1, 4],
        ..Shape::default()
    };
    let old = job(0, shape());
    let ps = started(&old, stores.clone()).await;
    train(&ps, &old, 0..4).await;
    let checkpoint = complete(&stores, &old, 3, &saved(&ps, 1).await).await;

    let new = job(1, shape());
    let ps = harness::ps_with(options(), stores).unwrap();
    restore(&ps, &new, &checkpoint).await.unwrap();
    let overflows = |ps: &Ps| ps.ledger(new.id).unwrap()[0].ledger.overflows();
    assert_eq!(overflows(&ps), 1);
    let reference = new.reference(new.plan.final_version());
    assert_version(&ps, &new, &reference, 3).await;
    train(&ps, &new, 3..new.plan.steps()).await;
    assert_version(&ps, &new, &reference, new.plan.steps()).await;
    assert_eq!(overflows(&ps), 2);
}

#[tokio::test]
async fn the_same_steps_give_the_same_files_whoever_pushed_them() {
    let mut files = Vec::new();
    for leaves in [false, true] {
        let store = Faulty::new();
        let job = job(0, Shape { partitions: 2, checkpoint: every(2), ..Shape::default() });
        let ps = started(&job, Stores::only(Arc::new(store.clone()))).await;
        if leaves {
            for step in (0..2).map(Step) {
                for partition in job.partitions() {
                    for leaf in (0..job.plan.of(step)).rev() {
                        ps.push(job.push(partition, step, Node::leaf(leaf))).await.unwrap();
                    }
                }
            }
        } else {
            train(&ps, &job, 0..2).await;
        }
        saved(&ps, 2).await;
        files.push(store.files().await);
    }
    assert_eq!(files[0].len(), 2);
    assert!(files[0] == files[1]);
}

#[tokio::test]
async fn in_arrival_order_each_partition_comes_back_with_its_own_ledger() {
    let stores = Stores::default();
    let shape = |partitions| Shape {
        partitions,
        consistency: json!({ "mode": "async" }),
        checkpoint: every(2),
        ..Shape::default()
    };
    let old = job(0, shape(2));
    let ps = started(&old, stores.clone()).await;
    for (partition, steps) in [(0, [4, 0]), (1, [0, 1])] {
        for step in steps.map(Step) {
            ps.push(old.push_step(PartitionId(partition), step)).await.unwrap();
        }
    }
    let checkpoint = complete(&stores, &old, 2, &saved(&ps, 2).await).await;
    let ps = harness::ps_with(options(), stores.clone()).unwrap();
    restore(&ps, &old, &checkpoint).await.unwrap();
    let ledgers: Vec<_> =
        ps.ledger(old.id).unwrap().iter().map(|applied| applied.ledger.applied_steps()).collect();
    assert_eq!(ledgers[0].watermark, Step(1));
    assert_eq!(ledgers[0].above.iter().collect::<Vec<_>>(), [&Step(4)]);
    assert_eq!((ledgers[1].watermark, ledgers[1].above.len()), (Step(2), 0));
    let outcome = async |partition, step| {
        ps.push(old.push_step(PartitionId(partition), Step(step))).await.unwrap().outcome
    };
    assert_eq!((outcome(0, 4).await, outcome(1, 4).await), (Outcome::Duplicate, Outcome::Completed));

    let ps = harness::ps_with(options(), stores).unwrap();
    let error = restore(&ps, &job(0, shape(1)), &checkpoint).await.unwrap_err();
    assert!(error.contains("restore it with fleet.ps = 2"), "{error}");
}

#[tokio::test]
async fn what_is_wrong_with_a_checkpoint_is_named_and_the_next_one_can_be_tried() {
    let store = Faulty::new();
    let stores = Stores::only(Arc::new(store.clone()));
    let shape = || Shape { tensors: small(), checkpoint: every(1), ..Shape::default() };
    let old = job(0, shape());
    let ps = started(&old, stores.clone()).await;
    train(&ps, &old, 0..1).await;
    let first = complete(&stores, &old, 1, &saved(&ps, 1).await).await;
    train(&ps, &old, 1..2).await;
    let both = saved(&ps, 2).await;
    let second = complete(&stores, &old, 2, &both).await;
    let data = format!("ck/test/v0000000002/{}", both[1].file);
    let manifest = "ck/test/v0000000002/manifest.json".to_owned();
    let flip = |at: usize| {
        move |mut bytes: Vec<u8>| {
            bytes[at] ^= 4;
            Some(bytes)
        }
    };
    type Change = Box<dyn FnOnce(Vec<u8>) -> Option<Vec<u8>>>;
    let at_end = both[1].bytes as usize - 1;
    let faults: Vec<(&str, Change, &str)> = vec![
        (&data, Box::new(|_| None), "is missing"),
        (&data, Box::new(|bytes| Some(bytes[..bytes.len() - 1].to_vec())), "it was not written to its end"),
        (&data, Box::new(|_| Some(Vec::new())), "has 0 bytes"),
        (&data, Box::new(flip(30)), "of its header, expected"),
        (&data, Box::new(flip(0)), "is damaged"),
        (&data, Box::new(flip(at_end)), "is damaged: checksum"),
        (&data, Box::new(flip(at_end / 2)), "is damaged: checksum"),
        (&manifest, Box::new(|_| None), "is missing"),
        (&manifest, Box::new(|bytes| Some(bytes[..9].to_vec())), "is damaged"),
        (&manifest, Box::new(flip(200)), "is damaged"),
        (&manifest, Box::new(|_| Some(br#"{"format":7}"#.to_vec())), "has format 7"),
    ];
    let good = store.files().await;
    for (file, change, expected) in faults {
        store.spoil(file, change).await;
        let spoilt = store.files().await;
        let new = job(1, shape());
        let ps = harness::ps_with(options(), stores.clone()).unwrap();
        let error = restore(&ps, &new, &second).await.unwrap_err();
        assert!(error.contains(expected) && error.contains("v0000000002/"), "{expected}: {error}");
        assert!(store.files().await == spoilt, "nothing is removed or mended");
        let pull = ps.pull(new.pull(PARTITION, Want::Exact(Version(2)))).await.unwrap_err();
        assert_eq!(pull.kind, Kind::NotYet);
        let push = ps.push(new.push_initial(PARTITION)).await.unwrap();
        assert_eq!(push.outcome, Outcome::Duplicate, "it is not to begin with version 0");
        // The same again says the same; an older one is loaded.
        assert_eq!(ps.open(restoring(&new, PARTITION, &second)).unwrap(), None);
        restore(&ps, &new, &first).await.unwrap();
        assert_version(&ps, &new, &new.reference(Version(1)), 1).await;
        for (path, bytes) in &good {
            drop(
                object_store::ObjectStoreExt::put(
                    &*store.memory,
                    &path.as_str().into(),
                    bytes.clone().into(),
                )
                .await,
            );
        }
    }
    let ps = harness::ps_with(options(), stores).unwrap();
    let other = job(1, Shape { tensors: small()[..3].to_vec(), ..shape() });
    let error = restore(&ps, &other, &second).await.unwrap_err();
    assert!(
        error.contains("is of another job: tensor: expected none, found Parameter `bias` [3]"),
        "{error}"
    );
}

#[tokio::test]
async fn a_partition_that_has_its_checkpoint_is_not_opened_with_another() {
    let stores = Stores::default();
    let job = job(0, Shape { checkpoint: every(1), ..Shape::default() });
    let ps = started(&job, stores.clone()).await;
    train(&ps, &job, 0..1).await;
    let checkpoint = complete(&stores, &job, 1, &saved(&ps, 1).await).await;
    let ps = harness::ps_with(options(), stores).unwrap();
    restore(&ps, &job, &checkpoint).await.unwrap();
    assert_eq!(ps.open(restoring(&job, PARTITION, &checkpoint)).unwrap(), Some(Version(1)));
    let other = Restore { version: Version(2), ..checkpoint };
    let failure = Failure::from(ps.open(restoring(&job, PARTITION, &other)).unwrap_err());
    assert!(failure.message.contains("open with another checkpoint;"), "{failure}");
}

#[tokio::test]
async fn in_arrival_order_a_partition_keeps_what_it_has_whatever_checkpoint_it_is_opened_with() {
    let stores = Stores::default();
    let consistency = json!({ "mode": "bounded" });
    let job = job(0, Shape { consistency, checkpoint: every(1), ..Shape::default() });
    let ps = started(&job, stores.clone()).await;
    train(&ps, &job, 0..1).await;
    let checkpoint = complete(&stores, &job, 1, &saved(&ps, 1).await).await;
    train(&ps, &job, 1..2).await;
    assert_eq!(ps.open(restoring(&job, PARTITION, &checkpoint)).unwrap(), Some(Version(2)));
    assert_eq!(ps.ledger(job.id).unwrap()[0].version, Some(Version(2)));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_for_a_while_is_tried_again() {
    let store = Faulty::new();
    let stores = Stores::only(Arc::new(store.clone()));
    let job = job(0, Shape { checkpoint: every(2), ..Shape::default() });
    let ps = started(&job, stores.clone()).await;
    store.fail_writes(3);
    train(&ps, &job, 0..2).await;
    let checkpoint = complete(&stores, &job, 2, &saved(&ps, 1).await).await;
    let ps = harness::ps_with(options(), stores).unwrap();
    store.fail_reads(3);
    ps.open(restoring(&job, PARTITION, &checkpoint)).unwrap();
    let pull = proto::parameters::Pull {
        wait: std::time::Duration::from_secs(60),
        ..job.pull(PARTITION, Want::Exact(Version(2)))
    };
    job.assert_pulled(PARTITION, &ps.pull(pull).await.unwrap(), &job.reference(Version(2))[2]);
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_is_reported_and_training_goes_on() {
    let store = Faulty::new();
    let job = job(0, Shape { checkpoint: every(2), ..Shape::default() });
    let ps = started(&job, Stores::only(Arc::new(store.clone()))).await;
    train(&ps, &job, 0..2).await;
    saved(&ps, 1).await;
    let before = store.files().await;
    store.fill_up();
    train(&ps, &job, 2..4).await;
    let Report::Failed(SaveFailed { version, message, .. }) = &reports(&ps, 2).await[1] else {
        panic!("reported as saved")
    };
    assert_eq!(*version, Version(4));
    assert!(message.contains("o space left on device") && message.contains("v0000000004"), "{message}");
    train(&ps, &job, 4..6).await;
    assert_version(&ps, &job, &job.reference(Version(6)), 6).await;
    assert!(store.files().await == before, "the one before is untouched, and no torn file is there");
}

#[tokio::test]
async fn while_one_is_written_training_goes_on_and_the_next_is_skipped() {
    let store = Faulty::new();
    let stores = Stores::only(Arc::new(store.clone()));
    let job = job(0, Shape { tensors: large(), checkpoint: every(1), ..Shape::default() });
    let ps = started(&job, stores.clone()).await;
    store.stand_still();
    train(&ps, &job, 0..4).await;
    let skipped: Vec<_> = reports(&ps, 3).await;
    for (report, expected) in skipped.iter().zip(2..) {
        let Report::Failed(SaveFailed { version, message, .. }) = report else { panic!("{report:?}") };
        assert_eq!(*version, Version(expected));
        assert!(message.contains("still being written"), "{message}");
    }
    store.go_on();
    let Report::Saved(first) = reports(&ps, 4).await.pop().unwrap() else { panic!("not saved") };
    // What was cut is what was written, whatever came after.
    let checkpoint = complete(&stores, &job, 1, &[first]).await;
    let ps = harness::ps_with(options(), stores).unwrap();
    let new = Job { era: Era(1), ..job };
    restore(&ps, &new, &checkpoint).await.unwrap();
    let reference = new.reference(Version(2));
    assert_version(&ps, &new, &reference, 1).await;
    train(&ps, &new, 1..2).await;
    assert_version(&ps, &new, &reference, 2).await;
}

#[tokio::test]
async fn a_version_that_is_asked_for_waits_while_another_is_written() {
    let store = Faulty::new();
    let job = job(0, Shape { checkpoint: every(2), ..Shape::default() });
    let ps = started(&job, Stores::only(Arc::new(store.clone()))).await;
    store.stand_still();
    train(&ps, &job, 0..3).await;
    assert!(ps.save(job.id, Version(3)).unwrap(), "it is here");
    train(&ps, &job, 3..4).await;
    let skipped = reports(&ps, 1).await;
    assert!(matches!(&skipped[0], Report::Failed(failed) if failed.version == Version(4)), "{skipped:?}");
    store.go_on();
    let versions: Vec<_> = reports(&ps, 3)
        .await
        .into_iter()
        .skip(1)
        .map(|report| match report {
            Report::Saved(saved) => saved.version,
            Report::Failed(failed) => panic!("{failed:?}"),
        })
        .collect();
    assert_eq!(versions, [Version(2), Version(3)]);
    train(&ps, &job, 4..6).await;
    assert!(matches!(reports(&ps, 4).await.pop(), Some(Report::Saved(saved)) if saved.version == Version(6)));
}

#[tokio::test]
async fn a_version_that_is_asked_for_is_saved_once_it_comes() {
    let job = job(0, Shape { checkpoint: json!({ "url": URL, "every_seconds": 60 }), ..Shape::default() });
    let ps = started(&job, Stores::default()).await;
    train(&ps, &job, 0..2).await;
    assert!(!ps.save(job.id, Version(1)).unwrap(), "it has passed");
    assert!(ps.save(job.id, Version(4)).unwrap());
    train(&ps, &job, 2..6).await;
    saved(&ps, 1).await;
    assert!(ps.save(job.id, Version(6)).unwrap(), "it is here, and nobody changes it");
    assert!(ps.save(job.id, Version(6)).unwrap(), "a repeat");
    let saved = saved(&ps, 2).await;
    assert_eq!(saved.iter().map(|saved| saved.version).collect::<Vec<_>>(), [Version(4), Version(6)]);
    let without = Job::new(Shape::default());
    let ps = started(&without, Stores::default()).await;
    assert_eq!(Failure::from(ps.save(without.id, Version(4)).unwrap_err()).kind, Kind::Malformed);
}

#[tokio::test]
async fn a_folder_on_disk_holds_a_checkpoint() {
    let disk = tempfile::tempdir().unwrap();
    let (stores, url) = (Stores::default(), disk.path().join("to be made").to_str().unwrap().to_owned());
    let job = job(
        0,
        Shape { tensors: large(), checkpoint: json!({ "url": url, "every_epochs": 1 }), ..Shape::default() },
    );
    let ps = started(&job, stores.clone()).await;
    train(&ps, &job, 0..2).await;
    let checkpoint = complete(&stores, &job, 2, &saved(&ps, 1).await).await;
    let new = Job { era: Era(1), ..job };
    let ps = harness::ps_with(options(), stores).unwrap();
    restore(&ps, &new, &checkpoint).await.unwrap();
    assert_version(&ps, &new, &new.reference(Version(2)), 2).await;
    assert_eq!(new.layout, Layout::new(large(), 1).unwrap());
}

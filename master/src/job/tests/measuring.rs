//! Jobs that only evaluate or predict.

use proto::pb::lease::Work as Wire;
use proto::spec::{DataSet, PredictSpec, Purpose};

use super::*;

fn evaluating() -> JobSpec {
    parse("").measuring(Purpose::Evaluate, "w".to_owned(), None).expect("a good job")
}

fn predicting(join_bytes_max: u64) -> JobSpec {
    let mut spec = parse("");
    spec.data.validation_fraction = None;
    let mut predict = PredictSpec::new(DataSet::Train, "/out/p.jsonl".to_owned());
    predict.join_bytes_max = join_bytes_max;
    spec.measuring(Purpose::Predict, "w".to_owned(), Some(predict)).expect("a good job")
}

/// Creates a job with so many records in its file, up to the moment when it hands out their work.
fn begun(spec: JobSpec, workers: usize, records: u64) -> World {
    let mut world = World::new(spec, workers, &["p"]);
    let lease = world.lease(0).expect("a file to index");
    let found = pb::Indexed {
        records,
        shape: vec![2],
        label_min: Some(0),
        label_max: Some(9),
        crc32c: Some(7),
        bytes: 80,
        ..Default::default()
    };
    world.complete(0, &lease, Report::Indexed(found));
    world.initialize();
    world
}

/// Returns the range of a lease to predict.
fn part(lease: &pb::Lease) -> (u64, u64) {
    match lease.work {
        Some(Wire::Predict(pb::PredictTask { begin, end, .. })) => (begin, end),
        ref other => panic!("{other:?}"),
    }
}

/// Worker 0 predicts all parts.
fn predict_all(world: &mut World) {
    while matches!(world.state(), JobState::Running) {
        let lease = world.lease(0).expect("a part");
        world.complete(0, &lease, report(&lease));
    }
}

fn finished(world: &mut World) -> pb::JobStatus {
    assert_eq!(world.effects(), [Effect::Finish(vec![address("p")])]);
    world.job.on_finished(world.now, Ok(vec![ledger(0)]));
    assert!(world.job.is_ended());
    world.status()
}

#[test]
fn a_job_that_evaluates_measures_version_0_once_and_ends() {
    let mut world = begun(evaluating(), 2, 10);
    assert_eq!(world.reason(), "workers evaluate");
    let lease = world.lease(0).expect("records to evaluate");
    let task = pb::EvaluateTask { epoch: 0, version: 0, era: 0, begin: 0, end: 2 };
    assert_eq!(lease.work, Some(Wire::Evaluate(task)));
    assert_eq!(world.refused(1), Why::AllHandedOut, "nothing is trained");
    world.effects();
    world.complete(0, &lease, report(&lease));
    assert_eq!(world.effects()[0], Effect::Unpin(vec![address("p")], Era(0), Version(0), None));
    world.job.on_finished(world.now, Ok(vec![ledger(0)]));
    let status = world.status();
    assert_eq!((status.state(), status.reason.as_str()), (JobState::Succeeded, "evaluated 2 records"));
    assert_eq!((status.records, status.records_done, status.purpose()), (2, 2, pb::JobPurpose::Evaluate));
    assert_eq!((status.steps, status.steps_done, status.samples_applied), (0, 0, 0));
    assert_eq!(status.final_metrics["loss"], 1.5);
    assert!(world.told().is_empty() && status.artifacts.is_empty());
}

/// Returns the report of an evaluation that lists a record of each of these numbers.
fn listing(lease: &pb::Lease, records: &[u64]) -> Report {
    let Report::Evaluated(found) = report(lease) else { panic!("expected an evaluation") };
    let loss = |(&record, at): (&u64, i32)| pb::RecordLoss {
        record,
        loss: 1.0 / f64::from(at),
        classes: vec![4],
        ..Default::default()
    };
    Report::Evaluated(pb::Evaluated { worst: records.iter().zip(1..).map(loss).collect(), ..found })
}

#[test]
fn the_worst_records_have_their_places_and_stay_known_when_the_master_starts_again() {
    let mut world = begun(parse("evaluation = { worst = 2 }"), 1, 10);
    while world.status().worst.is_empty() {
        let lease = world.lease(0).expect("work");
        if !matches!(lease.work, Some(Wire::Evaluate(_))) {
            world.complete(0, &lease, report(&lease));
            continue;
        }
        for (records, said) in [
            (&[][..], "expected 2 records (evaluation.worst), found 0"),
            (&[7, 10][..], "below 10, found 10"),
        ] {
            let (worker, id) = (world.workers[0], LeaseId(lease.id));
            let refused = world.job.complete(world.now, worker, id, listing(&lease, records));
            assert!(refused.unwrap_err().message.contains(said), "{records:?}");
        }
        world.complete(0, &lease, listing(&lease, &[7, 3]));
    }
    let worst = world.status().worst;
    let place = |worst: &pb::WorstRecord| {
        let found = worst.found.clone().expect("a record");
        (worst.file.clone(), worst.row, found.record, found.loss, found.classes)
    };
    let expected = [("x.gz".to_owned(), 7, 7, 1.0, vec![4]), ("x.gz".to_owned(), 3, 3, 0.5, vec![4])];
    assert_eq!(worst.iter().map(place).collect::<Vec<_>>(), expected);
    world.start_again();
    assert_eq!(world.status().worst, worst);
}

#[test]
fn an_evaluation_is_done_again_when_the_ps_lost_the_weights() {
    let mut world = begun(evaluating(), 1, 10);
    let lease = world.lease(0).expect("records to evaluate");
    world.restart("p");
    assert!(!world.job.holds(world.workers[0], LeaseId(lease.id)));
    let init = world.lease(0).expect("a model to initialize");
    world.describe(&init);
    world.complete(0, &init, Report::Initialized(pb::Initialized::default()));
    world.survey(&[0]);
    let lease = world.lease(0).expect("the same records");
    assert_eq!(
        lease.work,
        Some(Wire::Evaluate(pb::EvaluateTask { epoch: 0, version: 0, era: 1, begin: 0, end: 2 }))
    );
    world.complete(0, &lease, report(&lease));
    assert_eq!(world.reason(), "evaluated 2 records; the ps tell their numbers");
}

#[test]
fn a_job_that_predicts_joins_its_parts_and_then_removes_them() {
    let mut world = begun(predicting(1 << 30), 2, 600);
    assert_eq!(world.reason(), "workers predict");
    let [a, b] = [0, 1].map(|worker| world.lease(worker).expect("a part"));
    assert_eq!([part(&a), part(&b)], [(0, 256), (256, 512)]);
    // The holder of the second part dies: another worker predicts the same records.
    let gone = world.workers[1];
    world.job.worker_gone(world.now, gone);
    let again = world.lease(0).expect("the part of the dead worker");
    assert_eq!((part(&again), again.attempt), ((256, 512), 2));
    for lease in [a, again] {
        world.complete(0, &lease, report(&lease));
    }
    assert_eq!((world.status().records, world.status().records_done), (600, 512));
    let last = world.lease(0).expect("the last part");
    assert_eq!(part(&last), (512, 600));
    world.complete(0, &last, report(&last));
    assert_eq!(world.reason(), "predicted 600 records; a worker joins the predictions");

    world.effects();
    let join = world.lease(0).expect("the join");
    assert_eq!(join.work, Some(Wire::Join(pb::JoinTask { records: 600, keep: false })));
    assert_eq!(world.status().predictions, "");
    world.complete(0, &join, Report::Joined(pb::Joined { bytes: 30 }));
    // The parts are removed only when the journal has it.
    assert_eq!((world.effects(), world.lease(0)), (vec![Effect::Clear], None));
    world.job.clear(world.now);
    let clear = world.lease(0).expect("the parts to remove");
    assert_eq!(clear.work, Some(Wire::Clear(pb::ClearTask {})));
    world.complete(0, &clear, Report::Cleared(pb::Cleared { note: "one stays".to_owned() }));
    let status = finished(&mut world);
    assert_eq!((status.state(), status.reason.as_str()), (JobState::Succeeded, "predicted 600 records"));
    assert_eq!((status.predictions.as_str(), status.records_done), ("/out/p.jsonl", 600));
    assert!(
        world.events().iter().any(|event| matches!(event, Event::Warning(of) if of.message == "one stays"))
    );
}

#[test]
fn a_job_whose_parts_cannot_be_removed_has_succeeded_all_the_same() {
    for (fatal, times) in [(false, 2), (true, 1)] {
        let mut world = begun(predicting(1 << 30), 1, 256);
        predict_all(&mut world);
        let join = world.lease(0).expect("the join");
        world.complete(0, &join, Report::Joined(pb::Joined { bytes: 10 }));
        world.job.clear(world.now);
        world.effects();
        for _ in 0..times {
            let clear = world.lease(0).expect("the parts to remove");
            world.fail(0, &clear, fatal, None);
        }
        let status = finished(&mut world);
        assert_eq!((status.state(), status.reason.as_str()), (JobState::Succeeded, "predicted 256 records"));
        assert_eq!(status.predictions, "/out/p.jsonl");
        let warned = |part: &str| {
            let is_it = |event: &Event| matches!(event, Event::Warning(of) if of.message.contains(part));
            world.events().iter().any(is_it)
        };
        assert!(warned("boom") && warned("remove `p.jsonl.parts` beside them by hand"));
    }
}

#[test]
fn parts_beyond_the_limit_get_a_manifest_and_stay() {
    let mut world = begun(predicting(19), 1, 512);
    predict_all(&mut world);
    world.effects();
    let join = world.lease(0).expect("the manifest");
    assert_eq!(join.work, Some(Wire::Join(pb::JoinTask { records: 512, keep: true })));
    world.complete(0, &join, Report::Joined(pb::Joined { bytes: 20 }));
    assert_eq!(world.effects(), [Effect::Clear]);
    world.job.clear(world.now);
    let status = finished(&mut world);
    assert_eq!(status.predictions, "/out/p.jsonl.parts/manifest.json");
}

#[test]
fn what_is_done_when_the_master_dies_decides_what_is_done_again() {
    // Parts are predicted again, also when all of them were written.
    let mut world = begun(predicting(1 << 30), 1, 512);
    predict_all(&mut world);
    let join = world.lease(0).expect("the join");
    world.start_again();
    assert!(!world.job.holds(world.workers[0], LeaseId(join.id)));
    world.come_back("p", 0);
    world.survey(&[0]);
    assert_eq!(world.reason(), "workers predict");
    assert_eq!((world.status().records, world.status().records_done), (512, 0));
    predict_all(&mut world);
    let join = world.lease(0).expect("the join");
    world.complete(0, &join, Report::Joined(pb::Joined { bytes: 20 }));
    // Once they are joined they are only removed.
    world.start_again();
    world.come_back("p", 0);
    world.survey(&[0]);
    let clear = world.lease(0).expect("the parts to remove");
    assert_eq!(clear.work, Some(Wire::Clear(pb::ClearTask {})));
    assert_eq!(world.status().predictions, "/out/p.jsonl");
    world.complete(0, &clear, Report::Cleared(pb::Cleared::default()));
    assert_eq!(world.reason(), "predicted 512 records; the ps tell their numbers");
}

#[test]
fn a_part_that_cannot_be_predicted_fails_the_job_with_its_records() {
    let mut world = begun(predicting(1 << 30), 1, 600);
    for _ in 0..2 {
        let lease = world.lease(0).expect("the first part");
        world.fail(0, &lease, false, None);
    }
    assert!(world.reason().contains("records 0 to 255 cannot be predicted"), "{}", world.reason());
    assert!(world.status().predictions.is_empty());
}

#[test]
fn a_report_about_other_records_is_refused() {
    let mut world = begun(predicting(1 << 30), 1, 600);
    let lease = world.lease(0).expect("a part");
    let wrong = Report::Predicted(pb::Predicted { samples: 255, bytes: 1 });
    let refused = world.job.complete(world.now, world.workers[0], LeaseId(lease.id), wrong).unwrap_err();
    assert!(refused.message.contains("expected 256, found 255"), "{refused}");
    assert!(world.job.holds(world.workers[0], LeaseId(lease.id)));
}

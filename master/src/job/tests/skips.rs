//! Bad records that workers find: which are skipped, and when they are too many.

use proto::spec::{DataSet, OnError};

use super::*;

/// Returns a job that may skip this share of its 8 training and of its 2 validation records.
fn skipping(max_bad: f64) -> JobSpec {
    let mut spec = parse("");
    spec.data.on_error = OnError::Skip;
    spec.data.max_bad = Some(max_bad);
    spec
}

impl World {
    fn skip(
        &mut self,
        worker: usize,
        lease: &pb::Lease,
        set: pb::DataSet,
        records: &[u64],
    ) -> Result<(), Failure> {
        let bad = |&record: &u64| pb::BadRecord { record, reason: format!("record {record} is bad") };
        let (worker, lease) = (self.workers[worker], LeaseId(lease.id));
        let request = pb::SkipRequest {
            incarnation: worker.get(),
            lease: lease.get(),
            set: set.into(),
            records: records.iter().map(bad).collect(),
        };
        self.job.skip(self.now, worker, lease, request)
    }

    fn warnings(&self) -> Vec<String> {
        let text = |event| match event {
            Event::Warning(event) => Some(event.message),
            _ => None,
        };
        self.events().into_iter().filter_map(text).collect()
    }
}

#[test]
fn a_skipped_record_is_written_down_and_in_every_later_lease() {
    let mut world = World::training(skipping(0.5), 2);
    let lease = world.lease(0).expect("work");
    assert_eq!((lease.skipped, world.status().skipped), (0, None));
    let _ = world.job.take_record(world.now);
    world.skip(0, &lease, pb::DataSet::Train, &[7, 3]).expect("few");
    let record = world.job.take_record(world.now).expect("news");
    let written = record.skipped_train.clone().expect("two records");
    assert_eq!((written.records, written.reasons.len()), (vec![3, 7], 2));
    assert_eq!(record.skipped_validation, None);
    assert_eq!(world.job.reply(&Indexes::default()).skipped_train, [3, 7]);
    let of_status = world.status().skipped.expect("two records");
    assert_eq!((of_status.train, of_status.validation, of_status.records.len()), (2, 0, 2));
    assert_eq!((of_status.records[1].file.as_str(), of_status.records[1].record), ("x.gz", 7));
    assert_eq!(of_status.records[1].reason, "record 7 is bad");

    world.skip(0, &lease, pb::DataSet::Train, &[3]).expect("a repeat");
    assert_eq!(world.job.take_record(world.now), None, "a repeat is no news");
    world.complete(0, &lease, report(&lease));
    let next = world.lease(0).expect("work");
    assert_eq!(next.skipped, 2);
    let told = world.warnings();
    let told: Vec<_> = told.iter().filter(|message| message.contains("bad training")).collect();
    let expected = "bad training records are skipped, at most 4: `x.gz`, record 3: record 3 is bad";
    assert_eq!(told, [expected]);
}

#[test]
fn a_skipped_record_stays_skipped_over_a_restart_of_the_master() {
    let mut world = World::training(skipping(0.5), 1);
    let lease = world.lease(0).expect("work");
    world.skip(0, &lease, pb::DataSet::Train, &[7, 3]).expect("few");
    let before = world.status().skipped;
    world.start_again();
    world.come_back("p", 1);
    world.survey(&[1]);
    let lease = world.lease(0).expect("work");
    assert_eq!((world.status().skipped, lease.skipped), (before, 2));
    assert_eq!(world.job.reply(&Indexes::default()).skipped_train, [3, 7]);
    world.skip(0, &lease, pb::DataSet::Train, &[7, 1, 2]).expect("4 of 8");
    assert!(world.skip(0, &lease, pb::DataSet::Train, &[5]).is_err(), "5 of 8");
}

#[test]
fn more_bad_records_than_the_job_may_skip_are_its_end() {
    let mut world = World::training(skipping(0.25), 2);
    let (lease, other) = (world.lease(0).expect("work"), world.lease(1));
    world.skip(0, &lease, pb::DataSet::Train, &[9, 4]).expect("few");
    world.skip(0, &lease, pb::DataSet::Train, &[4]).expect("a record counts once");
    let refused = world.skip(0, &lease, pb::DataSet::Train, &[1]).unwrap_err();
    assert_eq!(refused.kind, Kind::Fenced);
    let expected = "3 of 8 training records are bad, at most 2 may be skipped (data.max_bad); `x.gz`, record 1: record 1 is bad; \
                    `x.gz`, record 4: record 4 is bad; `x.gz`, record 9: record 9 is bad; clean the data, or raise data.max_bad";
    assert_eq!(refused.message, expected);
    assert!(world.reason().starts_with(expected), "{}", world.reason());
    if let Some(other) = other {
        assert!(world.skip(1, &other, pb::DataSet::Train, &[2]).is_err());
    }
    assert!(world.reason().starts_with(expected), "{}", world.reason());
    assert!(!world.reason().contains("4 of 8"), "it is told once: {}", world.reason());
}

#[test]
fn what_makes_no_sense_is_not_skipped() {
    let mut world = World::training(skipping(1.0), 1);
    let lease = world.lease(0).expect("work");
    let kind = |world: &mut World, lease: &pb::Lease, set, records: &[u64]| {
        world.skip(0, lease, set, records).unwrap_err().kind
    };
    let foreign = pb::Lease { id: 999, ..lease.clone() };
    assert_eq!(kind(&mut world, &foreign, pb::DataSet::Train, &[1]), Kind::Fenced);
    assert_eq!(kind(&mut world, &lease, pb::DataSet::Train, &[10]), Kind::Malformed, "there are 10");
    assert_eq!(kind(&mut world, &lease, pb::DataSet::Train, &[]), Kind::Malformed);
    assert_eq!(kind(&mut world, &lease, pb::DataSet::Train, &[1; 1001]), Kind::Malformed);
    assert_eq!(kind(&mut world, &lease, pb::DataSet::Unspecified, &[1]), Kind::Malformed);
    assert_eq!(world.status().skipped, None);
    let mut world = World::training(parse(""), 1);
    let lease = world.lease(0).expect("work");
    assert_eq!(kind(&mut world, &lease, pb::DataSet::Train, &[1]), Kind::Malformed, "it skips nothing");
}

#[test]
fn skipped_records_are_not_among_the_applied_ones() {
    let mut world = World::training(skipping(0.5), 1);
    let lease = world.lease(0).expect("work");
    world.skip(0, &lease, pb::DataSet::Train, &[3]).expect("few");
    let Report::Trained(mut trained) = report(&lease) else { panic!("training") };
    trained.microbatches[2] = pb::MicrobatchReport { loss_sum: 0.0, samples: 0, skipped: 1 };
    let mut wrong = trained.clone();
    wrong.microbatches[1].skipped = 1;
    let (worker, id) = (world.workers[0], LeaseId(lease.id));
    let refused = world.job.complete(world.now, worker, id, Report::Trained(wrong)).unwrap_err();
    assert!(refused.message.contains("expected 1 with those skipped, or 0, found 1 and 1"), "{refused}");
    let count = trained.microbatches.len() as u64;
    world.complete(0, &lease, Report::Trained(trained));
    assert_eq!(world.status().samples_applied, count - 1);
    let next = world.lease(0).expect("work");
    world.complete(0, &next, report(&next));
    let samples = |event| match event {
        Event::Train(event) => Some(event.samples),
        _ => None,
    };
    let told: Vec<_> = world.events().into_iter().filter_map(samples).collect();
    assert_eq!(told[..2], [3, 4]);
}

#[test]
fn an_evaluation_counts_the_good_records() {
    let mut world = World::training(skipping(0.5), 1);
    let lease = loop {
        let lease = world.lease(0).expect("work");
        if matches!(lease.work, Some(pb::lease::Work::Evaluate(_))) {
            break lease;
        }
        world.complete(0, &lease, report(&lease));
    };
    let Report::Evaluated(mut found) = report(&lease) else { panic!("an evaluation") };
    assert_eq!(found.samples, 2);
    found.samples = 1;
    let (worker, id) = (world.workers[0], LeaseId(lease.id));
    let refused = world.job.complete(world.now, worker, id, Report::Evaluated(found.clone())).unwrap_err();
    assert!(refused.message.contains("Evaluated.samples: expected 2, found 1"), "{refused}");
    let records = world.job.spec.data.records(DataSet::Validation, &[10], world.job.spec.seed);
    let validation = records.expect("good files").expect("a fraction validates");
    world.skip(0, &lease, pb::DataSet::Validation, &[validation.in_files(1)]).expect("one of two");
    world.complete(0, &lease, Report::Evaluated(found));
    let skipped = world.status().skipped.expect("one record");
    assert_eq!((skipped.train, skipped.validation, skipped.records[0].validation), (0, 1, true));
    let measured = |event: &Event| matches!(event, Event::Evaluation(event) if event.samples == 1);
    assert!(world.events().iter().any(measured));
}

#[test]
fn the_end_of_a_job_has_the_places_of_all_skipped_records() {
    let mut spec = skipping(0.15);
    spec.data.validation_fraction = None;
    let mut world = World::new(spec, 1, &["p"]);
    let lease = world.lease(0).expect("a file to index");
    let found = pb::Indexed { records: 1000, label_min: Some(0), label_max: Some(9), ..Default::default() };
    world.complete(0, &lease, Report::Indexed(found));
    world.initialize();
    let lease = world.lease(0).expect("work");
    let skip = |world: &mut World, record| world.skip(0, &lease, pb::DataSet::Train, &[record]);
    for record in 0..120 {
        skip(&mut world, 3 * record).expect("few");
    }
    let running = world.status().skipped.expect("some records");
    assert_eq!((running.train, running.records.len(), running.further), (120, 100, Vec::new()));
    assert!((600..700).any(|record| skip(&mut world, record).is_err()), "too many");
    let skipped = world.status().skipped.expect("some records");
    let [places] = &skipped.further[..] else { panic!("{skipped:?}") };
    assert_eq!((places.validation, places.file.as_str()), (false, "x.gz"));
    assert_eq!(places.distances[..3], [300, 3, 3]);
    assert_eq!(100 + places.distances.len() as u64, skipped.train);
    let last = 600 + (skipped.train - 120) - 1;
    assert_eq!(places.distances.iter().sum::<u64>(), last, "{places:?}");
}

#[test]
fn users_see_the_records_that_come_first_in_the_files_in_any_order_of_arrival() {
    let mut spec = skipping(1.0);
    spec.data.validation_fraction = None;
    let listed = |orders: &[u64]| {
        let mut world = World::new(spec.clone(), 1, &["p"]);
        let lease = world.lease(0).expect("a file to index");
        let found =
            pb::Indexed { records: 1000, label_min: Some(0), label_max: Some(9), ..Default::default() };
        world.complete(0, &lease, Report::Indexed(found));
        world.initialize();
        let lease = world.lease(0).expect("work");
        for record in orders {
            world.skip(0, &lease, pb::DataSet::Train, &[*record]).expect("few");
        }
        world.status().skipped.expect("some records")
    };
    let forth: Vec<u64> = (0..150).map(|record| 3 * record).collect();
    let back: Vec<u64> = forth.iter().rev().copied().collect();
    let skipped = listed(&forth);
    assert_eq!((skipped.train, skipped.records.len(), skipped.records[99].record), (150, 100, 297));
    assert_eq!(listed(&back), skipped);
}

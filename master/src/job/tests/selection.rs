//! Jobs that select their best version and stop early: the same version in every life of the master
//! and of the ps.

use proto::pb::lease::Work as Wire;
use proto::selection::Criterion;

use super::*;
use crate::checkpoints::{Candidate, Candidates};

/// Accuracy of the versions 1, 2 and so on. With a patience of 2 a job stops at 4, and 2 is the
/// best.
const VALUES: [f64; 6] = [0.5, 0.75, 0.5, 0.75, 1.0, 1.0];

fn spec(more: &str) -> JobSpec {
    let mut spec = parse(&format!(
        "[evaluation]\nevery_steps = 1\n[early_stopping]\nmetric = \"accuracy\"\npatience = 2\n{more}"
    ));
    spec.epochs = 9;
    spec
}

impl World {
    /// Worker 0 works until `end` of the job so far. Returns the version of the export, if it comes
    /// to that.
    fn work_until(&mut self, end: impl Fn(&Self) -> bool) -> Option<u64> {
        while !end(self) {
            let lease = self.lease(0).unwrap_or_else(|| panic!("no work: {}", self.reason()));
            match lease.work.as_ref().expect("work") {
                Wire::Export(task) => return Some(task.version.expect("one version")),
                Wire::Evaluate(task) => {
                    let samples = task.end - task.begin;
                    let right = VALUES[task.version as usize - 1] * samples as f64;
                    let metric_sums = BTreeMap::from([("accuracy".to_owned(), right)]);
                    let found = pb::Evaluated { loss_sum: 3.0, samples, metric_sums, ..Default::default() };
                    self.complete(0, &lease, Report::Evaluated(found));
                }
                _ => self.complete(0, &lease, report(&lease)),
            }
        }
        None
    }

    fn measured_versions(&self) -> Vec<u64> {
        let step = |event| match event {
            Event::Evaluation(event) => Some(event.step),
            _ => None,
        };
        self.events().into_iter().filter_map(step).collect()
    }

    fn outcome(&self) -> (u64, u64, bool) {
        let selection = self.status().selection.expect("a version is measured");
        (selection.best, selection.last, selection.stopped)
    }
}

fn measured(count: usize) -> impl Fn(&World) -> bool {
    move |world| world.measured_versions().len() >= count
}

#[test]
fn a_job_stops_early_and_exports_its_best_version_which_the_ps_keep_until_then() {
    let mut world = World::training(spec(""), 1);
    assert_eq!(world.work_until(|_| false), Some(2));
    assert_eq!((world.outcome(), world.measured_versions()), ((2, 4, true), vec![1, 2, 3, 4]));
    let unpinned = |effect| match effect {
        Effect::Unpin(_, _, version, best) => Some((version.get(), best.map(Version::get))),
        _ => None,
    };
    let unpinned: Vec<_> = world.effects().into_iter().filter_map(unpinned).collect();
    assert_eq!(unpinned, [(1, Some(1)), (2, Some(2)), (3, Some(2)), (4, Some(2))]);
    let reason = world.reason();
    assert!(reason.contains("stopped early at step 4: accuracy is the best at step 2"), "{reason}");
    assert_eq!(world.state(), JobState::Exporting);
    assert_eq!(world.status().final_metrics["accuracy"], VALUES[1], "of the model that is exported");
}

#[test]
fn a_job_without_patience_trains_to_its_end_and_exports_the_best_version() {
    let mut spec = spec("");
    spec.epochs = 3;
    spec.early_stopping.as_mut().expect("it selects").patience = None;
    let mut world = World::training(spec, 1);
    assert_eq!(world.work_until(|_| false), Some(5));
    assert_eq!(world.outcome(), (5, 6, false));
    assert!(world.reason().contains("trained 3 epochs; the model is that of step 5"), "{}", world.reason());
}

#[test]
fn a_restarted_master_goes_on_with_the_best_version() {
    for count in 1..=3 {
        let mut world = World::training(spec(""), 1);
        assert_eq!(world.work_until(measured(count)), None);
        let applied = world.status().steps_done;
        world.start_again();
        world.come_back("p", applied);
        world.survey(&[applied]);
        assert_eq!(world.work_until(|_| false), Some(2), "restarted after {count}");
        assert_eq!((world.outcome(), world.measured_versions()), ((2, 4, true), vec![1, 2, 3, 4]));
    }
}

#[test]
fn a_master_that_is_restarted_after_the_stop_exports_the_best_version() {
    let mut world = World::training(spec(""), 1);
    assert_eq!(world.work_until(|_| false), Some(2));
    let applied = world.status().steps_done;
    world.start_again();
    world.come_back("p", applied);
    world.survey(&[applied]);
    assert_eq!(world.work_until(|_| false), Some(2), "{}", world.reason());
    assert_eq!((world.outcome(), world.measured_versions()), ((2, 4, true), vec![1, 2, 3, 4]));
}

#[test]
fn a_lost_ps_changes_neither_the_best_version_nor_the_stop() {
    for count in 1..=4 {
        let mut world = World::training(spec(""), 1);
        world.work_until(measured(count));
        world.restart("p");
        assert_eq!(world.job.era, Era(1), "lost after {count}: {}", world.reason());
        world.initialize_again();
        world.survey(&[0]);
        assert_eq!(world.work_until(|_| false), Some(2), "lost after {count}");
        assert_eq!(world.outcome(), (2, 4, true));
        assert!(world.measured_versions().iter().all(|version| *version <= 4));
    }
}

#[test]
fn a_lost_ps_goes_back_to_a_checkpoint_from_which_the_best_version_comes_again() {
    let candidate = |version| Candidate {
        version: Version(version),
        run: String::new(),
        plan: spec("").plan(8),
        ends_epoch: false,
        trained_on: None,
        selection: None,
    };
    for (saved, from) in [(&[1, 2, 3][..], 2), (&[1, 3], 1), (&[3], 0)] {
        let saves = "[checkpoint]\nurl = \"memory://ck\"\nevery_steps = 1\n";
        let mut world = World::new(spec(saves), 1, &["p"]);
        world.index();
        world.job.on_found(world.now, Ok(Candidates::default()));
        world.initialize();
        assert_eq!(world.work_until(measured(3)), None);
        let run = world.job.checkpoints.as_ref().and_then(|checkpoints| checkpoints.run.clone());
        world.restart("p");
        let run = run.expect("it has begun");
        let intact = saved.iter().map(|&version| Candidate { run: run.clone(), ..candidate(version) });
        world.job.on_found(world.now, Ok(Candidates { intact: intact.collect(), ..Default::default() }));
        let lease = world.lease(0).expect("a model to describe");
        let restore = world.describe(&lease)[0].1.restore.clone();
        assert_eq!(restore.map_or(0, |restore| restore.version), from, "of {saved:?}");
        world.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
        world.survey(&[from]);
        assert_eq!(world.work_until(|_| false), Some(2));
        assert_eq!(world.outcome(), (2, 4, true));
    }
}

#[test]
fn a_resumed_run_begins_its_selection_anew_if_the_best_version_cannot_be_kept() {
    let saves = "[checkpoint]\nurl = \"memory://ck\"\nevery_steps = 1\n";
    let criterion = spec(saves).criterion().expect("it selects");
    let other = Criterion { larger: false, ..criterion.clone() };
    for (every_steps, criterion, best, lost) in [
        (1, &criterion, 3, None),
        (2, &criterion, 3, Some("[evaluation] does not measure it now")),
        (1, &other, 3, Some("[early_stopping] has another metric, set or mode now")),
        (1, &criterion, 2, Some("every checkpoint is newer")),
    ] {
        let mut spec = spec(saves);
        spec.evaluation.every_steps = Some(every_steps);
        let mut world = World::new(spec.clone(), 1, &["p"]);
        world.job.resume_run(Resume::Alike);
        world.index();
        let candidate = Candidate {
            version: Version(3),
            run: "before".to_owned(),
            plan: spec.plan(8),
            ends_epoch: false,
            trained_on: None,
            selection: Some(Selection::of(criterion.clone(), (Version(best), 0.5), Version(3), 0)),
        };
        world.job.on_found(world.now, Ok(Candidates { intact: vec![candidate], ..Default::default() }));
        assert_eq!(world.status().selection.is_none(), lost.is_some(), "{lost:?}");
        let told = |why: &str| {
            let is_it =
                |event: &Event| matches!(event, Event::Warning(warning) if warning.message.contains(why));
            world.events().iter().any(is_it)
        };
        assert!(lost.is_none_or(told), "{lost:?}: {:?}", world.events());
    }
}

#[test]
fn a_resumed_run_takes_over_the_best_version() {
    let saves = "[checkpoint]\nurl = \"memory://ck\"\nevery_steps = 1\n";
    let spec = spec(saves);
    let selection = |best, value, last, waited| {
        let criterion = spec.criterion().expect("it selects");
        Some(Selection::of(criterion, (Version(best), value), Version(last), waited))
    };
    let candidate = |version, selection| Candidate {
        version: Version(version),
        run: "before".to_owned(),
        plan: spec.plan(8),
        ends_epoch: false,
        trained_on: None,
        selection,
    };
    let intact = vec![
        candidate(1, None),
        candidate(2, selection(1, 0.5, 1, 0)),
        candidate(3, selection(2, 0.75, 3, 1)),
    ];
    let mut world = World::new(spec.clone(), 1, &["p"]);
    world.job.resume_run(Resume::Alike);
    world.index();
    world.job.on_found(world.now, Ok(Candidates { intact, ..Default::default() }));
    let lease = world.lease(0).expect("a model to describe");
    assert_eq!(world.describe(&lease)[0].1.restore.as_ref().map(|restore| restore.version), Some(2));
    world.complete(0, &lease, Report::Initialized(pb::Initialized::default()));
    world.survey(&[2]);
    assert_eq!(world.work_until(|_| false), Some(2));
    assert_eq!((world.outcome(), world.measured_versions()), ((2, 4, true), vec![2, 3, 4]));
}

//! Measuring the model at the end of each epoch, in data shards that any workers take. Pure.
//!
//! Sums are added in the order of the shards, in f64, and epochs are told in their order, so the
//! numbers do not depend on who measured what when.

use std::collections::{BTreeMap, VecDeque};

use proto::ids::{Epoch, Step, Version};
use proto::pb;
use proto::plan::Plan;
use proto::spec::Metric;

use super::work::Shard;

/// Records of one data shard at most.
const SHARD_RECORDS: u64 = 1024;

/// The evaluations of a job.
#[derive(Debug)]
pub(super) struct Evaluations {
    plan: Plan,
    /// Validation records; 0: nothing is measured.
    records: u64,
    metrics: Vec<Metric>,
    /// The epoch that is measured next.
    next: Epoch,
    /// Epochs that are being measured, oldest first.
    running: VecDeque<Running>,
}

#[derive(Debug)]
struct Running {
    epoch: Epoch,
    shards: Vec<Option<pb::Evaluated>>,
}

/// The model was measured.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Measured {
    pub(super) epoch: Epoch,
    pub(super) version: Version,
    /// Means, the loss included.
    pub(super) metrics: BTreeMap<String, f64>,
    pub(super) samples: u64,
}

impl Evaluations {
    /// Creates the evaluations of a job. All epochs before `next` were measured.
    pub(super) const fn new(plan: Plan, records: u64, metrics: Vec<Metric>, next: Epoch) -> Self {
        Self { plan, records, metrics, next, running: VecDeque::new() }
    }

    /// Begins unfinished epochs again, because their leases have ended. `rewound`: a step; every
    /// epoch that ends after it is measured again.
    pub(super) fn again(mut self, rewound: Option<Step>) -> Self {
        if let Some(oldest) = self.running.front() {
            self.next = oldest.epoch;
        }
        self.running.clear();
        if let Some(step) = rewound {
            self.next = self.next.min(self.plan.epoch_of(step));
        }
        self
    }

    /// Epochs before this one were measured, by whoever saved the checkpoint that training goes on
    /// from.
    pub(super) fn skip_to(&mut self, epoch: Epoch) {
        self.next = self.next.max(epoch);
    }

    /// Returns the shards to measure now that every step below `watermark` is complete.
    pub(super) fn begin(&mut self, watermark: Step) -> Vec<Shard> {
        let mut begun = Vec::new();
        while self.records > 0
            && self.next.get() < self.plan.epochs
            && self.plan.version_after(self.next).get() <= watermark.get()
        {
            let (epoch, version) = (self.next, self.plan.version_after(self.next));
            let shard = |begin: u64| Shard {
                epoch,
                version,
                index: (begin / SHARD_RECORDS) as usize,
                begin,
                end: self.records.min(begin + SHARD_RECORDS),
            };
            let shards: Vec<_> = (0..self.records).step_by(SHARD_RECORDS as usize).map(shard).collect();
            self.running.push_back(Running { epoch, shards: vec![None; shards.len()] });
            begun.extend(shards);
            self.next = epoch.next();
        }
        begun
    }

    /// Checks whether a worker's answer is about this shard and has what the job asks for.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn check(&self, shard: &Shard, found: &pb::Evaluated) -> Result<(), String> {
        let records = shard.end - shard.begin;
        if found.samples != records {
            return Err(format!("Evaluated.samples: expected {records}, found {}", found.samples));
        }
        match self.metrics.iter().find(|metric| !found.metric_sums.contains_key(metric.name())) {
            None => Ok(()),
            Some(metric) => Err(format!("Evaluated.metric_sums: expected `{}`, found none", metric.name())),
        }
    }

    /// Takes a worker's answer; the epochs that are measured whole by it.
    pub(super) fn record(&mut self, shard: &Shard, found: pb::Evaluated) -> Vec<Measured> {
        if let Some(running) = self.running.iter_mut().find(|running| running.epoch == shard.epoch) {
            running.shards[shard.index] = Some(found);
        }
        let mut measured = Vec::new();
        while self.running.front().is_some_and(|running| running.shards.iter().all(Option::is_some)) {
            let running = self.running.pop_front().expect("just seen");
            measured.push(self.sum(running.epoch, running.shards.into_iter().flatten()));
        }
        measured
    }

    /// Returns whether all that is to be measured is measured.
    pub(super) fn is_done(&self) -> bool {
        self.records == 0 || (self.running.is_empty() && self.next.get() == self.plan.epochs)
    }

    fn sum(&self, epoch: Epoch, shards: impl Iterator<Item = pb::Evaluated>) -> Measured {
        let (mut loss, mut samples) = (0.0, 0);
        let mut sums = vec![0.0; self.metrics.len()];
        for shard in shards {
            loss += shard.loss_sum;
            samples += shard.samples;
            for (sum, metric) in sums.iter_mut().zip(&self.metrics) {
                *sum += shard.metric_sums.get(metric.name()).copied().unwrap_or_default();
            }
        }
        let mean = |sum: f64| sum / samples as f64;
        let named = self.metrics.iter().zip(sums).map(|(metric, sum)| (metric.name().to_owned(), mean(sum)));
        let mut metrics: BTreeMap<_, _> = named.collect();
        metrics.insert("loss".to_owned(), mean(loss));
        Measured { epoch, version: self.plan.version_after(epoch), metrics, samples }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { records: 4, micro: 1, microbatches_per_step: 2, epochs: 2 };

    fn evaluated(shard: &Shard, loss_sum: f64, right: f64) -> pb::Evaluated {
        let metric_sums = BTreeMap::from([("accuracy".to_owned(), right)]);
        pb::Evaluated { loss_sum, samples: shard.end - shard.begin, metric_sums }
    }

    #[test]
    fn an_epoch_is_measured_in_shards_once_its_steps_are_done() {
        let mut evaluations = Evaluations::new(PLAN, 1500, vec![Metric::Accuracy], Epoch(0));
        assert!(evaluations.begin(Step(1)).is_empty() && !evaluations.is_done());
        let shards = evaluations.begin(Step(2));
        let ranges: Vec<_> =
            shards.iter().map(|shard| (shard.version.get(), shard.begin, shard.end)).collect();
        assert_eq!(ranges, [(2, 0, 1024), (2, 1024, 1500)]);
        assert!(evaluations.begin(Step(3)).is_empty());
        assert_eq!(evaluations.record(&shards[1], evaluated(&shards[1], 50.0, 76.0)), []);
        let measured = evaluations.record(&shards[0], evaluated(&shards[0], 100.0, 1024.0));
        assert_eq!((measured.len(), measured[0].version, measured[0].samples), (1, Version(2), 1500));
        assert_eq!(measured[0].metrics["loss"], 0.1);
        assert_eq!(measured[0].metrics["accuracy"], 1100.0 / 1500.0);
        assert!(!evaluations.is_done());
    }

    #[test]
    fn epochs_are_told_in_order_and_the_last_one_ends_it() {
        let mut evaluations = Evaluations::new(PLAN, 10, vec![Metric::Accuracy], Epoch(0));
        let shards = evaluations.begin(Step(4));
        assert_eq!(shards.iter().map(|shard| shard.epoch).collect::<Vec<_>>(), [Epoch(0), Epoch(1)]);
        assert_eq!(evaluations.record(&shards[1], evaluated(&shards[1], 1.0, 1.0)), []);
        let told = evaluations.record(&shards[0], evaluated(&shards[0], 1.0, 1.0));
        assert_eq!(told.iter().map(|measured| measured.epoch).collect::<Vec<_>>(), [Epoch(0), Epoch(1)]);
        assert!(evaluations.is_done());
    }

    #[test]
    fn after_a_loss_what_was_begun_is_measured_once_its_steps_are_there_again() {
        let begun = || {
            let mut evaluations = Evaluations::new(PLAN, 10, vec![], Epoch(0));
            let shards = evaluations.begin(Step(4));
            assert_eq!(evaluations.record(&shards[0], evaluated(&shards[0], 1.0, 1.0)).len(), 1);
            evaluations
        };
        let epochs = |shards: Vec<Shard>| shards.iter().map(|shard| shard.epoch.get()).collect::<Vec<_>>();
        let mut arrival = begun().again(None);
        assert_eq!((epochs(arrival.begin(Step(3))), epochs(arrival.begin(Step(4)))), (vec![], vec![1]));
        let mut canonical = begun().again(Some(Step(1)));
        assert_eq!((epochs(canonical.begin(Step(1))), epochs(canonical.begin(Step(2)))), (vec![], vec![0]));
        let mut later = begun().again(Some(Step(2)));
        assert_eq!((epochs(later.begin(Step(2))), epochs(later.begin(Step(4)))), (vec![], vec![1]));
    }

    #[test]
    fn answers_that_do_not_fit_are_refused() {
        let mut evaluations = Evaluations::new(PLAN, 10, vec![Metric::Accuracy], Epoch(0));
        let shard = evaluations.begin(Step(2))[0];
        let good = evaluated(&shard, 1.0, 1.0);
        assert_eq!(evaluations.check(&shard, &good), Ok(()));
        let short = pb::Evaluated { samples: 9, ..good.clone() };
        assert!(evaluations.check(&shard, &short).unwrap_err().contains("expected 10, found 9"));
        let bare = pb::Evaluated { metric_sums: BTreeMap::new(), ..good };
        assert!(evaluations.check(&shard, &bare).unwrap_err().contains("`accuracy`"));
    }

    #[test]
    fn without_validation_records_nothing_is_measured() {
        let mut evaluations = Evaluations::new(PLAN, 0, vec![], Epoch(0));
        assert!(evaluations.begin(Step(4)).is_empty() && evaluations.is_done());
    }
}

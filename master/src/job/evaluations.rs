//! Measuring the model of a training at the versions that [`Occasions`] name, or once in a job that
//! only evaluates, in data shards that any workers take. Pure.
//!
//! A [`Merger`] adds up the shards, and versions are told in their order, so the numbers do not
//! depend on who measured what when.

use std::collections::{BTreeMap, VecDeque};

use proto::ids::{Epoch, Step, Version};
use proto::metrics::{Confusion, Evaluation, Merger, Metric, Sums};
use proto::pb;
use proto::plan::Occasions;
use proto::spec::ValidationSet;
use proto::worst::{RecordLoss, Worst};

use super::work::Shard;

/// Records of one data shard at most.
const SHARD_RECORDS: u64 = 1024;

/// When the model of a job is measured.
#[derive(Clone, Copy, Debug)]
pub(super) enum When {
    /// At these versions of the training.
    During(Occasions),
    /// Once, at version 0, which the job has from its weights.
    Once,
}

impl When {
    /// Returns the first version that is measured of those from `version` on.
    fn from(self, version: Version) -> Option<Version> {
        match self {
            Self::During(occasions) if occasions.contains(version) => Some(version),
            Self::During(occasions) => occasions.after(version),
            Self::Once => Some(Version(0)).filter(|once| version <= *once),
        }
    }

    /// Returns the first version that is measured after this one.
    fn after(self, version: Version) -> Option<Version> {
        match self {
            Self::During(occasions) => occasions.after(version),
            Self::Once => None,
        }
    }

    /// Returns the epoch of the last step below a version.
    const fn epoch_of(self, version: Version) -> Epoch {
        match self {
            Self::During(occasions) => occasions.epoch_of(version),
            Self::Once => Epoch(0),
        }
    }
}

/// The evaluations of a job.
#[derive(Debug)]
pub(super) struct Evaluations {
    when: When,
    /// The validation sets; none: nothing is measured.
    sets: Vec<ValidationSet>,
    /// Metrics that workers measure. `None`: those that they choose.
    metrics: Option<Vec<Metric>>,
    /// The version that is measured next. `None`: the measurements of all have begun.
    next: Option<Version>,
    /// The empty list of the worst records of a set.
    worst: Worst,
    /// Versions that are being measured, oldest first.
    running: VecDeque<Running>,
    /// Records whose measurement was reported, over all versions.
    records_done: u64,
}

#[derive(Debug)]
struct Running {
    version: Version,
    /// One for each set.
    mergers: Vec<Merger>,
    /// The worst records of each set.
    worst: Vec<Worst>,
}

/// A worker's answer about a data shard.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    evaluation: Evaluation,
    /// Its worst records, the worst one first.
    worst: Vec<RecordLoss>,
}

impl Answer {
    /// Returns the numbers of the worst records, over all files.
    pub(super) fn records(&self) -> impl Iterator<Item = u64> {
        self.worst.iter().map(|found| found.record)
    }
}

/// A version was measured on all validation sets.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Measured {
    /// Epoch of the last step below the version.
    pub(super) epoch: Epoch,
    pub(super) version: Version,
    pub(super) sets: Vec<MeasuredSet>,
}

impl Measured {
    /// Returns the value of a metric, as a job's status names it: `loss`, or `test/loss`.
    pub(super) fn value(&self, metric: &str) -> Option<f64> {
        let (set, metric) = metric.split_once('/').unwrap_or(("", metric));
        self.sets.iter().find(|measured| measured.name == set)?.metrics.get(metric).copied()
    }
}

/// A version was measured on a validation set.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MeasuredSet {
    /// Name of the set; empty for `data.validation`.
    pub(super) name: String,
    /// Values of the metrics, the loss included.
    pub(super) metrics: BTreeMap<String, f64>,
    /// Sums of a program's own metrics that are no means.
    pub(super) sums: Sums,
    pub(super) confusion: Option<Confusion>,
    pub(super) samples: u64,
    /// The records with the largest losses, the largest first.
    pub(super) worst: Vec<RecordLoss>,
}

impl Evaluations {
    /// Creates the evaluations of a job, which are of `metrics`, or of those that workers choose.
    /// All versions up to `measured` were measured; `None`: not even version 0.
    pub(super) fn new(
        when: When,
        sets: Vec<ValidationSet>,
        metrics: Option<Vec<Metric>>,
        measured: Option<Version>,
    ) -> Self {
        let next = match measured {
            Some(measured) => when.after(measured),
            None => when.from(Version(0)),
        };
        Self { when, sets, metrics, next, worst: Worst::default(), running: VecDeque::new(), records_done: 0 }
    }

    /// Sets what is listed of each set: `worst` is the empty list of records.
    pub(super) fn listing(self, worst: Worst) -> Self {
        Self { worst, ..self }
    }

    /// Begins unfinished measurements again, because their leases have ended. `rewound`: a step;
    /// every version that it or a later step makes is measured again.
    pub(super) fn again(mut self, rewound: Option<Step>) -> Self {
        if let Some(oldest) = self.running.front() {
            self.next = Some(oldest.version);
        }
        self.running.clear();
        self.records_done = 0;
        if let Some(step) = rewound {
            let again = match self.when {
                When::During(occasions) => occasions.after(Version(step.get())),
                When::Once => Some(Version(0)),
            };
            self.next = [self.next, again].into_iter().flatten().min();
        }
        self
    }

    /// Versions below this one were measured, by whoever saved the checkpoint that training goes on
    /// from.
    pub(super) fn skip_to(&mut self, version: Version) {
        self.next = self.next.and_then(|next| self.when.from(next.max(version)));
    }

    /// Returns the shards to measure now that every step below `watermark` is complete.
    pub(super) fn begin(&mut self, watermark: Step) -> Vec<Shard> {
        let mut begun = Vec::new();
        let may_begin = |next: &Version| !self.sets.is_empty() && next.get() <= watermark.get();
        while let Some(version) = self.next.filter(may_begin) {
            let epoch = self.when.epoch_of(version);
            let mut mergers = Vec::with_capacity(self.sets.len());
            for (set, ValidationSet { records, .. }) in self.sets.iter().enumerate() {
                let shard = |(index, begin): (usize, u64)| {
                    let end = records.end.min(begin + SHARD_RECORDS);
                    Shard { epoch, version, set, index, begin, end }
                };
                let starts = records.clone().step_by(SHARD_RECORDS as usize);
                let before = begun.len();
                begun.extend(starts.enumerate().map(shard));
                mergers.push(Merger::new(begun.len() - before));
            }
            let worst = vec![self.worst.clone(); mergers.len()];
            self.running.push_back(Running { version, mergers, worst });
            self.next = self.when.after(version);
        }
        begun
    }

    /// Reads a worker's answer, if it is about this shard and has what the job asks for. `skipped`
    /// records of the shard are bad. A worker that began before that was known may have found them
    /// good.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn check(&self, shard: &Shard, found: pb::Evaluated, skipped: u64) -> Result<Answer, String> {
        let records = shard.end - shard.begin;
        if !(records.saturating_sub(skipped)..=records).contains(&found.samples) {
            let expected = match skipped {
                0 => format!("{records}"),
                _ => format!("{records}, or up to {skipped} less"),
            };
            return Err(format!("Evaluated.samples: expected {expected}, found {}", found.samples));
        }
        let worst = self.check_worst(&found)?;
        let wrong = |error: proto::Error| format!("Evaluated.tallies: {error}");
        let mut found = Evaluation::try_from(found).map_err(wrong)?;
        // Without a record a worker cannot say what tallies look like.
        if let Some(metrics) = &self.metrics {
            if found.samples > 0 {
                found.check(metrics).map_err(wrong)?;
            }
            found.tallies.retain(|metric, _| metrics.contains(metric));
            found.sums.clear();
        }
        if let Some(running) = self.running.iter().find(|running| running.version == shard.version) {
            running.mergers[shard.set].check(&found).map_err(wrong)?;
        }
        Ok(Answer { evaluation: found, worst })
    }

    /// Returns the worst records of a worker's answer.
    fn check_worst(&self, found: &pb::Evaluated) -> Result<Vec<RecordLoss>, String> {
        let expected = (self.worst.most() as u64).min(found.samples);
        if found.worst.len() as u64 != expected {
            return Err(format!(
                "Evaluated.worst: expected {expected} records (evaluation.worst), found {}; start a worker of this version",
                found.worst.len()
            ));
        }
        let worst = found.worst.iter().cloned().map(RecordLoss::try_from).collect::<Result<Vec<_>, _>>();
        let worst = worst.map_err(|error| format!("Evaluated.worst: {error}"))?;
        match worst.is_sorted_by(|one, next| one.order(next).is_lt()) {
            true => Ok(worst),
            false => Err("Evaluated.worst: expected falling losses of distinct records".to_owned()),
        }
    }

    /// Takes a worker's answer; the versions that are measured whole by it.
    ///
    /// # Errors
    /// Why the version cannot be measured: its outputs have too many distinct values.
    pub(super) fn record(&mut self, shard: &Shard, found: Answer) -> Result<Vec<Measured>, String> {
        let Answer { evaluation, worst } = found;
        let (version, mut measured) = (shard.version, Vec::new());
        let failed =
            |version: Version, error: proto::Error| format!("the evaluation of version {version}: {error}");
        if let Some(running) = self.running.iter_mut().find(|running| running.version == version) {
            let merger = &mut running.mergers[shard.set];
            if merger.lacks(shard.index) {
                running.worst[shard.set].extend(worst);
            }
            merger.add(shard.index, evaluation).map_err(|error| failed(version, error))?;
            self.records_done += shard.end - shard.begin;
        }
        let is_whole = |running: &mut Running| running.mergers.iter().all(Merger::is_complete);
        while let Some(Running { version, mergers, worst }) = self.running.pop_front_if(is_whole) {
            let mut sets = Vec::with_capacity(mergers.len());
            for ((ValidationSet { name, .. }, merger), worst) in self.sets.iter().zip(mergers).zip(worst) {
                let mut whole = merger.finish().map_err(|error| failed(version, error))?;
                let metrics = whole.values();
                whole.sums.retain(|_, sum| !sum.is_mean);
                sets.push(MeasuredSet {
                    name: name.clone(),
                    metrics,
                    confusion: whole.confusion().cloned(),
                    samples: whole.samples,
                    sums: whole.sums,
                    worst: worst.into_records(),
                });
            }
            measured.push(Measured { epoch: self.when.epoch_of(version), version, sets });
        }
        Ok(measured)
    }

    /// Returns the first version that is to be measured and is not. `None`: there is none.
    pub(super) fn first_unmeasured(&self) -> Option<Version> {
        let running = self.running.front().map(|running| running.version);
        running.or(self.next).filter(|_| !self.sets.is_empty())
    }

    /// Returns whether all that is to be measured is measured.
    pub(super) fn is_done(&self) -> bool {
        self.sets.is_empty() || (self.running.is_empty() && self.next.is_none())
    }

    /// Returns the number of records whose measurement was reported, over all versions.
    pub(super) const fn records_done(&self) -> u64 {
        self.records_done
    }
}

#[cfg(test)]
mod tests {
    use proto::metrics::{ClassCounts, REPORT_SCORES_MAX, SCORES_MAX, ScoreCounts, Scores, Sum, Tally};
    use proto::plan::Plan;

    use super::*;

    const PLAN: Plan = Plan { records: 4, micro: 1, microbatches_per_step: 2, epochs: 2 };

    fn epochs() -> When {
        When::During(Occasions::new(PLAN, None))
    }

    /// One set of so many records.
    fn of(records: u64) -> Vec<ValidationSet> {
        let set = ValidationSet { name: String::new(), records: 0..records };
        Some(set).filter(|_| records > 0).into_iter().collect()
    }

    fn evaluated(shard: &Shard, loss_sum: f64, right: f64) -> pb::Evaluated {
        let samples = shard.end - shard.begin;
        let tally = Tally::Mean { sum: right, count: samples };
        let tallies = [(Metric::Accuracy, tally)].into();
        encoded(Evaluation { samples, loss_sum, tallies, ..Evaluation::default() })
    }

    fn encoded(evaluation: Evaluation) -> pb::Evaluated {
        proto::convert::evaluated(evaluation).unwrap()
    }

    /// Takes a worker's answer as the job does.
    fn record(evaluations: &mut Evaluations, shard: &Shard, found: pb::Evaluated) -> Vec<Measured> {
        let found = evaluations.check(shard, found, 0).unwrap();
        evaluations.record(shard, found).unwrap()
    }

    #[test]
    fn an_epoch_is_measured_in_shards_once_its_steps_are_done() {
        let mut evaluations = Evaluations::new(epochs(), of(1500), Some(vec![Metric::Accuracy]), None);
        assert!(evaluations.begin(Step(1)).is_empty() && !evaluations.is_done());
        let shards = evaluations.begin(Step(2));
        let ranges: Vec<_> =
            shards.iter().map(|shard| (shard.version.get(), shard.begin, shard.end)).collect();
        assert_eq!(ranges, [(2, 0, 1024), (2, 1024, 1500)]);
        assert!(evaluations.begin(Step(3)).is_empty());
        assert_eq!(record(&mut evaluations, &shards[1], evaluated(&shards[1], 50.0, 76.0)), []);
        let measured = record(&mut evaluations, &shards[0], evaluated(&shards[0], 100.0, 1024.0));
        assert_eq!((measured.len(), measured[0].version, measured[0].sets[0].samples), (1, Version(2), 1500));
        assert_eq!(measured[0].sets[0].metrics["loss"], 0.1);
        assert_eq!(measured[0].sets[0].metrics["accuracy"], 1100.0 / 1500.0);
        assert!(!evaluations.is_done());
    }

    #[test]
    fn sets_are_measured_by_themselves_and_told_together() {
        let set = |name: &str, records| ValidationSet { name: name.to_owned(), records };
        let sets = vec![set("", 0..1500), set("test", 1500..1510)];
        let mut evaluations = Evaluations::new(epochs(), sets, Some(vec![Metric::Accuracy]), None);
        let shards = evaluations.begin(Step(2));
        let ranges: Vec<_> = shards.iter().map(|shard| (shard.set, shard.begin, shard.end)).collect();
        assert_eq!(ranges, [(0, 0, 1024), (0, 1024, 1500), (1, 1500, 1510)]);
        assert_eq!(record(&mut evaluations, &shards[2], evaluated(&shards[2], 5.0, 10.0)), []);
        assert_eq!(record(&mut evaluations, &shards[1], evaluated(&shards[1], 150.0, 0.0)), []);
        let measured = record(&mut evaluations, &shards[0], evaluated(&shards[0], 0.0, 750.0)).remove(0);
        let found: Vec<_> = measured.sets.iter().map(|set| (set.name.as_str(), set.samples)).collect();
        assert_eq!(found, [("", 1500), ("test", 10)]);
        assert_eq!((measured.sets[0].metrics["accuracy"], measured.sets[0].metrics["loss"]), (0.5, 0.1));
        assert_eq!((measured.sets[1].metrics["accuracy"], measured.sets[1].metrics["loss"]), (1.0, 0.5));
    }

    #[test]
    fn epochs_are_told_in_order_and_the_last_one_ends_it() {
        let mut evaluations = Evaluations::new(epochs(), of(10), Some(vec![Metric::Accuracy]), None);
        let shards = evaluations.begin(Step(4));
        assert_eq!(shards.iter().map(|shard| shard.epoch).collect::<Vec<_>>(), [Epoch(0), Epoch(1)]);
        assert_eq!(record(&mut evaluations, &shards[1], evaluated(&shards[1], 1.0, 1.0)), []);
        let told = record(&mut evaluations, &shards[0], evaluated(&shards[0], 1.0, 1.0));
        assert_eq!(told.iter().map(|measured| measured.epoch).collect::<Vec<_>>(), [Epoch(0), Epoch(1)]);
        assert!(evaluations.is_done());
    }

    #[test]
    fn versions_within_an_epoch_are_measured_too_and_each_only_once() {
        let plan = Plan { microbatches_per_step: 1, ..PLAN };
        let when = || When::During(Occasions::new(plan, None).and_every_steps(Some(3)));
        let versions = |shards: Vec<Shard>| {
            shards.iter().map(|shard| (shard.version.get(), shard.epoch.get())).collect()
        };
        let all = |mut evaluations: Evaluations| -> Vec<_> { versions(evaluations.begin(Step(8))) };
        let from = |measured| Evaluations::new(when(), of(10), Some(vec![]), measured);
        assert_eq!(all(from(None)), [(3, 0), (4, 0), (6, 1), (8, 1)]);
        assert_eq!(all(from(Some(Version(4)))), [(6, 1), (8, 1)]);
        assert_eq!(all(from(Some(Version(4))).again(Some(Step(3)))), [(4, 0), (6, 1), (8, 1)]);
        let mut later = from(None);
        later.skip_to(Version(4));
        assert_eq!(all(later), [(4, 0), (6, 1), (8, 1)], "a restored version is measured");
    }

    #[test]
    fn after_a_loss_what_was_begun_is_measured_once_its_steps_are_there_again() {
        let begun = || {
            let mut evaluations = Evaluations::new(epochs(), of(10), Some(vec![]), None);
            let shards = evaluations.begin(Step(4));
            assert_eq!(record(&mut evaluations, &shards[0], evaluated(&shards[0], 1.0, 1.0)).len(), 1);
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
        let mut evaluations = Evaluations::new(epochs(), of(10), Some(vec![Metric::Accuracy]), None);
        let shard = evaluations.begin(Step(2))[0];
        let good = evaluated(&shard, 1.0, 1.0);
        assert!(evaluations.check(&shard, good.clone(), 0).is_ok());
        let refused = |found| evaluations.check(&shard, found, 0).unwrap_err();
        let short = pb::Evaluated { samples: 9, ..good.clone() };
        assert!(refused(short).contains("expected 10, found 9"));
        let bare = pb::Evaluated { tallies: BTreeMap::new(), ..good.clone() };
        assert!(refused(bare).contains("`accuracy`"));
        let empty = pb::Evaluated { tallies: [("accuracy".to_owned(), pb::Tally::default())].into(), ..good };
        assert!(refused(empty).contains("Tally.kind"));
    }

    #[test]
    fn the_worst_records_of_all_shards_are_listed_in_whatever_order_they_arrive() {
        let evaluations = || {
            let worst = Worst::new(3).with_previews(2);
            Evaluations::new(epochs(), of(1500), Some(vec![]), None).listing(worst)
        };
        let found = |shard: &Shard, losses: &[(u64, f64)]| {
            let answer = encoded(Evaluation { samples: shard.end - shard.begin, ..Evaluation::default() });
            let worst = losses.iter().map(|&(record, loss)| {
                let preview = Some(pb::Preview { text: record.to_string(), ..Default::default() });
                pb::RecordLoss { record, loss, preview, ..Default::default() }
            });
            pb::Evaluated { worst: worst.collect(), ..answer }
        };
        let losses = [&[(4, 2.0), (7, 1.0), (3, 0.5)][..], &[(1400, 1.5), (1100, 1.0), (1101, 1.0)]];
        for order in [[0, 1], [1, 0]] {
            let mut evaluations = evaluations();
            let shards = evaluations.begin(Step(2));
            let [first, last] =
                order.map(|at: usize| record(&mut evaluations, &shards[at], found(&shards[at], losses[at])));
            let worst = &last[0].sets[0].worst;
            let listed = worst.iter().map(|found| (found.record, found.loss));
            assert_eq!((first, listed.collect::<Vec<_>>()), (vec![], vec![(4, 2.0), (1400, 1.5), (7, 1.0)]));
            let shown = worst.iter().map(|found| found.preview.as_ref().map(|preview| preview.text.as_str()));
            assert_eq!(shown.collect::<Vec<_>>(), [Some("4"), Some("1400"), None]);
        }
        let mut evaluations = evaluations();
        let shard = evaluations.begin(Step(2))[0];
        let refused =
            |losses: &[(u64, f64)]| evaluations.check(&shard, found(&shard, losses), 0).unwrap_err();
        assert!(refused(&[]).contains("expected 3 records (evaluation.worst), found 0"));
        assert!(refused(&[(4, 1.0), (3, 2.0), (5, 0.5)]).contains("expected falling losses"));
        assert!(refused(&[(4, 1.0), (4, 1.0), (5, 0.5)]).contains("distinct records"));
        let mut long = found(&shard, losses[0]);
        long.worst[1].outputs = vec![0.5; 33];
        let refused = evaluations.check(&shard, long, 0).unwrap_err();
        assert!(refused.contains("RecordLoss.outputs: expected at most 32 numbers"), "{refused}");
    }

    #[test]
    fn skipped_records_are_not_measured() {
        let mut evaluations = Evaluations::new(epochs(), of(1500), Some(vec![Metric::Accuracy]), None);
        let shards = evaluations.begin(Step(2));
        let found = |samples: u64, right: f64| {
            let tally = Tally::Mean { sum: right, count: samples };
            let loss_sum = samples as f64;
            let tallies = [(Metric::Accuracy, tally)].into();
            encoded(Evaluation { samples, loss_sum, tallies, ..Evaluation::default() })
        };
        let refused = evaluations.check(&shards[0], found(1000, 0.0), 23).unwrap_err();
        assert!(refused.contains("expected 1024, or up to 23 less, found 1000"), "{refused}");
        assert!(evaluations.check(&shards[0], found(1025, 0.0), 24).is_err());
        let first = evaluations.check(&shards[0], found(1000, 250.0), 24).unwrap();
        assert_eq!(evaluations.record(&shards[0], first), Ok(vec![]));
        let none = evaluations.check(&shards[1], pb::Evaluated::default(), 476).unwrap();
        let measured = evaluations.record(&shards[1], none).unwrap().remove(0).sets.remove(0);
        assert_eq!((measured.samples, measured.metrics["accuracy"]), (1000, 0.25));
        assert_eq!(measured.metrics["loss"], 1.0);
    }

    #[test]
    fn an_answer_of_a_worker_from_before_tallies_counts() {
        let mut evaluations = Evaluations::new(epochs(), of(10), Some(vec![Metric::Accuracy]), None);
        let shard = evaluations.begin(Step(2))[0];
        let metric_sums = [("accuracy".to_owned(), 4.0)].into();
        let old = pb::Evaluated { loss_sum: 5.0, samples: 10, metric_sums, ..Default::default() };
        let measured = record(&mut evaluations, &shard, old);
        assert_eq!(
            (measured[0].sets[0].metrics["accuracy"], measured[0].sets[0].metrics["loss"]),
            (0.4, 0.5)
        );
    }

    #[test]
    fn networks_with_different_numbers_of_classes_are_not_one_job() {
        let mut evaluations = Evaluations::new(epochs(), of(1500), Some(vec![Metric::F1]), None);
        let shards = evaluations.begin(Step(2));
        let answer = |shard: &Shard, classes| {
            let tallies = [(Metric::F1, Tally::of_classes(classes).unwrap())].into();
            encoded(Evaluation { samples: shard.end - shard.begin, tallies, ..Evaluation::default() })
        };
        assert_eq!(record(&mut evaluations, &shards[1], answer(&shards[1], 3)), []);
        let refused = evaluations.check(&shards[0], answer(&shards[0], 4), 0).unwrap_err();
        assert!(refused.contains("expected counts of 3 classes, found counts of 4 classes"), "{refused}");
        assert_eq!(record(&mut evaluations, &shards[0], answer(&shards[0], 3)).len(), 1);
    }

    #[test]
    fn metrics_are_computed_from_what_all_shards_counted() {
        let metrics = vec![Metric::Rmse, Metric::Auc, Metric::F1, Metric::ConfusionMatrix];
        let mut evaluations = Evaluations::new(epochs(), of(1500), Some(metrics), None);
        let shards = evaluations.begin(Step(2));
        let answer = |shard: &Shard, sum: f64, scores: &[(f32, bool)], class: usize| {
            let samples = shard.end - shard.begin;
            let mut matrix = Confusion::new(2).unwrap();
            matrix.add(class, 0, samples);
            let counts = |right, predicted, labelled| ClassCounts { right, predicted, labelled };
            let classes = match class {
                0 => vec![counts(samples, samples, samples), counts(0, 0, 0)],
                _ => vec![counts(0, samples, 0), counts(0, 0, samples)],
            };
            let scores = Scores::count(scores.iter().copied()).unwrap();
            let tallies = [
                (Metric::Rmse, Tally::Mean { sum, count: samples }),
                (Metric::Auc, Tally::Scores(scores)),
                (Metric::F1, Tally::Classes(classes)),
                (Metric::ConfusionMatrix, Tally::Confusion(matrix)),
            ];
            encoded(Evaluation { samples, tallies: tallies.into(), ..Evaluation::default() })
        };
        let found = answer(&shards[1], 3000.0, &[(0.4, false), (0.8, true)], 1);
        assert_eq!(record(&mut evaluations, &shards[1], found), []);
        let found = answer(&shards[0], 3000.0, &[(0.1, false), (0.35, true)], 0);
        let measured = record(&mut evaluations, &shards[0], found).remove(0).sets.remove(0);
        assert_eq!((measured.metrics["rmse"], measured.metrics["auc"]), (2.0, 0.75));
        assert_eq!(measured.metrics["f1"], f64::midpoint(2.0 * 1024.0 / 2524.0, 0.0));
        assert!(!measured.metrics.contains_key("confusion_matrix"));
        let matrix = measured.confusion.unwrap();
        assert_eq!(matrix.rows().collect::<Vec<_>>(), [[1024, 0], [476, 0]]);
    }

    #[test]
    fn sums_of_a_program_are_added_in_the_order_of_the_shards_whoever_reports_first() {
        let shards = [0.1, 0.7, 1.0e17, -1.0e17];
        let sums = |value: f64, count: u64| -> Sums {
            let own = Sum { values: vec![value, 1.0], is_mean: false };
            [
                ("own".to_owned(), own),
                ("mean".to_owned(), Sum { values: vec![value, count as f64], is_mean: true }),
            ]
            .into()
        };
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
            let mut evaluations = Evaluations::new(epochs(), of(4 * SHARD_RECORDS), None, None);
            let begun = evaluations.begin(Step(2));
            let mut measured = Vec::new();
            for at in order {
                assert_eq!(measured, []);
                let samples = SHARD_RECORDS;
                let found = Evaluation { samples, sums: sums(shards[at], samples), ..Evaluation::default() };
                measured = record(&mut evaluations, &begun[at], encoded(found));
            }
            let set = &measured[0].sets[0];
            let added = shards.into_iter().fold(0.0, |sum, next| sum + next);
            assert_eq!(
                set.sums,
                [("own".to_owned(), Sum { values: vec![added, 4.0], is_mean: false })].into()
            );
            assert_eq!(set.metrics["mean"].to_bits(), (added / 4096.0).to_bits());
        }
    }

    #[test]
    fn sums_of_processes_that_measure_different_metrics_are_refused() {
        let mut evaluations = Evaluations::new(epochs(), of(2 * SHARD_RECORDS), None, None);
        let begun = evaluations.begin(Step(2));
        let found = |name: &str| {
            let sums = [(name.to_owned(), Sum { values: vec![1.0], is_mean: false })].into();
            encoded(Evaluation { samples: SHARD_RECORDS, sums, ..Evaluation::default() })
        };
        record(&mut evaluations, &begun[1], found("mine"));
        let error = evaluations.check(&begun[0], found("other"), 0).unwrap_err();
        assert!(error.contains("expected `mine` of 1 numbers, as in other processes"), "{error}");
        assert_eq!(record(&mut evaluations, &begun[0], found("mine")).len(), 1);
    }

    #[test]
    fn an_evaluation_with_too_many_scores_fails_and_says_what_to_do() {
        let shards = SCORES_MAX / REPORT_SCORES_MAX + 1;
        let records = shards as u64 * SHARD_RECORDS;
        let mut evaluations = Evaluations::new(epochs(), of(records), Some(vec![Metric::Auc]), None);
        let mut failed = None;
        for (at, shard) in evaluations.begin(Step(2)).iter().enumerate() {
            let first = at * REPORT_SCORES_MAX;
            let row = |score: usize| ScoreCounts { score: score as f32, positives: 1, negatives: 0 };
            let scores = Scores::from_table((first..first + REPORT_SCORES_MAX).map(row).collect()).unwrap();
            let tallies = [(Metric::Auc, Tally::Scores(scores))].into();
            let found = Evaluation { samples: SHARD_RECORDS, tallies, ..Evaluation::default() };
            let found = evaluations.check(shard, encoded(found), 0).unwrap();
            assert!(failed.is_none());
            failed = evaluations.record(shard, found).err();
        }
        let said = failed.unwrap();
        assert!(said.starts_with("the evaluation of version 2: metric `auc`: more than 4194304"), "{said}");
        assert!(said.contains("use fewer validation records"), "{said}");
    }

    #[test]
    fn a_job_that_only_evaluates_is_measured_once_at_version_0() {
        let mut evaluations = Evaluations::new(When::Once, of(1500), Some(vec![Metric::Accuracy]), None);
        assert!(!evaluations.is_done());
        let shards = evaluations.begin(Step(0));
        assert!(shards.iter().all(|shard| (shard.epoch, shard.version) == (Epoch(0), Version(0))));
        assert_eq!(record(&mut evaluations, &shards[1], evaluated(&shards[1], 50.0, 76.0)), []);
        assert_eq!(evaluations.records_done(), 476);
        let mut again = evaluations.again(Some(Step(0)));
        let shards = again.begin(Step(0));
        assert_eq!((shards.len(), again.records_done()), (2, 0));
        for shard in &shards {
            record(&mut again, shard, evaluated(shard, 50.0, 76.0));
        }
        assert!(again.is_done() && again.begin(Step(0)).is_empty());
    }

    #[test]
    fn without_validation_records_nothing_is_measured() {
        let mut evaluations = Evaluations::new(epochs(), of(0), Some(vec![]), None);
        assert!(evaluations.begin(Step(4)).is_empty() && evaluations.is_done());
    }
}

//! Bad records that a job skips: which ones, whether they are too many, and what users hear. Pure.
//!
//! Always true here:
//!
//! - A record that is skipped stays skipped, over all epochs and restarts of the master. The
//!   journal has it before a worker hears of it.
//! - The list that users see is the same in whatever order workers find the records: it has the
//!   records that come first in the files, and each has one reason, whoever finds it.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use proto::ids::{IncarnationId, LeaseId};
use proto::pb;
use proto::spec::{DataSet, SKIPPED_MAX};
use proto::status::{Failure, Kind};

use super::end::{Salvage, failed};
use super::work::Shard;
use super::{Job, ended};
use crate::clock::Now;

/// Skipped records that users see, with their reasons.
const LISTED_MAX: usize = 100;

/// Bytes of the places of all other skipped records at most. Each set has half of them, and what
/// the other set leaves.
const FURTHER_BYTES_MAX: usize = 1 << 20;

/// Records of one request at most.
const REQUESTED_MAX: usize = 1000;

/// Characters of a reason that are kept.
const REASON_CHARACTERS: usize = 300;

/// Records that the failure of a job names.
const NAMED_MAX: usize = 3;

/// The skipped records of a job.
#[derive(Debug, Default)]
pub(super) struct Skips {
    train: Skipped,
    validation: Skipped,
}

/// The skipped records of one data set, by their numbers over all files.
#[derive(Debug, Default)]
struct Skipped {
    records: BTreeSet<u64>,
    /// Reasons of the first of them, at most [`LISTED_MAX`].
    reasons: BTreeMap<u64, String>,
}

impl Skips {
    /// Returns the number of skipped records.
    pub(super) fn count(&self) -> u64 {
        (self.train.records.len() + self.validation.records.len()) as u64
    }

    /// Returns the skipped records of a data set, in increasing order.
    pub(super) fn records(&self, set: DataSet) -> Vec<u64> {
        self.of(set).records.iter().copied().collect()
    }

    /// Returns what is written down of a data set. `None`: nothing is skipped.
    pub(super) fn record(&self, set: DataSet) -> Option<pb::SkippedRecords> {
        let reasons = self.of(set).reasons.values().cloned().collect();
        let record = pb::SkippedRecords { records: self.records(set), reasons };
        (!record.records.is_empty()).then_some(record)
    }

    /// Takes over what an earlier start of the master wrote down.
    pub(super) fn restore(
        &mut self,
        train: Option<pb::SkippedRecords>,
        validation: Option<pb::SkippedRecords>,
    ) {
        for (skipped, found) in [(&mut self.train, train), (&mut self.validation, validation)] {
            let pb::SkippedRecords { records, reasons } = found.unwrap_or_default();
            skipped.reasons = records.iter().copied().zip(reasons).collect();
            skipped.records = records.into_iter().collect();
        }
    }

    const fn of(&self, set: DataSet) -> &Skipped {
        match set {
            DataSet::Train => &self.train,
            DataSet::Validation => &self.validation,
        }
    }

    const fn of_mut(&mut self, set: DataSet) -> &mut Skipped {
        match set {
            DataSet::Train => &mut self.train,
            DataSet::Validation => &mut self.validation,
        }
    }
}

impl Skipped {
    /// Adds records; answers whether any of them is new. The first reason of a record stays.
    fn add(&mut self, found: Vec<pb::BadRecord>) -> bool {
        let before = self.records.len();
        for pb::BadRecord { record, reason } in found {
            if self.records.insert(record) {
                self.reasons.insert(record, reason.chars().take(REASON_CHARACTERS).collect());
            }
        }
        while self.reasons.len() > LISTED_MAX {
            self.reasons.pop_last();
        }
        self.records.len() > before
    }
}

impl Job {
    /// Skips records that a worker found bad. The caller waits until that is durable before it
    /// answers the worker.
    ///
    /// # Errors
    /// The lease has ended, the records are none of the job's, or the job skips nothing: nothing
    /// changed. The job would skip more records than it may: it fails.
    pub(crate) fn skip(
        &mut self,
        now: Now,
        worker: IncarnationId,
        lease: LeaseId,
        request: pb::SkipRequest,
    ) -> Result<(), Failure> {
        // A job that closes still finishes the steps that have begun.
        if !self.holds(worker, lease) || self.phase.ends().is_some() {
            return Err(ended(lease));
        }
        let malformed = |message: String| Err(Failure::new(Kind::Malformed, message));
        let set = match request.set() {
            pb::DataSet::Train => DataSet::Train,
            pb::DataSet::Validation => DataSet::Validation,
            pb::DataSet::Unspecified => return malformed("SkipRequest.set: expected a data set".to_owned()),
        };
        let count = request.records.len();
        if !(1..=REQUESTED_MAX).contains(&count) {
            return malformed(format!("SkipRequest.records: expected 1 to {REQUESTED_MAX}, found {count}"));
        }
        let in_files: u64 = self.records_of(set).iter().sum();
        if let Some(bad) = request.records.iter().find(|bad| bad.record >= in_files) {
            return malformed(format!(
                "SkipRequest.records: expected numbers below {in_files}, found {}",
                bad.record
            ));
        }
        if !self.spec.data.may_skip() {
            return malformed(
                "SkipRequest: the job skips no records (data.on_error, data.missing)".to_owned(),
            );
        }
        let is_first = self.skips.of(set).records.is_empty();
        if !self.skips.of_mut(set).add(request.records) {
            return Ok(());
        }
        self.changed = true;
        let (skipped, records) = (self.skips.of(set).records.len() as u64, self.records_in(set));
        let most = self.spec.data.skipped_max(records);
        if skipped > most {
            let reason = self.too_many(set, skipped, most, records);
            self.stop(now, failed(reason.clone()), Salvage::Newest);
            return Err(Failure::new(Kind::Fenced, reason));
        }
        if is_first {
            let first = self.listed(set).next().map(|record| named(&record)).unwrap_or_default();
            let message = format!("bad {} are skipped, at most {most}: {first}", title(set));
            self.warn(now, message);
        }
        Ok(())
    }

    /// Returns the number of skipped records in a data shard of the validation set.
    pub(super) fn skipped_in(&self, shard: &Shard) -> u64 {
        let skipped = &self.skips.of(DataSet::Validation).records;
        if skipped.is_empty() {
            return 0;
        }
        let in_files = self.records_of(DataSet::Validation);
        let Ok(Some(records)) = self.spec.data.records(DataSet::Validation, in_files, self.spec.seed) else {
            return 0;
        };
        let inside = shard.begin..shard.end.min(records.len());
        inside.filter(|&record| skipped.contains(&records.in_files(record))).count() as u64
    }

    /// Returns what users hear of skipped records. `None`: there are none.
    pub(super) fn skipped(&self) -> Option<pb::Skipped> {
        if self.skips.count() == 0 {
            return None;
        }
        let count = |set| self.skips.of(set).records.len() as u64;
        let records = self.listed(DataSet::Train).chain(self.listed(DataSet::Validation));
        let records: Vec<_> = records.take(LISTED_MAX).collect();
        let further = match self.phase.end() {
            Some(_) => self.further(&records),
            None => Vec::new(),
        };
        Some(pb::Skipped {
            train: count(DataSet::Train),
            validation: count(DataSet::Validation),
            records,
            further,
        })
    }

    /// Returns the places of the skipped records behind those that are listed.
    fn further(&self, listed: &[pb::SkippedRecord]) -> Vec<pb::SkippedInFile> {
        let places = |set| {
            let validation = set == DataSet::Validation;
            let listed = listed.iter().filter(|record| record.validation == validation).count();
            let files = self.spec.data.files_of(set).and_then(|source| self.spec.data.files(source));
            let name = |file| files.as_ref().map(|files| files.name(file).to_owned()).unwrap_or_default();
            let found = in_files(self.skips.of(set).records.iter().skip(listed), self.records_of(set));
            let places = |(file, distances)| pb::SkippedInFile { validation, file: name(file), distances };
            found.into_iter().map(places).collect()
        };
        within(FURTHER_BYTES_MAX, places(DataSet::Train), places(DataSet::Validation))
    }

    /// Returns the first skipped records of a data set.
    fn listed(&self, set: DataSet) -> impl Iterator<Item = pb::SkippedRecord> {
        let files = self.spec.data.files_of(set).and_then(|source| self.spec.data.files(source));
        let record = move |(&number, reason): (&u64, &String)| {
            let (file, record) = self.place_of(set, number);
            pb::SkippedRecord {
                validation: set == DataSet::Validation,
                file: files.as_ref().map(|files| files.name(file).to_owned()).unwrap_or_default(),
                record,
                reason: reason.clone(),
            }
        };
        self.skips.of(set).reasons.iter().map(record)
    }

    /// Returns why the job fails with so many skipped records.
    fn too_many(&self, set: DataSet, skipped: u64, most: u64, records: u64) -> String {
        let first: Vec<_> = self.listed(set).take(NAMED_MAX).map(|record| named(&record)).collect();
        let advice = match most {
            SKIPPED_MAX => "no job may skip more; clean the data",
            _ => "clean the data, or raise data.max_bad",
        };
        format!(
            "{skipped} of {records} {} are bad, at most {most} may be skipped (data.max_bad); {}; {advice}",
            title(set),
            first.join("; ")
        )
    }

    /// Returns the index of the file with a record of a data set, and the record's number there.
    /// `number` counts over all files, and is below their records.
    pub(super) fn place_of(&self, set: DataSet, number: u64) -> (usize, u64) {
        let in_files = self.records_of(set);
        let (mut file, mut record) = (0, number);
        while in_files.get(file).is_some_and(|&records| records <= record) {
            record -= in_files[file];
            file += 1;
        }
        (file, record)
    }

    /// Returns the number of records in each file of a data set.
    pub(super) fn records_of(&self, set: DataSet) -> &[u64] {
        let facts = self.phase.facts();
        match (self.spec.data.files_of(set), facts) {
            (Some(DataSet::Train), Some(facts)) => &facts.train_records,
            (Some(DataSet::Validation), Some(facts)) => &facts.validation_records,
            _ => &[],
        }
    }

    /// Returns the number of records of a data set.
    fn records_in(&self, set: DataSet) -> u64 {
        self.phase.facts().map_or(0, |facts| match set {
            DataSet::Train => facts.plan.records,
            DataSet::Validation => facts.validation,
        })
    }
}

/// Returns records by their file, as distances: the number of the first one in the file, and how
/// far each other one is behind the one before. `numbers` increase and count over all files.
fn in_files<'a>(numbers: impl Iterator<Item = &'a u64>, records: &[u64]) -> Vec<(usize, Vec<u64>)> {
    let mut found: Vec<(usize, Vec<u64>)> = Vec::new();
    // The file at hand, its first record, and the record before.
    let (mut file, mut begin, mut before) = (0, 0, 0);
    for &number in numbers {
        while records.get(file).is_some_and(|&records| begin + records <= number) {
            begin += records[file];
            file += 1;
        }
        match found.last_mut() {
            Some((last, distances)) if *last == file => distances.push(number - before),
            _ => found.push((file, vec![number - begin])),
        }
        before = number;
    }
    found
}

/// Returns the places in the first files of each set, with at most `bytes_max` as fields of a
/// message. Each set has half of them, and what the other set leaves.
fn within(
    bytes_max: usize,
    train: Vec<pb::SkippedInFile>,
    validation: Vec<pb::SkippedInFile>,
) -> Vec<pb::SkippedInFile> {
    let room = |other: &[pb::SkippedInFile]| {
        let left = bytes_max.saturating_sub(other.iter().map(field_bytes).sum());
        left.max(bytes_max / 2)
    };
    let rooms = [room(&validation), room(&train)];
    let mut kept = Vec::new();
    for (places, mut room) in [train, validation].into_iter().zip(rooms) {
        for in_file in places {
            let Some(left) = room.checked_sub(field_bytes(&in_file)) else { break };
            room = left;
            kept.push(in_file);
        }
    }
    kept
}

/// Returns the bytes that a message takes as a field of another one.
fn field_bytes(places: &pb::SkippedInFile) -> usize {
    let bytes = places.encoded_len();
    1 + prost::length_delimiter_len(bytes) + bytes
}

const fn title(set: DataSet) -> &'static str {
    match set {
        DataSet::Train => "training records",
        DataSet::Validation => "validation records",
    }
}

/// Names a record for people: `a.csv, record 3: column ..`.
fn named(record: &pb::SkippedRecord) -> String {
    format!("`{}`, record {}: {}", record.file, record.record, record.reason)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Returns files with so many places each.
    fn files(validation: bool, places: &[usize]) -> Vec<pb::SkippedInFile> {
        let file = |(file, &count): (usize, &usize)| {
            let distances = (0..count as u64).map(|place| 1u64 << (7 * (place % 9))).collect();
            pb::SkippedInFile { validation, file: format!("{file}.csv"), distances }
        };
        places.iter().enumerate().map(file).collect()
    }

    fn bytes(kept: &[pb::SkippedInFile]) -> usize {
        let further = kept.to_vec();
        pb::Skipped { further, ..pb::Skipped::default() }.encoded_len()
    }

    #[test]
    fn places_of_one_set_push_out_none_of_the_other() {
        let (train, few) = (files(false, &[100, 100, 100]), files(true, &[10]));
        let all = [&train[..], &few].concat();
        assert_eq!(within(bytes(&all), train.clone(), few.clone()), all, "all have room");
        let first = [&train[..2], &few].concat();
        assert_eq!(within(bytes(&all) - 1, train.clone(), few.clone()), first, "the last file is too much");
        let huge = files(false, &[100_000]);
        assert_eq!(within(200, huge, few.clone()), few, "a file that has no room at all");
        let (few, many) = (files(false, &[10]), files(true, &[10, 1000, 10]));
        let first = [&few[..], &many[..1]].concat();
        assert_eq!(within(200, few, many), first, "none behind the first that has no room");
    }

    proptest! {
        #[test]
        fn each_set_has_its_first_files_in_half_of_the_bytes_and_what_the_other_leaves(
            train in vec(1usize..40, 0..20),
            validation in vec(1usize..40, 0..20),
            bytes_max in 0usize..3000,
        ) {
            let sets = [files(false, &train), files(true, &validation)];
            let kept = within(bytes_max, sets[0].clone(), sets[1].clone());
            prop_assert!(bytes(&kept) <= bytes_max);
            let count = kept.iter().filter(|places| !places.validation).count();
            let parts = [&kept[..count], &kept[count..]];
            for (set, other) in [(0, 1), (1, 0)] {
                prop_assert_eq!(parts[set], &sets[set][..parts[set].len()]);
                if let Some(next) = sets[set].get(parts[set].len()) {
                    let more = bytes(parts[set]) + field_bytes(next);
                    prop_assert!(more > bytes_max / 2, "it has half");
                    prop_assert!(more + bytes(&sets[other]) > bytes_max, "and what the other leaves");
                }
            }
        }
    }

    #[test]
    fn places_count_from_the_begin_of_their_file() {
        let found = in_files([1, 4, 5, 12, 29].iter(), &[5, 0, 7, 18]);
        assert_eq!(found, [(0, vec![1, 3]), (2, vec![0]), (3, vec![0, 17])]);
        assert!(in_files([].iter(), &[5]).is_empty());
    }
}

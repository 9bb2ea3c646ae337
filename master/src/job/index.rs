//! What the workers found in the job's files, and whether a job can be made of it. Pure.

use prost::Message as _;
use proto::checkpoint::trained_on::{DataFile, FileSet, TrainedOn};
use proto::pb;
use proto::plan::Plan;
use proto::spec::{DataSet, FilesSpec, JobSpec, ValidationSet};

use super::work::Work;
use crate::indexes::Indexes;

/// Validation records at most: each evaluation of an epoch has a task for every 1024 of them.
const VALIDATION_RECORDS_MAX: u64 = 1 << 27;

/// What each file holds, as far as it is known.
#[derive(Debug, Default)]
pub(super) struct Index {
    train: Vec<File>,
    validation: Vec<File>,
    /// Files that were recorded, and their bytes.
    done: usize,
    bytes_done: u64,
}

#[derive(Debug)]
struct File {
    path: String,
    /// Key of what is found in it, for later jobs. `None`: nothing is kept.
    key: Option<String>,
    /// What an earlier task found, if the file is as it was.
    known: Option<pb::Indexed>,
    found: Option<pb::Indexed>,
}

/// What is known of the data once all files are indexed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// Records of each training file.
    pub(super) train_records: Vec<u64>,
    /// Records of each file of validation's own.
    pub(super) validation_records: Vec<u64>,
    /// Bytes of each training file; 0 where workers of an older version indexed it.
    pub(super) train_bytes: Vec<u64>,
    /// Bytes of each file of validation's own, likewise.
    pub(super) validation_bytes: Vec<u64>,
    /// Version of each training file; empty for local files.
    pub(super) train_versions: Vec<String>,
    /// Version of each file of validation's own, likewise.
    pub(super) validation_versions: Vec<String>,
    /// Largest class label.
    pub(super) label_max: Option<i64>,
    /// The numbering of the job's work.
    pub(super) plan: Plan,
    /// Validation records; 0 for none.
    pub(super) validation: u64,
    /// The validation sets: ranges of these records.
    pub(super) sets: Vec<ValidationSet>,
    /// Which records are trained in which order; `None` where workers of an older version indexed
    /// the files.
    pub(super) trained_on: Option<TrainedOn>,
}

impl Facts {
    /// Returns the number of lanes of the order `window`; 0 for another order.
    pub(super) fn lanes(&self, spec: &JobSpec) -> usize {
        let files = self.train_records.iter().filter(|&&records| records > 0).count();
        spec.data.windows().map_or(0, |(_, interleave)| files.min(interleave as usize))
    }

    /// Returns the number of records that a job which does not train goes over; 0 if it trains.
    pub(super) fn measured(&self, spec: &JobSpec) -> u64 {
        match spec.measured_set() {
            None => 0,
            Some(DataSet::Train) => self.plan.records,
            Some(DataSet::Validation) => self.validation,
        }
    }
}

impl Index {
    pub(super) fn new(spec: &JobSpec) -> Self {
        let files = |set| {
            let files = spec.data.files(set).into_iter();
            let names = files.flat_map(|files| (0..files.len()).map(move |file| files.name(file).to_owned()));
            let keys = spec.index_keys(set).into_iter().map(Some).chain(std::iter::repeat(None));
            names.zip(keys).map(|(path, key)| File { path, key, known: None, found: None }).collect()
        };
        let (train, validation) = (files(DataSet::Train), files(DataSet::Validation));
        Self { train, validation, done: 0, bytes_done: 0 }
    }

    /// Returns one task for each file.
    pub(super) fn work(&self) -> Vec<Work> {
        let of = |files: &[File], validation| -> Vec<Work> {
            let work = |(file, f): (usize, &File)| Work::Index { validation, file, path: f.path.clone() };
            files.iter().enumerate().map(work).collect()
        };
        [of(&self.train, false), of(&self.validation, true)].concat()
    }

    /// Takes over what earlier tasks found in these files.
    pub(super) fn know(&mut self, indexes: &Indexes) {
        for file in self.train.iter_mut().chain(&mut self.validation) {
            file.known = file.key.as_ref().and_then(|key| indexes.get(key)).cloned();
        }
    }

    /// Returns the key of what is found in a file.
    pub(super) fn key(&self, validation: bool, file: usize) -> Option<&str> {
        let files = if validation { &self.validation } else { &self.train };
        files.get(file)?.key.as_deref()
    }

    /// Returns what workers that open the files need not read them for: at most so many bytes of
    /// messages.
    pub(super) fn known_files(
        &self,
        validation: bool,
        indexes: &Indexes,
        bytes_left: &mut usize,
    ) -> Vec<pb::KnownFile> {
        let files = if validation { &self.validation } else { &self.train };
        let known = files.iter().zip(0..).filter_map(|(file, at)| {
            let pb::Indexed { stamp, cuts, .. } = indexes.get(file.key.as_ref()?)?;
            let known = pb::KnownFile { file: at, stamp: stamp.clone(), cuts: Some(cuts.clone()?) };
            *bytes_left = bytes_left.checked_sub(known.encoded_len())?;
            Some(known)
        });
        known.collect()
    }

    /// Returns what an earlier task found in a file.
    pub(super) fn known(&self, validation: bool, file: usize) -> Option<&pb::Indexed> {
        let files = if validation { &self.validation } else { &self.train };
        files.get(file)?.known.as_ref()
    }

    /// Takes a worker's answer.
    pub(super) fn record(&mut self, validation: bool, file: usize, found: pb::Indexed) {
        let files = if validation { &mut self.validation } else { &mut self.train };
        files[file].known = None;
        if files[file].found.is_none() {
            self.done += 1;
            self.bytes_done = self.bytes_done.saturating_add(found.bytes);
        }
        // The record of a job is written often, and this may be large. `Indexes` has it.
        files[file].found = Some(pb::Indexed { cuts: None, ..found });
    }

    /// Returns how far it is.
    pub(super) fn progress(&self) -> pb::Indexing {
        let files = self.train.len() + self.validation.len();
        pb::Indexing { files_done: self.done as u64, files: files as u64, bytes_done: self.bytes_done }
    }

    /// Returns how far it is, if the file that was recorded last is one of which users are told:
    /// the first one of each hundredth, but for the last file of all.
    pub(super) fn news(&self) -> Option<pb::Indexing> {
        let progress = self.progress();
        let pb::Indexing { files_done, files, .. } = progress;
        let hundredths = |done: u64| done * 100 / files.max(1);
        let is_news = files_done < files && hundredths(files_done) > hundredths(files_done.saturating_sub(1));
        is_news.then_some(progress)
    }

    /// Returns what all files hold, those of validation apart; `None` while one is not indexed.
    pub(super) fn found(&self) -> Option<(Vec<pb::Indexed>, Vec<pb::Indexed>)> {
        let of = |files: &[File]| files.iter().map(|file| file.found.clone()).collect::<Option<Vec<_>>>();
        Some((of(&self.train)?, of(&self.validation)?))
    }

    /// Takes what an earlier start of the master found; false when that is not all of it.
    pub(super) fn restore(&mut self, train: Vec<pb::Indexed>, validation: Vec<pb::Indexed>) -> bool {
        let whole = train.len() == self.train.len() && validation.len() == self.validation.len();
        if whole && !train.is_empty() {
            let files = self.train.iter_mut().chain(&mut self.validation);
            files.zip(train.into_iter().chain(validation)).for_each(|(file, found)| file.found = Some(found));
        }
        whole
    }

    /// Returns whether the files go together and with the specification; all of them must be
    /// indexed.
    ///
    /// # Errors
    /// What does not, for the user.
    pub(super) fn facts(&self, spec: &JobSpec) -> Result<Facts, String> {
        let found: Vec<(&File, &pb::Indexed)> =
            self.train.iter().chain(&self.validation).map(indexed).collect();
        check_inputs(&found)?;
        if spec.model.loss.wants_classes() {
            let labelled = [(DataSet::Train, &self.train), (DataSet::Validation, &self.validation)];
            let labelled = labelled.into_iter().filter(|(set, _)| spec.needs_labels(*set));
            check_classes(labelled.flat_map(|(_, files)| files).map(indexed))?;
        }
        let records = |files: &[File]| files.iter().map(|file| indexed(file).1.records).collect::<Vec<_>>();
        let (train_records, validation_records) = (records(&self.train), records(&self.validation));
        let bytes = |file: &File| indexed(file).1.crc32c.map_or(0, |_| indexed(file).1.bytes);
        let bytes = |files: &[File]| files.iter().map(bytes).collect::<Vec<_>>();
        let (train_bytes, validation_bytes) = (bytes(&self.train), bytes(&self.validation));
        let versions = |files: &[File]| files.iter().map(|file| indexed(file).1.version.clone()).collect();
        let (train_versions, validation_versions) = (versions(&self.train), versions(&self.validation));
        let count = |set| {
            let files = match spec.data.files_of(set) {
                Some(DataSet::Validation) => &validation_records,
                _ => &train_records,
            };
            let records = spec.data.records(set, files, spec.seed).map_err(|error| error.to_string())?;
            Ok::<_, String>(records.map_or(0, |records| records.len()))
        };
        let (train, validation) = (count(DataSet::Train)?, count(DataSet::Validation)?);
        if validation > VALIDATION_RECORDS_MAX {
            return Err(format!(
                "{validation} records validate, at most {VALIDATION_RECORDS_MAX} may; choose fewer with data.validation.records"
            ));
        }
        if spec.measured_set() == Some(DataSet::Train) && train > VALIDATION_RECORDS_MAX {
            return Err(format!(
                "{train} records are to be predicted, at most {VALIDATION_RECORDS_MAX} may; choose fewer with data.train.records"
            ));
        }
        let plan = Plan::try_from(pb::Plan::from(spec.plan(train)))
            .map_err(|error| format!("the job is too large: {error}"))?;
        let label_max = found.iter().filter_map(|(_, found)| found.label_max).max();
        let trained_on = self.trained_on(spec, validation);
        let sets = spec.data.validation_ranges(&validation_records, validation);
        Ok(Facts {
            train_records,
            validation_records,
            train_bytes,
            validation_bytes,
            train_versions,
            validation_versions,
            label_max,
            plan,
            validation,
            sets,
            trained_on,
        })
    }

    fn trained_on(&self, spec: &JobSpec, validation: u64) -> Option<TrainedOn> {
        let file = |file: &File| {
            let (File { path, .. }, found) = indexed(file);
            let (records, bytes, crc32c) = (found.records, found.bytes, found.crc32c?);
            Some(DataFile { path: path.clone(), records, bytes, crc32c })
        };
        let files = |files: &[File], of: &FilesSpec| {
            let files: Vec<_> = files.iter().map(file).collect::<Option<_>>()?;
            let all = files.iter().map(|file| file.records).sum();
            Some(FileSet::new(files, of.records.unwrap_or((0, all))))
        };
        // Named sets may come and go between the runs of a job.
        let own = match &spec.data.validation {
            Some(of) => Some(files(&self.validation[..of.len()], of)?),
            None => None,
        };
        let split = if spec.data.validation_fraction.is_some() { validation } else { 0 };
        Some(TrainedOn::new(spec, split, files(&self.train, &spec.data.train)?, own))
    }
}

fn indexed(file: &File) -> (&File, &pb::Indexed) {
    (file, file.found.as_ref().expect("all files are indexed"))
}

fn check_inputs(found: &[(&File, &pb::Indexed)]) -> Result<(), String> {
    let mut filled = found.iter().filter(|(_, found)| found.records > 0);
    let Some((first, of_first)) = filled.next() else { return Ok(()) };
    // A journal of an older version has the shape alone.
    let differ = |found: &pb::Indexed| (&found.inputs, &found.shape) != (&of_first.inputs, &of_first.shape);
    match filled.find(|(_, found)| differ(found)) {
        None => Ok(()),
        Some((other, found)) => Err(format!(
            "records of `{}` have {}, those of `{}` have {}; all files of a job must agree: convert or leave out those \
             that differ",
            other.path,
            describe(found),
            first.path,
            describe(of_first)
        )),
    }
}

fn describe(found: &pb::Indexed) -> String {
    let column = |column: &pb::Column| format!("`{}` {}{:?}", column.name, column.dtype, column.shape);
    match found.inputs.is_empty() {
        true => format!("shape {:?}", found.shape),
        false => found.inputs.iter().map(column).collect::<Vec<_>>().join(", "),
    }
}

fn check_classes<'a>(found: impl Iterator<Item = (&'a File, &'a pb::Indexed)>) -> Result<(), String> {
    for (file, found) in found.filter(|(_, found)| found.records > 0) {
        let path = &file.path;
        match found.label_min {
            Some(0..) => {}
            Some(label) => {
                return Err(format!(
                    "`{path}` has label {label}; this loss needs classes, which count from 0"
                ));
            }
            None => {
                return Err(format!(
                    "`{path}` has no class labels, which this loss needs; choose another model.loss or other labels"
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proto::spec::{PredictSpec, Purpose};

    use super::*;

    fn spec(edit: impl FnOnce(&mut JobSpec)) -> JobSpec {
        let mut spec = super::super::tests::spec();
        spec.data.train.lists.insert("features".to_owned(), vec!["a.gz".to_owned(), "b.gz".to_owned()]);
        edit(&mut spec);
        spec
    }

    fn file(records: u64, shape: &[u64], labels: Option<(i64, i64)>) -> pb::Indexed {
        let (label_min, label_max) = labels.unzip();
        let column =
            pb::Column { name: "x".to_owned(), dtype: "u8".to_owned(), shape: shape.to_vec(), ragged: false };
        let inputs = vec![column];
        pb::Indexed {
            records,
            inputs,
            label_min,
            label_max,
            crc32c: Some(7),
            bytes: 70,
            ..Default::default()
        }
    }

    fn facts(spec: &JobSpec, files: [pb::Indexed; 2]) -> Result<Facts, String> {
        let mut index = Index::new(spec);
        assert_eq!(index.work().len(), 2 + index.validation.len());
        for (number, found) in files.into_iter().enumerate() {
            index.record(false, number, found);
        }
        for number in 0..index.validation.len() {
            index.record(true, number, file(5, &[2], Some((0, 9))));
        }
        index.facts(spec)
    }

    #[test]
    fn users_are_told_of_each_hundredth_of_the_files() {
        let told = |files: usize| {
            let names = (0..files).map(|file| format!("{file}.gz")).collect();
            let mut index =
                Index::new(&spec(|spec| drop(spec.data.train.lists.insert("features".to_owned(), names))));
            index.validation.clear();
            let told = |file| {
                index.record(false, file, self::file(1, &[2], None));
                index.news().map(|news| (news.files_done, news.files, news.bytes_done))
            };
            (0..files).filter_map(told).collect::<Vec<_>>()
        };
        assert!(told(1).is_empty());
        assert_eq!(told(3), [(1, 3, 70), (2, 3, 140)]);
        let many = told(1000);
        assert_eq!((many.len(), many[0], many[98]), (99, (10, 1000, 700), (990, 1000, 69_300)));
    }

    #[test]
    fn records_are_counted_over_all_files() {
        let spec = spec(|spec| spec.data.validation_fraction = Some(0.25));
        let facts =
            facts(&spec, [file(30, &[2], Some((0, 2))), file(10, &[2], Some((1, 3)))]).expect("good files");
        assert_eq!((facts.plan.records, facts.validation, facts.label_max), (30, 10, Some(3)));
        assert_eq!((facts.train_records, facts.validation_records), (vec![30, 10], vec![]));
        assert_eq!((facts.train_bytes, facts.validation_bytes), (vec![70, 70], vec![]));
        let trained_on = facts.trained_on.expect("all files have their checksum");
        assert_eq!((trained_on.split, trained_on.train.records, trained_on.train.count), (10, (0, 40), 2));
    }

    #[test]
    fn files_without_their_checksum_do_not_say_what_is_trained_on() {
        let old = pb::Indexed { crc32c: None, ..file(30, &[2], Some((0, 2))) };
        let facts = facts(&spec(|_| ()), [file(30, &[2], Some((0, 2))), old]).expect("good files");
        assert_eq!((facts.trained_on, facts.train_bytes), (None, vec![70, 0]));
    }

    #[test]
    fn files_of_validation_are_counted_for_themselves() {
        let spec = spec(|spec| spec.data.validation = Some(spec.data.train.clone()));
        let facts = facts(&spec, [file(3, &[2], Some((0, 2))), file(0, &[], None)]).expect("good files");
        assert_eq!((facts.plan.records, facts.validation, facts.label_max), (3, 10, Some(9)));
    }

    #[test]
    fn only_files_that_are_predicted_may_lack_class_labels() {
        let spec = spec(|spec| spec.data.validation = Some(spec.data.train.clone()));
        let predicting = |on| {
            let predict = PredictSpec::new(on, "/p.jsonl".to_owned());
            JobSpec { purpose: Purpose::Predict, predict: Some(predict), ..spec.clone() }
        };
        let files = || [file(3, &[2], Some((0, 1))), file(3, &[2], None)];
        let found = facts(&predicting(DataSet::Train), files()).expect("the files are predicted");
        assert_eq!((found.plan.records, found.label_max), (6, Some(9)));
        let refused = facts(&predicting(DataSet::Validation), files()).expect_err("the others are not");
        assert!(refused.contains("`b.gz` has no class labels"), "{refused}");
    }

    #[test]
    fn a_count_that_nobody_could_measure_is_refused_before_memory_is_taken() {
        let spec = spec(|spec| spec.data.validation_fraction = Some(0.5));
        let huge = || file(1 << 40, &[2], Some((0, 1)));
        let refused = facts(&spec, [huge(), huge()]).expect_err("too many");
        assert!(refused.contains("1099511627776 records validate, at most 134217728 may"), "{refused}");
    }

    #[test]
    fn what_does_not_go_together_is_refused_by_name() {
        let good = || file(3, &[2], Some((0, 1)));
        let refuse = |spec: &JobSpec, files| facts(spec, files).expect_err("bad files");
        let plain = spec(|_| ());
        for (message, expected) in [
            (
                refuse(&plain, [good(), file(3, &[4], Some((0, 1)))]),
                "`b.gz` have `x` u8[4], those of `a.gz` have `x` u8[2]",
            ),
            (refuse(&plain, [good(), file(3, &[2], Some((-1, 1)))]), "`b.gz` has label -1"),
            (refuse(&plain, [good(), file(3, &[2], None)]), "`b.gz` has no class labels"),
            (refuse(&plain, [file(0, &[2], None), file(0, &[2], None)]), "no records"),
            (
                refuse(&spec(|spec| spec.data.train.records = Some((2, 7))), [good(), good()]),
                "data.train.records = [2, 7]: the files have 6 records",
            ),
            (
                refuse(
                    &spec(|spec| spec.data.validation_fraction = Some(0.5)),
                    [file(1, &[2], Some((0, 1))), file(0, &[2], None)],
                ),
                "has 1 record",
            ),
            (refuse(&plain, [file(1 << 62, &[2], Some((0, 1))), good()]), "too large"),
        ] {
            assert!(message.contains(expected), "{message}");
        }
    }
}

//! The validation sets of a job: `data.validation`, and those that `data.validation_sets` names.
//!
//! All validation files are one data set: those of `data.validation` first, then those of the named
//! sets in the order of their names. Each set is a range of its records. So indexes, skipped
//! records and tasks need no names.
//!
//! With 10 records in `data.validation` and 5 in the set `test`, the ranges are `[0, 10)` and
//! `[10, 15)`.

use std::borrow::Cow;
use std::ops::Range;

use super::{DataSet, DataSpec, FilesSpec};

/// The records of one validation set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationSet {
    /// Name of the set. Empty: `data.validation`, or the `validation_fraction`.
    pub name: String,
    /// Records of the set among all validation records, from 0.
    pub records: Range<u64>,
}

impl DataSpec {
    /// Returns whether the job has validation records.
    pub fn validates(&self) -> bool {
        self.validation.is_some() || self.validation_fraction.is_some() || !self.validation_sets.is_empty()
    }

    /// Returns the files of each validation set that has some, with its name.
    pub(super) fn validation_files(&self) -> impl Iterator<Item = (&str, &FilesSpec)> {
        let named = self.validation_sets.iter().map(|(name, files)| (name.as_str(), files));
        self.validation.iter().map(|files| ("", files)).chain(named)
    }

    /// Returns the files of a data set, if it has files of its own. Those of several validation
    /// sets are one list after the other, without `records`.
    pub fn files(&self, set: DataSet) -> Option<Cow<'_, FilesSpec>> {
        if set == DataSet::Train {
            return Some(Cow::Borrowed(&self.train));
        }
        let mut sets = self.validation_files().map(|(_, files)| files);
        let first = sets.next()?;
        if self.validation_sets.is_empty() {
            return Some(Cow::Borrowed(first));
        }
        let mut all = FilesSpec { records: None, lists: first.lists.clone() };
        let is_single = all.lists.len() == 1;
        for (key, names) in sets.flat_map(|files| &files.lists) {
            // A single list has one of two names.
            let list = if is_single { all.lists.values_mut().next() } else { all.lists.get_mut(key) };
            list.into_iter().for_each(|list| list.extend(names.iter().cloned()));
        }
        Some(Cow::Owned(all))
    }

    /// Returns the place of a validation set's first file among all validation files.
    pub fn first_validation_file(&self, name: &str) -> usize {
        let before = self.validation_files().take_while(|(of, _)| *of != name);
        before.map(|(_, files)| files.len()).sum()
    }

    /// Returns the records that each validation set cuts from its files, numbered over all
    /// validation files. The error names the section of a set whose files lack records.
    pub(super) fn validation_cuts(&self, in_files: &[u64]) -> Result<Vec<Range<u64>>, String> {
        let (mut file, mut first) = (0, 0u64);
        let cut = |(name, files): (&str, &FilesSpec)| {
            let own = in_files.get(file..file + files.len()).unwrap_or_default();
            let found = own.iter().fold(0u64, |sum, &records| sum.saturating_add(records));
            let cut = files.cut(&section(name), found)?;
            let cut = first + cut.start..first + cut.end;
            (file, first) = (file + files.len(), first.saturating_add(found));
            Ok(cut)
        };
        self.validation_files().map(cut).collect()
    }

    /// Returns the validation sets of a job with `records` validation records. `in_files` are the
    /// numbers of records in each validation file, in order.
    pub fn validation_ranges(&self, in_files: &[u64], records: u64) -> Vec<ValidationSet> {
        if records == 0 {
            return Vec::new();
        }
        let whole = || vec![ValidationSet { name: String::new(), records: 0..records }];
        if self.validation_fraction.is_some() {
            return whole();
        }
        let Ok(cuts) = self.validation_cuts(in_files) else { return whole() };
        let mut begin = 0;
        let set = |((name, _), cut): ((&str, &FilesSpec), Range<u64>)| {
            let records = begin..begin + (cut.end - cut.start);
            begin = records.end;
            ValidationSet { name: name.to_owned(), records }
        };
        self.validation_files().zip(cuts).map(set).collect()
    }

    pub(super) fn validate_sets(&self, check: &mut impl FnMut(bool, String)) {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        for name in self.validation_sets.keys() {
            check(
                (1..=64).contains(&name.len()) && name.chars().all(plain),
                format!("data.validation_sets: `{name}` is not 1 to 64 letters, digits, `-` or `_`"),
            );
            check(
                !["train", "validation"].contains(&name.as_str()),
                format!("data.validation_sets: `{name}` has a meaning already; choose another name"),
            );
        }
        check(
            self.validation_sets.len() <= SETS_MAX,
            format!("data.validation_sets: {} sets, at most {SETS_MAX}", self.validation_sets.len()),
        );
        check(
            self.validation_sets.is_empty() || self.validation_fraction.is_none(),
            "data.validation_sets: with `validation_fraction` there are none; give files in `data.validation` instead of the \
             fraction"
                .to_owned(),
        );
        let mut sets = self.validation_files();
        let Some((first, of_first)) = sets.next() else { return };
        for (name, files) in sets.filter(|_| self.format.has_one_column()) {
            check(
                files.lists.keys().eq(of_first.lists.keys()),
                format!(
                    "{}: its lists must have the same names as those of {}",
                    section(name),
                    section(first)
                ),
            );
        }
    }
}

/// Most named validation sets.
const SETS_MAX: usize = 64;

/// Returns the section of a validation set in the job file.
pub(super) fn section(name: &str) -> String {
    if name.is_empty() { "data.validation".to_owned() } else { format!("data.validation_sets.{name}") }
}

impl FilesSpec {
    /// Returns the used records of files that have `found` records. `key` names the section.
    pub(super) fn cut(&self, key: &str, found: u64) -> Result<Range<u64>, String> {
        let (begin, end) = self.records.unwrap_or((0, found));
        if end > found {
            return Err(format!("{key}.records = [{begin}, {end}]: the files have {found} records"));
        }
        if begin >= end {
            return Err(format!("{key}: the files have no records"));
        }
        Ok(begin..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(extra: &str) -> DataSpec {
        toml::from_str(&format!("format = \"csv\"\ntrain = {{ files = [\"t.csv\"] }}\n{extra}")).unwrap()
    }

    const SETS: &str = r#"
        validation = { files = ["a.csv", "b.csv"], records = [2, 12] }
        [validation_sets]
        test = { features = ["c.csv"] }
        dev = { files = ["d.csv", "e.csv"], records = [1, 3] }
    "#;

    #[test]
    fn all_validation_files_are_one_list_in_the_order_of_the_sets() {
        let spec = spec(SETS);
        let files = spec.files(DataSet::Validation).unwrap();
        let names: Vec<_> = (0..files.len()).map(|file| files.name(file)).collect();
        assert_eq!(names, ["a.csv", "b.csv", "d.csv", "e.csv", "c.csv"]);
        assert_eq!(["", "dev", "test"].map(|set| spec.first_validation_file(set)), [0, 2, 4]);
        assert_eq!(spec.files(DataSet::Train).unwrap().len(), 1);
    }

    #[test]
    fn each_set_is_a_range_of_all_validation_records() {
        let spec = spec(SETS);
        let in_files = [5, 9, 2, 2, 4];
        let records = spec.records(DataSet::Validation, &in_files, 3).unwrap().unwrap();
        let of_files: Vec<_> = (0..records.len()).map(|record| records.in_files(record)).collect();
        assert_eq!(of_files, (2..12).chain(15..17).chain(18..22).collect::<Vec<_>>());
        assert_eq!(records.shards(&in_files), [3, 7, 1, 1, 4]);
        let sets = spec.validation_ranges(&in_files, records.len());
        let sets: Vec<_> = sets.iter().map(|set| (set.name.as_str(), set.records.clone())).collect();
        assert_eq!(sets, [("", 0..10), ("dev", 10..12), ("test", 12..16)]);
    }

    #[test]
    fn a_set_without_enough_records_is_named() {
        let message = spec(SETS).records(DataSet::Validation, &[5, 9, 1, 1, 4], 3).unwrap_err().to_string();
        assert!(message.contains("data.validation_sets.dev.records = [1, 3]"), "{message}");
        let message = spec(SETS).records(DataSet::Validation, &[5, 9, 2, 2, 0], 3).unwrap_err().to_string();
        assert!(message.contains("data.validation_sets.test: the files have no records"), "{message}");
    }

    #[test]
    fn sets_that_cannot_be_are_refused() {
        let refused = |extra: &str| {
            let mut wrong = Vec::new();
            spec(extra).validate_sets(&mut |ok, message| wrong.extend((!ok).then_some(message)));
            wrong.join("; ")
        };
        assert_eq!(refused(SETS), "");
        let of = |name: &str| format!("validation_sets = {{ \"{name}\" = {{ files = [\"a\"] }} }}");
        assert!(refused(&of("a/b")).contains("`a/b` is not 1 to 64 letters"));
        assert!(refused(&of("train")).contains("has a meaning already"));
        assert!(
            refused(&format!("validation_fraction = 0.5\n{}", of("dev"))).contains("validation_fraction")
        );
    }
}

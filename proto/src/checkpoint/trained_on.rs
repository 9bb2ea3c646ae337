//! Data that decides the records of each step. A run that continues with other data trains some
//! records of the epoch more than once, and others never.
//!
//! Files are compared by content and not by name, so data that moved is still the same data.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::spec::{JobSpec, Shuffle};

/// Most files that a manifest names. [`FileSet::sha256`] covers all files.
const FILES_NAMED_MAX: usize = 1024;

/// Most differences between two lists of files that are named.
const DIFFERENCES_MAX: usize = 3;

/// The seed, the order and the records of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainedOn {
    /// `seed` of the job file.
    pub seed: u64,
    /// `data.shuffle` of the job file.
    pub shuffle: Shuffle,
    /// Records of a window and number of lanes, if the order has windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<(u64, u32)>,
    /// Number of training records that validate instead, because of `data.validation_fraction`.
    pub split: u64,
    /// The training files.
    pub train: FileSet,
    /// The validation files, if the job has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<FileSet>,
}

/// Files in the order of the job file, and the range of their records that is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSet {
    /// Used records `[begin, end)`, counted over all files.
    pub records: (u64, u64),
    /// Number of files.
    pub count: u64,
    /// SHA-256, in lower-case hex, over records, bytes and checksum of every file in order.
    pub sha256: String,
    /// The first 1024 files, so that an error can name one that differs.
    pub files: Vec<DataFile>,
}

/// One data file, or a file of features with its file of labels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Path of the features, as in the job file.
    pub path: String,
    /// Number of records.
    pub records: u64,
    /// Size of the content without compression, in bytes: features and labels together.
    pub bytes: u64,
    /// CRC-32C of the content without compression: features, then labels.
    pub crc32c: u32,
}

impl DataFile {
    fn holds_the_same(&self, other: &Self) -> bool {
        (self.records, self.bytes, self.crc32c) == (other.records, other.bytes, other.crc32c)
    }
}

impl FileSet {
    /// Builds the set of these files, with their used records `[begin, end)`.
    pub fn new(mut files: Vec<DataFile>, records: (u64, u64)) -> Self {
        let mut hash = Sha256::new();
        for DataFile { path: _, records, bytes, crc32c } in &files {
            hash.update(records.to_le_bytes());
            hash.update(bytes.to_le_bytes());
            hash.update(crc32c.to_le_bytes());
        }
        let sha256 = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let count = files.len() as u64;
        files.truncate(FILES_NAMED_MAX);
        Self { records, count, sha256, files }
    }

    fn differences(&self, job: &Self, key: &str, differs: &mut impl FnMut(&str, String, String)) {
        if self.count != job.count {
            let files = |set: &Self| format!("{} files", set.count);
            differs(key, files(self), files(job));
        } else if self.sha256 != job.sha256 {
            let pairs = self.files.iter().zip(&job.files).enumerate();
            let others: Vec<_> = pairs.filter(|(_, (was, is))| !was.holds_the_same(is)).collect();
            for (at, (was, is)) in others.iter().take(DIFFERENCES_MAX) {
                let content = if (was.records, was.bytes) == (is.records, is.bytes) {
                    " with another content"
                } else {
                    ""
                };
                let file = |file: &DataFile| {
                    format!("`{}` ({} records, {} bytes)", file.path, file.records, file.bytes)
                };
                differs(&format!("{key}: file {at}"), file(was), format!("{}{content}", file(is)));
            }
            let more = others.len().saturating_sub(DIFFERENCES_MAX);
            if more > 0 || others.is_empty() {
                let number = if others.is_empty() { "some".to_owned() } else { more.to_string() };
                differs(key, format!("{number} more files"), "another content".to_owned());
            }
        }
        if self.records != job.records {
            let records = |(begin, end)| format!("records {begin} to {end}");
            differs(&format!("{key}.records"), records(self.records), records(job.records));
        }
    }
}

impl TrainedOn {
    /// Collects what a job trains on. `split` is the number of training records that validate
    /// instead.
    pub fn new(spec: &JobSpec, split: u64, train: FileSet, validation: Option<FileSet>) -> Self {
        let windows = spec.data.windows();
        Self { seed: spec.seed, shuffle: spec.data.shuffle, windows, split, train, validation }
    }

    /// Returns every setting in which `job` differs from the checkpoint, each as "seed: 1 in the
    /// checkpoint, 2 in the job". An empty list means that both train the same records in the same
    /// order.
    pub fn differences(&self, job: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let mut differs = |key: &str, was: String, is: String| {
            if was != is {
                found.push(format!("{key}: {was} in the checkpoint, {is} in the job"));
            }
        };
        differs("seed", self.seed.to_string(), job.seed.to_string());
        differs("data.shuffle", name(self.shuffle).to_owned(), name(job.shuffle).to_owned());
        if let (Some(was), Some(is)) = (self.windows, job.windows) {
            differs("data.window", was.0.to_string(), is.0.to_string());
            differs("data.interleave", was.1.to_string(), is.1.to_string());
        }
        let records = |split: u64| match split {
            0 => "no records".to_owned(),
            records => format!("{records} records"),
        };
        differs("data.validation_fraction", records(self.split), records(job.split));
        self.train.differences(&job.train, "data.train", &mut differs);
        match (&self.validation, &job.validation) {
            (Some(was), Some(is)) => was.differences(is, "data.validation", &mut differs),
            (was, is) => {
                let files = |set: &Option<FileSet>| set.as_ref().map_or(0, |set| set.count);
                differs("data.validation", format!("{} files", files(was)), format!("{} files", files(is)));
            }
        }
        found
    }
}

/// Returns the order's name in the job file.
const fn name(shuffle: Shuffle) -> &'static str {
    match shuffle {
        Shuffle::Records => "records",
        Shuffle::Window => "window",
        Shuffle::None => "none",
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::checkpoint) fn file(path: &str, crc32c: u32) -> DataFile {
        DataFile { path: path.to_owned(), records: 10, bytes: 100, crc32c }
    }

    pub(in crate::checkpoint) fn trained_on(files: Vec<DataFile>) -> TrainedOn {
        let records = files.iter().map(|file| file.records).sum();
        TrainedOn {
            seed: 1,
            shuffle: Shuffle::Records,
            windows: None,
            split: 0,
            train: FileSet::new(files, (0, records)),
            validation: None,
        }
    }

    fn files(crcs: impl IntoIterator<Item = u32>) -> Vec<DataFile> {
        crcs.into_iter().enumerate().map(|(at, crc32c)| file(&format!("{at}.csv"), crc32c)).collect()
    }

    #[test]
    fn every_difference_is_named() {
        let was = trained_on(files([1, 2]));
        assert!(was.differences(&was).is_empty());
        let mut is = trained_on(files([1, 3]));
        (is.seed, is.shuffle, is.split, is.train.records) = (2, Shuffle::None, 4, (0, 19));
        is.validation = Some(FileSet::new(files([7]), (0, 10)));
        assert_eq!(
            was.differences(&is),
            [
                "seed: 1 in the checkpoint, 2 in the job",
                "data.shuffle: records in the checkpoint, none in the job",
                "data.validation_fraction: no records in the checkpoint, 4 records in the job",
                "data.train: file 1: `1.csv` (10 records, 100 bytes) in the checkpoint, `1.csv` (10 records, 100 bytes) with another \
             content in the job",
                "data.train.records: records 0 to 20 in the checkpoint, records 0 to 19 in the job",
                "data.validation: 0 files in the checkpoint, 1 files in the job",
            ]
        );
    }

    #[test]
    fn a_file_is_told_by_its_content_and_not_by_its_name() {
        let (was, moved) = (trained_on(vec![file("a.csv", 1)]), trained_on(vec![file("there/b.csv", 1)]));
        assert!(was.differences(&moved).is_empty());
    }

    #[test]
    fn of_many_files_some_are_named_and_all_are_compared() {
        let was = trained_on(files(0..2000));
        assert_eq!((was.train.count, was.train.files.len()), (2000, FILES_NAMED_MAX));
        let differences = |edit: fn(u32) -> u32| was.differences(&trained_on(files((0..2000).map(edit))));
        let early = differences(|at| at + u32::from(at < 5));
        assert!(early.len() == 4 && early[3].contains("2 more files"), "{early:?}");
        let late = differences(|at| at + u32::from(at == 1999));
        assert!(late.len() == 1 && late[0].contains("some more files"), "{late:?}");
    }
}

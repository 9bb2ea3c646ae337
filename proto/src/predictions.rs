//! Parts of predictions: their records, names and format, on which master and workers agree. Pure.
//!
//! A worker writes the predictions of a part in one piece, under a name that its range of records
//! decides. So whoever writes a part again replaces it by equal bytes. The parts depend on the
//! number of records alone, not on the fleet.

use std::fmt;
use std::ops::Range;

use crate::ids::JobId;

/// Fewest records of a part; the last part may have fewer.
pub const PART_RECORDS_MIN: u64 = 256;

/// Most parts of a job.
pub const PARTS_MAX: u64 = 4096;

/// Name of the file that lists the parts of predictions which are not joined. It is written last.
pub const MANIFEST: &str = "manifest.json";

/// Returns the number of records of each part but the last, when there are `records` in all: a
/// power of two.
pub fn part_records(records: u64) -> u64 {
    records.div_ceil(PARTS_MAX).next_power_of_two().max(PART_RECORDS_MIN)
}

/// Returns the records of each part, in order.
///
/// ```
/// use proto::predictions::parts;
/// assert_eq!(parts(600).collect::<Vec<_>>(), [0..256, 256..512, 512..600]);
/// ```
pub fn parts(records: u64) -> impl Iterator<Item = Range<u64>> {
    let size = part_records(records);
    (0..records.div_ceil(size)).map(move |part| part * size..records.min((part + 1) * size))
}

/// Returns the folder of a job within the folder of the parts. It has the time of the job's
/// submission, in milliseconds since 1970, and the job's id. So a worker of an earlier job with the
/// same file does no harm to this one.
///
/// ```
/// use proto::ids::JobId;
/// use proto::predictions::folder_of;
/// assert_eq!(folder_of(1_700_000_000_000, JobId(3)), "1700000000000-3");
/// ```
pub fn folder_of(submitted_unix_ms: u64, job: JobId) -> String {
    format!("{submitted_unix_ms:013}-{job}")
}

/// Returns whether `found` is the [folder](folder_of) of an earlier job than `folder`, or the same
/// folder.
pub fn is_up_to(found: &str, folder: &str) -> bool {
    let numbers = |name: &str| -> Option<(u64, u64)> {
        let (submitted, job) = name.split_once('-')?;
        Some((submitted.parse().ok()?, job.parse().ok()?))
    };
    numbers(found).is_some_and(|found| Some(found) <= numbers(folder))
}

/// Format of a file with predictions. The file's name says which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictionFormat {
    /// JSON Lines: `{"record":17,"prediction":[0.5,-1.25]}`.
    Jsonl,
    /// A NumPy array, f32 `[records, shape..]`.
    Npy,
    /// Apache Parquet with the columns `record` and `prediction`.
    Parquet,
}

impl PredictionFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Jsonl, Self::Npy, Self::Parquet];

    /// Returns the format that a file's name stands for.
    pub fn of_name(name: &str) -> Option<Self> {
        let (_, ending) = name.rsplit_once('.')?;
        Self::ALL.into_iter().find(|format| format.ending() == ending)
    }

    /// Returns the ending of names of such files, without the dot.
    pub const fn ending(self) -> &'static str {
        match self {
            Self::Jsonl => "jsonl",
            Self::Npy => "npy",
            Self::Parquet => "parquet",
        }
    }

    /// Returns the name of the file of a part: its first and its last record, and the ending.
    pub fn part_name(self, part: &Range<u64>) -> String {
        format!("part-{:012}-{:012}.{self}", part.start, part.end.saturating_sub(1))
    }
}

impl fmt::Display for PredictionFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.ending())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_name_of_a_file_says_its_format() {
        for format in PredictionFormat::ALL {
            assert_eq!(PredictionFormat::of_name(&format!("of.digits.{format}")), Some(format));
        }
        for name in ["jsonl", "x.csv", "x.jsonl.gz", ""] {
            assert_eq!(PredictionFormat::of_name(name), None, "{name}");
        }
    }

    #[test]
    fn folders_of_earlier_jobs_and_of_this_one_are_known_and_nothing_else() {
        let folder = folder_of(1_700_000_000_000, JobId(10));
        for earlier in [folder_of(1_600_000_000_000, JobId(11)), folder_of(1_700_000_000_000, JobId(9))] {
            assert!(is_up_to(&earlier, &folder) && !is_up_to(&folder, &earlier), "{earlier}");
        }
        assert!(is_up_to(&folder, &folder));
        for other in [MANIFEST, "part-000000000000-000000000255.jsonl", "0", "0-x", ""] {
            assert!(!is_up_to(other, &folder) && !is_up_to(&folder, other), "{other}");
        }
    }

    #[test]
    fn names_of_parts_sort_as_their_records_do() {
        let name = |part| PredictionFormat::Jsonl.part_name(&part);
        assert_eq!(name(0..256), "part-000000000000-000000000255.jsonl");
        assert!(name(256..512) < name(1024..1280) && name(1024..1280) < name(1 << 26..1 << 27));
    }

    proptest! {
        #[test]
        fn parts_hold_every_record_once_in_order(records in 0u64..1 << 40) {
            let size = part_records(records);
            let (mut next, mut count) = (0, 0);
            for part in parts(records) {
                prop_assert_eq!(part.start, next);
                prop_assert!(part.end > part.start);
                prop_assert!(part.end - part.start == size || part.end == records);
                (next, count) = (part.end, count + 1);
            }
            prop_assert_eq!(next, records);
            prop_assert!(count <= PARTS_MAX && size >= PART_RECORDS_MIN && size.is_power_of_two());
        }
    }
}

//! Record numbers without files, for a program whose own data set has the records. The name of a
//! "file" is the number of its records, and the only column, `record`, counts them from 0.
//!
//! ```text
//! files = ["3"]      record  0 1 2
//! ```
//!
//! So leases, orders and the ledger of such a job are those of any other one.

use std::path::Path;

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{INDEX_RECORDS_MAX, RECORD, index_records};

use crate::column::{Aligned, Column, Memory};
use crate::error::{Result, wrong};
use crate::format::{Outline, Source};
use crate::object::{Content, Object};
use crate::observer::Observer;

/// Records of a block, unless there are too many blocks.
const BLOCK_RECORDS: u64 = 4096;

/// Most blocks of a file, so that the list of blocks stays small.
const BLOCKS_MAX: u64 = 1 << 18;

/// Returns the records that the name of a file stands for.
///
/// # Errors
/// The name is no number of records.
pub(crate) fn open(path: &Path) -> Result<Box<dyn Source>> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(records) = index_records(name) else {
        return wrong(
            path,
            format!(
                "`{name}` is no number of records from 1 to {INDEX_RECORDS_MAX}; format = \"index\" has no files"
            ),
        );
    };
    let in_block = BLOCK_RECORDS.max(records.div_ceil(BLOCKS_MAX));
    let begins = (0..records).step_by(in_block as usize);
    let blocks = begins.map(|begin| in_block.min(records - begin)).collect();
    let columns = vec![ColumnSpec::fixed(RECORD, ElementType::I64, [])];
    Ok(Box::new(Numbers { in_block, outline: Outline { columns, blocks } }))
}

struct Numbers {
    /// Records of each block but the last.
    in_block: u64,
    outline: Outline,
}

impl Source for Numbers {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let (first, records) = (block as u64 * self.in_block, self.outline.blocks[block]);
        let column = |&at: &usize| {
            let mut values = Aligned::with_capacity(records as usize * size_of::<i64>());
            (first..first + records).for_each(|record| values.extend(&record.to_le_bytes()));
            Column::fixed(self.outline.columns[at].clone(), records as usize, Memory::Owned(values))
        };
        Ok(columns.iter().map(column).collect())
    }

    fn is_in_place(&self) -> bool {
        true
    }

    fn content(&self, _: &Object, mut content: Content, _: &dyn Observer) -> Result<Content> {
        let records = self.outline.records();
        content.bytes += records * size_of::<i64>() as u64;
        content.crc32c = crc32c::crc32c_append(content.crc32c, &records.to_le_bytes());
        Ok(content)
    }

    fn bytes(&self, _: &Object) -> u64 {
        self.outline.records() * size_of::<i64>() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use proto::ids::Epoch;
    use proto::spec::{DataSet, JobSpec};

    use super::*;
    use crate::{Dataset, index};

    fn job(train: &str) -> Result<JobSpec, proto::Error> {
        JobSpec::from_json(&format!(
            r#"{{ "name": "x", "epochs": 1, "model": {{ "builtin": "python", "loss": "module" }},
                 "data": {{ "format": "index", "train": {{ "files": {train} }}, "validation": {{ "files": ["7"] }} }},
                 "batch": {{ "micro": 4 }}, "optimizer": {{ "kind": "sgd", "learning_rate": 0.1 }} }}"#
        ))
    }

    #[test]
    fn a_batch_has_the_numbers_of_its_records_over_all_lists() {
        let spec = job(r#"["5", "5000"]"#).unwrap();
        let train = Dataset::open(&spec, DataSet::Train, None).unwrap();
        assert_eq!((train.len(), train.shards()), (5005, vec![5, 5000]));
        let (batch, bad) = train.read(Epoch(0), [4, 5, 5004, 0], &BTreeSet::new()).unwrap();
        assert_eq!((batch.samples, bad.len()), (4, 0));
        assert_eq!(batch.records, [4, 5, 5004, 0]);
        assert_eq!(batch.inputs[0].values(), Some(&[4i64, 0, 4999, 0][..]));
        assert_eq!(Dataset::open(&spec, DataSet::Validation, None).unwrap().len(), 7);
        assert!(train.batch(Epoch(0), [5005]).unwrap_err().to_string().contains("the data set has 5005"));
    }

    #[test]
    fn an_index_has_counts_and_no_classes_and_tells_lengths_apart() {
        let of = |train: &str| index(&job(train).unwrap(), DataSet::Train, 0, None).unwrap();
        let (five, six) = (of(r#"["5"]"#), of(r#"["6"]"#));
        assert_eq!((five.records, five.labels, five.content.bytes), (5, None, 40));
        assert_ne!(five.content.crc32c, six.content.crc32c);
        assert_eq!(five.inputs, [ColumnSpec::fixed(RECORD, ElementType::I64, [])]);
    }

    #[test]
    fn what_is_no_number_of_records_is_refused() {
        for name in ["0", "-3", "007", "x.csv", "4294967297", ""] {
            let error = job(&format!("[{name:?}]")).unwrap_err().to_string();
            assert!(error.contains("expected a number of records from 1 to 4294967296"), "{error}");
            assert!(open(Path::new("/data").join(name).as_path()).is_err(), "{name}");
        }
        let other = job(r#"["5"]"#).unwrap().to_json().replace("\"module\"", "\"mse\"");
        let error = JobSpec::from_json(&other).unwrap_err().to_string();
        assert!(error.contains("data.format: \"index\" has numbers of records alone"), "{error}");
    }

    #[test]
    fn many_records_have_a_bounded_number_of_blocks() {
        let source = open(Path::new(&INDEX_RECORDS_MAX.to_string())).unwrap();
        assert_eq!(source.outline().records(), INDEX_RECORDS_MAX);
        assert!(source.outline().blocks.len() as u64 <= BLOCKS_MAX);
    }

    proptest! {
        #[test]
        fn blocks_count_every_record_once(records in 1u64..20_000) {
            let source = open(Path::new(&records.to_string())).unwrap();
            let mut next = 0i64;
            for block in 0..source.outline().blocks.len() {
                for &value in source.read(block, &[0]).unwrap()[0].values::<i64>().unwrap() {
                    prop_assert_eq!(value, next);
                    next += 1;
                }
            }
            prop_assert_eq!(next as u64, records);
        }
    }
}

//! Files of predictions: the outputs of a model for some records, one part at a time, and the parts
//! joined.
//!
//! Whatever is written here depends on the records and their outputs alone. A joined file has the
//! records of its parts, in their order.

mod jsonl;
mod npy;
mod parquet;

use bytes::Bytes;
use proto::predictions::PredictionFormat;

use crate::column::Column;
use crate::error::{Error, Result};

/// Name of the column with the outputs of a model.
pub const PREDICTION: &str = "prediction";

/// Name of the column with the numbers of the records.
const RECORD: &str = "record";

/// The outputs of a model for some records, in order: f32 `[n, shape..]`, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Predictions {
    records: Vec<u64>,
    /// Shape of one record's outputs. `None`: there are no records yet.
    shape: Option<Vec<usize>>,
    values: Vec<f32>,
}

impl Predictions {
    /// Adds the outputs `[n, shape..]` of n records. A record is named by its number over all files
    /// of its data set.
    ///
    /// # Errors
    /// There are no outputs for each record, none at all for one, or outputs of another shape than
    /// before; or they are no f32.
    pub fn add(&mut self, records: &[u64], outputs: &Column) -> Result<()> {
        let spec = outputs.spec();
        let values: &[f32] = outputs.values().ok_or_else(|| wrong(format!("{spec}, expected f32")))?;
        if outputs.records() != records.len() {
            let (found, expected) = (outputs.records(), records.len());
            return Err(wrong(format!(
                "outputs for {found} records, expected {expected}: one for each record"
            )));
        }
        if spec.shape.contains(&0) {
            return Err(wrong(format!("outputs of shape {:?}, which hold no value", spec.shape)));
        }
        let shape = self.shape.get_or_insert_with(|| spec.shape.clone());
        if *shape != spec.shape {
            return Err(wrong(format!(
                "outputs of shape {:?} after those of shape {shape:?}; the model must return one shape for all records",
                spec.shape
            )));
        }
        self.records.extend(records);
        self.values.extend(values);
        Ok(())
    }

    /// Returns the number of records.
    pub const fn len(&self) -> usize {
        self.records.len()
    }

    /// Returns whether there is no record.
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the records as a whole file.
    ///
    /// # Errors
    /// There is no record, or the file cannot be encoded.
    pub fn encode(&self, format: PredictionFormat) -> Result<Vec<u8>> {
        let shape = self.shape.as_ref().ok_or_else(|| wrong("no records"))?;
        match format {
            PredictionFormat::Jsonl => jsonl::encode(&self.records, shape, &self.values),
            PredictionFormat::Npy => Ok(npy::encode(self.records.len(), shape, &self.values)),
            PredictionFormat::Parquet => parquet::encode(&self.records, shape, &self.values),
        }
    }
}

/// Makes one file of the parts of predictions, in their order.
///
/// The bytes that [`add`](Self::add) and [`finish`](Self::finish) return, one after the other, are
/// the file.
#[derive(Debug)]
pub struct Join {
    /// Records that the file is to have.
    records: u64,
    added: u64,
    file: File,
}

/// A file that is being joined.
#[derive(Debug)]
enum File {
    Jsonl,
    Npy(npy::Join),
    Parquet(Box<parquet::Join>),
}

impl Join {
    /// Creates a file that is to have so many records.
    pub fn new(format: PredictionFormat, records: u64) -> Self {
        let file = match format {
            PredictionFormat::Jsonl => File::Jsonl,
            PredictionFormat::Npy => File::Npy(npy::Join::new()),
            PredictionFormat::Parquet => File::Parquet(Box::new(parquet::Join::new())),
        };
        Self { records, added: 0, file }
    }

    /// Adds the next part, a whole file of `records` records. Returns the next bytes of the file.
    ///
    /// # Errors
    /// The part is damaged, has another number of records, or does not fit the parts before.
    pub fn add(&mut self, records: u64, part: Bytes) -> Result<Bytes> {
        let (found, bytes) = match &mut self.file {
            File::Jsonl => (jsonl::records(&part), part),
            File::Npy(join) => join.add(self.records, &part)?,
            File::Parquet(join) => join.add(part)?,
        };
        if found != records {
            return Err(wrong(format!("a part has {found} records, expected {records}")));
        }
        self.added += found;
        Ok(bytes)
    }

    /// Returns the last bytes of the file.
    ///
    /// # Errors
    /// Parts are missing, or the file cannot be encoded.
    pub fn finish(self) -> Result<Bytes> {
        if self.added != self.records {
            return Err(wrong(format!("the parts have {} records, expected {}", self.added, self.records)));
        }
        match self.file {
            File::Jsonl | File::Npy(_) => Ok(Bytes::new()),
            File::Parquet(join) => join.finish(),
        }
    }
}

fn wrong(reason: impl Into<String>) -> Error {
    Error::Predictions(reason.into())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use proptest::prelude::*;
    use proto::column::ElementType;

    use super::*;
    use crate::format::Source;
    use crate::formats;
    use crate::object::Object;

    /// Returns predictions of the records `first..first + records`, each with other values.
    fn predictions(first: u64, records: usize, shape: &[usize]) -> Predictions {
        let mut all = Predictions::default();
        let width: usize = shape.iter().product();
        // In batches, as a worker makes them.
        for batch in (0..records).collect::<Vec<_>>().chunks(7) {
            let numbers: Vec<u64> = batch.iter().map(|record| first + *record as u64).collect();
            let values: Vec<f32> = numbers
                .iter()
                .flat_map(|number| (0..width).map(move |at| *number as f32 + at as f32 / 8.0 - 3.0))
                .collect();
            all.add(&numbers, &Column::floats(PREDICTION, shape, batch.len(), &values)).unwrap();
        }
        all
    }

    /// Joins parts of so many records each.
    fn joined(format: PredictionFormat, sizes: &[usize], shape: &[usize]) -> Vec<u8> {
        let mut join = Join::new(format, sizes.iter().sum::<usize>() as u64);
        let (mut file, mut first) = (Vec::new(), 0);
        for &size in sizes {
            let part = predictions(first, size, shape).encode(format).unwrap();
            file.extend(join.add(size as u64, part.into()).unwrap());
            first += size as u64;
        }
        file.extend(join.finish().unwrap());
        file
    }

    /// Reads all columns of a file by this crate's readers: type and shape, and values as f64.
    fn read(format: PredictionFormat, file: &[u8]) -> BTreeMap<String, (ElementType, Vec<usize>, Vec<f64>)> {
        let object = Object::copy(Path::new("p"), file.to_vec());
        let source: Box<dyn Source> = match format {
            PredictionFormat::Jsonl => formats::jsonl::open(&object, crate::pass::Pass::plain()).unwrap(),
            PredictionFormat::Npy => formats::npy::open(&object, PREDICTION).unwrap(),
            PredictionFormat::Parquet => formats::parquet::open(object).unwrap(),
        };
        let outline = source.outline().clone();
        let all: Vec<usize> = (0..outline.columns.len()).collect();
        let mut found: BTreeMap<_, (_, _, Vec<f64>)> = BTreeMap::new();
        for block in 0..outline.blocks.len() {
            for column in source.read(block, &all).unwrap() {
                let spec = column.spec().clone();
                let entry = found.entry(spec.name).or_insert((spec.dtype, spec.shape, Vec::new()));
                match spec.dtype {
                    ElementType::F32 => {
                        let bytes = column.bytes().as_chunks::<4>().0;
                        entry.2.extend(bytes.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))));
                    }
                    ElementType::I64 => {
                        let bytes = column.bytes().as_chunks::<8>().0;
                        entry.2.extend(bytes.iter().map(|bytes| i64::from_le_bytes(*bytes) as f64));
                    }
                    _ => {
                        let bytes = column.bytes().as_chunks::<8>().0;
                        entry.2.extend(bytes.iter().map(|bytes| f64::from_le_bytes(*bytes)));
                    }
                }
            }
        }
        found
    }

    #[test]
    fn each_format_is_read_as_it_was_written() {
        for (shape, sizes) in [(vec![3], vec![5]), (vec![], vec![4, 4, 1]), (vec![2, 2], vec![3, 2])] {
            let records: usize = sizes.iter().sum();
            let all = predictions(0, records, &shape);
            let values: Vec<f64> = all.values.iter().map(|value| f64::from(*value)).collect();
            let numbers: Vec<f64> = (0..records).map(|record| record as f64).collect();
            for format in PredictionFormat::ALL {
                let file = joined(format, &sizes, &shape);
                // JSON Lines with lists in lists are read by no reader here.
                if format == PredictionFormat::Jsonl && shape.len() > 1 {
                    continue;
                }
                let mut columns = read(format, &file);
                let (dtype, found_shape, found) = columns.remove(PREDICTION).unwrap();
                assert_eq!(found, values, "{format} {shape:?}");
                if format != PredictionFormat::Jsonl {
                    assert_eq!((dtype, &found_shape), (ElementType::F32, &shape), "{format}");
                }
                if format != PredictionFormat::Npy {
                    assert_eq!(columns[RECORD].2, numbers, "{format}");
                }
            }
        }
    }

    #[test]
    fn a_line_has_the_number_and_the_nested_values_of_a_record() {
        let file = predictions(7, 2, &[2, 2]).encode(PredictionFormat::Jsonl).unwrap();
        assert_eq!(
            String::from_utf8(file).unwrap(),
            "{\"record\":7,\"prediction\":[[4.0,4.125],[4.25,4.375]]}\n{\"record\":8,\"prediction\":[[5.0,5.125],[5.25,5.375]]}\n"
        );
        let mut odd = Predictions::default();
        odd.add(&[1, 2], &Column::floats(PREDICTION, &[], 2, &[f32::NAN, 0.1])).unwrap();
        let text = String::from_utf8(odd.encode(PredictionFormat::Jsonl).unwrap()).unwrap();
        assert_eq!(text, "{\"record\":1,\"prediction\":null}\n{\"record\":2,\"prediction\":0.1}\n");
    }

    #[test]
    fn a_header_of_numpy_ends_at_a_multiple_of_64() {
        let file = predictions(0, 3, &[2]).encode(PredictionFormat::Npy).unwrap();
        assert_eq!(file.len(), 128 + 3 * 2 * 4);
        let text = String::from_utf8_lossy(&file[10..128]).into_owned();
        assert!(text.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), } "), "{text}");
        assert!(text.ends_with(" \n"), "{text}");
        let text =
            String::from_utf8_lossy(&predictions(0, 3, &[]).encode(PredictionFormat::Npy).unwrap()[10..])
                .into_owned();
        assert!(text.contains("'shape': (3,), }"), "{text}");
    }

    #[test]
    fn outputs_that_do_not_go_together_are_refused() {
        let mut all = predictions(0, 2, &[3]);
        let refused = |all: &mut Predictions, records: &[u64], column: &Column| {
            all.add(records, column).unwrap_err().to_string()
        };
        let other = Column::floats(PREDICTION, &[2], 1, &[0.0; 2]);
        assert!(refused(&mut all, &[2], &other).contains("shape [2] after those of shape [3]"));
        let few = Column::floats(PREDICTION, &[3], 1, &[0.0; 3]);
        assert!(refused(&mut all, &[2, 3], &few).contains("outputs for 1 records, expected 2"));
        let none = Column::floats(PREDICTION, &[0], 1, &[]);
        assert!(refused(&mut Predictions::default(), &[2], &none).contains("hold no value"));
        assert_eq!(all.len(), 2);
        assert!(Predictions::default().encode(PredictionFormat::Npy).is_err());
    }

    #[test]
    fn parts_that_do_not_go_together_are_refused() {
        for format in PredictionFormat::ALL {
            let part = |records: usize, shape: &[usize]| {
                Bytes::from(predictions(0, records, shape).encode(format).unwrap())
            };
            let mut join = Join::new(format, 4);
            join.add(2, part(2, &[3])).unwrap();
            assert!(join.add(3, part(2, &[3])).unwrap_err().to_string().contains("2 records, expected 3"));
            let mut join = Join::new(format, 4);
            join.add(2, part(2, &[3])).unwrap();
            let missing = join.finish().unwrap_err().to_string();
            assert!(missing.contains("2 records, expected 4"), "{missing}");
            if format != PredictionFormat::Jsonl {
                let mut join = Join::new(format, 4);
                join.add(2, part(2, &[3])).unwrap();
                join.add(2, part(2, &[4])).unwrap_err();
                let whole = part(2, &[3]);
                Join::new(format, 2).add(2, whole.slice(..whole.len() - 5)).unwrap_err();
            }
        }
    }

    proptest! {
        #[test]
        fn a_joined_file_has_the_records_of_its_parts_in_order(
            sizes in proptest::collection::vec(1usize..40, 1..6), width in 1usize..4
        ) {
            let records: usize = sizes.iter().sum();
            for format in PredictionFormat::ALL {
                let file = joined(format, &sizes, &[width]);
                let whole = joined(format, &[records], &[width]);
                // How a file was cut shows in no byte.
                if format != PredictionFormat::Parquet {
                    prop_assert!(file == whole);
                }
                prop_assert_eq!(read(format, &file), read(format, &whole));
                prop_assert!(file == joined(format, &sizes, &[width]), "equal parts give equal bytes");
            }
        }
    }
}

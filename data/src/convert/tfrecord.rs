//! Shards of TensorFlow's records of `tf.train.Example`.

use bytes::Bytes;
use proto::column::ElementType;

use super::sink::{Shard, Sink};
use super::whole::Whole;
use crate::column::{Column, each_f64};
use crate::error::{Result, malformed};
use crate::formats::tfrecord::{BytesList, FloatList, IntegerList, List, record};

/// A shard of TFRecord.
pub(super) struct Tfrecord {
    file: Whole,
    /// Number of the next record over all shards.
    next: u64,
}

impl Tfrecord {
    pub(super) fn open(shard: &Shard<'_>) -> Result<Self> {
        Ok(Self { file: shard.file()?, next: shard.first })
    }
}

impl Sink for Tfrecord {
    fn add(&mut self, columns: &[Column]) -> Result<()> {
        for row in 0..columns.first().map_or(0, Column::records) {
            let feature = |column: &Column| {
                let list = list(column, row).map_err(|reason| {
                    let (name, next) = (&column.spec().name, self.next);
                    malformed(
                        self.file.path(),
                        format!("column `{name}`, record {next} of the source: {reason}"),
                    )
                })?;
                Ok((column.spec().name.clone(), list))
            };
            let features = columns.iter().map(feature).collect::<Result<Vec<_>>>()?;
            self.file.append(&record(features))?;
            self.next += 1;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Vec<Whole>> {
        Ok(vec![self.file])
    }
}

/// Returns the values of a record.
///
/// # Errors
/// A float of 64 bits is none of 32 bits, the only floats that TFRecord has.
fn list(column: &Column, row: usize) -> Result<List, String> {
    let values = column.record(row);
    Ok(match column.spec().dtype {
        ElementType::I64 => {
            let value = values.as_chunks().0.iter().map(|&value| i64::from_le_bytes(value)).collect();
            List::Integers(IntegerList { value })
        }
        ElementType::U8 => List::Bytes(BytesList { value: vec![Bytes::copy_from_slice(values)] }),
        dtype => {
            let (mut value, mut wrong) = (Vec::with_capacity(values.len() / dtype.size()), None);
            each_f64(dtype, values, |number| {
                let single = number as f32;
                if f64::from(single) != number && !number.is_nan() {
                    wrong = wrong.or(Some(number));
                }
                value.push(single);
            });
            if let Some(number) = wrong {
                return Err(format!(
                    "{number} needs 64 bits, and TFRecord has floats of 32 bits; choose parquet or arrow"
                ));
            }
            List::Floats(FloatList { value })
        }
    })
}

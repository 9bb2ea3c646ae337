//! Columns from arrays of Apache Arrow.
//!
//! | Arrow | column |
//! | --- | --- |
//! | Boolean, Int8 to Int64, UInt8, Float16 to Float64 | the type of the same name, `[]` |
//! | UInt16, UInt32 | `i32`, `i64` |
//! | UInt64 | `i64` |
//! | Date, Time, Timestamp, Duration | their number, `i32` or `i64` |
//! | Utf8, Binary and their large forms | the bytes, ragged `u8` |
//! | FixedSizeBinary(n) | `u8`, `[n]` |
//! | List and LargeList of one of the numbers above | ragged |
//! | FixedSizeList(n) of a column of fixed shape | `[n, shape..]` |
//! | Dictionary | the column of its values |
//!
//! A null is a missing value. A list with a null inside, and an integer beyond `i64`, is broken.

use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, Field};
use proto::column::{ColumnSpec, ElementType};

use crate::column::{Aligned, Column, Memory};
use crate::error::{Result, malformed};

/// Returns the column of a field. `None`: no column holds such values.
pub(super) fn column(field: &Field) -> Option<ColumnSpec> {
    of_type(field.name(), field.data_type())
}

fn of_type(name: &str, data_type: &DataType) -> Option<ColumnSpec> {
    if let Some(dtype) = number(data_type) {
        return Some(ColumnSpec::fixed(name, dtype, []));
    }
    match data_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Binary | DataType::LargeBinary => {
            Some(ColumnSpec::ragged(name, ElementType::U8, []))
        }
        DataType::FixedSizeBinary(size) => {
            Some(ColumnSpec::fixed(name, ElementType::U8, [usize::try_from(*size).ok()?]))
        }
        DataType::List(item) | DataType::LargeList(item) => {
            let item = of_type(name, item.data_type()).filter(|item| !item.ragged)?;
            Some(ColumnSpec { ragged: true, ..item })
        }
        DataType::FixedSizeList(item, size) => {
            let item = of_type(name, item.data_type()).filter(|item| !item.ragged)?;
            let shape = [usize::try_from(*size).ok()?].into_iter().chain(item.shape).collect::<Vec<_>>();
            Some(ColumnSpec::fixed(name, item.dtype, shape))
                .filter(|spec| spec.width().is_some_and(|width| width > 0))
        }
        DataType::Dictionary(_, values) => of_type(name, values),
        _ => None,
    }
}

/// Returns the type of a column of one number.
fn number(data_type: &DataType) -> Option<ElementType> {
    Some(match data_type {
        DataType::Boolean => ElementType::Bool,
        DataType::Int8 => ElementType::I8,
        DataType::UInt8 => ElementType::U8,
        DataType::Int16 => ElementType::I16,
        DataType::UInt16 | DataType::Int32 | DataType::Date32 | DataType::Time32(_) => ElementType::I32,
        DataType::UInt32 | DataType::UInt64 | DataType::Int64 => ElementType::I64,
        DataType::Date64 | DataType::Time64(_) | DataType::Timestamp(..) | DataType::Duration(_) => {
            ElementType::I64
        }
        DataType::Float16 => ElementType::F16,
        DataType::Float32 => ElementType::F32,
        DataType::Float64 => ElementType::F64,
        _ => return None,
    })
}

/// Copies arrays, one after the other, into a column.
///
/// # Errors
/// An array of another type than the column's.
pub(super) fn convert(path: &Path, spec: &ColumnSpec, arrays: &[ArrayRef]) -> Result<Column> {
    let mut out = Converter { path, spec, values: Aligned::default(), ends: Vec::new() };
    let mut records = 0;
    for array in arrays {
        out.values(array)?;
        records += array.len();
    }
    let memory = Memory::Owned(out.values);
    let mut column = match spec.ragged {
        true => Column::ragged(spec.clone(), memory, out.ends),
        false => Column::fixed(spec.clone(), records, memory),
    };
    let mut begin = 0;
    for array in arrays {
        mark(&mut column, begin, array);
        begin += array.len();
    }
    Ok(column)
}

/// Says which records of an array have no value. `begin` is the column's number of the first one.
fn mark(column: &mut Column, begin: usize, array: &dyn Array) {
    if let Some(nulls) = array.logical_nulls().filter(|nulls| nulls.null_count() > 0) {
        let missing = nulls.iter().enumerate().filter(|(_, is_valid)| !is_valid);
        missing.for_each(|(at, _)| column.set_missing(begin + at));
    }
    let Some(flaws) = flaws(array) else { return };
    for at in (0..flaws.len()).filter(|&at| flaws[at]) {
        if column.fault(begin + at).is_none() {
            column.set_broken(begin + at, || match array.data_type() {
                DataType::UInt64 => {
                    let value = array.as_primitive::<UInt64Type>().value(at);
                    format!("{value} is beyond the integers of 64 bits with a sign").into()
                }
                DataType::Dictionary(_, values) if **values == DataType::UInt64 => {
                    "an integer beyond 64 bits with a sign".into()
                }
                _ => "a list with a null, or with an integer beyond 64 bits with a sign".into(),
            });
        }
    }
}

/// Returns for each element of an array whether it has a null inside, or is an integer beyond
/// `i64`. `None`: no element.
fn flaws(array: &dyn Array) -> Option<Vec<bool>> {
    let values = match array.data_type() {
        DataType::UInt64 => {
            let values = array.as_primitive::<UInt64Type>().values();
            let flaws: Vec<_> = values.iter().map(|&value| i64::try_from(value).is_err()).collect();
            return flaws.contains(&true).then_some(flaws);
        }
        DataType::List(_) => array.as_list::<i32>().values(),
        DataType::LargeList(_) => array.as_list::<i64>().values(),
        DataType::FixedSizeList(..) => array.as_fixed_size_list().values(),
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            // Without values there are no keys to read.
            let of_values = flaws(dictionary.values()).filter(|flaws| flaws.contains(&true))?;
            let (keys, numbers) = (dictionary.keys(), dictionary.normalized_keys());
            let has_flaw = |at: usize| keys.is_valid(at) && of_values[numbers[at]];
            let flaws: Vec<_> = (0..array.len()).map(has_flaw).collect();
            return flaws.contains(&true).then_some(flaws);
        }
        _ => return None,
    };
    let nulls = values.logical_nulls().filter(|nulls| nulls.null_count() > 0);
    let inside = flaws(values);
    if nulls.is_none() && inside.is_none() {
        return None;
    }
    let mut inside = inside.unwrap_or_else(|| vec![false; values.len()]);
    if let Some(nulls) = nulls {
        inside.iter_mut().zip(nulls.iter()).for_each(|(flaw, is_valid)| *flaw |= !is_valid);
    }
    let offsets: Vec<usize> = match array.data_type() {
        DataType::List(_) => array.as_list::<i32>().value_offsets().iter().map(|&at| at as usize).collect(),
        DataType::LargeList(_) => {
            array.as_list::<i64>().value_offsets().iter().map(|&at| at as usize).collect()
        }
        _ => {
            let list = array.as_fixed_size_list();
            let (begin, size) = (list.value_offset_at(0), list.value_length() as usize);
            (0..=list.len()).map(|at| begin + at * size).collect()
        }
    };
    Some(offsets.windows(2).map(|list| inside[list[0]..list[1]].contains(&true)).collect())
}

struct Converter<'a> {
    path: &'a Path,
    spec: &'a ColumnSpec,
    values: Aligned,
    ends: Vec<u64>,
}

impl Converter<'_> {
    /// Appends an array's values. What lies in place of a null does not count.
    fn values(&mut self, array: &dyn Array) -> Result<()> {
        match array.data_type() {
            DataType::Boolean => {
                let values = array.as_boolean().values();
                let out = self.values.grow(values.len());
                out.iter_mut().zip(values).for_each(|(out, value)| *out = u8::from(value));
            }
            DataType::Int8 => self.copy::<Int8Type>(array),
            DataType::UInt8 => self.copy::<UInt8Type>(array),
            DataType::Int16 => self.copy::<Int16Type>(array),
            DataType::Int32 => self.copy::<Int32Type>(array),
            DataType::Int64 => self.copy::<Int64Type>(array),
            DataType::Float16 => self.copy::<Float16Type>(array),
            DataType::Float32 => self.copy::<Float32Type>(array),
            DataType::Float64 => self.copy::<Float64Type>(array),
            DataType::UInt16 => {
                self.each(array.as_primitive::<UInt16Type>().values(), |value| {
                    i32::from(value).to_le_bytes()
                });
            }
            DataType::UInt32 => {
                self.each(array.as_primitive::<UInt32Type>().values(), |value| {
                    i64::from(value).to_le_bytes()
                });
            }
            DataType::UInt64 => {
                self.each(array.as_primitive::<UInt64Type>().values(), u64::to_le_bytes);
            }
            DataType::Date32 | DataType::Time32(_) => self.raw(array, 4),
            DataType::Date64 | DataType::Time64(_) | DataType::Timestamp(..) | DataType::Duration(_) => {
                self.raw(array, 8);
            }
            DataType::Utf8 => {
                let array = array.as_string::<i32>();
                self.ragged(array.value_offsets().iter().map(|&end| end as usize), array.value_data());
            }
            DataType::LargeUtf8 => {
                let array = array.as_string::<i64>();
                self.ragged(array.value_offsets().iter().map(|&end| end as usize), array.value_data());
            }
            DataType::Binary => {
                let array = array.as_binary::<i32>();
                self.ragged(array.value_offsets().iter().map(|&end| end as usize), array.value_data());
            }
            DataType::LargeBinary => {
                let array = array.as_binary::<i64>();
                self.ragged(array.value_offsets().iter().map(|&end| end as usize), array.value_data());
            }
            DataType::FixedSizeBinary(_) => {
                let array = array.as_fixed_size_binary();
                (0..array.len()).for_each(|at| self.values.extend(array.value(at)));
            }
            DataType::List(_) => {
                let array = array.as_list::<i32>();
                let offsets: Vec<_> = array.value_offsets().iter().map(|&end| end as usize).collect();
                self.list(&offsets, array.values())?;
            }
            DataType::LargeList(_) => {
                let array = array.as_list::<i64>();
                let offsets: Vec<_> = array.value_offsets().iter().map(|&end| end as usize).collect();
                self.list(&offsets, array.values())?;
            }
            DataType::FixedSizeList(_, size) => {
                let list = array.as_fixed_size_list();
                let size = *size as usize;
                let begin = list.value_offset_at(0);
                self.values(&list.values().slice(begin, size * list.len()))?;
            }
            DataType::Dictionary(..) => {
                let dictionary = array.as_any_dictionary();
                let values = arrow_select::take::take(dictionary.values(), dictionary.keys(), None);
                let values = values.map_err(|error| self.broken(&error.to_string()))?;
                self.values(&values)?;
            }
            other => return Err(self.broken(&format!("an array of {other}"))),
        }
        Ok(())
    }

    /// Appends the values of an array whose type is the column's.
    fn copy<T: ArrowPrimitiveType>(&mut self, array: &dyn Array)
    where
        T::Native: bytemuck::Pod,
    {
        self.values.extend(bytemuck::cast_slice(array.as_primitive::<T>().values()));
    }

    /// Appends the numbers of an array of dates or times, which have `size` bytes.
    fn raw(&mut self, array: &dyn Array, size: usize) {
        let data = array.to_data();
        let bytes = data.buffers()[0].as_slice();
        self.values.extend(&bytes[data.offset() * size..(data.offset() + data.len()) * size]);
    }

    fn each<T: Copy, const N: usize>(&mut self, values: &[T], convert: impl Fn(T) -> [u8; N]) {
        let out = self.values.grow(values.len() * N).as_chunks_mut::<N>().0;
        out.iter_mut().zip(values).for_each(|(out, &value)| *out = convert(value));
    }

    /// Appends records of bytes. `offsets` are their places in `data`, one more than there are
    /// records.
    fn ragged(&mut self, offsets: impl Iterator<Item = usize> + Clone, data: &[u8]) {
        let (Some(begin), Some(end)) = (offsets.clone().next(), offsets.clone().last()) else { return };
        let base = self.ends.last().copied().unwrap_or_default();
        self.ends.extend(offsets.skip(1).map(|at| base + (at - begin) as u64));
        self.values.extend(&data[begin..end]);
    }

    /// Appends lists.
    fn list(&mut self, offsets: &[usize], values: &ArrayRef) -> Result<()> {
        let (Some(&begin), Some(&end)) = (offsets.first(), offsets.last()) else { return Ok(()) };
        let base = self.ends.last().copied().unwrap_or_default();
        self.ends.extend(offsets[1..].iter().map(|&at| base + (at - begin) as u64));
        self.values(&values.slice(begin, end - begin))
    }

    fn broken(&self, reason: &str) -> crate::Error {
        malformed(self.path, format!("column `{}`: {reason}", self.spec.name))
    }
}

//! Values of inputs that are NaN or infinite: a training with them fails soon, so users hear of the
//! first ones.

use std::fmt;

use proto::column::ElementType;

use crate::column::{Column, each_f64};

/// Values of one input of a batch that are not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// Column of the first one.
    pub column: String,
    /// Number of the record with the first one, over all files of its data set.
    pub record: u64,
    /// Whether the first one is NaN. Otherwise it is infinite.
    pub is_nan: bool,
    /// Number of such values of the input in the batch.
    pub count: u64,
    /// Number of records in the batch.
    pub samples: usize,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { column, record, is_nan, count, samples } = self;
        let what = if *is_nan { "NaN" } else { "infinite" };
        let values = if *count == 1 { "value is" } else { "values are" };
        write!(
            f,
            "{count} {values} NaN or infinite in a batch of {samples} records: the first one is {what}, in column \
             `{column}` of record {record}; mend the data, or leave such records out"
        )
    }
}

/// Returns the index of the first value that is not finite, whether it is NaN, and the number of
/// such values.
pub(crate) fn not_finite(column: &Column) -> Option<(usize, bool, u64)> {
    let dtype = column.spec().dtype;
    if !dtype.is_float() {
        return None;
    }
    if dtype == ElementType::F32 {
        // All but some batches of some jobs end here, so it has no branch inside.
        let bits: &[u32] = bytemuck::cast_slice(column.values::<f32>()?);
        let is_any = bits.iter().fold(false, |any, bits| any | (bits & EXPONENT == EXPONENT));
        if !is_any {
            return None;
        }
    }
    let (mut at, mut first, mut count) = (0, None, 0);
    each_f64(dtype, column.bytes(), |value| {
        if !value.is_finite() {
            first = first.or(Some((at, value.is_nan())));
            count += 1;
        }
        at += 1;
    });
    first.map(|(at, is_nan)| (at, is_nan, count))
}

/// Bits of an f32's exponent. All are 1 in what is not finite.
const EXPONENT: u32 = 0x7F80_0000;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::column::ColumnSpec;

    use super::*;
    use crate::column::{Aligned, Memory};

    fn column(dtype: ElementType, bytes: &[u8]) -> Column {
        let mut memory = Aligned::with_capacity(bytes.len());
        memory.extend(bytes);
        let records = bytes.len() / dtype.size();
        Column::fixed(ColumnSpec::fixed("x", dtype, []), records, Memory::Owned(memory))
    }

    #[test]
    fn integers_are_finite_whatever_their_bits() {
        let bytes = [0xFF; 8];
        assert!(
            [ElementType::I32, ElementType::U8].iter().all(|&of| not_finite(&column(of, &bytes)).is_none())
        );
        for of in [ElementType::F16, ElementType::BF16, ElementType::F32, ElementType::F64] {
            let values = (8 / of.size()) as u64;
            assert_eq!(not_finite(&column(of, &bytes)), Some((0, true, values)), "{of}");
        }
    }

    proptest! {
        #[test]
        fn the_first_one_and_the_count_are_right(
            kinds in proptest::collection::vec(0usize..8, 0..70),
        ) {
            let values = [1.5, -0.0, f32::MAX, f32::MIN_POSITIVE, -3e38, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            let list: Vec<f32> = kinds.iter().map(|&kind| values[kind]).collect();
            let first = list.iter().position(|value| !value.is_finite());
            let count = list.iter().filter(|value| !value.is_finite()).count() as u64;
            let expected = first.map(|at| (at, list[at].is_nan(), count));
            prop_assert_eq!(not_finite(&column(ElementType::F32, bytemuck::cast_slice(&list))), expected);
        }
    }
}

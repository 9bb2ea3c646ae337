//! Conversion of values to another type.

use proto::column::ElementType;

use crate::element::{Element, each_f64, with_element};

/// Converts little-endian values of type `from` to type `to`, and calls `put` with the bytes of
/// each. Floats are rounded to the nearest value of `to`.
///
/// # Errors
/// The first value that `to` has no place for: a fraction, or a number beyond its range, in an
/// integer.
pub(crate) fn cast(
    from: ElementType,
    values: &[u8],
    to: ElementType,
    out: &mut [u8],
) -> std::result::Result<(), f64> {
    if from == to {
        out.copy_from_slice(values);
        return Ok(());
    }
    let mut wrong = None;
    let mut places = out.chunks_exact_mut(to.size());
    macro_rules! float {
        ($type:ty, $convert:expr) => {{
            let convert = $convert;
            each_f64(from, values, |value| {
                let value: $type = convert(value);
                if let Some(place) = places.next() {
                    place.copy_from_slice(&value.to_le_bytes());
                }
            });
        }};
    }
    macro_rules! integer {
        ($type:ty, $max:expr) => {
            each_i64(from, values, |exact, value| {
                let fits =
                    exact.and_then(|exact| <$type>::try_from(exact).ok()).filter(|&value| value <= $max);
                match fits {
                    Some(value) => {
                        if let Some(place) = places.next() {
                            place.copy_from_slice(&value.to_le_bytes());
                        }
                    }
                    None => wrong = wrong.or(Some(value)),
                }
            })
        };
    }
    match to {
        ElementType::F16 => float!(half::f16, half::f16::from_f64),
        ElementType::BF16 => float!(half::bf16, half::bf16::from_f64),
        ElementType::F32 => float!(f32, |value: f64| value as f32),
        ElementType::F64 => float!(f64, |value: f64| value),
        ElementType::U8 => integer!(u8, u8::MAX),
        ElementType::Bool => integer!(u8, 1),
        ElementType::I8 => integer!(i8, i8::MAX),
        ElementType::I16 => integer!(i16, i16::MAX),
        ElementType::I32 => integer!(i32, i32::MAX),
        ElementType::I64 => integer!(i64, i64::MAX),
    }
    wrong.map_or(Ok(()), Err)
}

/// Calls `take` with each value: as an integer if it is one, and as f64.
pub(crate) fn each_i64(dtype: ElementType, values: &[u8], mut take: impl FnMut(Option<i64>, f64)) {
    if dtype.is_float() {
        return each_f64(dtype, values, |value| {
            let integer = value as i64;
            take((integer as f64 == value).then_some(integer), value);
        });
    }
    if dtype == ElementType::I64 {
        for raw in values.as_chunks().0 {
            let value = i64::from_le_bytes(*raw);
            take(Some(value), value.to_f64());
        }
        return;
    }
    // Exact in f64: at most 32 bits.
    with_element!(dtype, T => {
        for raw in values.chunks_exact(size_of::<T>()) {
            let value = bytemuck::pod_read_unaligned::<T>(raw).to_f64();
            take(Some(value as i64), value);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to<T: Element>(from: ElementType, values: &[u8]) -> std::result::Result<Vec<T>, f64> {
        let mut out = vec![0; values.len() / from.size() * T::DTYPE.size()];
        cast(from, values, T::DTYPE, &mut out)?;
        Ok(out.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }

    #[test]
    fn numbers_become_the_nearest_float() {
        assert_eq!(to::<f32>(ElementType::U8, &[0, 255]), Ok(vec![0.0, 255.0]));
        assert_eq!(to::<f32>(ElementType::F64, &0.1f64.to_le_bytes()), Ok(vec![0.1]));
        assert_eq!(to::<f64>(ElementType::F32, &0.5f32.to_le_bytes()), Ok(vec![0.5]));
        assert_eq!(to::<half::f16>(ElementType::F32, &1.0f32.to_le_bytes()), Ok(vec![half::f16::ONE]));
    }

    #[test]
    fn integers_are_exact_or_refused() {
        let large = (1i64 << 60) + 1;
        assert_eq!(to::<i64>(ElementType::I64, &large.to_le_bytes()), Ok(vec![large]));
        assert_eq!(to::<i32>(ElementType::I64, &large.to_le_bytes()), Err(large as f64));
        assert_eq!(to::<i64>(ElementType::F64, &3.0f64.to_le_bytes()), Ok(vec![3]));
        assert_eq!(to::<i64>(ElementType::F64, &2.5f64.to_le_bytes()), Err(2.5));
        assert!(to::<i64>(ElementType::F64, &f64::NAN.to_le_bytes()).is_err());
        assert_eq!(to::<u8>(ElementType::I16, &300i16.to_le_bytes()), Err(300.0));
        assert_eq!(to::<i64>(ElementType::I8, &[255]), Ok(vec![-1]));
        let mut out = [0];
        assert_eq!(cast(ElementType::I8, &[2], ElementType::Bool, &mut out), Err(2.0));
    }
}

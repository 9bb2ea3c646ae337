//! The elements of columns: their types in Rust, and their values as f64.

use proto::column::ElementType;

/// Rust's type of a column's elements.
pub trait Element: bytemuck::Pod {
    /// Type that these elements have in a column.
    const DTYPE: ElementType;

    /// Returns the element as the nearest f64. Integers beyond 2^53 are rounded.
    fn to_f64(self) -> f64;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident, $value:ident => $f64:expr;)+) => {$(
        impl Element for $type {
            const DTYPE: ElementType = ElementType::$dtype;

            fn to_f64(self) -> f64 {
                let $value = self;
                $f64
            }
        }
    )+};
}

elements! {
    u8 => U8, value => f64::from(value);
    i8 => I8, value => f64::from(value);
    i16 => I16, value => f64::from(value);
    i32 => I32, value => f64::from(value);
    i64 => I64, value => value as f64;
    half::f16 => F16, value => f64::from(value);
    half::bf16 => BF16, value => f64::from(value);
    f32 => F32, value => f64::from(value);
    f64 => F64, value => value;
}

/// Calls `$body` with `$type` as Rust's type of a [`ElementType`]. A `bool` counts as `u8`.
macro_rules! with_element {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            ElementType::U8 | ElementType::Bool => {
                type $type = u8;
                $body
            }
            ElementType::I8 => {
                type $type = i8;
                $body
            }
            ElementType::I16 => {
                type $type = i16;
                $body
            }
            ElementType::I32 => {
                type $type = i32;
                $body
            }
            ElementType::I64 => {
                type $type = i64;
                $body
            }
            ElementType::F16 => {
                type $type = half::f16;
                $body
            }
            ElementType::BF16 => {
                type $type = half::bf16;
                $body
            }
            ElementType::F32 => {
                type $type = f32;
                $body
            }
            ElementType::F64 => {
                type $type = f64;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// Calls `take` with each element of some little-endian values, as f64. Integers beyond 2^53 are
/// rounded.
pub(crate) fn each_f64(dtype: ElementType, bytes: &[u8], mut take: impl FnMut(f64)) {
    with_element!(dtype, T => {
        for raw in bytes.chunks_exact(size_of::<T>()) {
            take(bytemuck::pod_read_unaligned::<T>(raw).to_f64());
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_reads_as_f64() {
        let read = |dtype, bytes: &[u8]| {
            let mut found = Vec::new();
            each_f64(dtype, bytes, |value| found.push(value));
            found
        };
        assert_eq!(read(ElementType::U8, &[0, 255]), [0.0, 255.0]);
        assert_eq!(read(ElementType::Bool, &[0, 1]), [0.0, 1.0]);
        assert_eq!(read(ElementType::I8, &[255]), [-1.0]);
        assert_eq!(read(ElementType::I16, &(-3i16).to_le_bytes()), [-3.0]);
        assert_eq!(read(ElementType::I32, &7i32.to_le_bytes()), [7.0]);
        assert_eq!(read(ElementType::I64, &(-1i64).to_le_bytes()), [-1.0]);
        assert_eq!(read(ElementType::F16, &half::f16::from_f32(0.5).to_le_bytes()), [0.5]);
        assert_eq!(read(ElementType::BF16, &half::bf16::from_f32(2.0).to_le_bytes()), [2.0]);
        assert_eq!(read(ElementType::F32, &1.5f32.to_le_bytes()), [1.5]);
        assert_eq!(read(ElementType::F64, &0.1f64.to_le_bytes()), [0.1]);
    }
}

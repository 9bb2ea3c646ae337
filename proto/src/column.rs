//! Columns of records: a name, an element type, and the shape of one record's values.
//!
//! A record is a set of named columns. Column `image` with type `u8` and shape `[28, 28]` has 784
//! bytes in each record. A *ragged* column has one more dimension, the first one, whose size
//! differs between records: column `tokens` with type `i32`, shape `[]`, ragged, has as many i32 in
//! a record as its text has tokens.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Type of a column's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElementType {
    /// Unsigned byte. Also the bytes of a text (UTF-8) or of an encoded image, as a ragged column.
    U8,
    /// Signed byte.
    I8,
    /// 16-bit signed integer.
    I16,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// 16-bit IEEE float.
    F16,
    /// Upper 16 bits of a 32-bit IEEE float.
    BF16,
    /// 32-bit IEEE float.
    F32,
    /// 64-bit IEEE float.
    F64,
    /// Byte that is 0 or 1.
    Bool,
}

impl ElementType {
    /// All types, in the order of their declaration.
    pub const ALL: [Self; 10] = [
        Self::U8,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::BF16,
        Self::F32,
        Self::F64,
        Self::Bool,
    ];

    /// Returns the bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Returns whether elements are floats.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::BF16 | Self::F32 | Self::F64)
    }

    /// Returns the type's name in job files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::Bool => "bool",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Description of a column.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnSpec {
    /// Name of the column.
    pub name: String,
    /// Type of the elements.
    pub dtype: ElementType,
    /// Shape of one record's values, row-major; `[]` for a single value. Of a ragged column: the
    /// dimensions after the first one.
    #[serde(default)]
    pub shape: Vec<usize>,
    /// Whether records have a further first dimension, whose size differs between records.
    #[serde(default)]
    pub ragged: bool,
}

impl ColumnSpec {
    /// Describes a column of one shape.
    pub fn fixed(name: impl Into<String>, dtype: ElementType, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), ragged: false }
    }

    /// Describes a ragged column, whose records have the shape `[any, shape..]`.
    pub fn ragged(name: impl Into<String>, dtype: ElementType, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), ragged: true }
    }

    /// Describes a ragged column whose records all have `length` elements. The shape gets no
    /// dimension for the length 1.
    #[must_use]
    pub fn of_length(mut self, length: usize) -> Self {
        if length != 1 {
            self.shape.insert(0, length);
        }
        self.ragged = false;
        self
    }

    /// Returns the elements of `shape`. `None`: more than memory could hold.
    pub fn width(&self) -> Option<usize> {
        // The product with 0 taken as 1 bounds the product of any of the sizes.
        let bound = self.shape.iter().try_fold(self.dtype.size(), |all, &size| all.checked_mul(size.max(1)));
        bound.filter(|&bound| isize::try_from(bound).is_ok()).map(|_| self.shape.iter().product())
    }
}

impl fmt::Display for ColumnSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.ragged.then(|| "any".to_owned()).into_iter();
        let sizes: Vec<_> = sizes.chain(self.shape.iter().map(usize::to_string)).collect();
        write!(f, "`{}` {}[{}]", self.name, self.dtype, sizes.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_one_name_in_files_and_messages() {
        for dtype in ElementType::ALL {
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.name());
        }
    }

    #[test]
    fn a_description_shows_the_free_dimension() {
        assert_eq!(ColumnSpec::fixed("x", ElementType::F32, [2, 3]).to_string(), "`x` f32[2, 3]");
        assert_eq!(ColumnSpec::ragged("t", ElementType::I64, []).to_string(), "`t` i64[any]");
    }

    #[test]
    fn shapes_beyond_memory_have_no_width() {
        let width = |shape: &[usize]| ColumnSpec::fixed("x", ElementType::F64, shape).width();
        assert_eq!((width(&[]), width(&[3, 0]), width(&[3, 4])), (Some(1), Some(0), Some(12)));
        assert_eq!((width(&[0, usize::MAX]), width(&[usize::MAX / 16, 2])), (None, None));
    }
}

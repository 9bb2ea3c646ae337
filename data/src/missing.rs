//! What takes the place of a missing value, as bytes of the file's own type and shape.

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{FillSpec, MissingRule, MissingSpec};

use crate::cast::cast;

/// What happens to a record without a value in one column.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Missing {
    /// Nothing replaces the value.
    Rule(MissingRule),
    /// The values of one record that replace it, little-endian, in the type of the file.
    Fill(Vec<u8>),
}

impl Missing {
    /// Fits a setting to a column of a file. Each element of a fixed shape gets the number, and a
    /// list gets one element.
    ///
    /// # Errors
    /// The column holds no such value, and why.
    pub(crate) fn new(spec: &MissingSpec, column: &ColumnSpec) -> Result<Self, String> {
        let fill = match (spec, spec.fill()) {
            (MissingSpec::Rule(rule), _) => return Ok(Self::Rule(*rule)),
            (_, Some(fill)) => fill,
            (_, None) => return Ok(Self::Rule(MissingRule::Fail)),
        };
        let is_text = column.ragged && column.dtype == ElementType::U8 && column.shape.is_empty();
        let number = match (fill, is_text) {
            (FillSpec::Text(text), true) => return Ok(Self::Fill(text.into_bytes())),
            (FillSpec::Text(text), false) => {
                return Err(format!("column {column} holds numbers, and `{text}` is a text"));
            }
            (_, true) => {
                return Err(format!("column {column} holds texts; give one: {{ value = \"text\" }}"));
            }
            (FillSpec::Number(number), false) => number,
            (FillSpec::Flag(flag), false) => f64::from(u8::from(flag)),
        };
        let mut one = vec![0; column.dtype.size()];
        let cast = cast(ElementType::F64, &number.to_le_bytes(), column.dtype, &mut one);
        cast.map_err(|_| format!("{number} is no value of type {} of column {column}", column.dtype))?;
        let width = column.width().ok_or_else(|| format!("a record of {column} is larger than memory"))?;
        Ok(Self::Fill(one.repeat(width)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(missing: &str, column: &ColumnSpec) -> Result<Missing, String> {
        let spec = serde_json::from_str(missing).unwrap();
        Missing::new(&spec, column)
    }

    #[test]
    fn a_value_has_the_type_and_the_shape_of_its_column() {
        let fixed = |dtype, shape: &[usize]| ColumnSpec::fixed("x", dtype, shape);
        let text = ColumnSpec::ragged("t", ElementType::U8, []);
        let bytes = |values: &[i16]| Ok(Missing::Fill(bytemuck::cast_slice(values).to_vec()));
        assert_eq!(fill("-3", &fixed(ElementType::I16, &[])), bytes(&[-3]));
        assert_eq!(fill("7.0", &fixed(ElementType::I16, &[2, 2])), bytes(&[7; 4]));
        assert_eq!(fill("7", &ColumnSpec::ragged("l", ElementType::I16, [])), bytes(&[7]));
        assert_eq!(fill("true", &fixed(ElementType::Bool, &[])), Ok(Missing::Fill(vec![1])));
        let half = Missing::Fill(0.5f64.to_le_bytes().to_vec());
        assert_eq!(fill("{\"value\": 0.5}", &fixed(ElementType::F64, &[])), Ok(half));
        assert_eq!(fill("{\"value\": \"Oslo\"}", &text), Ok(Missing::Fill(b"Oslo".to_vec())));
        assert_eq!(fill("\"skip\"", &text), Ok(Missing::Rule(MissingRule::Skip)));
    }

    #[test]
    fn a_value_that_the_column_cannot_hold_is_refused() {
        let byte = ColumnSpec::fixed("x", ElementType::U8, []);
        let text = ColumnSpec::ragged("t", ElementType::U8, []);
        assert!(fill("0.5", &byte).unwrap_err().contains("0.5 is no value of type u8"));
        assert!(fill("256", &byte).unwrap_err().contains("256 is no value of type u8"));
        assert!(fill("{\"value\": \"a\"}", &byte).unwrap_err().contains("`a` is a text"));
        assert!(fill("0", &text).unwrap_err().contains("holds texts; give one: { value = \"text\" }"));
    }
}

//! Transforms that give integers and texts a number: hash buckets and vocabularies.

use std::collections::HashMap;

use proto::column::{ColumnSpec, ElementType};
use proto::random::key;
use proto::spec::Transform;
use proto::spec::transform::Word;

use crate::cast::each_i64;

/// Numbers of integers and texts.
#[derive(Clone, Debug)]
pub(super) struct Lookup {
    /// Whether the bytes of a record are one text.
    text: bool,
    table: Table,
}

#[derive(Clone, Debug)]
enum Table {
    Hash { buckets: u64 },
    Integers { places: HashMap<i64, i64>, default: Option<i64> },
    Texts { places: HashMap<Vec<u8>, i64>, default: Option<i64> },
}

impl Lookup {
    /// Returns the look-up of a transform in such values, and what comes of them. The bytes of a
    /// ragged u8 column are a text.
    ///
    /// # Errors
    /// The transform does not take such values, and why.
    pub(super) fn new(spec: &ColumnSpec, transform: &Transform) -> Result<(Self, ColumnSpec), String> {
        let text = spec.ragged && spec.dtype == ElementType::U8 && spec.shape.is_empty();
        if spec.dtype.is_float() {
            return Err(format!("it takes integers or a text, and this is {spec}; put `cast` before it"));
        }
        let places = |values: &[Word]| values.iter().cloned().zip(0i64..).collect::<Vec<_>>();
        let table = match transform {
            Transform::Vocabulary { values, default } if text => {
                let places = places(values).into_iter().map(|(word, at)| match word {
                    Word::Text(text) => Ok((text.into_bytes(), at)),
                    Word::Integer(number) => {
                        Err(format!("the column has texts, and values has the integer {number}"))
                    }
                });
                Table::Texts { places: places.collect::<Result<_, _>>()?, default: *default }
            }
            Transform::Vocabulary { values, default } => {
                let places = places(values).into_iter().map(|(word, at)| match word {
                    Word::Integer(number) => Ok((number, at)),
                    Word::Text(text) => {
                        Err(format!("the column has integers, and values has the text `{text}`"))
                    }
                });
                Table::Integers { places: places.collect::<Result<_, _>>()?, default: *default }
            }
            Transform::Hash { buckets } => Table::Hash { buckets: *buckets },
            _ => return Err("it is no look-up".to_owned()),
        };
        let to = match text {
            true => ColumnSpec::fixed(&spec.name, ElementType::I64, []),
            false => ColumnSpec { dtype: ElementType::I64, ..spec.clone() },
        };
        Ok((Self { text, table }, to))
    }

    /// Returns the numbers of one record's values of type `from`.
    ///
    /// # Errors
    /// A value that the vocabulary does not have.
    pub(super) fn apply(&self, from: ElementType, values: &[u8]) -> Result<Vec<u8>, String> {
        if self.text {
            return Ok(self.of_text(values)?.to_le_bytes().to_vec());
        }
        let (mut out, mut wrong) = (Vec::with_capacity(values.len() / from.size() * 8), None);
        each_i64(from, values, |integer, _| {
            let integer = integer.unwrap_or_default();
            match self.of_integer(integer) {
                Some(number) => out.extend_from_slice(&number.to_le_bytes()),
                None => wrong = wrong.or(Some(integer)),
            }
        });
        wrong.map_or(Ok(out), |integer| Err(unknown(&integer.to_string())))
    }

    fn of_text(&self, text: &[u8]) -> Result<i64, String> {
        match &self.table {
            Table::Hash { buckets } => Ok((hash(text) % buckets) as i64),
            Table::Texts { places, default } => places
                .get(text)
                .copied()
                .or(*default)
                .ok_or_else(|| unknown(&format!("`{}`", String::from_utf8_lossy(text)))),
            Table::Integers { .. } => Err("a vocabulary of integers for texts".to_owned()),
        }
    }

    fn of_integer(&self, integer: i64) -> Option<i64> {
        match &self.table {
            Table::Hash { buckets } => Some((hash(&integer.to_le_bytes()) % buckets) as i64),
            Table::Integers { places, default } => places.get(&integer).copied().or(*default),
            Table::Texts { .. } => None,
        }
    }
}

/// Returns the hash of a text, or of an integer's eight little-endian bytes: that of keyed
/// randomness, with eight bytes at once, the last ones filled up with zeros, and the number of
/// bytes as the position.
fn hash(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(key(0, "hash", bytes.len() as u64), |state, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        key(state, "", u64::from_le_bytes(word))
    })
}

fn unknown(value: &str) -> String {
    format!("{value} is not in the vocabulary; add it to values, or set `default` for what is not there")
}

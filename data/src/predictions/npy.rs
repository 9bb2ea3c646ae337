//! NumPy's array files, version 1.0, of f32 `[records, shape..]`.

use bytes::{BufMut as _, Bytes, BytesMut};

use super::wrong;
use crate::error::Result;
use crate::formats::npy;

/// Multiple of bytes at which the values begin, as NumPy writes them.
const ALIGNMENT: usize = 64;

/// Returns a whole file.
pub(super) fn encode(records: usize, shape: &[usize], values: &[f32]) -> Vec<u8> {
    let mut file = header(records as u64, shape);
    file.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    file
}

/// Returns everything before the values.
fn header(records: u64, shape: &[usize]) -> Vec<u8> {
    let inner: Vec<_> = shape.iter().map(usize::to_string).collect();
    // A tuple of one has a comma in Python.
    let sizes = format!("{records},{}{}", if inner.is_empty() { "" } else { " " }, inner.join(", "));
    let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({sizes}), }}");
    let mut file = b"\x93NUMPY\x01\x00\x00\x00".to_vec();
    file.extend(text.as_bytes());
    file.resize((file.len() + 1).next_multiple_of(ALIGNMENT) - 1, b' ');
    file.push(b'\n');
    let length = (file.len() - 10) as u16;
    file[8..10].copy_from_slice(&length.to_le_bytes());
    file
}

/// An array that is being joined.
#[derive(Debug)]
pub(super) struct Join {
    /// Shape of one record. `None`: there was no part yet.
    shape: Option<Vec<usize>>,
}

impl Join {
    pub(super) const fn new() -> Self {
        Self { shape: None }
    }

    /// Returns the number of records of a part, and its values, after the header of the whole array
    /// of `records` if it is the first part.
    pub(super) fn add(&mut self, records: u64, part: &Bytes) -> Result<(u64, Bytes)> {
        let array = npy::header(part).map_err(wrong)?;
        let Some((&found, inner)) = array.shape.split_first() else {
            return Err(wrong("a part is one value without records"));
        };
        let values = array.shape.iter().product::<usize>();
        if array.range.len() != values * size_of::<f32>() {
            let (bytes, shape) = (array.range.len(), &array.shape);
            return Err(wrong(format!("a part has {bytes} bytes for f32 {shape:?}; it is damaged")));
        }
        let content = part.slice(array.range.clone());
        match &self.shape {
            Some(shape) if shape == inner => Ok((found as u64, content)),
            Some(shape) => {
                Err(wrong(format!("a part has records of shape {inner:?}, those before have {shape:?}")))
            }
            None => {
                let mut bytes = BytesMut::from(&header(records, inner)[..]);
                bytes.put(content);
                self.shape = Some(inner.to_vec());
                Ok((found as u64, bytes.freeze()))
            }
        }
    }
}

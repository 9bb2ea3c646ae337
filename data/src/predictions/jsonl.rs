//! JSON Lines: `{"record":17,"prediction":[0.5,-1.25]}`. A number that JSON lacks becomes `null`.

use super::{PREDICTION, RECORD, wrong};
use crate::error::Result;

/// Returns one line for each record. `values` are `[records, shape..]`.
pub(super) fn encode(records: &[u64], shape: &[usize], values: &[f32]) -> Result<Vec<u8>> {
    let width: usize = shape.iter().product();
    let mut file = Vec::with_capacity(values.len() * 8 + records.len() * 32);
    for (record, values) in records.iter().zip(values.chunks_exact(width.max(1))) {
        file.extend(format!("{{\"{RECORD}\":{record},\"{PREDICTION}\":").as_bytes());
        write(&mut file, shape, values)?;
        file.extend(b"}\n");
    }
    Ok(file)
}

/// Writes values of this shape as lists in lists.
fn write(file: &mut Vec<u8>, shape: &[usize], values: &[f32]) -> Result<()> {
    let Some((&size, inner)) = shape.split_first() else {
        let value = values.first().copied().unwrap_or(f32::NAN);
        return serde_json::to_writer(file, &value).map_err(|error| wrong(error.to_string()));
    };
    file.push(b'[');
    for (at, values) in values.chunks_exact((values.len() / size).max(1)).enumerate() {
        if at > 0 {
            file.push(b',');
        }
        write(file, inner, values)?;
    }
    file.push(b']');
    Ok(())
}

/// Returns the number of records of a part.
pub(super) fn records(part: &[u8]) -> u64 {
    part.iter().filter(|byte| **byte == b'\n').count() as u64
}

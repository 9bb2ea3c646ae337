//! Whether the blocks of the windows that are read side by side fit into memory (ADR 46).
//!
//! A microbatch takes records from anywhere in the window of its lane, and the next microbatches
//! take theirs from the windows of the other lanes. So the blocks of all these windows are in use
//! at the same time. Without room for them each microbatch would read its blocks again.

use crate::any_order::Drawn;
use crate::error::{Result, wrong};
use crate::schema::Schema;
use crate::table::Table;

/// Returns about how many bytes the decoded blocks of a window of a file have. The window ends
/// within a block, so there is one more than its records need.
fn needed(file: &Drawn, window: u64) -> u64 {
    let Some(block) = file.together else { return 0 };
    let decoded = |part: u64, whole: u64| {
        (u128::from(file.decoded) * u128::from(part.min(whole)) / u128::from(whole.max(1))) as u64
    };
    let blocks = decoded(window, file.records).saturating_add(decoded(block, file.bytes));
    blocks.min(file.decoded)
}

/// Checks that the blocks of `lanes` windows of `window` records fit into memory.
///
/// # Errors
/// They do not.
pub(crate) fn check(tables: &[(&Table, &Schema)], window: u64, lanes: u32, bytes_max: u64) -> Result<()> {
    let of_table = |&(table, schema): &(&Table, &Schema)| -> u64 {
        let files = table.drawn(schema.read_columns(), table.records());
        files.iter().map(|file| needed(file, window)).fold(0, u64::saturating_add)
    };
    let mut needs: Vec<_> = tables.iter().map(|table| (of_table(table), table.0.path())).collect();
    needs.sort_by(|(one, _), (other, _)| other.cmp(one));
    let needed = needs.iter().take(lanes as usize).map(|(bytes, _)| *bytes).fold(0, u64::saturating_add);
    match needs.first() {
        Some((_, path)) if needed > bytes_max => wrong(
            path,
            format!(
                "windows of {window} records of the {lanes} files that are read side by side need about {needed} bytes in \
                 memory, with the blocks in which they lie, more than the {bytes_max} of data_memory; set a smaller \
                 data.window or data.interleave, raise data_memory, or write the data in smaller blocks by \
                 `ebb data convert`"
            ),
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of 1,000 records of 100 bytes, in blocks of 10,000 bytes, three times as large when
    /// decoded.
    const FILE: Drawn =
        Drawn { used: 1000, records: 1000, bytes: 100_000, together: Some(10_000), decoded: 300_000 };

    #[test]
    fn a_window_needs_its_records_and_one_more_block() {
        assert_eq!(needed(&FILE, 200), 60_000 + 30_000);
        assert_eq!(needed(&FILE, 1), 300 + 30_000);
        assert_eq!([990, 1000, 5000].map(|window| needed(&FILE, window)), [300_000; 3], "at most the file");
        assert_eq!(needed(&Drawn { together: None, ..FILE }, 200), 0, "mapped");
        assert_eq!(needed(&Drawn { records: 0, used: 0, bytes: 0, decoded: 0, ..FILE }, 200), 0);
    }
}

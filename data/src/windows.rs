//! Whether the windows that are read side by side fit into memory (ADR 46).
//!
//! A microbatch takes records from anywhere in the window of its lane, and the next microbatches
//! take theirs from the windows of the other lanes. So all these windows are in use at the same
//! time. Without room for them each microbatch would read its blocks again, or unpack its file from
//! the front.

use std::sync::Arc;

use proto::spec::{JobSpec, Purpose};

use crate::any_order::Drawn;
use crate::cuts::BLOCK_BYTES;
use crate::error::{Result, wrong};
use crate::room;
use crate::schema::Schema;
use crate::table::Table;

/// How a job reads windows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// Records of each.
    records: u64,
    /// How many are read side by side.
    lanes: u32,
}

/// Returns the windows of a job that trains in windows.
pub(crate) fn of(spec: &JobSpec) -> Option<Windows> {
    let (records, lanes) = spec.data.windows().filter(|_| spec.purpose == Purpose::Train)?;
    Some(Windows { records, lanes })
}

impl Windows {
    /// Returns the bytes that windows need side by side. `each` has those of a window of each file,
    /// of which the largest ones count.
    fn together(self, each: impl Iterator<Item = u64>) -> u64 {
        let mut each: Vec<u64> = each.collect();
        each.sort_unstable_by(|one, other| other.cmp(one));
        each.into_iter().take(self.lanes as usize).fold(0, u64::saturating_add)
    }
}

/// Returns about how many bytes the decoded blocks of a window of a file have. The window ends
/// within a block, so there is one more than its records need.
fn needed(file: &Drawn, window: u64) -> u64 {
    let Some(block) = file.together else { return 0 };
    let part = share(file.decoded, window, file.records);
    let blocks = part.saturating_add(share(file.decoded, block, file.bytes));
    blocks.min(file.decoded)
}

/// Checks that the blocks of windows fit into memory.
///
/// # Errors
/// They do not.
pub(crate) fn check(tables: &[(&Table, &Schema)], windows: Windows, bytes_max: u64) -> Result<()> {
    let Windows { records, lanes } = windows;
    let of_table = |&(table, schema): &(&Table, &Schema)| -> u64 {
        let files = table.drawn(schema.read_columns(), table.records());
        files.iter().map(|file| needed(file, records)).fold(0, u64::saturating_add)
    };
    let needed = windows.together(tables.iter().map(of_table));
    match tables.iter().max_by_key(|table| of_table(table)) {
        Some((table, _)) if needed > bytes_max => wrong(
            table.path(),
            format!(
                "windows of {records} records of the {lanes} files that are read side by side need about {needed} bytes in \
                 memory, with the blocks in which they lie, more than the {bytes_max} of data_memory; set a smaller \
                 data.window or data.interleave, raise data_memory, or write the data in smaller blocks by \
                 `ebb data convert`"
            ),
        ),
        _ => Ok(()),
    }
}

/// Checks that the windows of compressed files fit into memory: their pieces, and the records that
/// are decoded from them.
///
/// # Errors
/// They do not.
pub(crate) fn check_packed(tables: &[Arc<Table>], windows: Windows, bytes_max: u64) -> Result<()> {
    let Windows { records, .. } = windows;
    let packed = || tables.iter().filter(|table| table.is_packed());
    let Some(first) = packed().next() else { return Ok(()) };
    let of_table = |table: &Arc<Table>| {
        let (all, bytes) = (table.records(), table.bytes());
        needed_packed(share(bytes, records, all), bytes)
    };
    let needed = windows.together(packed().map(of_table));
    if needed > bytes_max {
        return wrong(
            first.path(),
            format!(
                "windows of {records} records of the compressed files that are read side by side need about {needed} \
                 bytes in memory, more than the {bytes_max} of data_memory; set a smaller data.window or \
                 data.interleave, raise data_memory, or unpack the files"
            ),
        );
    }
    let what = || format!("windows of {records} of its records need about {needed} bytes");
    room::check_cache(needed).map_err(|full| full.at(first.path(), what()))
}

/// Returns the bytes that a window of a compressed file takes: its pieces, of which the first and
/// the last one reach beyond it, and the records that are decoded from them, which are about as
/// large.
fn needed_packed(window: u64, file: u64) -> u64 {
    let pieces = window.saturating_add(2 * BLOCK_BYTES as u64).min(file);
    pieces.saturating_add(window)
}

/// Returns about how many of `bytes` some of `all` parts have.
fn share(bytes: u64, some: u64, all: u64) -> u64 {
    (u128::from(bytes) * u128::from(some.min(all)) / u128::from(all.max(1))) as u64
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

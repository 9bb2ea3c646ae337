//! Blocks of a format whose records lie one after the other.

use std::ops::Range;

/// Bytes of a block, about. Records that lie together are decoded together.
pub(super) const BLOCK_BYTES: usize = 4 << 20;

/// Where a file is cut into blocks. A block ends before the first record that begins
/// [`BLOCK_BYTES`] or more behind its begin.
#[derive(Debug, Default)]
pub(super) struct Cuts {
    begins: Vec<usize>,
    /// Number of records of each block.
    records: Vec<u64>,
}

impl Cuts {
    /// Adds a record, which begins behind those before.
    pub(super) fn add(&mut self, begin: usize) {
        match (self.begins.last(), self.records.last_mut()) {
            (Some(first), Some(records)) if begin - first < BLOCK_BYTES => *records += 1,
            _ => {
                self.begins.push(begin);
                self.records.push(1);
            }
        }
    }

    /// Returns the number of records of each block.
    pub(super) fn records(&self) -> &[u64] {
        &self.records
    }

    /// Returns the bytes of a block of a file that ends at `end`.
    pub(super) fn range(&self, block: usize, end: usize) -> Range<usize> {
        self.begins[block]..self.begins.get(block + 1).copied().unwrap_or(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_between_records() {
        let mut cuts = Cuts::default();
        for begin in [3, BLOCK_BYTES, BLOCK_BYTES + 3, BLOCK_BYTES + 9, 4 * BLOCK_BYTES] {
            cuts.add(begin);
        }
        assert_eq!(cuts.records(), [2, 2, 1]);
        let end = 5 * BLOCK_BYTES;
        assert_eq!(cuts.range(0, end), 3..BLOCK_BYTES + 3);
        assert_eq!(cuts.range(1, end), BLOCK_BYTES + 3..4 * BLOCK_BYTES);
        assert_eq!(cuts.range(2, end), 4 * BLOCK_BYTES..end);
    }
}

//! Blocks of a format whose records lie one after the other.
//!
//! Only the whole file says where its records begin. Who indexes a file tells the others, so that
//! each of them need not read all of it to open it.

use std::ops::Range;

use proto::pb;

/// Bytes of a block, about. Records that lie together are decoded together.
pub(crate) const BLOCK_BYTES: usize = 4 << 20;

/// Most blocks of a file that travel, so that a report fits into a message. Half a terabyte has as
/// many.
const BLOCKS_MAX: usize = 1 << 17;

/// Where a file is cut into blocks. A block ends before the first record that begins
/// [`BLOCK_BYTES`] or more behind its begin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cuts {
    begins: Vec<usize>,
    /// Number of records of each block.
    records: Vec<u64>,
}

impl Cuts {
    /// Adds a record, which begins behind those before.
    pub(crate) fn add(&mut self, begin: usize) {
        match (self.begins.last(), self.records.last_mut()) {
            (Some(first), Some(records)) if begin - first < BLOCK_BYTES => *records += 1,
            _ => {
                self.begins.push(begin);
                self.records.push(1);
            }
        }
    }

    /// Returns whether they are few enough for a message.
    pub(crate) const fn travel(&self) -> bool {
        self.records.len() <= BLOCKS_MAX
    }

    /// Returns the number of records of each block.
    pub(crate) fn records(&self) -> &[u64] {
        &self.records
    }

    /// Returns the bytes of a block of a file that ends at `end`.
    pub(crate) fn range(&self, block: usize, end: usize) -> Range<usize> {
        self.begins[block]..self.begins.get(block + 1).copied().unwrap_or(end)
    }
}

impl From<&Cuts> for pb::Cuts {
    fn from(cuts: &Cuts) -> Self {
        let before = std::iter::once(0).chain(cuts.begins.iter().copied());
        let distances = cuts.begins.iter().zip(before).map(|(begin, before)| (begin - before) as u64);
        Self { distances: distances.collect(), records: cuts.records.clone() }
    }
}

impl Cuts {
    /// Returns the cuts of a message. `None`: it is malformed.
    pub fn read(message: &pb::Cuts) -> Option<Self> {
        let pb::Cuts { distances, records } = message;
        let is_block = |at: usize| records[at] > 0 && (at == 0 || distances[at] > 0);
        if records.is_empty() || records.len() != distances.len() || !(0..records.len()).all(is_block) {
            return None;
        }
        let mut begin = 0usize;
        let begins = distances.iter().map(|&distance| {
            begin = begin.checked_add(usize::try_from(distance).ok()?)?;
            Some(begin)
        });
        Some(Self { begins: begins.collect::<Option<_>>()?, records: records.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_survive_the_wire_and_malformed_ones_are_refused() {
        let mut cuts = Cuts::default();
        for begin in [0, 7, BLOCK_BYTES, 3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 1] {
            cuts.add(begin);
        }
        let message = pb::Cuts::from(&cuts);
        assert_eq!((&*message.distances, &*message.records), (&[0, 1 << 22, 2 << 22][..], &[2, 1, 2][..]));
        assert_eq!(Cuts::read(&message), Some(cuts));
        for (distances, records) in
            [(vec![], vec![]), (vec![0], vec![1, 1]), (vec![0, 0], vec![1, 1]), (vec![0], vec![0])]
        {
            assert_eq!(Cuts::read(&pb::Cuts { distances, records }), None);
        }
        let far = pb::Cuts { distances: vec![1, u64::MAX], records: vec![1, 1] };
        assert_eq!(Cuts::read(&far), None);
    }

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

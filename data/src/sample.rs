//! Some records of a file, spread evenly over it, without reading all of it.

use crate::column::Column;
use crate::error::Result;
use crate::format::Source;

/// Place of a record: its block, and its number there.
pub(crate) type Place = (usize, usize);

/// Returns the places of up to `count` records in up to `blocks_max` blocks, in the order of the
/// file. `blocks` has the number of records of each block.
pub(crate) fn spread(blocks: &[u64], count: usize, blocks_max: usize) -> Vec<Place> {
    let filled: Vec<usize> = (0..blocks.len()).filter(|&block| blocks[block] > 0).collect();
    let chosen: Vec<usize> = evenly(filled.len(), blocks_max).map(|at| filled[at]).collect();
    let in_chosen = chosen.iter().fold(0, |all: u64, &block| all.saturating_add(blocks[block]));
    let in_chosen = usize::try_from(in_chosen).unwrap_or(usize::MAX);
    let (mut places, mut at, mut before) = (Vec::new(), 0, 0);
    for record in evenly(in_chosen, count) {
        while record - before >= blocks[chosen[at]] as usize {
            before += blocks[chosen[at]] as usize;
            at += 1;
        }
        places.push((chosen[at], record - before));
    }
    places
}

/// Returns up to `count` numbers below `all`, evenly spread. The first one is 0.
pub(crate) fn evenly(all: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(all);
    (0..count).map(move |at| (at as u128 * all as u128 / count as u128) as usize)
}

/// Calls `take` for each place with the number of the record in the file, the columns `wanted` of
/// its block, and its number there. Each block is decoded once.
///
/// # Errors
/// A block is damaged, or `take` fails.
pub(crate) fn visit(
    source: &dyn Source,
    places: &[Place],
    wanted: &[usize],
    mut take: impl FnMut(u64, &[Column], usize) -> Result<()>,
) -> Result<()> {
    for of_block in places.chunk_by(|(a, _), (b, _)| a == b) {
        let block = of_block[0].0;
        let first: u64 = source.outline().blocks[..block].iter().sum();
        let columns = source.read(block, wanted)?;
        for &(_, row) in of_block {
            take(first + row as u64, &columns, row)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_spread_over_the_file() {
        assert_eq!(spread(&[10], 3, 9), [(0, 0), (0, 3), (0, 6)]);
        assert_eq!(spread(&[2, 0, 3], 9, 9), [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]);
        assert_eq!(spread(&[1, 1, 1, 1], 2, 9), [(0, 0), (2, 0)]);
        assert!(spread(&[], 3, 9).is_empty() && spread(&[0, 0], 3, 9).is_empty());
    }

    #[test]
    fn few_blocks_are_decoded() {
        let places = spread(&[100; 50], 32, 4);
        let mut blocks: Vec<_> = places.iter().map(|(block, _)| *block).collect();
        blocks.dedup();
        assert_eq!((places.len(), blocks), (32, vec![0, 12, 25, 37]));
    }
}

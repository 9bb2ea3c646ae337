//! Whether data suits `shuffle = "records"`, an order in which any record may be next (ADR 51).
//!
//! A record that is not in memory costs all that is read with it: its block, and of some formats at
//! least a piece of a file on another machine. The chance that it is in memory is the share of the
//! decoded data for which the cache has room.
//!
//! ```text
//! decoded data    | in the cache | elsewhere                       |
//! a record costs  | nothing      | its block, or its piece         |
//! ```

use proto::column::ColumnSpec;
use proto::spec::{JobSpec, Shuffle};

use crate::error::{Result, wrong};
use crate::schema::Schema;
use crate::table::Table;

/// Most bytes that a record may cost for each byte that it has.
const TIMES_MAX: f64 = 4.0;

/// Returns whether a job trains its records in any order.
pub(crate) fn is_order_of(spec: &JobSpec) -> bool {
    spec.purpose.trains() && spec.data.shuffle == Shuffle::Records
}

/// A file whose records are read in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drawn {
    /// Number of its records that the data set has.
    pub(crate) used: u64,
    /// Number of all its records.
    pub(crate) records: u64,
    /// Bytes of the file without compression.
    pub(crate) bytes: u64,
    /// Bytes that are read for a record that is not in memory. `None`: only those of the record.
    pub(crate) together: Option<u64>,
    /// Bytes of the decoded columns.
    pub(crate) decoded: u64,
}

/// Returns the mean bytes of the block of a record. `blocks` has the records of each block of a
/// file of `bytes`.
pub(crate) fn block_bytes(blocks: &[u64], bytes: u64) -> u64 {
    let blocks = || blocks.iter().map(|&records| records as f64);
    let (records, squares): (f64, f64) = (blocks().sum(), blocks().map(|records| records * records).sum());
    (bytes as f64 * squares / (records * records)) as u64
}

/// Returns about how many bytes the columns `used` of a file have when they are decoded. The file
/// has `records` of the columns `all`, and `bytes` without compression.
pub(crate) fn decoded_bytes(used: &[&ColumnSpec], all: &[ColumnSpec], records: u64, bytes: u64) -> u64 {
    let width = |spec: &ColumnSpec| (spec.width().unwrap_or_default() * spec.dtype.size()) as u64;
    let fixed: u64 = used.iter().filter(|spec| !spec.ragged).map(|spec| width(spec)).sum();
    // Nothing says the sizes of ragged values without reading them. They share what the other
    // columns leave of the file.
    let others: u64 = all.iter().filter(|spec| !spec.ragged).map(width).sum();
    let ragged = bytes.saturating_sub(records.saturating_mul(others));
    let parts = all.iter().filter(|spec| spec.ragged).count().max(1) as u64;
    let taken = used.iter().filter(|spec| spec.ragged).count() as u64;
    records.saturating_mul(fixed).saturating_add(ragged.saturating_mul(taken) / parts)
}

/// What a record of a data set costs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    /// Mean bytes of a record.
    own: f64,
    /// Mean bytes that are read for a record.
    read: f64,
    /// Bytes of the decoded data that the cache would have to hold.
    decoded: f64,
}

impl Cost {
    /// Returns the cost of a record of a data set with `records` in these files.
    fn of(files: &[Drawn], records: u64, cache_bytes: u64) -> Self {
        let used = |file: &Drawn, bytes: u64| bytes as f64 * file.used as f64 / file.records.max(1) as f64;
        let in_blocks = files.iter().filter(|file| file.together.is_some());
        let decoded: f64 = in_blocks.map(|file| used(file, file.decoded)).sum();
        let elsewhere = (1.0 - cache_bytes as f64 / decoded.max(1.0)).max(0.0);
        let read = |file: &Drawn| match file.together {
            Some(bytes) => elsewhere * bytes as f64 * file.used as f64,
            None => used(file, file.bytes),
        };
        let mean = |sum: f64| sum / records.max(1) as f64;
        Self {
            own: mean(files.iter().map(|file| used(file, file.bytes)).sum()),
            read: mean(files.iter().map(read).sum()),
            decoded,
        }
    }

    fn is_excessive(&self) -> bool {
        self.read > TIMES_MAX * self.own
    }
}

/// Checks that records in any order cost at most [`TIMES_MAX`] times their bytes. Each table has
/// the number of its records that the data set has.
///
/// # Errors
/// They cost more.
pub(crate) fn check(tables: &[(&Table, &Schema, u64)], cache_bytes: u64) -> Result<()> {
    let drawn = |&(table, schema, used): &(&Table, &Schema, u64)| table.drawn(schema.read_columns(), used);
    let files: Vec<Drawn> = tables.iter().flat_map(drawn).collect();
    let cost = Cost::of(&files, tables.iter().map(|(_, _, used)| used).sum(), cache_bytes);
    let in_blocks = |table: &&(&Table, &Schema, u64)| drawn(table).iter().any(|file| file.together.is_some());
    match tables.iter().find(in_blocks) {
        Some((table, ..)) if cost.is_excessive() => {
            let Cost { own, read, decoded } = cost;
            wrong(
                table.path(),
                format!(
                    "data.shuffle = \"records\" reads the records of data.train one by one, at about {read:.0} bytes for \
                     each, and a record has {own:.0}: at most {TIMES_MAX} times its bytes are accepted. Records lie in \
                     blocks that are read as a whole, and the {decoded:.0} bytes that are decoded do not fit into the \
                     {cache_bytes} of data_memory; set data.shuffle = \"window\", which reads the files in sequence, raise \
                     data_memory, or write the data as npy by `ebb data convert`"
                ),
            )
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proto::column::ElementType;

    use super::*;

    /// A file of 1,000 records of 100 bytes, in equal blocks, which are as large when decoded.
    fn file(in_block: u64) -> Drawn {
        let blocks = vec![in_block; (1000 / in_block) as usize];
        let together = Some(block_bytes(&blocks, 100_000));
        Drawn { used: 1000, records: 1000, bytes: 100_000, together, decoded: 100_000 }
    }

    #[test]
    fn a_record_that_is_not_in_memory_costs_its_block() {
        for (in_block, is_excessive) in [(1, false), (4, false), (5, true), (1000, true)] {
            let cost = Cost::of(&[file(in_block)], 1000, 0);
            assert_eq!((cost.own, cost.read), (100.0, 100.0 * in_block as f64));
            assert_eq!(cost.is_excessive(), is_excessive, "{in_block} records in a block");
        }
        // Most records lie in the large block.
        assert_eq!(block_bytes(&[1, 9], 1000), 820);
        assert_eq!(block_bytes(&[], 1000), 0);
    }

    #[test]
    fn what_fits_into_the_cache_costs_nothing() {
        for (cache_bytes, read) in [(0, 2000.0), (50_000, 1000.0), (90_000, 200.0), (100_000, 0.0)] {
            let cost = Cost::of(&[file(20)], 1000, cache_bytes);
            assert!((cost.read - read).abs() < 1e-6, "{cost:?}");
            assert_eq!(cost.is_excessive(), read > 400.0);
        }
        assert!(!Cost::of(&[file(20)], 1000, u64::MAX).is_excessive());
        // Two such files do not fit where one does.
        assert!(Cost::of(&[file(20), file(20)], 2000, 100_000).is_excessive());
        // The data set has a tenth of each.
        let tenth = Drawn { used: 100, ..file(20) };
        assert!(!Cost::of(&[tenth, tenth], 200, 100_000).is_excessive());
    }

    #[test]
    fn a_mapped_file_costs_the_bytes_of_its_records_and_takes_no_cache() {
        let mapped = Drawn { together: None, decoded: 1 << 40, ..file(1000) };
        let cost = Cost::of(&[mapped], 1000, 0);
        assert_eq!((cost.own, cost.read, cost.decoded), (100.0, 100.0, 0.0));
        // Labels beside it that lie in one block.
        let labels = Drawn { bytes: 1000, together: Some(1000), decoded: 1000, ..file(1000) };
        assert!(Cost::of(&[mapped, labels], 1000, 0).is_excessive());
        assert!(!Cost::of(&[mapped, labels], 1000, 1000).is_excessive());
        assert!(!Cost::of(&[], 0, 0).is_excessive());
    }

    #[test]
    fn ragged_columns_share_what_the_others_leave_of_their_file() {
        let class = ColumnSpec::fixed("class", ElementType::I64, []);
        let image = ColumnSpec::ragged("image", ElementType::U8, []);
        let all = [class.clone(), image.clone()];
        assert_eq!(decoded_bytes(&[&class], &all, 10, 500), 80);
        assert_eq!(decoded_bytes(&[&class, &image], &all, 10, 500), 500);
        let more = [image.clone(), image.clone(), image.clone()];
        let wide = [&all[..], &more[..]].concat();
        assert_eq!(decoded_bytes(&[&class, &image], &wide, 10, 500), 80 + 105, "one of four");
        assert_eq!(decoded_bytes(&[&image], &all, 100, 500), 0, "compressed numbers");
    }
}

//! Levels: what each byte becomes as a float, if an input is made of bytes.
//!
//! A byte has 256 values. So whatever the last transforms of an input compute from a single byte,
//! their results fit into a table. To look results up costs less than to compute them, and gives
//! the same bits wherever it is done: `kernels::Levels` does it in memory of a device.
//!
//! ```text
//! `image` u8[3, 224, 224] --normalize--> f32[3, 224, 224]
//!     tables: 3 of 256 floats    run: 224 * 224 bytes with one table, then those with the next one
//! ```

/// Number of values that a byte has.
const BYTES: usize = 256;

/// What each byte of an input becomes as a float.
#[derive(Clone, Debug, PartialEq)]
pub struct Levels {
    /// One table of 256 floats after the other.
    tables: Vec<f32>,
    /// Number of bytes with one table. Those behind them have the next table, and the first one
    /// follows the last.
    run: usize,
}

impl Levels {
    /// Tables at most. More would cost what bytes save.
    pub(crate) const TABLES_MAX: usize = 16;

    /// Tabulates a function of a table's number and a byte.
    pub(crate) fn new(tables: usize, run: usize, level: impl Fn(usize, u8) -> f32) -> Self {
        let table = |number| (0..=u8::MAX).map(move |byte| (number, byte));
        let tables = (0..tables).flat_map(table).map(|(number, byte)| level(number, byte)).collect();
        Self { tables, run }
    }

    /// Returns levels with a function of each float in its place.
    pub(crate) fn then(&self, change: impl Fn(f32) -> f32) -> Self {
        Self { tables: self.tables.iter().map(|level| change(*level)).collect(), run: self.run }
    }

    /// Returns the table with this number: the floats of the bytes 0 to 255.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn table(&self, number: usize) -> &[f32; BYTES] {
        &self.tables.as_chunks().0[number]
    }

    /// Returns whether all floats are finite. Then nobody has to look for others in an input.
    pub(crate) fn are_finite(&self) -> bool {
        self.tables.iter().all(|level| level.is_finite())
    }

    /// Returns all tables, one after the other.
    pub fn tables(&self) -> &[f32] {
        &self.tables
    }

    /// Returns the number of bytes with one table.
    pub const fn run(&self) -> usize {
        self.run
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_float_for_each_byte() {
        let levels = Levels::new(3, 7, |number, byte| number as f32 * 1000.0 + f32::from(byte));
        assert_eq!((levels.tables().len(), levels.run()), (3 * 256, 7));
        assert_eq!((levels.table(0)[255], levels.table(2)[17]), (255.0, 2017.0));
        let halves = levels.then(|level| level / 2.0);
        assert_eq!((halves.table(1)[10], halves.run()), (505.0, 7));
    }

    #[test]
    fn an_infinity_or_a_nan_is_seen() {
        assert!(Levels::new(2, 1, |_, byte| f32::from(byte)).are_finite());
        assert!(!Levels::new(1, 1, |_, byte| 1.0 / f32::from(byte)).are_finite());
        assert!(!Levels::new(2, 1, |_, byte| 0.0 / f32::from(byte)).are_finite());
    }
}

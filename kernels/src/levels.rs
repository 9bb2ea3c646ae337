//! Levels: floats in place of bytes, looked up where they are needed.
//!
//! A table has the float of each byte. Whoever makes it computes the floats once, so that they are
//! the same bits on the host and on a device (ADR 66). A device gets the bytes, which are a quarter
//! of the floats.
//!
//! ```
//! use kernels::{Device, Error, Levels};
//!
//! let halves: Vec<f32> = (0..256).map(|byte| byte as f32 / 2.0).collect();
//! let levels = Levels::new(&Device::default(), &halves, 1)?;
//! assert_eq!(*levels.of(&[0, 1, 255])?.read()?, [0.0, 0.5, 127.5]);
//! # Ok::<(), Error>(())
//! ```

use crate::cpu::levels::{LEVELS, look_up};
use crate::device::Device;
use crate::error::Error;
use crate::storage::Storage;

/// Tables of floats, one for each byte, on the device that looks them up.
#[derive(Debug)]
pub struct Levels {
    tables: Storage,
    /// Number of bytes with one table.
    run: usize,
}

impl Levels {
    /// Copies tables of 256 floats to a device. The first `run` bytes have the first table, those
    /// behind them the next one, and the first table follows the last one.
    ///
    /// # Panics
    /// If there is no table, or a part of one, or `run` is 0.
    ///
    /// # Errors
    /// The device has too little free memory. It goes on with what it has.
    pub fn new(device: &Device, tables: &[f32], run: usize) -> Result<Self, Error> {
        assert!(
            !tables.is_empty() && tables.len().is_multiple_of(LEVELS),
            "{} floats of bytes",
            tables.len()
        );
        assert!(run > 0, "no byte has the first table");
        // One table is that of all bytes: the longest run suits it.
        let run = if tables.len() == LEVELS { 1 << 62 } else { run };
        Ok(Self { tables: device.upload(tables)?, run })
    }

    /// Returns the float of each byte, on the device of the tables. There the floats are made after
    /// all operations so far.
    ///
    /// # Errors
    /// The device has too little free memory, or takes no work.
    pub fn of(&self, bytes: &[u8]) -> Result<Storage, Error> {
        #[cfg(feature = "cuda")]
        if let Some(tables) = self.tables.on_any_device() {
            let count = (self.tables.len() / LEVELS) as u32;
            return tables.looked_up(count, self.run as u64, bytes).map(Storage::made);
        }
        let mut floats = vec![0.0; bytes.len()];
        look_up(self.tables.floats(), self.run, bytes, &mut floats);
        Ok(floats.into())
    }
}

//! Floats in place of bytes, on a device.
#![expect(unsafe_code, reason = "kernels work on addresses that no type guards")]

use proto::tensor::DType;

use super::launch::{self, Tables};
use super::memory::{Buffer, Origin};
use crate::error::Error;

impl Buffer {
    /// Returns the float of each byte of the host, by these `count` tables. They are made on the
    /// device after all operations so far.
    ///
    /// # Errors
    /// The device has too little free memory, or takes no kernel.
    pub(crate) fn looked_up(&self, count: u32, run: u64, bytes: &[u8]) -> Result<Self, Error> {
        let (device, size) = (self.device(), bytes.len() * DType::F32.size());
        let from = Self::uploaded(device, bytes)?;
        let made = Self::new(device, device.allocate(size)?, size, Origin::Own);
        let (tables, to) = (Tables { address: self.address(), count, run }, made.address());
        // SAFETY: there is a float for each byte, and nobody else knows of the two. The caller
        // counted the tables.
        unsafe { launch::look_up(&**device, from.address(), tables, to, bytes.len() as u64) }?;
        Ok(made)
    }
}

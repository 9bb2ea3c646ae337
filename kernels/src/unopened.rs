//! Memory of another process, and events of another library, on a CUDA device, in a program without
//! CUDA: there are none.

use std::ops::Deref;
use std::sync::Arc;

use proto::tensor::DType;

use crate::error::Error;
use crate::storage::{Operand, Storage};

/// An event of another library, which no value can have here.
#[derive(Debug)]
pub struct ForeignEvent(Never);

impl ForeignEvent {
    /// Sleeps until the event has come.
    ///
    /// # Errors
    /// None.
    pub const fn wait(&self) -> Result<(), Error> {
        match self.0 {}
    }
}

/// Memory that another process has exported, which no value can have here.
#[derive(Debug)]
pub struct Opened(Never);

/// A part of [`Opened`] memory, which no value can have here.
#[derive(Debug)]
pub struct Part(Never);

#[derive(Debug)]
enum Never {}

impl Opened {
    /// Returns the bytes of the device that the memory takes. None if it lies on another device.
    #[must_use]
    pub const fn taken_bytes(&self) -> u64 {
        match self.0 {}
    }

    /// Returns a part of the memory.
    #[must_use]
    pub fn part(self: &Arc<Self>, _: DType, _: usize, _: usize) -> Part {
        match self.0 {}
    }
}

impl Part {
    /// Copies values over those of the part.
    pub fn write(&mut self, _: Operand<'_>) {
        match self.0 {}
    }
}

impl Deref for Opened {
    type Target = Storage;

    fn deref(&self) -> &Storage {
        match self.0 {}
    }
}

impl Deref for Part {
    type Target = Storage;

    fn deref(&self) -> &Storage {
        match self.0 {}
    }
}

#[expect(unsafe_code, reason = "the same signatures as with CUDA")]
impl Storage {
    /// Returns where the values lie on a device, which they never do here.
    #[expect(clippy::unused_self, reason = "the same signatures as with CUDA")]
    pub const fn foreign_address(&self) -> Option<u64> {
        None
    }

    /// Copies values from memory of the same device, which there is none of here.
    ///
    /// # Panics
    /// Always: these lie on the host.
    ///
    /// # Safety
    /// None.
    pub unsafe fn copy_from_foreign(&mut self, _: u64) {
        panic!("storage on a device");
    }

    /// Copies these values to memory of the same device, which there is none of here.
    ///
    /// # Panics
    /// Always: these lie on the host.
    ///
    /// # Safety
    /// None.
    pub unsafe fn copy_to_foreign(&self, _: u64) {
        panic!("storage on a device");
    }
}

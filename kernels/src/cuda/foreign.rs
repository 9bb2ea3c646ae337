//! Copies between storage on a device and memory there that another library of this process has
//! allocated, such as the tensors of libtorch.
//!
//! The streams of that library and those of a [`Device`](super::Device) do not wait for each other.
//! So the caller waits for the library first, or for an [event](ForeignEvent) of the library. And
//! it waits for the device afterwards.
#![expect(unsafe_code, reason = "the memory is known by its address alone")]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::Device;
use super::launch::Address;
use crate::error::Error;
use crate::storage::Storage;

/// An event of another library on a device: all that the library had told one of its streams.
#[derive(Debug)]
pub struct ForeignEvent {
    device: Arc<Device>,
    event: CudaEvent,
}

impl ForeignEvent {
    /// Takes an event that was recorded. The caller may drop it then.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// It is an event of the driver (`CUevent`, or `cudaEvent_t`) of this device.
    pub(crate) unsafe fn new(device: &Arc<Device>, event: *mut c_void) -> Result<Self, Error> {
        // SAFETY: the caller's promise.
        let event = unsafe { device.after(event.cast()) }?;
        Ok(Self { device: device.clone(), event })
    }

    /// Sleeps until the event has come.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(&self) -> Result<(), Error> {
        let waited = self.event.synchronize();
        waited.map_err(|error| self.device.failed("wait for another library", error))
    }
}

impl Storage {
    /// Returns the number of the device on which the values lie. `None`: they lie on the host.
    pub fn ordinal(&self) -> Option<usize> {
        self.on_any_device().map(|buffer| buffer.device().ordinal())
    }

    /// Returns where the values lie on a device, for a library that reads them there once
    /// [`Device::settle`](crate::Device::settle) has returned. `None`: they lie on the host.
    pub fn foreign_address(&self) -> Option<u64> {
        self.on_any_device().map(|buffer| buffer.address().0)
    }

    /// Copies values from memory of the same device over these.
    ///
    /// # Panics
    /// If these lie on the host.
    ///
    /// # Safety
    /// There are as many bytes at `address`, which the device reaches. What has written them has
    /// ended, and they stay as they are until [`Device::settle`](crate::Device::settle) returns.
    pub unsafe fn copy_from_foreign(&mut self, address: u64) {
        let bytes = self.size();
        let buffer = self.device_mut().expect("storage on a device");
        let to = buffer.address();
        // SAFETY: the caller's promise; these are borrowed alone.
        buffer.queue(|this| unsafe { this.device().copy(Address(address), to, bytes) });
    }

    /// Copies these values to memory of the same device.
    ///
    /// # Panics
    /// If these lie on the host.
    ///
    /// # Safety
    /// There are as many bytes at `address`, which the device reaches. What uses them has ended,
    /// and nothing uses them until [`Device::settle`](crate::Device::settle) returns.
    pub unsafe fn copy_to_foreign(&self, address: u64) {
        let buffer = self.on_any_device().expect("storage on a device");
        let (from, bytes) = (buffer.address(), self.size());
        // SAFETY: the caller's promise.
        buffer.queue(|this| unsafe { this.device().copy(from, Address(address), bytes) });
    }
}

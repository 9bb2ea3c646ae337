//! Copies between storage on a device and memory there that another library of this process has
//! allocated, such as the tensors of libtorch.
//!
//! The streams of that library and those of a [`Device`] do not wait for each other by themselves. So
//! the caller waits for the library first, or lets the device wait for an event of the library. And
//! it waits for the device afterwards.
#![expect(unsafe_code, reason = "the memory is known by its address alone")]

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;

use super::Device;
use super::launch::Address;
use crate::storage::Storage;

impl Device {
    /// Lets operations that are called later wait for an event of the same device, which another
    /// library has recorded. The host does not wait, and the event is the caller's again.
    ///
    /// # Safety
    /// It is an event of the driver (`CUevent`, or `cudaEvent_t`) of this device.
    pub unsafe fn wait_for_foreign(&self, event: *mut c_void) {
        let waits = || {
            self.bind()?;
            // SAFETY: the caller's promise.
            let waits =
                unsafe { result::stream::wait_event(self.stream(), event.cast(), CU_EVENT_WAIT_DEFAULT) };
            waits.map_err(|error| self.failed("wait for another library", error))
        };
        self.note(waits());
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
    /// ended, or the device [waits](crate::Device::wait_for_foreign) for its end. They stay as they
    /// are until [`Device::settle`](crate::Device::settle) returns.
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

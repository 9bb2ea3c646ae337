//! Memory of the host that somebody else has allocated, page-locked while it is here. The device
//! copies to it without help of the processor, and other processes may read it.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::sync::Arc;

use cudarc::driver::sys;
use proto::tensor::ExternalMemory;

use super::device::Device;
use crate::error::Error;

/// Page-locked memory. The pages are unlocked before the memory is given back.
#[derive(Debug)]
pub(crate) struct Registered {
    device: Arc<Device>,
    memory: Box<dyn ExternalMemory>,
}

impl Registered {
    /// Locks the pages of memory.
    ///
    /// # Errors
    /// The memory as it was, if the driver or the system refuses.
    pub(crate) fn new(
        device: &Arc<Device>,
        mut memory: Box<dyn ExternalMemory>,
    ) -> Result<Self, Box<dyn ExternalMemory>> {
        let bytes = memory.bytes_mut();
        match device.register(bytes.as_mut_ptr(), bytes.len()) {
            Ok(()) => Ok(Self { device: device.clone(), memory }),
            Err(_) => Err(memory),
        }
    }
}

impl ExternalMemory for Registered {
    fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.device.unregister(self.memory.bytes_mut().as_mut_ptr());
    }
}

impl Device {
    fn register(&self, memory: *mut u8, bytes: usize) -> Result<(), Error> {
        self.bind()?;
        // SAFETY: the memory has so many bytes, and is unregistered before it is given back.
        let registered = unsafe { sys::cuMemHostRegister_v2(memory.cast(), bytes, 0) }.result();
        registered.map_err(|error| self.failed("lock memory of the host", error))
    }

    fn unregister(&self, memory: *mut u8) {
        self.aside("unlock memory of the host", || {
            // SAFETY: the memory was registered, and copies to it are waited for.
            unsafe { sys::cuMemHostUnregister(memory.cast()) }.result()
        });
    }
}

//! The kernels compiled by the host's C++ compiler, for tests: a [`Queue`] whose device is the
//! memory of this process.
#![expect(unsafe_code, reason = "calls into a library that this process has just built")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem;
use std::sync::OnceLock;

use super::SOURCE;
use super::launch::{Address, Queue, Shape};

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of devices")]
#[path = "../../tests/cuda/library.rs"]
pub(super) mod library;

/// Runs kernels on the host, each launch at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    launch: Launch,
    /// Launches have at most so many blocks.
    blocks_max: u32,
}

type Launch = unsafe extern "C" fn(*const c_char, u32, u32, *mut *mut c_void) -> c_int;

impl Host {
    /// Builds the library, once in a process.
    pub(super) fn new(blocks_max: u32) -> Self {
        static LAUNCH: OnceLock<Launch> = OnceLock::new();
        let launch = *LAUNCH.get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder for the library");
            library::build("host.cpp", SOURCE, folder.path(), "libkernels.so");
            let loaded = library::load(&folder.path().join("libkernels.so"));
            let launch = library::function(loaded, c"ebb_launch");
            // SAFETY: the type of the function in `host.cpp`.
            unsafe { mem::transmute::<*mut c_void, Launch>(launch) }
        });
        Self { launch, blocks_max }
    }

    /// Returns the address of values that a kernel reads.
    pub(super) fn address<T>(values: &[T]) -> Address {
        Address(values.as_ptr().expose_provenance() as u64)
    }

    /// Returns the address of values that a kernel writes.
    pub(super) fn address_mut<T>(values: &mut [T]) -> Address {
        Address(values.as_mut_ptr().expose_provenance() as u64)
    }
}

impl Queue for Host {
    type Error = String;

    unsafe fn launch(
        &self,
        kernel: &'static str,
        shape: Shape,
        arguments: &mut [*mut c_void],
    ) -> Result<(), String> {
        let name = CString::new(kernel).expect("a name");
        let blocks = shape.blocks.min(self.blocks_max);
        // SAFETY: the caller's promise.
        let found = unsafe { (self.launch)(name.as_ptr(), blocks, shape.threads, arguments.as_mut_ptr()) };
        if found == 0 { Ok(()) } else { Err(format!("no kernel `{kernel}` in tests/cuda/host.hpp")) }
    }
}

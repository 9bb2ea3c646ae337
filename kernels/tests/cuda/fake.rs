//! The driver of `driver.cpp`: how a test builds it, and what a test tells it to be.
#![expect(unsafe_code, reason = "calls into a library that this process has just built")]

use std::ffi::{CStr, c_char, c_int, c_long, c_ulonglong, c_void};
use std::mem;
use std::sync::OnceLock;

use kernels::cuda::SOURCE;

use super::library;

/// The driver, loaded for good.
#[derive(Debug)]
pub struct Driver {
    /// The loader's handle.
    library: usize,
}

/// An order that the driver forgets at one place. A place where there is nothing to wait for does
/// not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Nothing is forgotten.
    Nothing,
    /// The host or a stream does not wait, or an event is not recorded.
    Join,
    /// A kernel, a copy or a free runs before what its stream has been told so far about the same
    /// memory.
    Early,
    /// A kernel or a copy runs after everything that should have waited for it.
    Late,
}

/// A call of the driver, as it counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A kernel is launched.
    Launch,
    /// The host waits for the device.
    Wait,
    /// Memory of the device, or page-locked memory of the host, is allocated.
    Allocation,
    /// A byte of the host is copied to the device.
    UploadedByte,
}

impl Driver {
    /// Builds the driver and loads it, once in a process. cudarc finds it by its name from then on.
    pub fn load() -> &'static Self {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        DRIVER.get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder for the driver");
            library::build("driver.cpp", SOURCE, folder.path(), "libcuda.so");
            let library = library::load(&folder.path().join("libcuda.so"));
            Self { library: library.expose_provenance() }
        })
    }

    /// Sets how many devices there are: 1 at first.
    pub fn devices(&self, count: c_int) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>(c"fake_devices")(count) }
    }

    /// Sets the bytes of the device's memory: 64 MiB at first.
    pub fn memory(&self, bytes: usize) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(usize)>(c"fake_memory")(bytes) }
    }

    /// Sets the version of CUDA, such as 12040 for 12.4: 13.0 at first.
    pub fn version(&self, version: c_int) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>(c"fake_version")(version) }
    }

    /// Sets whether the device allocates in the order of a stream, as it does at first.
    pub fn pools(&self, supported: bool) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>(c"fake_pools")(supported.into()) }
    }

    /// Lets the next kernel that runs fail, and all later calls with it. 0: the device works again.
    pub fn breaks(&self, error: c_int) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>(c"fake_break")(error) }
    }

    /// Gives the streams of devices that are opened from now on other ranks: the one with the
    /// highest goes first. 0: all have the same, as at first.
    pub fn seed(&self, seed: c_ulonglong) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(c_ulonglong)>(c"fake_seed")(seed) }
    }

    /// Lets `count` calls of a function fail, from the call `first` on, counted from 0 and from
    /// this call. The device works until then. Only a lack of memory leaves it as it was.
    pub fn fail(&self, function: &CStr, first: c_long, count: c_long, error: c_int) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe {
            let fail =
                self.function::<unsafe extern "C" fn(*const c_char, c_long, c_long, c_int)>(c"fake_fail");
            fail(function.as_ptr(), first, count, error);
        }
    }

    /// Returns the number of calls of a function since the last call of `fail`.
    pub fn calls(&self, function: &CStr) -> c_long {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe {
            self.function::<unsafe extern "C" fn(*const c_char) -> c_long>(c"fake_calls")(function.as_ptr())
        }
    }

    /// Sets whether this process may open memory that it has exported itself.
    pub fn own(&self, opened: bool) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>(c"fake_own")(opened.into()) }
    }

    /// Forgets an order at one of its places, counted from 0 and from this call.
    pub fn mutate(&self, mutation: Mutation, place: c_long) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe {
            self.function::<unsafe extern "C" fn(c_int, c_long)>(c"fake_mutate")(mutation as c_int, place);
        }
    }

    /// Returns the number of places of a mutation since the last call of `mutate`.
    pub fn counted(&self, mutation: Mutation) -> c_long {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(c_int) -> c_long>(c"fake_counted")(mutation as c_int) }
    }

    /// Counts calls from 0 again.
    pub fn count(&self) {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn()>(c"fake_count")() }
    }

    /// Returns the number of calls of a kind since then.
    pub fn called(&self, call: Call) -> c_long {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn(c_int) -> c_long>(c"fake_called")(call as c_int) }
    }

    /// Returns the number of kernels that have not run yet.
    pub fn waiting(&self) -> c_long {
        // SAFETY: the type of the function in `driver.cpp`.
        unsafe { self.function::<unsafe extern "C" fn() -> c_long>(c"fake_waiting")() }
    }

    /// Returns whether a device is current on this thread.
    pub fn is_current(&self) -> bool {
        let mut context = std::ptr::null_mut();
        // SAFETY: the type of the function in `driver.cpp`, which writes one pointer.
        unsafe {
            let current =
                self.function::<unsafe extern "C" fn(*mut *mut c_void) -> c_int>(c"cuCtxGetCurrent");
            current(&raw mut context);
        }
        !context.is_null()
    }

    /// Returns what this process did since the last call of `mutate` that no driver allows.
    pub fn harm(&self) -> Option<&'static str> {
        // SAFETY: the type of the function in `driver.cpp`.
        let text = unsafe { self.function::<unsafe extern "C" fn() -> *const c_char>(c"fake_harm")() };
        // SAFETY: the driver's texts are constants that end with a zero.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().expect("a text"))
    }

    /// Returns a function of the driver.
    ///
    /// # Safety
    /// `F` is its type.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> F {
        let library = std::ptr::with_exposed_provenance_mut(self.library);
        let function = library::function(library, name);
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>(), "a pointer to a function");
        // SAFETY: both are pointers; the caller's promise.
        unsafe { mem::transmute_copy::<*mut c_void, F>(&function) }
    }
}

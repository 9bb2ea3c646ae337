//! A CUDA device: its streams, its kernels, and the first failure of what it was told to do.
//!
//! Always true here:
//!
//! - All kernels but one run on the stream `compute`, in the order in which operations were called.
//!   Storage is allocated and freed in that order too. So no operation on storage needs an event.
//! - An upload runs on a stream of its own, into memory that no kernel uses yet. The call copies
//!   the payload to page-locked memory and returns, so the payload's memory is the caller's again.
//!   Kernels that are queued later wait for the upload on the device, and the host does not. An
//!   upload into other memory waits for what `compute` has been told so far.
//! - A download runs on a third stream, which waits for what `compute` has been told so far. So
//!   kernels that are queued later do not wait for it.
//! - A download of sealed values, and the kernel that encodes them, run on a stream of their own.
//!   The host tells it of them when `compute` has run what it had been told when they were sealed.
//!   So nothing waits on this stream.
//! - Events of other libraries are waited for on a stream that does nothing else.
//! - The tracking of cudarc's slices is not used: it does not order a second reader, or the first
//!   use of memory on another stream.
//! - A call of the driver that fails is kept until [`Device::settle`] is asked. From then on the
//!   device's values mean nothing.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use proto::wire::WireType;

use super::compiler;
use super::launch::{self, Address, Cast, KERNELS, Queue, Shape};
use super::memory::Buffer;
use super::staging::{PIECE_BYTES, Staging};
use crate::device::Listed;
use crate::error::Error;

/// The oldest version of CUDA whose driver has every function that is called here, and whose NVRTC
/// is looked for: 12.0.
const VERSION_MIN: i32 = 12_000;

/// A thread that waits for such an event sleeps.
const SLEEPS: Option<sys::CUevent_flags> = Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC);

/// Bytes for an address on the PCI bus, with the zero behind it. The driver needs 13.
const PCI_ADDRESS_MAX: usize = 32;

/// A CUDA device that runs kernels. Storage on it keeps it open.
pub struct Device {
    ordinal: usize,
    name: String,
    uuid: [u8; 16],
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    uploads: Arc<CudaStream>,
    downloads: Arc<CudaStream>,
    /// Downloads of sealed values.
    early: Arc<CudaStream>,
    /// Waits for other libraries.
    foreign: Arc<CudaStream>,
    module: sys::CUmodule,
    kernels: BTreeMap<&'static str, sys::CUfunction>,
    /// Whether memory is allocated in the order of a stream.
    pooled: bool,
    staging: Staging,
    failure: Mutex<Option<Error>>,
}

// SAFETY: handles of modules and functions may be used by every thread on which the context is
// current. Each method makes it current first.
unsafe impl Send for Device {}
// SAFETY: the driver's functions may be called by several threads at once.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device by its number, and compiles the kernels for it. `cache` is a folder for
    /// compiled kernels: only this user may write to it, and it is made if it is missing.
    ///
    /// A machine without a driver, without this device or without NVRTC is an error, and the
    /// process goes on.
    ///
    /// # Errors
    /// What is missing, in one sentence with what to do. Also a device that adds two numbers wrong.
    pub fn open(ordinal: usize, cache: Option<&Path>) -> Result<Arc<Self>, Error> {
        with_driver(ordinal, |version| {
            let device = Arc::new(Self::start(ordinal, version, cache)?);
            device.probe()?;
            Ok(device)
        })
    }

    /// Lists the devices that the driver shows, in the order of their numbers. It makes no context
    /// and compiles nothing, so it takes no memory of a device.
    ///
    /// # Errors
    /// There is no driver, it is too old, or it does not start.
    pub fn list() -> Result<Vec<Listed>, Error> {
        with_driver(0, |_| {
            let listed = |ordinal: usize| -> Result<Listed, Error> {
                let failed = |what| move |error| failed(ordinal, what, error);
                let device = result::device::get(ordinal as i32).map_err(failed("be found"))?;
                let name = result::device::get_name(device).map_err(failed("say its name"))?;
                // SAFETY: the driver has just given the device.
                let memory =
                    unsafe { result::device::total_mem(device) }.map_err(failed("say its memory"))?;
                let uuid = result::device::get_uuid(device).map_err(failed("say its number"))?;
                let uuid = uuid_text(bytemuck::cast(uuid.bytes));
                Ok(Listed { name, memory_bytes: memory as u64, uuid, pci: pci_address(device) })
            };
            (0..count()?).map(listed).collect()
        })
    }

    /// Returns the number of the device.
    pub const fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Returns the name that the driver gives the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the device in the world. It is the same in every process.
    pub const fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Waits until all operations so far have run.
    ///
    /// # Errors
    /// The first failure since the device was opened. Then no value on the device means anything,
    /// and every later call says the same.
    pub fn settle(&self) -> Result<(), Error> {
        let ended = self
            .bind()
            .and_then(|()| self.compute.synchronize().map_err(|error| self.failed("compute", error)));
        self.note(ended);
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone().map_or(Ok(()), Err)
    }

    /// Returns the bytes that are free, and all bytes of the device.
    ///
    /// # Errors
    /// The driver does not say.
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        self.bind()?;
        result::mem_get_info().map_err(|error| self.failed("say its memory", error))
    }

    fn start(ordinal: usize, version: i32, cache: Option<&Path>) -> Result<Self, Error> {
        let failed = |what| move |error| failed(ordinal, what, error);
        let found = count()?;
        if ordinal >= found {
            return Err(Error::NoDevice { ordinal, found });
        }
        let context = CudaContext::new(ordinal).map_err(failed("make a context"))?;
        let name = context.name().map_err(failed("say its name"))?;
        let uuid = bytemuck::cast(context.uuid().map_err(failed("say its number"))?.bytes);
        let (major, minor) = context.compute_capability().map_err(failed("say its capability"))?;
        let pools = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        let pooled = context.attribute(pools).map_err(failed("say its attributes"))? > 0;
        let stream = || context.new_stream().map_err(failed("make a stream"));
        let [compute, uploads, downloads, early, foreign] =
            [stream()?, stream()?, stream()?, stream()?, stream()?];

        let module = compiler::load(major * 10 + minor, cache, |ptx| {
            let ptx = CString::new(ptx).unwrap_or_default();
            // SAFETY: the image is a text that ends with a zero.
            let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) };
            module.map_err(|error| match error {
                DriverError(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION) => {
                    let reason =
                        "and NVRTC writes kernels for a newer one; install a newer driver, or an NVRTC as old as \
                         this one";
                    Error::DriverTooOld { version, reason: reason.to_owned() }
                }
                error => failed("load the kernels")(error),
            })
        })?;
        let failure = Mutex::default();
        let (kernels, staging) = (BTreeMap::new(), Staging::default());
        let mut device = Self {
            ordinal,
            name,
            uuid,
            context,
            compute,
            uploads,
            downloads,
            early,
            foreign,
            module,
            kernels,
            pooled,
            staging,
            failure,
        };
        for kernel in KERNELS {
            let name = CString::new(kernel).unwrap_or_default();
            // SAFETY: the module is loaded, and is unloaded with the device.
            let function = unsafe { result::module::get_function(module, name) };
            device.kernels.insert(kernel, function.map_err(failed("find a kernel"))?);
        }
        Ok(device)
    }

    /// Lets the device add two numbers, and reads them back: a call of every kind that operations
    /// make, before one of them depends on it.
    fn probe(self: &Arc<Self>) -> Result<(), Error> {
        // Flushed subnormals or a sum in another precision would show here.
        let left = [0.1_f32, 1e-40, 16_777_216.0, f32::INFINITY];
        let right = [0.2_f32, 1e-42, 1.0, f32::INFINITY];
        let (left_bytes, right_bytes) = (bytemuck::bytes_of(&left), bytemuck::bytes_of(&right));
        let (on_left, on_right) = (Buffer::uploaded(self, left_bytes)?, Buffer::uploaded(self, right_bytes)?);
        let sum = Buffer::zeros(self, left_bytes.len())?;
        let operands = [on_left.address(), on_right.address()];
        // SAFETY: all have one length, and nothing else knows of them.
        unsafe { launch::sum(&**self, WireType::F32, operands, sum.address(), left.len() as u64) }?;
        let found = sum.read()?;
        let found = found.as_chunks().0.iter().map(|value| u32::from_le_bytes(*value)).collect::<Vec<_>>();
        let expected: Vec<_> =
            left.iter().zip(&right).map(|(left, right)| (left + right).to_bits()).collect();
        if found == expected { Ok(()) } else { Err(Error::Wrong { ordinal: self.ordinal, found, expected }) }
    }

    /// Makes the device current on this thread.
    pub(super) fn bind(&self) -> Result<(), Error> {
        self.context.bind_to_thread().map_err(|error| self.failed("run on this thread", error))
    }

    pub(super) fn failed(&self, what: &'static str, error: DriverError) -> Error {
        failed(self.ordinal, what, error)
    }

    /// Keeps a failure, if it is the first one.
    pub(super) fn note(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// Allocates memory for kernels. What it holds is not defined.
    ///
    /// # Errors
    /// The device has too little free memory.
    pub(super) fn allocate(&self, bytes: usize) -> Result<Address, Error> {
        self.allocate_on(Some(&self.compute), bytes)
    }

    /// Allocates memory that other processes can open: a driver passes on none that was allocated
    /// in the order of a stream. What it holds is not defined.
    ///
    /// # Errors
    /// The device has too little free memory.
    pub(super) fn allocate_apart(&self, bytes: usize) -> Result<Address, Error> {
        self.allocate_on(None, bytes)
    }

    fn allocate_on(&self, stream: Option<&CudaStream>, bytes: usize) -> Result<Address, Error> {
        if bytes == 0 {
            return Ok(Address::NOWHERE);
        }
        self.works()?;
        let once = || {
            // SAFETY: the stream lives, and the memory is written before it is read.
            unsafe {
                match stream.filter(|_| self.pooled) {
                    Some(stream) => result::malloc_async(stream.cu_stream(), bytes),
                    None => result::malloc_sync(bytes),
                }
            }
        };
        let full = |error: &DriverError| error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let allocated = match once() {
            // What is queued may free some.
            Err(error) if full(&error) => {
                self.compute.synchronize().map_err(|error| self.failed("compute", error))?;
                once()
            }
            allocated => allocated,
        };
        allocated.map(Address).map_err(|error| {
            if !full(&error) {
                return self.failed("allocate memory", error);
            }
            let (free, total) = result::mem_get_info().unwrap_or_default();
            Error::OutOfMemory { ordinal: self.ordinal, bytes, free, total }
        })
    }

    /// Allocates page-locked memory of the host.
    ///
    /// # Errors
    /// The system locks no more memory.
    pub(super) fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, Error> {
        if bytes == 0 {
            return Ok(NonNull::dangling());
        }
        self.bind()?;
        // SAFETY: the caller writes the memory before it reads it.
        let allocated = unsafe { result::malloc_host(bytes, 0) };
        let memory = allocated.map_err(|error| self.failed("lock memory of the host", error))?;
        let nothing = || Error::Failed {
            ordinal: self.ordinal,
            what: "lock memory of the host",
            reason: "it gave no address".to_owned(),
        };
        NonNull::new(memory.cast()).ok_or_else(nothing)
    }

    /// Frees page-locked memory, which no copy uses any more.
    pub(super) fn free_pinned(&self, memory: NonNull<u8>, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let freed = self.bind().and_then(|()| {
            // SAFETY: the memory was allocated so, and this is its owner's last call.
            let freed = unsafe { result::free_host(memory.as_ptr().cast()) };
            freed.map_err(|error| self.failed("free memory of the host", error))
        });
        self.note(freed);
    }

    /// Frees memory when all operations so far have run.
    pub(super) fn free(&self, Address(address): Address) {
        if address == 0 {
            return;
        }
        if !self.pooled {
            return self.free_apart(Address(address));
        }
        self.aside("free memory", || {
            // SAFETY: the memory is of this device, and every kernel that uses it is queued before.
            unsafe { result::free_async(address, self.compute.cu_stream()) }
        });
    }

    /// Frees memory that was not allocated in the order of a stream, when all operations so far
    /// have run.
    pub(super) fn free_apart(&self, Address(address): Address) {
        self.give_up("free memory", || {
            // SAFETY: the memory is of this device, and no kernel uses it any more.
            unsafe { result::free_sync(address) }
        });
    }

    /// Gives memory up when all operations so far have run.
    pub(super) fn give_up(&self, what: &'static str, act: impl FnOnce() -> Result<(), DriverError>) {
        self.aside(what, || self.compute.synchronize().and_then(|()| act()));
    }

    /// Calls the driver, and leaves the thread with the device that it had. A thread of another
    /// library may drop memory, and its next call is for its own device.
    pub(super) fn aside(&self, what: &'static str, act: impl FnOnce() -> Result<(), DriverError>) {
        let acted = result::ctx::get_current().and_then(|before| {
            self.context.bind_to_thread()?;
            let acted = act();
            // SAFETY: the context was current a moment ago. Without one the thread had none.
            unsafe { result::ctx::set_current(before.unwrap_or(std::ptr::null_mut())) }.and(acted)
        });
        self.note(acted.map_err(|error| self.failed(what, error)));
    }

    /// Fills memory with zeros, after all operations so far.
    ///
    /// # Safety
    /// There are so many bytes, and they are the caller's.
    pub(super) unsafe fn clear(&self, Address(to): Address, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        self.works()?;
        // SAFETY: the caller's promise.
        let cleared = unsafe { result::memset_d8_async(to, 0, bytes, self.compute.cu_stream()) };
        cleared.map_err(|error| self.failed("clear memory", error))
    }

    /// Copies values within the device, after all operations so far.
    ///
    /// # Safety
    /// Both places have so many bytes, and `to` is the caller's.
    pub(super) unsafe fn copy(
        &self,
        Address(from): Address,
        Address(to): Address,
        bytes: usize,
    ) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        self.works()?;
        // SAFETY: the caller's promise.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, self.compute.cu_stream()) };
        copied.map_err(|error| self.failed("copy values", error))
    }

    /// Copies values to new memory of the device. Kernels that are queued later find them there.
    pub(super) fn upload(&self, values: &[u8]) -> Result<Address, Error> {
        let to = self.allocate_on(Some(&self.uploads), values.len())?;
        let copied = self.copy_in(values, to);
        copied.map(|()| to).inspect_err(|_| self.free(to))
    }

    /// Copies values over memory of the device, after all operations so far. Kernels that are
    /// queued later find them there.
    ///
    /// # Safety
    /// There are so many bytes, and they are the caller's.
    pub(super) unsafe fn upload_over(&self, values: &[u8], to: Address) -> Result<(), Error> {
        self.works()?;
        let ordered = self.compute.record_event(None).and_then(|before| self.uploads.wait(&before));
        ordered.map_err(|error| self.failed("receive values", error))?;
        self.copy_in(values, to)
    }

    /// Copies values to memory of the device. If some cannot be copied, operations that are queued
    /// later wait for the others, so that the memory can be freed.
    fn copy_in(&self, values: &[u8], to: Address) -> Result<(), Error> {
        self.copy_pieces(values, to).inspect_err(|_| {
            // The first error is the one to report.
            let _ = self.uploads.record_event(None).and_then(|copied| self.compute.wait(&copied));
        })
    }

    fn copy_pieces(&self, values: &[u8], Address(mut to): Address) -> Result<(), Error> {
        let failed = |error| self.failed("receive values", error);
        let pieces = values.len().div_ceil(PIECE_BYTES);
        for (number, values) in values.chunks(PIECE_BYTES).enumerate() {
            let mut piece = self.staging.take(|| self.allocate_pinned(PIECE_BYTES))?;
            if let Some(copied) = piece.copied.take() {
                copied.synchronize().map_err(failed)?;
            }
            let staged = &mut piece.bytes()[..values.len()];
            staged.copy_from_slice(values);
            // SAFETY: the memory has this length, and the piece stays as it is until the copy's
            // event.
            unsafe { result::memcpy_htod_async(to, staged, self.uploads.cu_stream()) }.map_err(failed)?;
            let copied = self.uploads.record_event(None).map_err(failed)?;
            if number + 1 == pieces {
                self.compute.wait(&copied).map_err(failed)?;
            }
            piece.copied = Some(copied);
            self.staging.give_back(piece);
            to += values.len() as u64;
        }
        Ok(())
    }

    /// Copies values to memory of the host, after all operations so far.
    ///
    /// # Safety
    /// There are so many bytes, and they have been written.
    pub(super) unsafe fn download(&self, from: Address, to: &mut [u8]) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.download_all([(from, to)]) }
    }

    /// Copies values from several places to memory of the host, after all operations so far. The
    /// host waits once.
    ///
    /// # Safety
    /// There are so many bytes at each place, and they have been written.
    pub(super) unsafe fn download_all<'a>(
        &self,
        pairs: impl IntoIterator<Item = (Address, &'a mut [u8])>,
    ) -> Result<(), Error> {
        let mut pairs = pairs.into_iter().filter(|(_, to)| !to.is_empty()).peekable();
        if pairs.peek().is_none() {
            return Ok(());
        }
        self.works()?;
        let copied = self.compute.record_event(None).and_then(|written| {
            self.downloads.wait(&written)?;
            let queued = pairs.try_for_each(|(Address(from), to)| {
                // SAFETY: the caller's promise, and the host waits for the copy.
                unsafe { result::memcpy_dtoh_async(to, from, self.downloads.cu_stream()) }
            });
            // Also after a failure: the copies before it write to the caller's memory.
            self.downloads.synchronize().and(queued)
        });
        copied.map_err(|error| self.failed("send values", error))
    }

    /// Returns the event of all operations so far.
    pub(super) fn now(&self) -> Result<CudaEvent, Error> {
        self.works()?;
        self.compute.record_event(SLEEPS).map_err(|error| self.failed("compute", error))
    }

    /// Returns the event that comes when one of another library has come. That one is the caller's
    /// again.
    ///
    /// # Safety
    /// It is an event of this device, and was recorded.
    pub(super) unsafe fn after(&self, event: sys::CUevent) -> Result<CudaEvent, Error> {
        self.works()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the caller's promise.
        let waits = unsafe { result::stream::wait_event(self.foreign.cu_stream(), event, flags) };
        let after = waits.and_then(|()| self.foreign.record_event(SLEEPS));
        after.map_err(|error| self.failed("wait for another library", error))
    }

    /// Drops an event.
    pub(super) fn forget(&self, event: CudaEvent) {
        self.aside("drop an event", || {
            drop(event);
            Ok(())
        });
    }

    /// Copies f32 values in the type `wire` to memory of the host. It waits for the event `sealed`,
    /// and not for operations after it. If there is no memory for encoded values, the device goes
    /// on.
    ///
    /// # Safety The values of `to` lie at `from`, and have been written when the event comes.
    /// Nothing changes or frees them before this returns.
    pub(super) unsafe fn download_sealed(
        &self,
        sealed: &CudaEvent,
        from: Address,
        wire: WireType,
        to: &mut [u8],
    ) -> Result<(), Error> {
        if to.is_empty() {
            return Ok(());
        }
        self.works()?;
        let failed = |error| self.failed("send values", error);
        // Not on the stream: there, values that have come would wait behind these. And a copy to
        // memory that is not page-locked would wait inside the driver.
        sealed.synchronize().map_err(failed)?;
        let encoded = match wire.rounds() {
            true => Some(self.allocate_on(Some(&self.early), to.len())?),
            false => None,
        };
        let encode = |encoded: Address| {
            let early = OnStream { device: self, stream: &self.early };
            // SAFETY: both have so many values, and nobody else knows of the new ones.
            unsafe {
                launch::cast(&early, Cast::Encode, wire, from, encoded, (to.len() / wire.size()) as u64)
            }
        };
        let copied = encoded.map_or(Ok(()), encode).and_then(|()| {
            let Address(from) = encoded.unwrap_or(from);
            // SAFETY: the caller's promise, and the host waits for the copy.
            let queued = unsafe { result::memcpy_dtoh_async(to, from, self.early.cu_stream()) };
            // Also after a failure: other threads copy to their memory by this stream.
            self.early.synchronize().and(queued).map_err(failed)
        });
        let freed = encoded.map_or(Ok(()), |Address(encoded)| {
            // SAFETY: the memory is of this device, and what used it has run.
            let freed = unsafe {
                match self.pooled {
                    true => result::free_async(encoded, self.early.cu_stream()),
                    false => result::free_sync(encoded),
                }
            };
            freed.map_err(|error| self.failed("free memory", error))
        });
        copied.and(freed)
    }

    /// Makes the device current on this thread. A device that lacked memory for storage does
    /// nothing any more, because that storage has no address.
    fn works(&self) -> Result<(), Error> {
        match self.check() {
            Err(error @ Error::OutOfMemory { .. }) => Err(error),
            _ => self.bind(),
        }
    }

    /// Returns the failure of an earlier operation, if there was one.
    pub(super) fn check(&self) -> Result<(), Error> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone().map_or(Ok(()), Err)
    }
}

impl Queue for Device {
    type Error = Error;

    unsafe fn launch(
        &self,
        kernel: &'static str,
        shape: Shape,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { OnStream { device: self, stream: &self.compute }.launch(kernel, shape, arguments) }
    }
}

/// Runs kernels of a device on one of its streams.
struct OnStream<'a> {
    device: &'a Device,
    stream: &'a CudaStream,
}

impl Queue for OnStream<'_> {
    type Error = Error;

    unsafe fn launch(
        &self,
        kernel: &'static str,
        shape: Shape,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let device = self.device;
        device.works()?;
        let Some(&function) = device.kernels.get(kernel) else {
            let reason = format!("there is no kernel `{kernel}`");
            return Err(Error::Failed { ordinal: device.ordinal, what: "compute", reason });
        };
        let (blocks, threads, stream) =
            ((shape.blocks, 1, 1), (shape.threads, 1, 1), self.stream.cu_stream());
        // SAFETY: the caller's promise.
        let launched = unsafe { result::launch_kernel(function, blocks, threads, 0, stream, arguments) };
        launched.map_err(|error| device.failed("compute", error))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Nobody is left who could be told of a failure.
        let _ = self.settle();
        for memory in self.staging.take_all() {
            self.free_pinned(memory, PIECE_BYTES);
        }
        // SAFETY: all kernels have run, and no storage is left that could queue one.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}: {})", self.ordinal, self.name)
    }
}

/// Calls the driver, if there is one that is new enough. `act` gets the version of CUDA that it
/// supports. An error names device `ordinal`.
fn with_driver<T>(ordinal: usize, act: impl FnOnce(i32) -> Result<T, Error>) -> Result<T, Error> {
    // SAFETY: opens and closes the library, which runs nothing of ours.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    let mut version = 0;
    // cudarc panics when it first calls a function that the driver lacks.
    let acted = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the driver writes one number.
        let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
        asked.map_err(|error| failed(ordinal, "say its driver's version", error))?;
        if version < VERSION_MIN {
            let (major, minor) = (VERSION_MIN / 1000, VERSION_MIN % 1000 / 10);
            let reason = format!("expected {major}.{minor} or newer; install a newer driver");
            return Err(Error::DriverTooOld { version, reason });
        }
        act(version)
    }));
    acted.unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
        let reason = format!("{}; install a newer driver", said.unwrap_or("and lacks a function"));
        Err(Error::DriverTooOld { version, reason })
    })
}

/// Writes a UUID in its usual form.
pub(super) fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = String::new();
    for (place, byte) in bytes.iter().enumerate() {
        let dash = if [4, 6, 8, 10].contains(&place) { "-" } else { "" };
        text += &format!("{dash}{byte:02x}");
    }
    text
}

/// Returns the address of a device on the PCI bus. Empty: the driver does not tell.
fn pci_address(device: sys::CUdevice) -> String {
    let mut text = [0; PCI_ADDRESS_MAX];
    // SAFETY: the driver writes at most so many bytes, with a zero behind the text.
    let said = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, device) };
    let whole = std::ffi::CStr::from_bytes_until_nul(&text).ok().filter(|_| said == CUresult::CUDA_SUCCESS);
    whole.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns the number of devices.
pub(super) fn count() -> Result<usize, Error> {
    match CudaContext::device_count() {
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(error) => Err(failed(0, "start its driver", error)),
        Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
    }
}

fn failed(ordinal: usize, what: &'static str, error: DriverError) -> Error {
    Error::Failed { ordinal, what, reason: reason(error) }
}

/// Returns what the driver says of an error.
pub(super) fn reason(error: DriverError) -> String {
    match error.error_string() {
        Ok(text) => format!("{} ({:?})", text.to_string_lossy(), error.0),
        Err(_) => format!("{:?}", error.0),
    }
}

//! What makes storage: the processor of the host, or a CUDA device.
//!
//! Always true here: without the feature `cuda` there is only the processor of the host, and
//! nothing is asked or stored to know that.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use proto::tensor::{DType, ExternalMemory};

#[cfg(feature = "cuda")]
use crate::cuda::{self, memory::Pinned, registered::Registered};
use crate::error::Error;
use crate::storage::{Operand, Storage};
use crate::{ForeignEvent, Opened};

/// A part of memory that another process has exported begins at a multiple of so many bytes. CUDA
/// aligns what it allocates so.
pub const PART_ALIGNMENT: usize = 256;

/// The processor of the host, or an open CUDA device. Clones are the same device.
///
/// ```
/// use kernels::{Device, Error};
/// use proto::tensor::DType;
///
/// let device = Device::default();
/// assert!(device.is_host());
/// let weights = device.zeros(DType::F32, 3)?;
/// assert_eq!(*weights.bytes(), [0; 12]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Device {
    #[cfg(feature = "cuda")]
    cuda: Option<Arc<cuda::Device>>,
}

/// The CUDA devices that a process uses, each opened once. So its roles queue operations on one
/// stream, in one order, and pass values to each other without a wait. Clones are the same devices.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    /// Folder for compiled kernels.
    cache: Option<PathBuf>,
    opened: Arc<Mutex<BTreeMap<usize, Device>>>,
}

#[cfg(feature = "cuda")]
impl From<Arc<cuda::Device>> for Device {
    fn from(device: Arc<cuda::Device>) -> Self {
        Self { cuda: Some(device) }
    }
}

impl PartialEq for Devices {
    /// Compares the settings, and not what is open.
    fn eq(&self, other: &Self) -> bool {
        self.cache == other.cache
    }
}

impl Devices {
    /// Returns devices whose compiled kernels are kept in the folder `cache`.
    #[must_use]
    pub fn new(cache: Option<PathBuf>) -> Self {
        Self { cache, opened: Arc::default() }
    }

    /// Returns a CUDA device by its number. The first call opens it, which may take seconds.
    ///
    /// # Errors
    /// The errors of [`Device::cuda`]. The next call tries again.
    pub fn cuda(&self, ordinal: usize) -> Result<Device, Error> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = opened.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = Device::cuda(ordinal, self.cache.as_deref())?;
        opened.insert(ordinal, device.clone());
        Ok(device)
    }
}

/// A CUDA device as its driver shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// The name that the driver gives the device.
    pub name: String,
    /// All bytes of its memory.
    pub memory_bytes: u64,
    /// Number of the device in the world, as in `00000000-0000-0000-0000-000000000001`. Whatever
    /// CUDA_VISIBLE_DEVICES says, it names one device.
    pub uuid: String,
    /// Address on the PCI bus, as in `0000:3B:00.0`. Empty: the driver does not tell.
    pub pci: String,
}

/// Lists the CUDA devices of this process, in the order of their numbers. A device is not opened
/// for that.
///
/// # Errors
/// There is no driver, it is too old, or it does not start: one sentence with what to do.
#[cfg(feature = "cuda")]
pub fn listed() -> Result<Vec<Listed>, Error> {
    cuda::Device::list()
}

/// Lists no CUDA device. This program was built without CUDA.
///
/// # Errors
/// Always [`Error::NotBuilt`].
#[cfg(not(feature = "cuda"))]
pub const fn listed() -> Result<Vec<Listed>, Error> {
    Err(Error::NotBuilt)
}

/// Looks for NVRTC, which compiles the kernels when a device is opened.
///
/// # Errors
/// The loader finds none.
#[cfg(feature = "cuda")]
pub fn compiler() -> Result<(), Error> {
    cuda::compiler::find()
}

/// Looks for no compiler. This program was built without CUDA.
///
/// # Errors
/// Always [`Error::NotBuilt`].
#[cfg(not(feature = "cuda"))]
pub const fn compiler() -> Result<(), Error> {
    Err(Error::NotBuilt)
}

impl Device {
    /// Opens a CUDA device by its number, and compiles the kernels for it. `cache` is a folder for
    /// compiled kernels: only this user may write to it, and it is made if it is missing.
    ///
    /// # Errors
    /// What is missing, in one sentence with what to do.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: usize, cache: Option<&Path>) -> Result<Self, Error> {
        cuda::Device::open(ordinal, cache).map(Self::from)
    }

    /// Opens a CUDA device. This program was built without CUDA.
    ///
    /// # Errors
    /// Always [`Error::NotBuilt`].
    #[cfg(not(feature = "cuda"))]
    pub const fn cuda(_: usize, _: Option<&Path>) -> Result<Self, Error> {
        Err(Error::NotBuilt)
    }

    /// Returns whether it is the processor of the host.
    #[must_use]
    pub const fn is_host(&self) -> bool {
        #[cfg(feature = "cuda")]
        {
            self.cuda.is_none()
        }
        #[cfg(not(feature = "cuda"))]
        {
            true
        }
    }

    /// Returns the number of a CUDA device. `None`: it is the processor of the host.
    #[must_use]
    pub fn ordinal(&self) -> Option<usize> {
        #[cfg(feature = "cuda")]
        {
            self.cuda.as_ref().map(|device| device.ordinal())
        }
        #[cfg(not(feature = "cuda"))]
        {
            None
        }
    }

    /// Returns the UUID of a CUDA device, which is one for all processes. `None`: it is the
    /// processor of the host.
    #[must_use]
    pub fn uuid(&self) -> Option<[u8; 16]> {
        #[cfg(feature = "cuda")]
        {
            self.cuda.as_ref().map(|device| device.uuid())
        }
        #[cfg(not(feature = "cuda"))]
        {
            None
        }
    }

    /// Creates `len` zeros in memory that another process of this host can [open](Self::open) by
    /// the handle, whose bytes are for a message (ADR 58). It takes whole pieces of 2 MiB.
    ///
    /// The other process finds what [`settle`](Self::settle) has waited for. The storage has to
    /// live until the other process has closed the memory, and may not change while it is read
    /// there.
    ///
    /// # Errors
    /// It is the processor of the host, the device has too little free memory, or its driver passes
    /// no memory to other processes. The device goes on.
    pub fn exported(&self, dtype: DType, len: usize) -> Result<(Storage, Vec<u8>), Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            let (storage, handle) = Storage::exported(device, dtype, len)?;
            return Ok((storage, handle.to_bytes().to_vec()));
        }
        let _ = (dtype, len);
        Err(Error::OnHost)
    }

    /// Returns whether the device with this UUID may reach memory of this one: it is the same
    /// device, or the driver says that the two have access to each other. Of a device that this
    /// process does not see nothing is known, and it may.
    #[must_use]
    pub fn is_reached_from(&self, uuid: &[u8]) -> bool {
        #[cfg(feature = "cuda")]
        {
            self.cuda.as_ref().is_some_and(|device| device.is_reached_from(uuid))
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = uuid;
            false
        }
    }

    /// Opens memory that another process has exported, with values of one type.
    ///
    /// # Errors
    /// It is the processor of the host, it has no access to the device on which the memory lies,
    /// the memory is gone, or the driver refuses to pass it. The device goes on.
    pub fn open(&self, dtype: DType, handle: &[u8]) -> Result<Arc<Opened>, Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return device.open_message(dtype, handle).map(Arc::new);
        }
        let _ = (dtype, handle);
        Err(Error::OnHost)
    }

    /// Returns an event of a CUDA device that another library has recorded, to be waited for. The
    /// caller may drop its own then.
    ///
    /// # Errors
    /// It is the processor of the host, or the device failed.
    ///
    /// # Safety
    /// It is an event of the driver (`CUevent`, or `cudaEvent_t`) of this device.
    #[expect(unsafe_code, reason = "the event is known by its address alone")]
    pub unsafe fn foreign(&self, event: *mut c_void) -> Result<ForeignEvent, Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            // SAFETY: the caller's promise.
            return unsafe { ForeignEvent::new(device, event) };
        }
        let _ = event;
        Err(Error::OnHost)
    }

    /// Creates `len` zeros.
    ///
    /// # Errors
    /// The device has too little free memory. It goes on with what it has.
    pub fn zeros(&self, dtype: DType, len: usize) -> Result<Storage, Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return Storage::on_device(device, dtype, len);
        }
        Ok(Storage::zeros(dtype, len))
    }

    /// Takes floats: as they are on the host, and as a copy on a device.
    ///
    /// # Errors
    /// The device has too little free memory. It goes on with what it has.
    pub fn upload<'a>(&self, floats: impl Into<Cow<'a, [f32]>>) -> Result<Storage, Error> {
        let floats = floats.into();
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return Storage::uploaded(device, &floats);
        }
        Ok(floats.into_owned().into())
    }

    /// Copies values, little-endian and at any alignment, to new memory. The copy to a device does
    /// not wait for operations before it.
    ///
    /// # Errors
    /// The device has too little free memory. It goes on with what it has.
    pub fn copy_of(&self, dtype: DType, bytes: &[u8]) -> Result<Storage, Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return Storage::uploaded_bytes(device, dtype, bytes);
        }
        let mut copy = Storage::zeros(dtype, bytes.len() / dtype.size());
        copy.write(Operand::Payload(bytes));
        Ok(copy)
    }

    /// Creates `len` zeros that the caller cannot do without. If there is no memory for them the
    /// device has failed: operations do nothing any more, and [`settle`](Self::settle) says why.
    pub fn zeros_or_failed(&self, dtype: DType, len: usize) -> Storage {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return Storage::on_device_or_failed(device, dtype, len);
        }
        Storage::zeros(dtype, len)
    }

    /// Creates `len` zeros in memory of the host from which, and to which, the device copies
    /// without help of the processor. If the system locks no more memory, it is ordinary memory.
    pub fn staging(&self, dtype: DType, len: usize) -> Storage {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda
            && let Ok(memory) = Pinned::zeros(device, len * dtype.size())
        {
            return Storage::external(dtype, Box::new(memory));
        }
        Storage::zeros(dtype, len)
    }

    /// Creates storage in memory that somebody else has allocated, in whole pages. The device
    /// copies to it without help of the processor, unless the system locks no more memory.
    pub fn locking(&self, dtype: DType, memory: Box<dyn ExternalMemory>) -> Storage {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return Storage::external(
                dtype,
                Registered::new(device, memory).map_or_else(|memory| memory, |locked| Box::new(locked) as _),
            );
        }
        Storage::external(dtype, memory)
    }

    /// Waits until all operations so far have run.
    ///
    /// # Errors
    /// The first failure since the device was opened. Then no value on it means anything.
    pub fn settle(&self) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return device.settle();
        }
        Ok(())
    }

    /// Returns the bytes that are free on a CUDA device, and all bytes that it has. `None`: it is
    /// the processor of the host.
    ///
    /// # Errors
    /// The driver does not say.
    pub fn memory(&self) -> Result<Option<(u64, u64)>, Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return device.memory().map(|(free, total)| Some((free as u64, total as u64)));
        }
        Ok(None)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.cuda {
            return write!(f, "cuda:{} ({})", device.ordinal(), device.name());
        }
        f.write_str("cpu")
    }
}

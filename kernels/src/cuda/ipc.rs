//! Memory of a device that two processes of one host use, by the handles of CUDA (ADR 58).
//!
//! One process exports memory when it allocates it, and sends the handle. The other process opens
//! the handle and reads the memory where it lies, whole or in parts, as any other operand of a
//! kernel. It writes to parts that the exporter has offered.
//!
//! Always true here:
//!
//! - Exported memory takes whole blocks of the driver. A handle opens whole blocks, so nothing else
//!   of this process may lie in them.
//! - At each moment one of the two processes may change a part, which their messages say. Whole
//!   memory that was opened is only read.
//! - Memory is closed when all operations so far have run.
//! - A refusal leaves the device as it was. The caller passes the values another way.
//! - No events cross. [`Device::settle`] comes before each message that lets the other process go
//!   on. The zeros of exported memory are there when its handle is.
//!
//! No driver of a real device has been asked yet.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::c_char;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use proto::tensor::DType;

use super::device::{Device, count, reason, uuid_text};
use super::launch::Address;
use super::memory::{Buffer, Origin};
use crate::device::PART_ALIGNMENT;
use crate::error::Error;
use crate::storage::{Operand, Storage};

/// Bytes of the blocks in which a driver keeps smaller allocations together.
const BLOCK_BYTES: usize = 2 << 20;

/// Bytes of CUDA's own handle.
const RAW_BYTES: usize = 64;

/// What an error says that the device could not do.
const OPEN: &str = "open memory of another process";

/// What CUDA's documentation demands of each call that opens memory. The driver then also opens
/// memory of another device, if the devices have access to each other.
const FLAGS: u32 = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

/// What another process needs to open exported memory. A process of the same user that has the
/// handle can read and write the memory, so it goes only to a process that is trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct Handle {
    device: [u8; 16],
    bytes: u64,
    raw: [u8; RAW_BYTES],
}

impl Handle {
    /// Bytes of a handle in a message.
    pub const BYTES: usize = 16 + 8 + RAW_BYTES;

    /// Returns the handle for a message: `[ UUID of the device | bytes of the values | CUDA's own
    /// handle ]`. The number of bytes is little-endian.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut message = [0; Self::BYTES];
        message[..16].copy_from_slice(&self.device);
        message[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        message[24..].copy_from_slice(&self.raw);
        message
    }

    /// Reads a handle from a message. `None`: it has another length.
    pub fn from_bytes(message: &[u8]) -> Option<Self> {
        let (device, rest) = message.split_first_chunk()?;
        let (bytes, raw) = rest.split_first_chunk()?;
        Some(Self { device: *device, bytes: u64::from_le_bytes(*bytes), raw: raw.try_into().ok()? })
    }

    /// Returns the UUID of the device on which the memory lies.
    pub const fn device(&self) -> [u8; 16] {
        self.device
    }
}

/// CUDA's own handle is left out: it opens the memory.
impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({} bytes on {})", self.bytes, uuid_text(self.device))
    }
}

/// Values in memory that another process has exported. As a whole they are only read here.
///
/// The memory is closed when this is dropped. What was told to read it has run by then. The
/// exporter keeps the memory until it hears that.
#[derive(Debug)]
pub struct Opened {
    storage: Storage,
    /// Bytes of the device that opened it.
    taken: u64,
}

impl Opened {
    /// Opens the memory of a handle, whose values have one type. It lies on this device, or on one
    /// whose memory this device has access to.
    ///
    /// # Errors
    /// The device has no access to the memory, the memory is gone, or the driver refuses to pass
    /// it. The device goes on.
    pub fn open(device: &Arc<Device>, dtype: DType, handle: &Handle) -> Result<Self, Error> {
        let len = usize::try_from(handle.bytes).unwrap_or(usize::MAX) / dtype.size();
        let address = device.open_exported(handle)?;
        let bytes = len * dtype.size();
        let buffer = Buffer::new(device, address, bytes, Origin::Opened);
        let is_here = handle.device == device.uuid();
        let taken = if is_here { taken(bytes) as u64 } else { 0 };
        Ok(Self { storage: Storage::in_buffer(dtype, len, buffer), taken })
    }

    /// Returns the bytes of the device that the memory takes. None if it lies on another device.
    #[must_use]
    pub const fn taken_bytes(&self) -> u64 {
        self.taken
    }

    /// Returns `bytes` from the byte `begin` on, as values of this type. The part keeps the memory
    /// open.
    ///
    /// # Panics
    /// If they are not inside the memory, `begin` is no multiple of [`PART_ALIGNMENT`], or they end
    /// within a value.
    #[must_use]
    pub fn part(self: &Arc<Self>, dtype: DType, begin: usize, bytes: usize) -> Part {
        let is_inside = begin.checked_add(bytes).is_some_and(|end| end <= self.size());
        assert!(is_inside, "{bytes} bytes from {begin} on, of {}", self.size());
        assert!(begin.is_multiple_of(PART_ALIGNMENT), "a part begins at byte {begin}");
        assert!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes end within a value");
        let whole = self.on_any_device().expect("it was opened on a device");
        let address = Address(whole.address().0 + begin as u64);
        let buffer = Buffer::new(whole.device(), address, bytes, Origin::Part(self.clone()));
        Part(Storage::in_buffer(dtype, bytes / dtype.size(), buffer))
    }
}

impl Deref for Opened {
    type Target = Storage;

    fn deref(&self) -> &Storage {
        &self.storage
    }
}

/// A part of [`Opened`] memory.
#[derive(Debug)]
pub struct Part(Storage);

impl Part {
    /// Copies values over those of the part, which the exporter has offered for them. The exporter
    /// finds what [`Device::settle`] has waited for.
    ///
    /// # Panics
    /// If there are more or fewer values.
    pub fn write(&mut self, values: Operand<'_>) {
        self.0.write(values);
    }
}

impl Deref for Part {
    type Target = Storage;

    fn deref(&self) -> &Storage {
        &self.0
    }
}

/// Returns the bytes of the device that exported memory of so many bytes takes.
fn taken(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(BLOCK_BYTES)
}

impl Buffer {
    /// Allocates zeros that other processes can open.
    ///
    /// # Errors
    /// The device has too little free memory, or its driver passes no memory to other processes.
    pub(crate) fn exported(device: &Arc<Device>, bytes: usize) -> Result<(Self, Handle), Error> {
        let all = taken(bytes);
        let buffer = Self::new(device, device.allocate_apart(all)?, bytes, Origin::Exported);
        // SAFETY: nobody else knows of the memory.
        unsafe { device.clear(buffer.address(), all) }?;
        // Zeros that were written later would lie over what the other process has written.
        device.settle()?;
        let raw = device.export(buffer.address())?;
        Ok((buffer, Handle { device: device.uuid(), bytes: bytes as u64, raw }))
    }
}

impl Device {
    /// Returns CUDA's handle of memory that was allocated apart.
    fn export(&self, Address(address): Address) -> Result<[u8; RAW_BYTES], Error> {
        self.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; RAW_BYTES] };
        // SAFETY: the driver writes one handle.
        let exported = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) }.result();
        exported.map_err(|error| self.not_shared("export memory", reason(error)))?;
        Ok(bytemuck::cast(handle.reserved))
    }

    /// Opens memory of another process by a handle from a message.
    ///
    /// # Errors
    /// The errors of [`Opened::open`], and bytes that are no handle.
    pub(crate) fn open_message(self: &Arc<Self>, dtype: DType, message: &[u8]) -> Result<Opened, Error> {
        let wrong = || {
            let reason = format!("its handle has {} bytes, expected {}", message.len(), Handle::BYTES);
            self.not_shared(OPEN, reason)
        };
        Opened::open(self, dtype, &Handle::from_bytes(message).ok_or_else(wrong)?)
    }

    /// Opens memory of another process.
    fn open_exported(&self, handle: &Handle) -> Result<Address, Error> {
        self.bind()?;
        let reserved: [c_char; RAW_BYTES] = bytemuck::cast(handle.raw);
        let mut address = 0;
        // SAFETY: the driver writes one address, and says whether the handle is one.
        let opened =
            unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, sys::CUipcMemHandle { reserved }, FLAGS) };
        opened.result().map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_INVALID_HANDLE | CUresult::CUDA_ERROR_MAP_FAILED => {
                Error::Gone { ordinal: self.ordinal(), reason: reason(error) }
            }
            CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED | CUresult::CUDA_ERROR_TOO_MANY_PEERS => {
                let (found, expected) = (uuid_text(handle.device), uuid_text(self.uuid()));
                Error::OtherDevice { ordinal: self.ordinal(), found, expected, reason: reason(error) }
            }
            _ => self.not_shared(OPEN, reason(error)),
        })?;
        // A message from outside says how long it is. A kernel beyond the end would end the device.
        let checked = self.extent(address).map_err(reason).and_then(|found| {
            let message = || format!("it has {found} bytes, its handle says {}", handle.bytes);
            if handle.bytes <= found { Ok(()) } else { Err(message()) }
        });
        checked.map(|()| Address(address)).map_err(|reason| {
            self.close(Address(address));
            self.not_shared(OPEN, reason)
        })
    }

    /// Returns the bytes from an address to the end of its memory.
    fn extent(&self, address: sys::CUdeviceptr) -> Result<u64, DriverError> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the driver writes an address and a number.
        unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) }.result()?;
        Ok((base + bytes as u64).saturating_sub(address))
    }

    /// Returns whether the device with this UUID may reach memory of this one. Of a device that
    /// this process does not see nothing is known.
    pub(crate) fn is_reached_from(&self, uuid: &[u8]) -> bool {
        let devices =
            (0..count().unwrap_or_default()).filter_map(|ordinal| result::device::get(ordinal as i32).ok());
        let has_uuid = |device: &sys::CUdevice, uuid: &[u8]| {
            let found: Option<[u8; 16]> =
                result::device::get_uuid(*device).ok().map(|found| bytemuck::cast(found.bytes));
            found.is_some_and(|found| found == uuid)
        };
        let find = |uuid: &[u8]| devices.clone().find(|device| has_uuid(device, uuid));
        let (Some(own), Some(other)) = (find(&self.uuid()), find(uuid)) else { return true };
        let mut can = 0;
        // SAFETY: the driver writes one number.
        own == other
            || unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, other, own) }.result().is_ok() && can != 0
    }

    /// Closes memory of another process when all operations so far have run.
    pub(super) fn close(&self, Address(address): Address) {
        self.give_up("close memory of another process", || {
            // SAFETY: the memory was opened, and no kernel uses it any more.
            unsafe { sys::cuIpcCloseMemHandle(address) }.result()
        });
    }

    fn not_shared(&self, what: &'static str, reason: String) -> Error {
        Error::NotShared { ordinal: self.ordinal(), what, reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_crosses_in_a_message_of_its_length_and_is_not_shown() {
        let mut raw = [0; RAW_BYTES];
        raw.iter_mut().zip(101..).for_each(|(byte, value)| *byte = value);
        let handle = Handle { device: [3; 16], bytes: 0x0102_0304_0506_0708, raw };
        let message = handle.to_bytes();
        assert_eq!(Handle::from_bytes(&message).as_ref(), Some(&handle));
        assert_eq!((message[16], message[24]), (8, 101), "the layout is one for all processes");
        for wrong in [&message[..0], &message[..87], &[0; 89][..]] {
            assert_eq!(Handle::from_bytes(wrong), None, "{} bytes", wrong.len());
        }
        let shown = format!("{handle:?}");
        assert_eq!(shown, "Handle(72623859790382856 bytes on 03030303-0303-0303-0303-030303030303)");
    }
}

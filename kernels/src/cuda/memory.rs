//! Memory on a device, and the operations on one piece of it.
//!
//! Always true here: an operation returns as soon as it is queued. If it cannot be queued, the
//! device keeps the failure for [`Device::settle`].
#![expect(unsafe_code, reason = "kernels work on addresses that no type guards")]

use std::borrow::Cow;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, slice};

use cudarc::driver::CudaEvent;
use proto::tensor::{DType, ExternalMemory};
use proto::wire::WireType;

use super::device::Device;
use super::launch::{self, Address, Cast};
use crate::error::Error;

/// Bytes on a device.
#[derive(Debug)]
pub(crate) struct Buffer {
    device: Arc<Device>,
    address: Address,
    bytes: usize,
    origin: Origin,
    /// When the bytes had become what they are to stay. `None`: nobody has said so.
    sealed: Option<CudaEvent>,
}

/// How memory came to be, which says how it is given up.
#[derive(Debug)]
pub(super) enum Origin {
    /// Allocated for this process.
    Own,
    /// Allocated for other processes too.
    Exported,
    /// Opened: another process has allocated it.
    Opened,
    /// A part of other memory, which it keeps.
    Part(#[expect(dead_code, reason = "held until the part is dropped")] Arc<dyn Whole>),
}

/// What a part keeps.
pub(crate) trait Whole: Send + Sync + fmt::Debug {}

impl<T: Send + Sync + fmt::Debug> Whole for T {}

/// Page-locked memory of the host: a device copies from and to it without help of the processor.
pub(crate) struct Pinned {
    device: Arc<Device>,
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is this value's alone, and any thread may use it.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates zeros.
    ///
    /// # Errors
    /// The system locks no more memory.
    pub(crate) fn zeros(device: &Arc<Device>, bytes: usize) -> Result<Self, Error> {
        let memory = device.allocate_pinned(bytes)?;
        // SAFETY: there are so many bytes, and nobody else knows of them.
        unsafe { memory.write_bytes(0, bytes) };
        Ok(Self { device: device.clone(), memory, bytes })
    }
}

impl ExternalMemory for Pinned {
    fn bytes(&self) -> &[u8] {
        // SAFETY: there are so many bytes, which were written when they were allocated.
        unsafe { slice::from_raw_parts(self.memory.as_ptr(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: there are so many bytes, which were written when they were allocated.
        unsafe { slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} bytes)", self.bytes)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.device.free_pinned(self.memory, self.bytes);
    }
}

/// Values that an operation reads.
pub(crate) enum Source<'a> {
    /// Bytes of the host.
    Host(Cow<'a, [u8]>),
    /// Bytes on this device or another one.
    Device(&'a Buffer),
}

/// Values where a kernel reads them.
pub(super) enum Near<'a> {
    /// They lie on the device.
    Here(&'a Buffer),
    /// A copy of what lay elsewhere. It is freed when the kernel has run.
    Copied(Buffer),
}

impl Buffer {
    /// Allocates zeros.
    ///
    /// # Errors
    /// The device has too little free memory.
    pub(crate) fn zeros(device: &Arc<Device>, bytes: usize) -> Result<Self, Error> {
        let buffer = Self::new(device, device.allocate(bytes)?, bytes, Origin::Own);
        // SAFETY: nobody else knows of the memory.
        unsafe { device.clear(buffer.address, bytes) }?;
        Ok(buffer)
    }

    /// Takes memory that is given up as its origin demands.
    pub(super) fn new(device: &Arc<Device>, address: Address, bytes: usize, origin: Origin) -> Self {
        Self { device: device.clone(), address, bytes, origin, sealed: None }
    }

    /// Allocates zeros. If the device has no memory for them, it has failed.
    pub(crate) fn zeros_or_failed(device: &Arc<Device>, bytes: usize) -> Self {
        Self::zeros(device, bytes).unwrap_or_else(|error| {
            device.note(Err(error));
            Self::new(device, Address::NOWHERE, bytes, Origin::Own)
        })
    }

    /// Copies bytes to the device.
    ///
    /// # Errors
    /// The device has too little free memory, or the copy failed.
    pub(crate) fn uploaded(device: &Arc<Device>, values: &[u8]) -> Result<Self, Error> {
        Ok(Self::new(device, device.upload(values)?, values.len(), Origin::Own))
    }

    /// Returns where the bytes lie.
    pub(super) const fn address(&self) -> Address {
        self.address
    }

    /// Copies the bytes to memory of the host.
    ///
    /// # Errors
    /// An earlier operation failed, so the bytes mean nothing; or the copy failed.
    pub(crate) fn read(&self) -> Result<Vec<u8>, Error> {
        let mut values = vec![0; self.bytes];
        self.read_to(&mut values).map(|()| values)
    }

    /// Copies the bytes to memory of the host.
    ///
    /// # Panics
    /// If there is memory for more or fewer bytes.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub(crate) fn read_to(&self, values: &mut [u8]) -> Result<(), Error> {
        assert_eq!(values.len(), self.bytes, "memory for other bytes");
        self.read_from(0, values)
    }

    /// Copies bytes from `begin` on to memory of the host, which says how many.
    ///
    /// # Panics
    /// If they are not inside the buffer.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub(crate) fn read_from(&self, begin: usize, values: &mut [u8]) -> Result<(), Error> {
        let end = begin.checked_add(values.len());
        assert!(end.is_some_and(|end| end <= self.bytes), "bytes beyond the end of storage");
        let from = Address(self.address.0 + begin as u64);
        // SAFETY: they are inside the buffer, whose bytes are zeros at first.
        let copied = unsafe { self.device.download(from, values) };
        self.device.note(copied);
        self.device.check()
    }

    /// Copies the bytes of several buffers to memory of the host. The host waits once for each run
    /// of buffers of one device.
    ///
    /// # Panics
    /// If there is memory for more or fewer bytes of a buffer.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub(crate) fn read_all<'a>(pairs: Vec<(&'a Self, &'a mut [u8])>) -> Result<(), Error> {
        let fits = |(buffer, values): &(&Self, &mut [u8])| values.len() == buffer.bytes;
        assert!(pairs.iter().all(fits), "memory for other bytes");
        let mut pairs = pairs.into_iter().peekable();
        while let Some((first, _)) = pairs.peek() {
            let device = first.device.clone();
            let run = std::iter::from_fn(|| pairs.next_if(|(next, _)| Arc::ptr_eq(&next.device, &device)));
            let run = run.map(|(buffer, values)| (buffer.address, values));
            // SAFETY: the buffers have so many bytes, which are zeros at first.
            let copied = unsafe { device.download_all(run) };
            device.note(copied);
            device.check()?;
        }
        Ok(())
    }

    /// Says that the bytes stay as they are: [`encode_part`](Self::encode_part) waits for what the
    /// device was told so far, and not for what it is told later.
    pub(crate) fn seal(&mut self) {
        match self.device.now() {
            Ok(now) => self.sealed = Some(now),
            Err(error) => self.device.note(Err(error)),
        }
    }

    /// Says that the bytes change again.
    pub(crate) fn change(&mut self) {
        if let Some(sealed) = self.sealed.take() {
            self.device.forget(sealed);
        }
    }

    /// Gives every f32 one value.
    pub(crate) fn fill(&mut self, value: f32) {
        let length = self.len(DType::F32);
        // SAFETY: the buffer has so many values, borrowed alone.
        self.device.note(unsafe { launch::fill(&*self.device, value, self.address, length) });
    }

    /// Copies bytes of the host over those from `begin` on.
    pub(crate) fn place(&mut self, begin: usize, values: &[u8]) {
        let end = begin.checked_add(values.len());
        assert!(end.is_some_and(|end| end <= self.bytes), "bytes beyond the end of storage");
        let to = Address(self.address.0 + begin as u64);
        // SAFETY: they fit, and these are borrowed alone.
        self.queue(|this| unsafe { this.device.upload_over(values, to) });
    }

    /// Copies values over all bytes.
    pub(crate) fn write(&mut self, values: Source<'_>) {
        assert_eq!(values.size(), self.bytes, "bytes for other storage");
        self.queue(|this| {
            let source = this.near(values)?;
            // SAFETY: both have so many bytes, and these are borrowed alone.
            unsafe { this.device.copy(source.address(), this.address, this.bytes) }
        });
    }

    /// Writes the values of a payload that was encoded as `wire`, as f32.
    pub(crate) fn decode(&mut self, payload: &[u8], wire: WireType) {
        let length = self.len(DType::F32);
        assert_eq!(payload.len(), length as usize * wire.size(), "values for another number of values");
        if !wire.rounds() {
            return self.write(Source::Host(payload.into()));
        }
        self.queue(|this| {
            let source = this.near(Source::Host(payload.into()))?;
            // SAFETY: both have so many values, and these are borrowed alone.
            unsafe { launch::cast(&*this.device, Cast::Decode, wire, source.address(), this.address, length) }
        });
    }

    /// Rounds f32 values in place.
    pub(crate) fn round(&mut self, wire: WireType) {
        let length = self.len(DType::F32);
        if wire.rounds() {
            // SAFETY: the buffer has so many values, borrowed alone.
            let queued =
                unsafe { launch::cast(&*self.device, Cast::Round, wire, self.address, self.address, length) };
            self.device.note(queued);
        }
    }

    /// Returns f32 values in the type `wire`, in memory of the host.
    ///
    /// # Errors
    /// An operation failed.
    pub(crate) fn encode(&self, wire: WireType) -> Result<Vec<u8>, Error> {
        let length = self.len(DType::F32);
        if !wire.rounds() {
            return self.read();
        }
        let encoded = Self::zeros(&self.device, length as usize * wire.size())?;
        // SAFETY: both have so many values, and nobody else knows of the new ones.
        unsafe { launch::cast(&*self.device, Cast::Encode, wire, self.address, encoded.address, length) }?;
        encoded.read()
    }

    /// Returns some f32 values in the type `wire`, in memory of the host. `part` has their bytes.
    ///
    /// # Panics
    /// If they are not inside the buffer, or begin or end within a value.
    ///
    /// # Errors
    /// An operation failed.
    pub(crate) fn encode_part(&self, wire: WireType, part: &Range<usize>) -> Result<Vec<u8>, Error> {
        let from = self.at(part, DType::F32);
        if let Some(sealed) = &self.sealed {
            let mut values = vec![0; part.len() / DType::F32.size() * wire.size()];
            // SAFETY: the values are inside the buffer, and nobody changes them before it returns.
            let copied = unsafe { self.device.download_sealed(sealed, from, wire, &mut values) };
            if let Err(error @ Error::OutOfMemory { .. }) = copied {
                return Err(error);
            }
            self.device.note(copied);
            return self.device.check().map(|()| values);
        }
        if !wire.rounds() {
            let mut values = vec![0; part.len()];
            return self.read_from(part.start, &mut values).map(|()| values);
        }
        let length = part.len() / DType::F32.size();
        let encoded = Self::zeros(&self.device, length * wire.size())?;
        // SAFETY: both have so many values, and nobody else knows of the new ones.
        unsafe { launch::cast(&*self.device, Cast::Encode, wire, from, encoded.address, length as u64) }?;
        encoded.read()
    }

    /// Copies a part of values on a device over the bytes from `begin` on.
    ///
    /// # Panics
    /// If they do not fit.
    pub(crate) fn place_part(&mut self, begin: usize, from: &Self, part: &Range<usize>) {
        let to = self.at(&(begin..begin + part.len()), DType::F32);
        let source = from.at(part, DType::F32);
        self.queue(|this| {
            // The streams of two devices do not wait for each other.
            let is_other = !Arc::ptr_eq(&this.device, &from.device);
            if is_other {
                from.device.settle()?;
            }
            // SAFETY: both have so many bytes, and these are borrowed alone.
            unsafe { this.device.copy(source, to, part.len()) }?;
            if is_other { this.device.settle() } else { Ok(()) }
        });
    }

    /// Writes the values of a payload that was encoded as `wire`, as f32, over the bytes from
    /// `begin` on.
    ///
    /// # Panics
    /// If they do not fit, or `wire` does not round.
    pub(crate) fn decode_part(&mut self, begin: usize, payload: &[u8], wire: WireType) {
        let length = payload.len() / wire.size();
        let to = self.at(&(begin..begin + length * DType::F32.size()), DType::F32);
        self.queue(|this| {
            let source = this.near(Source::Host(payload.into()))?;
            let (from, length) = (source.address(), length as u64);
            // SAFETY: both have so many values, and these are borrowed alone.
            unsafe { launch::cast(&*this.device, Cast::Decode, wire, from, to, length) }
        });
    }

    /// Rounds some f32 values in place. `part` has their bytes.
    ///
    /// # Panics
    /// If they are not inside the buffer, or begin or end within a value.
    pub(crate) fn round_part(&mut self, wire: WireType, part: &Range<usize>) {
        let (at, length) = (self.at(part, DType::F32), (part.len() / DType::F32.size()) as u64);
        if wire.rounds() {
            // SAFETY: the buffer has so many values there, borrowed alone.
            let queued = unsafe { launch::cast(&*self.device, Cast::Round, wire, at, at, length) };
            self.device.note(queued);
        }
    }

    /// Returns a part of these bytes as a buffer, which keeps `whole` as long as it lives.
    ///
    /// # Panics
    /// If the bytes are not inside, or begin or end within a value.
    pub(crate) fn part(&self, dtype: DType, part: &Range<usize>, whole: Arc<dyn Whole>) -> Self {
        Self::new(&self.device, self.at(part, dtype), part.len(), Origin::Part(whole))
    }

    /// Returns where a part lies.
    ///
    /// # Panics
    /// If it is not inside the buffer, or begins or ends within a value.
    fn at(&self, part: &Range<usize>, dtype: DType) -> Address {
        assert!(part.start <= part.end && part.end <= self.bytes, "{part:?} of {} bytes", self.bytes);
        let is_whole = part.start.is_multiple_of(dtype.size()) && part.len().is_multiple_of(dtype.size());
        assert!(is_whole, "{part:?} begins or ends within a value");
        Address(self.address.0 + part.start as u64)
    }

    /// Adds the f32 values of another node to these, and rounds the sums to `wire`.
    pub(crate) fn add(&mut self, other: Source<'_>, wire: WireType) {
        self.merge(other, |this, operands| {
            // SAFETY: both have as many values as these, which are borrowed alone.
            unsafe { launch::sum(&*this.device, wire, operands, this.address, this.len(DType::F32)) }
        });
    }

    /// Writes the sums of two nodes' f32 values over these, rounded to `wire`.
    pub(crate) fn sum_of(&mut self, left: Source<'_>, right: Source<'_>, wire: WireType) {
        self.merge_of(left, right, |this, operands| {
            // SAFETY: both have as many values as these, which are borrowed alone.
            unsafe { launch::sum(&*this.device, wire, operands, this.address, this.len(DType::F32)) }
        });
    }

    /// Keeps the larger ones of another node's i64 values and of these.
    pub(crate) fn max(&mut self, other: Source<'_>) {
        self.merge(other, |this, operands| {
            // SAFETY: both have as many values as these, which are borrowed alone.
            unsafe { launch::largest(&*this.device, operands, this.address, this.len(DType::I64)) }
        });
    }

    /// Writes the larger ones of two nodes' i64 values over these.
    pub(crate) fn max_of(&mut self, left: Source<'_>, right: Source<'_>) {
        self.merge_of(left, right, |this, operands| {
            // SAFETY: both have as many values as these, which are borrowed alone.
            unsafe { launch::largest(&*this.device, operands, this.address, this.len(DType::I64)) }
        });
    }

    fn merge(&self, other: Source<'_>, merge: impl FnOnce(&Self, [Address; 2]) -> Result<(), Error>) {
        assert_eq!(other.size(), self.bytes, "sum of different lengths");
        self.queue(|this| {
            let other = this.near(other)?;
            merge(this, [this.address, other.address()])
        });
    }

    fn merge_of(
        &self,
        left: Source<'_>,
        right: Source<'_>,
        merge: impl FnOnce(&Self, [Address; 2]) -> Result<(), Error>,
    ) {
        assert_eq!([left.size(), right.size()], [self.bytes; 2], "sum of different lengths");
        self.queue(|this| {
            let (left, right) = (this.near(left)?, this.near(right)?);
            merge(this, [left.address(), right.address()])
        });
    }

    /// Writes the mean of the `count` values that were summed.
    pub(crate) fn mean_of(&mut self, sum: Source<'_>, count: u64) {
        assert_eq!(sum.size(), self.bytes, "the mean has other values than the sum");
        assert!((1..=1 << 24).contains(&count), "mean of {count} values, expected 1 to 2^24");
        let length = self.len(DType::F32);
        self.queue(|this| {
            let sum = this.near(sum)?;
            // SAFETY: both have so many values, and these are borrowed alone.
            unsafe { launch::mean(&*this.device, sum.address(), count as f32, this.address, length) }
        });
    }

    /// Returns the number of values.
    pub(crate) const fn len(&self, dtype: DType) -> u64 {
        (self.bytes / dtype.size()) as u64
    }

    /// Returns the device.
    pub(crate) const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Queues operations. If they cannot be queued, the device has failed.
    pub(super) fn queue(&self, action: impl FnOnce(&Self) -> Result<(), Error>) {
        self.device.note(action(self));
    }

    /// Returns values where kernels of this buffer's device read them.
    pub(super) fn near<'a>(&self, values: Source<'a>) -> Result<Near<'a>, Error> {
        match values {
            Source::Device(buffer) if Arc::ptr_eq(&buffer.device, &self.device) => Ok(Near::Here(buffer)),
            Source::Device(buffer) => Self::uploaded(&self.device, &buffer.read()?).map(Near::Copied),
            Source::Host(bytes) => Self::uploaded(&self.device, &bytes).map(Near::Copied),
        }
    }
}

impl Source<'_> {
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(buffer) => buffer.bytes,
        }
    }
}

impl Near<'_> {
    pub(super) const fn address(&self) -> Address {
        match self {
            Self::Here(buffer) => buffer.address,
            Self::Copied(buffer) => buffer.address,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.change();
        match self.origin {
            Origin::Own => self.device.free(self.address),
            Origin::Exported => self.device.free_apart(self.address),
            Origin::Opened => self.device.close(self.address),
            Origin::Part(_) => {}
        }
    }
}

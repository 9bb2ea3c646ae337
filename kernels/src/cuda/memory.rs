//! Memory on a device, and what operations on storage do there.
//!
//! Always true here: an operation returns as soon as it is queued. If it cannot be queued, the
//! device keeps the failure for [`Device::settle`].
#![expect(unsafe_code, reason = "kernels work on addresses that no type guards")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, slice};

use proto::tensor::{DType, ExternalMemory};
use proto::wire::WireType;

use super::device::Device;
use super::launch::{self, Address, Cast, Pass, SLOTS_MAX, SUMS_MAX};
use crate::cpu;
use crate::error::Error;
use crate::merge::Merge;
use crate::norm::Squares;
use crate::optimizer::Update;
use crate::storage::{Operand, Slot, Storage};

/// Bytes on a device.
#[derive(Debug)]
pub(crate) struct Buffer {
    device: Arc<Device>,
    address: Address,
    bytes: usize,
}

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

/// Values that a kernel reads.
enum Source<'a> {
    /// Storage on the device.
    Stored(&'a Buffer),
    /// A copy of what lay elsewhere. It is freed when the kernel has run.
    Copied(Buffer),
}

impl Buffer {
    /// Allocates zeros.
    ///
    /// # Errors
    /// The device has too little free memory.
    pub(crate) fn zeros(device: &Arc<Device>, bytes: usize) -> Result<Self, Error> {
        let buffer = Self { device: device.clone(), address: device.allocate(bytes)?, bytes };
        // SAFETY: nobody else knows of the memory.
        unsafe { device.clear(buffer.address, bytes) }?;
        Ok(buffer)
    }

    /// Allocates zeros. If the device has no memory for them, it has failed.
    pub(crate) fn zeros_or_failed(device: &Arc<Device>, bytes: usize) -> Self {
        Self::zeros(device, bytes).unwrap_or_else(|error| {
            device.note(Err(error));
            Self { device: device.clone(), address: Address::NOWHERE, bytes }
        })
    }

    /// Copies bytes to the device.
    ///
    /// # Errors
    /// The device has too little free memory, or the copy failed.
    pub(super) fn uploaded(device: &Arc<Device>, values: &[u8]) -> Result<Self, Error> {
        Ok(Self { device: device.clone(), address: device.upload(values)?, bytes: values.len() })
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
        // SAFETY: the buffer has so many bytes, zeros at first.
        let copied = unsafe { self.device.download(self.address, values) };
        self.device.note(copied);
        self.device.check()
    }

    /// Gives every f32 one value.
    pub(crate) fn fill(&mut self, value: f32) {
        let length = self.len(DType::F32);
        // SAFETY: the buffer has so many values, borrowed alone.
        self.device.note(unsafe { launch::fill(&*self.device, value, self.address, length) });
    }

    /// Copies values over all bytes.
    pub(crate) fn write(&mut self, values: Operand<'_>) {
        assert_eq!(values.size(), self.bytes, "bytes for other storage");
        self.queue(|this| {
            let source = this.source(values)?;
            // SAFETY: both have so many bytes, and these are borrowed alone.
            unsafe { this.device.copy(source.address(), this.address, this.bytes) }
        });
    }

    /// Writes the values of a payload that was encoded as `wire`, as f32.
    pub(crate) fn decode(&mut self, payload: &[u8], wire: WireType) {
        let length = self.len(DType::F32);
        assert_eq!(payload.len(), length as usize * wire.size(), "values for another number of values");
        if !wire.rounds() {
            return self.write(Operand::Payload(payload));
        }
        self.queue(|this| {
            let source = this.source(Operand::Payload(payload))?;
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

    /// Merges the values of another node into these.
    pub(crate) fn merge(&mut self, other: Operand<'_>, merge: Merge) {
        assert_eq!(other.size(), self.bytes, "sum of different lengths");
        self.queue(|this| {
            let other = this.source(other)?;
            this.merged([this.address, other.address()], merge)
        });
    }

    /// Merges two nodes into these values, whatever they were.
    pub(crate) fn merge_of(&mut self, left: Operand<'_>, right: Operand<'_>, merge: Merge) {
        assert_eq!([left.size(), right.size()], [self.bytes; 2], "sum of different lengths");
        self.queue(|this| {
            let (left, right) = (this.source(left)?, this.source(right)?);
            this.merged([left.address(), right.address()], merge)
        });
    }

    fn merged(&self, operands: [Address; 2], merge: Merge) -> Result<(), Error> {
        let length = self.len(merge.dtype());
        // SAFETY: all three have so many values, and these are borrowed alone.
        unsafe {
            match merge {
                Merge::Sum(wire) => launch::sum(&*self.device, wire, operands, self.address, length),
                Merge::Max => launch::largest(&*self.device, operands, self.address, length),
            }
        }
    }

    /// Writes the mean of the `count` values that were summed.
    pub(crate) fn mean_of(&mut self, sum: Operand<'_>, count: u64) {
        assert_eq!(sum.size(), self.bytes, "the mean has other values than the sum");
        assert!((1..=1 << 24).contains(&count), "mean of {count} values, expected 1 to 2^24");
        let length = self.len(DType::F32);
        self.queue(|this| {
            let sum = this.source(sum)?;
            // SAFETY: both have so many values, and these are borrowed alone.
            unsafe { launch::mean(&*this.device, sum.address(), count as f32, this.address, length) }
        });
    }

    /// Returns the number of values.
    const fn len(&self, dtype: DType) -> u64 {
        (self.bytes / dtype.size()) as u64
    }

    fn queue(&self, action: impl FnOnce(&Self) -> Result<(), Error>) {
        self.device.note(action(self));
    }

    /// Returns values where this device's kernels read them.
    fn source<'a>(&self, values: Operand<'a>) -> Result<Source<'a>, Error> {
        if let Operand::Stored(storage) = values
            && let Some(buffer) = storage.on_any_device()
        {
            if Arc::ptr_eq(&buffer.device, &self.device) {
                return Ok(Source::Stored(buffer));
            }
            return Self::uploaded(&self.device, &buffer.read()?).map(Source::Copied);
        }
        Self::uploaded(&self.device, &values.host()).map(Source::Copied)
    }
}

impl Source<'_> {
    const fn address(&self) -> Address {
        match self {
            Self::Stored(buffer) => buffer.address,
            Self::Copied(buffer) => buffer.address,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.free(self.address);
    }
}

/// Applies a step to one chunk on a device. The gradient is one operand, or the sum of two.
///
/// # Panics
/// The panics of [`Update::apply`], and if a slot or the weights lie on no device or another one.
pub(crate) fn apply<'a>(
    update: &Update,
    weights: &Storage,
    (left, right): (Operand<'_>, Option<Operand<'_>>),
    slots: impl IntoIterator<Item = Slot<'a>>,
    next: &mut Storage,
) {
    assert!(!update.needs_norms(), "an update without the norms that it needs: {update:?}");
    let (size, length) = (next.size(), next.len() as u64);
    let check = |what: &str, found: usize| {
        assert_eq!(found, size, "{what} has {found} bytes, the next weights have {size}");
    };
    check("the weights", weights.size());
    check("the gradient", left.size());
    right.into_iter().for_each(|right| check("the gradient", right.size()));
    let next = next.on_any_device().unwrap_or_else(|| panic!("the next weights lie on no device"));
    let here = |storage: &Storage, what: &str| {
        check(what, storage.size());
        let buffer = storage.on_any_device().filter(|buffer| Arc::ptr_eq(&buffer.device, &next.device));
        buffer.unwrap_or_else(|| panic!("{what} lies elsewhere than the next weights")).address
    };
    let (mut from, mut to, mut count) = ([Address::NOWHERE; SLOTS_MAX], [Address::NOWHERE; SLOTS_MAX], 0);
    for slot in slots {
        assert!(count < SLOTS_MAX, "more than {SLOTS_MAX} slots given");
        (from[count], to[count]) = match slot {
            Slot::InPlace(slot) => (here(slot, "a slot"), here(slot, "a slot")),
            Slot::Moved { from, to } => (here(from, "a slot"), here(to, "a slot")),
        };
        count += 1;
    }
    let (_, slots, _) = update.rule.kernel();
    assert_eq!(count, slots, "{count} slots given, the update rule has {slots}");
    let weights = here(weights, "the chunk of weights");
    next.queue(|next| {
        let (left, right) = (next.source(left)?, right.map(|right| next.source(right)).transpose()?);
        let right_address = right.as_ref().map_or(Address::NOWHERE, Source::address);
        let (left, next_weights) = (left.address(), next.address);
        // SAFETY: all have one length, checked above, and what is written is borrowed alone.
        unsafe {
            let pass = Pass { length, weights, left, right: right_address, from, to, next: next_weights };
            launch::apply(&*next.device, update, &pass)
        }
    });
}

/// Returns what one chunk on a device contributes to the norms, or NaN if the device failed.
///
/// # Panics
/// The panics of [`Update::measure`], and if a slot lies on no device or another one.
pub(crate) fn measure<'a>(
    update: &Update,
    weights: &Storage,
    gradient: Operand<'_>,
    slots: impl IntoIterator<Item = &'a Storage>,
) -> Squares {
    let (size, length) = (weights.size(), weights.len() as u64);
    assert_eq!(gradient.size(), size, "bytes of the gradient");
    let weights = weights.on_any_device().unwrap_or_else(|| panic!("the weights lie on no device"));
    let (mut from, mut count) = ([Address::NOWHERE; SLOTS_MAX], 0);
    for slot in slots {
        assert!(count < SLOTS_MAX && slot.size() == size, "a slot of another length than the weights");
        let buffer = slot.on_any_device().filter(|buffer| Arc::ptr_eq(&buffer.device, &weights.device));
        from[count] = buffer.unwrap_or_else(|| panic!("a slot lies elsewhere than the weights")).address;
        count += 1;
    }
    let (_, slots, _) = update.rule.kernel();
    assert_eq!(count, slots, "{count} slots given, the update rule has {slots}");
    let measured = weights.source(gradient).and_then(|gradient| {
        let sums = Buffer::zeros(&weights.device, SUMS_MAX * size_of::<f64>())?;
        let (to, right, next) = ([Address::NOWHERE; SLOTS_MAX], Address::NOWHERE, Address::NOWHERE);
        let (left, weights_address) = (gradient.address(), weights.address);
        let pass = Pass { length, weights: weights_address, left, right, from, to, next };
        // SAFETY: all have one length, checked above, and nobody else knows of the sums.
        unsafe { launch::measure(&*weights.device, update, &pass, sums.address) }?;
        sums.read()
    });
    match measured {
        Ok(sums) => {
            let mut values = [0.0; SUMS_MAX];
            for (value, raw) in values.iter_mut().zip(sums.as_chunks().0) {
                *value = f64::from_le_bytes(*raw);
            }
            cpu::squares_of(update, &values)
        }
        Err(error) => {
            weights.device.note(Err(error));
            Squares([f64::NAN; 2])
        }
    }
}

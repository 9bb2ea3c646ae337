//! Values that kernels read and write, whatever memory they lie in.
//!
//! Always true here:
//!
//! - A caller names storage, payloads and operations, and no memory. A device is a variant of
//!   `Memory` and an arm in each operation. Only the call that allocates names it.
//! - An operation chooses its implementation once, outside its loops.
//! - What an operation changes lies in one memory. It reads other values where they lie, or copies
//!   them there first.
//! - Storage is aligned for its values. A payload is read as it came, at any alignment.

use std::borrow::Cow;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytes::Bytes;
use proto::tensor::{DType, ExternalMemory, Values};
use proto::wire::WireType;

use crate::cpu::cast;
#[cfg(feature = "cuda")]
use crate::cuda::memory::{Buffer, Source};
#[cfg(feature = "cuda")]
use crate::cuda::{Device, Handle};
use crate::error::Error;
use crate::slot;

/// Values of one element type, in memory that kernels reach.
pub struct Storage {
    dtype: DType,
    len: usize,
    memory: Memory,
}

/// Where values lie.
enum Memory {
    /// Memory of this process.
    Heap(Values),
    /// Memory of the host that the caller brought.
    External(Box<dyn ExternalMemory>),
    /// Memory of a device.
    #[cfg(feature = "cuda")]
    Device(Buffer),
}

/// Values that an operation reads.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// Values as they were received: little-endian, in memory of the host, at any alignment.
    Payload(&'a [u8]),
    /// Values in storage.
    Stored(&'a Storage),
}

/// One slot of the elements that an update changes, in storage or in a slice of host memory.
pub type Slot<'a, S = Storage> = slot::Slot<'a, S>;

impl Storage {
    /// Creates `len` zeros.
    pub fn zeros(dtype: DType, len: usize) -> Self {
        Self { dtype, len, memory: Memory::Heap(Values::zeros(dtype, len)) }
    }

    /// Values in memory of the host that the caller brings. The memory has to be aligned for them.
    pub fn external(dtype: DType, memory: Box<dyn ExternalMemory>) -> Self {
        Self { dtype, len: memory.bytes().len() / dtype.size(), memory: Memory::External(memory) }
    }

    /// Creates `len` zeros on a device.
    ///
    /// # Errors
    /// The device has too little free memory.
    #[cfg(feature = "cuda")]
    pub fn on_device(device: &Arc<Device>, dtype: DType, len: usize) -> Result<Self, Error> {
        let buffer = Buffer::zeros(device, len * dtype.size())?;
        Ok(Self::in_buffer(dtype, len, buffer))
    }

    /// Creates `len` zeros on a device, in memory that another process of this host can
    /// [open](crate::cuda::Opened) by the handle. It takes whole pieces of 2 MiB.
    ///
    /// The other process finds what [`Device::settle`] has waited for. The storage has to live
    /// until the other process has closed the memory, and may not change while it is read there.
    ///
    /// # Errors
    /// The device has too little free memory, or its driver passes no memory to other processes.
    /// The device goes on.
    #[cfg(feature = "cuda")]
    pub fn exported(device: &Arc<Device>, dtype: DType, len: usize) -> Result<(Self, Handle), Error> {
        let (buffer, handle) = Buffer::exported(device, len * dtype.size())?;
        Ok((Self::in_buffer(dtype, len, buffer), handle))
    }

    /// Copies floats to new memory of a device. Operations that are called later find them there,
    /// and the copy does not wait for operations before it.
    ///
    /// # Errors
    /// The device has too little free memory, or the copy failed.
    #[cfg(feature = "cuda")]
    pub fn uploaded(device: &Arc<Device>, floats: &[f32]) -> Result<Self, Error> {
        Self::uploaded_bytes(device, DType::F32, bytemuck::cast_slice(floats))
    }

    /// Copies values like [`uploaded`](Self::uploaded): little-endian bytes, at any alignment.
    ///
    /// # Errors
    /// The errors of [`uploaded`](Self::uploaded).
    #[cfg(feature = "cuda")]
    pub(crate) fn uploaded_bytes(device: &Arc<Device>, dtype: DType, bytes: &[u8]) -> Result<Self, Error> {
        let buffer = Buffer::uploaded(device, bytes)?;
        Ok(Self::in_buffer(dtype, buffer.len(dtype) as usize, buffer))
    }

    /// Storage of the floats that a device has made.
    #[cfg(feature = "cuda")]
    pub(crate) const fn made(buffer: Buffer) -> Self {
        Self::in_buffer(DType::F32, buffer.len(DType::F32) as usize, buffer)
    }

    /// Storage in memory of a device, which has room for `len` elements.
    #[cfg(feature = "cuda")]
    pub(crate) const fn in_buffer(dtype: DType, len: usize, buffer: Buffer) -> Self {
        Self { dtype, len, memory: Memory::Device(buffer) }
    }

    /// Creates storage on a device. If the device has no memory for it, the device has failed: it
    /// computes nothing any more, and [`Device::settle`] says why.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device_or_failed(device: &Arc<Device>, dtype: DType, len: usize) -> Self {
        Self::in_buffer(dtype, len, Buffer::zeros_or_failed(device, len * dtype.size()))
    }

    /// Returns the element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes of all elements.
    pub const fn size(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Writes to all pages, so that the system makes them now. What the elements are afterwards is
    /// not defined.
    pub fn populate(&mut self) {
        #[cfg(feature = "cuda")]
        if self.on_any_device().is_some() {
            return; // A device's memory is made when it is allocated.
        }
        self.host_mut().fill(1);
    }

    /// Gives every element one value.
    ///
    /// # Panics
    /// If the elements are integers.
    pub fn fill(&mut self, value: f32) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.fill(value);
        }
        self.floats_mut().fill(value);
    }

    /// Copies values of the same type.
    ///
    /// # Panics
    /// If there are more or fewer values than elements.
    pub fn write(&mut self, values: Operand<'_>) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.device_mut() {
            return buffer.write(values.source());
        }
        match values {
            Operand::Payload(bytes) => self.host_mut().copy_from_slice(bytes),
            Operand::Stored(_) => self.host_mut().copy_from_slice(&values.host()),
        }
    }

    /// Copies bytes of the host over those from `begin` on.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn place(&mut self, begin: usize, values: &[u8]) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.device_mut() {
            return buffer.place(begin, values);
        }
        self.host_mut()[begin..begin + values.len()].copy_from_slice(values);
    }

    /// Copies the values of storage of the same type to memory of the host. They are there when
    /// this returns.
    ///
    /// # Panics
    /// If there are more or fewer values than elements, or these lie on a device.
    ///
    /// # Errors
    /// The values lie on a device that failed.
    pub fn receive(&mut self, from: &Self) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        if let Memory::Device(buffer) = &from.memory {
            return buffer.read_to(self.host_mut());
        }
        self.write(Operand::Stored(from));
        Ok(())
    }

    /// Copies the values of storage to memory of the host, as [`receive`](Self::receive) does, for
    /// each pair of a target and its source. For sources on one device the host waits once.
    ///
    /// # Panics
    /// The panics of [`receive`](Self::receive).
    ///
    /// # Errors
    /// The errors of [`receive`](Self::receive).
    pub fn receive_all<'a>(pairs: Vec<(&'a mut Self, &'a Self)>) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        let mut on_device = Vec::new();
        for (to, from) in pairs {
            #[cfg(feature = "cuda")]
            if let Memory::Device(buffer) = &from.memory {
                on_device.push((buffer, to.host_mut()));
                continue;
            }
            to.receive(from)?;
        }
        #[cfg(feature = "cuda")]
        Buffer::read_all(on_device)?;
        Ok(())
    }

    /// Copies bytes of other storage, from the byte `begin` on, over the first bytes of this one on
    /// the host. They are there when this returns.
    ///
    /// # Panics
    /// If either has fewer bytes, or these lie on a device.
    ///
    /// # Errors
    /// The values lie on a device that failed.
    pub fn receive_part(&mut self, from: &Self, begin: usize, bytes: usize) -> Result<(), Error> {
        let to = &mut self.host_mut()[..bytes];
        #[cfg(feature = "cuda")]
        if let Memory::Device(buffer) = &from.memory {
            return buffer.read_from(begin, to);
        }
        to.copy_from_slice(&from.host()[begin..][..bytes]);
        Ok(())
    }

    /// Returns the floats in memory of the host. They are borrowed if they lie there, and copied if
    /// they do not.
    ///
    /// # Panics
    /// If the elements are integers.
    ///
    /// # Errors
    /// They lie on a device that failed.
    pub fn read(&self) -> Result<Cow<'_, [f32]>, Error> {
        assert_eq!(self.dtype, DType::F32, "integers taken as floats");
        #[cfg(feature = "cuda")]
        if let Memory::Device(buffer) = &self.memory {
            let mut floats = vec![0.0; self.len];
            buffer.read_to(bytemuck::cast_slice_mut(&mut floats))?;
            return Ok(floats.into());
        }
        Ok(Cow::Borrowed(self.floats()))
    }

    /// Changes the floats by a function of the host. Those on a device cross to the host and back.
    ///
    /// # Panics
    /// If the elements are integers.
    ///
    /// # Errors
    /// They lie on a device that failed.
    pub fn change(&mut self, change: impl FnOnce(&mut [f32])) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        if self.elements_on_device(DType::F32).is_some() {
            let mut floats = self.read()?.into_owned();
            change(&mut floats);
            self.place(0, bytemuck::cast_slice(&floats));
            return Ok(());
        }
        change(self.floats_mut());
        Ok(())
    }

    /// Marks the values as final: [`read_part`](Self::read_part) waits only for what a device was
    /// told so far, and not for what it is told later. The next change removes the mark.
    pub fn seal(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.device_mut() {
            buffer.seal();
        }
    }

    /// Removes the mark of [`seal`](Self::seal), before what is called by its address changes the
    /// values.
    #[cfg(feature = "cuda")]
    pub(crate) fn unseal(&mut self) {
        let _ = self.device_mut();
    }

    /// Copies some values to memory of the host, little-endian: floats in the type `wire`. `bytes`
    /// says which ones, as they lie here. They are there when this returns.
    ///
    /// # Panics
    /// If there are fewer, or integers would be rounded.
    ///
    /// # Errors
    /// The values lie on a device that failed.
    pub fn read_part(&self, wire: WireType, bytes: Range<usize>) -> Result<Vec<u8>, Error> {
        assert!(self.dtype == DType::F32 || !wire.rounds(), "integers taken as floats");
        #[cfg(feature = "cuda")]
        if let Memory::Device(buffer) = &self.memory {
            return buffer.encode_part(wire, &bytes);
        }
        Ok(cast::encode(wire, &self.host()[bytes]))
    }

    /// Copies a part of other storage over the bytes from `begin` on.
    ///
    /// # Panics
    /// If the bytes do not fit, or lie on the host while these lie on a device, or the other way
    /// round.
    pub fn place_part(&mut self, begin: usize, from: &Self, part: Range<usize>) {
        #[cfg(feature = "cuda")]
        if let (Some(to), Some(from)) = (self.device_mut(), from.on_any_device()) {
            return to.place_part(begin, from, &part);
        }
        self.host_mut()[begin..begin + part.len()].copy_from_slice(&from.host()[part]);
    }

    /// Writes the floats of a payload of the host that was encoded as `wire` over the bytes from
    /// `begin` on, and rounds them to `round`.
    ///
    /// # Panics
    /// If they do not fit, or these are integers.
    pub fn place_as(&mut self, begin: usize, (wire, payload): (WireType, &[u8]), round: WireType) {
        let part = begin..begin + payload.len() / wire.size() * DType::F32.size();
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            match wire.rounds() {
                true => buffer.decode_part(begin, payload, wire),
                false => buffer.place(begin, payload),
            }
            return buffer.round_part(round, &part);
        }
        let floats = &mut self.floats_mut()[part.start / DType::F32.size()..part.end / DType::F32.size()];
        cast::decode(wire, payload, floats);
        cast::round(round, floats);
    }

    /// Rounds some floats to the type `wire`, in place. `bytes` says which ones.
    ///
    /// # Panics
    /// If these are integers, or fewer.
    pub fn round_part(&mut self, wire: WireType, bytes: Range<usize>) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.round_part(wire, &bytes);
        }
        let size = DType::F32.size();
        cast::round(wire, &mut self.floats_mut()[bytes.start / size..bytes.end / size]);
    }

    /// Returns a copy in the same kind of memory. If a device has no memory for it, it has failed.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        #[cfg(feature = "cuda")]
        if let Memory::Device(buffer) = &self.memory {
            let mut copy = Self::on_device_or_failed(buffer.device(), self.dtype, self.len);
            copy.write(Operand::Stored(self));
            return copy;
        }
        let mut copy = Self::zeros(self.dtype, self.len);
        copy.host_mut().copy_from_slice(self.host());
        copy
    }

    /// Returns some values of storage on a device as storage of its own, which keeps `whole` as
    /// long as it lives. `bytes` says which ones. `None`: they lie on the host.
    ///
    /// # Panics
    /// If the bytes are not inside, or begin or end within a value.
    pub fn part_of<O: Send + Sync + fmt::Debug + 'static>(
        &self,
        bytes: Range<usize>,
        whole: Arc<O>,
    ) -> Option<Self> {
        #[cfg(feature = "cuda")]
        if let Memory::Device(buffer) = &self.memory {
            let len = bytes.len() / self.dtype.size();
            return Some(Self::in_buffer(self.dtype, len, buffer.part(self.dtype, &bytes, whole)));
        }
        let _ = (bytes, whole);
        None
    }

    /// Returns the values of storage on the host.
    ///
    /// # Errors
    /// It lies on a device, and is returned.
    pub(crate) fn into_host(self) -> Result<Values, Self> {
        match self.memory {
            Memory::Heap(values) => Ok(values),
            Memory::External(memory) => Ok(Values::External(memory)),
            #[cfg(feature = "cuda")]
            Memory::Device(_) => Err(self),
        }
    }

    /// Returns whether the elements lie on the host.
    pub const fn is_on_host(&self) -> bool {
        match &self.memory {
            Memory::Heap(_) | Memory::External(_) => true,
            #[cfg(feature = "cuda")]
            Memory::Device(_) => false,
        }
    }

    /// Returns the elements as little-endian bytes in memory of the host. They are borrowed if they
    /// lie there, and copied if they do not.
    ///
    /// # Panics
    /// If they lie on a device that failed. `Device::settle` says so without a panic.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        #[cfg(feature = "cuda")]
        if let Memory::Device(buffer) = &self.memory {
            return Cow::Owned(buffer.read().unwrap_or_else(|error| panic!("{error}")));
        }
        Cow::Borrowed(self.host())
    }

    /// Returns the elements of shared storage as bytes to send or to save. In memory of the host
    /// they are not copied: the bytes hold `owner` as long as they live.
    ///
    /// # Panics
    /// The panics of [`bytes`](Self::bytes).
    pub fn share<O>(owner: Arc<O>) -> Bytes
    where
        O: Deref<Target = Self> + Send + Sync + 'static,
    {
        struct Shared<O>(Arc<O>);
        impl<O: Deref<Target = Storage>> AsRef<[u8]> for Shared<O> {
            fn as_ref(&self) -> &[u8] {
                self.0.host()
            }
        }
        #[cfg(feature = "cuda")]
        if owner.on_any_device().is_some() {
            return owner.bytes().into_owned().into();
        }
        Bytes::from_owner(Shared(owner))
    }

    /// Returns the memory of a device in which the elements lie. `None`: they lie on the host.
    #[cfg(feature = "cuda")]
    pub(crate) const fn on_any_device(&self) -> Option<&Buffer> {
        match &self.memory {
            Memory::Device(buffer) => Some(buffer),
            Memory::Heap(_) | Memory::External(_) => None,
        }
    }

    /// Returns the memory of a device in which elements of this type lie, for writing.
    ///
    /// # Panics
    /// If the elements have another type.
    #[cfg(feature = "cuda")]
    pub(crate) fn elements_on_device(&mut self, dtype: DType) -> Option<&mut Buffer> {
        let found = self.dtype;
        self.device_mut().inspect(|_| assert_eq!(found, dtype, "elements of another type"))
    }

    /// Returns the memory of a device in which the elements lie, for writing. `None`: they lie on
    /// the host.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_mut(&mut self) -> Option<&mut Buffer> {
        let Memory::Device(buffer) = &mut self.memory else { return None };
        buffer.change();
        Some(buffer)
    }

    /// Returns the elements as bytes in memory of the host.
    ///
    /// # Panics
    /// If they lie on a device.
    pub(crate) fn host(&self) -> &[u8] {
        match &self.memory {
            Memory::Heap(values) => values.bytes(),
            Memory::External(memory) => memory.bytes(),
            #[cfg(feature = "cuda")]
            Memory::Device(_) => panic!("values on a device taken as values on the host"),
        }
    }

    /// Returns the elements as bytes in memory of the host, for writing.
    ///
    /// # Panics
    /// If they lie on a device.
    pub(crate) fn host_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Heap(values) => values.bytes_mut(),
            Memory::External(memory) => memory.bytes_mut(),
            #[cfg(feature = "cuda")]
            Memory::Device(_) => panic!("values on a device taken as values on the host"),
        }
    }

    /// Returns the floats in memory of the host.
    ///
    /// # Panics
    /// If the elements are integers.
    pub(crate) fn floats(&self) -> &[f32] {
        assert_eq!(self.dtype, DType::F32, "integers taken as floats");
        bytemuck::cast_slice(self.host())
    }

    /// Returns the floats in memory of the host, for writing.
    ///
    /// # Panics
    /// If the elements are integers.
    pub(crate) fn floats_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.dtype, DType::F32, "integers taken as floats");
        bytemuck::cast_slice_mut(self.host_mut())
    }

    /// Returns the integers in memory of the host, for writing.
    ///
    /// # Panics
    /// If the elements are floats.
    pub(crate) fn integers_mut(&mut self) -> &mut [i64] {
        assert_eq!(self.dtype, DType::I64, "floats taken as integers");
        bytemuck::cast_slice_mut(self.host_mut())
    }
}

impl From<Vec<f32>> for Storage {
    /// Takes floats of the host without a copy.
    fn from(floats: Vec<f32>) -> Self {
        Self { dtype: DType::F32, len: floats.len(), memory: Memory::Heap(Values::F32(floats)) }
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Storage({:?} x {})", self.dtype, self.len)
    }
}

impl<'a> Operand<'a> {
    /// Returns the number of bytes of all values.
    pub const fn size(self) -> usize {
        match self {
            Self::Payload(bytes) => bytes.len(),
            Self::Stored(storage) => storage.size(),
        }
    }

    /// Returns the values for an operation on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn source(self) -> Source<'a> {
        match self {
            Self::Payload(bytes) => Source::Host(bytes.into()),
            Self::Stored(storage) => match storage.on_any_device() {
                Some(buffer) => Source::Device(buffer),
                None => Source::Host(storage.host().into()),
            },
        }
    }

    /// Returns the values as floats in memory of the host. They are copied if they lie on a device,
    /// or at another alignment.
    ///
    /// # Panics
    /// If they lie on a device that failed.
    pub(crate) fn floats(self) -> Cow<'a, [f32]> {
        let copied =
            |bytes: &[u8]| bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        match self.host() {
            Cow::Borrowed(bytes) => {
                bytemuck::try_cast_slice(bytes).map_or_else(|_| copied(bytes), Cow::Borrowed)
            }
            Cow::Owned(bytes) => copied(&bytes),
        }
    }

    /// Returns the values as bytes in memory of the host, at any alignment. They are copied if they
    /// lie on a device. If the device failed they are zeros, and `Device::settle` says so.
    pub(crate) fn host(self) -> Cow<'a, [u8]> {
        match self {
            Self::Payload(bytes) => Cow::Borrowed(bytes),
            Self::Stored(storage) => {
                #[cfg(feature = "cuda")]
                if let Memory::Device(buffer) = &storage.memory {
                    return Cow::Owned(buffer.read().unwrap_or_else(|_| vec![0; storage.size()]));
                }
                Cow::Borrowed(storage.host())
            }
        }
    }
}

impl<'a> slot::Slot<'a, Storage> {
    /// Returns the slot as slices of host memory.
    pub(crate) fn host(self) -> slot::Slot<'a, [f32]> {
        match self {
            Self::InPlace(slot) => slot::Slot::InPlace(slot.floats_mut()),
            Self::Moved { from, to } => slot::Slot::Moved { from: from.floats(), to: to.floats_mut() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that counts as brought by the caller.
    #[derive(Debug)]
    struct Brought(Vec<u64>);

    impl ExternalMemory for Brought {
        fn bytes(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            bytemuck::cast_slice_mut(&mut self.0)
        }
    }

    fn storages(dtype: DType) -> [Storage; 2] {
        let own = Storage::zeros(dtype, 32 / dtype.size());
        [own, Storage::external(dtype, Box::new(Brought(vec![7; 4])))]
    }

    #[test]
    fn what_is_written_is_read_whatever_the_memory() {
        let payload: Vec<u8> = (0..33).collect();
        for dtype in [DType::F32, DType::I64] {
            for mut storage in storages(dtype) {
                assert_eq!((storage.dtype(), storage.len(), storage.size()), (dtype, 32 / dtype.size(), 32));
                storage.write(Operand::Payload(&payload[1..]));
                assert_eq!(*storage.bytes(), payload[1..]);
                let mut copy = Storage::zeros(dtype, storage.len());
                copy.write(Operand::Stored(&storage));
                assert_eq!(copy.bytes(), storage.bytes());
            }
        }
    }

    #[test]
    fn a_part_of_storage_is_received_alone() {
        for mut storage in storages(DType::F32) {
            storage.write(Operand::Payload(&(0..32).collect::<Vec<u8>>()));
            let mut part = Storage::zeros(DType::F32, 3);
            part.receive_part(&storage, 5, 8).unwrap();
            assert_eq!(*part.bytes(), [5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn shared_bytes_lie_in_the_storage_and_hold_it() {
        for mut storage in storages(DType::F32) {
            storage.fill(2.0);
            let owner = Arc::new(Box::new(storage));
            let bytes = Storage::share(owner.clone());
            assert_eq!(bytes.as_ptr(), owner.bytes().as_ptr());
            assert_eq!(Arc::strong_count(&owner), 2);
            drop(owner);
            assert_eq!(bytes, [0, 0, 0, 64].repeat(8));
        }
    }

    #[test]
    #[should_panic(expected = "integers taken as floats")]
    fn integers_as_floats_are_a_broken_invariant() {
        Storage::zeros(DType::I64, 1).fill(0.0);
    }
}

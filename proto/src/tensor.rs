//! Tensors as they travel and rest: names, shapes, roles, and values as raw little-endian bytes.
//!
//! [`Chunk`] is the one currency between worker and ps, on a socket or inside one process: its
//! `Bytes` may share a ps's versioned buffer or a receive buffer. Received bytes are rarely
//! aligned, so they are read with unaligned loads ([`Values::from_bytes`]) and never reinterpreted.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use crate::dtype::{DType, TensorRole};
use crate::ids::ChunkId;
use crate::wire::WireType;

/// One named tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// PyTorch `state_dict` name.
    pub name: String,
    /// Sizes of the dimensions, row-major; empty for a scalar.
    pub shape: Vec<usize>,
    /// Effect of a step on the tensor. It fixes the element type.
    pub role: TensorRole,
}

impl TensorSpec {
    /// Describes a parameter of the optimizer.
    pub fn parameter(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into(), role: TensorRole::Parameter }
    }

    /// Describes a state tensor: the mean of the M values.
    pub fn state(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into(), role: TensorRole::State }
    }

    /// Describes a counter: the maximum of the M values.
    pub fn counter(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into(), role: TensorRole::Counter }
    }

    /// Describes a register: the maximum of what it was and of the M values.
    pub fn register(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into(), role: TensorRole::Register }
    }

    /// Describes a loss scale, see [`LossScale`](crate::loss_scale::LossScale).
    pub fn loss_scale(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into(), role: TensorRole::LossScale }
    }

    /// Returns the element type.
    pub const fn dtype(&self) -> DType {
        self.role.dtype()
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether a dimension is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all-zero values of this tensor.
    pub fn zeros(&self) -> Values {
        Values::zeros(self.dtype(), self.len())
    }
}

/// Memory for values that the caller brings, aligned for them.
pub trait ExternalMemory: Send + Sync + fmt::Debug {
    /// The values as little-endian bytes.
    fn bytes(&self) -> &[u8];

    /// The values as little-endian bytes, for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Values of one type in memory of a device, of which this crate knows nothing: what knows the type
/// reads and writes it there.
pub trait DeviceMemory: Any + Send + Sync + fmt::Debug {
    /// Returns the number of bytes of the values.
    fn size(&self) -> usize;

    /// Copies values to memory of the host, little-endian: floats in the type `wire`. `bytes` says
    /// which ones, as they lie here. It waits for the device.
    ///
    /// # Errors
    /// The device failed: one sentence.
    fn read(&self, wire: WireType, bytes: Range<usize>) -> Result<Vec<u8>, String>;
}

/// The values of one tensor.
#[derive(Debug)]
pub enum Values {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit integers.
    I64(Vec<i64>),
    /// 32-bit floats in external memory, such as memory that other processes read.
    External(Box<dyn ExternalMemory>),
    /// 32-bit floats in memory of a device. All that takes values as memory of the host panics:
    /// [`on_host`](Values::on_host) copies them first.
    Device(Arc<dyn DeviceMemory>),
}

/// What a panic says of values on a device that are taken as values on the host.
const NOT_ON_HOST: &str = "values on a device taken as values on the host";

impl Values {
    /// Returns `len` zeros.
    pub fn zeros(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::F32 => Self::F32(vec![0.0; len]),
            DType::I64 => Self::I64(vec![0; len]),
        }
    }

    /// Returns the element type.
    pub const fn dtype(&self) -> DType {
        match self {
            Self::F32(_) | Self::External(_) | Self::Device(_) => DType::F32,
            Self::I64(_) => DType::I64,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        let bytes = match self {
            Self::Device(memory) => memory.size(),
            Self::F32(_) | Self::I64(_) | Self::External(_) => self.bytes().len(),
        };
        bytes / self.dtype().size()
    }

    /// Returns these values in memory of the host: as they are, or a copy of those on a device. It
    /// waits for the device.
    ///
    /// # Errors
    /// The device failed: one sentence.
    pub fn on_host(&self) -> Result<Cow<'_, Self>, String> {
        match self {
            Self::Device(memory) => {
                let bytes = memory.read(WireType::F32, 0..memory.size())?;
                Ok(Cow::Owned(Self::from_bytes(DType::F32, &bytes)))
            }
            Self::F32(_) | Self::I64(_) | Self::External(_) => Ok(Cow::Borrowed(self)),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the floats, or `None` for integers.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match self {
            Self::F32(values) => Some(values),
            Self::I64(_) => None,
            Self::External(memory) => Some(bytemuck::cast_slice(memory.bytes())),
            Self::Device(_) => panic!("{NOT_ON_HOST}"),
        }
    }

    /// Returns the floats for writing, or `None` for integers.
    pub fn as_f32_mut(&mut self) -> Option<&mut [f32]> {
        match self {
            Self::F32(values) => Some(values),
            Self::I64(_) => None,
            Self::External(memory) => Some(bytemuck::cast_slice_mut(memory.bytes_mut())),
            Self::Device(_) => panic!("{NOT_ON_HOST}"),
        }
    }

    /// Copies `bytes` (little-endian, unaligned) over the elements from `offset` on.
    ///
    /// # Panics
    /// If the bytes do not fit. Receivers check lengths against the layout first.
    pub fn write_bytes(&mut self, offset: usize, bytes: &[u8]) {
        let begin = offset * self.dtype().size();
        self.bytes_mut()[begin..begin + bytes.len()].copy_from_slice(bytes);
    }

    /// Reads little-endian elements from unaligned bytes.
    pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Self {
        let mut values = Self::zeros(dtype, bytes.len() / dtype.size());
        values.write_bytes(0, bytes);
        values
    }

    /// Returns the elements as little-endian bytes, without a copy.
    pub fn bytes(&self) -> &[u8] {
        const { assert!(cfg!(target_endian = "little"), "values travel as they lie in memory: little-endian") };
        match self {
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::I64(values) => bytemuck::cast_slice(values),
            Self::External(memory) => memory.bytes(),
            Self::Device(_) => panic!("{NOT_ON_HOST}"),
        }
    }

    /// Returns the elements as little-endian bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice_mut(values),
            Self::I64(values) => bytemuck::cast_slice_mut(values),
            Self::External(memory) => memory.bytes_mut(),
            Self::Device(_) => panic!("{NOT_ON_HOST}"),
        }
    }

    /// Turns the values into bytes that can be sliced and shared, without a copy.
    pub fn into_bytes(self) -> Bytes {
        struct Owner(Values);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                self.0.bytes()
            }
        }
        Bytes::from_owner(Owner(self))
    }

    /// Merges `other` into the values, as a node of the reduction tree does: the sum, or the
    /// maximum for counters.
    ///
    /// # Panics
    /// If types or lengths differ.
    pub fn merge(&mut self, other: &Self) {
        match (self, other) {
            (Self::I64(left), Self::I64(right)) => {
                assert_eq!(left.len(), right.len(), "merge of different lengths");
                left.iter_mut().zip(right).for_each(|(left, right)| *left = (*left).max(*right));
            }
            (left, right) => match (left.as_f32_mut(), right.as_f32()) {
                (Some(left), Some(right)) => {
                    assert_eq!(left.len(), right.len(), "merge of different lengths");
                    left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
                }
                _ => panic!("merge of floats with integers"),
            },
        }
    }
}

impl Clone for Values {
    /// Copies the elements into memory of the clone's own. Those on a device are shared.
    fn clone(&self) -> Self {
        match self {
            Self::F32(values) => Self::F32(values.clone()),
            Self::I64(values) => Self::I64(values.clone()),
            Self::External(memory) => Self::F32(bytemuck::cast_slice(memory.bytes()).to_vec()),
            Self::Device(memory) => Self::Device(memory.clone()),
        }
    }
}

impl PartialEq for Values {
    /// Compares the elements, not the kind of memory.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::I64(left), Self::I64(right)) => left == right,
            (left, right) => left.as_f32().is_some_and(|left| right.as_f32() == Some(left)),
        }
    }
}

/// A slice of a dense tensor on its way between worker and ps.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// Index of the chunk in the job's layout.
    pub id: ChunkId,
    /// TensorRole of the chunk's tensor.
    pub role: TensorRole,
    /// The elements.
    pub values: ChunkValues,
}

/// The elements of a chunk, where they lie.
#[derive(Clone)]
pub enum ChunkValues {
    /// Raw little-endian elements in memory of the host.
    Host(Bytes),
    /// Floats in memory of a device.
    Device {
        /// Memory with the floats of the whole tensor.
        memory: Arc<dyn DeviceMemory>,
        /// Bytes of the memory that are those of the chunk.
        bytes: Range<usize>,
    },
}

impl ChunkValues {
    /// Returns the number of bytes of all elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device { bytes, .. } => bytes.len(),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the elements lie on the host.
    pub const fn is_on_host(&self) -> bool {
        matches!(self, Self::Host(_))
    }

    /// Returns the elements in memory of the host.
    ///
    /// # Panics
    /// If they lie on a device.
    pub fn host(&self) -> &Bytes {
        match self {
            Self::Host(values) => values,
            Self::Device { .. } => panic!("{NOT_ON_HOST}"),
        }
    }

    /// Returns the elements in memory of the host, which they share.
    ///
    /// # Panics
    /// If they lie on a device.
    pub fn into_host(self) -> Bytes {
        match self {
            Self::Host(values) => values,
            Self::Device { .. } => panic!("{NOT_ON_HOST}"),
        }
    }

    /// Returns some of the elements, by their bytes.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn slice(&self, part: Range<usize>) -> Self {
        match self {
            Self::Host(values) => Self::Host(values.slice(part)),
            Self::Device { memory, bytes } => {
                assert!(part.start <= part.end && part.end <= bytes.len(), "{part:?} of {bytes:?}");
                let bytes = bytes.start + part.start..bytes.start + part.end;
                Self::Device { memory: memory.clone(), bytes }
            }
        }
    }
}

impl From<Values> for ChunkValues {
    /// Shares the elements, without a copy.
    fn from(values: Values) -> Self {
        match values {
            Values::Device(memory) => Self::Device { bytes: 0..memory.size(), memory },
            values => Self::Host(values.into_bytes()),
        }
    }
}

impl From<Bytes> for ChunkValues {
    fn from(values: Bytes) -> Self {
        Self::Host(values)
    }
}

impl From<Vec<u8>> for ChunkValues {
    fn from(values: Vec<u8>) -> Self {
        Self::Host(values.into())
    }
}

impl fmt::Debug for ChunkValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.is_on_host() { "host" } else { "device" };
        write!(f, "ChunkValues({} bytes, {place})", self.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn values_survive_the_wire_at_any_alignment(values in proptest::collection::vec(any::<u32>(), 1..70), shift in 0usize..8) {
            let values = Values::F32(values.into_iter().map(f32::from_bits).collect());
            let mut raw = vec![0u8; shift];
            raw.extend_from_slice(values.bytes());
            let back = Values::from_bytes(DType::F32, &raw[shift..]);
            let bits = |values: &Values| values.as_f32().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&back), bits(&values));
        }
    }

    #[test]
    fn counters_merge_to_the_maximum() {
        let mut left = Values::I64(vec![3, -1]);
        left.merge(&Values::I64(vec![2, 5]));
        assert_eq!(left, Values::I64(vec![3, 5]));
    }
}

//! Values that a worker passes on, where they lie: storage of the host as plain values, and storage
//! of a device as memory that `proto` does not look into.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use proto::tensor::{Chunk, ChunkValues, DType, DeviceMemory, TensorRole, Values};
use proto::wire::WireType;

use crate::cpu::cast;
use crate::merge::Merge;
use crate::storage::{Operand, Storage};

impl DeviceMemory for Storage {
    fn size(&self) -> usize {
        self.size()
    }

    fn read(&self, wire: WireType, bytes: Range<usize>) -> Result<Vec<u8>, String> {
        self.read_part(wire, bytes).map_err(|error| error.to_string())
    }
}

/// Returns the storage behind memory of a device. `None`: it is no storage of this crate.
pub fn storage(memory: &dyn DeviceMemory) -> Option<&Storage> {
    (memory as &dyn Any).downcast_ref()
}

/// Returns the storage of values that lie on a device. `None`: they lie on the host.
pub fn on_device(values: &Values) -> Option<&Storage> {
    match values {
        Values::Device(memory) => storage(memory.as_ref()),
        Values::F32(_) | Values::I64(_) | Values::External(_) => None,
    }
}

/// Returns the storage of values that lie on a device, for writing. `None`: they lie on the host,
/// or somebody else reads them.
pub fn on_device_mut(values: &mut Values) -> Option<&mut Storage> {
    match values {
        Values::Device(memory) => (Arc::get_mut(memory)? as &mut dyn Any).downcast_mut(),
        Values::F32(_) | Values::I64(_) | Values::External(_) => None,
    }
}

/// Rounds floats to the type `wire`, in place. Integers stay as they are.
///
/// Those on a device that somebody else reads stay as they are there: a copy is rounded.
pub fn round(wire: WireType, values: &mut Values) {
    match values {
        Values::Device(_) if wire.rounds() => alone(values).round(wire),
        Values::Device(_) | Values::I64(_) => {}
        Values::F32(_) | Values::External(_) => {
            values.as_f32_mut().into_iter().for_each(|values| cast::round(wire, values));
        }
    }
}

/// Merges the values of another node into these: those of a tensor of this role, in a job that
/// exchanges `wire`.
///
/// # Panics
/// If types or lengths differ, or one lies on a device and one does not.
pub fn merge(role: TensorRole, wire: WireType, left: &mut Values, right: &Values) {
    match on_device(right) {
        Some(right) => alone(left).merge(Operand::Stored(right), Merge::of(role, wire)),
        None => cast::merge(wire.of(role), left, right),
    }
}

/// Marks values as final, as [`Storage::seal`] does.
pub fn seal(values: &mut Values) {
    if let Some(storage) = on_device_mut(values) {
        storage.seal();
    }
}

/// Returns chunks with values on the host, those of parameters encoded as `wire`. It waits for the
/// device of each. `None`: all lie on the host already, and are as they were.
///
/// # Errors
/// A device failed: one sentence.
pub fn fetched(chunks: &[Chunk], wire: WireType) -> Result<Option<Vec<Chunk>>, String> {
    if chunks.iter().all(|chunk| chunk.values.is_on_host()) {
        return Ok(None);
    }
    let fetch = |chunk: &Chunk| match &chunk.values {
        ChunkValues::Host(_) => Ok(cast::encode_chunk(wire, chunk.clone())),
        ChunkValues::Device { memory, bytes } => {
            let values = memory.read(wire.of(chunk.role), bytes.clone())?;
            Ok(Chunk { values: values.into(), ..*chunk })
        }
    };
    chunks.iter().map(fetch).collect::<Result<_, _>>().map(Some)
}

/// Returns the storage of values on a device that nobody else reads. What somebody else reads is
/// copied first.
fn alone(values: &mut Values) -> &mut Storage {
    if on_device_mut(values).is_none() {
        let copy = on_device(values).expect("values on a device").duplicate();
        *values = copy.into();
    }
    on_device_mut(values).expect("nobody else has them yet")
}

impl<'a> From<&'a Values> for Operand<'a> {
    fn from(values: &'a Values) -> Self {
        match on_device(values) {
            Some(storage) => Self::Stored(storage),
            None => Self::Payload(values.bytes()),
        }
    }
}

impl From<Storage> for Values {
    /// Passes the values on without a copy.
    ///
    /// # Panics
    /// If they are integers on a device.
    fn from(storage: Storage) -> Self {
        storage.into_host().unwrap_or_else(|storage| {
            assert_eq!(storage.dtype(), DType::F32, "integers on a device");
            Self::Device(Arc::new(storage))
        })
    }
}

//! Values that a worker passes on, where they lie: storage of the host as plain values, and storage
//! of a device as memory that `proto` does not look into.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use proto::tensor::{DType, DeviceMemory, TensorRole, Values};
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
/// # Panics
/// If they lie on a device and somebody else reads them.
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
/// If types or lengths differ, one lies on a device and one does not, or somebody else reads what
/// changes there.
pub fn merge(role: TensorRole, wire: WireType, left: &mut Values, right: &Values) {
    match on_device(right) {
        Some(right) => alone(left).merge(Operand::Stored(right), Merge::of(role, wire)),
        None => cast::merge(wire.of(role), left, right),
    }
}

/// Returns the storage of values on a device that nobody else reads.
fn alone(values: &mut Values) -> &mut Storage {
    on_device_mut(values).expect("values on a device that nobody else reads")
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

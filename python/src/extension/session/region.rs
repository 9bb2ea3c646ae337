//! Memory of the worker that libraries of Python see without a copy: that of the host by NumPy's
//! protocol, and that of a CUDA device, too, by DLPack.

use std::sync::Arc;

use data::{Batch, Column};
use kernels::Storage;
use kernels::values::on_device;
use model::Weights;
use proto::column::ElementType;
use proto::tensor::{DType, Values};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::dlpack::{self, CPU, CUDA, Memory};

/// What keeps the memory.
#[derive(Clone)]
#[expect(dead_code, reason = "only dropped")]
pub(super) enum Owner {
    /// Weights, which nobody writes.
    Weights(Weights),
    /// Values of a tensor in the answer to a request, which only Python code writes.
    Buffer(Arc<Values>),
    /// Values of a batch.
    Column(Column),
}

/// The values of one tensor, flat, or those of a column. `numpy.asarray` and `torch.from_dlpack`
/// share them and keep them alive.
///
/// What has written values on a device has ended before Python sees the region. What Python lets
/// the device do with them has to end before the request is answered, and before the last view of
/// them goes.
#[pyclass(frozen, module = "ebbflow._native")]
pub(crate) struct Region {
    address: usize,
    /// Number of the CUDA device on which the values lie. `None`: they lie on the host.
    device: Option<usize>,
    shape: Vec<usize>,
    /// Type of the elements, as NumPy writes it.
    elements: &'static str,
    writable: bool,
    owner: Owner,
}

impl Region {
    /// Returns the regions of weights, in the order of the tensors, for reading.
    pub(in crate::extension) fn of_weights(weights: &Weights) -> Vec<Self> {
        let owner = Owner::Weights(weights.clone());
        let address = |values: &Values| match on_device(values) {
            Some(storage) => foreign(storage),
            None => values.bytes().as_ptr() as usize,
        };
        weights.iter().map(|values| Self::of(values, address(values), false, &owner)).collect()
    }

    /// Returns the region of a buffer at `address`, for writing.
    pub(super) fn of_buffer(buffer: &Arc<Values>, address: usize) -> Self {
        Self::of(buffer, address, true, &Owner::Buffer(buffer.clone()))
    }

    /// Returns name, type and values `[n, shape..]` of each column of a batch, for reading: the
    /// inputs, and the labels at last. NumPy has no `bf16`, so its values are their 16 bits as u16.
    pub(crate) fn of_batch(batch: &Batch) -> Vec<(String, &'static str, Self)> {
        let named = |column: &Column| {
            let spec = column.spec();
            let elements = match spec.dtype {
                ElementType::U8 => "|u1",
                ElementType::I8 => "|i1",
                ElementType::I16 => "<i2",
                ElementType::I32 => "<i4",
                ElementType::I64 => "<i8",
                ElementType::F16 => "<f2",
                ElementType::BF16 => "<u2",
                ElementType::F32 => "<f4",
                ElementType::F64 => "<f8",
                ElementType::Bool => "|b1",
            };
            let shape = std::iter::once(column.records()).chain(spec.shape.iter().copied()).collect();
            let kept = column.clone();
            let address = kept.bytes().as_ptr() as usize;
            let owner = Owner::Column(kept);
            let region = Self { address, device: None, shape, elements, writable: false, owner };
            (spec.name.clone(), spec.dtype.name(), region)
        };
        batch.inputs.iter().chain([&batch.labels]).map(named).collect()
    }

    fn of(values: &Values, address: usize, writable: bool, owner: &Owner) -> Self {
        let elements = match values.dtype() {
            DType::F32 => "<f4",
            DType::I64 => "<i8",
        };
        let device = on_device(values).and_then(Storage::ordinal);
        Self { address, device, shape: vec![values.len()], elements, writable, owner: owner.clone() }
    }
}

/// Returns where values lie that Python will write, for a region of them.
pub(super) fn address(values: &mut Values) -> usize {
    match on_device(values) {
        Some(storage) => foreign(storage),
        None => values.bytes_mut().as_mut_ptr() as usize,
    }
}

/// Returns where values on a device lie.
fn foreign(storage: &Storage) -> usize {
    storage.foreign_address().unwrap_or_default() as usize
}

#[pymethods]
impl Region {
    /// NumPy's protocol for memory of others.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if let Some(number) = self.device {
            return Err(PyTypeError::new_err(format!(
                "these values lie on cuda:{number}, which NumPy does not reach; take them by __dlpack__"
            )));
        }
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", self.elements)?;
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("data", (self.address, !self.writable))?;
        Ok(interface)
    }

    /// The device of the values, in the words of DLPack.
    fn __dlpack_device__(&self) -> dlpack::Device {
        self.device.map_or((CPU, 0), |number| (CUDA, number as i32))
    }

    /// DLPack's protocol for memory of others. `stream` is of no use here, because nothing is left
    /// to wait for. A library that knows a newer form of a capsule, as `max_version` says, takes
    /// the older one too.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Bound<'_, PyAny>>,
        max_version: Option<Bound<'_, PyAny>>,
        dl_device: Option<dlpack::Device>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let _ = (stream, max_version);
        let device = self.__dlpack_device__();
        if let Some(asked) = dl_device.filter(|asked| *asked != device) {
            return Err(PyBufferError::new_err(format!(
                "dl_device={asked:?}: these values lie on the device {device:?}, and only their own memory is lent"
            )));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "copy=True: this memory is lent and not copied; copy it there",
            ));
        }
        let Self { address, shape, elements, owner, .. } = self;
        let memory = Memory { address: *address, device, shape, elements };
        dlpack::capsule(py, &memory, owner.clone())
    }
}

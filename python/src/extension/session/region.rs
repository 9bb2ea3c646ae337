//! Memory of the worker that NumPy sees without a copy.

use std::sync::Arc;

use model::Weights;
use proto::tensor::{DType, Values};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What keeps the memory.
#[derive(Clone)]
#[expect(dead_code, reason = "only dropped")]
pub(super) enum Owner {
    /// Weights, which nobody writes.
    Weights(Weights),
    /// Gradients of a request, which only Python code writes.
    Buffers(Arc<Vec<Values>>),
}

/// The values of one tensor, flat. `numpy.asarray` shares them and keeps them alive.
#[pyclass(frozen, module = "ebbflow._native")]
pub(crate) struct Region {
    address: usize,
    len: usize,
    dtype: DType,
    writable: bool,
    _owner: Owner,
}

impl Region {
    /// Returns the regions of weights, in the order of the tensors, for reading.
    pub(in crate::extension) fn of_weights(weights: &Weights) -> Vec<Self> {
        let owner = Owner::Weights(weights.clone());
        weights
            .iter()
            .map(|values| Self::of(values, values.bytes().as_ptr() as usize, false, &owner))
            .collect()
    }

    /// Returns the regions of buffers at `addresses`, for writing.
    pub(in crate::extension) fn of_buffers(buffers: &Arc<Vec<Values>>, addresses: &[usize]) -> Vec<Self> {
        let owner = Owner::Buffers(buffers.clone());
        let region = |(values, &address): (&Values, &usize)| Self::of(values, address, true, &owner);
        buffers.iter().zip(addresses).map(region).collect()
    }

    fn of(values: &Values, address: usize, writable: bool, owner: &Owner) -> Self {
        Self { address, len: values.len(), dtype: values.dtype(), writable, _owner: owner.clone() }
    }
}

#[pymethods]
impl Region {
    /// NumPy's protocol for memory of others.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        let typestr = match self.dtype {
            DType::F32 => "<f4",
            DType::I64 => "<i8",
        };
        interface.set_item("version", 3)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("shape", (self.len,))?;
        interface.set_item("data", (self.address, !self.writable))?;
        Ok(interface)
    }
}

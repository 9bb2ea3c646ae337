//! Memory of the worker that NumPy sees without a copy.

use std::sync::Arc;

use data::{Batch, Column};
use model::Weights;
use proto::column::ElementType;
use proto::tensor::{DType, Values};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// What keeps the memory.
#[derive(Clone)]
#[expect(dead_code, reason = "only dropped")]
pub(super) enum Owner {
    /// Weights, which nobody writes.
    Weights(Weights),
    /// Gradients of a request, which only Python code writes.
    Buffers(Arc<Vec<Values>>),
    /// Values of a batch.
    Column(Column),
}

/// The values of one tensor, flat, or those of a column. `numpy.asarray` shares them and keeps them
/// alive.
#[pyclass(frozen, module = "ebbflow._native")]
pub(crate) struct Region {
    address: usize,
    shape: Vec<usize>,
    /// Type of the elements, as NumPy writes it.
    elements: &'static str,
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
            let region = Self { address, shape, elements, writable: false, _owner: Owner::Column(kept) };
            (spec.name.clone(), spec.dtype.name(), region)
        };
        batch.inputs.iter().chain([&batch.labels]).map(named).collect()
    }

    fn of(values: &Values, address: usize, writable: bool, owner: &Owner) -> Self {
        let elements = match values.dtype() {
            DType::F32 => "<f4",
            DType::I64 => "<i8",
        };
        Self { address, shape: vec![values.len()], elements, writable, _owner: owner.clone() }
    }
}

#[pymethods]
impl Region {
    /// NumPy's protocol for memory of others.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", self.elements)?;
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("data", (self.address, !self.writable))?;
        Ok(interface)
    }
}

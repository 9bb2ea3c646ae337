//! Weights and gradients of a network on a CUDA device, which cross within the device between
//! tensors of libtorch and memory of the kernels (ADR 62).
//!
//! Always true here: the streams of the two do not wait for each other. So the host waits for
//! libtorch before the kernels touch a tensor, and for the kernels before libtorch touches it, or
//! its memory.
//!
//! No line of this file has run on a real device.
#![expect(unsafe_code, reason = "the kernels reach a tensor by its address")]

use data::{Batch, Column};
use kernels::{Device, ForeignEvent, Storage};
use proto::tensor::{DType, Values};
use tch::{Kind, Tensor};

use super::network::failed;
use super::shim::Event;
use crate::device::Device as Chosen;
use crate::error::{Error, Result};
use crate::fault;
use crate::model::Context;

const GRADIENTS: &str = "copy gradients within the device";

/// The device of a network, as the kernels see it.
#[derive(Debug)]
pub(super) struct OnDevice {
    device: Device,
    index: i64,
}

/// A gradient that the device was told to compute.
#[derive(Debug)]
pub(super) struct Told {
    /// Contiguous floats.
    tensor: Tensor,
    /// When they are there.
    event: ForeignEvent,
}

impl OnDevice {
    /// Returns the device of a model. `None`: it is the host, or the kernels cannot use the device.
    /// Then values cross by memory of the host, and the log says why.
    pub(super) fn of(context: &Context) -> Option<Self> {
        let Chosen::Cuda(index) = context.device else { return None };
        match context.devices.cuda(index) {
            Ok(device) => Some(Self { device, index: index as i64 }),
            Err(reason) => {
                let what = "gradients and weights go to and from libtorch through memory of the host";
                tracing::info!(%reason, "{what}");
                None
            }
        }
    }

    /// Returns the device.
    pub(super) const fn device(&self) -> &Device {
        &self.device
    }

    /// Takes a gradient that this thread has told the device to compute.
    ///
    /// # Errors
    /// The device has too little free memory, or failed.
    pub(super) fn told(&self, gradient: &Tensor) -> Result<Told> {
        let engine = |reason| Error::Engine { what: GRADIENTS.to_owned(), reason };
        let tensor = flat(gradient).map_err(failed(GRADIENTS))?;
        let event = Event::now(tch::Device::Cuda(self.index as usize)).map_err(engine)?;
        // SAFETY: an event of this device.
        let event = unsafe { self.device.foreign(event.handle()) };
        Ok(Told { tensor, event: event.map_err(|error| engine(fault::of_failed(&error)))? })
    }

    /// Waits for a gradient, and returns it times `weight` in memory of the kernels. The caller
    /// keeps what was told until the gradients have [settled](Self::settle_gradients): they are
    /// copied.
    ///
    /// # Errors
    /// The device has too little free memory, or failed.
    pub(super) fn weighted(&self, told: &Told, weight: f32) -> Result<Values> {
        let engine = |reason| Error::Engine { what: GRADIENTS.to_owned(), reason };
        told.event.wait().map_err(|error| engine(fault::of_failed(&error)))?;
        let storage = self.device.zeros(DType::F32, told.tensor.numel());
        let mut storage = storage.map_err(|error| engine(error.to_string()))?;
        // SAFETY: libtorch has written so many contiguous floats there, and the caller keeps them.
        unsafe { storage.copy_from_foreign(address(&told.tensor)) };
        storage.scale(weight);
        Ok(storage.into())
    }

    /// Waits until all gradients so far were copied.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn settle_gradients(&self) -> Result<()> {
        self.settle(GRADIENTS)
    }

    /// Returns copies of floats in memory of the kernels.
    ///
    /// # Errors
    /// The device has too little free memory, or failed.
    pub(super) fn read(&self, tensors: &[Tensor]) -> Result<Vec<Values>> {
        if tensors.is_empty() {
            return Ok(Vec::new());
        }
        let flat: Vec<_> = tensors.iter().map(flat).collect::<tch::Result<_>>().map_err(failed(GRADIENTS))?;
        tch::Cuda::synchronize(self.index);
        let copy = |tensor: &Tensor| {
            let mut storage = self.device.zeros(DType::F32, tensor.numel())?;
            // SAFETY: so many contiguous floats lie there, libtorch has computed them, and `flat`
            // keeps them until the device has settled.
            unsafe { storage.copy_from_foreign(address(tensor)) };
            Ok(Values::from(storage))
        };
        let copies = flat.iter().map(copy).collect::<Result<_, kernels::Error>>();
        self.settle(GRADIENTS)?;
        copies.map_err(|error| Error::Engine { what: GRADIENTS.to_owned(), reason: error.to_string() })
    }

    /// Copies floats from memory of the kernels to tensors, each contiguous and as long.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn write(&self, pairs: &[(&Tensor, &Storage)]) -> Result<()> {
        tch::Cuda::synchronize(self.index);
        for (tensor, storage) in pairs {
            // SAFETY: so many contiguous floats lie there, libtorch uses none of them now, and the
            // caller holds the tensor until the device has settled.
            unsafe { storage.copy_to_foreign(address(tensor)) };
        }
        self.settle("load weights within the device")
    }

    /// Returns those inputs of a batch that lie on the device already, `[n, shape..]`, in the order
    /// of all. `None`: the input lies on the host alone.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// The batch outlives the tensors, and what libtorch computes from them.
    pub(super) unsafe fn inputs(&self, batch: &Batch) -> Result<Vec<Option<Tensor>>> {
        const WHAT: &str = "records on the device";
        let of = |index: usize| {
            let storage = kernels::values::storage(batch.placed.get(index)?.as_ref())?;
            Some((storage.foreign_address()?, storage.dtype()))
        };
        let placed: Vec<_> = (0..batch.inputs.len()).map(of).collect();
        if placed.iter().any(Option::is_some) {
            self.settle(WHAT)?;
        }
        let device = tch::Device::Cuda(self.index as usize);
        let tensor = |(input, place): (&Column, Option<(u64, DType)>)| {
            let Some((address, dtype)) = place else { return Ok(None) };
            let shape: Vec<_> =
                [batch.samples].iter().chain(&input.spec().shape).map(|&n| n as i64).collect();
            let mut strides = vec![1; shape.len()];
            (1..shape.len()).rev().for_each(|at| strides[at - 1] = strides[at] * shape[at]);
            let kind = match dtype {
                DType::F32 => Kind::Float,
                DType::I64 => Kind::Int64,
            };
            let place = std::ptr::with_exposed_provenance(address as usize);
            // SAFETY: so many values of this type lie there; the caller keeps the batch.
            unsafe { Tensor::f_from_blob(place, &shape, &strides, kind, device) }.map(Some)
        };
        let tensors = batch.inputs.iter().zip(placed).map(tensor);
        tensors.collect::<tch::Result<_>>().map_err(failed(WHAT))
    }

    fn settle(&self, what: &str) -> Result<()> {
        let failed = |error| Error::Engine { what: what.to_owned(), reason: fault::of_failed(&error) };
        self.device.settle().map_err(failed)
    }
}

/// Returns the elements as contiguous floats, without a history.
fn flat(tensor: &Tensor) -> tch::Result<Tensor> {
    tensor.f_detach()?.f_to_kind(Kind::Float)?.f_contiguous()
}

/// Returns where the elements of a tensor lie.
fn address(tensor: &Tensor) -> u64 {
    tensor.data_ptr().addr() as u64
}

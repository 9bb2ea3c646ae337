//! The products of a dense layer on a device, and what lies between two layers.
//!
//! Always true here: an operation that makes values gives an error if the device has no memory for
//! them, and the device goes on. An operation in place needs no memory.
#![expect(unsafe_code, reason = "kernels work on addresses that no type guards")]

use std::sync::Arc;

use proto::tensor::DType;

use super::device::Device;
use super::launch::{self, Address, Sizes, Slope};
use super::memory::{Buffer, Origin, Source};
use crate::error::Error;

/// Returns `x wᵗ + b` on the device of `w`. The matrices have these sizes.
///
/// # Errors
/// The device has too little free memory, or takes no kernel.
pub(crate) fn forward(x: Source<'_>, w: &Buffer, b: Source<'_>, sizes: Sizes) -> Result<Buffer, Error> {
    let (x, b) = (w.near(x)?, w.near(b)?);
    made(w.device(), sizes.records * sizes.outputs, |y| {
        let from = [x.address(), w.address(), b.address()];
        // SAFETY: the matrices have these sizes, and nobody else knows of the new one.
        unsafe { launch::forward(&**w.device(), from, y, sizes) }
    })
}

/// Returns `dyᵗ x`, and the sum of `dy` over the records, on the device of `dy`. The matrices have
/// these sizes.
///
/// # Errors
/// The errors of [`forward`].
pub(crate) fn weight_gradient(dy: &Buffer, x: Source<'_>, sizes: Sizes) -> Result<[Buffer; 2], Error> {
    let (device, x) = (dy.device(), dy.near(x)?);
    let db = made(device, sizes.outputs, |_| Ok(()))?;
    let dw = made(device, sizes.outputs * sizes.inputs, |dw| {
        let (from, to) = ([dy.address(), x.address()], [dw, db.address()]);
        // SAFETY: the matrices have these sizes, and nobody else knows of the new ones.
        unsafe { launch::weight_gradient(&**device, from, to, sizes) }
    })?;
    Ok([dw, db])
}

/// Returns `dy w` on the device of `dy`. The matrices have these sizes.
///
/// # Errors
/// The errors of [`forward`].
pub(crate) fn input_gradient(dy: &Buffer, w: Source<'_>, sizes: Sizes) -> Result<Buffer, Error> {
    let (device, w) = (dy.device(), dy.near(w)?);
    made(device, sizes.records * sizes.inputs, |dx| {
        // SAFETY: the matrices have these sizes, and nobody else knows of the new one.
        unsafe { launch::input_gradient(&**device, [dy.address(), w.address()], dx, sizes) }
    })
}

/// Returns so many new f32 values, all of which `launch` writes.
fn made(
    device: &Arc<Device>,
    length: u64,
    launch: impl FnOnce(Address) -> Result<(), Error>,
) -> Result<Buffer, Error> {
    let bytes = length as usize * DType::F32.size();
    let buffer = Buffer::new(device, device.allocate(bytes)?, bytes, Origin::Own);
    launch(buffer.address())?;
    Ok(buffer)
}

impl Buffer {
    /// Makes negative f32 values 0.
    pub(crate) fn relu(&mut self) {
        // SAFETY: the buffer has so many values, borrowed alone.
        self.queue(|this| unsafe { launch::relu(&**this.device(), this.address(), this.len(DType::F32)) });
    }

    /// Multiplies an f32 gradient by the slope of a function at its answers.
    ///
    /// # Panics
    /// If there are more or fewer answers.
    pub(crate) fn slope(&mut self, slope: Slope, answers: Source<'_>) {
        assert_eq!(answers.size() as u64, self.len(DType::F32) * DType::F32.size() as u64, "other answers");
        self.queue(|this| {
            let answers = this.near(answers)?;
            let (gradient, length) = (this.address(), this.len(DType::F32));
            // SAFETY: both have so many values, and these are borrowed alone.
            unsafe { launch::slope(&**this.device(), slope, gradient, answers.address(), length) }
        });
    }

    /// Multiplies f32 values by a factor.
    pub(crate) fn scale(&mut self, factor: f32) {
        self.queue(|this| {
            // SAFETY: the buffer has so many values, borrowed alone.
            unsafe { launch::scale(&**this.device(), this.address(), factor, this.len(DType::F32)) }
        });
    }
}

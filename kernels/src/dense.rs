//! The products of a dense layer, and what lies between two layers.
//!
//! Matrices are row-major f32. Each sum has one fixed order (`cpu/dense.rs`), so a network has the
//! same bits on the host and on a device.
//!
//! ```
//! use kernels::{Device, Error, Operand, dense};
//!
//! let device = Device::default();
//! let (w, b) = (device.upload(vec![1.0, 2.0, 0.5, -1.0])?, device.upload(vec![0.25, 0.0])?);
//! let x: [f32; 2] = [2.0, 1.0];
//! let y = dense::forward(Operand::Payload(bytemuck::cast_slice(&x)), &w, &b)?;
//! assert_eq!(*y.read()?, [4.25, 0.0]);
//! # Ok::<(), Error>(())
//! ```

#[cfg(feature = "cuda")]
use proto::tensor::DType;

use crate::cpu::dense as host;
#[cfg(feature = "cuda")]
use crate::cuda::dense as cuda;
#[cfg(feature = "cuda")]
use crate::cuda::launch::{Sizes, Slope};
use crate::device::Device;
use crate::error::Error;
use crate::storage::{Operand, Storage};

/// Floats of the host that products read several times. Products of the host read them where they
/// lie. A device gets one copy.
#[derive(Debug)]
pub enum Input<'a> {
    /// On the host, where they lie.
    Lent(&'a [f32]),
    /// In storage of its own.
    Stored(Storage),
    /// In storage, where they lay before.
    There(&'a Storage),
}

impl<'a> Input<'a> {
    /// Returns floats for products on `device`.
    ///
    /// # Errors
    /// The device has too little free memory. It goes on.
    pub fn on(device: &Device, floats: &'a [f32]) -> Result<Self, Error> {
        if device.is_host() { Ok(Self::Lent(floats)) } else { device.upload(floats).map(Self::Stored) }
    }

    /// Returns the floats for an operation.
    pub fn operand(&self) -> Operand<'_> {
        match self {
            Self::Lent(floats) => Operand::Payload(bytemuck::cast_slice(floats)),
            Self::Stored(storage) => Operand::Stored(storage),
            Self::There(storage) => Operand::Stored(storage),
        }
    }
}

/// Returns `x wᵗ + b` where `w` lies. Shapes: `x [n, inputs]`, `w [outputs, inputs]`,
/// `b [outputs]`, result `[n, outputs]`.
///
/// # Panics
/// If the shapes do not fit each other, or the host reads values of a device that failed.
///
/// # Errors
/// The device has too little free memory, or takes no work.
pub fn forward(x: Operand<'_>, w: &Storage, b: &Storage) -> Result<Storage, Error> {
    let outputs = b.len();
    let inputs = rows(w.len(), outputs, "weights");
    let records = rows(x.size() / size_of::<f32>(), inputs, "inputs");
    #[cfg(feature = "cuda")]
    if let Some(w) = w.on_any_device() {
        let made =
            cuda::forward(x.source(), w, Operand::Stored(b).source(), sizes(records, inputs, outputs))?;
        return Ok(Storage::made(made));
    }
    let _ = records;
    Ok(host::forward(&x.floats(), w.floats(), b.floats()).into())
}

/// Returns `dyᵗ x`, and the sum of `dy` over the records, where `dy` lies. Shapes:
/// `dy [n, outputs]`, `x [n, inputs]`, results `[outputs, inputs]` and `[outputs]`.
///
/// # Panics
/// The panics of [`forward`].
///
/// # Errors
/// The errors of [`forward`].
pub fn weight_gradient(
    dy: &Storage,
    x: Operand<'_>,
    outputs: usize,
    inputs: usize,
) -> Result<[Storage; 2], Error> {
    let records = rows(dy.len(), outputs, "slopes");
    assert_eq!(x.size(), records * inputs * size_of::<f32>(), "inputs of {records} records");
    #[cfg(feature = "cuda")]
    if let Some(dy) = dy.on_any_device() {
        let made = cuda::weight_gradient(dy, x.source(), sizes(records, inputs, outputs))?;
        return Ok(made.map(Storage::made));
    }
    let (dw, db) = host::weight_gradient(dy.floats(), &x.floats(), outputs, inputs);
    Ok([dw.into(), db.into()])
}

/// Returns `dy w` where `dy` lies. Shapes: `dy [n, outputs]`, `w [outputs, inputs]`, result
/// `[n, inputs]`.
///
/// # Panics
/// The panics of [`forward`].
///
/// # Errors
/// The errors of [`forward`].
pub fn input_gradient(dy: &Storage, w: &Storage, outputs: usize, inputs: usize) -> Result<Storage, Error> {
    let records = rows(dy.len(), outputs, "slopes");
    assert_eq!(w.len(), outputs * inputs, "weights of {outputs} outputs");
    #[cfg(feature = "cuda")]
    if let Some(dy) = dy.on_any_device() {
        let made = cuda::input_gradient(dy, Operand::Stored(w).source(), sizes(records, inputs, outputs))?;
        return Ok(Storage::made(made));
    }
    let _ = records;
    Ok(host::input_gradient(dy.floats(), &Operand::Stored(w).floats(), outputs, inputs).into())
}

/// Returns the number of rows of a matrix.
///
/// # Panics
/// If its values are no whole rows.
fn rows(values: usize, width: usize, what: &str) -> usize {
    assert!(width > 0 && values.is_multiple_of(width), "{what}: {values} values in rows of {width}");
    values / width
}

#[cfg(feature = "cuda")]
const fn sizes(records: usize, inputs: usize, outputs: usize) -> Sizes {
    Sizes { records: records as u64, inputs: inputs as u64, outputs: outputs as u64 }
}

impl Storage {
    /// Makes negative floats 0. NaN stays.
    ///
    /// # Panics
    /// If the elements are integers.
    pub fn relu(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.relu();
        }
        host::relu(self.floats_mut());
    }

    /// Multiplies a gradient by the slope of [`relu`](Self::relu) at its answers.
    ///
    /// # Panics
    /// If types or lengths differ.
    pub fn relu_slope(&mut self, answers: &Self) {
        assert_eq!(self.len(), answers.len(), "other answers");
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.slope(Slope::Relu, Operand::Stored(answers).source());
        }
        host::relu_slope(self.floats_mut(), &Operand::Stored(answers).floats());
    }

    /// Multiplies a gradient by the slope of the hyperbolic tangent at its answers.
    ///
    /// # Panics
    /// If types or lengths differ.
    pub fn tanh_slope(&mut self, answers: &Self) {
        assert_eq!(self.len(), answers.len(), "other answers");
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.slope(Slope::Tanh, Operand::Stored(answers).source());
        }
        host::tanh_slope(self.floats_mut(), &Operand::Stored(answers).floats());
    }

    /// Multiplies floats by a factor.
    ///
    /// # Panics
    /// If the elements are integers.
    pub fn scale(&mut self, factor: f32) {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = self.elements_on_device(DType::F32) {
            return buffer.scale(factor);
        }
        self.floats_mut().iter_mut().for_each(|value| *value *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_read_inputs_at_any_alignment() {
        let device = Device::default();
        let w = device.upload(vec![1.0, 2.0]).unwrap();
        let b = device.upload(vec![0.5]).unwrap();
        let bytes: Vec<u8> = [3.0_f32, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        for shift in 0..4 {
            let moved = [&vec![0; shift][..], &bytes].concat();
            let y = forward(Operand::Payload(&moved[shift..]), &w, &b).unwrap();
            assert_eq!(*y.read().unwrap(), [11.5]);
        }
    }

    #[test]
    #[should_panic(expected = "inputs of 2 records")]
    fn other_records_than_slopes_are_a_broken_invariant() {
        let device = Device::default();
        let dy = device.upload(vec![0.0; 4]).unwrap();
        let x = device.upload(vec![0.0; 3]).unwrap();
        drop(weight_gradient(&dy, Operand::Stored(&x), 2, 3));
    }
}

//! One [`Model`] over any [`Network`]. Loading weights, losses, gradients, metrics and state are
//! the same for a script and for a network of ours.
//!
//! **Always true:** between calls the network's tensors hold exactly the loaded weights. A forward
//! pass of training updates running statistics in place. They are read as the microbatch's
//! contribution, and put back. The memory of a parameter is the network's own, or that of weights
//! in `shared`. A network never writes to its parameters.
#![expect(unsafe_code, reason = "copies between a tensor's memory and ours")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;

use data::predictions::PREDICTION;
use data::{Batch, Column};
use proto::column::ElementType;
use proto::loss_scale::LossScale;
use proto::spec::{Autocast, Loss, ModelSpec};
use proto::tensor::{DType, TensorRole, TensorSpec, Values};
use tch::{Kind, TchError, Tensor};

use super::beside::beside;
use super::network::{Mode, Named, Network, device, failed};
use super::on_device::{OnDevice, Told};
use super::{loss, settings, shim};
use crate::engines::outputs::{self, detached};
use crate::error::{Error, Result};
use crate::export::Constant;
use crate::model::{Allocator, Context, Evaluation, Gradients, Model, OwnMemory, TakeGradient};
use crate::weights::Weights;

/// A network with its loss and metrics.
pub(super) struct TorchModel<N> {
    network: N,
    /// Those of the network, and the loss scale if the job computes in f16.
    tensors: Vec<Named>,
    /// The parameters, whose gradients are told as they are made.
    hooked: shim::Hooked,
    /// Loaded state and counters, by their index among the tensors.
    loaded: Vec<(usize, Tensor)>,
    /// Weights whose memory parameters use.
    shared: Vec<Weights>,
    spec: ModelSpec,
    device: tch::Device,
    /// Where gradients stay and weights come from, if that is a CUDA device.
    on_device: Option<OnDevice>,
    threads: usize,
}

impl<N: Network> TorchModel<N> {
    /// Creates a model of `network` with the loss and the metrics of the job.
    pub(super) fn new(network: N, context: &Context) -> Result<Self> {
        if !network.tensors().iter().any(is_parameter) {
            return Err(Error::Engine {
                what: "the network".to_owned(),
                reason: "it has no parameters to train".to_owned(),
            });
        }
        let named = |named: &Named| Named { spec: named.spec.clone(), tensor: named.tensor.shallow_clone() };
        let scale = (context.spec.model.autocast == Some(Autocast::F16)).then(loss_scale).transpose()?;
        let tensors: Vec<_> = network.tensors().iter().map(named).chain(scale).collect();
        let leaves = parameters(&tensors).enumerate().filter(|(_, tensor)| tensor.requires_grad());
        let hooked = shim::Hooked::new(leaves)
            .map_err(|reason| Error::Engine { what: "the network".to_owned(), reason })?;
        let state = tensors.iter().enumerate().filter(|(_, named)| !is_parameter(named));
        let keep = |(index, named): (usize, &Named)| {
            let kept = named.tensor.f_zeros_like()?;
            copy(&named.tensor, &kept)?;
            Ok((index, kept))
        };
        Ok(Self {
            loaded: state.map(keep).collect::<tch::Result<_>>().map_err(failed("copy state"))?,
            shared: Vec::new(),
            network,
            tensors,
            hooked,
            spec: context.spec.model.clone(),
            device: device(context.device),
            on_device: OnDevice::of(context),
            threads: context.threads,
        })
    }

    /// Returns the inputs and the labels on the device, each `[n, shape..]` in its column's type.
    fn records(&self, batch: &Batch) -> Result<(Vec<(CString, Tensor)>, Tensor)> {
        let failed = failed("move records to the device");
        let tensor = |column: &Column| tensor(column, batch.samples, self.device).map_err(failed);
        let mut placed = match &self.on_device {
            // SAFETY: the batch is borrowed until all that comes of it was read on the host.
            Some(on_device) => unsafe { on_device.inputs(batch) }?,
            None => Vec::new(),
        }
        .into_iter();
        let of = |input: &Column| placed.next().flatten().map_or_else(|| tensor(input), Ok);
        let tensors = batch.inputs.iter().map(of).collect::<Result<Vec<_>>>()?;
        // A name with a zero byte is no argument of any function.
        let name = |column: &Column| CString::new(column.spec().name.as_str()).unwrap_or_default();
        Ok((batch.inputs.iter().map(name).zip(tensors).collect(), tensor(&batch.labels)?))
    }

    /// Returns the mean loss and the outputs. Autocast ends here: backward computes in the types of
    /// forward.
    fn forward(&mut self, batch: &Batch, mode: Mode) -> Result<(Tensor, Tensor)> {
        let (inputs, labels) = self.records(batch)?;
        let own_loss = (self.spec.loss == Loss::Module).then_some(&labels);
        let _autocast = self.autocast()?;
        let output = self.network.forward(&inputs, own_loss, mode)?;
        let loss = loss::mean(&self.spec, &output, &labels, batch)?;
        Ok((loss, output.outputs))
    }

    /// Begins the job's autocast on this thread. It ends when the answer is dropped.
    fn autocast(&self) -> Result<Option<shim::Autocast>> {
        let begin = |autocast| shim::Autocast::begin(self.device, autocast);
        let begun = self.spec.autocast.map(begin).transpose();
        begun.map_err(|reason| Error::Engine { what: "model.autocast".to_owned(), reason })
    }

    /// Returns the factor of the loss, if the job has a loss scale.
    fn loss_scale(&self) -> Result<Option<f32>> {
        let factor = |named: &Named| {
            let elements: Vec<i64> = (&named.tensor).try_into().map_err(failed("the loss scale"))?;
            outputs::loss_scale(&elements)
        };
        self.scale().map(factor).transpose()
    }

    /// Returns the tensor of the loss scale, if the job has one.
    fn scale(&self) -> Option<&Named> {
        self.tensors.last().filter(|named| named.spec.role == TensorRole::LossScale)
    }

    /// Begins a computation on this thread with the job's settings.
    fn begin(&self) -> Result<settings::Computation> {
        settings::compute(self.threads, self.spec.tf32)
    }

    /// One microbatch; the parameters' gradients are multiplied by `weight`, into `memory` if it
    /// has room. `take` gets each as soon as it is final. Returns the mean loss.
    fn train(
        &mut self,
        batch: &Batch,
        key: u64,
        weight: f32,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> Result<f32> {
        let (loss, _) = self.forward(batch, Mode::Train { key })?;
        if !loss.requires_grad() {
            return Err(detached(self.spec.loss));
        }
        let failed = failed("gradients");
        let (scaled, weight) = match self.loss_scale()? {
            None => (loss.shallow_clone(), weight),
            Some(scale) => {
                // In f32: a loss in f16 would overflow by its scale.
                let loss = loss.f_to_kind(Kind::Float).and_then(|loss| loss.f_mul_scalar(f64::from(scale)));
                // A power of two: no gradient is rounded by it.
                (loss.map_err(failed)?, weight / scale)
            }
        };
        self.backward(&scaled, weight, memory, take)?;
        Ok(loss.f_double_value(&[]).map_err(failed)? as f32)
    }

    /// Computes gradients times `weight`, which `take` gets as they are made, and the new state,
    /// which it gets in the end.
    fn backward(
        &self,
        loss: &Tensor,
        weight: f32,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> Result<()> {
        let left = match &self.on_device {
            Some(on_device) => self.pass_on(on_device, loss, weight, take)?,
            None => self.pass(loss, weight, memory, take)?,
        };
        self.rest(&left, take)
    }

    /// Returns the leaves of the backward pass, and the number of each among the tensors.
    fn leaves(&self) -> (Vec<usize>, Vec<&Tensor>) {
        let leaves = self.tensors.iter().enumerate().filter(|(_, named)| is_parameter(named));
        leaves.map(|(index, named)| (index, &named.tensor)).unzip()
    }

    /// Computes gradients. On the CPU `take` gets each in the pass, on a device after it. Returns
    /// the tensors that have none.
    fn pass(
        &self,
        loss: &Tensor,
        weight: f32,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> Result<BTreeSet<usize>> {
        let failed = failed("gradients");
        let (leaves, tensors) = self.leaves();
        let mut left: BTreeSet<usize> = (0..self.tensors.len()).collect();
        let (mut result, mut kept, device) = (Ok(()), Vec::new(), self.device);
        let mut made = |leaf: usize, gradient: Tensor| {
            let tensor = leaves[leaf];
            if !gradient.defined() || result.is_err() || !left.remove(&tensor) {
                return;
            }
            if device != tch::Device::Cpu {
                return kept.push((tensor, gradient));
            }
            match read_weighted(&gradient, weight, memory) {
                Ok(values) => take(tensor, values),
                Err(error) => result = Err(error),
            }
        };
        self.hooked.backward(loss, &tensors, &mut made).map_err(engine)?;
        result.map_err(failed)?;
        for (tensor, gradient) in kept {
            take(tensor, read_weighted(&gradient, weight, memory).map_err(failed)?);
        }
        Ok(left)
    }

    /// Computes gradients on a device that the kernels reach. The host tells the device the whole
    /// pass meanwhile, so a thread waits for each gradient and hands it over. Returns the tensors
    /// that have none.
    fn pass_on(
        &self,
        on_device: &OnDevice,
        loss: &Tensor,
        weight: f32,
        take: &mut TakeGradient<'_>,
    ) -> Result<BTreeSet<usize>> {
        let (leaves, tensors) = self.leaves();
        let mut left: BTreeSet<usize> = (0..self.tensors.len()).collect();
        // Their copies are under way.
        let mut kept = Vec::new();
        let hand_over = |(tensor, told): (usize, Result<Told>)| {
            let told = told?;
            let values = on_device.weighted(&told, weight)?;
            kept.push(told);
            if left.remove(&tensor) {
                take(tensor, values);
            }
            Ok(())
        };
        let pass = |tell: &(dyn Fn((usize, Result<Told>)) + Sync)| {
            let mut made = |leaf: usize, gradient: Tensor| {
                if gradient.defined() {
                    tell((leaves[leaf], on_device.told(&gradient)));
                }
            };
            self.hooked.backward(loss, &tensors, &mut made).map_err(engine)
        };
        let passed = beside(pass, hand_over);
        // Also after an error.
        let settled = on_device.settle_gradients();
        drop(kept);
        passed.and(settled).map(|()| left)
    }

    /// Hands over the new state, and zeros for parameters that took no part in the loss.
    fn rest(&self, left: &BTreeSet<usize>, take: &mut TakeGradient<'_>) -> Result<()> {
        let failed = failed("gradients");
        let named = || left.iter().map(|&index| (index, &self.tensors[index]));
        let is_there =
            |(_, named): &(usize, &Named)| self.on_device.is_some() && named.spec.dtype() == DType::F32;
        // A sum has its two values in one memory, so all floats stay on the device.
        if let Some(on_device) = &self.on_device {
            let floats = named().filter(is_there).map(|(_, named)| match is_parameter(named) {
                true => named.tensor.f_zeros_like(),
                false => Ok(named.tensor.shallow_clone()),
            });
            let floats = floats.collect::<tch::Result<Vec<_>>>().map_err(failed)?;
            let values = on_device.read(&floats)?;
            named().filter(is_there).zip(values).for_each(|((tensor, _), values)| take(tensor, values));
        }
        for (tensor, named) in named().filter(|named| !is_there(named)) {
            let values = if is_parameter(named) { Ok(named.spec.zeros()) } else { read(&named.tensor) };
            take(tensor, values.map_err(failed)?);
        }
        Ok(())
    }

    fn train_and_restore(
        &mut self,
        batch: &Batch,
        key: u64,
        weight: f32,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> Result<f32> {
        let _computation = self.begin()?;
        let loss = self.train(batch, key, weight, memory, take);
        self.restore()?;
        loss
    }

    /// Returns all gradients, times `weight`.
    fn all(&mut self, batch: &Batch, key: u64, weight: f32, memory: &dyn Allocator) -> Result<Gradients> {
        let mut values: Vec<_> = self.tensors.iter().map(|_| None).collect();
        let mut take = |tensor: usize, gradient| values[tensor] = Some(gradient);
        let loss = self.train_and_restore(batch, key, weight, memory, &mut take)?;
        Ok(Gradients { loss, values: values.into_iter().flatten().collect() })
    }

    /// Returns the mean loss and the outputs without training. A script may change its state here
    /// too, which no later batch may see.
    fn measure(&mut self, batch: &Batch) -> Result<(f64, Tensor)> {
        let _computation = self.begin()?;
        let measured = tch::no_grad(|| self.forward(batch, Mode::Evaluate));
        self.restore()?;
        let (loss, outputs) = measured?;
        Ok((loss.f_double_value(&[]).map_err(failed("evaluation"))?, outputs))
    }

    /// Sets the network's values. With `share`, parameters use the memory of `weights` if they can,
    /// and `shared` keeps it.
    fn take_over(&mut self, weights: &[Values], share: bool) -> Result<()> {
        settings::enter(self.threads)?;
        let tensors = &self.tensors;
        let fits = |(named, values): (&Named, &Values)| {
            (named.spec.dtype(), named.spec.len()) == (values.dtype(), values.len())
        };
        if tensors.len() != weights.len() || !tensors.iter().zip(weights).all(fits) {
            return Err(Error::Engine {
                what: "load weights".to_owned(),
                reason: "their number, types or lengths differ from the model's tensors".to_owned(),
            });
        }
        let failed = failed("load weights");
        let mut within = Vec::new();
        for (index, (Named { spec, tensor }, values)) in tensors.iter().zip(weights).enumerate() {
            if share && spec.role == TensorRole::Parameter && can_lie_in(tensor, values) {
                // SAFETY: `shared` keeps them until the tensor has other memory.
                unsafe { lay(tensor, values) }.map_err(failed)?;
                continue;
            }
            if let Some(storage) = kernels::values::on_device(values) {
                if tensor.is_contiguous() {
                    within.push((tensor, storage));
                } else {
                    let reason = |reason| Error::Engine { what: "load weights".to_owned(), reason };
                    fill(tensor, values.on_host().map_err(reason)?.as_ref()).map_err(failed)?;
                }
                continue;
            }
            let at = tensor.data_ptr().cast_const().cast();
            let lies =
                |weights: &Weights| weights.get(index).is_some_and(|values| values.bytes().as_ptr() == at);
            if self.shared.iter().any(lies) {
                let own = tensor.f_empty_like().map_err(failed)?;
                tensor.shallow_clone().f_set_data(&own).map_err(failed)?;
            }
            fill(tensor, values).map_err(failed)?;
        }
        if let (Some(on_device), false) = (&self.on_device, within.is_empty()) {
            on_device.write(&within)?;
        }
        for (index, value) in &self.loaded {
            copy(&tensors[*index].tensor, value).map_err(failed)?;
        }
        Ok(())
    }

    fn restore(&mut self) -> Result<()> {
        let put = |(index, value): &(usize, Tensor)| copy(value, &self.tensors[*index].tensor);
        self.loaded.iter().try_for_each(put).map_err(failed("restore state"))
    }
}

impl<N: Network> Model for TorchModel<N> {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.tensors.iter().map(|named| named.spec.clone()).collect()
    }

    fn initial(&mut self, seed: u64) -> Result<Vec<Values>> {
        let scale = self.scale().map(|_| Values::I64(LossScale::FIRST.elements().to_vec()));
        Ok(self.network.initial(seed)?.into_iter().chain(scale).collect())
    }

    fn device(&self) -> kernels::Device {
        self.on_device.as_ref().map(OnDevice::device).cloned().unwrap_or_default()
    }

    fn load(&mut self, weights: &[Values]) -> Result<()> {
        self.take_over(weights, false)?;
        self.shared.clear();
        Ok(())
    }

    fn load_shared(&mut self, weights: &Weights) -> Result<()> {
        if self.on_device.is_some() {
            return self.load(weights);
        }
        // Earlier weights are dropped when no parameter uses their memory any more.
        self.shared.push(weights.clone());
        self.take_over(weights, true)?;
        self.shared.drain(..self.shared.len() - 1);
        Ok(())
    }

    fn gradients(&mut self, batch: &Batch, key: u64) -> Result<Gradients> {
        self.all(batch, key, 1.0, &OwnMemory)
    }

    fn weighted_gradients(&mut self, batch: &Batch, key: u64, memory: &dyn Allocator) -> Result<Gradients> {
        self.all(batch, key, batch.samples as f32, memory)
    }

    /// Hands over each gradient as soon as it is final.
    fn gradients_as_made(
        &mut self,
        batch: &Batch,
        key: u64,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> Result<f32> {
        self.train_and_restore(batch, key, batch.samples as f32, memory, take)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation> {
        let (mean, outputs) = self.measure(batch)?;
        loss::evaluate(&self.spec, mean, &outputs, batch)
    }

    fn predict(&mut self, batch: &Batch) -> Result<Column> {
        let _computation = self.begin()?;
        let (inputs, _) = self.records(batch)?;
        let autocast = self.autocast()?;
        let output = tch::no_grad(|| self.network.forward(&inputs, None, Mode::Evaluate));
        drop(autocast);
        self.restore()?;
        predictions(&output?.outputs, batch)
    }

    fn evaluate_and_predict(&mut self, batch: &Batch) -> Result<(Evaluation, Column)> {
        let (mean, outputs) = self.measure(batch)?;
        Ok((loss::evaluate(&self.spec, mean, &outputs, batch)?, predictions(&outputs, batch)?))
    }

    fn constants(&self) -> Result<Vec<Constant>> {
        self.network.constants()
    }

    fn export(&mut self) -> Result<BTreeMap<String, Vec<u8>>> {
        self.network.export()
    }
}

fn engine(reason: String) -> Error {
    Error::Engine { what: "gradients".to_owned(), reason }
}

/// Returns the outputs for a batch as a column.
fn predictions(outputs: &Tensor, batch: &Batch) -> Result<Column> {
    let sizes: Vec<usize> = outputs.size().into_iter().map(|size| size as usize).collect();
    let Some((&samples, shape)) = sizes.split_first().filter(|(first, _)| **first == batch.samples) else {
        return Err(Error::Engine {
            what: "predict".to_owned(),
            reason: format!(
                "outputs of shape {sizes:?} for {} records; the first dimension must count the records",
                batch.samples
            ),
        });
    };
    let values = outputs.f_to_kind(Kind::Float).and_then(|outputs| read_f32(&outputs));
    Ok(Column::floats(PREDICTION, shape, samples, &values.map_err(failed("predict"))?))
}

/// Returns the tensor of the loss scale. The host reads it.
fn loss_scale() -> Result<Named> {
    let tensor = Tensor::f_from_slice(&LossScale::FIRST.elements());
    Ok(Named { spec: LossScale::tensor(), tensor: tensor.map_err(failed("the loss scale"))? })
}

/// Returns whether the optimizer trains a tensor.
fn is_parameter(named: &Named) -> bool {
    named.spec.role == TensorRole::Parameter
}

/// Returns the tensors that the optimizer trains, in order.
fn parameters(tensors: &[Named]) -> impl Iterator<Item = &Tensor> {
    tensors.iter().filter(|named| is_parameter(named)).map(|named| &named.tensor)
}

/// Returns the values of a column on the device, `[n, shape..]` in the column's type.
fn tensor(column: &Column, samples: usize, device: tch::Device) -> tch::Result<Tensor> {
    let spec = column.spec();
    let shape: Vec<i64> = [samples].iter().chain(&spec.shape).map(|&size| size as i64).collect();
    Tensor::f_from_data_size(column.bytes(), &shape, kind(spec.dtype))?.f_to_device(device)
}

/// Returns libtorch's name of a column's type.
const fn kind(dtype: ElementType) -> Kind {
    match dtype {
        ElementType::U8 => Kind::Uint8,
        ElementType::I8 => Kind::Int8,
        ElementType::I16 => Kind::Int16,
        ElementType::I32 => Kind::Int,
        ElementType::I64 => Kind::Int64,
        ElementType::F16 => Kind::Half,
        ElementType::BF16 => Kind::BFloat16,
        ElementType::F32 => Kind::Float,
        ElementType::F64 => Kind::Double,
        ElementType::Bool => Kind::Bool,
    }
}

/// Copies `source` to `target` element by element, whatever their shapes.
fn copy(source: &Tensor, target: &Tensor) -> tch::Result<()> {
    tch::no_grad(|| target.shallow_clone().f_copy_(&source.f_view_as(target)?)).map(drop)
}

/// Alignment of libtorch's own memory in bytes. Vector code may take another path for other
/// addresses, with other bits.
const ALIGNMENT: usize = 64;

/// Returns whether `values` can be the memory of a tensor like this one.
fn can_lie_in(tensor: &Tensor, values: &Values) -> bool {
    tensor.device() == tch::Device::Cpu
        && tensor.is_contiguous()
        && values.bytes().as_ptr().addr().is_multiple_of(ALIGNMENT)
        && !values.is_empty()
}

/// Makes `values` the memory of the tensor.
///
/// # Safety
/// They must stay until the tensor has other memory, and nobody may write to them.
unsafe fn lay(tensor: &Tensor, values: &Values) -> tch::Result<()> {
    // SAFETY: the caller's promise.
    let source = unsafe { view(values, &tensor.size(), &tensor.stride()) }?;
    tensor.shallow_clone().f_set_data(&source)
}

/// Copies `values` to `target`, which has as many elements.
pub(super) fn fill(target: &Tensor, values: &Values) -> tch::Result<()> {
    // SAFETY: it is only read, and dropped before `values`.
    let source = unsafe { view(values, &[values.len() as i64], &[1]) }?;
    copy(&source, target)
}

/// Returns a tensor whose memory are these values.
///
/// # Safety
/// They must outlive the tensor, nobody may write to them, and shape and strides must cover as many
/// elements.
unsafe fn view(values: &Values, shape: &[i64], strides: &[i64]) -> tch::Result<Tensor> {
    let kind = match values.dtype() {
        DType::F32 => Kind::Float,
        DType::I64 => Kind::Int64,
    };
    // SAFETY: `values` has so many elements of this type.
    unsafe { Tensor::f_from_blob(values.bytes().as_ptr(), shape, strides, kind, tch::Device::Cpu) }
}

/// Copies the elements, row-major.
pub(super) fn read(tensor: &Tensor) -> tch::Result<Values> {
    if tensor.kind() == Kind::Float {
        return read_f32(tensor).map(Values::F32);
    }
    let mut values = Values::zeros(DType::I64, tensor.numel());
    if let Values::I64(values) = &mut values {
        tensor.f_copy_data(values, tensor.numel())?;
    }
    Ok(values)
}

/// The elements times `weight`, in `memory` where it has room: one pass, whose memory is not
/// cleared before.
fn read_weighted(tensor: &Tensor, weight: f32, memory: &dyn Allocator) -> tch::Result<Values> {
    with_elements(tensor, |elements| {
        let weighted = elements.iter().map(|value| value * weight);
        let Some(mut shared) = memory.floats(elements.len()) else {
            return Values::F32(weighted.collect());
        };
        if let Some(values) = shared.as_f32_mut() {
            values.iter_mut().zip(weighted).for_each(|(value, weighted)| *value = weighted);
        }
        shared
    })
}

/// Copies the elements of a tensor of floats, row-major.
pub(super) fn read_f32(tensor: &Tensor) -> tch::Result<Vec<f32>> {
    with_elements(tensor, <[f32]>::to_vec)
}

/// Calls `of` with the elements of a tensor of floats, row-major.
pub(super) fn with_elements<T>(tensor: &Tensor, of: impl FnOnce(&[f32]) -> T) -> tch::Result<T> {
    let tensor = tensor.f_detach()?.f_to_device(tch::Device::Cpu)?.f_contiguous()?;
    let len = tensor.numel();
    if len == 0 {
        return Ok(of(&[]));
    }
    if tensor.f_kind()? != Kind::Float {
        return Err(TchError::Kind(format!("expected floats, found {:?}", tensor.kind())));
    }
    // SAFETY: contiguous floats on the CPU, as many, for as long as the tensor lives; nobody writes
    // to them meanwhile.
    let elements = unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<f32>(), len) };
    Ok(of(elements))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use proto::column::ColumnSpec;

    use super::super::network::Output;
    use super::*;
    use crate::device::Device;

    /// Switches of libtorch that were on.
    type Seen = Arc<Mutex<Vec<Vec<String>>>>;

    /// A network of one layer that notes the switches with which it computes.
    struct Probe {
        tensors: Vec<Named>,
        seen: Seen,
    }

    impl Network for Probe {
        fn tensors(&self) -> &[Named] {
            &self.tensors
        }

        fn initial(&self, _seed: u64) -> Result<Vec<Values>> {
            Ok(vec![Values::F32(vec![0.5; 6])])
        }

        fn forward(
            &mut self,
            inputs: &[(CString, Tensor)],
            _labels: Option<&Tensor>,
            _mode: Mode,
        ) -> Result<Output> {
            let chosen = |name: &str| name.ends_with("tf32") || name.starts_with("autocast c");
            let on = shim::switches().into_iter().filter(|(name, is_on)| *is_on && chosen(name));
            self.seen.lock().unwrap().push(on.map(|(name, _)| name).collect());
            let outputs = inputs[0].1.f_linear(&self.tensors[0].tensor, None::<&Tensor>).unwrap();
            Ok(Output { outputs, loss: None })
        }
    }

    fn probe(model: &str) -> (TorchModel<Probe>, Seen) {
        settings::start().unwrap();
        let text = format!(
            "name = \"x\"\nepochs = 1\nbatch = {{ micro = 1 }}\nmodel = {{ builtin = \"probe\"{model} }}\n\
             optimizer = {{ kind = \"sgd\", learning_rate = 1 }}\n\
             data = {{ format = \"csv\", train = {{ files = [\"x\"] }} }}\n"
        );
        let spec = proto::spec::parse(&text, std::path::Path::new("x.toml"), &[]).unwrap();
        let context = Context {
            spec: Arc::new(spec),
            inputs: vec![ColumnSpec::fixed("features", ElementType::F32, [2])],
            label_max: Some(2),
            artifacts: BTreeMap::new(),
            device: Device::Cpu,
            devices: Default::default(),
            threads: 1,
        };
        let tensor = Tensor::zeros([3, 2], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let tensors = vec![Named { spec: TensorSpec::parameter("weight", [3, 2]), tensor }];
        let seen = Seen::default();
        let model = TorchModel::new(Probe { tensors, seen: Arc::clone(&seen) }, &context).unwrap();
        (model, seen)
    }

    #[test]
    fn each_computation_has_the_types_of_its_job_and_leaves_none_behind() {
        let batch = Batch::of(&[1.0, 2.0], &[2], &Values::I64(vec![1]), 1);
        let cases: [(&str, &[&str]); 4] = [
            (", tf32 = true, autocast = \"bf16\"", &["autocast cpu", "cublas tf32", "cudnn tf32"]),
            ("", &["autocast cache"]),
            (", tf32 = true", &["autocast cache", "cublas tf32", "cudnn tf32"]),
            (", autocast = \"bf16\"", &["autocast cpu"]),
        ];
        for (settings, expected) in cases {
            let (mut model, seen) = probe(settings);
            model.load(&[Values::F32(vec![0.25; 6])]).unwrap();
            model.gradients(&batch, 0).unwrap();
            model.evaluate(&batch).unwrap();
            model.predict(&batch).unwrap();
            model.evaluate_and_predict(&batch).unwrap();
            assert_eq!(*seen.lock().unwrap(), vec![expected; 4], "{settings}");
        }
        assert!(!shim::switches()["autocast cpu"], "the thread computes in f32 again");
    }
}

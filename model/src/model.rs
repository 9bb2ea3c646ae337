//! The interface to the compute engine: everything that Ebbflow needs to know about a model.
//!
//! One thread at a time uses a [`Model`]. The model gets everything that it may depend on: the
//! weights, the batch, and a key for its random numbers. Equal inputs must give equal bits,
//! whatever the model computed before.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use data::{Batch, Column};
use proto::column::{ColumnSpec, ElementType};
use proto::ids::Epoch;
pub use proto::metrics::Evaluation;
use proto::plan::Microbatch;
use proto::spec::JobSpec;
use proto::tensor::{TensorRole, TensorSpec, Values};
use proto::worst::RecordLoss;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::export::Constant;
use crate::fault;
use crate::weights::Weights;

/// A network, its loss and its metrics.
pub trait Model: Send {
    /// Returns the model's tensors in a fixed order, named as in PyTorch's `state_dict`:
    /// parameters, and state that a step changes (BatchNorm's running statistics). All other
    /// methods use this order.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Returns the values of version 0. They are a function of the job's seed (or of the model's
    /// file), never of process state.
    ///
    /// # Errors
    /// The model cannot make the values.
    fn initial(&mut self, seed: u64) -> Result<Vec<Values>>;

    /// Returns the device in whose memory the model takes weights and leaves gradients without a
    /// copy. Weights may also lie on the host. Default: the host.
    fn device(&self) -> kernels::Device {
        kernels::Device::default()
    }

    /// Returns the device in whose memory the model reads the inputs of a batch
    /// ([`Batch::placed`]). Default: that of [`device`](Self::device).
    fn inputs(&self) -> kernels::Device {
        self.device()
    }

    /// Copies the weights for the next calls.
    ///
    /// # Errors
    /// The weights do not fit, or the device refuses them.
    fn load(&mut self, weights: &[Values]) -> Result<()>;

    /// Takes weights that the model may keep and use in place. Default: [`load`](Self::load), which
    /// copies them.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    fn load_shared(&mut self, weights: &Weights) -> Result<()> {
        self.load(weights)
    }

    /// Says what the next calls compute. Default: nothing, because equal weights, records and key
    /// give equal results. A program that drives the model needs it.
    fn announce(&mut self, upcoming: Upcoming<'_>) {
        let _ = upcoming;
    }

    /// Loss and gradients of one microbatch, in training mode. `key` seeds every random number
    /// (dropout): a function of the job's seed and the microbatch.
    ///
    /// Gradients on a device are there when this returns.
    ///
    /// # Errors
    /// Labels or outputs do not fit the loss, or the device fails.
    fn gradients(&mut self, batch: &Batch, key: u64) -> Result<Gradients>;

    /// What the microbatch adds to its step: [`gradients`](Self::gradients) with those of
    /// parameters multiplied by the number of its records.
    ///
    /// Gradients that lie in `memory` need no further copy on their way to a ps of this host. Where
    /// `memory` has no room, they lie in memory of the model's own.
    ///
    /// Default: another pass over the gradients, into `memory`. An override that saves this pass
    /// returns the same bits.
    ///
    /// # Errors
    /// The errors of [`gradients`](Self::gradients).
    fn weighted_gradients(&mut self, batch: &Batch, key: u64, memory: &dyn Allocator) -> Result<Gradients> {
        let mut gradients = self.gradients(batch, key)?;
        let weight = batch.samples as f32;
        for (tensor, values) in self.tensors().iter().zip(&mut gradients.values) {
            if tensor.role == TensorRole::Parameter {
                weigh(values, weight, memory);
            }
        }
        self.device().settle().map_err(|error| Error::Engine {
            what: "gradients".to_owned(),
            reason: fault::of_failed(&error),
        })?;
        Ok(gradients)
    }

    /// Computes [`weighted_gradients`](Self::weighted_gradients), and hands over each tensor's as
    /// soon as it is final: the number of the tensor, and its values. Returns the mean loss over
    /// the records. Gradients count only when this has returned, so the receiver may pass them on
    /// while the others are computed, but must drop all of them after an error.
    ///
    /// Default: hands over all of them in the end. An override that hands over some earlier, in any
    /// order, gives the same bits.
    ///
    /// # Errors
    /// The errors of [`gradients`](Self::gradients).
    fn gradients_as_made(
        &mut self,
        batch: &Batch,
        key: u64,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> Result<f32> {
        let Gradients { loss, values } = self.weighted_gradients(batch, key, memory)?;
        values.into_iter().enumerate().for_each(|(tensor, values)| take(tensor, values));
        Ok(loss)
    }

    /// Computes loss and metrics of records in evaluation mode: no dropout, and running statistics
    /// do not change.
    ///
    /// # Errors
    /// Labels or outputs do not fit the loss, or the device fails.
    fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation>;

    /// Returns the outputs for the records in evaluation mode, before the loss: f32 `[n, shape..]`,
    /// row-major, with one shape for all records. Logits stay logits. Default: the model cannot
    /// predict.
    ///
    /// # Errors
    /// The model cannot predict, its outputs have no dimension for the records, or the device
    /// fails.
    fn predict(&mut self, batch: &Batch) -> Result<Column> {
        let _ = batch;
        let reason = "this network does not return its outputs, which `ebb predict` and `evaluation.worst` need; implement \
                      `Model::predict` for it";
        Err(Error::Engine { what: "predict".to_owned(), reason: reason.to_owned() })
    }

    /// Returns what [`evaluate`](Self::evaluate) and [`predict`](Self::predict) return. Default: it
    /// calls both. An override that saves a pass returns the same bits.
    ///
    /// # Errors
    /// The errors of both.
    fn evaluate_and_predict(&mut self, batch: &Batch) -> Result<(Evaluation, Column)> {
        Ok((self.evaluate(batch)?, self.predict(batch)?))
    }

    /// Returns what [`evaluate`](Self::evaluate) returns, and the `most` records of the batch with
    /// the largest losses, or all. Only a program that drives the model is asked. Default: the
    /// model tells no losses.
    ///
    /// # Errors
    /// The errors of [`evaluate`](Self::evaluate), or the model tells no losses of records.
    fn evaluate_and_list(&mut self, batch: &Batch, most: usize) -> Result<(Evaluation, Vec<RecordLoss>)> {
        let _ = (batch, most);
        let reason = "this model tells no losses of records, which `evaluation.worst` needs; implement \
                      `Model::evaluate_and_list` for it";
        Err(Error::Engine { what: "evaluate".to_owned(), reason: reason.to_owned() })
    }

    /// Returns the tensors of the model's `state_dict` that no step changes. They are exported, but
    /// neither trained nor sent. Default: none.
    ///
    /// # Errors
    /// The tensors cannot be read.
    fn constants(&self) -> Result<Vec<Constant>> {
        Ok(Vec::new())
    }

    /// Returns further files to export beside `model.safetensors`, by name, with the loaded
    /// weights. Default: none.
    ///
    /// # Errors
    /// A file cannot be written.
    fn export(&mut self) -> Result<BTreeMap<String, Vec<u8>>> {
        Ok(BTreeMap::new())
    }
}

/// Receives gradients as they are made, each once: the number of the tensor, and its values. A
/// model may call it in other threads, one call at a time.
pub type TakeGradient<'a> = dyn FnMut(usize, Values) + Send + 'a;

/// Multiplies floats by `weight`: on their device, or into `memory` if it has room.
pub(crate) fn weigh(values: &mut Values, weight: f32, memory: &dyn Allocator) {
    if let Some(storage) = kernels::values::on_device_mut(values) {
        return storage.scale(weight);
    }
    let Some(from) = values.as_f32() else { return };
    match memory.floats(from.len()) {
        Some(mut weighted) => {
            let to = weighted.as_f32_mut().into_iter().flatten();
            to.zip(from).for_each(|(to, from)| *to = from * weight);
            *values = weighted;
        }
        None => values.as_f32_mut().into_iter().flatten().for_each(|value| *value *= weight),
    }
}

/// What the next calls of a model compute.
#[derive(Clone, Copy, Debug)]
pub enum Upcoming<'a> {
    /// Gradients of this microbatch.
    Gradients(&'a Microbatch),
    /// Measurements of records of the validation set, in order.
    Evaluation {
        /// The epoch after which the weights are measured.
        epoch: Epoch,
        /// Numbers of the records.
        records: &'a Range<u64>,
        /// Records of a call, of which the last one may have fewer.
        micro: usize,
    },
}

/// Gives a model memory for its gradients.
pub trait Allocator: Send + Sync {
    /// `len` floats of any content, which belong to the caller. `None`: this memory has no room for
    /// them, or is not for so few; the caller uses its own.
    fn floats(&self, len: usize) -> Option<Values>;
}

/// No memory but the model's own.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnMemory;

impl Allocator for OwnMemory {
    fn floats(&self, _: usize) -> Option<Values> {
        None
    }
}

/// What one microbatch contributes.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// Mean loss over the records.
    pub loss: f32,
    /// One entry for each tensor, in order: the gradient of the mean loss (parameters), or the new
    /// value (state, counters).
    pub values: Vec<Values>,
}

/// Inputs for building a model.
#[derive(Clone, Debug)]
pub struct Context {
    /// Specification of the job.
    pub spec: Arc<JobSpec>,
    /// Inputs of a batch, each named after the argument that takes it.
    pub inputs: Vec<ColumnSpec>,
    /// Largest class in the data. `None` if labels are no classes.
    pub label_max: Option<i64>,
    /// Files that came with the job, by name.
    pub artifacts: BTreeMap<String, PathBuf>,
    /// Device that computes.
    pub device: Device,
    /// The open devices of this process.
    pub devices: kernels::device::Devices,
    /// Threads of one gradient computation, at least 1. Another number gives other bits.
    pub threads: usize,
}

impl Context {
    /// Reads the job's `[model.options]` into a structure of the network's own.
    ///
    /// # Errors
    /// Unknown or ill-typed options; the error names them.
    pub fn options<T: serde::de::DeserializeOwned>(&self) -> Result<T> {
        let options = serde_json::Value::Object(self.spec.model.options.clone());
        serde_json::from_value(options).map_err(|error| Error::ModelOptions {
            model: self.spec.model.builtin.clone().unwrap_or_default(),
            reason: error.to_string(),
        })
    }

    /// Returns the shape of one record of the only input, for a network that takes one f32 tensor
    /// ([`Batch::features`]).
    ///
    /// # Errors
    /// The job gives other inputs.
    pub fn features(&self) -> Result<&[usize]> {
        match self.inputs.as_slice() {
            [features] if features.dtype == ElementType::F32 && !features.ragged => Ok(&features.shape),
            inputs => {
                let found: Vec<_> = inputs.iter().map(ColumnSpec::to_string).collect();
                Err(Error::Inputs {
                    model: self.spec.model.builtin.clone().unwrap_or_default(),
                    expected: "one input of type f32".to_owned(),
                    found: found.join(", "),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Memory for some floats, which counts those that it gave.
    struct Room(AtomicUsize);

    impl Allocator for Room {
        fn floats(&self, len: usize) -> Option<Values> {
            (len > 2).then(|| {
                self.0.fetch_add(len, Ordering::Relaxed);
                Values::F32(vec![f32::NAN; len])
            })
        }
    }

    #[test]
    fn weighing_gives_the_same_bits_in_either_memory() {
        let from = [0.1, -3.0e-39, 1.5e38];
        let (room, weight) = (Room(AtomicUsize::new(0)), 7.0);
        for len in [0, 1, 3] {
            let [mut own, mut lent] = [(); 2].map(|()| Values::F32(from[..len].to_vec()));
            weigh(&mut own, weight, &OwnMemory);
            weigh(&mut lent, weight, &room);
            let bits = |values: &Values| values.bytes().to_vec();
            assert_eq!(bits(&own), bits(&lent));
            assert_eq!(own.as_f32().unwrap(), from[..len].iter().map(|v| v * weight).collect::<Vec<_>>());
        }
        assert_eq!(room.0.load(Ordering::Relaxed), 3);
        let mut counter = Values::I64(vec![5, 6, 7]);
        weigh(&mut counter, weight, &room);
        assert_eq!(counter, Values::I64(vec![5, 6, 7]));
    }
}

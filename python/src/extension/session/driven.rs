//! A model of which this process knows the tensors, and which a loop in Python computes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};

use data::Batch;
use kernels::Device;
use model::export::{Constant, Dtype};
use model::{
    Allocator, Error, Evaluation, Gradients, Model, OwnMemory, Result, TakeGradient, Upcoming, Weights, fault,
};
use proto::ids::Epoch;
use proto::plan::Microbatch;
use proto::tensor::{DType, TensorRole, TensorSpec, Values};
use proto::worst::RecordLoss;
use pyo3::types::PyBytesMethods as _;

use super::buffers::Buffers;
use super::request::{Answer, Evaluate, Factors, Pulled, Train};
use super::{Ahead, Described, Message};

/// Name of the file with the state of the loop.
pub(super) const STATE: &str = "job_state.safetensors";

/// The tensors of a model and their first values.
pub(super) struct Description {
    tensors: Vec<TensorSpec>,
    initial: Vec<Values>,
    constants: Vec<Constant>,
    places: Places,
}

/// Where the tensors of a job are that are none of its model.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// Number of the model's tensors, which are the first ones.
    pub(super) of_model: usize,
    /// Index of the loss scale.
    pub(super) scale: Option<usize>,
    /// Index of the tensor that holds the state of the loop; it is the last one.
    pub(super) register: Option<usize>,
}

impl Places {
    /// Finds the tensors of a job.
    ///
    /// # Errors
    /// Those of the model are not the first ones, or a register is not the last one.
    fn new(tensors: &[TensorSpec]) -> std::result::Result<Self, String> {
        let at = |role| tensors.iter().position(|tensor| tensor.role == role);
        let (scale, register) = (at(TensorRole::LossScale), at(TensorRole::Register));
        let of_model = tensors.len() - usize::from(scale.is_some()) - usize::from(register.is_some());
        let expected: Vec<_> = [scale, register].into_iter().flatten().collect();
        if expected != (of_model..tensors.len()).collect::<Vec<_>>() {
            return Err("after the tensors of the model come a loss scale and a register at most".to_owned());
        }
        Ok(Self { of_model, scale, register })
    }
}

impl Description {
    /// Reads what Python says of a model.
    ///
    /// # Errors
    /// A kind, a type or a length is none, or the tensors of the model are not the first ones.
    pub(super) fn new(
        tensors: Vec<Described<'_>>,
        constants: Vec<Described<'_>>,
    ) -> std::result::Result<Self, String> {
        let (mut specs, mut initial) = (Vec::new(), Vec::new());
        for (name, role, shape, bytes) in tensors {
            let spec = match role.as_str() {
                "parameter" => TensorSpec::parameter(name, shape),
                "state" => TensorSpec::state(name, shape),
                "counter" => TensorSpec::counter(name, shape),
                "loss_scale" => TensorSpec::loss_scale(name, shape),
                "register" => TensorSpec::register(name, shape),
                other => return Err(format!("tensor `{name}`: no role `{other}`")),
            };
            let (bytes, expected) = (bytes.as_bytes(), spec.len() * spec.dtype().size());
            if bytes.len() != expected {
                let dtype = match spec.dtype() {
                    DType::F32 => "float32",
                    DType::I64 => "int64",
                };
                return Err(format!(
                    "tensor `{}`: expected {expected} bytes, which are {dtype} of the shape {:?}, found {}; give its \
                     values as an array of this type and shape",
                    spec.name,
                    spec.shape,
                    bytes.len()
                ));
            }
            initial.push(Values::from_bytes(spec.dtype(), bytes));
            specs.push(spec);
        }
        let constant = |(name, dtype, shape, bytes): Described<'_>| {
            let bytes = bytes.as_bytes().to_vec();
            let dtype = saved_type(&name, &dtype)?;
            Ok::<_, String>(Constant { name, shape, dtype, bytes })
        };
        let constants = constants.into_iter().map(constant).collect::<std::result::Result<_, _>>()?;
        let places = Places::new(&specs)?;
        Ok(Self { tensors: specs, initial, constants, places })
    }
}

/// Returns the type of a tensor in model.safetensors, from torch's name of it.
///
/// # Errors
/// There is none.
pub(in crate::extension) fn saved_type(name: &str, dtype: &str) -> std::result::Result<Dtype, String> {
    Ok(match dtype {
        "bool" => Dtype::BOOL,
        "uint8" => Dtype::U8,
        "int8" => Dtype::I8,
        "int16" => Dtype::I16,
        "int32" => Dtype::I32,
        "int64" => Dtype::I64,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        "float32" => Dtype::F32,
        "float64" => Dtype::F64,
        other => {
            return Err(format!("tensor `{name}` is {other}, which model.safetensors has no type for"));
        }
    })
}

/// A model that asks the loop.
pub(super) struct Driven {
    what: Arc<Description>,
    link: Sender<Message>,
    weights: Weights,
    /// Counts the weights that were loaded, so that the loop sees whether it has others.
    loaded: u64,
    microbatch: Option<Microbatch>,
    /// Epoch after which the model is measured.
    epoch: Epoch,
    /// Whether this process wrote the files of the job.
    exported: Arc<AtomicBool>,
    /// Where the loop hears which records it will be asked for. `None`: it does not.
    ahead: Option<Sender<Ahead>>,
    /// On which the loop takes weights and leaves gradients.
    device: Device,
}

impl Driven {
    /// Creates the model of a job. Notes in `exported` that this process wrote the files of the
    /// job. `ahead` is where the loop hears which records it will be asked for. Its weights and
    /// gradients lie on `device`.
    pub(super) fn new(
        what: Arc<Description>,
        link: Sender<Message>,
        exported: Arc<AtomicBool>,
        ahead: Option<Sender<Ahead>>,
        device: Device,
    ) -> Self {
        let weights = Weights::from(Vec::new());
        Self { what, link, weights, loaded: 0, microbatch: None, epoch: Epoch(0), exported, ahead, device }
    }

    /// Returns the version that the loop computes with.
    fn pulled(&self) -> Pulled {
        Pulled { weights: self.weights.clone(), loaded: self.loaded, places: self.what.places }
    }

    /// Asks the loop for gradients of parameters times `weight`. `take` gets each as the loop makes
    /// it. The loss has the scale of its version, if the job has one, and the gradients are divided
    /// by it. Returns the mean loss.
    fn ask(
        &self,
        batch: &Batch,
        key: u64,
        memory: &dyn Allocator,
        weight: f32,
        take: &mut TakeGradient<'_>,
    ) -> Result<f32> {
        let Some(microbatch) = self.microbatch else {
            return Err(failed("gradients", "the microbatch has no name"));
        };
        let (buffers, pulled) = (Buffers::new(self.buffers(memory)?), self.pulled());
        let factors = Factors::new(weight, pulled.scale()?);
        let (told, hears) = channel();
        let train = Train::new(microbatch, batch.clone(), key, factors, pulled, buffers, told);
        let what = || format!("microbatch {} (epoch {})", microbatch.id, microbatch.epoch);
        self.link.send(Message::Train(train)).map_err(|_| gone(&what()))?;
        for told in hears {
            match told {
                Answer::Made(tensor, values) => take(tensor, values),
                Answer::All(loss) => return Ok(loss),
                Answer::Failed(reason) => return Err(failed(&what(), &reason)),
            }
        }
        Err(gone(&what()))
    }

    /// Asks the loop as [`ask`](Self::ask) does, and returns all gradients in the end.
    fn ask_for_all(&self, batch: &Batch, key: u64, memory: &dyn Allocator, weight: f32) -> Result<Gradients> {
        let mut made: Vec<_> = self.what.tensors.iter().map(|_| None).collect();
        let loss = self.ask(batch, key, memory, weight, &mut |tensor, values| made[tensor] = Some(values))?;
        Ok(Gradients { loss, values: made.into_iter().flatten().collect() })
    }

    /// Returns memory for the answer of each tensor, of which floats lie on the loop's device.
    fn buffers(&self, memory: &dyn Allocator) -> Result<Vec<Values>> {
        const WHAT: &str = "gradients";
        let full = |error: kernels::Error| engine(WHAT, error.to_string());
        let buffer = |tensor: &TensorSpec| match tensor.role {
            TensorRole::Parameter | TensorRole::State if !self.device.is_host() => {
                Ok(self.device.zeros(DType::F32, tensor.len()).map_err(full)?.into())
            }
            TensorRole::Parameter => Ok(memory.floats(tensor.len()).unwrap_or_else(|| tensor.zeros())),
            TensorRole::State | TensorRole::Counter | TensorRole::Register | TensorRole::LossScale => {
                Ok(tensor.zeros())
            }
        };
        let buffers = self.what.tensors.iter().map(buffer).collect::<Result<_>>()?;
        self.settle(WHAT)?;
        Ok(buffers)
    }

    /// Waits until the loop may read and write what lies on its device.
    fn settle(&self, what: &str) -> Result<()> {
        self.device.settle().map_err(|error| engine(what, fault::of_failed(&error)))
    }

    /// Asks the loop for measurements, and for the `most` records with the largest losses.
    fn measure(&self, batch: &Batch, most: usize) -> Result<(Evaluation, Vec<RecordLoss>)> {
        let epoch = self.epoch;
        let (answer, answered) = sync_channel(1);
        let evaluate = Evaluate::new(epoch, batch.clone(), self.pulled(), most, answer);
        let what = || format!("evaluation of epoch {epoch}");
        self.link.send(Message::Evaluate(evaluate)).map_err(|_| gone(&what()))?;
        match answered.recv() {
            Ok(Ok(measured)) => Ok(measured),
            Ok(Err(reason)) => Err(failed(&what(), &reason)),
            Err(_) => Err(gone(&what())),
        }
    }
}

impl Model for Driven {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.what.tensors.clone()
    }

    fn initial(&mut self, _: u64) -> Result<Vec<Values>> {
        Ok(self.what.initial.clone())
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    /// The loop takes inputs from the host.
    fn inputs(&self) -> Device {
        Device::default()
    }

    fn load(&mut self, weights: &[Values]) -> Result<()> {
        self.load_shared(&Weights::from(weights.to_vec()))
    }

    fn load_shared(&mut self, weights: &Weights) -> Result<()> {
        let fits = weights.len() == self.what.tensors.len()
            && self
                .what
                .tensors
                .iter()
                .zip(weights.iter())
                .all(|(tensor, values)| (tensor.dtype(), tensor.len()) == (values.dtype(), values.len()));
        if !fits {
            let reason =
                "the job's tensors are not those of this process's model; start it with the same script";
            return Err(failed("weights", reason));
        }
        self.settle("weights")?;
        self.weights = weights.clone();
        self.loaded += 1;
        Ok(())
    }

    fn announce(&mut self, upcoming: Upcoming<'_>) {
        match upcoming {
            Upcoming::Gradients(microbatch) => self.microbatch = Some(*microbatch),
            Upcoming::Evaluation { epoch, records, micro } => {
                self.epoch = epoch;
                if let Some(ahead) = &self.ahead {
                    // A loop that is gone is found when it is asked.
                    let _ = ahead.send(Ahead::Evaluate(records.clone(), micro));
                }
            }
        }
    }

    fn gradients(&mut self, batch: &Batch, key: u64) -> Result<Gradients> {
        self.ask_for_all(batch, key, &OwnMemory, 1.0)
    }

    fn weighted_gradients(&mut self, batch: &Batch, key: u64, memory: &dyn Allocator) -> Result<Gradients> {
        self.ask_for_all(batch, key, memory, batch.samples as f32)
    }

    /// The loop hands over large gradients during its backward pass, and the others in the end.
    fn gradients_as_made(
        &mut self,
        batch: &Batch,
        key: u64,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> Result<f32> {
        self.ask(batch, key, memory, batch.samples as f32, take)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation> {
        Ok(self.measure(batch, 0)?.0)
    }

    fn evaluate_and_list(&mut self, batch: &Batch, most: usize) -> Result<(Evaluation, Vec<RecordLoss>)> {
        self.measure(batch, most)
    }

    fn constants(&self) -> Result<Vec<Constant>> {
        Ok(self.what.constants.clone())
    }

    fn export(&mut self) -> Result<BTreeMap<String, Vec<u8>>> {
        self.exported.store(true, Ordering::Relaxed);
        let state = self.pulled().state().filter(|state| !state.is_empty());
        Ok(state.into_iter().map(|state| (STATE.to_owned(), state)).collect())
    }
}

fn engine(what: &str, reason: String) -> Error {
    Error::Engine { what: what.to_owned(), reason }
}

fn failed(what: &str, reason: &str) -> Error {
    Error::Driver { what: what.to_owned(), reason: reason.to_owned() }
}

fn gone(what: &str) -> Error {
    Error::Left(what.to_owned())
}

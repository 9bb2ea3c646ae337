//! What the worker asks of the loop: gradients of a microbatch, or measurements of records.

use std::sync::mpsc::{Sender, SyncSender};
use std::sync::{Mutex, MutexGuard, PoisonError};

use data::Batch;
use model::engines::outputs;
use model::{Evaluation, Weights};
use proto::ids::{Epoch, MicrobatchId};
use proto::loss_scale::LossScale;
use proto::metrics::{Metric, Sum, Tally};
use proto::plan::Microbatch;
use proto::random;
use proto::register;
use proto::tensor::Values;
use proto::worst::{Label, PREVIEW_BYTES_MAX, Preview, RecordLoss};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::Described;
use super::buffers::Buffers;
use super::driven::Places;
use super::region::Region;

/// Where the answer to an [`Evaluate`] goes.
type Measured = SyncSender<Result<(Evaluation, Vec<RecordLoss>), String>>;

/// What a loop says of the gradients of a microbatch.
pub(super) enum Answer {
    /// The values of a tensor, which are final.
    Made(usize, Values),
    /// All values were told. The mean loss of the records.
    All(f32),
    /// The loop cannot answer, and why.
    Failed(String),
}

/// A record as Python tells it: its place in the batch, its loss, its label as classes or as
/// values, its outputs, and its image as a PNG file, which may be empty.
type Told<'py> = (usize, f64, Vec<i64>, Vec<f32>, Vec<f32>, Bound<'py, PyBytes>);

/// A version of the job's tensors, as this process pulled it.
pub(super) struct Pulled {
    pub(super) weights: Weights,
    /// Number of the weights in this process: equal numbers are equal weights.
    pub(super) loaded: u64,
    pub(super) places: Places,
}

impl Pulled {
    /// Returns the regions of the model's tensors.
    fn regions(&self) -> Vec<Region> {
        let mut regions = Region::of_weights(&self.weights);
        regions.truncate(self.places.of_model);
        regions
    }

    /// Returns the factor of the loss. `None`: the job has no loss scale.
    ///
    /// # Errors
    /// There is no scale with which gradients fit f16.
    pub(super) fn scale(&self) -> model::Result<Option<f32>> {
        match self.places.scale.and_then(|at| self.weights.get(at)) {
            Some(Values::I64(elements)) => outputs::loss_scale(elements).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the state of the loop. `None`: the job has no room for one.
    pub(super) fn state(&self) -> Option<Vec<u8>> {
        match self.weights.get(self.places.register?) {
            Some(Values::I64(elements)) => Some(register::read(elements)),
            _ => None,
        }
    }
}

/// Factors of a loop's loss and gradients.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    /// Factor of the loss, a power of two.
    scale: f32,
    /// Factor of the gradients that the loss with its factor has. It takes the scale away again.
    weight: f32,
}

impl Factors {
    /// Returns the factors of an answer that has gradients times `weight`. `scale` is the loss
    /// scale, if the job has one.
    pub(super) fn new(weight: f32, scale: Option<f32>) -> Self {
        let scale = scale.unwrap_or(1.0);
        Self { scale, weight: weight / scale }
    }
}

/// A question for the gradients of one microbatch.
#[pyclass(frozen, module = "ebbflow._native")]
pub(crate) struct Train {
    microbatch: Microbatch,
    batch: Batch,
    key: u64,
    factors: Factors,
    pulled: Pulled,
    /// The state that the answer brings.
    state: Mutex<Option<Vec<u8>>>,
    /// What the answer needs. `None`: it was given.
    open: Mutex<Option<Open>>,
}

/// What a request has until its answer is whole.
struct Open {
    buffers: Buffers,
    told: Sender<Answer>,
}

impl Train {
    pub(super) fn new(
        microbatch: Microbatch,
        batch: Batch,
        key: u64,
        factors: Factors,
        pulled: Pulled,
        buffers: Buffers,
        told: Sender<Answer>,
    ) -> Self {
        let open = Mutex::new(Some(Open { buffers, told }));
        Self { microbatch, batch, key, factors, pulled, state: Mutex::default(), open }
    }

    fn open(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Train {
    #[getter]
    fn epoch(&self) -> u64 {
        self.microbatch.epoch.get()
    }

    #[getter]
    fn step(&self) -> u64 {
        self.microbatch.step.get()
    }

    #[getter]
    fn microbatch(&self) -> u64 {
        self.microbatch.id.get()
    }

    /// Numbers of the records in the data set, in the order of the batch.
    #[getter]
    fn records(&self) -> Vec<u64> {
        self.batch.records.clone()
    }

    /// Columns of the records that the worker has read, see [`Region::of_batch`].
    fn columns(&self) -> Vec<(String, &'static str, Region)> {
        Region::of_batch(&self.batch)
    }

    /// Seed of every random number of this microbatch.
    #[getter]
    fn key(&self) -> u64 {
        self.key
    }

    /// Factor of the gradients in the answer: the number of records, divided by `scale`.
    #[getter]
    fn weight(&self) -> f32 {
        self.factors.weight
    }

    /// Factor of the loss before the backward pass: 1, or the loss scale of the job.
    #[getter]
    fn scale(&self) -> f32 {
        self.factors.scale
    }

    /// Number of the weights in this process: equal numbers are equal weights.
    #[getter]
    fn loaded(&self) -> u64 {
        self.pulled.loaded
    }

    /// Whether this is the first microbatch of its step, which alone may bring a new state.
    #[getter]
    fn leads(&self) -> bool {
        self.microbatch.index == 0
    }

    /// Weights of each tensor, for reading.
    fn weights(&self) -> Vec<Region> {
        self.pulled.regions()
    }

    /// State of the loop at the version of the weights. `None`: the job has no room for one.
    fn state<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        Some(PyBytes::new(py, &self.pulled.state()?))
    }

    /// Gives the answer a new state.
    fn set_state(&self, state: &[u8]) -> PyResult<()> {
        let elements = self.pulled.places.register.map(|at| self.pulled.weights[at].len());
        let elements = elements.filter(|_| self.leads()).ok_or_else(|| {
            PyRuntimeError::new_err("the job has no state, or this microbatch is not the first of its step")
        })?;
        register::check(elements, self.microbatch.step, state).map_err(wrong)?;
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = Some(state.to_vec());
        Ok(())
    }

    /// Memory for the answer of each tensor: gradients of parameters, new values of state. Its
    /// first content is arbitrary.
    fn buffers(&self) -> PyResult<Vec<Region>> {
        let open = self.open();
        let regions = open.as_ref().and_then(|open| open.buffers.regions(self.pulled.places.of_model));
        regions.ok_or_else(answered)
    }

    /// Says that the buffer of a tensor has its final content, so that it can be pushed while the
    /// loop fills the others. It counts only with the answer.
    fn made(&self, tensor: usize) -> PyResult<()> {
        let mut open = self.open();
        let open = open.as_mut().ok_or_else(answered)?;
        let is_of_model = tensor < self.pulled.places.of_model;
        let values = is_of_model.then(|| open.buffers.take(tensor)).flatten().ok_or_else(answered)?;
        // The worker may not wait any more.
        let _ = open.told.send(Answer::Made(tensor, values));
        Ok(())
    }

    /// Answers with the content of the buffers and the mean loss of the records.
    fn answer(&self, loss: f64) -> PyResult<()> {
        let Open { buffers, told } = self.open().take().ok_or_else(answered)?;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).take();
        let register = self.pulled.places.register;
        for (tensor, mut values) in buffers.rest() {
            if let (Some(state), Values::I64(elements)) = (&state, &mut values)
                && register == Some(tensor)
            {
                register::write(elements, self.microbatch.step, state).map_err(wrong)?;
            }
            let _ = told.send(Answer::Made(tensor, values));
        }
        let _ = told.send(Answer::All(loss as f32));
        Ok(())
    }

    /// Says that the loop cannot answer, and why.
    fn fail(&self, reason: String) {
        if let Some(open) = self.open().take() {
            let _ = open.told.send(Answer::Failed(reason));
        }
    }

    /// Says that this process leaves the job: others can answer.
    fn leave(&self) {
        drop(self.open().take());
    }
}

/// A question for the measurements of records.
#[pyclass(frozen, module = "ebbflow._native")]
pub(crate) struct Evaluate {
    epoch: Epoch,
    batch: Batch,
    pulled: Pulled,
    /// Number of records with the largest losses that the answer lists, or all.
    worst: usize,
    /// `None`: the answer was given.
    answer: Mutex<Option<Measured>>,
}

impl Evaluate {
    pub(super) const fn new(
        epoch: Epoch,
        batch: Batch,
        pulled: Pulled,
        worst: usize,
        answer: Measured,
    ) -> Self {
        Self { epoch, batch, pulled, worst, answer: Mutex::new(Some(answer)) }
    }

    /// Returns a record that Python tells.
    fn listed(&self, told: Told<'_>) -> PyResult<RecordLoss> {
        let (at, loss, classes, values, outputs, png) = told;
        let record = self.batch.records.get(at).copied().ok_or_else(|| {
            PyValueError::new_err(format!("the batch has {} records, and none at {at}", self.batch.samples))
        })?;
        let label = match (classes.is_empty(), values.is_empty()) {
            (false, _) => Label::Classes(classes),
            (true, false) => Label::Values(values),
            (true, true) => Label::Long,
        };
        let png = png.as_bytes();
        if png.len() > PREVIEW_BYTES_MAX {
            return Err(PyValueError::new_err(format!(
                "an image has at most {PREVIEW_BYTES_MAX} bytes, found {}",
                png.len()
            )));
        }
        let preview = (!png.is_empty()).then(|| Preview { png: png.to_vec().into(), text: String::new() });
        Ok(RecordLoss { preview, ..RecordLoss::new(record, loss, label, &outputs) })
    }
}

#[pymethods]
impl Evaluate {
    #[getter]
    fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// Numbers of the records in the data set, in the order of the batch.
    #[getter]
    fn records(&self) -> Vec<u64> {
        self.batch.records.clone()
    }

    /// Columns of the records that the worker has read, see [`Region::of_batch`].
    fn columns(&self) -> Vec<(String, &'static str, Region)> {
        Region::of_batch(&self.batch)
    }

    /// Number of the weights in this process: equal numbers are equal weights.
    #[getter]
    fn loaded(&self) -> u64 {
        self.pulled.loaded
    }

    /// Weights of each tensor, for reading.
    fn weights(&self) -> Vec<Region> {
        self.pulled.regions()
    }

    /// State of the loop at the version of the weights. `None`: the job has no room for one.
    fn state<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        Some(PyBytes::new(py, &self.pulled.state()?))
    }

    /// Number of records with the largest losses that the answer lists, or all.
    #[getter]
    fn worst(&self) -> usize {
        self.worst
    }

    /// Answers with the sum of the records' losses, with sum and number of terms of each mean, with
    /// sums of the program's own metrics (a name, the numbers, and whether they are a sum and its
    /// count), and with the distinct records that have the largest losses. A mean with a name that
    /// jobs do not know is the program's own too.
    fn answer(
        &self,
        loss_sum: f64,
        means: Vec<(String, f64, u64)>,
        sums: Vec<(String, Vec<f64>, bool)>,
        worst: Vec<Told<'_>>,
    ) -> PyResult<()> {
        let (expected, found) = (self.worst.min(self.batch.records.len()), worst.len());
        if found != expected {
            return Err(PyValueError::new_err(format!(
                "expected {expected} records with their losses, found {found}"
            )));
        }
        let listed = worst.into_iter().map(|told| self.listed(told)).collect::<PyResult<Vec<_>>>()?;
        let samples = self.batch.records.len() as u64;
        let mut evaluation = Evaluation { samples, loss_sum, ..Evaluation::default() };
        let own = |(name, values, is_mean)| (name, Sum { values, is_mean });
        evaluation.sums = sums.into_iter().map(own).collect();
        for (name, sum, count) in means {
            let Ok(metric) = name.parse::<Metric>() else {
                evaluation.sums.insert(name, Sum { values: vec![sum, count as f64], is_mean: true });
                continue;
            };
            let tally = Tally::Mean { sum, count };
            if !metric.takes(&tally) {
                return Err(PyValueError::new_err(format!(
                    "metric `{name}` is no mean over records; return a mean such as `accuracy`"
                )));
            }
            evaluation.tallies.insert(metric, tally);
        }
        proto::metrics::check_sums(&evaluation.sums).map_err(wrong)?;
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = answer.ok_or_else(answered)?.send(Ok((evaluation, listed)));
        Ok(())
    }

    /// Says that the loop cannot answer, and why.
    fn fail(&self, reason: String) {
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(answer) = answer {
            let _ = answer.send(Err(reason));
        }
    }

    /// Says that this process leaves the job: others can answer.
    fn leave(&self) {
        drop(self.answer.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Returns the tensor of a loss scale as a loop describes it: name, role, shape and first values.
#[pyfunction]
pub(crate) fn loss_scale(py: Python<'_>) -> Described<'_> {
    let (tensor, first) = (LossScale::tensor(), LossScale::FIRST.elements());
    let bytes: Vec<u8> = first.iter().flat_map(|element| element.to_le_bytes()).collect();
    (tensor.name, "loss_scale".to_owned(), tensor.shape, PyBytes::new(py, &bytes))
}

/// Returns the seed of every random number of a microbatch, in a job with `seed`.
#[pyfunction]
pub(crate) fn microbatch_key(seed: u64, microbatch: u64) -> u64 {
    random::microbatch_key(seed, MicrobatchId(microbatch))
}

#[expect(clippy::needless_pass_by_value, reason = "`map_err` gives it by value")]
fn wrong(error: proto::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn answered() -> PyErr {
    PyRuntimeError::new_err("this request is answered already, as a whole or in part")
}

//! What the worker asks of the loop: gradients of a microbatch, or measurements of records.

use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};

use model::{Evaluation, Gradients, Weights};
use proto::metrics::{Metric, Tally};
use proto::plan::Microbatch;
use proto::tensor::Values;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::region::Region;

/// Where an answer goes. `None`: it was given.
type Answer<T> = Mutex<Option<SyncSender<Result<T, String>>>>;

/// A question for the gradients of one microbatch.
#[pyclass(frozen, module = "ebbflow._native")]
pub(crate) struct Train {
    microbatch: Microbatch,
    records: Vec<u64>,
    key: u64,
    weight: f32,
    weights: Weights,
    loaded: u64,
    buffers: Mutex<Option<Arc<Vec<Values>>>>,
    /// Where the buffers lie.
    addresses: Vec<usize>,
    answer: Answer<Gradients>,
}

impl Train {
    #[allow(
        clippy::too_many_arguments,
        reason = "called once; a structure of the same fields would say it twice"
    )]
    pub(super) fn new(
        microbatch: Microbatch,
        records: Vec<u64>,
        key: u64,
        weight: f32,
        weights: Weights,
        loaded: u64,
        mut buffers: Vec<Values>,
        answer: SyncSender<Result<Gradients, String>>,
    ) -> Self {
        let address = |values: &mut Values| values.bytes_mut().as_mut_ptr() as usize;
        let addresses = buffers.iter_mut().map(address).collect();
        let (buffers, answer) = (Mutex::new(Some(Arc::new(buffers))), Mutex::new(Some(answer)));
        Self { microbatch, records, key, weight, weights, loaded, buffers, addresses, answer }
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
        self.records.clone()
    }

    /// Seed of every random number of this microbatch.
    #[getter]
    fn key(&self) -> u64 {
        self.key
    }

    /// Factor of the gradients in the answer: the number of records.
    #[getter]
    fn weight(&self) -> f32 {
        self.weight
    }

    /// Number of the weights in this process: equal numbers are equal weights.
    #[getter]
    fn loaded(&self) -> u64 {
        self.loaded
    }

    /// Weights of each tensor, for reading.
    fn weights(&self) -> Vec<Region> {
        Region::of_weights(&self.weights)
    }

    /// Memory for the answer of each tensor: gradients of parameters, new values of state. Its
    /// first content is arbitrary.
    fn buffers(&self) -> PyResult<Vec<Region>> {
        let buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let buffers = buffers.as_ref().ok_or_else(answered)?;
        Ok(Region::of_buffers(buffers, &self.addresses))
    }

    /// Answers with the content of the buffers and the mean loss of the records.
    fn answer(&self, loss: f64) -> PyResult<()> {
        let buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner).take();
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (buffers, answer) = buffers.zip(answer).ok_or_else(answered)?;
        // A view that is still alive keeps the memory; the answer is a copy then.
        let values = Arc::try_unwrap(buffers).unwrap_or_else(|shared| shared.to_vec());
        // The worker may not wait any more.
        let _ = answer.send(Ok(Gradients { loss: loss as f32, values }));
        Ok(())
    }

    /// Says that the loop cannot answer, and why.
    fn fail(&self, reason: String) {
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(answer) = answer {
            let _ = answer.send(Err(reason));
        }
    }
}

/// A question for the measurements of records.
#[pyclass(frozen, module = "ebbflow._native")]
pub(crate) struct Evaluate {
    #[pyo3(get)]
    epoch: u64,
    records: Vec<u64>,
    weights: Weights,
    #[pyo3(get)]
    loaded: u64,
    answer: Answer<Evaluation>,
}

impl Evaluate {
    pub(super) const fn new(
        epoch: u64,
        records: Vec<u64>,
        weights: Weights,
        loaded: u64,
        answer: SyncSender<Result<Evaluation, String>>,
    ) -> Self {
        Self { epoch, records, weights, loaded, answer: Mutex::new(Some(answer)) }
    }
}

#[pymethods]
impl Evaluate {
    /// Numbers of the records in the data set, in the order of the batch.
    #[getter]
    fn records(&self) -> Vec<u64> {
        self.records.clone()
    }

    /// Weights of each tensor, for reading.
    fn weights(&self) -> Vec<Region> {
        Region::of_weights(&self.weights)
    }

    /// Answers with the sum of the records' losses, and with sum and number of terms of each
    /// metric.
    fn answer(&self, loss_sum: f64, metrics: Vec<(String, f64, u64)>) -> PyResult<()> {
        let samples = self.records.len() as u64;
        let mut evaluation = Evaluation { samples, loss_sum, ..Evaluation::default() };
        for (name, sum, count) in metrics {
            let metric: Metric = name.parse().map_err(PyValueError::new_err)?;
            let tally = Tally::Mean { sum, count };
            if !metric.takes(&tally) {
                return Err(PyValueError::new_err(format!(
                    "metric `{name}` is no mean over records; return a mean such as `accuracy`"
                )));
            }
            evaluation.tallies.insert(metric, tally);
        }
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = answer.ok_or_else(answered)?.send(Ok(evaluation));
        Ok(())
    }

    /// Says that the loop cannot answer, and why.
    fn fail(&self, reason: String) {
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(answer) = answer {
            let _ = answer.send(Err(reason));
        }
    }
}

fn answered() -> PyErr {
    PyRuntimeError::new_err("this request is answered already")
}

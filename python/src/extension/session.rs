//! The native half of `ebbflow.join`: where a user's loop and the worker of a job meet.
//!
//! ```text
//!   compute thread of the worker                     the user's thread
//!   Driven::weighted_gradients ── Train ──────────►  Session.next()   (waits without the GIL)
//!     waits, without the GIL                         the loop's body
//!                              ◄── gradients ──────  Train.answer(loss)
//! ```
//!
//! **Always true:** nothing here knows leases, pushes or steps. The worker is the one that trains
//! every job, and its model asks the loop. The worker's threads never take the GIL, so heartbeats
//! do not wait for Python.

mod buffers;
pub(super) mod cluster;
mod dlpack;
pub(super) mod driven;
mod region;
mod request;

use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use client::results::WorstRecords;
use client::security::Keys;
use proto::numerics::Numerics;
use proto::spec::JobSpec;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio_util::sync::CancellationToken;
use worker::ProgramDevice;

pub(super) use self::buffers::Buffers;
use self::cluster::Place;
use self::driven::Description;
pub(super) use self::region::Region;
pub(super) use self::request::{Evaluate, Train, loss_scale, microbatch_key};
use super::client::shown;
use super::secrets::Secrets;

/// Time between two looks at signals, such as Ctrl-C, while the loop waits.
const TICK: Duration = Duration::from_millis(100);

/// What the loop hears.
enum Message {
    Train(Train),
    Evaluate(Evaluate),
    /// A line of JSON, as `ebb watch --json` prints it, and the sums of the loop's own metrics.
    Event(String, Vec<(String, Vec<f64>)>),
    /// The job has ended: its summary as JSON, its weights as a safetensors file, whether this
    /// process exported them, the state of the loop, if it wrote any, and the worst records.
    Ended(String, Option<Vec<u8>>, bool, Option<Vec<u8>>, WorstRecords),
    /// This process cannot go on.
    Broken(String),
}

/// Records that the loop will be asked for soon, unless their lease is lost.
enum Ahead {
    /// Those of a microbatch, with its epoch.
    Train(u64, Vec<u64>),
    /// Those of an evaluation, and how many at a time.
    Evaluate(Range<u64>, usize),
}

/// A tensor as Python describes it: name, kind, shape and little-endian values.
type Described<'py> = (String, String, Vec<usize>, Bound<'py, PyBytes>);

/// A process's part in a job.
#[pyclass(frozen, module = "ebbflow._native")]
pub(super) struct Session {
    /// `None` after the end.
    messages: Mutex<Option<Receiver<Message>>>,
    ahead: Mutex<Receiver<Ahead>>,
    stop: CancellationToken,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

#[pymethods]
impl Session {
    /// Begins: alone with a master and a ps of its own, or as a worker of the master at `master`.
    /// `numerics` has facts and results of fixed operations, which name the numerics class. `None`:
    /// the job computes nothing. Without `data_patience` the process keeps the one that it has.
    /// With `ahead` the loop also hears which records it will be asked for. `cuda` is the number in
    /// this process of the CUDA device on which the loop takes weights and leaves gradients. With
    /// `ps_bytes_max` a ps of its own keeps the model there, in so many bytes at most; 0: half of
    /// those that are free.
    #[new]
    #[pyo3(signature = (spec, tensors, constants, threads, numerics=None, master=None, name=None, secrets=None, script=0, device=None, agent=None, data_patience=None, ahead=false, cuda=None, ps_bytes_max=None))]
    #[expect(clippy::too_many_arguments, reason = "Python gives them, and each is a fact of its own")]
    fn new(
        spec: &str,
        tensors: Vec<Described<'_>>,
        constants: Vec<Described<'_>>,
        threads: usize,
        numerics: Option<(String, Vec<u8>)>,
        master: Option<String>,
        name: Option<String>,
        secrets: Option<Secrets>,
        script: u64,
        device: Option<(String, u64)>,
        agent: Option<i32>,
        data_patience: Option<&str>,
        ahead: bool,
        cuda: Option<usize>,
        ps_bytes_max: Option<u64>,
    ) -> PyResult<Self> {
        let spec = JobSpec::from_json(spec).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let what = Description::new(tensors, constants).map_err(PyValueError::new_err)?;
        let keys = secrets.map_or_else(|| Ok(Keys::default()), Secrets::keys)?;
        let numerics = numerics.map(|(facts, results)| Numerics::computed(&facts, &results));
        let device = device.map(|(name, memory_bytes)| ProgramDevice { name, memory_bytes });
        let data_patience = data_patience.map_or_else(|| Ok(data::patience()), data::parse_patience);
        let data_patience =
            data_patience.map_err(|why| PyValueError::new_err(format!("data_patience: {why}")))?;
        // Patterns are replaced before a worker starts.
        data::be_patient_for(data_patience);
        let (told, heard) = std::sync::mpsc::channel();
        let ahead = ahead.then_some(told);
        let place = Place {
            threads,
            numerics,
            master,
            name,
            keys,
            agent,
            script,
            device,
            cuda,
            ps_bytes_max,
            data_patience,
            ahead,
        };
        let (link, messages) = std::sync::mpsc::channel();
        let stop = CancellationToken::new();
        let token = stop.clone();
        super::warnings::forward();
        let run = move || cluster::run(spec, Arc::new(what), &place, &link, &token);
        let thread = std::thread::Builder::new().name("ebbflow".to_owned()).spawn(run);
        let thread = thread.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let (messages, ahead) = (Mutex::new(Some(messages)), Mutex::new(heard));
        Ok(Self { messages, ahead, stop, thread: Mutex::new(Some(thread)) })
    }

    /// Returns what the loop will be asked for, as far as it was not told before. Does not wait.
    fn ahead(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let told = ahead.try_iter().map(|told| {
            Ok(match told {
                Ahead::Train(epoch, records) => ("train", epoch, records).into_pyobject(py)?.into_any(),
                Ahead::Evaluate(records, micro) => {
                    ("evaluate", records.start, records.end, micro).into_pyobject(py)?.into_any()
                }
            }
            .unbind())
        });
        told.collect()
    }

    /// Waits for what comes next.
    fn next(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        loop {
            let received = py.detach(|| {
                let messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
                messages.as_ref().map(|messages| messages.recv_timeout(TICK))
            });
            match received {
                Some(Ok(message)) => return message.into_python(py),
                Some(Err(RecvTimeoutError::Timeout)) => py.check_signals()?,
                Some(Err(RecvTimeoutError::Disconnected)) | None => {
                    return Err(PyRuntimeError::new_err("the session has ended"));
                }
            }
        }
    }

    /// Leaves the job without waiting. What waits for the loop goes back to the job.
    fn leave(&self, py: Python<'_>) {
        py.detach(|| {
            self.stop.cancel();
            // Requests in the channel are handed back with it.
            drop(self.messages.lock().unwrap_or_else(PoisonError::into_inner).take());
        });
    }

    /// Leaves the job, and waits for this process's part to end. What the loop was asked and has
    /// not answered goes back to the job.
    fn stop(&self, py: Python<'_>) {
        self.leave(py);
        py.detach(|| {
            let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(thread) = thread {
                let _ = thread.join();
            }
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Message {
    fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(match self {
            Self::Train(train) => Py::new(py, train)?.into_any(),
            Self::Evaluate(evaluate) => Py::new(py, evaluate)?.into_any(),
            Self::Event(line, sums) => ("event", line, sums).into_pyobject(py)?.into_any().unbind(),
            Self::Ended(summary, weights, exported, state, found) => {
                let [weights, state] =
                    [weights, state].map(|content| content.map(|content| PyBytes::new(py, &content)));
                let ended = ("ended", summary, weights, exported, state, shown(py, found));
                ended.into_pyobject(py)?.into_any().unbind()
            }
            Self::Broken(reason) => ("broken", reason).into_pyobject(py)?.into_any().unbind(),
        })
    }
}

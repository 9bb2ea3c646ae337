//! The network `paced` wraps another network, takes a fixed time for each microbatch, and can trace
//! when it computed which.
//!
//! It sleeps away the rest of the time, so that many workers on few cores do not slow each other
//! down. What is left is Ebbflow's own time.
//!
//! `builtin = "paced", options = { of = "mlp", millis = 20, trace = "DIR", hidden = [16] }` passes
//! other options to the network `of`. The trace of a worker is `DIR/PID` with one line for each
//! microbatch, `BEGIN END KEY`: microseconds since 1970 and the microbatch's key. A worker with
//! `PACED_FACTOR=10` in its environment takes 10 times as long. A worker with
//! `PACED_FAULT=TEXT` fails with this text of its engine, from its fifth gradient on.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ebbflow::data::{Batch, Column};
use ebbflow::model::{Allocator, Evaluation, Gradients, Model, Registry, TakeGradient};
use ebbflow::tensor::{TensorSpec, Values};
use serde::Deserialize;

struct Paced {
    inner: Box<dyn Model>,
    takes: Duration,
    trace: Option<File>,
    /// What the engine says in the end.
    fault: Option<String>,
    computed: u32,
}

/// Gradients that a worker computes before its engine fails.
const BEFORE_FAULT: u32 = 4;

#[derive(Deserialize)]
struct Options {
    of: String,
    millis: u64,
    trace: Option<PathBuf>,
    /// Options of the network `of`.
    #[serde(flatten)]
    rest: serde_json::Map<String, serde_json::Value>,
}

/// Adds `paced` to `registry`.
pub(crate) fn with_paced(registry: Registry) -> Registry {
    let known = registry.clone();
    registry.with("paced", move |context| {
        let options: Options = context.options()?;
        let mut spec = (*context.spec).clone();
        spec.model.builtin = Some(options.of);
        spec.model.options = options.rest;
        let trace = |dir: PathBuf| {
            let path = dir.join(std::process::id().to_string());
            File::options().create(true).append(true).open(path).expect("the trace can be written")
        };
        // Created before the network is built: an empty trace shows that the worker opens the job.
        let trace = options.trace.map(trace);
        let inner = known.build(&ebbflow::model::Context { spec: Arc::new(spec), ..context.clone() })?;
        let takes = Duration::from_millis(options.millis) * factor();
        Ok(Box::new(Paced { inner, takes, trace, fault: fault(), computed: 0 }))
    })
}

#[expect(clippy::disallowed_methods, reason = "one worker of several is told to be slow")]
fn factor() -> u32 {
    std::env::var("PACED_FACTOR").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1)
}

#[expect(clippy::disallowed_methods, reason = "one worker of several is told to fail")]
fn fault() -> Option<String> {
    std::env::var("PACED_FAULT").ok()
}

#[expect(clippy::disallowed_methods, reason = "traces of several processes share the wall clock")]
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970")
}

impl Paced {
    /// Computes gradients, and sleeps away the rest of their time. What the network has handed over
    /// by then is pushed meanwhile.
    #[expect(clippy::disallowed_methods, reason = "the compute time is slept away")]
    fn timed<T>(
        &mut self,
        key: u64,
        compute: impl FnOnce(&mut dyn Model) -> ebbflow::Result<T>,
    ) -> ebbflow::Result<T> {
        let begin = now();
        // Key 0 is the trial of the worker that describes the model.
        self.computed += u32::from(key != 0);
        if let Some(reason) = self.fault.clone().filter(|_| self.computed > BEFORE_FAULT) {
            return Err(ebbflow::Error::Engine { what: "gradients".to_owned(), reason });
        }
        let gradients = compute(self.inner.as_mut())?;
        std::thread::sleep((begin + self.takes).saturating_sub(now()));
        if let Some(trace) = &mut self.trace {
            let line = format!("{} {} {key}\n", begin.as_micros(), now().as_micros());
            // One write: a process that is killed leaves whole lines.
            trace.write_all(line.as_bytes()).expect("the trace can be written");
        }
        Ok(gradients)
    }
}

impl Model for Paced {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.inner.tensors()
    }

    fn initial(&mut self, seed: u64) -> ebbflow::Result<Vec<Values>> {
        self.inner.initial(seed)
    }

    fn load(&mut self, weights: &[Values]) -> ebbflow::Result<()> {
        self.inner.load(weights)
    }

    fn gradients(&mut self, batch: &Batch, key: u64) -> ebbflow::Result<Gradients> {
        self.timed(key, |inner| inner.gradients(batch, key))
    }

    fn gradients_as_made(
        &mut self,
        batch: &Batch,
        key: u64,
        memory: &dyn Allocator,
        take: &mut TakeGradient<'_>,
    ) -> ebbflow::Result<f32> {
        self.timed(key, |inner| inner.gradients_as_made(batch, key, memory, take))
    }

    fn evaluate(&mut self, batch: &Batch) -> ebbflow::Result<Evaluation> {
        self.inner.evaluate(batch)
    }

    #[expect(clippy::disallowed_methods, reason = "the compute time is slept away")]
    fn predict(&mut self, batch: &Batch) -> ebbflow::Result<Column> {
        let begin = now();
        let outputs = self.inner.predict(batch)?;
        std::thread::sleep((begin + self.takes).saturating_sub(now()));
        Ok(outputs)
    }

    fn export(&mut self) -> ebbflow::Result<BTreeMap<String, Vec<u8>>> {
        self.inner.export()
    }
}

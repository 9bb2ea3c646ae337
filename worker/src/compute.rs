//! The thread of a model. The model is built, used and dropped there, one call at a time. So
//! engines may keep thread-local settings (libtorch's thread count), and a worker's network traffic
//! never waits behind a matrix product.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use data::Batch;
use kernels::Device;
use model::weights::Weights;
use model::{Allocator, Model, TakeGradient, Upcoming};
use proto::plan::Microbatch;
use proto::random::Keyed;
use tokio::sync::{Mutex, oneshot};

use crate::config::Inline;
use crate::error::{Error, Result};
use crate::exchange::SumMaker;

type Call = Box<dyn FnOnce(&mut Loaded) + Send>;

/// A model and the weights with which it computes.
pub(crate) struct Loaded {
    pub(crate) model: Box<dyn Model>,
    weights: Option<Weights>,
    /// Where its gradients may lie.
    memory: Box<dyn Allocator>,
    /// Goes with the model.
    _kept: Box<dyn Any + Send>,
}

impl Loaded {
    /// Returns the model with these weights. They are loaded only if the model has others.
    pub(crate) fn with(&mut self, weights: &Weights) -> Result<&mut dyn Model> {
        if !self.weights.as_ref().is_some_and(|loaded| loaded.is(weights)) {
            self.weights = None;
            self.model.load_shared(weights)?;
            self.weights = Some(weights.clone());
        }
        Ok(self.model.as_mut())
    }

    /// Computes with these weights what a microbatch adds to its step, which `take` gets as it is
    /// made. Returns the mean loss.
    pub(crate) fn gradients(
        &mut self,
        weights: &Weights,
        microbatch: &Microbatch,
        batch: &Batch,
        key: u64,
        take: &mut TakeGradient<'_>,
    ) -> Result<f32> {
        self.with(weights)?;
        self.model.announce(Upcoming::Gradients(microbatch));
        Ok(self.model.gradients_as_made(batch, key, self.memory.as_ref(), take)?)
    }
}

/// Handle to a model. Clones are the same model; the last one ends its thread.
#[derive(Clone)]
pub(crate) enum Compute {
    /// A model on a thread of its own.
    Thread {
        /// Calls for the model.
        calls: mpsc::Sender<Call>,
        /// Whether the model panicked and has to be built again.
        dead: Arc<AtomicBool>,
        /// Where the model works.
        place: Place,
    },
    /// A model on the caller's thread, for simulations.
    Inline { loaded: Arc<Mutex<Loaded>>, how: Inline, place: Place },
}

/// The devices in whose memory a model works.
#[derive(Clone)]
pub(crate) struct Place {
    /// The device of weights and gradients.
    values: Device,
    /// The device of inputs.
    inputs: Device,
}

impl Place {
    fn of(model: &dyn Model) -> Self {
        Self { values: model.device(), inputs: model.inputs() }
    }
}

impl Compute {
    /// Builds the model where it will live: on the caller's thread if `inline` says how. `kept`
    /// lives as long as the model, and its gradients lie in `memory`.
    pub(crate) async fn start<F>(
        inline: Option<&Inline>,
        kept: impl Send + 'static,
        memory: Box<dyn Allocator>,
        build: F,
    ) -> Result<Self>
    where
        F: FnOnce() -> Result<Box<dyn Model>> + Send + 'static,
    {
        if let Some(how) = inline.cloned() {
            let loaded = Loaded { model: build()?, weights: None, memory, _kept: Box::new(kept) };
            let place = Place::of(loaded.model.as_ref());
            let loaded = Arc::new(Mutex::new(loaded));
            return Ok(Self::Inline { loaded, how, place });
        }
        let (calls, queue) = mpsc::channel::<Call>();
        let (ready_tx, ready) = oneshot::channel();
        let life = move || match build() {
            Ok(model) => {
                let mut loaded = Loaded { model, weights: None, memory, _kept: Box::new(kept) };
                // The receiver may be gone: then nobody calls either.
                let _ = ready_tx.send(Ok(Place::of(loaded.model.as_ref())));
                queue.into_iter().for_each(|call| call(&mut loaded));
            }
            Err(error) => drop(ready_tx.send(Err(error))),
        };
        let started = std::thread::Builder::new().name("compute".to_owned()).spawn(life);
        started.map_err(|error| gone(&error.to_string()))?;
        let place = ready.await.map_err(|_| gone("it panicked while building the model"))??;
        Ok(Self::Thread { calls, dead: Arc::default(), place })
    }

    /// Calls the model.
    ///
    /// # Errors
    /// The error of the call, or the model panicked.
    pub(crate) async fn call<T, F>(&self, call: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Loaded) -> Result<T> + Send + 'static,
    {
        match self {
            Self::Inline { loaded, how, .. } => {
                // The task imitates a thread: calls run one after the other, and a call without a
                // waiter goes on.
                let (loaded, how) = (loaded.clone(), how.clone());
                let calling = tokio::spawn(async move {
                    let mut loaded = loaded.lock().await;
                    tokio::time::sleep(how.takes).await;
                    how.hang().await;
                    call(&mut loaded)
                });
                calling.await.map_err(|_| gone("it panicked"))?
            }
            Self::Thread { calls, dead, .. } => {
                let (done, answer) = oneshot::channel();
                let call: Call = Box::new(move |loaded| drop(done.send(call(loaded))));
                let mourn = |reason| {
                    dead.store(true, Ordering::Relaxed);
                    gone(reason)
                };
                calls.send(call).map_err(|_| mourn("it has ended"))?;
                answer.await.map_err(|_| mourn("it panicked"))?
            }
        }
    }

    /// Returns the maker of a sum that a microbatch completes. In a simulation the gradients come
    /// one after the other, with pauses that depend on `key`.
    pub(crate) fn maker(&self, maker: SumMaker, key: u64) -> SumMaker {
        match self {
            Self::Inline { how, .. } if !how.gradient_takes.is_zero() => {
                let (most, mut pauses) = (how.gradient_takes, Keyed::new(key, "gradients", 0));
                maker.paced(move || most.mul_f32(pauses.uniform(0.0, 1.0)))
            }
            Self::Inline { .. } | Self::Thread { .. } => maker,
        }
    }

    /// Returns the device in whose memory the model takes weights and leaves gradients.
    pub(crate) const fn device(&self) -> &Device {
        &self.place().values
    }

    /// Returns the device in whose memory the model reads inputs.
    pub(crate) const fn device_of_inputs(&self) -> &Device {
        &self.place().inputs
    }

    const fn place(&self) -> &Place {
        match self {
            Self::Inline { place, .. } | Self::Thread { place, .. } => place,
        }
    }

    /// Returns whether the model panicked.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self, Self::Thread { dead, .. } if dead.load(Ordering::Relaxed))
    }
}

fn gone(reason: &str) -> Error {
    Error::Task { what: "the compute thread".to_owned(), reason: reason.to_owned() }
}

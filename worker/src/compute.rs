//! The thread that a model lives on. A model is built, used and dropped there, one call at a time, so that engines may keep
//! thread-local settings (libtorch's thread count) and a worker's network traffic never waits behind a matrix product.

use std::sync::{Arc, Mutex, PoisonError, mpsc};

use proto::tensor::Values;
use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::model::Model;

type Call = Box<dyn FnOnce(&mut Loaded) + Send>;

/// A model and the weights that it computes with.
pub(crate) struct Loaded {
    pub(crate) model: Box<dyn Model>,
    weights: Option<Arc<Vec<Values>>>,
}

impl Loaded {
    /// The model with these weights, copied only when it has others.
    pub(crate) fn with(&mut self, weights: &Arc<Vec<Values>>) -> Result<&mut dyn Model> {
        if !self.weights.as_ref().is_some_and(|loaded| Arc::ptr_eq(loaded, weights)) {
            self.weights = None;
            self.model.load(weights)?;
            self.weights = Some(weights.clone());
        }
        Ok(self.model.as_mut())
    }
}

/// Handle to a model. Clones are the same model; the last one ends its thread.
#[derive(Clone)]
pub(crate) enum Compute {
    /// On a thread of its own.
    Thread(mpsc::Sender<Call>),
    /// On the caller's: for simulations.
    Inline(Arc<Mutex<Loaded>>),
}

impl Compute {
    /// Builds the model where it will live.
    pub(crate) async fn start<F>(threaded: bool, build: F) -> Result<Self>
    where
        F: FnOnce() -> Result<Box<dyn Model>> + Send + 'static,
    {
        if !threaded {
            return Ok(Self::Inline(Arc::new(Mutex::new(Loaded { model: build()?, weights: None }))));
        }
        let (calls, queue) = mpsc::channel::<Call>();
        let (ready_tx, ready) = oneshot::channel();
        let life = move || match build() {
            Ok(model) => {
                let mut loaded = Loaded { model, weights: None };
                // The receiver may be gone: then nobody calls either.
                let _ = ready_tx.send(Ok(()));
                queue.into_iter().for_each(|call| call(&mut loaded));
            }
            Err(error) => drop(ready_tx.send(Err(error))),
        };
        let started = std::thread::Builder::new().name("compute".to_owned()).spawn(life);
        started.map_err(|error| gone(&error.to_string()))?;
        ready.await.map_err(|_| gone("it panicked while building the model"))??;
        Ok(Self::Thread(calls))
    }

    /// Calls the model.
    ///
    /// # Errors
    /// What the call returns; or the model panicked.
    pub(crate) async fn call<T, F>(&self, call: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Loaded) -> Result<T> + Send + 'static,
    {
        match self {
            Self::Inline(loaded) => call(&mut loaded.lock().unwrap_or_else(PoisonError::into_inner)),
            Self::Thread(calls) => {
                let (done, answer) = oneshot::channel();
                let call: Call = Box::new(move |loaded| drop(done.send(call(loaded))));
                calls.send(call).map_err(|_| gone("it has ended"))?;
                answer.await.map_err(|_| gone("it panicked"))?
            }
        }
    }
}

fn gone(reason: &str) -> Error {
    Error::Engine { what: "the compute thread".to_owned(), reason: reason.to_owned() }
}

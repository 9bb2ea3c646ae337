//! The events of a job, one after the other: for a `for` loop, and for `asyncio`.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use client::{Follow, Followed, report};
use pyo3::prelude::*;
use tokio::sync::oneshot;

use super::error::raised;
use super::follow::line;
use super::wait::{runtime, wait};

/// An event with the number of steps, or the state of the job that ended: one of the two.
type Step = (Option<(String, u64)>, Option<String>);

/// A job that is being followed, from its first event on.
#[pyclass(module = "ebbflow._native", frozen)]
#[derive(Debug)]
pub(super) struct Events(Arc<tokio::sync::Mutex<Follow>>);

impl Events {
    pub(super) fn new(follow: Follow) -> Self {
        Self(Arc::new(tokio::sync::Mutex::new(follow)))
    }
}

#[pymethods]
impl Events {
    /// Waits for the next event, or for the job's end.
    fn next(&self, py: Python<'_>) -> PyResult<Step> {
        let follow = self.0.clone();
        wait(py, || async move { next(&follow).await })?.map_err(|error| raised(&error))
    }

    /// Calls `done(step, error)` on another thread when there is a next event or a failure. The
    /// other one of the two is `None`. The call ends without it when the result is cancelled or
    /// dropped.
    fn next_later(&self, py: Python<'_>, done: Py<PyAny>) -> PyResult<Waiting> {
        let (follow, runtime) = (self.0.clone(), runtime(py)?);
        let (keep, cancelled) = oneshot::channel::<()>();
        // A thread of its own: the future holds what no other thread can take.
        let named = thread::Builder::new().name("ebbflow-event".to_owned());
        named.spawn(move || {
            let step = runtime.block_on(async {
                tokio::select! {
                    _ = cancelled => None,
                    step = next(&follow) => Some(step),
                }
            });
            let Some(step) = step else { return };
            // A program that ends does not listen any more.
            Python::try_attach(|py| {
                let called = match step {
                    Ok(step) => done.call1(py, (step, py.None())),
                    Err(error) => done.call1(py, (py.None(), raised(&error).into_value(py))),
                };
                if let Err(error) = called {
                    error.write_unraisable(py, None);
                }
            });
        })?;
        Ok(Waiting(Mutex::new(Some(keep))))
    }
}

async fn next(follow: &tokio::sync::Mutex<Follow>) -> client::Result<Step> {
    let mut follow = follow.lock().await;
    loop {
        match follow.next().await? {
            Followed::Ended(status) => return Ok((None, Some(report::json(&status).to_string()))),
            Followed::Event(event) => {
                if let Some(line) = line(&event) {
                    return Ok((Some(line), None));
                }
            }
        }
    }
}

/// A call of [`Events::next_later`] that has not ended.
#[pyclass(module = "ebbflow._native", frozen)]
#[derive(Debug)]
pub(super) struct Waiting(Mutex<Option<oneshot::Sender<()>>>);

#[pymethods]
impl Waiting {
    /// Ends the call, unless it has ended.
    fn cancel(&self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

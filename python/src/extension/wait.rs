//! Waiting for Rust from a thread of Python: without the GIL, and with an eye on Ctrl-C.

use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

/// Longest time until Ctrl-C is noticed.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The runtime of all calls, and the process that made it.
static RUNTIME: Mutex<Option<(u32, &'static Runtime)>> = Mutex::new(None);

/// Returns the runtime of this process. The threads of a runtime do not survive a fork, so a forked
/// process makes its own.
///
/// The caller holds the GIL, as a process that forks does. So no fork meets a locked mutex.
///
/// # Errors
/// The system gives no threads.
pub(super) fn runtime(_: Python<'_>) -> PyResult<&'static Runtime> {
    let process = std::process::id();
    let mut kept = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((owner, runtime)) = *kept
        && owner == process
    {
        return Ok(runtime);
    }
    let runtime = Builder::new_multi_thread().enable_all().thread_name("ebbflow").build()?;
    let runtime = Box::leak(Box::new(runtime));
    *kept = Some((process, runtime));
    Ok(runtime)
}

/// Waits for the future that `begin` makes, and returns its value. Python runs meanwhile.
///
/// The future is made and polled on this thread, so it may hold what no other thread can take.
///
/// # Errors
/// A signal handler of Python raised an exception, such as `KeyboardInterrupt`. The future is
/// dropped then.
pub(super) fn wait<F: Future>(py: Python<'_>, begin: impl FnOnce() -> F + Send) -> PyResult<F::Output>
where
    F::Output: Send,
{
    let runtime = runtime(py)?;
    py.detach(move || {
        runtime.block_on(async move {
            let mut work = pin!(begin());
            loop {
                tokio::select! {
                    biased;
                    value = &mut work => return Ok(value),
                    () = tokio::time::sleep(LOOK_EVERY) => look()?,
                }
            }
        })
    })
}

/// Runs Python's signal handlers if a signal came.
#[expect(clippy::redundant_closure_for_method_calls, reason = "the method itself has only one lifetime")]
fn look() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

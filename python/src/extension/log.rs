//! Notices to the user, through the logger `ebbflow` of Python.
//!
//! Threads of Rust write them. The end of the interpreter aborts the process if such a thread is in
//! Python's code then. So it waits for those that are, and drops what comes later.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

/// The threads that are in Python's code to log.
struct Gate {
    is_closed: bool,
    inside: usize,
}

static GATE: Mutex<Gate> = Mutex::new(Gate { is_closed: false, inside: 0 });
static LEFT: Condvar = Condvar::new();

fn gate() -> MutexGuard<'static, Gate> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that logs.
struct Inside;

impl Inside {
    /// Returns `None` if the interpreter ends.
    fn enter() -> Option<Self> {
        let mut gate = gate();
        gate.inside += usize::from(!gate.is_closed);
        (!gate.is_closed).then_some(Self)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        gate().inside -= 1;
        LEFT.notify_all();
    }
}

/// Shows a notice to the user.
pub(super) fn log(text: &str) {
    let Some(_inside) = Inside::enter() else { return };
    let logged = Python::try_attach(|py| {
        let logger = py.import("logging")?.call_method1("getLogger", ("ebbflow",))?;
        logger.call_method1("warning", ("%s", text)).map(drop)
    });
    if let Some(Err(error)) = logged {
        Python::attach(|py| error.write_unraisable(py, None));
    }
}

/// Waits at the end of the interpreter, see the text of this file.
pub(super) fn close_at_exit(py: Python<'_>) -> PyResult<()> {
    let process = std::process::id();
    let close = move |args: &Bound<'_, pyo3::types::PyTuple>, _: Option<&Bound<'_, pyo3::types::PyDict>>| {
        // A fork has none of the threads that its parent counts.
        if process == std::process::id() {
            args.py().detach(close);
        }
    };
    let close = pyo3::types::PyCFunction::new_closure(py, None, None, close)?;
    py.import("atexit")?.call_method1("register", (close,)).map(drop)
}

fn close() {
    let mut gate = gate();
    gate.is_closed = true;
    while gate.inside > 0 {
        gate = LEFT.wait(gate).unwrap_or_else(PoisonError::into_inner);
    }
}

//! The functions and classes of the module, as `python/ebbflow/_native.pyi` lists them.

mod client;
mod error;
mod events;
mod follow;
mod job;
mod program;
mod run;
mod secrets;
mod session;
mod wait;
mod warnings;

use pyo3::prelude::*;

/// Keeps the pages of freed weights and gradients for the next ones, as in the program `ebb`. Only
/// Rust's memory comes from it. Python and torch keep theirs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What Python code reaches of Ebbflow.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::client::Client;
    #[pymodule_export]
    use super::events::{Events, Waiting};
    #[pymodule_export]
    use super::program::main;
    #[pymodule_export]
    use super::run::run;
    #[pymodule_export]
    use super::session::{Evaluate, Region, Session, Train};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

/// Shows a notice to the user, through the logger `ebbflow` of Python.
fn log(text: &str) {
    let logged = Python::try_attach(|py| {
        let logger = py.import("logging")?.call_method1("getLogger", ("ebbflow",))?;
        logger.call_method1("warning", ("%s", text)).map(drop)
    });
    if let Some(Err(error)) = logged {
        Python::attach(|py| error.write_unraisable(py, None));
    }
}

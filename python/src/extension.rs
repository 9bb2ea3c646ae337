//! The functions and classes of the module, as `python/ebbflow/_native.pyi` lists them.

mod client;
mod error;
mod events;
mod follow;
mod job;
mod log;
mod program;
mod run;
mod script;
mod secrets;
mod session;
mod source;
mod torchscript;
mod wait;
mod warnings;

use log::log;
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
    use super::script::Logs;
    #[pymodule_export]
    use super::session::{Evaluate, Region, Session, Train, loss_scale, microbatch_key};
    #[pymodule_export]
    use super::source::Source;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::log::close_at_exit(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

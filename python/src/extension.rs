//! The functions and classes of the module, in the order of `python/ebbflow/_native.pyi`.

mod program;

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
    use super::program::main;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

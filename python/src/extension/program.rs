//! The program `ebb` inside a Python process.

use std::ffi::OsString;

use pyo3::prelude::*;

use super::torchscript;

/// Runs `ebb` with these arguments, of which the first is the program's name. Returns its exit
/// code.
///
/// The program listens for Ctrl-C and SIGTERM itself, in place of Python. Like the Rust program,
/// verbs that compute end the process here, and so do wrong arguments.
#[pyfunction]
pub(super) fn main(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| ebbflow::main_with(arguments, torchscript::registry()))
}

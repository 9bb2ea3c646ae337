//! Exceptions of `ebbflow.errors`, made of errors of the client.

use pyo3::prelude::*;

use crate::failure;

/// Returns an exception for an error of the client.
pub(super) fn raised(error: &client::Error) -> PyErr {
    exception(failure::class(error), &failure::message(error))
}

/// Returns an exception of this class of `ebbflow.errors`.
pub(super) fn exception(class: &str, message: &str) -> PyErr {
    Python::attach(|py| {
        let made = py.import("ebbflow.errors").and_then(|errors| errors.getattr(class)?.call1((message,)));
        made.map_or_else(|error| error, PyErr::from_value)
    })
}

//! What a process shows to a cluster and trusts, as Python says it.

use std::path::PathBuf;

use client::security::{Keys, Options};
use pyo3::prelude::*;

use super::error::exception;

/// The token and the certificates of a process.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Secrets {
    token: Option<String>,
    token_file: Option<PathBuf>,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    insecure: bool,
}

impl Secrets {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be read, or the files do not belong together.
    pub(super) fn keys(self) -> PyResult<Keys> {
        let Self { token, token_file, ca, cert, key, insecure } = self;
        let options = Options { ca, cert, key, token: token_file, tokens: None, insecure };
        let keys = match token {
            Some(token) => Keys::with_token(options, &token),
            None => Keys::load(options),
        };
        keys.map_err(|error| exception("AccessError", &error.to_string()))
    }
}

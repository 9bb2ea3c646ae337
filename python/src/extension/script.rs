//! A script as Python gives it, and what its processes say.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use client::ScriptSubmission;
use proto::pb;
use pyo3::prelude::*;

use super::error::raised;
use super::wait::wait;

/// A script that is not checked yet.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Script {
    path: PathBuf,
    /// Empty: the name of the file.
    name: String,
    arguments: Vec<String>,
    variables: Vec<(String, String)>,
    workers: u32,
    /// Names of variables whose values are secrets.
    secrets: Vec<String>,
    /// Their values, for names that have one. Nobody prints them.
    values: BTreeMap<String, OsString>,
}

impl Script {
    /// Returns the checked script, with the files of its folder.
    ///
    /// # Errors
    /// The script cannot travel, or an argument is wrong.
    pub(super) fn read(self) -> client::Result<ScriptSubmission> {
        let Self { path, name, arguments, variables, workers, secrets, values } = self;
        let variable = |(name, value)| pb::Variable { name, value };
        let variables = variables.into_iter().map(variable).collect();
        let entry = String::new();
        let wish = pb::Script { name, entry, arguments, variables, processes: workers, secrets };
        ScriptSubmission::read(&path, wish, |name| values.get(name).cloned())
    }
}

/// What the processes of a script say.
#[pyclass(module = "ebbflow._native", frozen)]
#[derive(Debug)]
pub(super) struct Logs(Arc<tokio::sync::Mutex<client::Logs>>);

impl Logs {
    pub(super) fn new(logs: client::Logs) -> Self {
        Self(Arc::new(tokio::sync::Mutex::new(logs)))
    }
}

#[pymethods]
impl Logs {
    /// Waits for the next lines. `None`: there are no more.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Vec<String>>> {
        let logs = self.0.clone();
        wait(py, || async move { logs.lock().await.next().await })?.map_err(|error| raised(&error))
    }
}

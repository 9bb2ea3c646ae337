//! A job as Python gives it: the text of a job file, and what goes with it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use client::{Start, Submission};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use store::Stores;

use super::error::raised;

/// A job that is not checked yet.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Job {
    /// The text of a job file, or `None` for the file at `path`.
    text: Option<String>,
    /// Names the text in errors. Relative paths start from its folder.
    path: PathBuf,
    /// `KEY=VALUE`, as `ebb run --set` takes it.
    overrides: Vec<String>,
    /// `new`, `resume` or `resume_anyway`.
    start: String,
    /// Credentials, regions and endpoints of object stores, under their usual names.
    stores: BTreeMap<String, String>,
}

impl Job {
    /// Returns the checked job, and the stores that its URLs lead to.
    ///
    /// # Errors
    /// A file cannot be read, or the job is wrong.
    pub(super) fn read(self) -> PyResult<(Submission, Stores)> {
        let Self { text, path, overrides, start, stores } = self;
        let submission = match text {
            Some(text) => Submission::parse(&text, &path, &overrides),
            None => Submission::read(&path, &overrides),
        };
        let mut submission = submission.map_err(|error| raised(&error))?;
        submission.start = self::start(&start)?;
        if submission.start != Start::New && submission.spec.checkpoint.is_none() {
            return Err(raised(&client::Error::NothingToResume));
        }
        Ok((submission, Stores::new(stores)))
    }
}

fn start(word: &str) -> PyResult<Start> {
    match word {
        "new" => Ok(Start::New),
        "resume" => Ok(Start::Resume),
        "resume_anyway" => Ok(Start::ResumeAnyway),
        _ => Err(PyValueError::new_err(format!("start `{word}`: expected new, resume or resume_anyway"))),
    }
}

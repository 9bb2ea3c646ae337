//! Records of data files for `ebbflow.data`: the section `[data]` of a job, and a look at its
//! records without a job.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use data::Dataset;
use proto::ids::Epoch;
use proto::spec::{DataSet, JobSpec, PROGRAM};
use pyo3::prelude::*;

use super::error::exception;
use super::session::Region;
use super::wait::wait;
use crate::failure::message;

/// The section `[data]` of a job that a program drives, with training files alone.
#[pyclass(frozen, module = "ebbflow._native")]
pub(super) struct Source {
    spec: JobSpec,
    /// The records, once something asked for them. They stay open for the job.
    records: Arc<Mutex<Option<Arc<Dataset>>>>,
}

#[pymethods]
impl Source {
    /// Checks a section. This process reads object stores with the settings `stores` from now on.
    #[new]
    fn new(section: &str, stores: BTreeMap<String, String>) -> PyResult<Self> {
        let wrong = |error: &dyn std::error::Error| exception("InvalidJobError", &message(error));
        let section: serde_json::Value = serde_json::from_str(section).map_err(|error| wrong(&error))?;
        // A job has other settings beside this section.
        let job = serde_json::json!({
            "name": "source",
            "epochs": 1,
            "model": { "builtin": PROGRAM, "loss": "module" },
            "data": section,
            "batch": { "micro": 1 },
            "optimizer": { "kind": "sgd", "learning_rate": 1.0 },
        });
        let mut spec = JobSpec::from_json(&job.to_string()).map_err(|error| wrong(&error))?;
        spec.settle_data(&std::env::current_dir()?);
        data::use_store_settings(stores);
        Ok(Self { spec, records: Arc::default() })
    }

    /// The section as JSON, with paths that do not depend on the working directory.
    fn section(&self) -> PyResult<String> {
        serde_json::to_string(&self.spec.data)
            .map_err(|error| exception("InvalidJobError", &error.to_string()))
    }

    /// Counts the training records.
    fn count(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.len())
    }

    /// Returns the columns of one training record, as [`Region::of_batch`] does.
    fn record(&self, py: Python<'_>, record: u64) -> PyResult<Vec<(String, &'static str, Region)>> {
        let records = self.open(py)?;
        let batch = interruptible(py, move || records.batch(Epoch(0), [record]))?
            .map_err(|error| exception("RecordError", &message(&error)))?;
        Ok(Region::of_batch(&batch.shared()))
    }
}

impl Source {
    fn open(&self, py: Python<'_>) -> PyResult<Arc<Dataset>> {
        let (kept, mut spec) = (self.records.clone(), self.spec.clone());
        let opened = interruptible(py, move || {
            let mut records = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(records) = &*records {
                return Ok(records.clone());
            }
            spec.data = data::without_patterns(&spec.data, None)?;
            let opened = Dataset::open(&spec, DataSet::Train, None)?;
            *records = Some(opened.clone());
            Ok(opened)
        });
        opened?.map_err(|error: data::Error| exception("InvalidJobError", &message(&error)))
    }
}

/// Reads on another thread, so that Ctrl-C ends the wait.
fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    read: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let read = wait(py, || tokio::task::spawn_blocking(read))?;
    read.map_err(|error| exception("EbbflowError", &error.to_string()))
}

//! A whole job in this process: master, ps and workers, without sockets.

use std::path::PathBuf;
use std::time::Duration;

use client::{Local, Notices, Options, report};
use ebbflow::model::device::{Choice, spread, workers as workers_on};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use worker::device::Chosen;

use super::error::{exception, raised};
use super::job::Job;
use super::wait::{runtime, wait};
use super::{follow, torchscript};

/// Longest time of a call inside this process.
const PATIENCE: Duration = Duration::from_secs(30);

/// The cluster of a job in this process.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Cluster {
    workers: Option<u32>,
    ps: Option<u32>,
    threads: usize,
    device: String,
    data_root: Option<PathBuf>,
    data_patience: String,
}

/// Trains a job in this process. Returns its state as JSON, and the bytes of its model if there is
/// no folder `out`.
///
/// Ctrl-C ends the cluster at once. What was trained is lost, except checkpoints.
#[pyfunction]
pub(super) fn run<'py>(
    py: Python<'py>,
    job: Job,
    cluster: Cluster,
    out: Option<PathBuf>,
    on_event: &Bound<'py, PyAny>,
) -> PyResult<(String, Option<Bound<'py, PyBytes>>)> {
    let Cluster { workers, ps, threads, device, data_root, data_patience } = cluster;
    for (name, number) in [("workers", workers), ("ps", ps), ("threads", u32::try_from(threads).ok())] {
        if number == Some(0) {
            return Err(PyValueError::new_err(format!("{name}=0: expected at least 1")));
        }
    }
    let device: Choice =
        device.parse().map_err(|error| exception("InvalidJobError", &format!("device: {error}")))?;
    let data_patience = ebbflow::data::parse_patience(&data_patience)
        .map_err(|error| exception("InvalidJobError", &format!("data_patience: {error}")))?;
    let (mut submission, stores) = job.read()?;
    let (registry, resumes) = (torchscript::registry(), submission.start != client::Start::New);
    ebbflow::data::use_store_settings(stores.settings().clone());
    ebbflow::data::be_patient_for(data_patience);
    wait(py, || async { submission.ready_for_here(&stores, &registry, data_root.as_deref()).await })?
        .map_err(|error| raised(&error))?;
    submission.fit_fleet(workers, ps);

    let fleet = submission.spec.fleet;
    let device =
        device.for_job(fleet.device).map_err(|error| exception("InvalidJobError", &error.to_string()))?;
    let chosen = py.detach(|| worker::device::chosen(&device));
    // The wheel's own networks compute on the CPU, so a fallback is no news.
    let Chosen { devices, .. } = chosen.map_err(|error| exception("ClusterError", &error.to_string()))?;
    let keeps_model = out.is_none();
    let out = out.map(|dir| follow::folder(&dir, resumes)).transpose()?;
    let workers = workers_on(&devices, workers, fleet.workers.min, fleet.workers.max);
    let devices = spread(&devices, workers);
    let registry = registry.for_job(&submission.spec);
    let options = Options { devices, ps: fleet.ps, threads, data_root, data_patience, ..Options::default() };
    // An interrupt drops the cluster, which ends its tasks.
    let mut local = wait(py, || async { Local::start(options, stores, registry).await })?
        .map_err(|error| raised(&error))?;
    // Connections belong to the runtime in which they are made.
    let _in_runtime = runtime(py)?.enter();
    let client = local.client(PATIENCE).with_notices(Notices::new(|notice| super::log(&notice.to_string())));
    let sender = client.clone();
    let name =
        wait(py, || async move { sender.submit(submission).await })?.map_err(|error| raised(&error))?.name;
    let status = follow::follow(py, &client, &name, out, on_event, Some(&mut local))?;
    let ended = status.clone();
    let weights = match keeps_model {
        true => wait(py, || async move { client.weights(&ended).await })?.map_err(|error| raised(&error))?,
        false => None,
    };
    wait(py, || local.stop())?;
    Ok((report::json(&status).to_string(), weights.map(|bytes| PyBytes::new(py, &bytes))))
}

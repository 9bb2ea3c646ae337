//! The client of a master, as `ebbflow.Client` uses it. A job's state is JSON.

use std::path::PathBuf;
use std::time::Duration;

use client::results::WorstRecords;
use client::{Dialer, JobStatus, Notices, report};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::error::{exception, raised};
use super::events::Events;
use super::follow;
use super::job::Job;
use super::script::{Logs, Script};
use super::secrets::Secrets;
use super::session::cluster::through;
use super::wait::{runtime, wait};

/// A line and an image of each record, and a message of TensorBoard.
pub(super) type Worst<'py> = (Vec<(String, Option<Bound<'py, PyBytes>>)>, Bound<'py, PyBytes>);

/// Returns the worst records of a job for Python.
pub(super) fn shown(py: Python<'_>, found: WorstRecords) -> Worst<'_> {
    let WorstRecords { records, summary } = found;
    let image = |image: Option<Vec<u8>>| image.map(|image| PyBytes::new(py, &image));
    let records = records.into_iter().map(|(line, found)| (line, image(found))).collect();
    (records, PyBytes::new(py, &summary))
}

/// A user's connection to a master.
#[pyclass(module = "ebbflow._native", frozen)]
#[derive(Debug)]
pub(super) struct Client {
    client: client::Client,
    /// The process that made it. Connections do not survive a fork.
    process: u32,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (url, secrets, timeout_secs, agent=None))]
    fn new(
        py: Python<'_>,
        url: &str,
        secrets: Secrets,
        timeout_secs: f64,
        agent: Option<i32>,
    ) -> PyResult<Self> {
        let patience = Duration::try_from_secs_f64(timeout_secs)
            .map_err(|error| exception("InvalidJobError", &format!("timeout: {error}")))?;
        let keys = secrets.keys()?;
        // Connections belong to the runtime in which they are made.
        let _in_runtime = runtime(py)?.enter();
        let dialer = match agent {
            Some(number) => through(number).map_err(|reason| exception("AccessError", &reason))?,
            None => Dialer::nearest().with(keys),
        };
        let client = client::Client::new(&dialer, url, patience);
        let notices = Notices::new(|notice| super::log(&notice.to_string()));
        let client = client.map_err(|error| raised(&error))?.with_notices(notices);
        Ok(Self { client, process: std::process::id() })
    }

    /// Sends a job; returns its name and its number.
    fn submit(&self, py: Python<'_>, job: Job) -> PyResult<(String, u64)> {
        let (mut submission, stores) = job.read()?;
        let reply = self.call(py, async move |client| {
            submission.ready_for_master(&stores).await?;
            client.submit(submission).await
        })?;
        Ok((reply.name, reply.job))
    }

    /// Sends a script with the files of its folder; returns the name and the number of its job.
    fn submit_script(&self, py: Python<'_>, script: Script) -> PyResult<(String, u64)> {
        let submission = py.detach(|| script.read()).map_err(|error| raised(&error))?;
        let reply = self.call(py, async move |client| client.submit_script(submission).await)?;
        Ok((reply.name, reply.job))
    }

    /// Returns what the processes of a script said, or `worker` alone: its number, or a name that
    /// ends with it.
    fn logs(&self, py: Python<'_>, job: &str, worker: Option<&str>, follow: bool) -> PyResult<Logs> {
        let number = |text| {
            client::logs::process(text).ok_or_else(|| {
                let expected = "a number, or a name that ends with one, such as train-7-0";
                exception("InvalidJobError", &format!("worker {text:?}: expected {expected}"))
            })
        };
        let process = worker.map(number).transpose()?;
        let logs = self.call(py, async |client| client.logs(job, process, follow).await)?;
        Ok(Logs::new(logs))
    }

    fn status(&self, py: Python<'_>, job: &str) -> PyResult<String> {
        self.state(py, async |client| client.status(job).await)
    }

    fn list(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let jobs = self.call(py, async |client| client.list().await)?;
        Ok(jobs.iter().map(|status| report::json(status).to_string()).collect())
    }

    fn scale(&self, py: Python<'_>, job: &str, workers: u32) -> PyResult<String> {
        self.state(py, async |client| client.scale(job, workers).await)
    }

    fn pause(&self, py: Python<'_>, job: &str) -> PyResult<String> {
        self.state(py, async |client| client.pause(job).await)
    }

    fn resume(&self, py: Python<'_>, job: &str, numerics: Option<&str>) -> PyResult<String> {
        self.state(py, async |client| client.resume(job, numerics).await)
    }

    fn cancel(&self, py: Python<'_>, job: &str, force: bool) -> PyResult<String> {
        self.state(py, async |client| client.cancel(job, force).await)
    }

    /// Returns the events of a job, from its first one on.
    fn watch(&self, py: Python<'_>, job: &str) -> PyResult<Events> {
        // A name alone means the newest job; it stays this one.
        let name = self.call(py, async |client| client.status(job).await)?.name;
        Ok(Events::new(self.client.follow(&name)))
    }

    /// Follows a job to its end; returns its state.
    fn follow(
        &self,
        py: Python<'_>,
        job: &str,
        out: Option<PathBuf>,
        resumes: bool,
        on_event: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let name = self.call(py, async |client| client.status(job).await)?.name;
        let out = out.map(|dir| follow::folder(&dir, resumes)).transpose()?;
        let status = follow::follow(py, &self.client, &name, out, on_event, None)?;
        Ok(report::json(&status).to_string())
    }

    /// Writes the results of an ended job into a folder; returns the job's state.
    #[expect(clippy::needless_pass_by_value, reason = "Python gives no path by reference")]
    fn fetch(&self, py: Python<'_>, job: &str, out: PathBuf) -> PyResult<String> {
        let status = self.call(py, async |client| client.status(job).await)?;
        if !status.state().is_end() {
            let message = format!(
                "{} is {} and has no results yet; wait for it, or cancel it",
                status.name,
                status.state().name()
            );
            return Err(exception("NotEndedError", &message));
        }
        let out = follow::folder(&out, false)?;
        let ended = status.clone();
        self.call(py, async move |client| out.fetch(client, &ended).await)?;
        Ok(report::json(&status).to_string())
    }

    /// Returns the worst records of a job, each with its image, and what TensorBoard shows of them.
    fn worst<'py>(&self, py: Python<'py>, job: &str) -> PyResult<Worst<'py>> {
        let status = self.call(py, async |client| client.status(job).await)?;
        Ok(shown(py, WorstRecords::of(&status)))
    }

    /// Returns the bytes of an ended job's model, if it has one.
    fn weights<'py>(&self, py: Python<'py>, job: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let weights = self.call(py, async |client| {
            let status = client.status(job).await?;
            client.weights(&status).await
        })?;
        Ok(weights.map(|bytes| PyBytes::new(py, &bytes)))
    }
}

impl Client {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl AsyncFnOnce(&client::Client) -> client::Result<T> + Send,
    ) -> PyResult<T> {
        if self.process != std::process::id() {
            return Err(PyRuntimeError::new_err(
                "this client was made before the process forked; make another one in the new process",
            ));
        }
        let client = self.client.clone();
        wait(py, || async move { call(&client).await })?.map_err(|error| raised(&error))
    }

    fn state(
        &self,
        py: Python<'_>,
        call: impl AsyncFnOnce(&client::Client) -> client::Result<JobStatus> + Send,
    ) -> PyResult<String> {
        Ok(report::json(&self.call(py, call)?).to_string())
    }
}

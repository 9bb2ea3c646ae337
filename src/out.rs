//! `--out DIR`: the results of one job as files, the same whoever asked for them (`run`, `submit --follow`, `fetch`).
//!
//! `metrics.jsonl` and the TensorBoard file grow while the job trains; every other file is whole or not there, and
//! `summary.json` comes last, so a folder that has one is complete. A folder never mixes two jobs: once a job has begun, the
//! files of an earlier one are gone. One process writes into a folder at a time.

mod file;
pub(crate) mod metrics;
pub(crate) mod summary;
mod tensorboard;

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use proto::pb;
use proto::pb::artifact_part::Part;
use proto::status::Failure;
use sha2::{Digest, Sha256};

use self::file::{Whole, cannot_write};
use self::summary::{MODEL, Summary};
use crate::client::{self, Client};

const METRICS: &str = "metrics.jsonl";
const SUMMARY: &str = "summary.json";
const TENSORBOARD: &str = "tensorboard";

/// A folder for results, checked and locked.
#[derive(Debug)]
pub(crate) struct Out {
    dir: PathBuf,
    /// Keeps other processes out until this one ends.
    _lock: File,
    job: String,
    metrics: Option<File>,
    tensorboard: Option<(PathBuf, File)>,
    /// Whether a line was lost; then everything is written anew at the end.
    broken: bool,
}

impl Out {
    /// Creates the folder and finds out now, not after hours of training, whether it can be written.
    ///
    /// # Errors
    /// It cannot, or another process writes its results there.
    pub(crate) fn prepare(dir: &Path) -> Result<Self> {
        let what = || format!("--out {}: cannot write there; choose another folder", dir.display());
        if dir.exists() && !dir.is_dir() {
            bail!("--out {}: is a file; choose a folder", dir.display());
        }
        fs::create_dir_all(dir.join(TENSORBOARD)).with_context(what)?;
        for folder in [dir.to_owned(), dir.join(TENSORBOARD)] {
            let mut probe = Whole::create(&folder, "probe").with_context(what)?;
            probe.write(b"can this folder be written?").with_context(what)?;
        }
        let lock = File::open(dir).with_context(what)?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            bail!("--out {}: another process writes its results there; choose another folder", dir.display());
        }
        Ok(Self {
            dir: dir.to_owned(),
            _lock: lock,
            job: String::new(),
            metrics: None,
            tensorboard: None,
            broken: false,
        })
    }

    /// From here on the folder belongs to the job `name`: what an earlier one left is removed.
    ///
    /// # Errors
    /// The folder cannot be written any more.
    pub(crate) fn begin(&mut self, name: &str) -> Result<()> {
        // The summary first: without it nobody takes what is left for a whole result.
        for file in [SUMMARY, MODEL, "model.pt", METRICS] {
            remove(&self.dir.join(file))?;
        }
        let tensorboard = self.dir.join(TENSORBOARD);
        for entry in fs::read_dir(&tensorboard).with_context(|| cannot_write(&tensorboard))? {
            let path = entry.with_context(|| cannot_write(&tensorboard))?.path();
            if path.to_string_lossy().ends_with(tensorboard::SUFFIX) {
                remove(&path)?;
            }
        }
        let path = self.dir.join(METRICS);
        self.metrics = Some(File::create_new(&path).with_context(|| cannot_write(&path))?);
        self.tensorboard = None;
        self.job = name.to_owned();
        self.broken = false;
        Ok(())
    }

    /// Adds an event. A disk that is full for a while must not end the training: the first failure is returned for the user
    /// to see, later events are dropped, and [`finish`](Self::finish) writes all of them anew.
    ///
    /// # Errors
    /// The first that cannot be written.
    pub(crate) fn event(&mut self, event: &pb::Event) -> Result<()> {
        if self.broken {
            return Ok(());
        }
        let written = self.write_event(event);
        self.broken = written.is_err();
        written
    }

    fn write_event(&mut self, event: &pb::Event) -> Result<()> {
        if let (Some(line), Some(file)) = (metrics::line(event), &mut self.metrics) {
            // Not buffered: one line is one write, which whoever follows the file sees at once.
            file.write_all((line + "\n").as_bytes())
                .with_context(|| cannot_write(&self.dir.join(METRICS)))?;
        }
        if self.tensorboard.is_none() {
            let path = self.dir.join(TENSORBOARD).join(tensorboard::file_name(&self.job, event.unix_ms));
            let mut file = File::create(&path).with_context(|| cannot_write(&path))?;
            tensorboard::write_start(&mut file, event.unix_ms).with_context(|| cannot_write(&path))?;
            self.tensorboard = Some((path, file));
        }
        let Some((path, file)) = &mut self.tensorboard else { return Ok(()) };
        tensorboard::write_event(file, event).with_context(|| cannot_write(path))
    }

    /// Adds what a job that ended left: its files and the summary.
    ///
    /// # Errors
    /// A file cannot be written, or does not arrive whole.
    pub(crate) async fn finish(mut self, client: &Client, status: &pb::JobStatus) -> Result<Written> {
        if self.broken {
            self.begin(&status.name)?;
            self.replay(client).await?;
        }
        let mut files = Vec::new();
        if !status.artifacts.is_empty() {
            files = client.call(async |jobs| self.download(jobs, status).await).await??;
        }
        file::write(&self.dir, SUMMARY, Summary::new(status).to_text().as_bytes())?;
        files.extend([METRICS, SUMMARY, TENSORBOARD].map(str::to_owned));
        Ok(Written { dir: self.dir, files })
    }

    /// Adds all events of a job that ended.
    ///
    /// # Errors
    /// A file cannot be written, or the master does not answer.
    pub(crate) async fn replay(&mut self, client: &Client) -> Result<()> {
        let mut after = 0;
        loop {
            let mut events = client.watch(&self.job, after).await?;
            loop {
                match events.message().await.map_err(client::failure) {
                    Ok(Some(event)) => {
                        after = event.sequence;
                        self.event(&event)?;
                    }
                    Ok(None) => return Ok(()),
                    Err(failure) if failure.is_retryable() => break,
                    Err(failure) => return Err(failure.into()),
                }
            }
        }
    }

    /// Writes the job's files; a failure of the outer kind is one of the connection and worth another try.
    async fn download(
        &self,
        mut jobs: pb::jobs_client::JobsClient<tonic::transport::Channel>,
        status: &pb::JobStatus,
    ) -> Result<Result<Vec<String>>, Failure> {
        let request = pb::FetchRequest { job: status.name.clone() };
        let mut stream = jobs.fetch(request).await.map_err(client::failure)?.into_inner();
        let mut files = Vec::new();
        let mut current: Option<Download> = None;
        while let Some(message) = stream.message().await.map_err(client::failure)? {
            let step = match message.part {
                Some(Part::Header(header)) => {
                    let finished = current.take().map_or(Ok(()), Download::finish);
                    files.push(header.name.clone());
                    finished
                        .and_then(|()| Download::start(&self.dir, header))
                        .map(|next| current = Some(next))
                }
                Some(Part::Content(content)) => current.as_mut().map_or(Ok(()), |file| file.write(&content)),
                None => Ok(()),
            };
            if let Err(error) = step {
                return Ok(Err(error));
            }
        }
        let finished = current.map_or(Ok(()), Download::finish);
        let missing = status.artifacts.iter().find(|artifact| !files.contains(&artifact.name));
        let complete = || match missing {
            None => Ok(files),
            Some(artifact) => bail!("{}: the master did not send it; fetch again", artifact.name),
        };
        Ok(finished.and_then(|()| complete()))
    }
}

/// What is in the folder now.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    /// Where.
    pub(crate) dir: PathBuf,
    /// File names, the model first.
    pub(crate) files: Vec<String>,
}

/// One file on its way from the master.
struct Download {
    expected: pb::Artifact,
    file: Whole,
    size: u64,
    hash: Sha256,
}

impl Download {
    fn start(dir: &Path, expected: pb::Artifact) -> Result<Self> {
        proto::convert::artifact_name(&expected.name)?;
        if [METRICS, SUMMARY, TENSORBOARD].contains(&expected.name.as_str()) {
            bail!("{}: the model exports a file of this name, which belongs to the results", expected.name);
        }
        let file = Whole::create(dir, &expected.name)?;
        Ok(Self { expected, file, size: 0, hash: Sha256::new() })
    }

    fn write(&mut self, content: &[u8]) -> Result<()> {
        self.size += content.len() as u64;
        self.hash.update(content);
        self.file.write(content)
    }

    fn finish(self) -> Result<()> {
        let found = proto::artifact::hex(&self.hash.finalize());
        let pb::Artifact { name, size, sha256 } = &self.expected;
        if (self.size, &found) != (*size, sha256) {
            bail!(
                "{name}: arrived with {} bytes and SHA-256 {found}, expected {size} bytes and {sha256}; fetch again",
                self.size
            );
        }
        self.file.keep()
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot replace {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fake::{Fake, reach};
    use crate::out::metrics::tests::train;

    #[test]
    fn one_process_writes_into_a_folder_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = Out::prepare(dir.path()).unwrap();
        let error = Out::prepare(dir.path()).unwrap_err().to_string();
        assert!(error.contains("another process"), "{error}");
        drop(first);
        Out::prepare(dir.path()).unwrap();
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 1, "only the tensorboard folder stays of a preparation");
    }

    #[tokio::test]
    #[cfg(target_os = "linux")]
    async fn a_disk_that_was_full_for_a_while_costs_no_line() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let app = fake.app();
        let client = app.client(&reach(Duration::from_secs(5))).unwrap();
        let mut out = Out::prepare(dir.path()).unwrap();
        out.begin("line-3").unwrap();
        // The kernel's always-full device stands for the disk.
        out.metrics = Some(File::options().write(true).open("/dev/full").unwrap());
        let error = format!("{:#}", out.event(&train(0)).unwrap_err());
        assert!(error.contains(METRICS) && error.contains("No space left"), "{error}");
        out.event(&train(1)).unwrap();

        let status = fake.script().status.clone();
        out.finish(&client, &status).await.unwrap();
        let lines = fs::read_to_string(dir.path().join(METRICS)).unwrap();
        assert_eq!(lines.lines().count(), 3, "{lines}");
        assert!(dir.path().join(SUMMARY).exists());
    }
}

//! `--out DIR`: the results of one job as files, the same whoever asked for them (`run`, `submit --follow`, `fetch`).
//!
//! `metrics.jsonl` and the TensorBoard file grow while the job trains; every other file is whole or not there, and
//! `summary.json` comes last, so a folder that has one is complete. A folder never mixes two jobs: once a job has begun, the
//! files of an earlier one are gone, except for its model, which stays under another name until the new job has one: a mistake
//! must not cost a trained model. One process writes into a folder at a time.

mod file;
pub(crate) mod metrics;
pub(crate) mod summary;
mod tensorboard;

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use proto::artifact::SCRIPT;
use proto::pb;
use proto::pb::artifact_part::Part;
use proto::status::Failure;
use sha2::{Digest, Sha256};

pub(crate) use self::file::write as write_whole;
use self::file::{Whole, cannot_write};
use self::summary::{MODEL, Summary};
use crate::client::{self, Client};
use crate::terminal::screen::Screen;

/// What a trained model consists of.
const MODELS: [&str; 2] = [MODEL, SCRIPT];
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
    /// Of a job that goes on: the lines of before, which stay in front, and the TensorBoard files of before.
    earlier: (Vec<u8>, Vec<PathBuf>),
}

impl Out {
    /// Creates the folder and finds out now, not after hours of training, whether it can be written.
    ///
    /// # Errors
    /// It cannot, it has a model that nobody wrote as a result, or another process writes its results there.
    pub(crate) fn prepare(dir: &Path) -> Result<Self> {
        let what = || format!("--out {}: cannot write there; choose another folder", dir.display());
        if dir.exists() && !dir.is_dir() {
            bail!("--out {}: is a file; choose a folder", dir.display());
        }
        // Metrics are there from a job's first moment to its last, so a model without them is somebody's own.
        let is_ours = [SUMMARY, METRICS].iter().any(|name| dir.join(name).exists());
        if let Some(own) = MODELS.iter().find(|name| !is_ours && dir.join(name).exists()) {
            bail!(
                "--out {}: has a {own} that is no result of an earlier run (there is no {SUMMARY} or {METRICS}); move it away or choose another folder",
                dir.display()
            );
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
            earlier: (Vec::new(), Vec::new()),
        })
    }

    /// The job that comes goes on where the one before was: the events of before stay.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn resuming(mut self) -> Result<Self> {
        let metrics = self.dir.join(METRICS);
        if metrics.exists() {
            let lines = fs::read(&metrics).with_context(|| format!("cannot read {}", metrics.display()))?;
            self.earlier = (lines, self.boards()?);
        }
        Ok(self)
    }

    /// From here on the folder belongs to the job `name`: what an earlier one left is removed, its model is set aside.
    ///
    /// # Errors
    /// The folder cannot be written any more.
    pub(crate) fn begin(&mut self, name: &str, screen: &Screen) -> Result<()> {
        // The summary first: without it nobody takes what is left for a whole result. The metrics last: they show that a
        // model is a result.
        remove(&self.dir.join(SUMMARY))?;
        for model in MODELS {
            let (path, aside) = (self.dir.join(model), self.previous(model));
            if path.exists() {
                fs::rename(&path, &aside).with_context(|| format!("cannot set {} aside", path.display()))?;
                screen.line(&format!(
                    "note: the earlier {} is kept as {model}.previous until {name} has a model",
                    path.display()
                ));
            }
        }
        self.job = name.to_owned();
        self.begin_events()
    }

    /// Where an earlier job's file waits until this job has one.
    fn previous(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.previous"))
    }

    /// Makes place for all events from the first on.
    fn begin_events(&mut self) -> Result<()> {
        let metrics = self.dir.join(METRICS);
        remove(&metrics)?;
        let (lines, boards) = &self.earlier;
        self.boards()?.iter().filter(|path| !boards.contains(path)).try_for_each(|path| remove(path))?;
        let mut file = File::create_new(&metrics).with_context(|| cannot_write(&metrics))?;
        file.write_all(lines).with_context(|| cannot_write(&metrics))?;
        self.metrics = Some(file);
        self.tensorboard = None;
        self.broken = false;
        Ok(())
    }

    /// The TensorBoard files that are there.
    fn boards(&self) -> Result<Vec<PathBuf>> {
        let folder = self.dir.join(TENSORBOARD);
        let entries = fs::read_dir(&folder).with_context(|| cannot_write(&folder))?;
        let paths =
            entries.map(|entry| entry.map(|entry| entry.path()).with_context(|| cannot_write(&folder)));
        let is_ours = |path: &PathBuf| path.to_string_lossy().ends_with(tensorboard::SUFFIX);
        paths.filter(|path| path.as_ref().map_or(true, is_ours)).collect()
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

    /// Writes all that a job that ended left, events included.
    ///
    /// # Errors
    /// A file cannot be written, or does not arrive whole.
    pub(crate) async fn fetch(mut self, client: &Client, status: &pb::JobStatus) -> Result<Written> {
        self.begin(&status.name, client.screen())?;
        self.broken = true;
        self.finish(client, status).await
    }

    /// Adds what a job that ended left: its files and the summary. The model first, which is worth the most.
    ///
    /// # Errors
    /// A file cannot be written, or does not arrive whole.
    pub(crate) async fn finish(mut self, client: &Client, status: &pb::JobStatus) -> Result<Written> {
        let mut files = Vec::new();
        if !status.artifacts.is_empty() {
            files = client.call(async |jobs| self.download(jobs, status).await).await??;
            for model in MODELS {
                remove(&self.previous(model))?;
            }
        }
        if self.broken {
            self.replay(client).await.with_context(|| match files.is_empty() {
                true => format!("the events are missing in {}", self.dir.display()),
                false => format!("{} is complete, only the events are missing", files.join(" and ")),
            })?;
        }
        file::write(&self.dir, SUMMARY, Summary::new(status).to_text().as_bytes())?;
        files.extend([METRICS, SUMMARY, TENSORBOARD].map(str::to_owned));
        Ok(Written { dir: self.dir, files })
    }

    /// Writes all events of a job that ended anew.
    async fn replay(&mut self, client: &Client) -> Result<()> {
        self.begin_events()?;
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

    /// Writes the job's files, once all of them arrived; a failure of the outer kind is one of the connection and worth
    /// another try.
    async fn download(
        &self,
        mut jobs: pb::jobs_client::JobsClient<net::failover::Failover>,
        status: &pb::JobStatus,
    ) -> Result<Result<Vec<String>>, Failure> {
        let request = pb::FetchRequest { job: status.name.clone() };
        let mut stream = jobs.fetch(request).await.map_err(client::failure)?.into_inner();
        let (mut files, mut arrived) = (Vec::new(), Vec::new());
        let mut current: Option<Download> = None;
        while let Some(message) = stream.message().await.map_err(client::failure)? {
            let step = match message.part {
                Some(Part::Header(header)) => {
                    let finished = current.take().map(Download::finish).transpose();
                    files.push(header.name.clone());
                    finished.and_then(|file| {
                        arrived.extend(file);
                        current = Some(Download::start(&self.dir, header)?);
                        Ok(())
                    })
                }
                Some(Part::Content(content)) => current.as_mut().map_or(Ok(()), |file| file.write(&content)),
                None => Ok(()),
            };
            if let Err(error) = step {
                return Ok(Err(error));
            }
        }
        let finished = current.map(Download::finish).transpose();
        let missing = status.artifacts.iter().find(|artifact| !files.contains(&artifact.name));
        Ok(finished.and_then(|last| {
            if let Some(artifact) = missing {
                bail!("{}: the master did not send it; fetch again", artifact.name);
            }
            arrived.into_iter().chain(last).try_for_each(Whole::keep)?;
            Ok(files)
        }))
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

    fn finish(self) -> Result<Whole> {
        let found = proto::artifact::hex(&self.hash.finalize());
        let pb::Artifact { name, size, sha256 } = &self.expected;
        if (self.size, &found) != (*size, sha256) {
            bail!(
                "{name}: arrived with {} bytes and SHA-256 {found}, expected {size} bytes and {sha256}; fetch again",
                self.size
            );
        }
        Ok(self.file)
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

    #[tokio::test]
    async fn a_job_that_goes_on_keeps_the_events_of_before() {
        let (dir, app) = (tempfile::tempdir().unwrap(), Fake::new().app());
        let lines = || fs::read_to_string(dir.path().join(METRICS)).unwrap().lines().count();
        let boards = || fs::read_dir(dir.path().join(TENSORBOARD)).unwrap().count();
        let begun = |resume: bool| {
            let mut out = Out::prepare(dir.path()).unwrap();
            if resume {
                out = out.resuming().unwrap();
            }
            out.begin("line-3", &app.screen).unwrap();
            out
        };
        begun(true).event(&train(0)).unwrap();
        assert_eq!((lines(), boards()), (1, 1));
        let mut out = begun(true);
        let mut later = train(1);
        later.unix_ms += 60_000;
        out.event(&later).unwrap();
        assert_eq!((lines(), boards()), (2, 2));
        // Written anew, only its own are.
        out.begin_events().unwrap();
        assert_eq!((lines(), boards()), (1, 1));
        drop(out);
        drop(begun(false));
        assert_eq!((lines(), boards()), (0, 0));
    }

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
        out.begin("line-3", &app.screen).unwrap();
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

    #[tokio::test]
    async fn events_that_cannot_be_written_do_not_cost_the_model() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let app = fake.app();
        let client = app.client(&reach(Duration::from_secs(5))).unwrap();
        let mut out = Out::prepare(dir.path()).unwrap();
        out.begin("line-3", &app.screen).unwrap();
        out.broken = true;
        // Stands for a disk that has no place for them: the file cannot be made anew.
        fs::remove_file(dir.path().join(METRICS)).unwrap();
        fs::create_dir(dir.path().join(METRICS)).unwrap();

        let status = fake.script().status.clone();
        let error = format!("{:#}", out.finish(&client, &status).await.unwrap_err());
        assert!(error.contains("model.safetensors is complete") && error.contains(METRICS), "{error}");
        assert_eq!(fs::read(dir.path().join(MODEL)).unwrap(), b"weights");
        assert!(!dir.path().join(SUMMARY).exists());
    }

    #[tokio::test]
    async fn an_earlier_model_stays_aside_until_there_is_a_new_one() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let app = fake.app();
        let client = app.client(&reach(Duration::from_secs(5))).unwrap();
        for name in [MODEL, "model.pt", METRICS, SUMMARY] {
            fs::write(dir.path().join(name), "earlier").unwrap();
        }
        let aside = ["model.safetensors.previous", "model.pt.previous"].map(|name| dir.path().join(name));
        let failed = pb::JobStatus {
            artifacts: Vec::new(),
            state: pb::JobState::Failed.into(),
            ..pb::JobStatus::default()
        };
        for _ in 0..2 {
            let mut out = Out::prepare(dir.path()).unwrap();
            out.begin("line-2", &app.screen).unwrap();
            assert!(!dir.path().join(SUMMARY).exists());
            out.finish(&client, &failed).await.unwrap();
            assert!(aside.iter().all(|path| fs::read(path).unwrap() == b"earlier"));
            assert!(!MODELS.iter().any(|name| dir.path().join(name).exists()));
        }
        assert!(app.said().contains("kept as model.pt.previous until line-2"), "{}", app.said());

        let status = fake.script().status.clone();
        Out::prepare(dir.path()).unwrap().fetch(&client, &status).await.unwrap();
        assert_eq!(fs::read(dir.path().join(MODEL)).unwrap(), b"weights");
        assert!(!aside.iter().any(|path| path.exists()) && !dir.path().join("model.pt").exists());
    }

    #[test]
    fn a_model_that_is_no_result_is_refused_and_untouched() {
        for name in MODELS {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(name), "mine").unwrap();
            let error = Out::prepare(dir.path()).unwrap_err().to_string();
            assert!(error.contains(&format!("has a {name}")) && error.contains("move it away"), "{error}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was added");
        }
    }
}

//! The results of one job as files in a folder: `ebb run`, `ebb submit --follow` and `ebb fetch`
//! write the same ones.
//!
//! `metrics.jsonl` and the TensorBoard file grow while the job trains. Every other file is whole or
//! not there, and `summary.json` comes last, so a folder that has one is complete.
//!
//! A folder never mixes two jobs: once a job has begun, the files of an earlier job are gone. Only
//! the earlier model stays, under another name, until the new job has a model: a mistake must not
//! cost a trained model. One process writes into a folder at a time.

mod file;
pub mod metrics;
mod skipped;
mod table;
mod tensorboard;
mod upload;
mod worst;

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use proto::artifact::SCRIPT;
use proto::pb;

pub use self::file::write as write_whole;
use self::file::{Whole, file_error};
pub use self::upload::Copy;
pub(crate) use self::upload::copy_whole;
pub use self::worst::WorstRecords;
use crate::download::{Place, download};
use crate::report::{MODEL, Summary};
use crate::{Client, Error, Event, Followed, JobStatus, Kind, Notice, Notices, Result};

/// The files of a trained model.
const MODELS: [&str; 2] = [MODEL, SCRIPT];
const METRICS: &str = "metrics.jsonl";
const SUMMARY: &str = "summary.json";
const TENSORBOARD: &str = "tensorboard";
const WORST: &str = "worst.jsonl";

/// Bad records that the job left out. Absent if there are none.
const SKIPPED: &str = "skipped.jsonl";

/// The lock of a folder. It ends with this value, also if a child process that begins just then
/// still has a copy of the open file.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // If this fails, closing the file ends the lock.
        let _ = self.0.unlock();
    }
}

/// A folder for the results of a job, checked and locked.
#[derive(Debug)]
pub struct Folder {
    dir: PathBuf,
    /// Keeps other processes out until this one ends.
    _lock: Lock,
    job: String,
    metrics: Option<File>,
    tensorboard: Option<(PathBuf, File)>,
    /// Time of the newest event, in milliseconds since 1970.
    newest_unix_ms: u64,
    /// Evaluations of this job, by step and validation set.
    evaluations: BTreeMap<(u64, String), pb::EvaluationEvent>,
    /// A line was lost, so everything is written anew at the end.
    broken: bool,
    /// Lines and TensorBoard files of an earlier run that the job resumes. The lines stay in front.
    earlier: (Vec<u8>, Vec<PathBuf>),
    /// Where the results go too.
    copy: Option<Copy>,
}

impl Folder {
    /// Creates the folder and finds out now, not after hours of training, whether it can be
    /// written.
    ///
    /// # Errors
    /// The folder cannot be written, has a model that no job wrote there, or another process writes
    /// its results there.
    pub fn prepare(dir: &Path) -> Result<Self> {
        let owned = || dir.to_owned();
        let unwritable = |source: Error| Error::Unwritable { dir: owned(), source: Box::new(source) };
        if dir.exists() && !dir.is_dir() {
            return Err(Error::NoFolder { dir: owned() });
        }
        // Metrics are there from a job's first moment to its last, so a model without them is not
        // of a job.
        let is_ours = [SUMMARY, METRICS].iter().any(|name| dir.join(name).exists());
        if let Some(model) = MODELS.into_iter().find(|name| !is_ours && dir.join(name).exists()) {
            let evidence = format!("{SUMMARY} or {METRICS}");
            return Err(Error::NotOurs { dir: owned(), model, evidence });
        }
        fs::create_dir_all(dir.join(TENSORBOARD)).map_err(|error| unwritable(error.into()))?;
        for folder in [dir.to_owned(), dir.join(TENSORBOARD)] {
            let mut probe = Whole::create(&folder, "probe").map_err(unwritable)?;
            probe.write(b"can this folder be written?").map_err(unwritable)?;
        }
        let lock = File::open(dir).map_err(|error| unwritable(error.into()))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Error::InUse { dir: owned() });
        }
        Ok(Self {
            dir: dir.to_owned(),
            _lock: Lock(lock),
            job: String::new(),
            metrics: None,
            tensorboard: None,
            newest_unix_ms: 0,
            evaluations: BTreeMap::new(),
            broken: false,
            earlier: (Vec::new(), Vec::new()),
            copy: None,
        })
    }

    /// Sets the place to which the results are copied too, once they are complete.
    #[must_use]
    pub fn with_copy(self, copy: Option<Copy>) -> Self {
        Self { copy, ..self }
    }

    /// Returns the path of the folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the URL of the copy.
    pub fn copy(&self) -> Option<String> {
        self.copy.as_ref().map(ToString::to_string)
    }

    /// Keeps the events that are in the folder: the job that comes goes on where an earlier one
    /// was.
    ///
    /// # Errors
    /// The events cannot be read.
    pub fn resuming(mut self) -> Result<Self> {
        let metrics = self.dir.join(METRICS);
        if metrics.exists() {
            let lines = fs::read(&metrics).map_err(file_error("read", &metrics))?;
            self.earlier = (lines, self.boards()?);
        }
        Ok(self)
    }

    /// Gives the folder to the job `name`: removes what an earlier job left, and sets its model
    /// aside.
    ///
    /// # Errors
    /// The folder cannot be written any more.
    pub fn begin(&mut self, name: &str, notices: &Notices) -> Result<()> {
        // The summary first: without it nobody takes what is left for a whole result. The metrics
        // last: they show that a model is a result.
        remove(&self.dir.join(SUMMARY))?;
        remove(&self.dir.join(WORST))?;
        remove(&self.dir.join(SKIPPED))?;
        for file in MODELS {
            let (model, aside) = (self.dir.join(file), previous(file));
            if model.exists() {
                let renamed = fs::rename(&model, self.dir.join(&aside));
                renamed.map_err(|source| Error::SetAside { path: model.clone(), source })?;
                notices.tell(&Notice::SetAside { model, name: aside, job: name.to_owned() });
            }
        }
        self.job = name.to_owned();
        self.begin_events()
    }

    /// Makes place for all events from the first on.
    fn begin_events(&mut self) -> Result<()> {
        let metrics = self.dir.join(METRICS);
        remove(&metrics)?;
        let (lines, boards) = &self.earlier;
        self.boards()?.iter().filter(|path| !boards.contains(path)).try_for_each(|path| remove(path))?;
        let mut file = File::create_new(&metrics).map_err(file_error("write", &metrics))?;
        file.write_all(lines).map_err(file_error("write", &metrics))?;
        self.metrics = Some(file);
        self.tensorboard = None;
        self.evaluations.clear();
        self.broken = false;
        Ok(())
    }

    /// Returns the TensorBoard files in the folder.
    fn boards(&self) -> Result<Vec<PathBuf>> {
        let folder = self.dir.join(TENSORBOARD);
        let entries = fs::read_dir(&folder).map_err(file_error("write", &folder))?;
        let paths =
            entries.map(|entry| entry.map(|entry| entry.path()).map_err(file_error("write", &folder)));
        let is_ours = |path: &PathBuf| path.to_string_lossy().ends_with(tensorboard::SUFFIX);
        paths.filter(|path| path.as_ref().map_or(true, is_ours)).collect()
    }

    /// Adds an event.
    ///
    /// A disk that is full for a while must not end the training. So only the first failure is
    /// returned, for the user to see. Later events are dropped, and [`finish`](Self::finish) writes
    /// all of them anew.
    ///
    /// # Errors
    /// An event cannot be written, for the first time.
    pub fn event(&mut self, event: &Event) -> Result<()> {
        if self.broken {
            return Ok(());
        }
        let written = self.write_event(event);
        self.broken = written.is_err();
        written
    }

    fn write_event(&mut self, event: &Event) -> Result<()> {
        self.newest_unix_ms = event.unix_ms;
        match &event.kind {
            Kind::Evaluation(evaluation) => {
                let key = (evaluation.step, evaluation.set.clone());
                self.evaluations.insert(key, evaluation.clone());
            }
            Kind::Rewind(rewind) => self.evaluations.retain(|_, measured| measured.step <= rewind.version),
            _ => {}
        }
        if let (Some(line), Some(file)) = (metrics::line(event), &mut self.metrics) {
            // Not buffered: one line is one write, which a reader that follows the file sees at
            // once.
            let written = file.write_all((line + "\n").as_bytes());
            written.map_err(file_error("write", &self.dir.join(METRICS)))?;
        }
        if self.tensorboard.is_none() {
            let path = self.dir.join(TENSORBOARD).join(tensorboard::file_name(&self.job, event.unix_ms));
            let mut file = File::create(&path).map_err(file_error("write", &path))?;
            tensorboard::write_start(&mut file, event.unix_ms).map_err(file_error("write", &path))?;
            self.tensorboard = Some((path, file));
        }
        let Some((path, file)) = &mut self.tensorboard else { return Ok(()) };
        tensorboard::write_event(file, event).map_err(file_error("write", path))
    }

    /// Writes all that a job that ended left, its events included.
    ///
    /// # Errors
    /// A file cannot be written, or does not arrive whole.
    pub async fn fetch(mut self, client: &Client, status: &JobStatus) -> Result<Written> {
        self.begin(&status.name, client.notices())?;
        self.broken = true;
        self.finish(client, status).await
    }

    /// Adds what a job that ended left: its files and the summary. The model comes first, because
    /// it is worth the most.
    ///
    /// # Errors
    /// A file cannot be written, or does not arrive whole.
    pub async fn finish(mut self, client: &Client, status: &JobStatus) -> Result<Written> {
        let mut files = Vec::new();
        if !status.artifacts.is_empty() {
            let arrived = client.call(async |jobs| download(jobs, status, &self).await).await??;
            for (name, file) in arrived {
                file.keep()?;
                files.push(name);
            }
            for model in MODELS {
                remove(&self.dir.join(previous(model)))?;
            }
        }
        if self.broken
            && let Err(error) = self.replay(client).await
        {
            return Err(Error::EventsMissing { dir: self.dir, files, source: Box::new(error) });
        }
        let mut summary = Summary::new(status).with_evaluations(self.evaluations.values());
        if !status.worst.is_empty() {
            file::write(&self.dir, WORST, worst::lines(&status.worst).as_bytes())?;
            self.show_worst(status)?;
            files.push(WORST.to_owned());
            summary = summary.with_worst(WORST);
        }
        if let Some(skipped) = &status.skipped {
            file::write(&self.dir, SKIPPED, skipped::lines(skipped).as_bytes())?;
            files.push(SKIPPED.to_owned());
        }
        file::write(&self.dir, SUMMARY, summary.to_text().as_bytes())?;
        files.extend([METRICS, SUMMARY, TENSORBOARD].map(str::to_owned));
        let url = self.copy();
        let written = Written { dir: self.dir, files, copy: url };
        match self.copy {
            Some(copy) => copy.take(&written).await.map(|()| written),
            None => Ok(written),
        }
    }

    /// Adds the worst records to the TensorBoard file, which has the evaluation that found them.
    fn show_worst(&mut self, status: &JobStatus) -> Result<()> {
        let newest = self.evaluations.keys().next_back().map(|(step, _)| *step);
        let step = status.selection.as_ref().map(|selection| selection.best).or(newest);
        let Some((path, file)) = &mut self.tensorboard else { return Ok(()) };
        let written =
            tensorboard::write_worst(file, self.newest_unix_ms, step.unwrap_or_default(), &status.worst);
        written.map_err(file_error("write", path))
    }

    /// Writes all events of a job that ended anew.
    async fn replay(&mut self, client: &Client) -> Result<()> {
        self.begin_events()?;
        let mut follow = client.follow(&self.job);
        while let Followed::Event(event) = follow.next().await? {
            self.event(&event)?;
        }
        Ok(())
    }
}

impl Place for Folder {
    type File = Whole;

    fn start(&self, name: &str) -> Result<Option<Whole>> {
        if [METRICS, SUMMARY, TENSORBOARD, WORST, SKIPPED].contains(&name) {
            return Err(Error::Reserved { name: name.to_owned() });
        }
        Whole::create(&self.dir, name).map(Some)
    }

    fn write(file: &mut Whole, content: &[u8]) -> Result<()> {
        file.write(content)
    }
}

/// The content of a folder of results.
#[derive(Clone, Debug)]
pub struct Written {
    /// The folder.
    pub dir: PathBuf,
    /// File names, the model first.
    pub files: Vec<String>,
    /// URL of a copy.
    pub copy: Option<String>,
}

/// Returns the name that an earlier job's file has until this job has one.
fn previous(name: &str) -> String {
    format!("{name}.previous")
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(file_error("replace", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;
    use crate::fake::{Fake, train};

    /// Returns the message of an error and of all its causes.
    fn whole(error: &Error) -> String {
        let (mut text, mut cause) = (error.to_string(), error.source());
        while let Some(found) = cause {
            text += &format!(": {found}");
            cause = found.source();
        }
        text
    }

    #[test]
    fn a_job_that_goes_on_keeps_the_events_of_before() {
        let dir = tempfile::tempdir().unwrap();
        let lines = || fs::read_to_string(dir.path().join(METRICS)).unwrap().lines().count();
        let boards = || fs::read_dir(dir.path().join(TENSORBOARD)).unwrap().count();
        let begun = |resume: bool| {
            let mut out = Folder::prepare(dir.path()).unwrap();
            if resume {
                out = out.resuming().unwrap();
            }
            out.begin("line-3", &Notices::default()).unwrap();
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
        let first = Folder::prepare(dir.path()).unwrap();
        let error = Folder::prepare(dir.path()).unwrap_err().to_string();
        assert!(error.contains("another process"), "{error}");
        drop(first);
        Folder::prepare(dir.path()).unwrap();
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 1, "only the tensorboard folder stays of a preparation");
    }

    #[tokio::test]
    #[cfg(target_os = "linux")]
    async fn a_disk_that_was_full_for_a_while_costs_no_line() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let client = fake.client().0;
        let mut out = Folder::prepare(dir.path()).unwrap();
        out.begin("line-3", &Notices::default()).unwrap();
        // The kernel's always-full device stands for the disk.
        out.metrics = Some(File::options().write(true).open("/dev/full").unwrap());
        let error = whole(&out.event(&train(0)).unwrap_err());
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
        let client = fake.client().0;
        let mut out = Folder::prepare(dir.path()).unwrap();
        out.begin("line-3", &Notices::default()).unwrap();
        out.broken = true;
        // Stands for a disk that has no place for them: the file cannot be made anew.
        fs::remove_file(dir.path().join(METRICS)).unwrap();
        fs::create_dir(dir.path().join(METRICS)).unwrap();

        let status = fake.script().status.clone();
        let error = whole(&out.finish(&client, &status).await.unwrap_err());
        assert!(error.contains("model.safetensors is complete") && error.contains(METRICS), "{error}");
        assert_eq!(fs::read(dir.path().join(MODEL)).unwrap(), b"weights");
        assert!(!dir.path().join(SUMMARY).exists());
    }

    #[tokio::test]
    async fn the_worst_records_have_a_file_that_the_summary_names() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let client = fake.client().0;
        let found = pb::RecordLoss { record: 7, loss: 2.5, classes: vec![1], ..Default::default() };
        let worst =
            pb::WorstRecord { file: "v.csv".to_owned(), row: 3, found: Some(found), ..Default::default() };
        let with = JobStatus { worst: vec![worst], ..fake.script().status.clone() };
        let written = Folder::prepare(dir.path()).unwrap().fetch(&client, &with).await.unwrap();
        assert!(written.files.contains(&WORST.to_owned()), "{:?}", written.files);
        let lines = fs::read_to_string(dir.path().join(WORST)).unwrap();
        assert_eq!(lines, "{\"record\":7,\"file\":\"v.csv\",\"row\":3,\"loss\":2.5,\"label\":1}\n");
        let summary = || fs::read_to_string(dir.path().join(SUMMARY)).unwrap();
        assert!(summary().contains("\"worst\": \"worst.jsonl\""), "{}", summary());

        // The fake job was measured after step 2.
        let board = || {
            let file = fs::read_dir(dir.path().join(TENSORBOARD)).unwrap().next().unwrap().unwrap();
            tensorboard::tests::tags(&fs::read(file.path()).unwrap()).pop().unwrap()
        };
        assert_eq!(board(), (2, vec!["validation/worst".to_owned()]));
        let selection = Some(pb::Selection { best: 3, ..Default::default() });
        let with = JobStatus { selection, ..with };
        Folder::prepare(dir.path()).unwrap().fetch(&client, &with).await.unwrap();
        assert_eq!(board().0, 3);

        let without = JobStatus { worst: Vec::new(), ..with };
        Folder::prepare(dir.path()).unwrap().fetch(&client, &without).await.unwrap();
        assert!(!dir.path().join(WORST).exists() && !summary().contains("worst"), "{}", summary());
        assert_ne!(board().1, ["validation/worst"]);
    }

    #[tokio::test]
    async fn an_earlier_model_stays_aside_until_there_is_a_new_one() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let (client, told) = fake.client();
        for name in [MODEL, "model.pt", METRICS, SUMMARY] {
            fs::write(dir.path().join(name), "earlier").unwrap();
        }
        let aside = ["model.safetensors.previous", "model.pt.previous"].map(|name| dir.path().join(name));
        let failed = JobStatus {
            artifacts: Vec::new(),
            state: crate::JobState::Failed.into(),
            ..JobStatus::default()
        };
        for _ in 0..2 {
            let mut out = Folder::prepare(dir.path()).unwrap();
            out.begin("line-2", client.notices()).unwrap();
            assert!(!dir.path().join(SUMMARY).exists());
            out.finish(&client, &failed).await.unwrap();
            assert!(aside.iter().all(|path| fs::read(path).unwrap() == b"earlier"));
            assert!(!MODELS.iter().any(|name| dir.path().join(name).exists()));
        }
        let told = told.lines().join("\n");
        assert!(told.contains("kept as model.pt.previous until line-2"), "{told}");

        let status = fake.script().status.clone();
        Folder::prepare(dir.path()).unwrap().fetch(&client, &status).await.unwrap();
        assert_eq!(fs::read(dir.path().join(MODEL)).unwrap(), b"weights");
        assert!(!aside.iter().any(|path| path.exists()) && !dir.path().join("model.pt").exists());
    }

    #[test]
    fn a_model_that_is_no_result_is_refused_and_untouched() {
        for name in MODELS {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(name), "mine").unwrap();
            let error = Folder::prepare(dir.path()).unwrap_err().to_string();
            assert!(error.contains(&format!("has a {name}")) && error.contains("move it away"), "{error}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was added");
        }
    }
}

//! A job that is ready to be sent: the checked specification, and the files that go with it.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use data::Tokenizer;
use proto::artifact::{self, INITIAL, SCRIPT};
use proto::pb;
use proto::predictions::MANIFEST;
use proto::spec::{self, JobSpec, PredictSpec, Purpose, Transform};
use store::Stores;

use crate::report::MODEL;
use crate::{Error, Result, checkpoint};

/// The version that a job begins at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// Version 0.
    #[default]
    New,
    /// The newest checkpoint that an earlier run left at `checkpoint.url`.
    Resume,
    /// The newest checkpoint, even within an epoch that began with another seed, order, or data.
    ResumeAnyway,
}

/// A job that is ready to be sent.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The specification. `model.script` and `model.initial` name one of the artifacts. A transform
    /// `tokenize` has the hash of one of them.
    pub spec: JobSpec,
    /// Names and contents of the files that go with it.
    pub artifacts: Vec<(String, Bytes)>,
    /// The version that the job begins at.
    pub start: Start,
    /// Whether to take part in a job of this name that lives already, instead of submitting another
    /// one. Only for jobs that a program drives.
    pub join: bool,
    /// The script that this process is one of; 0: none. Only with `join`.
    pub script: u64,
    /// Folder that relative paths of the specification start from.
    base: PathBuf,
}

impl Submission {
    /// Creates a submission of a specification whose model needs no file, and reads the files of
    /// its tokenizers.
    ///
    /// # Errors
    /// The specification contradicts itself: every violation at once. Or a file cannot be read.
    pub fn new(spec: &JobSpec) -> Result<Self> {
        let mut spec = JobSpec::from_json(&spec.to_json())?;
        let mut artifacts = Vec::new();
        take_tokenizers(&mut spec, &mut artifacts)?;
        Ok(Self { spec, artifacts, start: Start::New, join: false, script: 0, base: PathBuf::new() })
    }

    /// Reads a job file, changes settings by `overrides` (`key=value`), checks everything that can
    /// be checked here, and reads the files of the model and of tokenizers. The weights to begin
    /// with are still to be read, see [`read_initial`](Self::read_initial).
    ///
    /// # Errors
    /// A file cannot be read, or the job file is wrong: every violation at once.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Self> {
        Self::read_by(spec::parse, path, overrides)
    }

    /// Reads a job file like [`read`](Self::read), and makes it a job that only evaluates or
    /// predicts, like [`measuring`](Self::measuring). Only that job is checked.
    ///
    /// # Errors
    /// Those of [`read`](Self::read) and of [`measuring`](Self::measuring).
    pub fn read_measuring(
        path: &Path,
        overrides: &[String],
        purpose: Purpose,
        model: &str,
        predict: Option<PredictSpec>,
    ) -> Result<Self> {
        Self::read_by(spec::parse_unchecked, path, overrides)?.measuring(purpose, model, predict)
    }

    fn read_by(
        parse: fn(&str, &Path, &[String]) -> proto::Result<JobSpec>,
        path: &Path,
        overrides: &[String],
    ) -> Result<Self> {
        let unread = |source| Error::JobFile { path: path.to_owned(), source };
        Self::parse_by(parse, &std::fs::read_to_string(path).map_err(unread)?, path, overrides)
    }

    /// Reads a job from the text of its file, like [`read`](Self::read). `path` names the text in
    /// errors. Relative paths in it start from the folder of `path`.
    ///
    /// # Errors
    /// The model's file cannot be read, or the text is wrong: every violation at once.
    pub fn parse(text: &str, path: &Path, overrides: &[String]) -> Result<Self> {
        Self::parse_by(spec::parse, text, path, overrides)
    }

    fn parse_by(
        parse: fn(&str, &Path, &[String]) -> proto::Result<JobSpec>,
        text: &str,
        path: &Path,
        overrides: &[String],
    ) -> Result<Self> {
        let mut spec = parse(text, path, overrides)?;
        let base = path.parent().unwrap_or(Path::new("")).to_owned();
        let mut artifacts = Vec::new();
        if let Some(script) = spec.model.script.take() {
            let content = read_script(&base.join(&script))?;
            spec.model.script = Some(SCRIPT.to_owned());
            artifacts.push((SCRIPT.to_owned(), content));
        }
        take_tokenizers(&mut spec, &mut artifacts)?;
        Ok(Self { spec, artifacts, start: Start::New, join: false, script: 0, base })
    }

    /// Makes it a job that only evaluates or predicts, with the weights `model`: a safetensors
    /// file, a folder of results or of checkpoints, or the URL of a folder of checkpoints. A
    /// relative path starts from the current folder.
    ///
    /// # Errors
    /// The job cannot do this: every violation at once.
    pub fn measuring(self, purpose: Purpose, model: &str, predict: Option<PredictSpec>) -> Result<Self> {
        let spec = self.spec.measuring(purpose, absolute(model)?, predict)?;
        Ok(Self { spec, start: Start::New, join: false, script: 0, ..self })
    }

    /// Checks that the file of the predictions, if the job makes some, does not exist yet. What is
    /// there later is then of this job alone.
    ///
    /// # Errors
    /// It exists, or its folder cannot be read.
    pub async fn check_free(&self, stores: &Stores) -> Result<()> {
        let Some(predict) = &self.spec.predict else { return Ok(()) };
        let (folder, file) = predict.place();
        let folder = stores.open(&folder)?;
        let parts = folder.below(&predict.parts_folder());
        for (folder, file) in [(&folder, file), (&parts, MANIFEST)] {
            match folder.size(file).await {
                Ok(_) => return Err(Error::Exists { file: folder.shown(file) }),
                Err(proto::checkpoint::Error::Missing { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads the weights that the job begins with, if it names some: a file, the model in a folder
    /// of results, or the newest checkpoint of a folder.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub async fn read_initial(&mut self, stores: &Stores) -> Result<()> {
        let Some(initial) = self.spec.model.initial.take() else { return Ok(()) };
        let content = self.initial(&initial, stores).await;
        let content = content.map_err(|error| Error::Initial { initial, source: Box::new(error) })?;
        self.spec.model.initial = Some(INITIAL.to_owned());
        self.artifacts.push((INITIAL.to_owned(), content));
        Ok(())
    }

    async fn initial(&self, initial: &str, stores: &Stores) -> Result<Bytes> {
        let path = self.base.join(initial);
        let is_url = initial.contains("://");
        if !is_url && !path.is_dir() {
            return Ok(std::fs::read(&path)?.into());
        }
        let result = path.join(MODEL);
        if !is_url && result.is_file() {
            return Ok(std::fs::read(&result)?.into());
        }
        let url = if is_url { initial.to_owned() } else { path.display().to_string() };
        Ok(checkpoint::newest_weights(stores, &url).await?.into())
    }

    /// Returns the messages of a submission: the specification, then each file in slices.
    pub(crate) fn into_messages(self) -> impl Iterator<Item = pb::SubmitRequest> + Send + use<> {
        use pb::artifact_part::Part;
        use pb::submit_request::Part as Message;
        let message = |part| pb::SubmitRequest { part: Some(part), ..Default::default() };
        let file = move |part| message(Message::Artifact(pb::ArtifactPart { part: Some(part) }));
        let files = self.artifacts.into_iter().flat_map(move |(name, content)| {
            let header = file(Part::Header(artifact::describe(&name, &content)));
            let slices = artifact::slices(&content).map(move |slice| file(Part::Content(slice)));
            std::iter::once(header).chain(slices)
        });
        let part = Some(Message::SpecJson(self.spec.to_json()));
        let resume = self.start != Start::New;
        let resume_anyway = self.start == Start::ResumeAnyway;
        let (join, script) = (self.join, self.script);
        std::iter::once(pb::SubmitRequest { part, resume, resume_anyway, join, script }).chain(files)
    }
}

/// Returns a URL as it is, and a path made absolute.
///
/// # Errors
/// The system does not know the current folder.
pub fn absolute(place: &str) -> Result<String> {
    if place.contains("://") {
        return Ok(place.to_owned());
    }
    let unknown = |source| Error::Path { path: place.to_owned(), source };
    Ok(std::path::absolute(place).map_err(unknown)?.display().to_string())
}

fn read_script(path: &Path) -> Result<Bytes> {
    let unread = |source| Error::Script { path: path.to_owned(), source };
    let content = std::fs::read(path).map_err(unread)?;
    // TorchScript files are zip archives; a state_dict or a weights file is the usual mistake.
    if !content.starts_with(b"PK") {
        return Err(Error::NotTorchScript { path: path.to_owned(), name: SCRIPT });
    }
    Ok(content.into())
}

/// Reads the tokenizers of a job's transforms. Each transform gets the hash of its file, and keeps
/// the file's name alone: processes that have the file in several folders describe one job.
fn take_tokenizers(spec: &mut JobSpec, artifacts: &mut Vec<(String, Bytes)>) -> Result<()> {
    for transform in spec.data.every_transform() {
        let Transform::Tokenize { file, sha256, .. } = transform else { continue };
        let content = read_tokenizer(file.as_ref())?;
        let hash = artifact::sha256_hex(&content);
        let name = artifact::tokenizer(&hash);
        *sha256 = Some(hash);
        if let Some(alone) = Path::new(&*file).file_name() {
            *file = alone.to_string_lossy().into_owned();
        }
        if artifacts.iter().all(|(other, _)| *other != name) {
            artifacts.push((name, content));
        }
    }
    Ok(())
}

fn read_tokenizer(path: &Path) -> Result<Bytes> {
    let content = std::fs::read(path).map_err(|source| Error::Tokenizer { path: path.to_owned(), source })?;
    match Tokenizer::read(&content) {
        Ok(_) => Ok(content.into()),
        Err(reason) => Err(Error::NotTokenizer { path: path.to_owned(), reason }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{JOB, job_file};

    #[test]
    fn a_script_travels_in_slices_under_the_name_that_the_engine_knows() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("models")).unwrap();
        let content = [b"PK".to_vec(), vec![7; artifact::SLICE_BYTES]].concat();
        std::fs::write(dir.path().join("models/net.pt"), &content).unwrap();
        let path = job_file(dir.path(), &JOB.replace("builtin = 'linear'", "script = 'models/net.pt'"));
        let submission = Submission::read(&path, &[]).unwrap();
        assert_eq!(submission.spec.model.script.as_deref(), Some("model.pt"));

        let messages: Vec<_> = submission.into_messages().collect();
        let [spec, header, first, second] = &messages[..] else { panic!("{} messages", messages.len()) };
        assert!(
            matches!(&spec.part, Some(pb::submit_request::Part::SpecJson(json)) if json.contains("model.pt"))
        );
        let part = |message: &pb::SubmitRequest| match &message.part {
            Some(pb::submit_request::Part::Artifact(part)) => part.part.clone().unwrap(),
            other => panic!("{other:?}"),
        };
        let pb::artifact_part::Part::Header(described) = part(header) else { panic!("no header") };
        assert_eq!(described, artifact::describe("model.pt", &content));
        let bytes = |message| match part(message) {
            pb::artifact_part::Part::Content(content) => content,
            pb::artifact_part::Part::Header(_) => panic!("a second header"),
        };
        assert_eq!([bytes(first), bytes(second)].concat(), content);
    }

    #[test]
    fn tokenizers_travel_once_under_the_name_of_their_hash() {
        let dir = tempfile::tempdir().unwrap();
        let list = "[{ op = 'tokenize', file = 't.json' }, { op = 'pad', length = 4 }]";
        let transforms = format!("transforms = {{ a = {list}, b = {list} }}\n");
        let path =
            job_file(dir.path(), &JOB.replace("format = 'csv'", &format!("format = 'csv'\n{transforms}")));
        let error = || Submission::read(&path, &[]).unwrap_err();
        assert!(
            matches!(error(), Error::Tokenizer { .. }) && error().to_string().contains("t.json"),
            "{}",
            error()
        );
        std::fs::write(dir.path().join("t.json"), "{}").unwrap();
        let message = error().to_string();
        assert!(
            message.contains("t.json: no tokenizer.json (") && message.contains("tokenizer.save"),
            "{message}"
        );

        let content: &[u8] = include_bytes!("../../tests/golden/tokens/wordpiece.json");
        std::fs::write(dir.path().join("t.json"), content).unwrap();
        let submission = Submission::read(&path, &[]).unwrap();
        let hash = artifact::sha256_hex(content);
        assert_eq!(submission.artifacts, [(artifact::tokenizer(&hash), Bytes::from_static(content))]);
        assert!(submission.spec.data.tokenizers().iter().eq([&hash]));
        assert!(artifact::is_tokenizer(&submission.artifacts[0].0) && !artifact::is_tokenizer(SCRIPT));
        let mut own = submission.spec.clone();
        own.settle_data(dir.path());
        let of_program = Submission::new(&own).unwrap();
        assert_eq!((of_program.spec, of_program.artifacts), (submission.spec, submission.artifacts));
    }

    #[test]
    fn a_missing_or_foreign_script_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = job_file(dir.path(), &JOB.replace("builtin = 'linear'", "script = 'net.pt'"));
        let error = || Submission::read(&path, &[]).unwrap_err();
        assert!(
            matches!(error(), Error::Script { .. }) && error().to_string().contains("net.pt"),
            "{}",
            error()
        );
        std::fs::write(dir.path().join("net.pt"), "weights").unwrap();
        assert!(error().to_string().contains("torch.jit.script"), "{}", error());
    }

    #[test]
    fn a_missing_job_file_is_named() {
        let error = Submission::read("no/such/job.toml".as_ref(), &[]).unwrap_err();
        assert!(error.to_string().contains("no/such/job.toml"), "{error}");
    }

    #[test]
    fn a_specification_of_a_program_is_checked_like_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let read = Submission::read(&job_file(dir.path(), JOB), &[]).unwrap();
        assert_eq!(Submission::new(&read.spec).unwrap().spec, read.spec);
        let mut wrong = read.spec;
        wrong.epochs = 0;
        assert!(Submission::new(&wrong).unwrap_err().to_string().contains("epochs"));
    }

    #[tokio::test]
    async fn weights_come_from_a_file_or_from_a_folder_of_results() {
        let dir = tempfile::tempdir().unwrap();
        let path = job_file(dir.path(), &format!("{JOB}[checkpoint]\nurl = 'c'\nevery_steps = 1\n"));
        let out = dir.path().join("out");
        std::fs::create_dir(&out).unwrap();
        std::fs::write(out.join(MODEL), b"weights").unwrap();
        let text = |path: PathBuf| path.display().to_string();
        for model in [text(out.clone()), text(out.join(MODEL))] {
            let read = Submission::read(&path, &["data.validation_fraction=0.5".to_owned()]).unwrap();
            let mut submission = read.measuring(Purpose::Evaluate, &model, None).unwrap();
            submission.read_initial(&Stores::default()).await.unwrap();
            assert_eq!(submission.artifacts, [(INITIAL.to_owned(), Bytes::from_static(b"weights"))]);
            assert_eq!((submission.spec.purpose, submission.spec.checkpoint), (Purpose::Evaluate, None));
        }
        let read = Submission::read(&path, &[]).unwrap();
        let error = read.measuring(Purpose::Evaluate, "w", None).unwrap_err().to_string();
        assert!(error.contains("data.validation: the job has no validation records"), "{error}");
    }

    #[tokio::test]
    async fn predictions_do_not_replace_what_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = job_file(dir.path(), JOB);
        let predicting = |file: &str| {
            let url = dir.path().join(file).display().to_string();
            let predict = Some(PredictSpec::new(proto::spec::DataSet::Train, url));
            Submission::read(&path, &[]).unwrap().measuring(Purpose::Predict, "w", predict).unwrap()
        };
        std::fs::write(dir.path().join("there.npy"), b"x").unwrap();
        std::fs::create_dir(dir.path().join("kept.npy.parts")).unwrap();
        std::fs::write(dir.path().join("kept.npy.parts").join(MANIFEST), b"{}").unwrap();
        std::fs::create_dir(dir.path().join("begun.npy.parts")).unwrap();
        for (file, found) in [
            ("there.npy", Some("there.npy")),
            ("kept.npy", Some(MANIFEST)),
            ("begun.npy", None),
            ("new.npy", None),
        ] {
            let checked = predicting(file).check_free(&Stores::default()).await;
            match found {
                None => checked.unwrap(),
                Some(found) => {
                    let error = checked.unwrap_err().to_string();
                    assert!(error.contains(found) && error.contains("exists"), "{error}");
                }
            }
        }
    }

    #[test]
    fn where_a_job_begins_is_said_in_the_first_message() {
        let dir = tempfile::tempdir().unwrap();
        let path = job_file(dir.path(), JOB);
        let first = |start| {
            let submission = Submission { start, ..Submission::read(&path, &[]).unwrap() };
            let first = submission.into_messages().next().unwrap();
            (first.resume, first.resume_anyway)
        };
        assert_eq!(first(Start::New), (false, false));
        assert_eq!(first(Start::Resume), (true, false));
        assert_eq!(first(Start::ResumeAnyway), (true, true));
    }
}

//! From a job file to what a master is sent: the checked specification and the files that go with it.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use proto::artifact::{self, INITIAL, SCRIPT};
use proto::pb;
use proto::spec::{self, JobSpec};
use store::Stores;

use crate::args::{GoOn, JobFile};
use crate::verbs::checkpoint;

/// A job that is ready to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Submission {
    /// What to do. `model.script` names one of the artifacts.
    pub(crate) spec: JobSpec,
    /// Files: name and content.
    pub(crate) artifacts: Vec<(String, Bytes)>,
    /// Whether it goes on from the newest checkpoint of an earlier run.
    pub(crate) resume: GoOn,
}

impl Submission {
    /// Reads the job file, applies `--set`, checks everything that can be checked here, and reads the model's file.
    ///
    /// # Errors
    /// A file cannot be read, or the job file is wrong; then everything that is wrong.
    pub(crate) fn read(file: &JobFile) -> Result<Self> {
        let path = &file.job;
        let text = std::fs::read_to_string(path).with_context(|| format!("job file {}", path.display()))?;
        let mut spec = spec::parse(&text, path, &file.overrides)?;
        let mut artifacts = Vec::new();
        if let Some(script) = spec.model.script.take() {
            let content = read_script(&path.parent().unwrap_or(Path::new("")).join(&script))?;
            spec.model.script = Some(SCRIPT.to_owned());
            artifacts.push((SCRIPT.to_owned(), content));
        }
        Ok(Self { spec, artifacts, resume: GoOn::default() })
    }

    /// Reads the weights that the job is to begin with: a file, or the newest checkpoint of a folder.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) async fn read_initial(&mut self, file: &JobFile, stores: &Stores) -> Result<()> {
        let Some(initial) = self.spec.model.initial.take() else { return Ok(()) };
        let path = file.job.parent().unwrap_or(Path::new("")).join(&initial);
        let what = || format!("model.initial: {initial}");
        let content = if initial.contains("://") || path.is_dir() {
            let url = if initial.contains("://") { initial.clone() } else { path.display().to_string() };
            checkpoint::newest_weights(stores, &url).await.with_context(what)?.into()
        } else {
            Bytes::from(std::fs::read(&path).with_context(what)?)
        };
        self.spec.model.initial = Some(INITIAL.to_owned());
        self.artifacts.push((INITIAL.to_owned(), content));
        Ok(())
    }

    /// As the master takes it: the specification, then each file in slices.
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
        let resume_anyway = self.resume.resume_anyway;
        let resume = self.resume.is_asked();
        std::iter::once(pb::SubmitRequest { part, resume, resume_anyway }).chain(files)
    }
}

fn read_script(path: &Path) -> Result<Bytes> {
    let content = std::fs::read(path).with_context(|| format!("model.script: {}", path.display()))?;
    // TorchScript files are zip archives; a state_dict or a weights file is the usual mistake.
    if !content.starts_with(b"PK") {
        bail!(
            "model.script: {} is no TorchScript file; write it with `torch.jit.script(model).save(\"{SCRIPT}\")`",
            path.display()
        );
    }
    Ok(content.into())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const JOB: &str = "name = 'line'\nepochs = 2\n[model]\nbuiltin = 'linear'\nloss = 'mse'\n[data]\n\
        format = 'csv'\ntrain = { features = ['line.csv'] }\n[batch]\nmicro = 4\n[optimizer]\nkind = 'sgd'\n\
        learning_rate = 0.1\n";

    pub(crate) fn write(dir: &Path, text: &str) -> JobFile {
        std::fs::write(dir.join("job.toml"), text).unwrap();
        JobFile { job: dir.join("job.toml"), overrides: Vec::new() }
    }

    #[test]
    fn a_script_travels_in_slices_under_the_name_that_the_engine_knows() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("models")).unwrap();
        let content = [b"PK".to_vec(), vec![7; artifact::SLICE_BYTES]].concat();
        std::fs::write(dir.path().join("models/net.pt"), &content).unwrap();
        let file = write(dir.path(), &JOB.replace("builtin = 'linear'", "script = 'models/net.pt'"));
        let submission = Submission::read(&file).unwrap();
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
    fn a_missing_or_foreign_script_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = write(dir.path(), &JOB.replace("builtin = 'linear'", "script = 'net.pt'"));
        let error = || format!("{:#}", Submission::read(&file).unwrap_err());
        assert!(error().contains("net.pt"), "{}", error());
        std::fs::write(dir.path().join("net.pt"), "weights").unwrap();
        assert!(error().contains("torch.jit.script"), "{}", error());
    }

    #[test]
    fn a_missing_job_file_is_named() {
        let file = JobFile { job: "no/such/job.toml".into(), overrides: Vec::new() };
        assert!(format!("{:#}", Submission::read(&file).unwrap_err()).contains("no/such/job.toml"));
    }
}

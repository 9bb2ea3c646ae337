//! `ebb fetch`: writes the results of an ended job, the same files that `ebb run --out` writes.

use anyhow::{Result, bail};

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// The job is not known or has not ended, the folder cannot be written, or the master does not
/// answer.
pub(crate) async fn run(args: args::Fetch, app: &App) -> Result<()> {
    let client = app.client(&args.one.reach)?;
    let status = client.status(&args.one.job).await?;
    if !status.state().is_end() {
        let [watch, cancel] =
            ["watch", "cancel"].map(|verb| app.command(verb, &status.name, &args.one.reach));
        bail!(
            "{} is {} and has no results yet; wait for it with `{watch}`, or stop it with `{cancel}`",
            status.name,
            report::state_with_reason(status.state(), &status.reason)
        );
    }
    let upload = app.upload(args.upload.url.as_deref(), false).await?;
    let written = app.out(&args.out, false)?.with_copy(upload).fetch(&client, &status).await?;
    app.show_result(&status, Ok(Some(written)), "", args.one.json).map(drop)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use client::JobState;

    use super::*;
    use crate::fake::{Fake, one_job};

    fn args(out: &std::path::Path) -> args::Fetch {
        args::Fetch { one: one_job("line", false), out: out.to_owned(), upload: args::Upload::default() }
    }

    fn names(dir: &std::path::Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn a_fetched_folder_has_every_file_and_nothing_of_an_earlier_job() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let app = fake.app();
        for file in ["model.pt", "metrics.jsonl", "summary.json", "notes.txt"] {
            std::fs::write(dir.path().join(file), "of an earlier job, or the user's").unwrap();
        }
        run(args(dir.path()), &app).await.unwrap();
        let expected = ["metrics.jsonl", "model.safetensors", "notes.txt", "summary.json", "tensorboard"];
        assert_eq!(names(dir.path()), expected);
        let again = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        assert_eq!(again.lines().count(), 3, "{again}");

        run(args(dir.path()), &app).await.unwrap();
        assert_eq!(names(dir.path()), expected);
        assert_eq!(std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap(), again);
        assert_eq!(names(&dir.path().join("tensorboard")).len(), 1);
    }

    #[tokio::test]
    async fn a_job_that_runs_has_nothing_to_fetch() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        fake.script().status.state = JobState::Running.into();
        let error = run(args(dir.path()), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("line-3 is running") && error.contains("watch line-3"), "{error}");
    }

    #[tokio::test]
    async fn a_file_that_does_not_arrive_whole_is_refused() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        fake.script().files[0].1 = Bytes::from_static(b"weight");
        let error = run(args(dir.path()), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("6 bytes") && error.contains("expected 7 bytes"), "{error}");
        assert!(!names(dir.path()).iter().any(|name| name.contains("model")), "{:?}", names(dir.path()));

        fake.script().files.clear();
        let error = run(args(dir.path()), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("did not send it"), "{error}");
        assert!(!dir.path().join("summary.json").exists());
    }
}

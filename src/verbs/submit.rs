//! `ebb submit`: sends a job to a master, and with `--follow` stays until it ends.

use anyhow::Result;
use client::results::Folder;
use client::{Client, Submission};
use proto::pb::SubmitReply;
use serde_json::json;

use crate::app::App;
use crate::args;
use crate::terminal::follow::Follow;
use crate::terminal::progress::Progress;

/// # Errors
/// The job file is wrong, the folder cannot be written, or the master does not answer or refuses
/// the job.
pub(crate) async fn run(args: args::Submit, app: &App) -> Result<bool> {
    if client::is_script(&args.file.job) {
        return super::script::submit::run(args, app).await;
    }
    super::script::submit::refuse_for_job(&args)?;
    let mut submission = Submission::read(&args.file.job, &args.file.overrides)?;
    submission.start = args.resume.start();
    submission.ready_for_master(&app.environment.stores).await?;
    let out = super::results(args.out.as_deref(), &args.upload, args.resume.is_asked(), app).await?;
    let client = app.client(&args.reach)?;
    let reply = client.submit(submission).await?;
    on_its_way(client, &reply, out, args, app).await
}

/// Says that a job was submitted, and follows it if the user wants that.
///
/// # Errors
/// Those of [`to_its_end`].
pub(super) async fn on_its_way(
    client: Client,
    reply: &SubmitReply,
    out: Option<Folder>,
    args: args::Submit,
    app: &App,
) -> Result<bool> {
    if !args.follow {
        app.screen.print(&if args.json {
            json!({ "job": reply.name, "id": reply.job }).to_string()
        } else {
            let watch = app.command("watch", &reply.name, &args.reach);
            format!("submitted {}; follow it with: {watch}", reply.name)
        })?;
        return Ok(true);
    }
    app.screen.line(&format!("submitted {}", reply.name));
    to_its_end(client, &reply.name, out, &args.reach, args.json, app).await
}

/// Follows a job of a master to its end, and shows its result. Its files go to `out`.
///
/// # Errors
/// The folder cannot be written, or the master does not answer any more.
pub(super) async fn to_its_end(
    client: Client,
    job: &str,
    out: Option<Folder>,
    reach: &args::Reach,
    json: bool,
    app: &App,
) -> Result<bool> {
    let dir = out.as_ref().map_or_else(|| "DIR".to_owned(), |out| out.dir().display().to_string());
    let upload = out.as_ref().and_then(Folder::copy).map(|url| format!(" --upload {url}"));
    let upload = upload.unwrap_or_default();
    let mut progress = Progress::new(app.screen.clone());
    let mut follow = Follow::new(client, job, out, app.screen.clone(), |event| progress.event(event))?;
    match follow.run(app.stop.token()).await? {
        None => {
            drop(follow);
            drop(progress);
            let [watch, cancel, fetch] =
                ["watch", "cancel", "fetch"].map(|verb| app.command(verb, job, reach));
            app.screen.line(&format!(
                "{job} goes on without you; see it again: {watch}; stop it: {cancel}; its results once it ended: {fetch} --out {dir}{upload}"
            ));
            Ok(false)
        }
        Some(status) => {
            let written = follow.finish(&status).await;
            drop(progress);
            app.show_result(&status, written, &app.results_elsewhere(&status.name, reach), json)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use client::pipe::Network;

    use super::*;
    use crate::fake::{Fake, app, job_args, reach};

    fn args(dir: &std::path::Path, out: Option<PathBuf>) -> args::Submit {
        let reach = reach(Duration::from_secs(120));
        args::Submit {
            file: job_args(dir),
            workers: None,
            name: None,
            variables: Vec::new(),
            secrets: Vec::new(),
            arguments: Vec::new(),
            reach,
            resume: args::GoOn::default(),
            follow: out.is_some(),
            out,
            upload: args::Upload::default(),
            json: false,
        }
    }

    fn read(path: impl AsRef<std::path::Path>) -> String {
        let path = path.as_ref();
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    #[tokio::test]
    async fn a_submitted_job_is_named_with_the_command_that_follows_it() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let app = fake.app();
        assert!(run(args(dir.path(), None), &app).await.unwrap());
        assert!(app.facts().contains("watch line-3"), "{}", app.facts());
        let spec = proto::spec::JobSpec::from_json(&fake.script().submitted[0]).unwrap();
        assert_eq!(spec.data.base.as_deref(), Some(dir.path()));
    }

    #[tokio::test]
    async fn following_leaves_the_whole_folder_even_when_the_connection_breaks() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        fake.script().breaks = [2, 1].into();
        let (app, out) = (fake.app(), dir.path().join("out"));
        assert!(run(args(dir.path(), Some(out.clone())), &app).await.unwrap(), "{}", app.said());
        let events: Vec<_> =
            read(out.join("metrics.jsonl")).lines().map(|line| line[..15].to_owned()).collect();
        assert_eq!(events, [r#"{"event":"train"#, r#"{"event":"train"#, r#"{"event":"eval""#]);
        assert_eq!(std::fs::read(out.join("model.safetensors")).unwrap(), b"weights");
        let summary: serde_json::Value = serde_json::from_str(&read(out.join("summary.json"))).unwrap();
        assert_eq!(summary["model_sha256"], proto::artifact::sha256_hex(b"weights"));
        assert_eq!(summary["status"], "succeeded");
        assert_eq!(summary["evaluations"].as_array().map(Vec::len), Some(1));
        assert_eq!(std::fs::read_dir(out.join("tensorboard")).unwrap().count(), 1);
        assert!(app.said().contains("the cable was pulled"), "{}", app.said());
        assert!(app.facts().contains("line-3 succeeded"), "{}", app.facts());
    }

    #[tokio::test]
    async fn leaving_says_how_to_come_back_and_the_job_goes_on() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        fake.script().endless = true;
        fake.script().events.pop();
        let (app, out) = (fake.app(), dir.path().join("out"));
        let stop = app.stop.token().clone();
        let watched = out.join("metrics.jsonl");
        let interrupt = async {
            while std::fs::read_to_string(&watched).map_or(0, |text| text.lines().count()) < 3 {
                tokio::task::yield_now().await;
            }
            stop.cancel();
        };
        let mut args = args(dir.path(), Some(out.clone()));
        args.reach.master.url = Some("http://127.0.0.1:9".to_owned());
        args.upload.url = Some(dir.path().join("copy").display().to_string());
        let (success, ()) = tokio::join!(run(args, &app), interrupt);
        assert!(!success.unwrap());
        let copy = format!("--upload {}/copy", dir.path().display());
        for part in ["watch line-3 --master http://127.0.0.1:9", "cancel line-3", "fetch line-3", &copy] {
            assert!(app.said().contains(part), "{part} missing in {}", app.said());
        }
        assert!(fake.script().cancelled.is_empty());
        assert!(!out.join("summary.json").exists());
    }

    #[tokio::test]
    async fn a_failed_job_is_no_success_and_says_why() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        fake.script().status.state = client::JobState::Failed.into();
        fake.script().status.reason = "line.csv: no such file".to_owned();
        fake.script().status.artifacts.clear();
        let (app, out) = (fake.app(), dir.path().join("out"));
        assert!(!run(args(dir.path(), Some(out.clone())), &app).await.unwrap());
        assert!(app.facts().contains("line.csv: no such file"), "{}", app.facts());
        let summary = read(out.join("summary.json"));
        assert!(summary.contains(r#""model_sha256": null"#), "{summary}");
        assert!(summary.contains(r#""reason": "line.csv: no such file""#), "{summary}");
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_written_is_found_before_the_job_is_sent() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        std::fs::write(dir.path().join("out"), "a file").unwrap();
        let app = fake.app();
        let error = run(args(dir.path(), Some(dir.path().join("out"))), &app).await.unwrap_err();
        assert!(error.to_string().contains("is a file"), "{error}");
        assert!(fake.script().submitted.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_master_nothing_is_sent() {
        let dir = tempfile::tempdir().unwrap();
        let error = run(args(dir.path(), None), &app(&Network::new())).await.unwrap_err().to_string();
        assert!(error.contains("no answer from the master"), "{error}");
    }
}

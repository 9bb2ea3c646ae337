//! What a token to submit does not reach: checkpoints elsewhere, and the disk of the master.

use std::path::{Path, PathBuf};
use std::time::Duration;

use net::channel::{Dialer, Purpose};
use net::security::door::{Door, Limits};
use net::security::{Keys, Options as KeyOptions, TokenRole, tokens};
use proto::artifact::{INITIAL, describe};
use proto::pb;
use proto::pb::artifact_part::Part;
use proto::pb::jobs_client::JobsClient;
use proto::pb::submit_request;
use proto::spec::{self, DataSet, JobSpec, PredictSpec};
use proto::status::{Failure, Kind};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use crate::harness::{Cluster, job, soon};
use crate::stores::saving;

/// A submission whose parts the test sends one by one.
struct Submission {
    parts: mpsc::Sender<submit_request::Part>,
    answer: JoinHandle<Result<pb::SubmitReply, Failure>>,
}

impl Submission {
    /// Announces a file, of which no byte comes yet.
    async fn begin(cluster: &Cluster, keys: &Keys, name: &str, file: &[u8]) -> Self {
        let submission = Self::of(cluster, keys, &named(name), false).await;
        submission.send_part(Part::Header(describe("extra", file))).await;
        submission
    }

    /// Sends a specification.
    async fn of(cluster: &Cluster, keys: &Keys, spec: &JobSpec, join: bool) -> Self {
        let dialer = Dialer::tcp().with(keys.clone());
        let mut jobs = JobsClient::new(dialer.channel(&cluster.url, Purpose::Control).expect("a URL"));
        let (parts, receiver) = mpsc::channel::<submit_request::Part>(1);
        let request = move |part| pb::SubmitRequest { part: Some(part), join, ..Default::default() };
        let requests = ReceiverStream::new(receiver).map(request);
        let call = async move { Ok(jobs.submit(requests).await?.into_inner()) };
        let submission = Self { parts, answer: tokio::spawn(call) };
        submission.send(submit_request::Part::SpecJson(spec.to_json())).await;
        submission
    }

    /// Ends without a file.
    async fn end(self) -> Result<pb::SubmitReply, Failure> {
        drop(self.parts);
        soon("an answer", self.answer).await.expect("no panic")
    }

    /// Where the master has ended the call nobody takes it.
    async fn send(&self, part: submit_request::Part) {
        let _ = self.parts.send(part).await;
    }

    async fn send_part(&self, part: Part) {
        self.send(submit_request::Part::Artifact(pb::ArtifactPart { part: Some(part) })).await;
    }

    /// Sends the file, and ends.
    async fn finish(self, file: &'static [u8]) -> Result<pb::SubmitReply, Failure> {
        self.send_part(Part::Content(file.into())).await;
        drop(self.parts);
        soon("an answer", self.answer).await.expect("no panic")
    }

    /// Returns the answer to a submission that is refused before it ends.
    async fn refused(self) -> Failure {
        soon("a refusal", self.answer).await.expect("no panic").expect_err("it is too much")
    }
}

fn named(name: &str) -> JobSpec {
    job(|spec| spec.name = name.to_owned())
}

/// Returns the keys of a server that knows one token, and those of its bearer, who may have files
/// of `bytes`.
fn keys(folder: &Path, bytes: u64) -> (Keys, Keys) {
    keys_of(folder, TokenRole::Submit, None, Some(bytes))
}

fn keys_of(folder: &Path, role: TokenRole, jobs_max: Option<u64>, bytes: Option<u64>) -> (Keys, Keys) {
    let text = "a-token-that-is-long-enough";
    let (list, token) = (folder.join("tokens.toml"), folder.join("token"));
    std::fs::write(&list, tokens::entry("anna", role, text, jobs_max, bytes, false)).expect("written");
    std::fs::write(&token, text).expect("written");
    let load = |options| Keys::load(options).expect("good keys");
    (
        load(KeyOptions { tokens: Some(list), ..KeyOptions::default() }),
        load(KeyOptions { token: Some(token), ..KeyOptions::default() }),
    )
}

/// Files that were announced and belong to no job yet.
fn on_their_way(cluster: &Cluster) -> usize {
    // A folder may go while it is looked at.
    let inside =
        |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    inside(cluster.folder().join("incoming")).flat_map(inside).flat_map(inside).count()
}

/// Returns the job of a program with a loop of its own.
fn driven(name: &str, records: &str) -> JobSpec {
    let spec = format!(
        r#"{{"name": "{name}", "epochs": 1, "model": {{"builtin": "python", "loss": "module"}},
             "data": {{"format": "index", "train": {{"files": ["{records}"]}}}}, "batch": {{"micro": 4}},
             "optimizer": {{"kind": "sgd", "learning_rate": 0.1}},
             "limits": {{"lease": "1h"}}}}"#
    );
    JobSpec::from_json(&spec).expect("a good job")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_for_programs_submits_and_joins_jobs_of_programs_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let (server, script) = keys_of(folder.path(), TokenRole::Script, Some(1), None);
    let cluster = Cluster::behind(Door::new(server, Limits::default()), |_| {}).await;
    let submit = async |spec: &JobSpec, join| Submission::of(&cluster, &script, spec, join).await.end().await;
    let refused = submit(&named("other"), false).await.unwrap_err();
    assert!(refused.kind == Kind::Denied && refused.message.contains("for ebbflow.join alone"), "{refused}");
    // The limit of jobs is for new ones.
    for _ in 0..2 {
        assert_eq!(submit(&driven("mine", "16"), true).await.expect("its own job").name, "mine-1");
    }
    let more = submit(&driven("more", "16"), true).await.unwrap_err();
    assert!(more.message.contains("jobs_max"), "{more}");
}

#[tokio::test]
async fn a_job_that_has_ended_is_joined_again_in_one_run_alone() {
    for (rejoin, expected) in [(false, "mine-2"), (true, "mine-1")] {
        let cluster = Cluster::with(|options| options.rejoin = rejoin).await;
        let keys = Keys::default();
        let join = async |spec: &JobSpec| Submission::of(&cluster, &keys, spec, true).await.end().await;
        assert_eq!(join(&driven("mine", "16")).await.expect("a new job").name, "mine-1");
        let lives = join(&driven("mine", "20")).await.unwrap_err();
        assert!(lives.message.contains("mine-1 lives, and this process describes another job"), "{lives}");
        let request = pb::CancelRequest { job: "mine".to_owned(), force: true };
        cluster.jobs().cancel(request).await.expect("it lives");
        cluster.reach("mine-1", pb::JobState::Cancelled).await;
        assert_eq!(join(&driven("mine", "16")).await.expect("a job").name, expected);
        assert_eq!(
            join(&driven("other", "16")).await.expect("a new job").name.split('-').next(),
            Some("other")
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_one_owner_count_together_while_they_are_on_their_way() {
    let folder = tempfile::tempdir().expect("a folder");
    let (server, anna) = keys(folder.path(), 10);
    let door = Door::new(server, Limits::default());
    let cluster = Cluster::behind(door, |options| options.stream_silence = Duration::from_secs(30)).await;
    let first = Submission::begin(&cluster, &anna, "first", b"123456").await;
    cluster.until("its place is made", |cluster| on_their_way(cluster) == 1).await;
    // Each alone is little enough; both together are not, although no job has any of it.
    let second = Submission::begin(&cluster, &anna, "second", b"12345").await.refused().await;
    assert!(second.kind == Kind::Denied && second.message.contains("11 bytes"), "{second}");
    assert!(second.message.contains("artifact_bytes_max"), "{second}");
    let third = Submission::begin(&cluster, &anna, "third", b"1234").await.finish(b"1234").await;
    assert_eq!(third.expect("there is room").name, "third-1");
    let first = first.finish(b"123456").await;
    assert_eq!(first.expect("it was there before").name, "first-2");
    // What a job has counts as before.
    let fourth = Submission::begin(&cluster, &anna, "fourth", b"1").await.refused().await;
    assert!(fourth.message.contains("11 bytes"), "{fourth}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submission_that_ends_in_any_way_gives_back_its_bytes() {
    let cluster = Cluster::with(|options| {
        options.artifact_bytes_max = 10;
        options.incoming_bytes_max = 15;
        options.stream_silence = Duration::from_secs(30);
    })
    .await;
    let nobody = Keys::default();
    let begin = |name| Submission::begin(&cluster, &nobody, name, b"12345678");
    let first = begin("first").await;
    cluster.until("its place is made", |cluster| on_their_way(cluster) == 1).await;
    let full = begin("second").await.refused().await;
    assert!(full.kind == Kind::Full && full.message.contains("incoming_bytes_max"), "{full}");
    assert!(full.message.contains("16 bytes together"), "{full}");
    // The client goes away.
    first.answer.abort();
    drop(first);
    cluster.until("what came is removed", |cluster| on_their_way(cluster) == 0).await;
    // It sends something else than it announced. The bytes are given back after the files.
    let wrong = loop {
        let wrong = begin("third").await.finish(b"1234567?").await.unwrap_err();
        if wrong.kind != Kind::Full {
            break wrong;
        }
    };
    assert!(wrong.message.contains("sha256"), "{wrong}");
    for name in ["fourth", "fifth"] {
        begin(name).await.finish(b"12345678").await.expect("there is room again");
    }
}

#[tokio::test]
async fn a_job_has_its_checkpoints_where_the_master_allows_them_or_is_refused() {
    let (ours, others) =
        (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("another folder"));
    let path = ours.path().join("runs").display().to_string();
    let cluster = Cluster::with(|options| options.checkpoints = vec![path.clone()]).await;
    // A run of somebody else, which would be resumed and then removed.
    let run = others.path().join("digits/v0000000001");
    std::fs::create_dir_all(&run).expect("made");
    std::fs::write(run.join("manifest.json"), "theirs").expect("written");
    let escaping = format!("file://{path}/../../{}", others.path().file_name().unwrap().to_string_lossy());
    for url in [others.path().display().to_string(), format!("{path}2"), escaping, "memory://runs".to_owned()]
    {
        for resume in [false, true] {
            let mut spec = saving(ours.path());
            spec.checkpoint.as_mut().expect("it saves").url = url.clone();
            let part = Some(submit_request::Part::SpecJson(spec.to_json()));
            let request = pb::SubmitRequest { part, resume, ..Default::default() };
            let answer = cluster.jobs().submit(tokio_stream::iter([request])).await;
            let failure = Failure::from(answer.expect_err(&url));
            assert_eq!(failure.kind, Kind::Denied, "{failure}");
            for part in ["checkpoint.url", &url, &path, "--checkpoints"] {
                assert!(failure.message.contains(part), "`{part}` missing in {failure}");
            }
        }
    }
    assert_eq!(std::fs::read_to_string(run.join("manifest.json")).expect("it is there"), "theirs");
    for (name, below) in [("here", ""), ("below", "/team"), ("url", "/other%20team")] {
        let mut spec = saving(&ours.path().join("runs"));
        let checkpoint = spec.checkpoint.as_mut().expect("it saves");
        checkpoint.url = format!("file://{path}{below}");
        spec.name = name.to_owned();
        cluster.submit(&spec, &[]).await.expect("a place that is allowed");
    }
}

#[tokio::test]
async fn predictions_go_where_the_master_allows_them_and_no_two_jobs_write_one_file() {
    let (ours, others) =
        (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("another folder"));
    let path = ours.path().display().to_string();
    let cluster = Cluster::with(|options| options.checkpoints = vec![path.clone()]).await;
    let predicting = |url: String| {
        let predict = PredictSpec::new(DataSet::Train, url);
        let spec = job(|_| ()).measuring(spec::Purpose::Predict, INITIAL.to_owned(), Some(predict));
        spec.expect("a good job")
    };
    for url in [others.path().join("p.jsonl").display().to_string(), format!("file://{path}2/p.jsonl")] {
        let failure = cluster.submit(&predicting(url.clone()), &[]).await.expect_err(&url);
        assert_eq!(failure.kind, Kind::Denied, "{failure}");
        assert!(failure.message.starts_with("predict.url: ") && failure.message.contains(&path), "{failure}");
    }
    let files: [(&str, &[u8]); 1] = [(INITIAL, b"weights")];
    let submit = async |url: String| cluster.submit(&predicting(url), &files).await;
    submit(format!("{path}/p.jsonl")).await.expect("a place that is allowed");
    let failure = submit(format!("file://{path}/a/../p.jsonl")).await.expect_err("the same file");
    assert!(failure.message.contains("writes its predictions to the same file"), "{failure}");
    submit(format!("{path}/q.jsonl")).await.expect("another file");
}

#[tokio::test]
async fn two_jobs_do_not_save_at_one_place_however_it_is_written() {
    let (cluster, folder) = (Cluster::start().await, tempfile::tempdir().expect("a folder"));
    let spec = saving(folder.path());
    cluster.submit(&spec, &[]).await.expect("the first");
    let path = folder.path().display();
    for url in [path.to_string(), format!("{path}/"), format!("file://{path}"), format!("file://{path}/a/..")]
    {
        let mut spec = spec.clone();
        spec.checkpoint.as_mut().expect("it saves").url = url.clone();
        let failure = cluster.submit(&spec, &[]).await.expect_err(&url);
        assert!(failure.message.contains("at the same place under the same name"), "{url}: {failure}");
    }
}

#[tokio::test]
async fn a_job_is_not_called_like_the_folder_it_lies_in_or_the_one_above() {
    let cluster = Cluster::start().await;
    for name in [".", "..", "..."] {
        let failure = cluster.submit(&named(name), &[]).await.unwrap_err();
        let said = format!("`{name}` is no name of a folder");
        assert!(failure.kind == Kind::Malformed && failure.message.contains(&said), "{failure}");
    }
    cluster.submit(&named("..a"), &[]).await.expect("a name like others");
}

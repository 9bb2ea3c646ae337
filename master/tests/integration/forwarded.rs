//! Calls that an agent forwards for a process of a script: they reach the jobs of this script
//! alone, whatever the process says.

use std::path::Path;

use net::channel::{Dialer, Purpose};
use net::security::door::{Door, Limits};
use net::security::{Keys, Options as KeyOptions, TokenRole, tokens};
use proto::artifact::{describe, slices};
use proto::pb;
use proto::pb::artifact_part::Part as File;
use proto::pb::fleet_client::FleetClient;
use proto::pb::jobs_client::JobsClient;
use proto::pb::script_request::Part;
use proto::pb::scripts_client::ScriptsClient;
use proto::status::{Failure, Kind};
use tonic::Request;
use tonic::service::interceptor::InterceptedService;

use crate::harness::Cluster;

/// Makes a token, and returns its entry and the keys of its bearer.
fn token(folder: &Path, name: &str, role: TokenRole, scripts: bool) -> (String, Keys) {
    let (text, file) = (format!("a-token-of-{name}-0123"), folder.join(name));
    std::fs::write(&file, &text).expect("written");
    let keys = Keys::load(KeyOptions { token: Some(file), ..KeyOptions::default() }).expect("good keys");
    (tokens::entry(name, role, &text, None, None, scripts), keys)
}

/// A master with tokens, and the keys of anna, who may send scripts, of bob, who may not, and of a
/// worker.
struct Place {
    cluster: Cluster,
    anna: Keys,
    bob: Keys,
    worker: Keys,
    _folder: tempfile::TempDir,
}

impl Place {
    async fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (first, anna) = token(folder.path(), "anna", TokenRole::Submit, true);
        let (second, bob) = token(folder.path(), "bob", TokenRole::Submit, false);
        let (third, worker) = token(folder.path(), "worker", TokenRole::Worker, false);
        let list = folder.path().join("tokens.toml");
        std::fs::write(&list, first + &second + &third).expect("written");
        let server =
            Keys::load(KeyOptions { tokens: Some(list), ..KeyOptions::default() }).expect("good keys");
        let cluster = Cluster::behind(Door::new(server, Limits::default()), |_| {}).await;
        Self { cluster, anna, bob, worker, _folder: folder }
    }

    fn channel(&self, keys: &Keys) -> net::channel::Channel {
        Dialer::tcp().with(keys.clone()).channel(&self.cluster.url, Purpose::Control).expect("a good URL")
    }

    async fn send(&self, keys: &Keys, name: &str) -> Result<pb::SubmitReply, Failure> {
        let entry = "train.py".to_owned();
        let script = pb::Script { name: name.to_owned(), entry, processes: 1, ..Default::default() };
        let file = |part| Part::Artifact(pb::ArtifactPart { part: Some(part) });
        let header = file(File::Header(describe("bundle", b"files")));
        let content = slices(&b"files"[..].into()).map(|slice| file(File::Content(slice)));
        let parts: Vec<_> = [Part::Script(script), header].into_iter().chain(content).collect();
        let parts = parts.into_iter().map(|part| pb::ScriptRequest { part: Some(part) });
        let mut scripts = ScriptsClient::new(self.channel(keys));
        Ok(scripts.submit(futures::stream::iter(parts.collect::<Vec<_>>())).await?.into_inner())
    }

    /// Returns clients as an agent has them that forwards calls of `script`.
    fn forwarded(&self, script: u64) -> (JobsClient<Forwarded>, FleetClient<Forwarded>) {
        let named = move |mut request: Request<()>| {
            request.metadata_mut().insert("ebb-script", script.into());
            Ok(request)
        };
        let channel = InterceptedService::new(self.channel(&self.worker), Box::new(named) as Named);
        (
            JobsClient::new(channel),
            FleetClient::new(InterceptedService::new(self.channel(&self.worker), Box::new(named) as Named)),
        )
    }
}

type Named = Box<dyn FnMut(Request<()>) -> Result<Request<()>, tonic::Status> + Send>;
type Forwarded = InterceptedService<net::channel::Channel, Named>;

fn submission(name: &str, script: u64) -> pb::SubmitRequest {
    let spec = format!(
        r#"{{"name": "{name}", "epochs": 1, "model": {{"builtin": "python", "loss": "module"}},
             "data": {{"format": "index", "train": {{"files": ["16"]}}}}, "batch": {{"micro": 4}},
             "optimizer": {{"kind": "sgd", "learning_rate": 0.1}}, "limits": {{"lease": "1h"}}}}"#
    );
    let part = Some(pb::submit_request::Part::SpecJson(spec));
    pb::SubmitRequest { part, join: true, script, ..Default::default() }
}

fn registration(script: u64, program: &str) -> pb::RegisterRequest {
    pb::RegisterRequest {
        role: pb::ProcessRole::Worker.into(),
        name: "worker-0".to_owned(),
        program_version: proto::PROGRAM_VERSION.to_owned(),
        program: program.to_owned(),
        device: "cpu".to_owned(),
        threads: 1,
        script,
        ..Default::default()
    }
}

async fn once<T>(value: T) -> futures::stream::Iter<std::array::IntoIter<T, 1>> {
    futures::stream::iter([value])
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_come_from_tokens_that_allow_them() {
    let place = Place::new().await;
    let refused = place.send(&place.bob, "train").await.unwrap_err();
    assert!(refused.kind == Kind::Denied && refused.message.contains("`scripts = true`"), "{refused}");
    assert_eq!(place.send(&place.anna, "train").await.expect("she may").name, "train-1");
    let refused = place.send(&place.worker, "train").await.unwrap_err();
    assert_eq!(refused.kind, Kind::Denied, "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forwarded_call_reaches_jobs_of_its_script_alone() {
    let place = Place::new().await;
    for name in ["first", "second"] {
        place.send(&place.anna, name).await.expect("she may");
    }
    let (mut first, mut first_fleet) = place.forwarded(1);
    let (mut second, mut second_fleet) = place.forwarded(2);
    let kind = |status: tonic::Status| Failure::from(status).kind;
    // The agent's token alone submits nothing, and a process names no script but its own.
    let mut agent = JobsClient::new(place.channel(&place.worker));
    assert_eq!(kind(agent.submit(once(submission("mine", 1)).await).await.unwrap_err()), Kind::Denied);
    for script in [0, 2] {
        let refused = first.submit(once(submission("mine", script)).await).await.unwrap_err();
        assert_eq!(kind(refused), Kind::Denied, "{script}");
        let refused = first_fleet.register(registration(script, "mine")).await.unwrap_err();
        assert_eq!(kind(refused), Kind::Denied, "{script}");
    }
    let mine = first.submit(once(submission("mine", 1)).await).await.expect("its own").into_inner();
    let theirs = second.submit(once(submission("mine", 2)).await).await.expect("its own").into_inner();
    assert_eq!((mine.name.as_str(), theirs.name.as_str()), ("mine-1", "mine-2"));
    // A bare name is that of its own job, though another script has a newer one.
    let status = |job: &str| pb::StatusRequest { job: job.to_owned() };
    assert_eq!(first.status(status("mine")).await.expect("its own").into_inner().name, "mine-1");
    for job in ["mine-2", "2", "second"] {
        assert_eq!(kind(first.status(status(job)).await.unwrap_err()), Kind::Denied, "{job}");
        let watch = pb::WatchRequest { job: job.to_owned(), after: 0 };
        assert_eq!(kind(first.watch(watch).await.unwrap_err()), Kind::Denied, "{job}");
        let fetch = pb::FetchRequest { job: job.to_owned() };
        assert_eq!(kind(first.fetch(fetch).await.unwrap_err()), Kind::Denied, "{job}");
    }
    let listed = first.list(pb::ListRequest::default()).await.expect("its own").into_inner().jobs;
    assert_eq!(listed.iter().map(|job| job.name.as_str()).collect::<Vec<_>>(), ["mine-1"]);
    // A member of the fleet reads specifications of its own jobs alone.
    let registered = second_fleet.register(registration(2, "mine")).await.expect("its own").into_inner();
    let mut request = Request::new(pb::JobRequest { job: 1 });
    let secret = net::session::Secret::from_bytes(&registered.secret).expect("a secret");
    let shown =
        net::session::Shown { incarnation: proto::ids::IncarnationId(registered.incarnation), secret };
    shown.show(request.metadata_mut().as_mut());
    assert_eq!(kind(second_fleet.job(request).await.unwrap_err()), Kind::Denied);
    // It is no way to another role.
    let ps = pb::RegisterRequest { role: pb::ProcessRole::Ps.into(), ..registration(1, "") };
    assert_eq!(kind(first_fleet.register(ps).await.unwrap_err()), Kind::Denied);
    let ordinary = first_fleet.register(registration(1, "")).await.unwrap_err();
    assert_eq!(kind(ordinary), Kind::Denied);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_cancels_the_election_of_its_script_and_nothing_else() {
    let place = Place::new().await;
    for name in ["first", "second"] {
        place.send(&place.anna, name).await.expect("she may");
    }
    let (mut first, _) = place.forwarded(1);
    let (mut second, _) = place.forwarded(2);
    for (jobs, script) in [(&mut first, 1), (&mut second, 2)] {
        for name in ["mine.callbacks", "mine"] {
            jobs.submit(once(submission(name, script)).await).await.expect("its own");
        }
    }
    let cancel = |job: &str| pb::CancelRequest { job: job.to_owned(), force: true };
    for job in ["mine", "first", "1"] {
        let refused = Failure::from(first.cancel(cancel(job)).await.unwrap_err());
        assert!(refused.kind == Kind::Denied && refused.message.contains("role operate"), "{job}: {refused}");
    }
    let ended = first.cancel(cancel("mine.callbacks")).await.expect("its own").into_inner();
    assert_eq!(ended.job, 3, "not that of the other script, which is newer");
}

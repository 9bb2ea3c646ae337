//! Containers on networks of their own. They are killed, paused and cut off while a job trains, and
//! workers come and go. The trained bits stay those of an undisturbed run.
//!
//! The test needs a Docker engine, Compose, and a base image: `ebbflow-base:bookworm` (from
//! `deploy/docker/base.sh`, which the test runs where it finds root and debootstrap) or the one
//! that `EBB_BASE_IMAGE` names. It reports a skip if one is missing. It uses the build without
//! libtorch, like the image of the control plane.
#![cfg(not(feature = "torch"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(
    clippy::disallowed_methods,
    reason = "finds its base image through the environment, and waits with a deadline"
)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::harness::machine::{Reserved, answers, docker_compose, until};
use crate::harness::{self, Lacks, digits, ebb, model, root, skipped, summary, text, told};
use ebbflow::random::Keyed;

/// Settings of all runs.
const SETTINGS: [&str; 4] = ["--set", "consistency.mode=pipelined", "--set", "fleet.workers.max=8"];

/// Epochs of the first job. With the four workers and their pace it takes a minute or more.
const EPOCHS: u32 = 80;

/// Settings for checkpoints on the volume that master and ps share, so that the loss of a ps costs
/// little.
const CHECKPOINTS: [&str; 4] =
    ["--set", "checkpoint.url=file:///checkpoints", "--set", "checkpoint.every_seconds=1"];

/// Faults of the containers, each at least once. The seed decides the order and the targets.
const FAULTS: [Fault; 10] = [
    Fault::KillWorker,
    Fault::PauseWorker,
    Fault::CutWorker("fleet"),
    Fault::CutWorker("parameters"),
    Fault::Scale(6),
    Fault::Scale(3),
    Fault::KillMaster,
    Fault::KillPs,
    Fault::PausePs,
    Fault::CutPs("parameters"),
];

/// Longer than the master waits for a silent worker (5 s), so that its leases are given away.
const SILENCE: Duration = Duration::from_secs(7);

/// Deadline of every wait, far longer than needed.
const PATIENCE: Duration = Duration::from_secs(300);

/// Time for which a user's command waits for a master that is started again.
const MASTER_PATIENCE: [&str; 2] = ["--master-timeout", "5m"];

/// Longest time of one Docker command, in seconds.
const COMMAND_SECS: &str = "300";

/// Prefix of this test's projects, before the id of its process.
const PROJECT: &str = "ebb-test-";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KillWorker,
    PauseWorker,
    /// Cut off from one of the two networks, and back.
    CutWorker(&'static str),
    Scale(usize),
    KillMaster,
    KillPs,
    PausePs,
    CutPs(&'static str),
}

/// A cluster of containers and its images. They are removed with their handle.
struct Compose {
    project: String,
    /// Address of this host at which Docker publishes the master.
    publish: Reserved,
}

impl Compose {
    fn new() -> Self {
        Self { project: format!("{PROJECT}{}", std::process::id()), publish: Reserved::local() }
    }

    /// Returns the name of an image of this test, by its target in the Dockerfile.
    fn image(&self, target: &str) -> String {
        format!("ebbflow-{target}:{}", self.project)
    }

    /// Builds the images from the `ebb` that this test was built with.
    fn build(&self, base: &str) {
        for target in ["control", "worker"] {
            let mut command = Command::new(root().join("deploy/docker/build.sh"));
            command.arg(target).arg(digits::program());
            let output = command.env("BASE", base).env("TAG", self.image(target)).output().unwrap();
            assert!(output.status.success(), "{target}: {}", text(&output));
            eprint!("{}", String::from_utf8_lossy(&output.stdout));
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        self.command_with(None, args)
    }

    /// Returns a Compose command. With `certs` it has the overlay for keys.
    fn command_with(&self, certs: Option<&Path>, args: &[&str]) -> Command {
        let compose = docker_compose().unwrap();
        let mut command = Command::new("timeout");
        command.arg(COMMAND_SECS).arg(compose.get_program()).args(compose.get_args());
        command.args(["--project-name", &self.project, "--file"]).arg(root().join("deploy/compose.yaml"));
        if let Some(certs) = certs {
            command.arg("--file").arg(root().join("deploy/compose.keys.yaml")).env("EBB_CERTS", certs);
            // The group that owns the new files.
            command.env("EBB_CERTS_GROUP", fs::metadata(certs).unwrap().gid().to_string());
        }
        command
            .args(args)
            .env("EBB_PUBLISH", &self.publish.address)
            .env("EBB_DATA", root().join("examples/digits"));
        command.env("EBB_CONTROL_IMAGE", self.image("control"));
        command.env("EBB_WORKER_IMAGE", self.image("worker")).stdin(Stdio::null());
        command
    }

    /// Starts the cluster with so many workers. Existing containers stay as they are.
    fn up(&self, workers: usize) {
        let scale = format!("worker={workers}");
        let output = self.command(&["up", "--detach", "--no-recreate", "--scale", &scale]).output().unwrap();
        assert!(output.status.success(), "up with {scale}: {}", text(&output));
    }

    /// Returns the running containers of a service.
    fn containers(&self, service: &str) -> Vec<String> {
        let project = format!("label=com.docker.compose.project={}", self.project);
        let service = format!("label=com.docker.compose.service={service}");
        let running = ["--filter", "status=running", "--format", "{{.Names}}"];
        let listed = docker(&[&["ps", "--filter", &project, "--filter", &service][..], &running].concat());
        let mut names: Vec<String> = listed.lines().map(str::to_owned).collect();
        names.sort();
        names
    }

    fn url(&self) -> String {
        format!("http://{}", self.publish.address)
    }

    fn submit(&self, out: &Path, settings: &[&str]) -> Command {
        let mut command = ebb(["submit", "--master", &self.url(), "--follow", "--out"]);
        command.arg(out).arg(job()).args(settings).args(MASTER_PATIENCE);
        command
    }

    fn strike(&self, fault: Fault, keyed: &mut Keyed) {
        let pick = |service: &str, keyed: &mut Keyed| {
            let mut names = Vec::new();
            // Docker may be starting one again that has ended.
            until(&format!("a container of {service} runs"), PATIENCE, || {
                names = self.containers(service);
                !names.is_empty()
            });
            names[(keyed.next_u64() % names.len() as u64) as usize].clone()
        };
        let ps = |keyed: &mut Keyed| pick(["ps-0", "ps-1"][(keyed.next_u64() % 2) as usize], keyed);
        match fault {
            Fault::Scale(workers) => self.up(workers),
            Fault::KillWorker => kill(&pick("worker", keyed)),
            Fault::KillMaster => kill(&pick("master", keyed)),
            Fault::KillPs => kill(&ps(keyed)),
            Fault::PauseWorker => pause(&pick("worker", keyed)),
            Fault::PausePs => pause(&ps(keyed)),
            Fault::CutWorker(network) => self.cut(network, &pick("worker", keyed), &[]),
            Fault::CutPs(network) => {
                let name = ps(keyed);
                let service = if name.contains("ps-0") { "ps-0" } else { "ps-1" };
                self.cut(network, &name, &["--alias", &format!("{service}.parameters")]);
            }
        }
    }

    /// Cuts a container off from a network for a while.
    fn cut(&self, network: &str, name: &str, options: &[&str]) {
        let network = format!("{}_{network}", self.project);
        docker(&["network", "disconnect", "--force", &network, name]);
        std::thread::park_timeout(SILENCE);
        docker(&[&["network", "connect"], options, &[network.as_str(), name]].concat());
    }
}

impl Drop for Compose {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.command(&["logs", "--no-color", "--tail", "60"]).status();
        }
        // Removes what is left of the cluster. Nothing here may panic a second time.
        let _ = self.command(&["down", "--volumes", "--timeout", "2", "--remove-orphans"]).output();
        let images = ["control", "worker"].map(|target| self.image(target));
        let _ = Command::new("docker").args(["image", "rm", "--force"]).args(images).output();
    }
}

/// Removes the containers, networks and volumes of tests that were killed. Docker would restart the
/// containers forever.
fn sweep() {
    let label = "com.docker.compose.project";
    for kind in ["container", "network", "volume"] {
        let (all, name) = match kind {
            "container" => (&["--all"][..], "{{.ID}}"),
            _ => (&[][..], "{{.Name}}"),
        };
        let (filter, format) = (format!("label={label}"), format!("{{{{.Label \"{label}\"}}}} {name}"));
        let list = [&[kind, "ls", "--filter", &filter, "--format", &format], all].concat();
        for line in docker(&list).lines() {
            let Some((project, id)) = line.split_once(' ') else { continue };
            let Some(process) = project.strip_prefix(PROJECT) else { continue };
            if !Path::new("/proc").join(process).exists() {
                let force: &[&str] = if kind == "network" { &[] } else { &["--force"] };
                // What the killed test started may still remove it.
                drop(docker_output(&[&[kind, "rm"], force, &[id]].concat()));
            }
        }
    }
}

/// Kills a container without warning. Docker's restart policy ignores an operator's `docker kill`,
/// hence the start.
fn kill(name: &str) {
    docker(&["kill", name]);
    docker(&["start", name]);
}

/// Pauses a container for a while. The runtime thaws the container again and gives up if a process
/// that waits for a slow disk does not freeze within some tens of milliseconds.
fn pause(name: &str) {
    until("the container froze", PATIENCE, || {
        let output = docker_output(&["pause", name]);
        let slow = text(&output).contains("unable to freeze");
        assert!(output.status.success() || slow, "docker pause {name}: {}", text(&output));
        output.status.success()
    });
    std::thread::park_timeout(SILENCE);
    docker(&["unpause", name]);
}

fn docker_output(args: &[&str]) -> Output {
    Command::new("timeout").args([COMMAND_SECS, "docker"]).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Runs `docker`, expects success, and returns its output.
fn docker(args: &[&str]) -> String {
    let output = docker_output(args);
    assert!(output.status.success(), "docker {args:?}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the base image, or the reason why there is none.
fn base() -> Result<String, (Lacks, String)> {
    if !answers(Command::new("timeout").args(["60", "docker", "version"])) {
        let why = "no Docker engine answers; nothing of deploy/compose.yaml is tried";
        return Err((Lacks::Machine, why.to_owned()));
    }
    if docker_compose().is_none() {
        let why = "neither docker-compose nor `docker compose`; nothing of deploy/compose.yaml is tried";
        return Err((Lacks::Package, why.to_owned()));
    }
    let base = std::env::var("EBB_BASE_IMAGE").unwrap_or_else(|_| "ebbflow-base:bookworm".to_owned());
    if answers(Command::new("docker").args(["image", "inspect", &base])) {
        return Ok(base);
    }
    // A new machine builds it once, which takes some minutes.
    let output = Command::new(root().join("deploy/docker/base.sh")).arg(&base).output();
    match output {
        Ok(output) if output.status.success() => Ok(base),
        Ok(output) => {
            let said = text(&output);
            let last = said.lines().last().unwrap_or_default();
            let why = format!("no image {base}, and deploy/docker/base.sh cannot make it: {last}");
            Err((Lacks::Package, why))
        }
        Err(error) => Err((Lacks::Package, format!("deploy/docker/base.sh: {error}"))),
    }
}

fn job() -> PathBuf {
    root().join("examples/digits/job.toml")
}

/// Returns the seed and the faults in its order. `EBB_CHAOS_SEED` sets another seed.
fn script() -> (u64, Keyed, [Fault; 10]) {
    let seed = std::env::var("EBB_CHAOS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut keyed = Keyed::new(seed, "compose", 0);
    let mut faults = FAULTS;
    for index in (1..faults.len()).rev() {
        faults.swap(index, (keyed.next_u64() % (index as u64 + 1)) as usize);
    }
    (seed, keyed, faults)
}

#[test]
fn containers_that_die_pause_or_lose_their_network_do_not_change_the_model() {
    let base = match base() {
        Ok(base) => base,
        Err((lacks, why)) => return skipped(lacks, &why),
    };
    sweep();
    let folder = tempfile::tempdir().unwrap();
    let cluster = Compose::new();
    cluster.build(&base);
    cluster.up(4);

    let mut epochs = EPOCHS;
    // A slow machine needs longer for the faults.
    while !keeps_its_bits(&cluster, folder.path(), epochs) {
        epochs *= 2;
        eprintln!("the job ended before all faults; the next one has {epochs} epochs");
    }

    images_keep_what_the_readme_says(&cluster);
    keys_are_one_command_and_an_overlay(&cluster, folder.path());
}

/// Trains while everything in [`FAULTS`] happens, and compares with an undisturbed run. Returns
/// false if the job ended before.
fn keeps_its_bits(cluster: &Compose, folder: &Path, epochs: u32) -> bool {
    let at = |what: &str| folder.join(format!("{what}-{epochs}"));
    let (name, epochs) = (format!("name=digits-{epochs}"), format!("epochs={epochs}"));
    let settings = [&SETTINGS[..], &["--set", &name, "--set", &epochs]].concat();

    let (seed, mut keyed, faults) = script();
    let out = at("out");
    let said = fs::File::create(at("said")).unwrap();
    let mut submission = cluster.submit(&out, &settings);
    let mut submission =
        submission.args(digits::SLOW).args(CHECKPOINTS).stdout(Stdio::null()).stderr(said).spawn().unwrap();
    // Runs at the same time, in one process and with one worker.
    let mut calm = ebb(["run", "--workers", "1", "--ps", "1", "--device", "cpu", "--out"]);
    let calm = calm.arg(at("calm")).args(&settings).arg(job());
    let mut calm =
        calm.stdout(Stdio::null()).stderr(fs::File::create(at("calm-said")).unwrap()).spawn().unwrap();
    let begin = Instant::now();
    let steps = || told(&out, "train");
    let mut done = BTreeSet::new();
    for fault in faults {
        // Some steps were trained since the last fault.
        let (before, since) = (steps(), Instant::now());
        while steps() <= before && since.elapsed() < PATIENCE && submission.try_wait().unwrap().is_none() {
            std::thread::park_timeout(Duration::from_millis(50));
        }
        if submission.try_wait().unwrap().is_some_and(|status| status.success()) {
            assert!(calm.wait().unwrap().success());
            return false;
        }
        assert!(
            since.elapsed() < PATIENCE,
            "seed {seed}: nothing is trained any more before {fault:?}, after {done:?}"
        );
        eprintln!("{:5.1} s  {fault:?}", begin.elapsed().as_secs_f64());
        cluster.strike(fault, &mut keyed);
        done.insert(fault);
    }
    assert_eq!(done.len(), FAULTS.len());
    let (mut before, mut since) = (steps(), Instant::now());
    while submission.try_wait().unwrap().is_none() {
        std::thread::park_timeout(Duration::from_millis(50));
        if steps() > before {
            (before, since) = (steps(), Instant::now());
        }
        assert!(since.elapsed() < PATIENCE, "seed {seed}: nothing is trained any more, after all faults");
    }
    eprintln!("{:5.1} s  the job ended", begin.elapsed().as_secs_f64());
    let status = submission.wait().unwrap();
    assert!(status.success(), "seed {seed}: {}", fs::read_to_string(at("said")).unwrap());
    let status = calm.wait().unwrap();
    assert!(status.success(), "{}", fs::read_to_string(at("calm-said")).unwrap());
    assert_eq!(
        summary(&out)["model_sha256"],
        summary(&at("calm"))["model_sha256"],
        "seed {seed}: other bits"
    );
    assert!(model(&out) == model(&at("calm")));
    assert_eq!(summary(&out)["steps"], summary(&at("calm"))["steps"]);
    true
}

/// Starts the same cluster again with compose.keys.yaml: certificates and tokens for all.
fn keys_are_one_command_and_an_overlay(cluster: &Compose, folder: &Path) {
    let certs = folder.join("certs");
    let hosts = ["master.fleet", "ps-0.parameters", "ps-1.parameters"].map(|host| format!("--host={host}"));
    let make = ["certs", "init", "--dir", certs.to_str().unwrap(), "--group-reads", "--user", "anna=submit"];
    harness::succeed(make.into_iter().chain(hosts.iter().map(String::as_str)));
    let up = cluster.command_with(Some(&certs), &["up", "--detach", "--scale", "worker=2"]).output().unwrap();
    assert!(up.status.success(), "{}", text(&up));
    let url = cluster.url().replace("http://", "https://");
    let out = folder.join("with-keys");
    let mut submit = ebb(["submit", "--master", &url, "--follow", "--out"]);
    let output = submit.arg(&out).arg(job()).args(["--set", "epochs=2"]).args(MASTER_PATIENCE);
    let output = output.envs(harness::keys::environment(&certs, "anna")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&out)["status"], "succeeded");
    assert!(harness::fail(["jobs", "--master", &cluster.url()]).contains("wants TLS"));
    for (service, files) in [("master", 5), ("ps-0", 5), ("worker", 4)] {
        let name = cluster.containers(service).remove(0);
        wait_until_ready(&name);
        assert_eq!(docker(&["exec", &name, "ls", "/etc/ebbflow/keys"]).lines().count(), files, "{service}");
    }
}

/// Waits until the process of a container takes part.
fn wait_until_ready(name: &str) {
    let ready = || docker_output(&["exec", name, "/usr/local/bin/ebb", "health", "--ready"]);
    until(&format!("{name} is ready"), PATIENCE, || ready().status.success());
}

/// Checks that all processes are alive and ready by the image's own health check, that none is root
/// or can write to its image, and that a stop is a drain.
fn images_keep_what_the_readme_says(cluster: &Compose) {
    for service in ["master", "ps-0", "ps-1", "worker"] {
        for name in cluster.containers(service) {
            wait_until_ready(&name);
            docker(&["exec", &name, "/usr/local/bin/ebb", "health"]);
            let written = docker_output(&["exec", &name, "touch", "/x"]);
            assert!(!written.status.success() && text(&written).contains("Read-only"), "{}", text(&written));
            assert_eq!(docker(&["exec", &name, "id", "-u"]).trim(), "10001");
        }
    }
    let worker = cluster.containers("worker").remove(0);
    docker(&["stop", "--time", "60", &worker]);
    let code = docker(&["inspect", "--format", "{{.State.ExitCode}}", &worker]);
    assert_eq!(code.trim(), "0", "a worker drains");
}

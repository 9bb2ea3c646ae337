//! Containers on networks of their own: they are killed, paused and cut off while a job trains, workers come and go, and the
//! trained bits stay those of an undisturbed run.
//!
//! Needs a Docker engine, docker-compose and an image to start from: `ebbflow-base:bookworm` (made by `deploy/docker/base.sh`; the
//! test makes it where root and debootstrap are) or the one that `EBB_BASE_IMAGE` names. Skips loudly where one of them is missing.
//! Tried with the build without libtorch, which is what the image of the control plane is made of.
#![cfg(not(feature = "torch"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(
    clippy::disallowed_methods,
    reason = "finds its base image through the environment, and waits with a deadline"
)]

mod harness;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use ebbflow::random::Keyed;
use harness::{ebb, events, model, root, skipped, summary, text};

/// All runs.
const SETTINGS: [&str; 4] = ["--set", "consistency.mode=pipelined", "--set", "fleet.workers.max=8"];

/// How long the job would take if nothing happened to it, and the range of its epochs.
const UNDISTURBED_SECS: f64 = 40.0;
const EPOCHS: (f64, f64) = (60.0, 6000.0);

/// On the volume that master and ps share, so that a ps that is killed costs little.
const CHECKPOINTS: [&str; 4] =
    ["--set", "checkpoint.url=file:///checkpoints", "--set", "checkpoint.every_seconds=1"];

/// What happens to the containers, each at least once; the order and whom it meets is the seed's choice.
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

/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KillWorker,
    PauseWorker,
    /// From one of the two networks, and back.
    CutWorker(&'static str),
    Scale(usize),
    KillMaster,
    KillPs,
    PausePs,
    CutPs(&'static str),
}

/// A cluster of containers, gone with its handle.
struct Compose {
    project: String,
    publish: String,
}

impl Compose {
    /// `docker-compose` on this cluster.
    fn compose(&self, args: &[&str]) -> Output {
        let file = root().join("deploy/compose.yaml");
        let mut command = Command::new("docker-compose");
        command.args(["--project-name", &self.project, "--file"]).arg(file).args(args);
        command.env("EBB_PUBLISH", &self.publish).env("EBB_DATA", root().join("examples/digits"));
        command.env("EBB_CONTROL_IMAGE", CONTROL).env("EBB_WORKER_IMAGE", WORKER);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "docker-compose {args:?}: {}", text(&output));
        output
    }

    /// With so many workers. What is there already stays as it is.
    fn up(&self, workers: usize) {
        self.compose(&["up", "--detach", "--no-recreate", "--scale", &format!("worker={workers}")]);
    }

    /// Running containers of a service.
    fn containers(&self, service: &str) -> Vec<String> {
        let project = format!("label=com.docker.compose.project={}", self.project);
        let service = format!("label=com.docker.compose.service={service}");
        let args = [
            "ps",
            "--filter",
            &project,
            "--filter",
            &service,
            "--filter",
            "status=running",
            "--format",
            "{{.Names}}",
        ];
        let mut names: Vec<String> = docker(&args).lines().map(str::to_owned).collect();
        names.sort();
        names
    }

    fn url(&self) -> String {
        format!("http://{}", self.publish)
    }

    fn strike(&self, fault: Fault, keyed: &mut Keyed) {
        let pick = |service: &str, keyed: &mut Keyed| {
            let names = self.containers(service);
            assert!(!names.is_empty(), "no {service} runs");
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

    /// Takes a container off a network for a while.
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
            let file = root().join("deploy/compose.yaml");
            let mut command = Command::new("docker-compose");
            command.args(["--project-name", &self.project, "--file"]).arg(file);
            let _ = command.args(["logs", "--no-color", "--tail", "40"]).status();
        }
        // Whatever is left of it.
        self.compose(&["down", "--volumes", "--timeout", "2", "--remove-orphans"]);
    }
}

/// A crash: the process gets no word in. An operator's `docker kill` is not undone by the restart policy, hence the start.
fn kill(name: &str) {
    docker(&["kill", name]);
    docker(&["start", name]);
}

fn pause(name: &str) {
    docker(&["pause", name]);
    std::thread::park_timeout(SILENCE);
    docker(&["unpause", name]);
}

const BASE: &str = "ebbflow-base:bookworm";
const CONTROL: &str = "ebbflow-control:test";
const WORKER: &str = "ebbflow-worker:test";

/// Runs `docker` and expects success; answers what it printed.
fn docker(args: &[&str]) -> String {
    let output = Command::new("docker").args(args).output().unwrap();
    assert!(output.status.success(), "docker {args:?}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn answers(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}

/// The image to start from, or why there is none.
fn base() -> Result<String, String> {
    if !answers("docker", &["version"]) {
        return Err("no Docker engine answers; nothing of deploy/compose.yaml is tried".to_owned());
    }
    if !answers("docker-compose", &["version"]) {
        return Err("no docker-compose; nothing of deploy/compose.yaml is tried".to_owned());
    }
    let base = std::env::var("EBB_BASE_IMAGE").unwrap_or_else(|_| BASE.to_owned());
    if answers("docker", &["image", "inspect", &base]) {
        return Ok(base);
    }
    // A fresh machine of the CI pays some minutes for it once.
    let output = Command::new(root().join("deploy/docker/base.sh")).arg(&base).output();
    match output {
        Ok(output) if output.status.success() => Ok(base),
        Ok(output) => {
            Err(format!("no image {base}, and deploy/docker/base.sh cannot make it: {}", text(&output)))
        }
        Err(error) => Err(format!("deploy/docker/base.sh: {error}")),
    }
}

/// Builds the images from the `ebb` that this test was built with.
fn build(base: &str) {
    for (target, tag) in [("control", CONTROL), ("worker", WORKER)] {
        let mut command = Command::new(root().join("deploy/docker/build.sh"));
        command.args([target, env!("CARGO_BIN_EXE_ebb")]).env("BASE", base).env("TAG", tag);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{target}: {}", text(&output));
        eprint!("{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// An address of this host that was free a moment ago.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn containers_that_die_pause_or_lose_their_network_do_not_change_the_model() {
    let base = match base() {
        Ok(base) => base,
        Err(why) => return skipped(&why),
    };
    let job = root().join("examples/digits/job.toml");
    let folder = tempfile::tempdir().unwrap();
    let (calm, out): (PathBuf, PathBuf) = (folder.path().join("calm"), folder.path().join("out"));
    build(&base);
    let cluster = Compose { project: format!("ebb-test-{}", std::process::id()), publish: free_address() };
    cluster.up(4);

    // A machine's speed decides how many epochs all of this takes.
    let paced = folder.path().join("paced");
    let mut pace = ebb(["submit", "--master", &cluster.url(), "--follow", "--out"]);
    let pace = pace
        .arg(&paced)
        .arg(&job)
        .args(SETTINGS)
        .args(["--set", "epochs=30", "--set", "name=pace"])
        .output()
        .unwrap();
    assert!(pace.status.success(), "{}", text(&pace));
    let seconds = summary(&paced)["wall_seconds"].as_f64().unwrap();
    let epochs = (30.0 * UNDISTURBED_SECS / seconds).clamp(EPOCHS.0, EPOCHS.1).round();
    eprintln!("30 epochs took {seconds:.1} s; the job has {epochs}");
    let epochs = format!("epochs={epochs}");
    let settings = [&SETTINGS[..], &["--set", &epochs]].concat();

    let mut run = ebb(["run", "--workers", "1", "--ps", "1", "--device", "cpu", "--out"]);
    let run = run.arg(&calm).args(&settings).arg(&job).output().unwrap();
    assert!(run.status.success(), "{}", text(&run));

    let seed = 1;
    let mut keyed = Keyed::new(seed, "compose", 0);
    let mut faults = FAULTS;
    for index in (1..faults.len()).rev() {
        faults.swap(index, (keyed.next_u64() % (index as u64 + 1)) as usize);
    }
    let mut submission = ebb(["submit", "--master", &cluster.url(), "--follow", "--out"]);
    let mut submission = submission
        .arg(&out)
        .arg(&job)
        .args(&settings)
        .args(CHECKPOINTS)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    let mut done = BTreeSet::new();
    for fault in faults {
        // Something was trained since the last one.
        let told = || if out.join("metrics.jsonl").exists() { events(&out, "train").len() } else { 0 };
        let before = told();
        while told() <= before && begin.elapsed() < PATIENCE && submission.try_wait().unwrap().is_none() {
            std::thread::park_timeout(Duration::from_millis(50));
        }
        let alive = submission.try_wait().unwrap().is_none();
        assert!(alive, "seed {seed}: the job ended before {fault:?}, after {done:?}");
        assert!(
            begin.elapsed() < PATIENCE,
            "seed {seed}: nothing is trained any more before {fault:?}, after {done:?}"
        );
        eprintln!("{:5.1} s  {fault:?}", begin.elapsed().as_secs_f64());
        cluster.strike(fault, &mut keyed);
        done.insert(fault);
    }
    assert_eq!(done.len(), FAULTS.len());
    while submission.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < PATIENCE, "seed {seed}: the job does not end");
        std::thread::park_timeout(Duration::from_millis(50));
    }
    eprintln!("{:5.1} s  the job ended", begin.elapsed().as_secs_f64());
    let output = submission.wait_with_output().unwrap();
    assert!(output.status.success(), "seed {seed}: {}", text(&output));
    assert_eq!(summary(&out)["model_sha256"], summary(&calm)["model_sha256"], "seed {seed}: other bits");
    assert!(model(&out) == model(&calm));
    assert_eq!(summary(&out)["steps"], summary(&calm)["steps"]);

    // Everybody is alive and takes part, by the image's own health check; and a stop is a drain, not a kill.
    for service in ["master", "ps-0", "ps-1", "worker"] {
        for name in cluster.containers(service) {
            docker(&["exec", &name, "/usr/local/bin/ebb", "health"]);
            docker(&["exec", &name, "/usr/local/bin/ebb", "health", "--ready"]);
            let root_write = Command::new("docker").args(["exec", &name, "touch", "/x"]).output().unwrap();
            assert!(
                !root_write.status.success() && text(&root_write).contains("Read-only"),
                "{}",
                text(&root_write)
            );
        }
    }
    let worker = cluster.containers("worker").remove(0);
    docker(&["stop", "--time", "60", &worker]);
    assert_eq!(
        docker(&["inspect", "--format", "{{.State.ExitCode}}", &worker]).trim(),
        "0",
        "a worker drains"
    );
    let user = docker(&["inspect", "--format", "{{.Config.User}}", &worker]);
    assert_eq!(user.trim(), "10001:10001");
}

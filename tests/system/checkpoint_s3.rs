//! Checkpoints on S3, with real processes and a real server that is busy, drops answers and becomes
//! unreachable. Training goes on, and what was not saved is reported or saved later. A job that
//! must go back waits for the store and takes an intact checkpoint.
#![cfg(feature = "cloud")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{self, File};
use std::process::Stdio;
use std::time::Duration;

use crate::harness::s3::{Fault, Proxy, S3};
use crate::harness::{self, Cluster, ebb, model, program, root, succeed, summary, text};

/// Returns the settings of the job. It runs until it is stopped, and each microbatch takes
/// `millis`.
fn sets(url: &str, steps: u64, millis: u64) -> Vec<String> {
    let options = format!(r#"model.options={{ of = "mlp", millis = {millis}, hidden = [128] }}"#);
    let (url, steps) = (format!("checkpoint.url={url}"), format!("checkpoint.every_steps={steps}"));
    let sets = ["epochs=100000".to_owned(), "model.builtin=paced".to_owned(), options, url, steps];
    sets.into_iter().flat_map(|set| ["--set".to_owned(), set]).collect()
}

/// Returns the weights of a version from an undisturbed worker.
fn undisturbed(version: u64) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let (out, url) = (folder.path().join("out"), folder.path().join("checkpoints").display().to_string());
    let mut command = program(&harness::example("oracle"), ["run", "--workers", "1", "--ps", "1", "--out"]);
    // Otherwise later checkpoints may replace this one before it is exported.
    let sets =
        [sets(&url, version, 0), ["--set", "checkpoint.keep=1000"].map(str::to_owned).to_vec()].concat();
    command.arg(&out).args(sets).arg(root().join("examples/digits/job.toml"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let told = || fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    while !told().contains(r#""event":"checkpoint""#) {
        assert!(child.try_wait().unwrap().is_none(), "the undisturbed run ended");
        std::thread::park_timeout(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let exported = folder.path().join("exported.safetensors");
    succeed([
        "checkpoint",
        "export",
        &url,
        "--version",
        &version.to_string(),
        "--out",
        exported.to_str().unwrap(),
    ]);
    fs::read(exported).unwrap()
}

#[test]
fn checkpoints_on_s3_survive_a_server_that_is_busy_drops_answers_and_goes_away() {
    let Some(server) = S3::start() else { return };
    let proxy = Proxy::start(&server);
    let endpoint = format!("http://{}", proxy.address);
    let environment = [
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        // Three waits, of up to 0.8 s.
        ("EBB_MASTER_STORE_PATIENCE", "1400ms"),
        ("EBB_PS_STORE_PATIENCE", "1400ms"),
    ];
    let url = format!("s3://{}/saved", S3::BUCKET);
    let mut cluster = Cluster::with_environment(&harness::example("oracle"), 2, 1, &environment);
    let (out, log) = (cluster.dir.path().join("out"), cluster.dir.path().join("submit.log"));
    let sets = [sets(&url, 50, 10), ["--set", "checkpoint.keep=3"].map(str::to_owned).to_vec()].concat();
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let mut submission = cluster.submission(&root().join("examples/digits/job.toml"), &out, &sets);
    let mut child = submission.stdout(Stdio::null()).stderr(File::create(&log).unwrap()).spawn().unwrap();
    let mut wait = |what: &str, is_so: &dyn Fn() -> bool| {
        while !is_so() {
            let log = fs::read_to_string(&log).unwrap();
            assert!(child.try_wait().unwrap().is_none(), "the job ended before {what}:\n{log}");
            std::thread::park_timeout(Duration::from_millis(20));
        }
    };
    let told = || fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let count = |event: &str| told().matches(&format!(r#""event":"{event}""#)).count();
    let said = |words: &str| fs::read_to_string(&log).unwrap().contains(words);
    wait("it saves on S3", &|| count("checkpoint") >= 2);

    // Busy for so long that it is reported.
    proxy.set(Fault::Busy);
    let busy = || {
        let log = fs::read_to_string(&log).unwrap();
        log.lines().find(|line| line.contains("503 Service Unavailable")).map(str::to_owned)
    };
    wait("a busy server is told", &|| busy().is_some());
    let line = busy().unwrap();
    for part in ["no checkpoint of version", &url, "; training goes on"] {
        assert!(line.contains(part), "`{part}` missing in: {line}");
    }
    for fault in [Fault::Busy, Fault::Drops, Fault::Away, Fault::Stalls] {
        proxy.set(fault);
        // A stalled connection meets the fault once.
        let often = if fault == Fault::Stalls { 1 } else { 3 };
        wait("the fault is met", &|| proxy.met() >= often);
        let trained = count("train");
        wait("training goes on", &|| count("train") > trained);
        proxy.set(Fault::Nothing);
        let saved = count("checkpoint");
        wait("it is saved later", &|| count("checkpoint") > saved + 1);
    }

    // Without a master no checkpoint is completed any more. The newest is damaged, and the store is
    // unreachable while the processes come back.
    cluster.master.signal("KILL");
    cluster.ps[1].signal("KILL");
    let _ = cluster.master.child.wait();
    proxy.set(Fault::Away);
    let keys = server.keys();
    let manifests: Vec<_> = keys.iter().filter_map(|key| key.strip_suffix("/manifest.json")).collect();
    let [.., previous, newest] = manifests[..] else { panic!("two checkpoints: {keys:?}") };
    let data = keys.iter().find(|key| key.starts_with(newest) && key.ends_with(".safetensors")).unwrap();
    let (status, mut bytes) = server.request("GET", data, b"");
    assert_eq!(status, 200);
    *bytes.last_mut().unwrap() ^= 16;
    assert_eq!(server.request("PUT", data, &bytes).0, 200);
    cluster.restart_ps(1);
    cluster.restart_master();
    wait("the store is asked", &|| proxy.met() >= 3);
    proxy.set(Fault::Nothing);
    let version = |folder: &str| folder.rsplit('v').next().unwrap().parse::<u64>().unwrap();
    let gone_back = format!("training goes on from the checkpoint of version {}", version(previous));
    wait("it goes back to the one before", &|| said(&gone_back));
    let refused = format!("the checkpoint of version {} cannot be restored", version(newest));
    assert!(said(&refused) && said("is damaged: checksum"), "{}", fs::read_to_string(&log).unwrap());
    let saved = count("checkpoint");
    wait("it saves again", &|| count("checkpoint") > saved);
    // A checkpoint is saved at the current version, and the job ends.
    succeed(["cancel", "1", "--master", &cluster.url]);
    let _ = child.wait();
    let version = summary(&out)["steps"].as_u64().unwrap();
    assert!(model(&out) == undisturbed(version), "version {version}: other bits than an undisturbed run");

    // The commands read S3 too.
    let command = |args: &[&str]| {
        let output = ebb(args).envs(environment).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    let listed = command(&["checkpoint", "list", &url]);
    assert!(listed.contains("digits in 2 partitions"), "{listed}");
    let exported = cluster.dir.path().join("exported.safetensors");
    command(&["checkpoint", "export", &url, "--out", exported.to_str().unwrap()]);
    assert!(fs::read(exported).unwrap() == model(&out), "the newest checkpoint is of where it stood");
}

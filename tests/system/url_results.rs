//! Results by URL: those of jobs that train, evaluate and predict are in an object store what they
//! are in a folder.
#![cfg(feature = "cloud")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::time::Duration;

use serde_json::Value;

use crate::harness::machine::until;
use crate::harness::s3::{Fault, Proxy, S3};
use crate::harness::{ebb, fail, text};
use crate::predict;
use crate::urls::{clicks, environment, job};

/// Time for something that takes a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn results_are_copied_to_s3_and_those_of_another_job_stay() {
    let Some(server) = S3::start() else { return };
    let proxy = Proxy::start(&server);
    let endpoint = format!("http://{}", proxy.address);
    let environment = environment(&endpoint);
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), &clicks().display().to_string());
    let out = folder.path().join("out");
    let url = format!("s3://{}/results/mine", S3::BUCKET);
    let run = |url: &str| {
        let mut command = ebb(["run", "--workers", "1", "--upload", url, "--out"]);
        command.arg(&out).arg(&job).envs(environment).output().unwrap()
    };
    proxy.set(Fault::Busy);
    let busy = std::thread::scope(|scope| {
        let ran = scope.spawn(|| run(&url));
        until("a request meets a busy server", PATIENCE, || proxy.met() > 0);
        proxy.set(Fault::Nothing);
        ran.join().unwrap()
    });
    assert!(busy.status.success(), "{}", text(&busy));
    assert!(text(&busy).contains(&format!("copied to    {url}")), "{}", text(&busy));
    let keys = server.keys();
    for name in ["model.safetensors", "metrics.jsonl", "summary.json"] {
        let (status, content) = server.request("GET", &format!("results/mine/{name}"), b"");
        assert_eq!((status, content), (200, fs::read(out.join(name)).unwrap()), "{name} of {keys:?}");
    }
    assert!(keys.iter().any(|key| key.starts_with("results/mine/tensorboard/")), "{keys:?}");
    assert!(!keys.iter().any(|key| key.ends_with("probe")), "{keys:?}");

    // Refused before anything is trained.
    fs::remove_dir_all(&out).unwrap();
    let again = text(&run(&url));
    assert!(again.contains("--upload") && again.contains("results/mine/summary.json exists"), "{again}");
    assert!(!out.exists());
    let unknown = text(&run("s3://no-such-bucket/results"));
    assert!(unknown.contains("--upload") && unknown.contains("no-such-bucket"), "{unknown}");
    let nowhere = fail(["submit", &job.display().to_string(), "--upload", &url]);
    assert!(nowhere.contains("--upload: what is copied are the files of --out DIR"), "{nowhere}");
}

#[test]
fn what_an_evaluation_measured_is_copied_to_s3() {
    let Some(server) = S3::start() else { return };
    let proxy = Proxy::start(&server);
    let endpoint = format!("http://{}", proxy.address);
    let dir = tempfile::tempdir().unwrap();
    let (weights, out) = (predict::trained(dir.path()), dir.path().join("measured"));
    let url = format!("s3://{}/measured", S3::BUCKET);
    let mut command = ebb(["evaluate", &predict::job(), "--upload", &url, "--model"]);
    command.arg(&weights).arg("--out").arg(&out).args(["--set", predict::MLP]);
    let output = command.envs(environment(&endpoint)).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    for name in ["metrics.jsonl", "summary.json"] {
        let found = server.request("GET", &format!("measured/{name}"), b"");
        assert_eq!(found, (200, fs::read(out.join(name)).unwrap()), "{name}");
    }
}

#[test]
fn large_predictions_on_s3_are_numbered_parts_and_a_manifest() {
    let Some(server) = S3::start() else { return };
    let proxy = Proxy::start(&server);
    let endpoint = format!("http://{}", proxy.address);
    let dir = tempfile::tempdir().unwrap();
    let (weights, whole) = (predict::trained(dir.path()), dir.path().join("whole.jsonl"));
    predict::alone(&weights, &whole, 1, &[]);
    let (job, data) = (predict::job(), predict::data(1));
    let (url, weights) = (format!("s3://{}/large.jsonl", S3::BUCKET), weights.display().to_string());
    let command = ["predict", &job, "--model", &weights, "--out", &url, "--on", "train", "--workers", "2"];
    let sets = predict::sets(&[&data, predict::MLP, "fleet.ps=1"]);
    let mut command = ebb([&command[..], &sets, &["--join-bytes-max", "1000"]].concat());
    let output = command.envs(environment(&endpoint)).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains(&format!("{url}.parts/manifest.json")), "{}", text(&output));
    assert!(!server.keys().contains(&"large.jsonl".to_owned()), "it is too large to be joined");

    let get = |name: &str| {
        let (status, content) = server.request("GET", &format!("large.jsonl.parts/{name}"), b"");
        assert_eq!(status, 200, "{name}");
        content
    };
    let manifest: Value = serde_json::from_slice(&get("manifest.json")).unwrap();
    let files = manifest["files"].as_array().unwrap();
    let parts: Vec<_> = files.iter().map(|file| get(file["file"].as_str().unwrap())).collect();
    assert_eq!(parts.len(), 8);
    assert!(parts.concat() == fs::read(&whole).unwrap(), "the parts are the file");
    assert_eq!(server.keys().len(), 9, "parts and the manifest: {:?}", server.keys());
}

//! S3 fails in the middle of a training, and a worker dies in the middle of a prediction to S3: the
//! bits and the bytes are those of a disk. A bucket that stays busy is the end of a job, and
//! nothing is lost.
#![cfg(feature = "cloud")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use crate::harness::machine::until;
use crate::harness::s3::{Fault, Proxy, S3};
use crate::harness::{self, Cluster, events, example, model, npy, summary, text};
use crate::predict::{self, PACED, sets};
use crate::urls::{environment, has, trained, two_steps};

/// Time for something that takes a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes of a record.
const RECORD: usize = 512 << 10;

/// Files of [`two_steps`], on a disk and on S3.
struct Files {
    local: Vec<String>,
    labels: Vec<String>,
    remote: Vec<String>,
}

impl Files {
    fn write(folder: &Path, server: &S3) -> Self {
        let at = |name: &str| folder.join(name).display().to_string();
        let (mut local, mut labels, mut remote) = (Vec::new(), Vec::new(), Vec::new());
        for file in 0..3 {
            let pixels =
                npy("|u1", &format!("6, {RECORD}"), (0..6 * RECORD).map(|byte| ((byte + file) % 251) as u8));
            let (x, y) = (format!("x{file}.npy"), format!("y{file}.npy"));
            fs::write(at(&x), &pixels).unwrap();
            fs::write(at(&y), npy("|u1", "6,", (0..6).map(|record| (record + file as u8) % 3))).unwrap();
            assert_eq!(server.request("PUT", &x, &pixels).0, 200);
            local.push(at(&x));
            labels.push(at(&y));
            remote.push(format!("s3://{}/{x}", S3::BUCKET));
        }
        Self { local, labels, remote }
    }
}

/// Epochs of [`long`]. With [`LITTLE`] memory it reads at least 5 MiB in each, and 9 MiB before.
const EPOCHS: u64 = 24;

/// Bytes after which the data of [`long`] stands still: several steps are done by then, but not
/// all.
const STILL: u64 = 72 << 20;

/// Arguments of a worker whose memory has room for one file.
const LITTLE: [&str; 6] = ["--data-memory", "4194304", "--data-threads", "1", "--prefetch", "1"];

/// Writes the job of [`two_steps`] with many epochs.
fn long(folder: &Path, files: &[String], labels: &[String]) -> PathBuf {
    let job = two_steps(folder, files, labels);
    let written = fs::read_to_string(&job).unwrap();
    let longer = written.replace("epochs = 1\n", &format!("epochs = {EPOCHS}\n"));
    assert_ne!(written, longer);
    fs::write(&job, longer).unwrap();
    job
}

#[test]
fn a_training_from_s3_goes_on_after_each_fault_with_the_same_bits() {
    let Some(server) = S3::start() else { return };
    let (proxy, folder) = (Proxy::start(&server), tempfile::tempdir().unwrap());
    let endpoint = format!("http://{}", proxy.address);
    let environment = environment(&endpoint);
    let Files { local, labels, remote } = Files::write(folder.path(), &server);
    let undisturbed = trained(&two_steps(folder.path(), &local, &labels), &[]);

    let mut cluster = Cluster::start(1, 0);
    let allowed = format!("s3://{}", S3::BUCKET);
    // Its memory has room for one file. So the worker that has counted the records of all three
    // reads two of them again to train, and the fault comes while it does.
    cluster.add_worker_as(&["--data-urls", &allowed, "--data-memory", "4194304"], &environment);
    let counted: u64 = local.iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    proxy.set_from(Fault::Busy, counted + (1 << 20));
    let out = cluster.dir.path().join("out");
    let job = two_steps(cluster.dir.path(), &remote, &labels);
    let mut submission = cluster.submission(&job, &out, &[]);
    submission.envs(environment).stdout(Stdio::piped()).stderr(Stdio::piped());
    let user = submission.spawn().unwrap();
    until("a request meets a busy server", PATIENCE, || proxy.met() > 0);
    for fault in [Fault::Drops, Fault::Stalls, Fault::Away] {
        proxy.set(fault);
        until("a request meets the next fault", PATIENCE, || proxy.met() > 0);
    }
    proxy.set(Fault::Nothing);
    let output = user.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&out)["samples_applied"], 18);
    assert!(model(&out) == undisturbed, "other bits than undisturbed");
}

#[test]
fn a_bucket_that_stays_busy_fails_the_job_with_the_cause_and_a_mended_one_loses_nothing() {
    let Some(server) = S3::start() else { return };
    let (proxy, folder) = (Proxy::start(&server), tempfile::tempdir().unwrap());
    let endpoint = format!("http://{}", proxy.address);
    let environment = environment(&endpoint);
    let Files { local, labels, remote } = Files::write(folder.path(), &server);
    let undisturbed = trained(&long(folder.path(), &local, &labels), &[]);

    let mut cluster = Cluster::start(1, 0);
    let allowed = format!("s3://{}", S3::BUCKET);
    let worker = [&LITTLE[..], &["--data-urls", &allowed, "--data-patience", "100ms"]].concat();
    cluster.add_worker_as(&worker, &environment);
    let job = long(cluster.dir.path(), &remote, &labels);
    let saved = format!("checkpoint.url={}", cluster.dir.path().join("saved").display());
    let sets = ["limits.attempts_max=1", &saved, "checkpoint.every_steps=2"];
    let sets: Vec<&str> = sets.into_iter().flat_map(|set| ["--set", set]).collect();
    let submission = |out: &Path, more: &[&str]| {
        let mut submission = cluster.submission(&job, out, &[&sets[..], more].concat());
        submission.envs(environment).stdout(Stdio::piped()).stderr(Stdio::piped());
        submission
    };
    // With its patience, the worker makes the least number of attempts.
    let cause = ["the server stays away", "503", "(attempt 4, after "];
    let advice = ["check the credentials, the region, the endpoint", "--data-patience"];
    let failed = |out: &Path, said: &str| {
        let summary = summary(out);
        assert_eq!(summary["status"], "failed", "{summary}");
        for said in [said, summary["reason"].as_str().unwrap()] {
            has(said, &[&format!("s3://{}/x", S3::BUCKET)]);
            has(said, &cause);
            has(said, &advice);
        }
        summary
    };

    proxy.set(Fault::Busy);
    let never = cluster.dir.path().join("never");
    let output = submission(&never, &[]).output().unwrap();
    assert!(!output.status.success(), "{}", text(&output));
    assert_eq!(failed(&never, &text(&output))["samples_applied"], 0);

    proxy.set(Fault::Nothing);
    let still = proxy.forwarded() + STILL;
    proxy.set_from(Fault::Stalls, still);
    let first = cluster.dir.path().join("first");
    let mut user = submission(&first, &[]).spawn().unwrap();
    until("a checkpoint is saved and the data stands still", PATIENCE, || {
        assert!(user.try_wait().unwrap().is_none(), "it ended before");
        let stands = proxy.forwarded() >= still && proxy.met() > 0;
        stands && first.join("metrics.jsonl").exists() && !events(&first, "checkpoint").is_empty()
    });
    proxy.set(Fault::Busy);
    let output = user.wait_with_output().unwrap();
    assert!(!output.status.success(), "{}", text(&output));
    let stopped = failed(&first, &text(&output));
    let steps = stopped["steps"].as_u64().unwrap();
    assert!((1..2 * EPOCHS).contains(&steps), "{stopped}");

    proxy.set(Fault::Nothing);
    let second = cluster.dir.path().join("second");
    let output = submission(&second, &["--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    has(&text(&output), &["training goes on from the checkpoint of version "]);
    assert_eq!(summary(&second)["samples_applied"], 18 * EPOCHS);
    assert!(model(&second) == undisturbed, "other bits than undisturbed");
}

#[test]
fn an_object_that_changes_while_a_job_trains_ends_it_and_a_restored_one_loses_nothing() {
    let Some(server) = S3::start() else { return };
    let (proxy, folder) = (Proxy::start(&server), tempfile::tempdir().unwrap());
    let endpoint = format!("http://{}", proxy.address);
    let environment = environment(&endpoint);
    let Files { local, labels, remote } = Files::write(folder.path(), &server);
    let undisturbed = trained(&long(folder.path(), &local, &labels), &[]);

    let mut cluster = Cluster::start(1, 0);
    let allowed = format!("s3://{}", S3::BUCKET);
    cluster.add_worker_as(&[&LITTLE[..], &["--data-urls", &allowed]].concat(), &environment);
    let job = long(cluster.dir.path(), &remote, &labels);
    let saved = format!("checkpoint.url={}", cluster.dir.path().join("saved").display());
    let sets = ["--set", &saved, "--set", "checkpoint.every_steps=2"];
    let submission = |out: &Path, more: &[&str]| {
        let mut submission = cluster.submission(&job, out, &[&sets[..], more].concat());
        submission.envs(environment).stdout(Stdio::piped()).stderr(Stdio::piped());
        submission
    };
    // The data stands still while the object changes, so the job reads it again afterwards.
    let still = proxy.forwarded() + STILL;
    proxy.set_from(Fault::Stalls, still);
    let first = cluster.dir.path().join("first");
    let mut user = submission(&first, &[]).spawn().unwrap();
    until("a checkpoint is saved and the data stands still", PATIENCE, || {
        assert!(user.try_wait().unwrap().is_none(), "it ended before");
        let stands = proxy.forwarded() >= still && proxy.met() > 0;
        stands && first.join("metrics.jsonl").exists() && !events(&first, "checkpoint").is_empty()
    });
    let [good, other] = [&local[1], &local[0]].map(|file| fs::read(file).unwrap());
    assert_eq!(good.len(), other.len(), "only its ETag and its time tell that it changed");
    assert_eq!(server.request("PUT", "x1.npy", &other).0, 200);
    proxy.set(Fault::Nothing);
    let output = user.wait_with_output().unwrap();
    assert!(!output.status.success(), "{}", text(&output));
    let stopped = summary(&first);
    assert_eq!(stopped["status"], "failed", "{stopped}");
    for said in [text(&output).as_str(), stopped["reason"].as_str().unwrap()] {
        has(said, &[&remote[1], "the file has changed since", "restore it, or submit the job anew"]);
    }

    assert_eq!(server.request("PUT", "x1.npy", &good).0, 200);
    let second = cluster.dir.path().join("second");
    let output = submission(&second, &["--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&second)["samples_applied"], 18 * EPOCHS);
    assert!(model(&second) == undisturbed, "other bits than undisturbed");
}

#[test]
fn predictions_on_s3_are_those_of_a_disk_though_a_worker_is_killed() {
    let Some(server) = S3::start() else { return };
    let (proxy, dir) = (Proxy::start(&server), tempfile::tempdir().unwrap());
    let endpoint = format!("http://{}", proxy.address);
    let environment = environment(&endpoint);
    let weights = predict::trained(dir.path());
    let calm = dir.path().join("calm.jsonl");
    // 43 parts of 320 ms each.
    predict::alone(&weights, &calm, 6, &[]);

    let mut cluster = Cluster::with_environment(&example("oracle"), 1, 0, &environment);
    (0..2).for_each(|_| cluster.add_worker_with(&environment));
    let (job, data, url) = (predict::job(), predict::data(6), format!("s3://{}/p.jsonl", S3::BUCKET));
    let weights = weights.display().to_string();
    let command =
        ["predict", &job, "--model", &weights, "--out", &url, "--on", "train", "--master", &cluster.url];
    let mut command = harness::ebb([&command[..], &sets(&[&data, PACED, "fleet.ps=1"])].concat());
    command.envs(environment).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut user = command.spawn().unwrap();
    until("a part is written", PATIENCE, || {
        assert!(user.try_wait().unwrap().is_none(), "it ended before a part was written");
        server.keys().iter().any(|key| key.contains("part-"))
    });
    cluster.workers[0].signal("KILL");
    assert!(!server.keys().contains(&"p.jsonl".to_owned()), "a file before all parts");
    cluster.add_worker_with(&environment);
    let output = user.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(server.request("GET", "p.jsonl", b""), (200, fs::read(&calm).unwrap()));
    assert_eq!(server.keys().iter().filter(|key| key.contains("part-")).count(), 0, "parts are left");
}

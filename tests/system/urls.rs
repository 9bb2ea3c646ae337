//! Data by URL, with real processes: a job trains the same bits from a disk, a web server and the
//! object stores of three clouds, and each failure has its message.
#![cfg(feature = "cloud")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use proto::spec::data_url;

use crate::harness::clouds::Clouds;
use crate::harness::machine::until;
use crate::harness::s3::{Fault, Proxy, S3};
use crate::harness::web::{STALLS_FROM, Web};
use crate::harness::{self, Cluster, ebb, fail, metric, model, npy, root, succeed, summary, text};
use crate::images;

/// Time for something that takes a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn clicks() -> PathBuf {
    root().join("examples/tabular/clicks.parquet")
}

/// Writes the job file of a small training that reads `files`.
pub(crate) fn job(folder: &Path, files: &str) -> PathBuf {
    let job = format!(
        r#"
name = "urls"
epochs = 2
seed = 3
model = {{ builtin = "mlp", loss = "bce_with_logits", options = {{ hidden = [8] }} }}
batch = {{ micro = 32 }}
optimizer = {{ kind = "adam", learning_rate = 1e-3 }}

[data]
format = "parquet"
train = {{ files = ["{files}"], records = [0, 320] }}
validation_fraction = 0.2
label = "clicked"
normalize = {{ scale = 24 }}
"#
    );
    let path = folder.join("job.toml");
    fs::write(&path, job).unwrap();
    path
}

/// Returns what a program needs to read from an S3 server.
pub(crate) fn environment(endpoint: &str) -> [(&str, &str); 5] {
    [
        ("AWS_ENDPOINT", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
    ]
}

/// Trains in one process with one worker, and returns the model.
fn alone(files: &str, environment: &[(&str, &str)]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    trained(&job(folder.path(), files), environment)
}

/// Trains a job in one process with one worker, and returns the model.
pub(crate) fn trained(job: &Path, environment: &[(&str, &str)]) -> Vec<u8> {
    let out = job.with_file_name("out");
    let mut command = ebb(["run", "--workers", "1", "--out"]);
    let output = command.arg(&out).arg(job).envs(environment.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{}:\n{}", job.display(), text(&output));
    model(&out)
}

/// Trains on a cluster with two workers, and returns the model.
fn together(files: &str, worker: &[&str], environment: &[(&str, &str)]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    clustered(2, &job(folder.path(), files), worker, environment)
}

/// Trains a job on a cluster with so many workers, and returns the model.
fn clustered(workers: usize, job: &Path, worker: &[&str], environment: &[(&str, &str)]) -> Vec<u8> {
    // A lease that ends because the machine is slow would be read twice.
    let patient = [("EBB_MASTER_HEARTBEAT", "10s"), ("EBB_MASTER_DEATH", "60s")];
    let mut cluster = Cluster::with_environment(&harness::ebb_path(), 2, 0, &patient);
    (0..workers).for_each(|_| cluster.add_worker_as(worker, environment));
    let out = cluster.dir.path().join("out");
    let mut submission = cluster.submission(job, &out, &[]);
    let output = submission.envs(environment.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{}:\n{}", job.display(), text(&output));
    model(&out)
}

/// Runs a job that cannot read its data, and returns what the user is told.
fn refused(files: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (job, out) = (job(folder.path(), files), folder.path().join("out"));
    fail(["run", "--workers", "1", "--out", out.to_str().unwrap(), job.to_str().unwrap()])
}

/// Checks that a text has all of these words.
pub(crate) fn has(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "`{word}` missing in:\n{said}");
    }
}

#[test]
fn a_job_trains_the_same_bits_from_a_disk_a_web_server_and_s3() {
    let file = fs::read(clicks()).unwrap();
    let local = alone(clicks().to_str().unwrap(), &[]);
    let pattern = clicks().with_file_name("cl*.parquet");
    assert!(alone(&format!("file://{}", pattern.display()), &[]) == local, "file://");

    let web = Web::start(&[("clicks.parquet", file.clone())]);
    for how in ["", "busy/", "cut/", "whole/", "slow/"] {
        let path = &format!("{how}clicks.parquet");
        assert!(alone(&web.url(path), &[]) == local, "{path}");
        assert!(web.seen(path) > 2, "{path}: {} requests", web.seen(path));
    }
    let allowed = ["--data-urls", &web.url("")];
    assert!(together(&web.url("clicks.parquet"), &allowed, &[]) == local, "web server, two workers");

    let Some(server) = S3::start() else { return };
    let proxy = Proxy::start(&server);
    let endpoint = format!("http://{}", proxy.address);
    let environment = environment(&endpoint);
    for key in ["data/clicks.parquet", "data/more/other.parquet", "data/notes.txt"] {
        assert_eq!(server.request("PUT", key, &file).0, 200);
    }
    let folder = format!("s3://{}/data", S3::BUCKET);
    assert!(alone(&format!("{folder}/*.parquet"), &environment) == local, "S3, pattern");
    let allowed = ["--data-urls", &folder];
    let url = format!("{folder}/clicks.parquet");
    assert!(together(&url, &allowed, &environment) == local, "S3, two workers");
    let inspect = |url: &str| {
        let output = ebb(["data", "inspect", url]).envs(environment).output().unwrap();
        (output.status.success(), text(&output))
    };
    let (success, said) = inspect(&url);
    assert!(success && said.contains("parquet, 12000 records in 3 blocks"), "{said}");
    let (success, said) = inspect(&format!("{folder}/none.parquet"));
    assert!(!success, "{said}");
    has(&said, &["data/none.parquet: no such file", "check the bucket, the key and the region"]);

    let dir = tempfile::tempdir().unwrap();
    let convert = |source: &str, to: &str, out: &str| {
        let mut command = ebb(["data", "convert", source, "--to", to, "--out", out]);
        let output = command.args(["--records-per-shard", "6000"]).envs(environment).output().unwrap();
        (output.status.success(), text(&output))
    };
    let (here, there) = (dir.path().join("arrow"), format!("s3://{}/shards/", S3::BUCKET));
    let (clicks, file) = (clicks().display().to_string(), format!("file://{}", here.display()));
    let (success, said) = convert(&clicks, "arrow", &file);
    assert!(success && here.join("data.toml").exists(), "{said}");
    let (success, said) = convert(&clicks, "arrow", &there);
    assert!(success, "{said}");
    has(&said, &[&format!("{there}: 12000 records in 2 shards"), &format!("{there}part-00001.arrow")]);
    let keys = server.keys();
    let keys: Vec<_> = keys.iter().filter_map(|key| key.strip_prefix("shards/")).collect();
    assert_eq!(keys, ["data.toml", "part-00000.arrow", "part-00001.arrow"]);
    for name in &keys[1..] {
        let (status, found) = server.request("GET", &format!("shards/{name}"), b"");
        assert!(status == 200 && found == fs::read(here.join(name)).unwrap(), "{name}");
    }
    let back = dir.path().join("back").display().to_string();
    let (success, said) = convert(&format!("{there}part-*.arrow"), "parquet", &back);
    assert!(success && said.contains("12000 records in 2 shards"), "{said}");
    let (success, said) = convert(&clicks, "arrow", &there);
    assert!(!success && said.contains("3 files of an earlier conversion are there"), "{said}");
    has(
        &fail(["data", "convert", &clicks, "--to", "npy", "--out", "https://h/x"]),
        &["--out https://h/x: exp"],
    );
}

#[test]
fn a_job_trains_the_same_bits_from_google_cloud_storage_and_azure() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    let mut objects = BTreeMap::from([("data/notes.txt".to_owned(), Vec::new())]);
    for file in 0..2u8 {
        let pixels = npy("|u1", "6, 4", (0..24).map(|byte| byte * 7 + file));
        let labels = npy("|u1", "6,", (0..6).map(|record| (record + file) % 3));
        for (name, content) in [(format!("x-{file}.npy"), pixels), (format!("y-{file}.npy"), labels)] {
            fs::write(data.join(&name), &content).unwrap();
            objects.insert(format!("data/{name}"), content);
        }
    }
    let job = |place: &str| {
        let files = |pattern: &str| [format!("{place}/{pattern}")];
        two_steps(folder.path(), &files("x-*.npy"), &files("y-*.npy"))
    };
    let local = trained(&job(&data.display().to_string()), &[]);

    let images = images::write(&folder.path().join("images"));
    let local_images = trained(&images, &[]);
    objects.extend(below(images.parent().unwrap(), &["train", "validation"]));
    let clouds = Clouds::start(objects);
    let environments = [("gs", clouds.google()), ("az", clouds.azure())];
    for (scheme, environment) in environments {
        let bucket = format!("{scheme}://{}", Clouds::BUCKET);
        let place = format!("{bucket}/data");
        assert!(trained(&job(&place), &environment) == local, "{place}");
        let requests = clouds.requests();
        for (method, part) in [("GET ", "delimiter=%2F"), ("HEAD ", "npy"), ("GET ", "npy")] {
            let is_one = |request: &String| request.starts_with(method) && request.contains(part);
            assert!(requests.iter().any(is_one), "{scheme}: no {method}{part} in {requests:#?}");
        }
        let missing = format!("{place}/none.npy");
        let said = ebb(["data", "inspect", &missing]).envs(environment).output().unwrap();
        assert!(!said.status.success());
        has(&text(&said), &["data/none.npy: no such file", "check the bucket, the key and the region"]);
    }
    // What a listing says of an object is what Azure gives.
    let written = fs::read_to_string(&images).unwrap();
    let written = ["train", "validation"].iter().fold(written, |text, set| {
        text.replace(&format!("\"{set}\""), &format!("\"az://{}/{set}\"", Clouds::BUCKET))
    });
    fs::write(&images, written).unwrap();
    assert!(trained(&images, &clouds.azure()) == local_images, "images on Azure");
}

/// Returns the files two folders below these folders, by their paths below `root`.
fn below(root: &Path, folders: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for class in folders.iter().flat_map(|folder| fs::read_dir(root.join(folder)).unwrap()) {
        for file in fs::read_dir(class.unwrap().path()).unwrap().map(|entry| entry.unwrap().path()) {
            let name = file.strip_prefix(root).unwrap().display().to_string();
            found.insert(name, fs::read(&file).unwrap());
        }
    }
    found
}

#[test]
fn a_folder_of_images_on_s3_trains_the_same_bits_with_one_request_for_each_image() {
    let Some(server) = S3::start() else { return };
    let (proxy, data) = (Proxy::start(&server), tempfile::tempdir().unwrap());
    let endpoint = format!("http://{}", proxy.address);
    let environment = environment(&endpoint);
    let job = images::write(data.path());
    // Names with characters that mean something in a URL.
    for (name, other) in [("train/ant/0-420.jpg", "train/ant/0 #%+é.jpg"), ("train/bee", "train/bee = 1")] {
        fs::rename(data.path().join(name), data.path().join(other)).unwrap();
    }
    fs::rename(data.path().join("validation/bee"), data.path().join("validation/bee = 1")).unwrap();
    let local = trained(&job, &[]);

    let (mut images, mut largest) = (0, 0);
    for set in ["train", "validation"] {
        for class in fs::read_dir(data.path().join(set)).unwrap() {
            for image in fs::read_dir(class.unwrap().path()).unwrap().map(|entry| entry.unwrap().path()) {
                let (name, bytes) = (image.strip_prefix(data.path()).unwrap(), fs::read(&image).unwrap());
                let parts = name.iter().map(|part| data_url::encoded(part.to_str().unwrap()));
                let key = parts.collect::<Vec<_>>().join("/");
                assert_eq!(server.request("PUT", &format!("images/{key}"), &bytes).0, 200, "{key}");
                (images, largest) = (images + 1, largest.max(bytes.len()));
            }
        }
    }
    let bucket = format!("s3://{}/images", S3::BUCKET);
    let text = fs::read_to_string(&job).unwrap();
    let text = text.replace("\"train\"", &format!("\"{bucket}/train\""));
    fs::write(&job, text.replace("\"validation\"", &format!("\"{bucket}/validation\""))).unwrap();
    /// Counts the requests for each image.
    fn counts(proxy: &Proxy) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for request in proxy.requests() {
            assert!(request.starts_with("GET "), "{request}: a listing says what a HEAD would");
            if request.contains("/images/") {
                *counts.entry(request).or_default() += 1;
            }
        }
        counts
    }
    assert!(trained(&job, &environment) == local, "other bits from S3");
    let kept = counts(&proxy);
    assert_eq!(kept.len(), images);
    assert!(kept.values().all(|&count| count == 1), "memory has room for all images: {kept:#?}");

    let (memory, allowed) = (largest.to_string(), format!("s3://{}", S3::BUCKET));
    let little = ["--data-memory", memory.as_str(), "--data-urls", allowed.as_str()];
    assert!(clustered(1, &job, &little, &environment) == local, "other bits with little memory");
    // Three epochs, and the first records once more to try the model.
    let read = counts(&proxy);
    assert!(read.values().all(|&count| (1..=4).contains(&count)), "{read:#?}");
    let all: usize = read.values().sum();
    assert!(all > 2 * images && all <= 3 * images + 4, "{all} requests for {images} images");

    server.request("PUT", "images/train/dog/notes.txt", b"no image");
    let out = data.path().join("refused");
    let run = ebb(["run", "--workers", "1", "--out", out.to_str().unwrap(), job.to_str().unwrap()])
        .envs(environment)
        .output()
        .unwrap();
    assert!(!run.status.success());
    has(&harness::text(&run), &[&format!("{bucket}/train/dog: a class folder without images")]);
    let said = fail([
        "run",
        "--out",
        out.to_str().unwrap(),
        "--set",
        "data.train={ files = [\"http://host/train\"] }",
        job.to_str().unwrap(),
    ]);
    has(&said, &["`http://host/train`: a web server does not list the images"]);
}

#[test]
fn data_that_cannot_be_read_says_why_and_what_to_check() {
    let web = Web::start(&[("clicks.parquet", fs::read(clicks()).unwrap())]);
    let url = web.url("none.parquet");
    has(&refused(&url), &[&url, "no such file (404 Not Found)", "check the URL"]);
    let url = web.url("denied/clicks.parquet");
    has(&refused(&url), &[&url, "refuses it (403 Forbidden)", "without credentials"]);
    has(
        &refused(&web.url("changing/clicks.parquet")),
        &["the file has changed since", "submit the job anew"],
    );
    has(&refused("http://169.254.169.254/x.parquet"), &["a link-local address", "never read"]);
    for (name, word) in [
        ("https://anna:hush@host/x.parquet", "a user name or a password"),
        ("https://host/x.parquet?X-Amz-Signature=hush", "x-amz-signature"),
    ] {
        let said = refused(name);
        has(&said, &[word, "everybody would see"]);
        assert!(!said.contains("hush"), "{said}");
    }
    has(
        &refused("ftp://host/x.parquet"),
        &["data.train: `ftp://host/x.parquet`", "begins with file://, s3://"],
    );
    has(&refused("none-*.parquet"), &["none-*.parquet: no file fits this pattern"]);

    let said = succeed(["data", "inspect", &web.url("clicks.parquet"), "--records", "1"]);
    has(&said, &["parquet, 12000 records in 3 blocks", "record 0: user "]);
    let url = web.url("denied/clicks.parquet");
    has(&fail(["data", "inspect", &url]), &[&url, "403"]);
}

#[test]
fn a_file_by_url_is_converted_and_evaluated_like_a_local_one() {
    let web = Web::start(&[("clicks.parquet", fs::read(clicks()).unwrap())]);
    let url = web.url("clicks.parquet");
    let folder = tempfile::tempdir().unwrap();
    let pattern = clicks().with_file_name("cl*.parquet");
    let shards = |name: &str, source: &str| {
        let out = folder.path().join(name);
        succeed(["data", "convert", source, "--to", "arrow", "--out", out.to_str().unwrap()]);
        fs::read(out.join("part-00000.arrow")).unwrap()
    };
    assert!(shards("web", &url) == shards("disk", pattern.to_str().unwrap()), "other shards");
    let refused = folder.path().join("refused");
    let refused = refused.to_str().unwrap();
    let said = fail(["data", "convert", &web.url("denied/clicks.parquet"), "--to", "npy", "--out", refused]);
    has(&said, &["denied/clicks.parquet", "403"]);

    let out = folder.path().join("trained");
    let local = job(folder.path(), pattern.to_str().unwrap());
    succeed(["run", "--workers", "1", "--out", out.to_str().unwrap(), local.to_str().unwrap()]);
    let evaluate = |files: &str, name: &str| {
        let (job, found) = (job(folder.path(), files), folder.path().join(name));
        let (trained, found) = (out.to_str().unwrap(), found.to_str().unwrap());
        succeed(["evaluate", "--model", trained, "--workers", "2", "--out", found, job.to_str().unwrap()]);
        summary(Path::new(found))["evaluations"].clone()
    };
    let there = evaluate(&url, "there");
    assert_eq!(there, evaluate(pattern.to_str().unwrap(), "here"));
    assert_eq!(there.as_array().map(Vec::len), Some(1), "{there}");
}

#[test]
fn a_worker_reads_the_urls_that_its_operator_lists() {
    let web = Web::start(&[("clicks.parquet", fs::read(clicks()).unwrap())]);
    let url = web.url("clicks.parquet");
    let (listed, nothing): (&[&str], &[&str]) = (&["--data-urls", "s3://bucket/data"], &[]);
    for (worker, words) in [
        (listed, ["`s3://bucket/data`", "data_urls"]),
        // A web server of the worker's machine.
        (nothing, ["an address of this machine", "lists the URL in data_urls"]),
    ] {
        let mut cluster = Cluster::of(&harness::ebb_path(), 1, 0);
        cluster.add_worker_as(worker, &[]);
        let (job, out) = (job(cluster.dir.path(), &url), cluster.dir.path().join("out"));
        let output = cluster.submit(&job, &out, &[]);
        assert!(!output.status.success(), "{}", text(&output));
        has(&text(&output), &words);
        has(&summary(&out)["reason"].to_string(), &["data_urls"]);
    }
    assert_eq!(web.seen("clicks.parquet"), 0);
    has(&fail(["worker", "--data-urls", "/data"]), &["data_urls: `/data`: expected the beginning of a URL"]);
}

/// Writes the job file of two steps, with one microbatch in each of these files.
pub(crate) fn two_steps(folder: &Path, features: &[String], labels: &[String]) -> PathBuf {
    let job = format!(
        r#"
name = "stalls"
epochs = 1
seed = 3
model = {{ builtin = "mlp", loss = "cross_entropy", options = {{ hidden = [2] }} }}
batch = {{ micro = 6, effective = 12 }}
optimizer = {{ kind = "sgd", learning_rate = 1e-3 }}

[data]
format = "npy"
shuffle = "none"
train = {{ features = {features:?}, labels = {labels:?} }}
normalize = {{ scale = 255 }}
"#
    );
    let path = folder.join("job.toml");
    fs::write(&path, job).unwrap();
    path
}

#[test]
fn a_worker_that_leaves_while_its_source_stalls_calls_nothing_done_that_it_did_not_push() {
    let (record, folder) = (512 << 10, tempfile::tempdir().unwrap());
    let at = |name: &str| folder.path().join(name);
    let pixels = npy("|u1", &format!("6, {record}"), (0..6 * record).map(|byte| (byte % 251) as u8));
    assert!(pixels.len() > STALLS_FROM, "a part stalls");
    let mut labels = Vec::new();
    for file in 0..3 {
        let name = format!("y{file}.npy");
        fs::write(at(&name), npy("|u1", "6,", (0..6).map(|record| (record + file) % 3))).unwrap();
        labels.push(at(&name).display().to_string());
    }
    fs::write(at("x.npy"), &pixels).unwrap();
    let local = at("x.npy").display().to_string();
    let undisturbed =
        trained(&two_steps(folder.path(), &[local.clone(), local.clone(), local], &labels), &[]);

    let web = Web::start(&[("x.npy", pixels)]);
    let mut cluster = Cluster::start(1, 0);
    // Its memory has room for one file. So a worker that has counted the records of all three reads
    // the second one again to train.
    let options = ["--data-urls", &web.url(""), "--data-memory", "4194304", "--metrics", "127.0.0.1:0"];
    cluster.add_worker_as(&options, &[]);
    let out = cluster.dir.path().join("out");
    let files = [web.url("x.npy"), web.url("stalls/x.npy"), web.url("busy/x.npy")];
    let job = two_steps(cluster.dir.path(), &files, &labels);
    let mut submission = cluster.submission(&job, &out, &[]);
    let user = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let metrics = cluster.workers[0].metrics_url();
    until("the second microbatch cannot be read", PATIENCE, || {
        metric(&metrics, "ebb_worker_microbatches_total") > 0.0 && web.stalled() > 0
    });
    cluster.workers[0].signal("TERM");
    assert!(cluster.workers[0].child.wait().unwrap().success(), "{}", cluster.workers[0].log());
    web.go_on();
    cluster.add_worker_as(&options, &[]);
    let output = user.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&out)["samples_applied"], 18);
    assert!(model(&out) == undisturbed, "other bits than undisturbed");
}

#[test]
fn a_bucket_that_denies_access_is_named_with_what_to_check() {
    let Some(server) = S3::start() else { return };
    let (proxy, folder) = (Proxy::start(&server), tempfile::tempdir().unwrap());
    let endpoint = format!("http://{}", proxy.address);
    let environment = environment(&endpoint);
    assert_eq!(server.request("PUT", "data/clicks.parquet", &fs::read(clicks()).unwrap()).0, 200);
    let url = format!("s3://{}/data/clicks.parquet", S3::BUCKET);
    let (job, out) = (job(folder.path(), &url), folder.path().join("out"));
    let run = || {
        let mut command = ebb(["run", "--workers", "1", "--out"]);
        command.arg(&out).arg(&job).envs(environment).output().unwrap()
    };
    proxy.set(Fault::Denied);
    let refused = run();
    assert!(!refused.status.success(), "{}", text(&refused));
    has(&text(&refused), &[&url, "access denied (", "check the credentials"]);
    assert!(proxy.met() < 20, "{} requests of a task that has no rights", proxy.met());
    proxy.set(Fault::Nothing);
    let granted = run();
    assert!(granted.status.success(), "{}", text(&granted));
}

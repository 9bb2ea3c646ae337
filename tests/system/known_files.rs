//! What was found in files of a job is known after a restart of the master and in a second job: the
//! files are not read again for it.
#![cfg(feature = "cloud")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::harness::machine::until;
use crate::harness::web::Web;
use crate::harness::{Cluster, model, npy, succeed, summary, text};

/// Time for something that takes a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Records of a file, and values of a record.
const RECORDS: usize = 16_384;
const WIDTH: usize = 512;

/// Bytes that a job of the first records may read of a file, and fewer than a file has.
const FIRST_BYTES: usize = RECORDS * WIDTH * 4 / 2;

/// Returns features and labels of a file.
fn file(seed: usize) -> [Vec<u8>; 2] {
    let value = |at: usize| ((at * 31 + seed) % 97) as f32 / 97.0;
    let features = (0..RECORDS * WIDTH).flat_map(|at| value(at).to_le_bytes());
    let labels = (0..RECORDS).flat_map(|at| ((at % 3) as i64).to_le_bytes());
    [npy("<f4", &format!("{RECORDS}, {WIDTH}"), features), npy("<i8", &format!("{RECORDS},"), labels)]
}

/// Writes the job file of a training with 64 records.
fn job(folder: &Path, web: &Web) -> std::path::PathBuf {
    let urls = |names: [&str; 2]| names.map(|name| format!("\"{}\"", web.url(name))).join(", ");
    let job = format!(
        r#"
name = "known"
epochs = 1
model = {{ builtin = "softmax" }}
batch = {{ micro = 32 }}
optimizer = {{ kind = "sgd", learning_rate = 0.01 }}

[data]
format = "npy"
train = {{ features = [{}], labels = [{}], records = [0, 64] }}
"#,
        urls(["x0.npy", "held/x1.npy"]),
        urls(["y0.npy", "y1.npy"])
    );
    let path = folder.join("job.toml");
    fs::write(&path, job).unwrap();
    path
}

#[test]
fn a_file_is_not_read_again_for_its_index_by_a_restarted_master_or_a_second_job() {
    let ([x0, y0], [x1, y1]) = (file(0), file(1));
    let bytes = x0.len();
    let web = Web::start(&[("x0.npy", x0), ("y0.npy", y0), ("x1.npy", x1), ("y1.npy", y1)]);
    let mut cluster = Cluster::start(1, 0);
    cluster.add_worker_as(&["--data-urls", &web.url("")], &[]);
    let (job, out) = (job(cluster.dir.path(), &web), cluster.dir.path().join("first"));
    let mut submission = cluster.submission(&job, &out, &[]);
    let child = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until("the worker asks for the second file", PATIENCE, || web.seen("held/x1.npy") > 0);
    cluster.workers[0].wait_for("task reported");
    assert!(web.sent("x0.npy") >= bytes, "the first file is indexed");
    // The answer comes when everything before is durable.
    succeed(["scale", "known-1", "--workers", "9", "--master", &cluster.url]);
    let before = web.sent("x0.npy");
    let status = succeed(["status", "known-1", "--master", &cluster.url]);
    assert!(status.contains("1 of 2 files, 32.1 MiB counted"), "{status}");

    cluster.restart_master();
    web.go_on();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&out)["samples_applied"], 64);
    let watched = succeed(["watch", "known-1", "--json", "--master", &cluster.url]);
    let expected = r#""event":"indexing","files_done":1,"files":2,"bytes_done":"#;
    assert!(watched.contains(expected), "{watched}");
    let again = web.sent("x0.npy") - before;
    assert!(again < FIRST_BYTES, "{again} of {bytes} bytes of the first file were read again");

    let before = ["x0.npy", "held/x1.npy"].map(|name| web.sent(name));
    let second = cluster.dir.path().join("second");
    let output = cluster.submit(&job, &second, &["--set", "optimizer.learning_rate=0.02"]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&second) != model(&out), "another learning rate");
    for (name, before) in ["x0.npy", "held/x1.npy"].into_iter().zip(before) {
        let again = web.sent(name) - before;
        assert!(again < FIRST_BYTES, "{again} of {bytes} bytes of `{name}` were read for a second job");
    }
}

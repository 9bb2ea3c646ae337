//! A user's mistakes get an answer that says what, where, expected against found, and what to do;
//! and nothing is lost.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use crate::harness::{self, ebb, fail, model, root, summary, text, told};
use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::TempDir;

/// A folder with a job on tiny data, to be spoiled.
struct Job {
    dir: TempDir,
}

const SPEC: &str = r#"
name = "tiny"
epochs = 2
[model]
builtin = "softmax"
options = { classes = 3 }
[data]
format = "idx"
train = { features = ["x.idx"], labels = ["y.idx"] }
[batch]
micro = 4
[optimizer]
kind = "sgd"
learning_rate = 0.1
"#;

impl Job {
    fn new() -> Self {
        let job = Self { dir: tempfile::tempdir().unwrap() };
        job.write("job.toml", SPEC.as_bytes());
        job.write("x.idx", &idx(&[12, 2], &(0..24).collect::<Vec<u8>>()));
        job.write("y.idx", &idx(&[12], &[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]));
        job
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, content: &[u8]) {
        fs::write(self.path(name), content).unwrap();
    }

    fn edit(&self, from: &str, to: &str) {
        let text = fs::read_to_string(self.path("job.toml")).unwrap();
        assert!(text.contains(from), "{from}");
        self.write("job.toml", text.replace(from, to).as_bytes());
    }

    /// Runs the job, which must fail, and returns its output.
    fn error(&self) -> String {
        fail([Path::new("run"), &self.path("job.toml"), Path::new("--out"), &self.path("out")])
    }

    #[track_caller]
    fn says(&self, parts: &[&str]) {
        let said = self.error();
        for part in parts {
            assert!(said.contains(part), "`{part}` missing in:\n{said}");
        }
    }
}

/// Returns an idx file of unsigned bytes.
fn idx(shape: &[u32], values: &[u8]) -> Vec<u8> {
    let mut file = vec![0, 0, 8, shape.len() as u8];
    shape.iter().for_each(|size| file.extend(size.to_be_bytes()));
    file.extend(values);
    file
}

#[test]
fn a_tiny_job_is_fine_before_it_is_spoiled() {
    let job = Job::new();
    harness::succeed([Path::new("run"), &job.path("job.toml"), Path::new("--out"), &job.path("out")]);
    assert_eq!(summary(&job.path("out"))["samples_applied"], 24);
}

#[test]
fn the_job_file_is_checked_before_anything_starts() {
    let job = Job::new();
    job.edit("epochs = 2", "epochs = = 2");
    job.says(&["job.toml, line 3, column"]);

    let job = Job::new();
    job.edit("micro = 4", "mikro = 4");
    job.says(&["line 11", "did you mean `micro`?"]);

    let job = Job::new();
    job.edit("learning_rate = 0.1", "learning_rate = \"fast\"");
    job.says(&["line 14", "fast"]);

    let job = Job::new();
    job.edit("micro = 4", "micro = 4\neffective = 2");
    job.edit("epochs = 2", "epochs = 0");
    job.edit("builtin = \"softmax\"", "builtin = \"softmax\"\nscript = \"model.pt\"");
    job.says(&["epochs", "batch.effective = 2", "either `script`"]);

    let job = Job::new();
    job.edit("micro = 4", "micro = 4\n[exchange]\ndtype = \"bf61\"");
    job.says(&["line 13", "unknown variant `bf61`", "did you mean `bf16`?"]);

    let said = fail(["run", "/nonexistent/job.toml"]);
    assert!(said.contains("/nonexistent/job.toml"), "{said}");
}

#[test]
fn the_file_of_a_role_is_checked_whole_and_shown_with_its_origins() {
    let job = Job::new();
    let file = job.path("master.toml");
    let file = file.to_str().unwrap();
    job.write("master.toml", b"deth = '9s'\nmembers_max = 'all'\n");
    let said = fail(["master", "--listen", "127.0.0.1:0", "--data-dir", "unused", "--config", file]);
    for part in ["no setting `deth`; did you mean `death`?", "members_max: expected a number"] {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
    job.write("master.toml", b"death = '9s'\nmembers_max = 20000\n");
    let mut show = ebb(["config", "show", "master", "--json", "--ps-grace", "1m", "--config", file]);
    let output = show.env("EBB_MASTER_JOBS_MAX", "7").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = shown["settings"].as_array().unwrap();
    for (setting, value, unit, origin) in [
        ("death", serde_json::json!("9s"), "duration", "file"),
        ("members_max", 20000.into(), "count", "file"),
        ("jobs_max", 7.into(), "count", "environment"),
        ("ps_grace", "1m".into(), "duration", "flag"),
        ("heartbeat", "1s".into(), "duration", "default"),
    ] {
        let row = rows.iter().find(|row| row["setting"] == setting).unwrap();
        assert_eq!(
            (&row["value"], &row["unit"], &row["origin"]),
            (&value, &unit.into(), &origin.into()),
            "{row}"
        );
    }
    let said = harness::succeed(["config", "show", "worker"]);
    assert!(said.contains("prefetch") && said.contains("default"), "{said}");
}

#[test]
fn data_that_is_not_what_it_says_is_named() {
    let job = Job::new();
    fs::remove_file(job.path("x.idx")).unwrap();
    fs::remove_file(job.path("y.idx")).unwrap();
    fs::create_dir(job.path("y.idx")).unwrap();
    let said = job.error();
    for part in
        ["2 of 2 data files cannot be read", "x.idx: No such file", "y.idx: it is a folder", "--data-root"]
    {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
    assert!(!said.contains("indexing") && !job.path("out").exists(), "something was started: {said}");

    let job = Job::new();
    job.write("x.idx", b"PNG, really, and long enough to have a header");
    job.says(&["x.idx", "no idx file", "found [80, 78"]);

    let job = Job::new();
    job.write("x.idx", &idx(&[12, 2], &[1; 20]));
    job.says(&["x.idx", "24", "20"]);

    let job = Job::new();
    let mut gz = GzEncoder::new(Vec::new(), Compression::default());
    gz.write_all(&idx(&[12, 2], &[1; 24])).unwrap();
    let whole = gz.finish().unwrap();
    job.write("x.idx", &whole[..whole.len() - 9]);
    job.says(&["x.idx"]);

    let job = Job::new();
    job.write("y.idx", &idx(&[11], &[0; 11]));
    job.says(&["12", "11"]);

    let job = Job::new();
    job.write("y.idx", &idx(&[12], &[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 7]));
    job.says(&["label 7", "0..3"]);
}

#[test]
fn a_model_that_does_not_fit_is_named() {
    let job = Job::new();
    job.edit("builtin = \"softmax\"", "builtin = \"sofmax\"");
    job.says(&["sofmax", "softmax"]);

    let job = Job::new();
    job.edit("classes = 3", "clases = 3");
    job.says(&["clases", "classes"]);

    let job = Job::new();
    job.edit("builtin = \"softmax\"", "builtin = \"softmax\"\nloss = \"bce_with_logits\"");
    job.says(&["bce_with_logits"]);
}

#[cfg(feature = "torch")]
#[test]
fn a_script_that_is_none_is_named() {
    let job = Job::new();
    job.edit("builtin = \"softmax\"\noptions = { classes = 3 }", "script = \"model.pt\"");
    job.says(&["model.pt"]);
    job.write("model.pt", b"not a zip archive");
    job.says(&["model.pt", "torch.jit"]);
}

#[test]
fn a_loss_that_is_not_finite_stops_the_job_and_keeps_the_last_good_model() {
    let job = Job::new();
    job.edit("learning_rate = 0.1", "learning_rate = 1e30");
    job.edit("kind = \"sgd\"", "kind = \"sgd\"\nweight_decay = 10.0");
    job.says(&[
        "step",
        "not finite|NaN|inf".split('|').find(|word| job.error().contains(word)).unwrap_or("not finite"),
    ]);
    let out = job.path("out");
    assert_eq!(summary(&out)["status"], "failed");
    let file = model(&out);
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    for (name, tensor) in tensors.tensors() {
        let values = tensor.data().as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw));
        assert!(values.into_iter().all(f32::is_finite), "{name} has a value that is not finite");
    }
}

#[test]
fn an_output_folder_that_cannot_be_written_is_found_before_training() {
    let job = Job::new();
    job.write("out", b"a file, no folder");
    let said = job.error();
    assert!(said.contains("out"), "{said}");
    assert!(!said.contains("step"), "it trained first:\n{said}");
}

#[test]
fn a_master_that_is_not_there_is_named_after_visible_retries() {
    // No process listens there.
    let reserved = harness::machine::Reserved::local();
    let url = format!("http://{}", reserved.address);
    let said = fail(["status", "1", "--master", &url, "--master-timeout", "1s"]);
    assert!(said.contains(&url), "{said}");
}

#[test]
fn ctrl_c_leaves_cleanly_and_keeps_what_is_trained() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let child = ebb(["run", "--out"])
        .arg(&out)
        .arg(root().join("examples/digits/job.toml"))
        .args(["--set", "epochs=100000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until(|| told(&out, "train") > 0);
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "a job that was stopped is no success");
    assert!(text(&output).contains("kept") || text(&output).contains("keeps"), "{}", text(&output));
    assert_eq!(summary(&out)["status"], "cancelled");
    assert!(!model(&out).is_empty());
}

/// Waits for a state that must come. The test runner's limit is the deadline.
fn until(mut state: impl FnMut() -> bool) {
    while !state() {
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

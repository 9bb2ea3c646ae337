//! Share of its time that a worker waits for data, where the model needs a quarter more time for a
//! microbatch than the input pipeline.
//!
//! One worker trains on a folder of JPEG files with random crops. `ebb data bench` says how many
//! records the pipeline alone reaches. The network then takes the time that corresponds to 0.8 of
//! that rate (`tests/harness/paced.rs`; it sleeps, so that it takes no processor from decoding).
//! The figure is `data_wait` of `summary.json`.
//!
//! Expected: 0. Decoding runs ahead of the computation, so a worker waits for its first batch only.
//!
//! `cargo bench --no-default-features --bench data_wait` takes two minutes. Without `--bench` two
//! epochs run.
#![expect(clippy::disallowed_methods, reason = "a bench measures real processes in real time")]

#[allow(dead_code, reason = "the job of this bench reads files")]
#[path = "../support/fleet.rs"]
mod fleet;
#[path = "../../tests/harness/mod.rs"]
mod harness;
#[path = "../../tests/harness/paced.rs"]
mod paced;
#[path = "../support/report.rs"]
mod report;
#[path = "../support/trace.rs"]
mod trace;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use harness::{program, succeed, summary, text};
use report::{Figure, Target};

/// Records of a microbatch.
const MICRO: u64 = 64;

/// Copies of each image.
const COPIES: usize = 64;

/// Images of about 110 KB would need a generator; these are the largest golden files of the
/// decoder.
const IMAGES: [&str; 4] = ["420.jpg", "422.jpg", "444.jpg", "progressive.jpg"];

/// Part of the pipeline's rate that the model takes.
const PART: f64 = 0.8;

fn main() -> ExitCode {
    fleet::main("data_wait", |full| {
        let dir = tempfile::tempdir().expect("a temporary folder");
        write(dir.path());
        let seconds = if full { "8" } else { "1" };
        let rounds = if full { 5 } else { 1 };
        let waited = (0..rounds).map(|round| wait(dir.path(), seconds, full, round)).collect();
        vec![Figure::new("wait for data of a worker", "% of its time", waited, 0.0, Some(Target::Below(2.0)))]
    })
}

/// Writes the images.
fn write(folder: &Path) {
    let golden = harness::root().join("data/src/pixels/golden");
    for class in 0..2 {
        let place = folder.join(format!("images/{class}"));
        fs::create_dir_all(&place).expect("a folder");
        for (copy, name) in (0..COPIES).flat_map(|copy| IMAGES.map(|name| (copy, name))) {
            fs::copy(golden.join(name), place.join(format!("{copy:03}-{name}"))).expect("the disk has room");
        }
    }
}

/// Returns the job file of a model that takes `millis` for a microbatch.
fn job(folder: &Path, epochs: u64, millis: u64) -> String {
    let images = folder.join("images");
    format!(
        r#"
name = "wait"
epochs = {epochs}
seed = 2
[model]
builtin = "paced"
options = {{ of = "softmax", millis = {millis} }}
[data]
format = "images"
train = {{ files = ["{}"] }}
inputs = ["image"]
label = "class"
[data.transforms]
image = [
    {{ op = "decode" }},
    {{ op = "random_resized_crop", size = 64 }},
    {{ op = "horizontal_flip" }},
    {{ op = "color_jitter", brightness = 0.2, contrast = 0.2, saturation = 0.2, hue = 0.1 }},
    {{ op = "normalize", mean = 0.45, std = 0.22 }},
]
[batch]
micro = {MICRO}
[optimizer]
kind = "sgd"
learning_rate = 1e-4
"#,
        images.display()
    )
}

/// Returns the share of time that a worker waited, in percent.
fn wait(folder: &Path, seconds: &str, full: bool, round: usize) -> f64 {
    let (path, out) = (folder.join("job.toml"), folder.join(format!("out-{round}")));
    let path_text = path.display().to_string();
    // `ebb data bench` builds no model.
    fs::write(
        &path,
        job(folder, 1, 1).replace("paced", "softmax").replace("of = \"softmax\", millis = 1", ""),
    )
    .expect("a file");
    let found = succeed(["data", "bench", &path_text, "--seconds", seconds, "--json"]);
    let found: serde_json::Value = serde_json::from_str(&found).expect("JSON");
    let rate = found["records_per_second"].as_f64().expect("a rate");
    let millis = (MICRO as f64 / (PART * rate) * 1000.0).ceil() as u64;
    let records = (2 * COPIES * IMAGES.len()) as f64;
    let epochs = if full { (20.0 * PART * rate / records).ceil() as u64 } else { 2 };
    fs::write(&path, job(folder, epochs, millis)).expect("a file");
    let exe = std::env::current_exe().expect("this program");
    let cluster = harness::Cluster::of(&exe, 1, 1);
    let output = program(&harness::ebb_path(), ["submit", "--master", &cluster.url, "--follow", "--out"])
        .arg(&out)
        .arg(&path)
        .output()
        .expect("ebb starts");
    assert!(output.status.success(), "{}", text(&output));
    let waited = summary(&out)["data_wait"].as_f64().expect("a share") * 100.0;
    println!("pipeline alone {rate:.0} records/s, {millis} ms a microbatch of {MICRO}: waited {waited:.2} %");
    waited
}

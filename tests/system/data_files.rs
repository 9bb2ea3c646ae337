//! `ebb data`: looking at data files, measuring them, and writing them in another format.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::harness::tmpfs::Tmpfs;
use crate::harness::{ebb, fail, model, root, succeed};

/// A job on the table of an example, without its section `[data]`.
const JOB: &str = r#"
name = "clicks"
epochs = 1
model = { builtin = "mlp", loss = "bce_with_logits" }
batch = { micro = 64, effective = 128 }
optimizer = { kind = "sgd", learning_rate = 1e-4 }
"#;

/// Runs `ebb` and reads the JSON object that it prints.
fn object(args: &[&str]) -> Value {
    let said = succeed(args);
    let line = said.lines().find(|line| line.starts_with('{')).unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Copies golden images into a folder with two classes.
fn images(folder: &Path) {
    let golden = root().join("data/src/pixels/golden");
    for (class, names) in [("ant", ["420.jpg", "rgb.png"]), ("bee", ["lossy.webp", "3x33.jpg"])] {
        fs::create_dir_all(folder.join(class)).unwrap();
        for name in names {
            fs::copy(golden.join(name), folder.join(class).join(name)).unwrap();
        }
    }
}

#[test]
fn images_show_their_sizes_and_make_a_contact_sheet() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, picture) = (dir.path().join("train"), dir.path().join("sheet.png"));
    images(&folder);
    let (folder, sheet) = (folder.display().to_string(), picture.display().to_string());
    let found = object(&["data", "inspect", &folder, "--json"]);
    let sizes = &found["images"][0];
    assert_eq!(
        (&sizes["column"], &sizes["sampled"], &sizes["damaged"]),
        (&json!("image"), &json!(4), &json!(0))
    );
    assert_eq!(sizes["smallest"], json!([33, 3]));
    let said = succeed(["data", "inspect", &folder, "--contact-sheet", &sheet, "--images", "3"]);
    assert!(said.contains("4 images of `image` looked at") && said.contains("smallest 33 x 3"), "{said}");
    assert!(said.contains("sheet.png: 3 images"), "{said}");
    assert!(fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
    let table = root().join("examples/tabular/clicks.parquet").display().to_string();
    let said = fail(["data", "inspect", &table, "--contact-sheet", &sheet]);
    assert!(said.contains("no column of images"), "{said}");
    let said = fail(["data", "inspect", &folder, "--contact-sheet", &sheet, "--label", "colour"]);
    assert!(said.contains("label `colour`: no such column; there are image, class"), "{said}");
}

#[test]
fn a_token_file_needs_to_know_how_it_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("train.bin");
    fs::write(&path, (0..9u16).flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
    let file = path.display().to_string();
    assert!(fail(["data", "inspect", &file, "--format", "tokens"]).contains("add --token-type u16"));
    assert!(
        fail(["data", "inspect", &file, "--token-type", "u8", "--block", "4"])
            .contains("expected u16 or u32")
    );
    let said = succeed(["data", "inspect", &file, "--token-type", "u16", "--block", "4", "--records", "1"]);
    assert!(said.contains("tokens, 2 records") && said.contains("`labels` i32[4]"), "{said}");
    assert!(said.contains("record 0: tokens [0, 1, 2, 3], labels [1, 2, 3, 4]"), "{said}");
}

/// Trains a job, and returns the bits of its model.
fn trained(folder: &Path, name: &str, data: &str) -> Vec<u8> {
    let (job, out) = (folder.join(format!("{name}.toml")), folder.join(name));
    fs::write(&job, format!("{JOB}{data}")).unwrap();
    succeed(["run", &job.display().to_string(), "--out", &out.display().to_string()]);
    model(&out)
}

#[test]
fn a_job_trains_the_same_bits_from_the_shards_as_from_the_source() {
    let dir = tempfile::tempdir().unwrap();
    let table = root().join("examples/tabular/clicks.parquet").display().to_string();
    let label = "label = \"clicked\"\nnormalize = { scale = 24 }\n";
    let source = format!("[data]\nformat = \"parquet\"\ntrain = {{ files = [{table:?}] }}\n{label}");
    let expected = trained(dir.path(), "source", &source);
    for to in ["arrow", "parquet"] {
        let out = dir.path().join(to).display().to_string();
        let more = ["--to", to, "--out", &out, "--records-per-shard", "5000", "--threads", "3"];
        let said = succeed([&["data", "convert", &table][..], &more].concat());
        assert!(said.contains("12000 records in 3 shards"), "{said}");
        assert!(said.contains("12000 of 12000 records"), "no progress: {said}");
        let section = fs::read_to_string(dir.path().join(to).join("data.toml")).unwrap();
        assert!(said.contains(section.trim()), "{said}");
        assert!(
            trained(dir.path(), &format!("from-{to}"), &(section + label)) == expected,
            "{to}: other bits"
        );
        let said = fail([&["data", "convert", &table][..], &more].concat());
        assert!(said.contains("4 files of an earlier conversion are there"), "{said}");
    }
}

/// Settings of `[data]` for [`small`], in a format that calls its columns so.
fn columns(user: &str, age: &str, label: &str) -> String {
    format!("inputs = {{ features = [\"{user}\", \"{age}\"] }}\nlabel = \"{label}\"\n")
}

/// Returns a table of 64 records.
fn small() -> String {
    let lines = (0..64).map(|record| format!("{},{}.5,{}\n", record % 7, record % 13, record % 2));
    "user,age,y\n".to_owned() + &lines.collect::<String>()
}

#[test]
fn a_table_trains_the_same_bits_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let (text, plain) = (small(), columns("user", "age", "y"));
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(text.as_bytes()).unwrap();
    let from_text = |format: &str, file: &str, content: &[u8]| {
        fs::write(dir.path().join(file), content).unwrap();
        let data = format!("[data]\nformat = {format:?}\ntrain = {{ files = [{file:?}] }}\n{plain}");
        trained(dir.path(), &format!("from-{file}"), &data)
    };
    let expected = from_text("csv", "t.csv", text.as_bytes());
    assert!(from_text("tsv", "t.tsv", text.replace(',', "\t").as_bytes()) == expected, "tsv: other bits");
    assert!(from_text("csv", "t.csv.gz", &gzip.finish().unwrap()) == expected, "gzip: other bits");
    let zstandard = zstd::encode_all(text.as_bytes(), 0).unwrap();
    assert!(from_text("csv", "t.csv.zst", &zstandard) == expected, "Zstandard: other bits");

    let table = dir.path().join("t.csv").display().to_string();
    let in_tar = columns("user.npy", "age.npy", "y.npy");
    for to in ["parquet", "arrow", "npy", "safetensors", "tar", "tfrecord", "jsonl"] {
        let out = dir.path().join(to).display().to_string();
        succeed(["data", "convert", &table, "--to", to, "--out", &out, "--records-per-shard", "25"]);
        let section = fs::read_to_string(dir.path().join(to).join("data.toml")).unwrap();
        let names = if to == "tar" { &in_tar } else { &plain };
        let bits = trained(dir.path(), &format!("from-{to}"), &(section + names));
        assert!(bits == expected, "{to}: other bits");
    }
}

/// Returns settings of `[data]` for images, without random transforms: these draw by the name of
/// the column.
fn image_data(format: &str, train: &str, column: &str, label: &str) -> String {
    format!(
        "[data]\nformat = {format:?}\ntrain = {{ files = [{train:?}] }}\ninputs = {{ image = {column:?} }}\n\
         label = {label:?}\n[data.transforms]\n{column} = [{{ op = \"decode\" }}, \
         {{ op = \"resize\", size = [6, 8] }}, {{ op = \"normalize\" }}]\n"
    )
}

#[test]
fn images_in_a_tar_archive_train_the_bits_of_their_folder() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, shards) = (dir.path().join("train"), dir.path().join("shards"));
    images(&folder);
    let out = shards.display().to_string();
    succeed(["data", "convert", &folder.display().to_string(), "--to", "tar", "--out", &out]);
    let expected = trained(dir.path(), "folder", &image_data("images", "train", "image", "class"));
    let data = image_data("tar", "shards/part-00000.tar", "jpg", "cls");
    assert!(trained(dir.path(), "tar", &data) == expected, "other bits");
}

#[test]
fn a_conversion_says_what_a_format_cannot_hold_and_what_it_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, out) = (dir.path().join("train"), dir.path().join("out"));
    images(&folder);
    let (folder, shown) = (folder.display().to_string(), out.display().to_string());
    let refuse = |to: &str| fail(["data", "convert", &folder, "--to", to, "--out", &shown]);
    assert!(refuse("npy").contains("column `image` u8[any]: npy has no ragged columns"), "{}", refuse("npy"));
    assert!(refuse("idx").contains("idx cannot be written; choose parquet"), "{}", refuse("idx"));
    assert!(refuse("jpeg").contains("--to jpeg: unknown variant"), "{}", refuse("jpeg"));
    assert!(!out.exists(), "something was written");
    let found = object(&["data", "convert", &folder, "--to", "tar", "--out", &shown, "--json"]);
    assert_eq!((&found["records"], &found["shards"]), (&json!(4), &json!(1)));
    assert_eq!((&found["data"]["format"], &found["data"]["label"]), (&json!("tar"), &json!("cls")));
    let shard = found["data"]["train"]["files"][0].as_str().unwrap();
    let said = succeed(["data", "inspect", shard, "--records", "1"]);
    assert!(said.contains("tar, 4 records") && said.contains("4 images of `jpg` looked at"), "{said}");
}

#[test]
fn a_bench_of_the_data_shows_each_step_with_its_time() {
    let dir = tempfile::tempdir().unwrap();
    images(&dir.path().join("train"));
    let job = dir.path().join("job.toml");
    let data = "[data]\nformat = \"images\"\ntrain = { files = [\"train\"] }\ninputs = [\"image\"]\nlabel = \"class\"\n\
                [data.transforms]\nimage = [{ op = \"decode\" }, { op = \"resize\", size = [4, 4] }, { op = \"normalize\" }]\n";
    let spec = JOB.replace("\"mlp\", loss = \"bce_with_logits\"", "\"softmax\"");
    fs::write(&job, format!("{spec}{data}")).unwrap();
    let job = job.display().to_string();
    let bench = ["data", "bench", &job, "--seconds", "1", "--data-threads", "2"];
    let said = succeed(bench);
    let steps = ["read", "image/0 decode", "image/1 resize", "image/2 normalize"];
    for step in steps.into_iter().chain(["4 records, opened in", "batches in 2 threads: "]) {
        assert!(said.contains(step), "{step} is missing in {said}");
    }
    let found = object(&[&bench[..], &["--json"]].concat());
    let names = found["steps"].as_array().unwrap().iter().map(|step| step["step"].as_str().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    assert_eq!(names, ["image/0 decode", "image/1 resize", "image/2 normalize", "read"]);
    let is_time = |step: &Value| step["seconds"].as_f64().is_some_and(|seconds| seconds >= 0.0);
    assert!(found["steps"].as_array().unwrap().iter().all(is_time), "{found}");
    assert!(found["records_per_second"].as_f64().unwrap() > 0.0, "{found}");
    assert_eq!((&found["records"], &found["threads"]), (&json!(4), &json!(2)));
}

/// Returns the names and the bytes of a folder's files, sorted.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let mut files: Vec<_> = entries.map(|path| (name(&path), fs::read(&path).unwrap())).collect();
    files.sort();
    files
}

/// Returns the shards of a conversion. Their description has the path of the folder.
fn shards(folder: &Path) -> Vec<(String, Vec<u8>)> {
    files(folder).into_iter().filter(|(name, _)| name.starts_with("part-")).collect()
}

/// Returns the arguments of a conversion of an example's table into 1,200 shards.
fn conversion(out: &Path) -> Vec<String> {
    let table = root().join("examples/tabular/clicks.parquet").display().to_string();
    let out = out.display().to_string();
    let words = ["data", "convert", &table, "--to", "arrow", "--out", &out, "--records-per-shard", "10"];
    words.map(str::to_owned).to_vec()
}

#[test]
fn a_conversion_that_is_killed_leaves_whole_shards_and_no_description() {
    let dir = tempfile::tempdir().unwrap();
    let (killed, whole) = (dir.path().join("killed"), dir.path().join("whole"));
    succeed(conversion(&whole));
    let expected = shards(&whole);
    assert_eq!(expected.len(), 1200);
    let mut child = ebb(conversion(&killed)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !killed.join("part-00001.arrow").exists() {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    child.kill().unwrap();
    let _ = child.wait();
    let left = shards(&killed);
    assert!(left.iter().all(|shard| expected.contains(shard)), "a shard that is not whole");
    let is_complete = killed.join("data.toml").exists();
    assert!(!is_complete || left.len() == expected.len(), "{} shards and a description", left.len());
    let said = fail(conversion(&killed));
    assert!(said.contains("files of an earlier conversion are there"), "{said}");
    succeed(conversion(&killed).into_iter().chain(["--overwrite".to_owned()]));
    assert!(shards(&killed) == expected, "other shards after the kill");
    assert_eq!(files(&killed).len(), 1201, "partial files are left");
}

#[test]
fn a_conversion_onto_a_full_disk_says_so_and_goes_well_with_room() {
    let Some(mut disk) = Tmpfs::mount("8m") else { return };
    let whole = tempfile::tempdir().unwrap();
    succeed(conversion(whole.path()));
    let out = disk.path().join("out");
    disk.fill();
    let said = fail(conversion(&out));
    assert!(said.contains("No space left on device"), "{said}");
    assert!(!out.join("data.toml").exists());
    disk.free();
    succeed(conversion(&out).into_iter().chain(["--overwrite".to_owned()]));
    assert!(shards(&out) == shards(whole.path()), "other shards after the full disk");
}

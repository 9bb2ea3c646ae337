//! Data that is damaged, hostile or does not fit, given to whole jobs: each has its message, and a
//! job trains once the data is mended.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::TempDir;

use crate::harness::{Cluster, fail, model, npy, succeed, summary, text};
use crate::images;

const JOB: &str = r#"
name = "bad-data"
epochs = 1
[model]
builtin = "softmax"
options = { classes = 2 }
[batch]
micro = 2
[optimizer]
kind = "sgd"
learning_rate = 0.1
[data]
"#;

/// A folder with data and a job that reads it.
struct Job(TempDir);

impl Job {
    fn new(data: &str) -> Self {
        let job = Self(tempfile::tempdir().unwrap());
        job.write("job.toml", format!("{JOB}{data}").as_bytes());
        job
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn write(&self, name: &str, content: &[u8]) {
        fs::write(self.path(name), content).unwrap();
    }

    /// Trains, and returns the bits of the model.
    fn trained(&self) -> Vec<u8> {
        succeed(["run", &self.path("job.toml"), "--out", &self.path("out")]);
        model(Path::new(&self.path("out")))
    }

    /// Runs the job, which must fail and leave no model, and compares what it says.
    #[track_caller]
    fn says(&self, parts: &[&str]) {
        let out = self.path("refused");
        let said = fail(["run", &self.path("job.toml"), "--out", &out]);
        for part in parts {
            assert!(said.contains(part), "`{part}` missing in:\n{said}");
        }
        assert!(!Path::new(&out).join("model.safetensors").exists());
    }
}

/// Returns a member of a tar archive.
fn member(name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
    header[148..156].fill(b' ');
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    let padding = content.len().next_multiple_of(512) - content.len();
    [&header[..], content, &vec![0; padding]].concat()
}

/// Returns an archive of 20 records, whose keys begin with `folder`.
fn tar(folder: &str) -> Vec<u8> {
    let mut archive = Vec::new();
    for record in 0..20u8 {
        archive.extend(member(&format!("{folder}{record}.bin"), &[record, 7, record / 2, 1]));
        archive.extend(member(&format!("{folder}{record}.cls"), format!("{}", record % 2).as_bytes()));
    }
    archive.extend([0; 1024]);
    archive
}

const TAR: &str = r#"format = "tar"
train = { files = ["a.tar"] }
inputs = ["bin"]
label = "cls"
lengths = { bin = 4 }
dtypes = { bin = "f32" }
"#;

#[test]
fn a_tar_archive_that_is_cut_short_is_named() {
    let (job, whole) = (Job::new(TAR), tar("a/"));
    for (length, what) in [(512 * 13, "ends within"), (512 * 12 + 100, "ends within"), (100, "a.tar")] {
        job.write("a.tar", &whole[..length]);
        job.says(&["a.tar", what]);
    }
    job.write("a.tar", &whole);
    job.trained();
}

#[test]
fn members_whose_names_lead_elsewhere_are_data() {
    let (job, plain) = (Job::new(TAR), Job::new(TAR));
    let inside = job.0.path().join("in/side");
    fs::create_dir_all(&inside).unwrap();
    fs::copy(job.path("job.toml"), inside.join("job.toml")).unwrap();
    fs::write(inside.join("a.tar"), tar("../../escaped/")).unwrap();
    let out = job.path("out");
    succeed(["run", &inside.join("job.toml").display().to_string(), "--out", &out]);
    assert!(!job.0.path().join("escaped").exists(), "a member was unpacked");
    plain.write("a.tar", &tar("plain/"));
    assert!(model(Path::new(&out)) == plain.trained(), "names of members change no bit");
    assert_eq!(summary(Path::new(&out))["samples_applied"], 20);
}

/// Writes a table of 40 rows, and converts it.
fn converted(job: &Job, name: &str, columns: [&str; 2], to: &str) -> String {
    let mut table = format!("{},{},label\n", columns[0], columns[1]);
    (0..40).for_each(|row| writeln!(table, "{row}.5,{},{}", row % 7, row % 2).unwrap());
    let (source, out) = (format!("{name}.csv"), job.path(name));
    job.write(&source, table.as_bytes());
    succeed(["data", "convert", &job.path(&source), "--to", to, "--out", &out]);
    format!("{out}/part-00000.{to}")
}

#[test]
fn a_tfrecord_with_a_wrong_checksum_is_named() {
    let job = Job::new("");
    let path = converted(&job, "t", ["x", "y"], "tfrecord");
    let section = fs::read_to_string(job.path("t/data.toml")).unwrap();
    job.write("job.toml", format!("{}{section}label = \"label\"\n", JOB.replace("[data]\n", "")).as_bytes());
    let whole = fs::read(&path).unwrap();
    // Length, its checksum, data, its checksum.
    let second = 16 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for (at, what) in [
        (second, "the checksum of a record's length"),
        (second + 12, "record 1: "),
        (second + 14, "record 1: "),
    ] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(&path, damaged).unwrap();
        job.says(&["part-00000.tfrecord", what, "checksum", "does not fit", "copy"]);
    }
    fs::write(&path, whole).unwrap();
    job.trained();
}

#[test]
fn tables_whose_columns_differ_are_refused_with_both() {
    let job = Job::new("");
    let files = [("a", ["x", "y"]), ("b", ["x", "z"]), ("c", ["x", "y"])];
    let [a, b, c] = files.map(|(name, columns)| converted(&job, name, columns, "parquet"));
    let reads = |other: &str| {
        let data =
            format!("format = \"parquet\"\ntrain = {{ files = [{a:?}, {other:?}] }}\nlabel = \"label\"\n");
        job.write("job.toml", format!("{JOB}{data}").as_bytes());
    };
    reads(&b);
    job.says(&["b/part-00000.parquet", "its columns are", "`z`", "`y`", "a/part-00000.parquet"]);
    reads(&c);
    job.trained();
}

#[test]
fn a_list_of_any_length_is_refused_where_a_model_needs_one() {
    let data = "format = \"jsonl\"\ntrain = { files = [\"a.jsonl\"] }\ninputs = [\"x\"]\nlabel = \"y\"\n";
    let job = Job::new(data);
    let lines = |shorter: usize| -> String {
        let x = |line| if line == shorter { "[1]" } else { "[1, 2.5]" };
        (0..8).map(|line| format!("{{\"x\": {}, \"y\": {}}}\n", x(line), line % 2)).collect()
    };
    job.write("a.jsonl", lines(9).as_bytes());
    job.says(&["a.jsonl", "`x` f64[any]", "record 0 has 2 elements;", "data.lengths"]);
    job.write("job.toml", format!("{JOB}{data}lengths = {{ x = 2 }}\n").as_bytes());
    job.trained();
    job.write("a.jsonl", lines(5).as_bytes());
    let broken = "column `x`: record 5 of the file has 1 elements, data.lengths.x is 2; mend it";
    job.says(&["a.jsonl", broken]);

    let out = job.path("p");
    succeed(["data", "convert", &job.path("a.jsonl"), "--to", "parquet", "--out", &out]);
    let data = data.replace("jsonl", "parquet").replace("a.parquet", "p/part-00000.parquet");
    job.write("job.toml", format!("{JOB}{data}").as_bytes());
    let lengths = "column `x` f64[any] has no fixed size: record 0 has 2 elements, record 5 has 1 elements;";
    job.says(&["p/part-00000.parquet", lengths, "use the transform `pad`", "data.lengths"]);
    job.write("job.toml", format!("{JOB}{data}lengths = {{ x = 2 }}\n").as_bytes());
    job.says(&["p/part-00000.parquet", broken]);
}

#[test]
fn a_folder_with_a_loop_of_links_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let job = images::write(data.path()).display().to_string();
    let (class, out) = (data.path().join("train/ant"), data.path().join("out").display().to_string());
    std::os::unix::fs::symlink(&class, class.join("again")).unwrap();
    let said = fail(["run", &job, "--out", &out]);
    for part in ["train/ant/again: a link to", "which holds it; remove the link"] {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
    fs::remove_file(class.join("again")).unwrap();
    // A class that is a link to itself, and one that is not there.
    for (target, cause) in [("cat", "Too many levels of symbolic links"), ("gone", "No such file")] {
        let link = data.path().join("train/cat");
        std::os::unix::fs::symlink(target, &link).unwrap();
        let said = fail(["run", &job, "--out", &out]);
        assert!(said.contains("train/cat: ") && said.contains(cause), "{said}");
        fs::remove_file(link).unwrap();
    }
    // A link to another folder is a folder.
    std::os::unix::fs::symlink(data.path().join("train/bee"), class.join("others")).unwrap();
    succeed(["run", &job, "--out", &out]);
    assert_eq!(summary(Path::new(&out))["samples_applied"], 3 * (48 + 16));
}

#[test]
fn values_that_are_nan_are_counted_in_the_warning_the_log_and_the_reason() {
    let mut cluster = Cluster::start(1, 1);
    let folder = cluster.dir.path().to_owned();
    let clean: Vec<f32> = (0..16u8).map(f32::from).collect();
    let mut dirty = clean.clone();
    // The last value of record 4, and both of record 5.
    dirty[9..12].copy_from_slice(&[f32::NAN, f32::NAN, f32::NEG_INFINITY]);
    for (name, values) in [("clean.npy", clean), ("dirty.npy", dirty)] {
        let bytes = values.into_iter().flat_map(f32::to_le_bytes);
        fs::write(folder.join(name), npy("<f4", "8, 2", bytes)).unwrap();
    }
    fs::write(folder.join("y.npy"), npy("|u1", "8,", (0..8).map(|record| record % 2))).unwrap();
    let submit = |cluster: &Cluster, train: &str| {
        let files = |name: &str| format!("{{ features = [\"{name}.npy\"], labels = [\"y.npy\"] }}");
        let (train_files, other) = (files(train), files("dirty"));
        let data =
            format!("format = \"npy\"\nshuffle = \"none\"\ntrain = {train_files}\nvalidation = {other}\n");
        let (job, out) = (folder.join(format!("{train}.toml")), folder.join(train));
        fs::write(&job, format!("{JOB}{data}")).unwrap();
        (cluster.submit(&job, &out, &[]), out)
    };
    let counted = "3 values are NaN or infinite in a batch of ";
    let first = "the first one is NaN, in column `features` of record 4; mend the data";
    // An evaluation may have a loss that is no number, so this job ends well.
    let (output, _) = submit(&cluster, "clean");
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    let told: Vec<_> = said.lines().filter(|line| line.contains(counted)).collect();
    let [warning] = told[..] else { panic!("expected one warning:\n{said}") };
    assert!(warning.contains("warning: ") && warning.contains(first), "{warning}");
    cluster.workers[0].wait_for(counted);

    let (output, out) = submit(&cluster, "dirty");
    assert!(!output.status.success(), "{}", text(&output));
    let reason = summary(&out)["reason"].to_string();
    for part in ["the loss of step", "is NaN (microbatch 2)", counted, first] {
        assert!(reason.contains(part), "`{part}` missing in:\n{reason}");
    }
}

/// Memory for data of the worker that gets a large file.
const MEMORY: usize = 4 << 20;

#[test]
fn a_small_file_that_becomes_too_large_is_refused_before_it_fills_the_memory() {
    const ROWS: u32 = 256 << 20;
    let mut cluster = Cluster::start(1, 0);
    let dir = cluster.dir.path().to_owned();
    let at = |name: &str| dir.join(name);
    let mut bomb = GzEncoder::new(Vec::new(), Compression::fast());
    bomb.write_all(&[&[0, 0, 8, 1][..], &ROWS.to_be_bytes()].concat()).unwrap();
    let zeros = vec![0; 1 << 20];
    (0..ROWS >> 20).for_each(|_| bomb.write_all(&zeros).unwrap());
    fs::write(at("x.gz"), bomb.finish().unwrap()).unwrap();
    let data = "format = \"idx\"\ntrain = { features = [\"x.gz\"], labels = [\"x.gz\"] }\n";
    fs::write(at("job.toml"), format!("{JOB}{data}")).unwrap();
    let (job, out) = (at("job.toml"), at("out"));
    cluster.add_worker_as(&["--data-memory", &MEMORY.to_string()], &[]);
    let output = cluster.submit(&job, &out, &[]);
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    for part in ["x.gz", "without gzip the file has more than", "data_memory"] {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
    let worker = cluster.workers[0].child.id();
    let status = fs::read_to_string(format!("/proc/{worker}/status")).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kib: usize = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak_kib < 200 << 10, "the worker had {peak_kib} KiB");

    // A file that is small enough for a mapping, and whose numbers are too many for random access.
    fs::write(at("rows.csv"), format!("x,y\n{}", "1,0\n".repeat(400_000))).unwrap();
    let data = "format = \"csv\"\ntrain = { files = [\"rows.csv\"] }\n";
    fs::write(at("job.toml"), format!("{JOB}{data}")).unwrap();
    let output = cluster.submit(&job, &out, &[]);
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    for part in ["rows.csv: data.shuffle = \"records\"", "a record has 4", "set data.shuffle = \"window\""] {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
}

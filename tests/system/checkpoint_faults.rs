//! Damaged checkpoints and a full disk, with real processes. The damage is named, training
//! continues or goes back to the newest intact checkpoint, and nothing valid is removed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use crate::harness::machine::until;
use crate::harness::tmpfs::Tmpfs;
use crate::harness::{Cluster, digits, ebb, events, fail, model, root, succeed, text, told};
use proto::checkpoint::PROBE;
use tempfile::TempDir;

/// Deadline of every wait, far longer than needed.
const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the settings for the length of the job, and for the place and frequency of its
/// checkpoints.
fn sets(url: &Path, epochs: u32, steps: u64) -> Vec<String> {
    let (epochs, keep) = (format!("epochs={epochs}"), "checkpoint.keep=1000".to_owned());
    let url = format!("checkpoint.url={}", url.display());
    [epochs, keep, url, format!("checkpoint.every_steps={steps}")]
        .into_iter()
        .flat_map(|set| ["--set".to_owned(), set])
        .collect()
}

/// Epochs of the job that is resumed, of 23 steps each.
const EPOCHS: u32 = 12;

/// Steps between its checkpoints. Each third of the epochs has one: version 85, 170, 255.
const EVERY: u64 = 85;

/// Results of the job: three checkpoints and its model.
struct Saved {
    dir: TempDir,
    bits: Vec<u8>,
}

impl Saved {
    /// Trains each third of the epochs in a run of its own, because a ps skips a checkpoint that is
    /// due while it still writes the one before.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (url, out) = (dir.path().join("checkpoints"), |epochs| dir.path().join(format!("out-{epochs}")));
        for (epochs, more) in [(4, &[][..]), (8, &["--resume"]), (EPOCHS, &["--resume"])] {
            let output = run(&url, &out(epochs), epochs, more);
            assert!(output.status.success(), "{}", text(&output));
        }
        Self { bits: model(&out(EPOCHS)), dir }
    }

    /// Copies the checkpoints into a folder of their own, to be damaged.
    fn copy(&self, name: &str) -> Copied {
        let (from, to) = (self.dir.path().join("checkpoints/digits"), self.dir.path().join(name));
        let versions: Vec<_> =
            files(&from).into_keys().filter(|file| file.ends_with("manifest.json")).collect();
        assert_eq!(versions.len(), 3, "{versions:?}");
        for version in &versions {
            let folder = Path::new(version).parent().unwrap();
            fs::create_dir_all(to.join("digits").join(folder)).unwrap();
            for entry in fs::read_dir(from.join(folder)).unwrap().map(Result::unwrap) {
                fs::copy(entry.path(), to.join("digits").join(folder).join(entry.file_name())).unwrap();
            }
        }
        let version = |manifest: &String| manifest.split('/').next().unwrap().to_owned();
        Copied { url: to, folders: versions.iter().map(version).collect() }
    }
}

/// Checkpoints of a job, oldest first.
struct Copied {
    url: PathBuf,
    folders: Vec<String>,
}

impl Copied {
    fn job(&self) -> PathBuf {
        self.url.join("digits")
    }

    /// Returns the path of a data file of a checkpoint.
    fn data(&self, folder: &str) -> PathBuf {
        let mut names = files(&self.job()).into_keys();
        let of = |name: &String| name.starts_with(folder) && name.ends_with(".safetensors");
        self.job().join(names.rfind(of).unwrap())
    }
}

fn run(url: &Path, out: &Path, epochs: u32, more: &[&str]) -> std::process::Output {
    let mut command = ebb(["run", "--workers", "1", "--ps", "2", "--out"]);
    // The learning rate of a step depends on the length of the whole job.
    let schedule = format!("optimizer.schedule.total_steps={}", EPOCHS * 23);
    command.arg(out).args(sets(url, epochs, EVERY)).args(["--set", &schedule]).args(more);
    command.arg(root().join("examples/digits/job.toml")).output().unwrap()
}

/// Returns every file below a folder, by its path in it. A process may remove or rename a file
/// meanwhile; such a file is left out.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let Some(entries) = still_there(fs::read_dir(folder)) else { return found };
    for entry in entries.filter_map(still_there) {
        let name = entry.file_name().into_string().unwrap();
        match entry.path().is_dir() {
            true => found.extend(
                files(&entry.path()).into_iter().map(|(path, bytes)| (format!("{name}/{path}"), bytes)),
            ),
            false => found.extend(still_there(fs::read(entry.path())).map(|bytes| (name, bytes))),
        }
    }
    found
}

fn still_there<T>(found: std::io::Result<T>) -> Option<T> {
    match found {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        found => Some(found.unwrap()),
    }
}

fn number(folder: &str) -> u64 {
    folder.trim_start_matches('v').parse().unwrap()
}

fn flip(file: &Path, at: usize) {
    let mut bytes = fs::read(file).unwrap();
    let at = at.min(bytes.len() - 1);
    bytes[at] ^= 16;
    fs::write(file, bytes).unwrap();
}

#[track_caller]
fn assert_says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
}

type Fault = (&'static str, fn(&Path, &Path), &'static [&'static str]);

/// Damage of a data file or of the manifest, and the words for it.
const FAULTS: [Fault; 5] = [
    (
        "flipped",
        |data, _| flip(data, usize::MAX),
        &[".safetensors` is damaged: checksum", ", expected", "take an older"],
    ),
    (
        "truncated",
        |data, _| File::options().write(true).open(data).unwrap().set_len(100).unwrap(),
        &[".safetensors` has 100 bytes, expected", "it was not written to its end, take an older checkpoint"],
    ),
    (
        "missing",
        |data, _| fs::remove_file(data).unwrap(),
        &[".safetensors` is missing; take an older checkpoint, or bring the file back"],
    ),
    (
        "flipped-manifest",
        |_, manifest| flip(manifest, 200),
        &["manifest.json` is damaged: it begins with", "its content needs", "take an older checkpoint"],
    ),
    (
        "future",
        |_, manifest| fs::write(manifest, "{\"format\":99,\"rows\":[]}\n").unwrap(),
        &[
            "manifest.json` has format 99, this program knows formats up to",
            "read it with the version that wrote it",
        ],
    ),
];

#[test]
fn what_is_wrong_with_the_newest_checkpoint_is_named_and_the_one_before_is_taken() {
    let saved = Saved::new();
    for (name, spoil, words) in FAULTS {
        let copied = saved.copy(name);
        let [_, previous, newest] = &copied.folders[..] else { panic!("three checkpoints") };
        let before = files(&copied.job());
        let data = copied.data(newest);
        spoil(&data, &copied.job().join(newest).join("manifest.json"));

        let verified = fail([Path::new("checkpoint"), Path::new("verify"), &copied.url]);
        assert_says(&verified, words);
        assert_says(&verified, &[&format!("/{newest}/"), &format!("version {}: intact", number(previous))]);

        let out = saved.dir.path().join(format!("out-{name}"));
        let output = run(&copied.url, &out, EPOCHS, &["--resume"]);
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        assert_says(&said, words);
        assert_says(
            &said,
            &[&format!("training goes on from the checkpoint of version {}", number(previous))],
        );
        assert!(model(&out) == saved.bits, "{name}: other bits than an undisturbed run");
        let first = events(&out, "train")[0]["step"].as_u64().unwrap();
        assert!(first >= number(previous), "{name}: step {first} was trained again");
        // The damaged checkpoint may be saved again. All others are unchanged.
        let after = files(&copied.job());
        for (file, bytes) in before.iter().filter(|(file, _)| !file.starts_with(newest)) {
            assert!(after.get(file) == Some(bytes), "{name}: {file} is gone or changed");
        }
    }
}

#[test]
fn when_no_checkpoint_is_intact_a_run_says_why_and_leaves_them_alone() {
    let saved = Saved::new();
    // A master that ends while a ps answers its probe leaves the probe's file behind.
    let kept = |url: &Path| {
        let is_probe = |path: &String| path.rsplit('/').next().is_some_and(|name| name.starts_with(PROBE));
        files(url).into_iter().filter(|(path, _)| !is_probe(path)).collect::<Vec<_>>()
    };
    let refused = |copied: &Copied, more: &[&str]| {
        let before = kept(&copied.url);
        let output = run(&copied.url, &saved.dir.path().join("refused"), EPOCHS, more);
        assert!(!output.status.success(), "{}", text(&output));
        assert!(kept(&copied.url) == before, "something was removed or mended");
        text(&output)
    };
    let copied = saved.copy("no-data");
    copied.folders.iter().for_each(|folder| fs::remove_file(copied.data(folder)).unwrap());
    let said = refused(&copied, &["--resume"]);
    assert_says(&said, &["no checkpoint in", "can be restored:", "is missing; take an older checkpoint"]);
    copied.folders.iter().for_each(|folder| assert_says(&said, &[&format!("/{folder}/")]));

    let copied = saved.copy("no-manifest");
    copied.folders.iter().for_each(|folder| flip(&copied.job().join(folder).join("manifest.json"), 300));
    let said = refused(&copied, &["--resume"]);
    assert_says(&said, &["nothing to resume from: no intact checkpoint in", "is damaged: "]);
    copied.folders.iter().for_each(|folder| assert_says(&said, &[&format!("/{folder}/manifest.json")]));
    let said = refused(&copied, &[]);
    assert_says(
        &said,
        &["has checkpoints of an earlier run", "go on from them with --resume, or remove them"],
    );
}

#[test]
fn a_running_job_that_must_go_back_takes_the_newest_checkpoint_that_is_intact() {
    let mut cluster = Cluster::of(&digits::program(), 2, 1);
    let (out, url) = (cluster.dir.path().join("out"), cluster.dir.path().join("checkpoints"));
    // Much longer than the test needs to kill two processes.
    let sets = sets(&url, 15, 20);
    let calm = cluster.dir.path().join("calm");
    let mut undisturbed = ebb(["run", "--workers", "1", "--ps", "2", "--set", "epochs=15", "--out"]);
    let undisturbed = undisturbed.arg(&calm).arg(root().join("examples/digits/job.toml")).output().unwrap();
    assert!(undisturbed.status.success(), "{}", text(&undisturbed));
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let arguments = [&sets[..], &digits::arguments(&[])].concat();
    let mut submission = cluster.submission(&root().join("examples/digits/job.toml"), &out, &arguments);
    let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while told(&out, "checkpoint") < 2 {
        assert!(child.try_wait().unwrap().is_none(), "the job ended before its second checkpoint");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    // Without a master no checkpoint is completed any more.
    cluster.master.signal("KILL");
    cluster.ps[1].signal("KILL");
    let _ = cluster.master.child.wait();
    let job = url.join("digits");
    let manifests = files(&job).into_keys().filter(|file| file.ends_with("manifest.json"));
    let folders: Vec<_> = manifests.map(|file| file.split('/').next().unwrap().to_owned()).collect();
    let copied = Copied { url, folders };
    let [.., previous, newest] = &copied.folders[..] else { panic!("two checkpoints") };
    flip(&copied.data(newest), usize::MAX);
    cluster.restart_ps(1);
    cluster.restart_master();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let told = succeed(["watch", "--json", "--master", &cluster.url, "1"]);
    assert_says(
        &told,
        &[
            &format!("the checkpoint of version {} cannot be restored", number(newest)),
            ".safetensors` is damaged: checksum",
            &format!("training goes on from the checkpoint of version {}", number(previous)),
        ],
    );
    assert!(model(&out) == model(&calm), "other bits than an undisturbed run");
}

#[test]
fn on_a_full_disk_training_goes_on_and_saves_again_when_there_is_room() {
    let Some(mut disk) = Tmpfs::mount("2m") else { return };
    let url = disk.path().join("checkpoints");
    let cluster = Cluster::start(2, 1);
    let (out, log) = (cluster.dir.path().join("out"), cluster.dir.path().join("submit.log"));
    // Longer than the test needs, with few checkpoints kept.
    let mut sets = sets(&url, 100_000, 50);
    sets.extend(["--set", "checkpoint.keep=2"].map(str::to_owned));
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let mut submission = cluster.submission(&root().join("examples/digits/job.toml"), &out, &sets);
    let mut child = submission.stdout(Stdio::null()).stderr(File::create(&log).unwrap()).spawn().unwrap();
    let mut wait = |what: &str, is_so: &mut dyn FnMut() -> bool| {
        while !is_so() {
            let log = fs::read_to_string(&log).unwrap();
            assert!(child.try_wait().unwrap().is_none(), "the job ended before {what}:\n{log}");
            std::thread::park_timeout(Duration::from_millis(5));
        }
    };
    let count = |event: &str| {
        let told = fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
        told.matches(&format!(r#""event":"{event}""#)).count()
    };
    wait("a checkpoint", &mut || count("checkpoint") > 0);
    let full = "o space left on device";
    // Repeated, because a failed attempt frees room for the next.
    wait("the full disk is named", &mut || {
        disk.fill();
        fs::read_to_string(&log).unwrap().contains(full)
    });
    let said = fs::read_to_string(&log).unwrap();
    let line = said.lines().find(|line| line.contains(full)).unwrap();
    assert_says(line, &["no checkpoint of version", ": write `", "/digits/v", "; training goes on"]);
    let trained = count("train");
    wait("it trains on", &mut || count("train") > trained);
    // A checkpoint that is removed while it is verified is not intact.
    let verify = [Path::new("checkpoint"), Path::new("verify"), &url];
    let is_intact = || {
        let verified = ebb(verify).output().unwrap();
        verified.status.success() && text(&verified).contains("intact")
    };
    until("what is there is intact", PATIENCE, is_intact);

    disk.free();
    let saved = count("checkpoint");
    wait("it is saved again", &mut || count("checkpoint") > saved);
    succeed(["cancel", "1", "--force", "--master", &cluster.url]);
    let _ = child.wait();
    until("what is there is intact in the end", PATIENCE, is_intact);
    // Files of a failed attempt are removed in the background.
    let torn = || {
        files(&url)
            .into_keys()
            .find(|file| !file.ends_with(".safetensors") && !file.ends_with("manifest.json"))
    };
    until("nothing is left of an attempt that failed", PATIENCE, || torn().is_none());
}

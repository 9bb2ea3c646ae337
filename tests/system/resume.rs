//! Requirements of `--resume` on the job: the seed, the order and the records with which its
//! checkpoint was trained.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};

use crate::harness::{Cluster, ebb, model, text};
use proto::checkpoint::manifest::Manifest;

/// Records of the job: 12 steps in each epoch.
const RECORDS: u32 = 96;

/// Version of a checkpoint within the first epoch. It is the only one of a first run, so that none
/// can be skipped because the one before is still being written.
const WITHIN: u64 = 8;

/// Version that ends the first epoch.
const ENDS: u64 = 12;

/// A folder with a job on two files of 48 records each.
struct Folder(tempfile::TempDir);

impl Folder {
    /// Creates the folder. The job saves a checkpoint at each multiple of `every_steps`.
    fn new(every_steps: u64) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        let half = RECORDS / 2;
        let line = |record: u32| {
            let pixel = |at: u32| (record * 64 + at).wrapping_mul(2_654_435_761) >> 24;
            (0..8).map(|at| format!("{},", pixel(at))).collect::<String>() + &format!("{}\n", record % 3)
        };
        for (file, records) in [("a.csv", 0..half), ("b.csv", half..RECORDS)] {
            std::fs::write(folder.path(file), records.map(line).collect::<String>()).unwrap();
        }
        let job = "name = 'small'\nepochs = 1\nseed = 1\nmodel = { builtin = 'softmax' }\n\
            data = { format = 'csv', header = false, train = { features = ['a.csv', 'b.csv'] } }\n\
            batch = { micro = 4, effective = 8 }\noptimizer = { kind = 'adam', learning_rate = 0.01 }\n\
            checkpoint = { url = 'checkpoints', every_steps = EVERY, keep = 100 }\n";
        let job = job.replace("EVERY", &every_steps.to_string());
        std::fs::write(folder.path("job.toml"), job).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the job with its results in `out`. Returns whether it succeeded, and its output.
    fn run(&self, out: &str, more: &[&str]) -> (bool, String) {
        let mut command = ebb(["run", "--workers", "2", "--ps", "2", "--out"]);
        let output = command.arg(self.path(out)).args(more).arg(self.path("job.toml")).output().unwrap();
        (output.status.success(), text(&output))
    }

    /// Trains one epoch, which leaves the checkpoint of this version.
    fn train(&self, version: u64) {
        let (succeeded, said) = self.run("out", &[]);
        assert!(succeeded, "{said}");
        assert!(self.checkpoint(version).exists(), "no checkpoint of version {version}: {said}");
    }

    /// Resumes for two more epochs, which may fail.
    fn resume(&self, out: &str, more: &[&str]) -> (bool, String) {
        self.run(out, &[&["--set", "epochs=3"], more].concat())
    }

    fn checkpoint(&self, version: u64) -> PathBuf {
        self.path("checkpoints/small").join(format!("v{version:010}"))
    }

    /// Removes the checkpoints of a resumed run.
    fn forget_after(&self, version: u64) {
        for entry in std::fs::read_dir(self.path("checkpoints/small")).unwrap() {
            let path = entry.unwrap().path();
            if path > self.checkpoint(version) {
                std::fs::remove_dir_all(path).unwrap();
            }
        }
    }

    /// Changes one feature of the last record.
    fn edit_data(&self) {
        let text = std::fs::read_to_string(self.path("b.csv")).unwrap();
        let last = text.trim_end().rfind('\n').unwrap() + 1;
        let edited = format!("{}255{}", &text[..last], &text[text[last..].find(',').unwrap() + last..]);
        assert_ne!(edited, text);
        std::fs::write(self.path("b.csv"), edited).unwrap();
    }
}

fn assert_says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
}

#[test]
fn within_an_epoch_a_run_goes_on_only_with_the_same_records_in_the_same_order() {
    let folder = Folder::new(WITHIN);
    let (succeeded, said) = folder.run("whole", &["--set", "epochs=3", "--set", "name=whole"]);
    assert!(succeeded, "{said}");
    folder.train(WITHIN);

    let (succeeded, said) =
        folder.resume("other", &["--resume", "--set", "seed=2", "--set", "data.shuffle=none"]);
    assert!(!succeeded, "it went on with another seed and order:\n{said}");
    let parts = [
        "version 8 lies within epoch 1",
        "seed: 1 in the checkpoint, 2 in the job",
        "data.shuffle: records in the checkpoint, none in the job",
        "--resume-anyway",
    ];
    assert_says(&said, &parts);

    let (succeeded, said) = folder.resume("other", &["--resume", "--set", "data.validation_fraction=0.25"]);
    assert!(!succeeded, "{said}");
    assert_says(&said, &["data.validation_fraction: no records in the checkpoint, 24 records in the job"]);

    let swapped = "data.train.features=[\"b.csv\", \"a.csv\"]";
    let (succeeded, said) = folder.resume("other", &["--resume", "--set", swapped]);
    assert!(!succeeded, "it went on with its files in another order:\n{said}");
    assert_says(&said, &["data.train: file 0", "`a.csv`", "`b.csv`"]);

    // Equal records in another folder are the same.
    let moved = folder.path("moved");
    std::fs::create_dir(&moved).unwrap();
    for file in ["a.csv", "b.csv"] {
        std::fs::copy(folder.path(file), moved.join(file)).unwrap();
    }
    let files = "data.train.features=[\"moved/a.csv\", \"moved/b.csv\"]";
    let (succeeded, said) = folder.resume("same", &["--resume", "--set", files]);
    assert!(succeeded, "{said}");
    assert!(model(&folder.path("same")) == model(&folder.path("whole")), "other bits than in one run");

    folder.forget_after(WITHIN);
    folder.edit_data();
    let (succeeded, said) = folder.resume("other", &["--resume"]);
    assert!(!succeeded, "it went on with other data:\n{said}");
    assert_says(&said, &["data.train: file 1", "in the job"]);

    let (succeeded, said) = folder.resume("forced", &["--resume-anyway", "--set", "seed=2"]);
    assert!(succeeded, "{said}");
    assert_says(&said, &["seed: 1 in the checkpoint, 2 in the job", "data.train: file 1", "more than once"]);
}

#[test]
fn at_an_epochs_end_a_run_goes_on_with_others_and_says_which() {
    let folder = Folder::new(ENDS);
    folder.train(ENDS);
    let (succeeded, said) = folder.resume("other", &["--resume", "--set", "seed=2"]);
    assert!(succeeded, "{said}");
    assert_says(&said, &["version 12 ends epoch 1", "seed: 1 in the checkpoint, 2 in the job"]);
    folder.forget_after(ENDS);
    let (succeeded, said) = folder.resume("same", &["--resume"]);
    assert!(succeeded && !said.contains("in the checkpoint"), "{said}");
}

#[test]
fn a_checkpoint_that_does_not_say_what_it_was_trained_with_is_resumed_with_a_warning() {
    let folder = Folder::new(WITHIN);
    folder.train(WITHIN);
    let path = folder.checkpoint(WITHIN).join("manifest.json");
    let mut manifest = Manifest::decode("m", &std::fs::read(&path).unwrap()).unwrap();
    assert!(manifest.trained_on.take().is_some());
    std::fs::write(&path, manifest.encode()).unwrap();
    let (succeeded, said) = folder.resume("resumed", &["--resume"]);
    assert!(succeeded, "{said}");
    assert_says(&said, &["does not say with which seed, order and data it was trained"]);
}

#[test]
fn a_submitted_job_is_refused_and_forced_in_the_same_way() {
    let folder = Folder::new(WITHIN);
    folder.train(WITHIN);
    let cluster = Cluster::start(1, 1);
    let submit = |more: &[&str]| {
        let sets = [&["--set", "epochs=3", "--set", "fleet.ps=1", "--set", "seed=2"], more].concat();
        cluster.submit(&folder.path("job.toml"), &folder.path("submitted"), &sets)
    };
    let output = submit(&["--resume"]);
    assert!(!output.status.success(), "{}", text(&output));
    assert_says(&text(&output), &["seed: 1 in the checkpoint, 2 in the job", "--resume-anyway"]);
    let output = submit(&["--resume-anyway"]);
    assert!(output.status.success(), "{}", text(&output));
    assert_says(&text(&output), &["seed: 1 in the checkpoint, 2 in the job"]);
}

#[test]
fn the_manifest_names_the_files_with_their_records_and_bytes() {
    let folder = Folder::new(WITHIN);
    folder.train(WITHIN);
    let path: &Path = &folder.checkpoint(WITHIN).join("manifest.json");
    let manifest = Manifest::decode("m", &std::fs::read(path).unwrap()).unwrap();
    let trained_on = manifest.trained_on.unwrap();
    let files: Vec<_> = trained_on.train.files.iter().map(|file| (&*file.path, file.records)).collect();
    assert_eq!((files, trained_on.seed), (vec![("a.csv", 48), ("b.csv", 48)], 1));
    assert_eq!(trained_on.train.files[0].bytes, std::fs::metadata(folder.path("a.csv")).unwrap().len());
}

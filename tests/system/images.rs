//! Folders of images: decoded, cropped at random and normalised by the workers.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
#[cfg(feature = "torch")]
use std::process::Command;

#[cfg(feature = "torch")]
use super::columns::reached;
#[cfg(feature = "torch")]
use crate::harness::python_with;
use crate::harness::{Cluster, fail, model, root, succeed, summary, text};

const JOB: &str = r#"
name = "images"
epochs = 3
seed = 4
[model]
builtin = "softmax"
metrics = ["accuracy"]
[data]
format = "images"
train = { files = ["train"] }
validation = { files = ["validation"] }
inputs = ["image"]
label = "class"
[data.transforms]
image = [
    { op = "decode" },
    { op = "random_resized_crop", size = [6, 8] },
    { op = "horizontal_flip" },
    { op = "color_jitter", brightness = 0.2, contrast = 0.2, saturation = 0.2, hue = 0.1 },
    { op = "normalize", mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] },
]
[data.validation_transforms]
image = [{ op = "decode" }, { op = "resize", size = [6, 8] }, { op = "normalize", mean = 0.45, std = 0.22 }]
[batch]
micro = 4
effective = 12
[optimizer]
kind = "momentum"
momentum = 0.9
learning_rate = 0.01
"#;

/// Images of the golden files of decoders.
const IMAGES: [&str; 8] =
    ["420.jpg", "422.jpg", "444.jpg", "progressive.jpg", "grey.png", "rgb.png", "rgba.png", "lossy.webp"];

/// Writes a job and its images: 3 classes with 16 images each that train, and 8 that validate.
pub(crate) fn write(folder: &Path) -> PathBuf {
    let golden = root().join("data/src/pixels/golden");
    for (set, copies) in [("train", 2), ("validation", 1)] {
        for class in ["ant", "bee", "cow"] {
            let place = folder.join(set).join(class);
            std::fs::create_dir_all(&place).unwrap();
            for copy in 0..copies {
                for name in IMAGES {
                    std::fs::copy(golden.join(name), place.join(format!("{copy}-{name}"))).unwrap();
                }
            }
        }
    }
    let job = folder.join("job.toml");
    std::fs::write(&job, JOB).unwrap();
    job
}

#[test]
fn random_crops_of_images_give_the_same_bits_with_any_fleet() {
    let data = tempfile::tempdir().unwrap();
    let (job, alone) = (write(data.path()), data.path().join("alone"));
    succeed(["run", &job.display().to_string(), "--workers", "1", "--out", &alone.display().to_string()]);
    let cluster = Cluster::start(2, 3);
    let together = cluster.dir.path().join("out");
    let output = cluster.submit(&job, &together, &[]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&alone) == model(&together), "3 workers: other bits than 1");
    assert_eq!(summary(&together)["samples_applied"], 3 * 48);
    let waited = summary(&together)["data_wait"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&waited), "{waited}");
    // Another seed draws other crops, whatever the initial weights.
    let (job, other) = (job.display().to_string(), data.path().join("other").display().to_string());
    succeed([
        "run",
        &job,
        "--workers",
        "2",
        "--out",
        &other,
        "--set",
        "data.transforms.image=[{ op = \"decode\" }, \
             { op = \"resize\", size = [6, 8] }, { op = \"normalize\" }]",
    ]);
    assert!(model(&alone) != model(Path::new(&other)), "the transforms change nothing");
}

#[test]
fn images_that_cannot_be_decoded_are_named() {
    let data = tempfile::tempdir().unwrap();
    let job = write(data.path());
    let out = data.path().join("out").display().to_string();
    let run = || fail(["run", &job.display().to_string(), "--out", &out]);
    let bad = data.path().join("train/bee/0-444.jpg");
    let whole = std::fs::read(&bad).unwrap();
    std::fs::write(&bad, &whole[..whole.len() / 2]).unwrap();
    let said = run();
    assert!(said.contains("train: column `image` of record") && said.contains("`bee/0-444.jpg`: "), "{said}");
    std::fs::write(&bad, b"GIF89a").unwrap();
    let said = run();
    assert!(said.contains("train: column `image` of record"), "{said}");
    std::fs::write(&bad, whole).unwrap();
    std::fs::create_dir(data.path().join("validation/dog")).unwrap();
    assert!(run().contains("class folder `dog`: the first training folder"), "{}", run());
    std::fs::create_dir(data.path().join("train/dog")).unwrap();
    assert!(run().contains("train/dog: a class folder without images"), "{}", run());
}

#[test]
fn transforms_that_do_not_fit_are_refused_before_training() {
    let data = tempfile::tempdir().unwrap();
    let (job, out) =
        (write(data.path()).display().to_string(), data.path().join("out").display().to_string());
    for (set, expected) in [
        ("data.validation_transforms={}", "`random_resized_crop` is random, and validation would measure"),
        ("data.transforms.image=[{ op = \"decode\" }]", "images of any size cannot lie in one batch"),
        ("data.transforms.image=[{ op = \"decoed\" }]", "did you mean `decode`?"),
        ("data.transforms.image=[{ op = \"resize\", sise = 3 }]", "unknown field `sise`"),
        ("data.transforms.picture=[{ op = \"decode\" }]", "data.transforms = \"picture\": no such column"),
    ] {
        let said = fail(["run", &job, "--out", &out, "--set", set]);
        assert!(said.contains(expected), "{expected} missing in {said}");
    }
}

/// Learns from a folder of images that Python makes, with a network that Python scripts.
#[cfg(feature = "torch")]
#[test]
fn a_resnet_learns_shapes_from_a_folder_of_images() {
    let Some(python) = python_with(&["torch", "numpy", "PIL"]) else { return };
    let (example, folder) = (root().join("examples/imagenet"), tempfile::tempdir().unwrap());
    let script = |name: &str, args: &[&str]| {
        let mut command = Command::new(&python);
        command.arg(example.join(name)).args(args).env("PYTHONDONTWRITEBYTECODE", "1");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output));
    };
    script("make_data.py", &["--out", &folder.path().display().to_string()]);
    let network = folder.path().join("resnet18.pt").display().to_string();
    script("model.py", &["--depth", "18", "--classes", "20", "--out", &network]);
    let job = folder.path().join("job-small.toml");
    std::fs::copy(example.join("job-small.toml"), &job).unwrap();
    let (accuracy, stated) = reached(&job, "accuracy");
    assert!(accuracy >= stated, "accuracy {accuracy}, stated is {stated}");
}

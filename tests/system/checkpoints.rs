//! Commands on checkpoints: list, verify, export, and begin another job with their weights.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};

use crate::harness::{Cluster, ebb, events, fail, model, root, succeed, summary, text};

/// Runs digits with these arguments and settings, and returns its output.
fn run(out: &Path, more: &[&str], sets: &[String]) -> String {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let job = root().join("examples/digits/job.toml");
    let mut command = ebb(["run", "--workers", "1", "--ps", "2", "--out"]);
    let output = command.arg(out).args(more).args(sets).arg(job).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

/// Returns the folder with the results of the run that trained this epoch.
fn out_of(folder: &Path, epoch: u32) -> PathBuf {
    folder.join(format!("out-{epoch}"))
}

/// Trains as many epochs, with a checkpoint after each in `folder/checkpoints`. Each epoch is a run
/// of its own, because a ps skips a checkpoint that is due while it still writes the one before.
fn trained(folder: &Path, epochs: u32) -> PathBuf {
    let checkpoints = folder.join("checkpoints");
    let place = format!("checkpoint.url={}", checkpoints.display());
    for epoch in 1..=epochs {
        let resume: &[&str] = if epoch == 1 { &[] } else { &["--resume"] };
        let sets = [format!("epochs={epoch}"), place.clone(), "checkpoint.every_epochs=1".into()];
        run(&out_of(folder, epoch), resume, &sets);
    }
    checkpoints
}

fn some_file(checkpoints: &Path, version: &str) -> PathBuf {
    let folder = std::fs::read_dir(checkpoints.join("digits").join(version)).unwrap();
    let mut files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    files.remove(0)
}

#[test]
fn checkpoints_are_listed_verified_and_exported() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = trained(folder.path(), 3);
    let place = checkpoints.to_str().unwrap();
    let out = out_of(folder.path(), 3);
    let listed = succeed(["checkpoint", "list", "--json", place]);
    let listed: Vec<serde_json::Value> =
        listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(listed.iter().map(|line| line["partitions"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 2, 2]);
    let versions: Vec<_> = listed.iter().map(|line| line["version"].as_u64().unwrap()).collect();
    assert_eq!(versions, [versions[0], 2 * versions[0], 3 * versions[0]]);
    let told = (1..=3).flat_map(|epoch| events(&out_of(folder.path(), epoch), "checkpoint"));
    let told: Vec<_> = told.map(|event| event["version"].as_u64()).collect();
    assert_eq!(told, versions.iter().copied().map(Some).collect::<Vec<_>>());
    assert_eq!(succeed(["checkpoint", "verify", place]).matches("intact").count(), 3);

    // The last checkpoint has the trained model.
    let exported = folder.path().join("exported.safetensors");
    succeed(["checkpoint", "export", place, "--out", exported.to_str().unwrap()]);
    assert!(std::fs::read(&exported).unwrap() == model(&out));

    let damaged = some_file(&checkpoints, &format!("v{:010}", versions[2]));
    let mut bytes = std::fs::read(&damaged).unwrap();
    // The first weight lies after the header, whose length comes first.
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[8 + header] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let said = fail(["checkpoint", "verify", place]);
    assert!(said.matches("intact").count() == 2 && said.contains("is damaged: checksum"), "{said}");
    let said = fail(["checkpoint", "export", place, "--out", exported.to_str().unwrap()]);
    assert!(said.contains(damaged.to_str().unwrap()), "{said}");
    let said = fail(["checkpoint", "list", folder.path().to_str().unwrap()]);
    assert!(said.contains("has no checkpoints"), "{said}");
}

#[test]
fn checkpoints_of_a_job_are_found_through_the_master() {
    let cluster = Cluster::start(1, 1);
    let (out, url) =
        (cluster.dir.path().join("out"), cluster.dir.path().join("checkpoints").display().to_string());
    let url = format!("checkpoint.url={url}");
    let sets =
        ["--set", "epochs=1", "--set", "fleet.ps=1", "--set", &url, "--set", "checkpoint.every_epochs=1"];
    let output = cluster.submit(&root().join("examples/digits/job.toml"), &out, &sets);
    assert!(output.status.success(), "{}", text(&output));
    let listed = succeed(["checkpoint", "list", "--job", "digits", "--master", &cluster.url]);
    assert_eq!(listed.lines().count(), 1, "{listed}");
}

#[test]
fn another_job_begins_with_the_weights_of_a_checkpoint_or_a_file_where_they_fit() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = trained(folder.path(), 1);
    let trained = model(&out_of(folder.path(), 1));
    let exported = out_of(folder.path(), 1).join("model.safetensors");
    // This rate is so small that no weight changes.
    let still = ["epochs=1", "optimizer.kind=sgd", "optimizer.learning_rate=1e-30"].map(str::to_owned);
    for (name, initial) in [("folder", checkpoints.display()), ("file", exported.display())] {
        let out = folder.path().join(name);
        let said = run(&out, &[], &[&still[..], &[format!("model.initial={initial}")]].concat());
        assert!(said.contains("warm start: 4 of 4 tensors are from model.initial"), "{said}");
        assert!(model(&out) == trained, "{name}: other weights");
    }
    let initial = format!("model.initial={}", exported.display());
    let wider = "model.options={ hidden = [64] }".to_owned();
    let said = run(&folder.path().join("wider"), &[], &[&still[..], &[initial, wider]].concat());
    assert!(said.contains("warm start: 1 of 4 tensors") && said.contains("in the model, F32"), "{said}");
    let missing = format!("model.initial={}", folder.path().join("none").display());
    let job = root().join("examples/digits/job.toml");
    let said = fail(["run", job.to_str().unwrap(), "--set", &missing]);
    assert!(said.contains("model.initial"), "{said}");
}

#[test]
fn a_checkpoint_is_evaluated_and_predicts_like_the_model_of_its_job() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = trained(folder.path(), 2);
    let (url, last) = (format!("file://{}", checkpoints.display()), out_of(folder.path(), 2));
    let job = root().join("examples/digits/job.toml").display().to_string();
    let expected = summary(&last)["final"].clone();
    for (name, place) in [("folder", checkpoints.display().to_string()), ("url", url)] {
        let out = folder.path().join(name);
        succeed(["evaluate", &job, "--model", &place, "--out", &out.display().to_string()]);
        assert_eq!(summary(&out)["final"], expected, "{name}: the newest checkpoint has the last weights");
    }
    let predictions = [("checkpoint", &checkpoints), ("results", &last)].map(|(name, model)| {
        let out = folder.path().join(format!("{name}.jsonl"));
        let (model, path) = (model.display().to_string(), out.display().to_string());
        succeed(["predict", &job, "--model", &model, "--out", &path]);
        std::fs::read(out).unwrap()
    });
    assert!(predictions[0] == predictions[1], "a checkpoint predicts other values than the model");
}

/// Writes a job with a TorchScript module, and returns its path. It has 96 images of 8 x 8 in 3
/// classes, and 12 steps in each epoch.
#[cfg(feature = "torch")]
fn scripted(folder: &Path) -> PathBuf {
    let idx = |sizes: &[u32], bytes: Vec<u8>| {
        let mut file = vec![0, 0, 8, sizes.len() as u8];
        file.extend(sizes.iter().flat_map(|size| size.to_be_bytes()));
        file.extend(bytes);
        file
    };
    let pixels = (0..96 * 64u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(folder.join("images.idx4"), idx(&[96, 1, 8, 8], pixels)).unwrap();
    std::fs::write(folder.join("labels.idx1"), idx(&[96], (0..96).map(|at| at % 3).collect())).unwrap();
    std::fs::copy(root().join("model/tests/fixtures/batchnorm.pt"), folder.join("model.pt")).unwrap();
    let job = r#"
name = "scripted"
epochs = 3
model = { script = "model.pt", loss = "cross_entropy" }
data = { format = "idx", train = { features = ["images.idx4"], labels = ["labels.idx1"] } }
batch = { micro = 4, effective = 8 }
optimizer = { kind = "adam", learning_rate = 0.01 }
checkpoint = { url = "checkpoints", every_epochs = 1 }
"#;
    std::fs::write(folder.join("job.toml"), job).unwrap();
    folder.join("job.toml")
}

#[test]
#[cfg(feature = "torch")]
fn a_scripts_checkpoint_is_exported_as_the_module_that_the_job_left() {
    let folder = tempfile::tempdir().unwrap();
    let job = scripted(folder.path());
    let out = folder.path().join("out");
    succeed([
        "run".as_ref(),
        job.as_os_str(),
        "--device".as_ref(),
        "cpu".as_ref(),
        "--out".as_ref(),
        out.as_os_str(),
    ]);
    let checkpoints = folder.path().join("checkpoints").display().to_string();
    let exported = folder.path().join("exported.safetensors");
    let export =
        |to: &Path| ["checkpoint", "export", &checkpoints, "--out", to.to_str().unwrap()].map(str::to_owned);
    let said = succeed(export(&exported));
    assert!(said.contains("exported.pt: the TorchScript module"), "{said}");
    assert!(
        std::fs::read(&exported).unwrap() == model(&out),
        "other tensors, or without the module's constants"
    );
    let module = std::fs::read(folder.path().join("exported.pt")).unwrap();
    assert!(module == std::fs::read(out.join("model.pt")).unwrap(), "another module than the job's own");
    // The module is stored once for all versions.
    let scripts = std::fs::read_dir(folder.path().join("checkpoints/scripted")).unwrap();
    let is_script = |name: &std::ffi::OsString| name.to_str().is_some_and(|name| name.starts_with("script-"));
    assert_eq!(scripts.map(|entry| entry.unwrap().file_name()).filter(is_script).count(), 1);

    // A file of the job is not overwritten.
    let said = fail(export(&folder.path().join("model.safetensors")));
    assert!(said.contains("was submitted with") && said.contains("--out"), "{said}");
    assert!(!folder.path().join("model.safetensors").exists());
}

#[test]
#[cfg(feature = "torch")]
fn a_checkpoint_of_a_job_that_trains_is_exported_by_its_url_and_through_the_master() {
    let cluster = Cluster::start(1, 1);
    let folder = cluster.dir.path();
    let job = scripted(folder);
    let out = folder.join("out");
    // So many are kept that none is removed while it is exported.
    let sets = ["--set", "epochs=100000", "--set", "checkpoint.keep=1000"];
    let mut submission = cluster.submission(&job, &out, &sets);
    let mut child =
        submission.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    while crate::harness::told(&out, "checkpoint") == 0 {
        assert!(child.try_wait().unwrap().is_none(), "the job ended");
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
    let checkpoints = folder.join("checkpoints").display().to_string();
    for (name, place) in
        [("url", vec![&*checkpoints]), ("job", vec!["--job", "scripted", "--master", &cluster.url])]
    {
        let to = folder.join(format!("{name}.safetensors")).display().to_string();
        let said = succeed(["checkpoint", "export", "--out", &to].iter().copied().chain(place));
        assert!(said.contains("of scripted") && said.contains(&format!("{name}.pt: ")), "{said}");
        let module = std::fs::read(folder.join(format!("{name}.pt"))).unwrap();
        assert!(module.starts_with(b"PK") && module != std::fs::read(folder.join("model.pt")).unwrap());
    }
    succeed(["cancel", "--force", "scripted", "--master", &cluster.url]);
    child.wait().unwrap();
}

#[test]
#[cfg(not(feature = "torch"))]
fn without_libtorch_a_scripts_weights_are_exported_and_what_is_missing_is_said() {
    use proto::checkpoint::manifest::{Manifest, Script};

    let folder = tempfile::tempdir().unwrap();
    let checkpoints = trained(folder.path(), 1);
    // A manifest of a job with a module, which this program cannot train.
    let mut versions = std::fs::read_dir(checkpoints.join("digits")).unwrap();
    let path = versions.next().unwrap().unwrap().path().join("manifest.json");
    let mut manifest = Manifest::decode("m", &std::fs::read(&path).unwrap()).unwrap();
    let script = Script { bytes: 6, sha256: proto::artifact::sha256_hex(b"module") };
    manifest.script = Some(script.clone());
    std::fs::write(&path, manifest.encode()).unwrap();
    let exported = folder.path().join("exported.safetensors");
    let export = ["checkpoint", "export", checkpoints.to_str().unwrap(), "--out", exported.to_str().unwrap()];
    let said = fail(export);
    assert!(said.contains(&script.file_name()) && said.contains("is missing"), "{said}");
    std::fs::write(checkpoints.join("digits").join(script.file_name()), b"modula").unwrap();
    assert!(fail(export).contains("its SHA-256 is"));
    std::fs::write(checkpoints.join("digits").join(script.file_name()), b"module").unwrap();
    let said = succeed(export);
    assert!(said.contains("exported.pt is not written") && said.contains("needs libtorch"), "{said}");
    assert!(std::fs::read(&exported).unwrap() == model(&out_of(folder.path(), 1)));
    assert!(!folder.path().join("exported.pt").exists());
}

#[test]
fn ps_that_have_disks_of_their_own_are_named_before_anything_is_trained() {
    /// A ps with a working folder of its own.
    struct Ps(std::process::Child);
    impl Drop for Ps {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let cluster = Cluster::start(0, 1);
    let _ps = ["a", "b"].map(|name| {
        let home = cluster.dir.path().join(name);
        std::fs::create_dir(&home).unwrap();
        let mut command = ebb(["ps", "--master", &cluster.url, "--listen", "127.0.0.1:0", "--name", name]);
        let (out, log) = (std::process::Stdio::null(), std::process::Stdio::null());
        Ps(command.current_dir(home).stdout(out).stderr(log).spawn().unwrap())
    });
    // One URL that leads each process to another place, like a path on disks of their own.
    let sets = ["checkpoint.url=/proc/self/cwd/own", "checkpoint.every_steps=10"];
    let sets: Vec<_> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let out = cluster.dir.path().join("out");
    let output = cluster.submit(&root().join("examples/digits/job.toml"), &out, &sets);
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("the master do not see one store at checkpoint.url"), "{said}");
    assert!(events(&out, "train").is_empty() && events(&out, "checkpoint").is_empty(), "{said}");
}

//! Files of a job on a worker whose temporary folder others share: other users cannot redirect,
//! exchange or find them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use crate::harness::{Cluster, ebb, model, root, succeed, text};

/// A user who may only write to shared folders.
const NOBODY: u32 = 65534;

/// Returns the names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    fs::read_dir(folder).unwrap().map(|entry| name(entry.unwrap())).collect()
}

#[test]
fn files_of_a_job_follow_no_link_have_no_name_and_leave_nothing() {
    let mut cluster = Cluster::start(2, 0);
    let shared = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o1777)).tempdir().unwrap();
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let victim = cluster.dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    cluster.add_worker_with(&[("TMPDIR", shared.path().to_str().unwrap())]);

    // Another user is there first, with the name that older versions used. Without root it is the
    // same user.
    let squat = format!("ebb-{}-worker-0-1", cluster.workers[0].child.id());
    let folder = shared.path().join(&squat);
    let script = format!(
        "umask 0 && mkdir '{folder}' && ln -s '{victim}' '{folder}/initial.safetensors'",
        folder = folder.display(),
        victim = victim.display()
    );
    let mut squatter = Command::new("sh");
    squatter.args(["-c", &script]);
    if fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0) {
        squatter.uid(NOBODY).gid(NOBODY);
    }
    assert!(squatter.status().unwrap().success());

    // A job with a file: the weights of another training.
    let job = root().join("examples/digits/job.toml");
    let before = cluster.dir.path().join("before");
    let run = ["run", job.to_str().unwrap(), "--set", "epochs=1", "--out", before.to_str().unwrap()];
    succeed(run);
    let initial = format!("model.initial={}", before.join("model.safetensors").display());
    let out = cluster.dir.path().join("out");
    // It trains until it is cancelled.
    let sets = ["--set", "epochs=100000", "--set", &initial];
    let mut following = cluster.submission(&job, &out, &sets).spawn().unwrap();
    // Its records are counted, its model is made, and a piece of it is trained.
    while cluster.workers[0].log().matches("task reported").count() < 3 {
        assert!(following.try_wait().unwrap().is_none(), "the job ended:\n{}", cluster.workers[0].log());
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
    assert_eq!(names(shared.path()), std::slice::from_ref(&squat), "a file of the running job has a name");
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious", "the file was written through a link");

    cluster.workers[0].signal("KILL");
    cluster.workers[0].child.wait().unwrap();
    assert_eq!(names(shared.path()), [squat], "something is left of a worker that was killed");
    succeed(["cancel", "--master", &cluster.url, "--force", "digits"]);
    following.wait().unwrap();
}

#[test]
fn a_file_that_came_with_a_job_is_what_it_begins_with() {
    let cluster = Cluster::start(2, 1);
    let job = root().join("examples/digits/job.toml");
    let out = |name: &str| cluster.dir.path().join(name);
    let run = |name: &str, more: &[&str]| {
        let command = ebb(["run", job.to_str().unwrap(), "--set", "epochs=1", "--out"])
            .arg(out(name))
            .args(more)
            .output()
            .unwrap();
        assert!(command.status.success(), "{}", text(&command));
    };
    run("before", &[]);
    let initial = format!("model.initial={}", out("before").join("model.safetensors").display());
    run("alone", &["--set", &initial]);
    let more = ["--set", "epochs=1", "--set", &initial];
    let output = cluster.submit(&job, &out("cluster"), &more);
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&out("cluster")) == model(&out("alone")), "other bits");
    assert!(model(&out("before")) != model(&out("alone")));
}

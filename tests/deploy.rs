//! What lies in `deploy/`: scripts that a linter accepts, manifests that fit their schemas, and commands that `ebb` knows.
//!
//! Each check skips loudly where its tool is missing: shellcheck, docker-compose, kubectl, `kubernetes-validate` (from PyPI; on PATH or
//! named by `EBB_KUBERNETES_VALIDATE`), systemd-analyze.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(clippy::disallowed_methods, reason = "finds a tool through the environment")]

mod harness;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harness::{ebb, root, skipped, text};

/// All files below `deploy/` whose name ends so.
fn files(ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("deploy")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().ends_with(ending) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// What a tool said, or none where there is no such tool.
fn tool(command: &mut Command, what: &str) -> Option<Output> {
    match command.output() {
        Ok(output) => Some(output),
        Err(error) => {
            skipped(&format!("{}: {error}; NOT checked: {what}", command.get_program().display()));
            None
        }
    }
}

#[test]
fn scripts_pass_shellcheck() {
    let scripts = [files(".sh"), files(".sbatch")].concat();
    assert!(scripts.len() >= 6, "only {scripts:?}: the walk is broken");
    let Some(output) = tool(Command::new("shellcheck").args(&scripts), "scripts of deploy/") else { return };
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn compose_files_are_valid_alone_and_with_their_overlays() {
    for overlays in [&[][..], &["observability"], &["s3"], &["observability", "s3"]] {
        let mut command = Command::new("docker-compose");
        command.arg("--file").arg(root().join("deploy/compose.yaml"));
        for overlay in overlays {
            command.arg("--file").arg(root().join(format!("deploy/compose.{overlay}.yaml")));
        }
        command.envs([("EBB_S3_KEY", "key"), ("EBB_S3_SECRET", "secret"), ("GRAFANA_PASSWORD", "secret")]);
        let Some(output) = tool(command.args(["config", "--quiet"]), "deploy/compose*.yaml") else { return };
        assert!(output.status.success(), "{overlays:?}: {}", text(&output));
    }
    // A secret that was forgotten is an error, not an empty one.
    let mut command = Command::new("docker-compose");
    command.arg("--file").arg(root().join("deploy/compose.yaml"));
    command.arg("--file").arg(root().join("deploy/compose.s3.yaml")).args(["config", "--quiet"]);
    let output = command.env_remove("EBB_S3_KEY").env_remove("EBB_S3_SECRET").output().unwrap();
    assert!(!output.status.success() && text(&output).contains("set EBB_S3_KEY"), "{}", text(&output));
}

/// The validator's answer on manifests, or none where there is no validator.
fn validate(folder: &Path, manifests: &str) -> Option<Output> {
    let program =
        std::env::var("EBB_KUBERNETES_VALIDATE").unwrap_or_else(|_| "kubernetes-validate".to_owned());
    let path = folder.join("manifests.yaml");
    fs::write(&path, manifests).unwrap();
    let what = "Kubernetes schemas; to check them: pip install kubernetes-validate";
    tool(Command::new(program).args(["--strict", "--quiet", "-k", "1.30.0"]).arg(path), what)
}

#[test]
fn kustomize_output_fits_the_schemas_of_kubernetes() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["base", "overlays/dev", "overlays/gpu"] {
        let place = root().join("deploy/kubernetes").join(name);
        let Some(rendered) = tool(
            Command::new("kubectl").arg("kustomize").arg(&place),
            "deploy/kubernetes; apt-get install kubernetes-client",
        ) else {
            return;
        };
        assert!(rendered.status.success(), "{name}: {}", text(&rendered));
        let rendered = String::from_utf8(rendered.stdout).unwrap();
        let Some(output) = validate(folder.path(), &rendered) else { return };
        assert!(output.status.success(), "{name}: {}", text(&output));
        // A validator that accepts everything would have been no check.
        for (right, wrong) in
            [("terminationGracePeriodSeconds:", "terminationGraceSeconds:"), ("port: 4700", "port: [4700]")]
        {
            let broken = rendered.replace(right, wrong);
            assert_ne!(broken, rendered, "{name} has no {right}");
            let output = validate(folder.path(), &broken).unwrap();
            assert!(!output.status.success(), "{name}: `{wrong}` was accepted");
        }
        if name.ends_with("gpu") {
            assert!(
                rendered.contains("nvidia.com/gpu: 1") && rendered.contains("kind: HorizontalPodAutoscaler")
            );
            assert!(rendered.contains("image: ebbflow-worker-cuda:latest"), "{rendered}");
        }
    }
}

#[test]
fn units_are_valid() {
    let folder = tempfile::tempdir().unwrap();
    let mut units = Vec::new();
    // The program need not be installed on the machine that checks.
    for unit in files(".service") {
        let text =
            fs::read_to_string(&unit).unwrap().replace("/usr/local/bin/ebb", env!("CARGO_BIN_EXE_ebb"));
        let copy = folder.path().join(unit.file_name().unwrap().to_string_lossy().replace("@.", "@0."));
        fs::write(&copy, text).unwrap();
        units.push(copy);
    }
    assert_eq!(units.len(), 3);
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no", "--recursive-errors=no"]).args(&units);
    let Some(output) = tool(&mut command, "deploy/systemd") else { return };
    assert!(output.status.success() && text(&output).trim().is_empty(), "{}", text(&output));
}

#[test]
fn every_command_of_a_manifest_is_one_that_ebb_has() {
    let mut flags = 0;
    let sources =
        [files(".yaml"), files(".service"), files(".sbatch"), files("Dockerfile"), files("cluster.sh")];
    for path in sources.concat() {
        let source = fs::read_to_string(&path).unwrap();
        let lines = source.lines().filter(|line| !line.trim_start().starts_with('#'));
        // One command may go on over several lines of a script; a list of arguments is one line here.
        let joined = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
        for line in joined.lines() {
            let words: Vec<&str> = line
                .split(|sign: char| sign.is_whitespace() || "[](),\"'`".contains(sign))
                .filter(|word| !word.is_empty())
                .collect();
            let role = words.iter().position(|word| ["master", "ps", "worker"].contains(word));
            let Some(role) = role.filter(|&role| words[role + 1..].iter().any(|word| word.starts_with("--")))
            else {
                continue;
            };
            let help = ebb([words[role], "--help"]).output().unwrap();
            let help = text(&help);
            let known: BTreeSet<&str> =
                help.split_whitespace().filter(|word| word.starts_with("--")).collect();
            for flag in words[role + 1..].iter().filter(|word| word.starts_with("--")) {
                assert!(known.contains(flag), "{}: `ebb {}` has no {flag}", path.display(), words[role]);
                flags += 1;
            }
        }
    }
    assert!(flags > 30, "only {flags} flags: the search is broken");
}

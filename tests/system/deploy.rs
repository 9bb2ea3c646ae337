//! Files in `deploy/`: scripts that a linter accepts, manifests that fit their schemas, and
//! commands that `ebb` knows.
//!
//! Each check reports a skip if its tool is missing: shellcheck, docker-compose, kubectl, promtool,
//! `kubernetes-validate` (from PyPI; on PATH or named by `EBB_KUBERNETES_VALIDATE`),
//! systemd-analyze.
#![cfg(not(feature = "torch"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(clippy::disallowed_methods, reason = "finds a tool through the environment")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::harness::machine::{docker_compose, find, tool};
use crate::harness::{Lacks, ebb, ebb_path, root, skipped, text};

/// Returns all files below `deploy/` with this ending.
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

#[test]
fn scripts_pass_shellcheck() {
    let scripts = [files(".sh"), files(".sbatch"), vec![root().join(".ci/run")]].concat();
    assert!(scripts.len() >= 6, "only {scripts:?}: the walk is broken");
    let Some(output) = tool(Command::new("shellcheck").args(&scripts), "scripts of deploy/") else { return };
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn compose_files_are_valid_alone_and_with_their_overlays() {
    let secrets = ["EBB_S3_KEY", "EBB_S3_SECRET", "GRAFANA_PASSWORD", "EBB_CERTS_GROUP"];
    let config = |overlays: &[&str]| {
        let mut command = docker_compose()?;
        command.arg("--file").arg(root().join("deploy/compose.yaml"));
        for overlay in overlays {
            command.arg("--file").arg(root().join(format!("deploy/compose.{overlay}.yaml")));
        }
        for secret in secrets {
            command.env_remove(secret);
        }
        command.args(["config", "--quiet"]);
        Some(command)
    };
    let alone = [&[][..], &["keys"], &["observability"], &["s3"], &["gpu"]];
    let together = [&["keys", "observability", "s3"][..], &["keys", "observability", "gpu"]];
    for overlays in alone.into_iter().chain(together) {
        let Some(mut command) = config(overlays) else {
            let what = "neither docker-compose nor `docker compose`; NOT checked: deploy/compose*.yaml";
            return skipped(Lacks::Package, what);
        };
        let output = command.envs(secrets.map(|secret| (secret, "10001"))).output().unwrap();
        assert!(output.status.success(), "{overlays:?}: {}", text(&output));
    }
    // A missing secret is an error, not an empty one.
    let output = config(&["s3"]).unwrap().output().unwrap();
    assert!(!output.status.success() && text(&output).contains("set EBB_S3_KEY"), "{}", text(&output));
}

/// Rules of the alarms.
const ALERTS: &str = "deploy/observability/alerts.yaml";

#[test]
fn alarms_are_rules_of_prometheus_on_numbers_that_the_roles_have() {
    let alerts = fs::read_to_string(root().join(ALERTS)).unwrap();
    let alarms: Vec<_> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let operating = fs::read_to_string(root().join("docs/operating.md")).unwrap();
    assert!(alarms.len() >= 8, "only {alarms:?}: the search is broken");
    for alarm in alarms {
        assert!(
            operating.contains(&format!("`{alarm}`")),
            "docs/operating.md does not say what {alarm} means"
        );
    }
    let sources = [
        "master/src/metrics.rs",
        "ps/src/metrics.rs",
        "worker/src/metrics.rs",
        "src/telemetry/metrics.rs",
        "src/telemetry/devices.rs",
    ];
    let sources = sources.map(|source| fs::read_to_string(root().join(source)).unwrap()).concat();
    let dashboard = root().join("deploy/observability/grafana/dashboards/ebbflow.json");
    let dashboard = fs::read_to_string(dashboard).unwrap();
    serde_json::from_str::<serde_json::Value>(&dashboard).unwrap();
    let both = [alerts.as_str(), &dashboard].concat();
    let words = both.split(|sign: char| !sign.is_ascii_alphanumeric() && sign != '_');
    let names: BTreeSet<_> = words.filter(|word| word.starts_with("ebb_")).collect();
    assert!(names.len() >= 8, "only {names:?}: the search is broken");
    for name in names {
        assert!(sources.contains(&format!("\"{name}\"")), "no role counts {name}");
    }
    // The Prometheus operator gets the same rules, two columns further right.
    let component = root().join("deploy/kubernetes/components/observability/alerts.yaml");
    let component = fs::read_to_string(component).unwrap();
    let groups = alerts.find("groups:").unwrap();
    let indented: String = alerts[groups..].lines().map(|line| format!("  {line}\n")).collect();
    assert!(component.ends_with(&indented), "the component's rules are not those of {ALERTS}");

    let folder = root().join("deploy/observability");
    for (what, file) in [("rules", "alerts.yaml"), ("config", "prometheus.yaml")] {
        let mut promtool = Command::new("promtool");
        let Some(output) = tool(promtool.arg("check").arg(what).arg(folder.join(file)), file) else { return };
        assert!(output.status.success(), "{}", text(&output));
    }
}

/// Minor version of the first kubectl whose Kustomize has components.
const KUBECTL_MINOR: u32 = 22;

/// Runs the validator on manifests. Returns `None` if it is missing.
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
    let mut kubectl = Command::new("kubectl");
    let what = "deploy/kubernetes; install kubectl 1.22 or newer";
    // The distributions of the test machines have no kubectl that is new enough.
    if find("kubectl").is_none() {
        return skipped(Lacks::Machine, &format!("no kubectl; NOT checked: {what}"));
    }
    let Some(version) = tool(kubectl.args(["version", "--client", "--output", "json"]), what) else { return };
    let version: serde_json::Value = serde_json::from_slice(&version.stdout).unwrap_or_default();
    let minor = version["clientVersion"]["minor"].as_str().unwrap_or_default().trim_end_matches('+');
    if minor.parse::<u32>().is_ok_and(|minor| minor < KUBECTL_MINOR) {
        let what = format!("kubectl 1.{minor} knows no components; NOT checked: {what}");
        return skipped(Lacks::Machine, &what);
    }
    for name in
        ["base", "overlays/dev", "overlays/gpu", "overlays/gpu-ps", "overlays/ha", "overlays/monitored"]
    {
        let place = root().join("deploy/kubernetes").join(name);
        let rendered = Command::new("kubectl").arg("kustomize").arg(&place).output().unwrap();
        assert!(rendered.status.success(), "{name}: {}", text(&rendered));
        let rendered = String::from_utf8(rendered.stdout).unwrap();
        // Kubernetes' schemas lack the operator's own kinds.
        let known =
            rendered.split("---\n").filter(|part| !part.contains("apiVersion: monitoring.coreos.com/"));
        let known = known.collect::<Vec<_>>().join("---\n");
        let Some(output) = validate(folder.path(), &known) else { return };
        assert!(output.status.success(), "{name}: {}", text(&output));
        // A validator that accepts everything would be no check.
        for (right, wrong) in
            [("terminationGracePeriodSeconds:", "terminationGraceSeconds:"), ("port: 4700", "port: [4700]")]
        {
            let broken = known.replace(right, wrong);
            assert_ne!(broken, known, "{name} has no {right}");
            let output = validate(folder.path(), &broken).unwrap();
            assert!(!output.status.success(), "{name}: `{wrong}` was accepted");
        }
        let expected: &[&str] = match name {
            "overlays/gpu" => &[
                "nvidia.com/gpu: 1",
                "kind: HorizontalPodAutoscaler",
                "name: ebb_master_workers_wanted",
                "image: ebbflow-worker-cuda:latest",
                "- 0.0.0.0:9464",
            ],
            "overlays/gpu-ps" => &["nvidia.com/gpu: 1", "- cuda:0", "value: /tmp"],
            "overlays/ha" => &["- --etcd", "serviceName: masters", "- ReadWriteMany"],
            "overlays/monitored" => {
                &["kind: PodMonitor", "kind: PrometheusRule", "- 0.0.0.0:9464", "name: metrics"]
            }
            _ => &["kind: Deployment"],
        };
        let keys =
            ["ebb-master-keys", "ebb-ps-keys", "ebb-worker-keys"].map(|name| format!("secretName: {name}"));
        for part in keys.iter().map(String::as_str).chain(expected.iter().copied()) {
            assert!(rendered.contains(part), "{name} has no `{part}`:\n{rendered}");
        }
        // The ports of master and ps, where calls need certificates.
        let open = rendered.lines().find(|line| line.contains("http://") && line.contains(":470"));
        assert_eq!(open, None, "{name}");
    }
}

/// The number by which an autoscaler sees how much work waits.
const WAITING_WORK: &str = "ebb_master_workers_wanted";

#[test]
fn the_autoscaler_of_gpus_looks_at_a_number_that_the_master_has() {
    let metrics = fs::read_to_string(root().join("master/src/metrics.rs")).unwrap();
    assert!(metrics.contains(&format!("\"{WAITING_WORK}\"")));
    let folder = root().join("deploy/kubernetes/components/autoscaling-work");
    let autoscaler = fs::read_to_string(folder.join("autoscaler.yaml")).unwrap();
    assert!(autoscaler.contains(&format!("name: {WAITING_WORK} ")) && !autoscaler.contains("Resource"));
    // The two ways to give it to the autoscaler.
    let ways = fs::read_to_string(folder.join("kustomization.yaml")).unwrap();
    assert_eq!(ways.matches(&format!("max({WAITING_WORK})")).count(), 2);
}

#[test]
fn units_are_valid() {
    let folder = tempfile::tempdir().unwrap();
    let mut units = Vec::new();
    // The program need not be installed on the machine that checks.
    for unit in files(".service") {
        let program = ebb_path().display().to_string();
        let text = fs::read_to_string(&unit).unwrap().replace("/usr/local/bin/ebb", &program);
        let copy = folder.path().join(unit.file_name().unwrap().to_string_lossy().replace("@.", "@0."));
        fs::write(&copy, text).unwrap();
        units.push(copy);
    }
    assert_eq!(units.len(), 3);
    // What is added for a GPU, at the end of the unit.
    let plain = units.iter().find(|unit| unit.ends_with("ebb-ps.service")).unwrap();
    let gpu = fs::read_to_string(root().join("deploy/systemd/ebb-ps-gpu.conf")).unwrap();
    let on_gpu = folder.path().join("ebb-ps-gpu.service");
    fs::write(&on_gpu, fs::read_to_string(plain).unwrap() + &gpu).unwrap();
    units.push(on_gpu);
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
        // A command may continue on the next line: after a backslash in a script, after a comma in
        // a list of arguments.
        let joined = lines.map(str::trim).collect::<Vec<_>>().join("\n");
        let joined = joined.replace("\\\n", " ").replace(",\n", ", ").replace("[\n", "[");
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

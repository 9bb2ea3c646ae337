//! The metrics of each role, as operators see them with Prometheus and its tools.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::harness::machine::Reserved;
use crate::harness::{self, Cluster, Lacks, Process, root, summary, text};

/// Ps of the example's job.
const PS: usize = 2;

/// Setting for metrics at any free port of this machine.
const METRICS: (&str, &str) = ("EBB_METRICS", "127.0.0.1:0");

fn get(url: &str) -> std::io::Result<String> {
    let rest = url.trim_start_matches("http://");
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let mut stream = TcpStream::connect(host)?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    write!(stream, "GET /{path} HTTP/1.0\r\nHost: {host}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    match head.contains(" 200 ") {
        true => Ok(body.to_owned()),
        false => Err(std::io::Error::other(head.to_owned())),
    }
}

/// Returns the numbers of a process, each with its labels as in `ebb_x{device="cuda:0"}`.
pub(crate) fn numbers(url: &str) -> BTreeMap<String, f64> {
    let body = get(url).unwrap();
    let lines = body.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.map(|line| line.rsplit_once(' ').unwrap());
    pairs.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

/// Returns whether a program is installed. It reports a skip without it.
fn has(program: &str, package: &str) -> bool {
    let there = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if there.is_err() {
        let what = format!("no `{program}` on the PATH; on Debian: apt-get install {package}");
        harness::skipped(Lacks::Package, &what);
    }
    there.is_ok()
}

/// Checks that `promtool` has no complaints.
fn check_with_promtool(exposition: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = promtool.spawn().unwrap();
    child.stdin.take().unwrap().write_all(exposition.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{exposition}", text(&output));
    assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{}", text(&output));
}

/// A real Prometheus. It ends with its handle.
struct Prometheus {
    child: Child,
    url: String,
    _address: Reserved,
}

impl Prometheus {
    fn start(folder: &Path, targets: &[String]) -> Self {
        let hosts: Vec<_> = targets
            .iter()
            .map(|url| url.trim_start_matches("http://").trim_end_matches("/metrics"))
            .map(|host| format!("'{host}'"))
            .collect();
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs:\n- job_name: ebbflow\n  static_configs:\n  - targets: [{}]\n",
            hosts.join(", ")
        );
        let file = folder.join("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        // Prometheus does not accept port 0.
        let reserved = Reserved::local();
        let address = &reserved.address;
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", file.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.join("tsdb").display()));
        command.arg(format!("--web.listen-address={address}"));
        let log = std::fs::File::create(folder.join("prometheus.log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Self { child, url: format!("http://{address}"), _address: reserved }
    }

    /// Waits until a query has `count` values, all above zero, and returns them.
    fn wait_for(&mut self, query: &str, count: usize) {
        loop {
            assert!(self.child.try_wait().unwrap().is_none(), "prometheus ended");
            let answer = get(&format!("{}/api/v1/query?query={query}", self.url)).unwrap_or_default();
            let answer: serde_json::Value = serde_json::from_str(&answer).unwrap_or_default();
            let results = answer["data"]["result"].as_array().cloned().unwrap_or_default();
            let above = |result: &serde_json::Value| {
                result["value"][1]
                    .as_str()
                    .and_then(|value| value.parse::<f64>().ok())
                    .is_some_and(|value| value > 0.0)
            };
            if results.len() == count && results.iter().all(above) {
                return;
            }
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn every_role_shows_its_numbers_and_prometheus_scrapes_them() {
    let program = &harness::ebb_path();
    // Leases that end because the machine is slow would be computed twice.
    let patient = [("EBB_MASTER_HEARTBEAT", "10s"), ("EBB_MASTER_DEATH", "60s")];
    let mut cluster = Cluster::with_environment(program, PS, 0, &[&[METRICS][..], &patient].concat());
    cluster.add_worker_with(&[METRICS]);
    let Cluster { master, ps, workers, .. } = &mut cluster;
    let urls: Vec<_> = [master].into_iter().chain(workers).chain(ps).map(Process::metrics_url).collect();
    let out = cluster.dir.path().join("out");
    let output = cluster.submit(&root().join("examples/digits/job.toml"), &out, &["--set", "epochs=3"]);
    assert!(output.status.success(), "{}", text(&output));

    let all: Vec<_> = urls.iter().map(|url| numbers(url)).collect();
    let [master, worker, ps @ ..] = all.as_slice() else { panic!("{all:?}") };
    let of_ps = |name: &str| ps.iter().map(|ps| ps[name]).sum::<f64>();
    let partitions = PS as f64;
    let summary = summary(&out);
    let number = |name: &str| summary[name].as_f64().unwrap();
    assert_eq!(of_ps("ebb_ps_update_total"), partitions * number("steps"));
    assert_eq!(worker["ebb_worker_microbatches_total"], number("microbatches_applied"));
    assert_eq!(worker["ebb_worker_samples_total"], number("samples_applied"));
    // Version 0 is pushed too, and is no node.
    let taken = of_ps("ebb_ps_push_merged_total") + of_ps("ebb_ps_push_completed_total");
    assert_eq!(partitions * (worker["ebb_worker_push_total"] + 1.0), taken);
    assert!(master["ebb_master_leases_completed_total"] > worker["ebb_worker_leases_computed_total"]);
    for numbers in &all {
        let (used, limit) = (numbers["ebb_process_memory_bytes"], numbers["ebb_process_memory_limit_bytes"]);
        assert!(used > 1e6 && used < limit, "{used} of {limit}");
    }
    assert_eq!((master["ebb_master_jobs_running"], master["ebb_master_jobs_pending"]), (0.0, 0.0));
    assert_eq!(master["ebb_master_workers_wanted"], 0.0);
    assert!(worker["ebb_worker_compute_seconds_total"] > 0.0 && of_ps("ebb_ps_update_seconds_total") > 0.0);

    if has("promtool", "prometheus") {
        urls.iter().for_each(|url| check_with_promtool(&get(url).unwrap()));
    }
    if has("prometheus", "prometheus") {
        let mut prometheus = Prometheus::start(cluster.dir.path(), &urls);
        prometheus.wait_for("up", urls.len());
        prometheus.wait_for("ebb_worker_microbatches_total", 1);
    }
}

#[test]
fn a_job_that_waits_for_a_ps_is_pending_in_the_numbers() {
    let program = &harness::ebb_path();
    let mut cluster = Cluster::with_environment(program, 0, 0, &[METRICS]);
    let job = root().join("examples/digits/job.toml");
    harness::succeed(["submit".as_ref(), "--master".as_ref(), cluster.url.as_ref(), job.as_os_str()]);
    let numbers = numbers(&cluster.master.metrics_url());
    assert_eq!((numbers["ebb_master_jobs_pending"], numbers["ebb_master_jobs_running"]), (1.0, 0.0));
    assert_eq!(numbers["ebb_master_workers_wanted"], 1.0, "its data is not counted yet");
}

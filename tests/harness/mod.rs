//! Real processes on loopback for the integration tests: one master, some ps, some workers, and the
//! user's commands.
//!
//! The system chooses the ports. Every process ends with its handle. A failed test shows the logs
//! of its processes.
#![allow(dead_code, unreachable_pub, reason = "each bench uses a part of it, as a module of its own")]
#![expect(clippy::disallowed_methods, reason = "tests find their data and Python through the environment")]

pub mod chaos;
pub mod clouds;
pub mod collector;
pub mod digits;
pub mod etcd;
pub mod keys;
pub mod machine;
pub mod oracle;
pub mod s3;
pub mod skip;
pub mod slow_disk;
pub mod tmpfs;
pub mod watchdog;
pub mod web;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use tempfile::TempDir;

use machine::Reserved;
pub use skip::{Lacks, skipped};

/// Returns the root of the checkout.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the path of the tested `ebb`: the one that cargo built beside the test, or the one that
/// `EBB_TEST_PROGRAM` names. `cargo xtask test` sets it, because it runs tests of two builds at
/// once.
pub fn ebb_path() -> PathBuf {
    std::env::var_os("EBB_TEST_PROGRAM").map_or_else(|| env!("CARGO_BIN_EXE_ebb").into(), PathBuf::from)
}

/// Returns `ebb` with arguments, ready to run.
pub fn ebb<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(args: I) -> Command {
    program(&ebb_path(), args)
}

/// Returns the program at `path` with arguments, ready to run. It has the verbs of `ebb`.
pub fn program<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(path: &Path, args: I) -> Command {
    watchdog::watch();
    let mut command = Command::new(path);
    command.args(args).stdin(Stdio::null());
    let settings = ["MASTER", "SOCKETS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN_FILE", "TOKENS", "INSECURE"];
    for name in settings.map(|name| format!("EBB_{name}")) {
        command.env_remove(name);
    }
    command
}

/// Returns the path of an example program of this package.
pub fn example(name: &str) -> PathBuf {
    let path = ebb_path().with_file_name("examples").join(name);
    assert!(path.exists(), "{} is missing; first: cargo build --examples", path.display());
    path
}

/// Returns standard output and error of a finished command, for messages.
pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs `ebb`, expects success, and returns its output.
pub fn succeed<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(args: I) -> String {
    let output = ebb(args).output().expect("ebb starts");
    assert!(output.status.success(), "exit {:?}:\n{}", output.status.code(), text(&output));
    text(&output)
}

/// Runs `ebb`, expects an error, and returns its output.
pub fn fail<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(args: I) -> String {
    let output = ebb(args).output().expect("ebb starts");
    assert!(!output.status.success(), "expected an error, got:\n{}", text(&output));
    text(&output)
}

/// Log line of a worker or a ps that the master knows. It takes part from its first heartbeat on,
/// which may come later.
const REGISTERED: &str = "registered with the master";

/// Words in the log of a master about a worker or a ps that takes part from now on.
const JOINED: &str = ") joined";

/// Lines of a process's log that a failed test shows.
const LOG_LINES_SHOWN: usize = 200;

/// How a process was started.
#[derive(Clone)]
struct Start {
    program: PathBuf,
    log: PathBuf,
    args: Vec<String>,
    environment: Vec<(String, String)>,
}

/// A running process of one role.
pub struct Process {
    pub child: Child,
    start: Start,
    /// Printed lines that were read so far.
    printed: Vec<String>,
    /// The address at which the process listens. No other program gets it while others may call
    /// there.
    address: Option<Reserved>,
}

impl Process {
    fn start_with(program: &Path, log: PathBuf, args: &[&str], environment: &[(&str, &str)]) -> Self {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Self::started(Start {
            program: program.to_owned(),
            log,
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            environment: environment.iter().map(owned).collect(),
        })
    }

    fn started(start: Start) -> Self {
        let file = fs::File::create(&start.log).expect("the log can be written");
        watchdog::add(&start.log);
        let mut command = program(&start.program, &start.args);
        // At this level a worker logs its finished leases, which shows that it takes part.
        command
            .env("EBB_LOG", "info,worker=debug")
            .envs(start.environment.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(file);
        Self { child: command.spawn().expect("ebb starts"), start, printed: Vec::new(), address: None }
    }

    /// Waits until the log has a line with `text`.
    pub fn wait_for(&mut self, text: &str) {
        while !self.log().contains(text) {
            assert!(self.child.try_wait().expect("a child").is_none(), "it ended:\n{}", self.log());
            std::thread::park_timeout(std::time::Duration::from_millis(5));
        }
    }

    /// Returns the log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.start.log).unwrap_or_default()
    }

    /// Returns the URL in the line that a server prints when it is ready.
    pub fn url(&mut self) -> String {
        self.url_after("listening on ")
    }

    /// Returns the URL of the process's metrics, which it prints before it is ready.
    pub fn metrics_url(&mut self) -> String {
        self.url_after("metrics at ")
    }

    /// Returns the text after `words` in the first line that has them. It reads no further than
    /// this line.
    #[expect(clippy::unbuffered_bytes, reason = "a few short lines, of which no byte may be read too far")]
    fn url_after(&mut self, words: &str) -> String {
        let after = |line: &String| line.find(words).map(|at| line[at + words.len()..].trim().to_owned());
        if let Some(url) = self.printed.iter().find_map(after) {
            return url;
        }
        let stdout = self.child.stdout.as_mut().expect("stdout is piped");
        let mut line = Vec::new();
        // It reads byte by byte, so that later lines stay in the pipe.
        for byte in stdout.bytes().map_while(Result::ok) {
            line.push(byte);
            if byte == b'\n' {
                self.printed.push(String::from_utf8_lossy(&std::mem::take(&mut line)).into_owned());
                if let Some(url) = self.printed.last().and_then(after) {
                    return url;
                }
            }
        }
        panic!("no line `{words}..`; it said:\n{}", self.log());
    }

    /// Sends a signal by its name, e.g. `KILL`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        watchdog::remove(&self.start.log);
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n");
            eprintln!("--- {}\n{tail}", self.start.log.display());
        }
    }
}

/// Reads a metric of the role that serves its metrics at this URL: the sum over its devices if it
/// is counted for each.
pub fn metric(url: &str, name: &str) -> f64 {
    let host = url.trim_start_matches("http://").trim_end_matches("/metrics");
    let mut stream = TcpStream::connect(host).expect("it serves metrics");
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {host}\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let value = |line: &str| {
        let rest = line.strip_prefix(name)?;
        let rest = rest.strip_prefix('{').map_or(Some(rest), |labels| Some(labels.split_once('}')?.1))?;
        Some(rest.strip_prefix(' ')?.trim().parse::<f64>().expect("a number"))
    };
    let values: Vec<_> = answer.lines().filter_map(value).collect();
    assert!(!values.is_empty(), "no {name} in:\n{answer}");
    values.iter().sum()
}

/// Log line of a master that is elected.
pub const LEADS: &str = "this master leads";

/// Log line of a master while another one leads.
pub const STANDS_BY: &str = "standing by";

/// Starts one of several masters, with the data folder `dir/data`.
pub fn candidate(program: &Path, dir: &Path, log: &str, etcd: &etcd::Etcd, ttl: &str) -> Process {
    candidate_with(program, dir, log, etcd, ttl, &[])
}

fn candidate_with(
    program: &Path,
    dir: &Path,
    log: &str,
    etcd: &etcd::Etcd,
    ttl: &str,
    environment: &[(&str, &str)],
) -> Process {
    let (address, data) = (Reserved::local(), dir.join("data").display().to_string());
    let election = ["--etcd", &etcd.url, "--leader-ttl", ttl];
    let args = [&["master", "--listen", &address.address, "--data-dir", &data][..], &election].concat();
    let mut process = Process::start_with(program, dir.join(log), &args, environment);
    process.address = Some(address);
    process
}

/// A master with ps and workers.
pub struct Cluster {
    pub workers: Vec<Process>,
    pub ps: Vec<Process>,
    pub master: Process,
    /// The second of two masters.
    pub standby: Option<Process>,
    /// URL of the master, or the URLs of all masters.
    pub url: String,
    pub dir: TempDir,
    program: PathBuf,
    /// Data folder of the master.
    data: PathBuf,
    environment: Vec<(String, String)>,
    /// Address of the master, reserved while the master does not run.
    address: Option<Reserved>,
    /// Addresses of ps that were started again elsewhere. Workers may still call there.
    former: Vec<Reserved>,
}

impl Cluster {
    pub fn start(ps: usize, workers: usize) -> Self {
        Self::of(&ebb_path(), ps, workers)
    }

    /// Starts a cluster of a program with the verbs of `ebb`.
    pub fn of(program: &Path, ps: usize, workers: usize) -> Self {
        Self::with_environment(program, ps, workers, &[])
    }

    /// Starts a cluster with more in the environment of the master and the ps.
    pub fn with_environment(program: &Path, ps: usize, workers: usize, environment: &[(&str, &str)]) -> Self {
        Self::with_data(program, None, ps, workers, environment)
    }

    /// Starts a cluster with the master's data folder outside of the cluster's.
    pub fn with_data(
        program: &Path,
        data: Option<&Path>,
        ps: usize,
        workers: usize,
        environment: &[(&str, &str)],
    ) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let data = data.map_or_else(|| dir.path().join("data"), Path::to_owned);
        let (address, folder) = (Reserved::local(), data.display().to_string());
        let args = ["master", "--listen", &address.address, "--data-dir", &folder];
        let mut master = Process::start_with(program, dir.path().join("master.log"), &args, environment);
        let url = master.url();
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let environment = environment.iter().map(owned).collect();
        let cluster = Self::around(program, dir, master, url);
        Self { environment, data, address: Some(address), ..cluster }.with(ps, workers)
    }

    /// Starts a cluster of two masters with a journal in `etcd`, and more in the environment of the
    /// first, which leads.
    pub fn elected(
        program: &Path,
        etcd: &etcd::Etcd,
        ttl: &str,
        ps: usize,
        workers: usize,
        environment: &[(&str, &str)],
    ) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let mut master = candidate_with(program, dir.path(), "master.log", etcd, ttl, environment);
        let first = master.url();
        master.wait_for(LEADS);
        let mut standby = candidate(program, dir.path(), "standby.log", etcd, ttl);
        let url = format!("{first},{}", standby.url());
        standby.wait_for(STANDS_BY);
        Self { standby: Some(standby), ..Self::around(program, dir, master, url) }.with(ps, workers)
    }

    /// Creates a cluster that has only a master.
    fn around(program: &Path, dir: TempDir, master: Process, url: String) -> Self {
        Self {
            workers: Vec::new(),
            ps: Vec::new(),
            master,
            standby: None,
            url,
            data: dir.path().join("data"),
            dir,
            program: program.to_owned(),
            environment: Vec::new(),
            address: None,
            former: Vec::new(),
        }
    }

    fn with(mut self, ps: usize, workers: usize) -> Self {
        (0..ps).for_each(|_| self.add_ps_as(&[]));
        (0..workers).for_each(|_| self.add_worker());
        self
    }

    /// Adds a ps that keeps its partitions on a device, also after a restart.
    pub fn add_ps_on(&mut self, device: &str) {
        self.add_ps_as(&["--device", device]);
    }

    fn add_ps_as(&mut self, arguments: &[&str]) {
        let name = format!("ps-{}", self.ps.len());
        let log = self.dir.path().join(format!("{name}.log"));
        let address = Reserved::local();
        let args = ["ps", "--listen", &address.address, "--master", &self.url, "--name", &name];
        let mut process = self.start_role(log, &[&args, arguments].concat());
        process.address = Some(address);
        process.url();
        self.ps.push(process);
    }

    /// Starts a ps as it was started before, at another address.
    fn start_ps(&mut self, index: usize) {
        let (mut start, address) = (self.ps[index].start.clone(), Reserved::local());
        let listen = start.args.iter().position(|arg| arg == "--listen").expect("a ps listens");
        start.args[listen + 1].clone_from(&address.address);
        let mut process = Process::started(start);
        process.address = Some(address);
        process.url();
        let mut former = std::mem::replace(&mut self.ps[index], process);
        self.former.extend(former.address.take());
    }

    fn start_role(&self, log: PathBuf, args: &[&str]) -> Process {
        let environment = self.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        Process::start_with(&self.program, log, args, &environment.collect::<Vec<_>>())
    }

    /// Kills the master, and starts one at the same address with the same folder.
    pub fn restart_master(&mut self) {
        // The master may have been killed already.
        let _ = self.master.child.kill();
        let _ = self.master.child.wait();
        self.start_master();
    }

    fn start_master(&mut self) {
        let listen = self.url.trim_start_matches("http://").to_owned();
        let data = self.data.display().to_string();
        let log = self.dir.path().join("master-again.log");
        let args = ["master", "--listen", &listen, "--data-dir", &data];
        self.master = self.start_role(log, &args);
        assert_eq!(self.master.url(), self.url);
    }

    /// Kills a ps, and starts one with its name at another port.
    pub fn restart_ps(&mut self, index: usize) {
        self.ps[index].signal("KILL");
        self.start_ps(index);
    }

    /// Waits until a ps has ended by itself. Starts it again without one variable in its
    /// environment. Returns how it ended, and its log.
    pub fn start_again(&mut self, index: usize, without: &str) -> (ExitStatus, String) {
        let ended = self.ps[index].child.wait().expect("a child");
        let log = self.ps[index].log();
        self.ps[index].start.environment.retain(|(name, _)| name != without);
        self.start_ps(index);
        (ended, log)
    }

    /// Tells a ps to leave and waits until it has. Then it starts one with its name at another
    /// port.
    pub fn replace_ps(&mut self, index: usize) {
        self.ps[index].signal("TERM");
        let left = self.ps[index].child.wait().expect("a child");
        assert!(left.success(), "{left:?}:\n{}", self.ps[index].log());
        self.start_ps(index);
    }

    /// Kills all processes, and starts them again as they were started: the master with its folder,
    /// the ps and the workers under their names.
    pub fn restart_everything(&mut self) {
        self.restart_everything_after(|_| {});
    }

    /// Kills all processes, calls `meanwhile` with the cluster's folder, and starts them again.
    pub fn restart_everything_after(&mut self, meanwhile: impl FnOnce(&Path)) {
        for process in self.ps.iter().chain([&self.master]) {
            process.signal("KILL");
        }
        // Each worker is killed with its handle.
        let workers: Vec<Start> = self.workers.drain(..).map(|worker| worker.start.clone()).collect();
        let _ = self.master.child.wait();
        meanwhile(self.dir.path());
        self.start_master();
        (0..self.ps.len()).for_each(|index| self.start_ps(index));
        self.workers.extend(workers.into_iter().map(Process::started));
    }

    pub fn add_worker(&mut self) {
        self.add_worker_with(&[]);
    }

    /// Adds a worker with more in its environment.
    pub fn add_worker_with(&mut self, environment: &[(&str, &str)]) {
        self.add_worker_as(&[], environment);
    }

    /// Adds a worker with further arguments, and more in its environment. It computes on the CPU
    /// unless the arguments name a device.
    pub fn add_worker_as(&mut self, arguments: &[&str], environment: &[(&str, &str)]) {
        let index = self.workers.len();
        let log = self.dir.path().join(format!("worker-{index}.log"));
        let name = format!("worker-{index}");
        let device: &[&str] = if arguments.contains(&"--device") { &[] } else { &["--device", "cpu"] };
        let args = ["worker", "--master", &self.url, "--name", &name];
        let args = [&args[..], device, arguments].concat();
        self.workers.push(Process::start_with(&self.program, log, &args, environment));
    }

    /// Waits until each worker takes part: the master has had a heartbeat of it.
    pub fn wait_for_workers(&mut self) {
        for (index, worker) in self.workers.iter_mut().enumerate() {
            let name = format!("worker `worker-{index}` (");
            let joined = |line: &str| line.contains(&name) && line.contains(JOINED);
            while !self.master.log().lines().any(joined) {
                assert!(worker.child.try_wait().expect("a child").is_none(), "it ended:\n{}", worker.log());
                std::thread::park_timeout(std::time::Duration::from_millis(5));
            }
        }
    }

    /// Runs `ebb submit JOB --follow --out OUT` with further arguments to its end.
    pub fn submit(&self, job: &Path, out: &Path, more: &[&str]) -> Output {
        self.submission(job, out, more).output().expect("ebb starts")
    }

    /// Returns the command `ebb submit JOB --follow --out OUT` with further arguments. It waits
    /// long for a master that is started again: a busy machine starts processes slowly.
    pub fn submission(&self, job: &Path, out: &Path, more: &[&str]) -> Command {
        let master = ["--master", &self.url, "--master-timeout", "5m"];
        let mut command = ebb([&["submit"][..], &master, &["--follow", "--out"]].concat());
        command.arg(out).arg(job).args(more);
        command
    }
}

/// Reads `summary.json` of an output folder.
pub fn summary(out: &Path) -> serde_json::Value {
    let path = out.join("summary.json");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("summary.json is JSON")
}

/// Reads the lines of `metrics.jsonl` with this `event`. The file may still grow, so an incomplete
/// line is left out.
pub fn events(out: &Path, event: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics.jsonl is there");
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |line: &str| -> serde_json::Value {
        serde_json::from_str(line).unwrap_or_else(|error| panic!("metrics.jsonl: {error} in {line:?}"))
    };
    whole.lines().map(parse).filter(|line| line["event"] == event).collect()
}

/// Returns how many whole lines of `metrics.jsonl` have this `event`; 0 without such a file. Tests
/// ask again and again while they wait, so nothing is parsed.
pub fn told(out: &Path, event: &str) -> usize {
    let text = match fs::read_to_string(out.join("metrics.jsonl")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return 0,
        text => text.expect("metrics.jsonl can be read"),
    };
    let begin = format!("{{\"event\":\"{event}\",");
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().filter(|line| line.starts_with(&begin)).count()
}

/// Reads the model file of an output folder.
pub fn model(out: &Path) -> Vec<u8> {
    fs::read(out.join("model.safetensors")).expect("model.safetensors is there")
}

/// Returns a NumPy array of this type and shape, such as `<f4` and `6, 2`.
pub fn npy(kind: &str, shape: &str, values: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape}), }}");
    let header = format!("{header:<117}\n");
    let length = u16::try_from(header.len()).expect("a short header").to_le_bytes();
    let mut file = [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes()].concat();
    file.extend(values);
    file
}

/// Returns the folder of MNIST's test set: `EBB_MNIST_DIR`, the example's folder, or a data folder
/// beside the checkout.
pub fn mnist() -> Option<PathBuf> {
    let given = std::env::var_os("EBB_MNIST_DIR").map(PathBuf::from);
    let places = [root().join("examples/mnist/data"), root().join("../shared/data/mnist10k")];
    let found =
        given.into_iter().chain(places).find(|place| place.join("t10k-images-idx3-ubyte.gz").exists());
    if found.is_none() {
        skipped(
            Lacks::Machine,
            "no MNIST; put t10k-*-ubyte.gz into examples/mnist/data or set EBB_MNIST_DIR",
        );
    }
    found
}

/// Returns the settings with which the example's job file finds MNIST in `data`.
pub fn mnist_sets(data: &Path) -> Vec<String> {
    let file = |name: &str| data.join(name).display().to_string();
    let (images, labels) = (file("t10k-images-idx3-ubyte.gz"), file("t10k-labels-idx1-ubyte.gz"));
    let sets = ["train", "validation"].map(|set| {
        [format!("data.{set}.features=[\"{images}\"]"), format!("data.{set}.labels=[\"{labels}\"]")]
    });
    sets.concat()
}

/// Returns a Python with PyTorch, NumPy and safetensors: `EBB_PYTHON`, or `python3`.
pub fn python_with_torch() -> Option<String> {
    python_with(&["torch", "numpy", "safetensors"])
}

/// Returns a Python that can import these modules: `EBB_PYTHON`, or `python3`.
pub fn python_with(modules: &[&str]) -> Option<String> {
    let python = std::env::var("EBB_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let modules = modules.join(", ");
    let imports = Command::new(&python).args(["-c", &format!("import {modules}")]).output();
    if imports.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    skipped(Lacks::Package, &format!("{python} lacks one of {modules}; set EBB_PYTHON to one that has them"));
    None
}

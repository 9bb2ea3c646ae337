//! A cluster with keys: certificates and tokens of `ebb certs init`, and mTLS between all processes
//! and users.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ebbflow::security::{Keys, Options};
use tempfile::TempDir;

use super::{Process, ebb, ebb_path, succeed};

/// A master with ps and workers. All files of keys are in `certs`, which is a symbolic link, as
/// where secrets are mounted.
pub struct Fortress {
    pub workers: Vec<Process>,
    pub ps: Vec<Process>,
    pub master: Process,
    pub url: String,
    pub ps_urls: Vec<String>,
    pub dir: TempDir,
    /// Value of `EBB_SOCKETS` for all processes.
    sockets: &'static str,
    /// Number of times that the keys were replaced.
    swaps: AtomicUsize,
}

/// Users and the roles of their tokens, as arguments of `ebb certs init --user`.
pub const USERS: [&str; 3] = ["anna=submit", "otto=operate", "eve=read"];

impl Fortress {
    /// Starts a cluster over TCP, as between hosts: with certificates.
    pub fn start(ps: usize, workers: usize) -> Self {
        Self::start_with(&[], ps, workers)
    }

    /// Starts a cluster over TCP, with more arguments of the master.
    pub fn start_with(more: &[&str], ps: usize, workers: usize) -> Self {
        Self::over("tcp", more, ps, workers)
    }

    /// Starts a cluster over Unix sockets, as within a host.
    pub fn nearby(ps: usize, workers: usize) -> Self {
        Self::over("nearest", &[], ps, workers)
    }

    fn over(sockets: &'static str, more: &[&str], ps: usize, workers: usize) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        make(&dir.path().join("keys-0"));
        symlink("keys-0", dir.path().join("certs")).expect("a link");
        let data = dir.path().join("data").display().to_string();
        let args = [&["master", "--listen", "127.0.0.1:0", "--data-dir", &data], more].concat();
        let mut master = start(dir.path(), sockets, "master", "master", &args);
        let url = master.url();
        let mut fortress = Self {
            workers: Vec::new(),
            ps: Vec::new(),
            master,
            url,
            ps_urls: Vec::new(),
            dir,
            sockets,
            swaps: AtomicUsize::new(0),
        };
        for index in 0..ps {
            let name = format!("ps-{index}");
            let args = ["ps", "--master", &fortress.url, "--listen", "127.0.0.1:0", "--name", &name];
            let mut process = start(fortress.dir.path(), sockets, &name, "ps", &args);
            fortress.ps_urls.push(process.url());
            fortress.ps.push(process);
        }
        for _ in 0..workers {
            fortress.add_worker();
        }
        fortress
    }

    pub fn add_worker(&mut self) {
        let name = format!("worker-{}", self.workers.len());
        let args = ["worker", "--master", &self.url, "--name", &name, "--device", "cpu"];
        self.workers.push(start(self.dir.path(), self.sockets, &name, "worker", &args));
    }

    pub fn certs(&self) -> PathBuf {
        self.dir.path().join("certs")
    }

    /// Replaces the keys of all processes at once, by a copy of the folder after `edit`. Waits
    /// until all processes have read them.
    pub fn swap(&self, edit: impl FnOnce(&Path)) {
        let swaps = self.swaps.fetch_add(1, Ordering::Relaxed) + 1;
        let name = format!("keys-{swaps}");
        let (new, link) = (self.dir.path().join(&name), self.dir.path().join("link"));
        fs::create_dir(&new).expect("a new folder");
        for entry in fs::read_dir(self.certs()).expect("keys") {
            let entry = entry.expect("a file");
            fs::copy(entry.path(), new.join(entry.file_name())).expect("a copy");
        }
        edit(&new);
        symlink(&name, &link).expect("a link");
        // A process may read the keys of the swap before twice, if it looked at them meanwhile.
        let processes = || self.ps.iter().chain(&self.workers).chain([&self.master]);
        let before: Vec<usize> = processes().map(|process| process.log().len()).collect();
        fs::rename(&link, self.certs()).expect("in its place");
        for (process, before) in processes().zip(before) {
            while !process.log().get(before..).is_some_and(|log| log.contains("keys read again")) {
                std::thread::park_timeout(Duration::from_millis(20));
            }
        }
    }

    /// Returns `ebb` with the keys of `name` and the master's URL.
    pub fn ebb<'a>(&self, name: &str, args: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = ebb(args);
        command.env("EBB_MASTER", &self.url).env("EBB_SOCKETS", self.sockets);
        command.envs(environment(&self.certs(), name));
        command
    }

    /// Returns the keys of `name`, for calls without a command.
    pub fn keys(&self, name: &str) -> Keys {
        let file = |end: &str| Some(self.certs().join(format!("{name}.{end}")));
        let options = Options {
            ca: Some(self.certs().join("ca.pem")),
            cert: file("pem"),
            key: file("key"),
            token: file("token"),
            ..Options::default()
        };
        Keys::load(options).expect("keys of `ebb certs init`")
    }

    /// Returns HOST:PORT of a URL of the cluster.
    pub fn address(url: &str) -> &str {
        url.trim_start_matches("https://")
    }
}

/// Runs `ebb certs init` with some users.
pub fn make(dir: &Path) {
    let users = USERS.iter().flat_map(|user| ["--user", user]);
    succeed(["certs", "init", "--dir"].into_iter().chain([dir.to_str().expect("UTF-8")]).chain(users));
}

/// Returns the environment that gives a process its keys.
pub fn environment(certs: &Path, name: &str) -> Vec<(&'static str, String)> {
    let file = |name: String| certs.join(name).display().to_string();
    vec![
        ("EBB_TLS_CA", file("ca.pem".to_owned())),
        ("EBB_TLS_CERT", file(format!("{name}.pem"))),
        ("EBB_TLS_KEY", file(format!("{name}.key"))),
        ("EBB_TOKEN_FILE", file(format!("{name}.token"))),
    ]
}

fn start(dir: &Path, sockets: &str, name: &str, keys: &str, args: &[&str]) -> Process {
    let certs = dir.join("certs");
    let mut environment = environment(&certs, keys);
    environment.push(("EBB_TOKENS", certs.join("tokens.toml").display().to_string()));
    environment.push(("EBB_SOCKETS", sockets.to_owned()));
    let environment: Vec<_> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    Process::start_with(&ebb_path(), dir.join(format!("{name}.log")), args, &environment)
}

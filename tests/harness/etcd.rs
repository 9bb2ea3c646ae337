//! A real etcd on loopback, of one member, for tests that need one.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::{Lacks, skipped};

/// Attempts to find two free ports; another process may take them in between.
const ATTEMPTS: usize = 10;

/// A running etcd; it ends with its handle.
pub struct Etcd {
    child: Child,
    /// Where its clients reach it.
    pub url: String,
    _folder: TempDir,
}

impl Etcd {
    /// Starts one; `None`, and a line that says so, where `etcd` is not installed.
    pub fn start() -> Option<Self> {
        if Command::new("etcd").arg("--version").output().is_err() {
            skipped(Lacks::Package, "no `etcd` on the PATH; on Debian: apt-get install etcd-server");
            return None;
        }
        let started = (0..ATTEMPTS).find_map(|_| Self::attempt());
        Some(started.expect("etcd starts on free ports"))
    }

    fn attempt() -> Option<Self> {
        let folder = TempDir::new().expect("a temporary folder");
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let [url, peer] =
            listeners.map(|listener| format!("http://{}", listener.local_addr().expect("an address")));
        let cluster = format!("default={peer}");
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(folder.path());
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &cluster, "--log-level", "error"]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut etcd = Self { child: child.expect("etcd starts"), url, _folder: folder };
        while etcd.child.try_wait().expect("a child").is_none() {
            if etcd.is_healthy().unwrap_or(false) {
                return Some(etcd);
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
        None
    }

    fn is_healthy(&self) -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(self.url.trim_start_matches("http://"))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.contains(r#""health":"true""#))
    }

    /// Sends it a signal by its name, e.g. `STOP`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

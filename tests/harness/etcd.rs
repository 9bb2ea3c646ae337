//! A real etcd of one member on loopback.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::{Lacks, skipped};

/// Most attempts to find two free ports. Another process may take them in between, even another
/// etcd.
const ATTEMPTS: usize = 10;

/// A running etcd. It ends with its handle.
pub struct Etcd {
    child: Child,
    /// Name of its only member, which no other etcd has.
    name: String,
    /// URL for its clients.
    pub url: String,
    _folder: TempDir,
}

impl Etcd {
    /// Starts an etcd. Without the program `etcd`, it reports a skip and returns `None`.
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// Starts an etcd with more arguments. Without the program `etcd`, it reports a skip and
    /// returns `None`.
    pub fn start_with(more: &[&str]) -> Option<Self> {
        if Command::new("etcd").arg("--version").output().is_err() {
            skipped(Lacks::Package, "no `etcd` on the PATH; on Debian: apt-get install etcd-server");
            return None;
        }
        let started = (0..ATTEMPTS).find_map(|_| Self::attempt(more));
        Some(started.expect("etcd starts on free ports"))
    }

    fn attempt(more: &[&str]) -> Option<Self> {
        let folder = TempDir::new().expect("a temporary folder");
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let [url, peer] =
            listeners.map(|listener| format!("http://{}", listener.local_addr().expect("an address")));
        let name = format!("test-{}-{}", std::process::id(), url.rsplit(':').next().unwrap_or_default());
        let cluster = format!("{name}={peer}");
        let mut command = Command::new("etcd");
        command.args(["--name", &name]).arg("--data-dir").arg(folder.path());
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &cluster, "--log-level", "error"]).args(more);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut etcd = Self { child: child.expect("etcd starts"), name, url, _folder: folder };
        while etcd.child.try_wait().expect("a child").is_none() {
            if etcd.is_healthy().unwrap_or(false) && etcd.answers_itself().unwrap_or(false) {
                return Some(etcd);
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
        None
    }

    fn is_healthy(&self) -> std::io::Result<bool> {
        Ok(self.ask("GET /health HTTP/1.0\r\n\r\n")?.contains(r#""health":"true""#))
    }

    /// Returns whether this etcd answers at the URL, and no other one.
    fn answers_itself(&self) -> std::io::Result<bool> {
        Ok(self.post("/v3/cluster/member/list", "{}")?.contains(&format!("\"{}\"", self.name)))
    }

    /// Calls etcd's HTTP gateway with a path like `/v3/kv/put` and its JSON. Returns the answer.
    #[allow(dead_code, reason = "only tests of the whole program call it")]
    pub fn call(&self, path: &str, json: &str) -> String {
        self.post(path, json).expect("etcd answers")
    }

    fn post(&self, path: &str, json: &str) -> std::io::Result<String> {
        let length = json.len();
        self.ask(&format!("POST {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{json}"))
    }

    fn ask(&self, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(self.url.trim_start_matches("http://"))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Sends a signal by its name, e.g. `STOP`.
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

//! Workers in Docker containers with a limit of memory, and what the system counts of them.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::harness;

/// Name of the empty image in which workers run. Programs and libraries are the host's.
const IMAGE: &str = "ebbflow-bench-empty";

/// Folders of the host that a container sees. Without certificates no client of S3 starts.
const LIBRARIES: [&str; 4] = ["/lib", "/lib64", "/usr/lib", "/etc/ssl"];

/// Anonymous and shared memory of a container, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Memory {
    pub(crate) most: u64,
}

/// A worker in a container. The container is removed with its handle.
pub(crate) struct Worker {
    id: String,
    /// Number of the process on the host.
    process: String,
    memory: Memory,
    /// Bytes that the worker has read from the disk.
    read: Option<u64>,
    is_killed: bool,
}

impl Worker {
    /// Starts a worker that sees the folder of the data, with so many bytes of memory and no swap.
    pub(crate) fn start(master: &str, data: &Path, limit: u64, environment: &[(&str, &str)]) -> Self {
        make_image();
        let mut command = Command::new("docker");
        command.args(["run", "--detach", "--network", "host", "--log-driver", "json-file"]);
        command.args([format!("--memory={limit}"), format!("--memory-swap={limit}")]);
        for folder in LIBRARIES.iter().filter(|folder| Path::new(folder).exists()) {
            command.arg(format!("--volume={folder}:{folder}:ro"));
        }
        let data = data.display();
        command.arg(format!("--volume={}:/ebb:ro", harness::ebb_path().display()));
        command.arg(format!("--volume={data}:{data}:ro"));
        command.args(environment.iter().map(|(name, value)| format!("--env={name}={value}")));
        command.args(["--tmpfs=/tmp", IMAGE, "/ebb", "worker", "--device", "cpu", "--master", master]);
        let id = output(&mut command).trim().to_owned();
        let process = output(Command::new("docker").args(["inspect", "--format={{.State.Pid}}", &id]));
        let process = process.trim().to_owned();
        Self { id, process, memory: Memory::default(), read: None, is_killed: false }
    }

    /// Notes how much memory the container uses now, and how much it has read.
    ///
    /// # Panics
    /// If the container has ended by itself, which mostly means that it took too much memory.
    pub(crate) fn look(&mut self) {
        match self.memory_now() {
            Some(now) => self.memory.most = self.memory.most.max(now),
            None => assert!(
                self.is_killed || self.memory.most == 0,
                "a worker has ended; its most memory was {} bytes:\n{}",
                self.memory.most,
                self.log()
            ),
        }
        if let Some(read) = self.read_now() {
            self.read = Some(read);
        }
    }

    /// Returns the most memory that was seen.
    ///
    /// # Panics
    /// If none was seen, because control groups have another place here.
    pub(crate) fn memory(&self) -> Memory {
        assert!(
            self.memory.most > 0,
            "no memory.stat of the container in {}",
            self.group("memory").display()
        );
        self.memory
    }

    /// Returns the bytes that were read when the container was last seen.
    pub(crate) fn read(&self) -> Option<u64> {
        self.read
    }

    /// Kills the worker without warning.
    pub(crate) fn kill(&mut self) {
        self.is_killed = true;
        output(Command::new("docker").args(["kill", &self.id]));
    }

    /// Returns what the worker has logged.
    pub(crate) fn log(&self) -> String {
        let output = Command::new("docker").args(["logs", &self.id]).output().expect("docker runs");
        harness::text(&output)
    }

    /// `memory.stat` of the first or of the second version of control groups.
    fn memory_now(&self) -> Option<u64> {
        let (first, second) = (self.group("memory"), self.group(""));
        let text = [first, second]
            .iter()
            .find_map(|group| std::fs::read_to_string(group.join("memory.stat")).ok())?;
        let value = |name: &str| -> Option<u64> {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
        };
        Some(value("rss").or_else(|| value("anon"))? + value("shmem").unwrap_or(0))
    }

    /// `read_bytes` of the process: what the system read from the disk for it.
    fn read_now(&self) -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/io", self.process)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
    }

    /// Folder of the container's control group.
    fn group(&self, controller: &str) -> PathBuf {
        Path::new("/sys/fs/cgroup").join(controller).join("docker").join(&self.id)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = Command::new("docker").args(["rm", "--force", &self.id]).output();
    }
}

/// Makes the empty image if it is missing.
fn make_image() {
    let known = Command::new("docker").args(["image", "inspect", IMAGE]).output().expect("docker runs");
    if !known.status.success() {
        let made = "tar --create --files-from /dev/null | docker import - ";
        output(Command::new("sh").args(["-c", &format!("{made}{IMAGE}")]));
    }
}

/// Runs a command to its end, and returns what it prints.
fn output(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {}", harness::text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

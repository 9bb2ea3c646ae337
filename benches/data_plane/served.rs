//! Another process of a bench.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

/// A process of this program in another role. It ends with its owner.
pub(crate) struct Served {
    pub(crate) child: Child,
    pub(crate) address: String,
}

impl Served {
    /// Starts the program with these arguments.
    pub(crate) fn start<const N: usize>(role: [&str; N]) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program).args(role).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut address = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut address)
            .expect("it says where it listens");
        Self { child, address: address.trim().to_owned() }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the most memory that the process ever had, in bytes.
    #[allow(dead_code, reason = "each bench uses a part of it")]
    pub(crate) fn peak_bytes(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak.and_then(|peak| peak.trim().trim_end_matches(" kB").parse::<f64>().ok());
        kib.map_or(f64::NAN, |kib| kib * 1024.0)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

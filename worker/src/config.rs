//! What a worker can be told.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::device::Choice;

/// Options of one worker process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Name for people. Default: `worker`; `ebb worker` makes it from host and process id.
    pub name: String,
    /// Threads of one gradient computation, at least 1. Default 1. Another number gives other floating-point results, so
    /// a job is bit-reproducible only among workers with the same number.
    pub threads: usize,
    /// Where to compute. Default: the first CUDA device, otherwise the CPU.
    #[serde(skip)]
    pub device: Choice,
    /// Folder below which the job's data paths are looked for. Default: the job file's folder, as on the user's machine.
    pub data_root: Option<PathBuf>,
    /// How long to keep trying to reach the master before giving up. Default 5 min.
    #[serde(with = "proto::duration")]
    pub master_timeout: Duration,
    /// How long a draining worker may take to finish its microbatch and hand back the rest. Default 10 s.
    #[serde(with = "proto::duration")]
    pub drain: Duration,
    /// Microbatches read ahead of the one that is computed. Default 4.
    pub prefetch: usize,
    /// Nodes of the reduction tree that may be on their way to the ps at once. Default 4.
    pub pushes_in_flight_max: usize,
    /// Folder whose file system takes files that come with a job; they have no name there. Default: the system's temporary folder.
    pub scratch: PathBuf,
    /// Compute and read in the thread that serves the network; each call of the model then takes this long by tokio's clock.
    /// For simulations, which run in one thread. Default: on threads of their own.
    pub inline: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "worker".to_owned(),
            threads: 1,
            device: Choice::default(),
            data_root: None,
            master_timeout: Duration::from_secs(300),
            drain: Duration::from_secs(10),
            prefetch: 4,
            pushes_in_flight_max: 4,
            scratch: std::env::temp_dir(),
            inline: None,
        }
    }
}

impl Options {
    /// Every relation that does not hold.
    ///
    /// # Errors
    /// One message for each.
    pub fn validate(&self) -> Result<(), Vec<String>> {
        let mut wrong = Vec::new();
        let mut check = |ok: bool, message: &str| {
            if !ok {
                wrong.push(message.to_owned());
            }
        };
        check((1..=128).contains(&self.name.len()), "name: 1 to 128 bytes");
        check((1..=1024).contains(&self.threads), "threads: from 1 to 1024");
        check(self.prefetch > 0, "prefetch: at least 1");
        check(self.pushes_in_flight_max > 0, "pushes_in_flight_max: at least 1");
        check(!self.master_timeout.is_zero(), "master_timeout: above 0");
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_violations_are_reported_at_once() {
        assert_eq!(Options::default().validate(), Ok(()));
        let options = Options { threads: 0, prefetch: 0, ..Options::default() };
        assert_eq!(options.validate().unwrap_err().len(), 2);
    }
}

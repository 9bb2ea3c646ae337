//! Settings of a worker.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use data::Batch;
use kernels::device::Devices;
use model::device::Device;
use proto::numerics::Numerics;
use proto::plan::Microbatch;
use serde::{Deserialize, Serialize};

/// Options of one worker process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Name for people. Default: `worker`; `ebb worker` makes it from host and process id.
    pub name: String,
    /// Threads of one gradient computation, at least 1. Default 1. Another number gives other
    /// floating-point results, so a job is bit-reproducible only among workers with equal numbers.
    pub threads: usize,
    /// Device that computes. Default: the CPU. [`chosen`](crate::device::chosen) finds others.
    #[serde(skip)]
    pub device: Device,
    /// The open devices of this process, which its roles share. Default: no device is open.
    #[serde(skip)]
    pub devices: Devices,
    /// Folder below which the job's data paths are looked up. Default: the job file's folder, as on
    /// the user's machine.
    pub data_root: Option<PathBuf>,
    /// Beginnings of the URLs that jobs may read. Web servers of this machine must be listed.
    /// Default: none are listed, and all other URLs are read.
    pub data_urls: Vec<String>,
    /// Time during which a request for data by URL is repeated if the server is busy, away or
    /// silent, by waits that double from 0.2 s to 10 s. At most 10 min. Four attempts are made in
    /// any case. Default 60 s. Raise it for servers that are away for longer; a worker that repeats
    /// one request for longer than the job's `limits.stall` hangs.
    #[serde(with = "proto::duration")]
    pub data_patience: Duration,
    /// Time without the master after which the worker gives up. Default 5 min.
    #[serde(with = "proto::duration")]
    pub master_timeout: Duration,
    /// Longest time for a draining worker to finish its microbatch and hand back the rest. Default
    /// 10 s.
    #[serde(with = "proto::duration")]
    pub drain: Duration,
    /// Number of microbatches read ahead of the one that is computed. Default 4.
    pub prefetch: usize,
    /// Microbatches that all jobs of this process read and transform at once, each on a thread.
    /// Default: one for each processor, at most 8.
    pub data_threads: usize,
    /// Memory for decoded data of all jobs of this process, in bytes. Default: a quarter of the
    /// machine's memory, or of the limit of the process's control group.
    pub data_memory: u64,
    /// Most nodes of the reduction tree on their way to the ps at once. A node that precedes all
    /// others is exempt. Default 4.
    pub pushes_in_flight_max: usize,
    /// Name of the job whose program this process runs. The worker takes part in jobs of this name
    /// alone. Default: empty, the worker runs none.
    #[serde(skip)]
    pub program: String,
    /// Script that this process is one of. The worker takes part in jobs of this script alone.
    /// Default: 0, none.
    #[serde(skip)]
    pub script: u64,
    /// Numerics class of a model that a program brings. Default: that of the engine.
    #[serde(skip)]
    pub numerics: Option<Numerics>,
    /// Device on which the program of this process computes, as the program says. Default: that of
    /// `device`.
    #[serde(skip)]
    pub program_device: Option<ProgramDevice>,
    /// Hears of each microbatch that was read ahead. Default: nobody does.
    #[serde(skip)]
    pub read_ahead: Option<ReadAhead>,
    /// Folder whose file system stores the job's files; they have no name there. Default: the
    /// system's temporary folder.
    pub scratch: PathBuf,
    /// Whether to compute and read in the thread that serves the network, for simulations, which
    /// run in one thread. Default: threads of their own.
    #[serde(skip)]
    pub inline: Option<Inline>,
}

/// A device that a program has chosen by itself. The worker never opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramDevice {
    /// `cpu` or `cuda:N`, with the number on the host.
    pub name: String,
    /// Memory of a CUDA device in bytes. 0: not known.
    pub memory_bytes: u64,
}

/// What hears of the microbatches of a lease, in order, once their records are read. Most of them
/// are computed soon. Those of a lease that is lost are not.
#[derive(Clone)]
pub struct ReadAhead(Arc<Hear>);

type Hear = dyn Fn(&Microbatch, &Batch) + Send + Sync;

impl ReadAhead {
    /// Calls a function, which returns soon.
    pub fn new(hear: impl Fn(&Microbatch, &Batch) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hear))
    }

    pub(crate) fn tell(&self, microbatch: &Microbatch, batch: &Batch) {
        (self.0)(microbatch, batch);
    }
}

impl fmt::Debug for ReadAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadAhead")
    }
}

impl PartialEq for ReadAhead {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Computation and reading in a simulation.
#[derive(Clone, Debug, Default)]
pub struct Inline {
    /// Time that each call of the model takes, by tokio's clock.
    pub takes: Duration,
    /// Longest time between two gradients of a sum that is pushed while it is made. Default: they
    /// are made at once.
    pub gradient_takes: Duration,
    /// Numerics class that the worker claims for its results. Default: that of the engine.
    pub numerics: Option<Numerics>,
    /// While it is set, no call of the model and no reading of a file ends.
    pub hangs: Arc<AtomicBool>,
}

impl PartialEq for Inline {
    fn eq(&self, other: &Self) -> bool {
        (self.takes, self.gradient_takes, &self.numerics)
            == (other.takes, other.gradient_takes, &other.numerics)
            && Arc::ptr_eq(&self.hangs, &other.hangs)
    }
}

impl Inline {
    /// Time between two checks whether the worker still hangs.
    const LOOK: Duration = Duration::from_millis(100);

    /// Waits while the worker hangs.
    pub(crate) async fn hang(&self) {
        while self.hangs.load(Ordering::Relaxed) {
            tokio::time::sleep(Self::LOOK).await;
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "worker".to_owned(),
            threads: 1,
            device: Device::default(),
            devices: Devices::default(),
            data_root: None,
            data_urls: Vec::new(),
            data_patience: data::PATIENCE,
            master_timeout: Duration::from_secs(300),
            drain: Duration::from_secs(10),
            prefetch: 4,
            data_threads: default_data_threads(),
            data_memory: data::default_memory(),
            pushes_in_flight_max: 4,
            program: String::new(),
            script: 0,
            numerics: None,
            program_device: None,
            read_ahead: None,
            scratch: std::env::temp_dir(),
            inline: None,
        }
    }
}

fn default_data_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |threads| threads.get().min(8))
}

impl Options {
    /// Checks the relations of the settings.
    ///
    /// # Errors
    /// One message for each violation.
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
        check((1..=1024).contains(&self.data_threads), "data_threads: from 1 to 1024");
        check(self.pushes_in_flight_max > 0, "pushes_in_flight_max: at least 1");
        check(!self.master_timeout.is_zero(), "master_timeout: above 0");
        let (patience, max) = (self.data_patience, data::PATIENCE_MAX);
        check(patience <= max, &format!("data_patience = {patience:?}: at most {max:?}"));
        wrong.extend(data::wrong_prefixes(&self.data_urls));
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_violations_are_reported_at_once() {
        assert_eq!(Options::default().validate(), Ok(()));
        let data_urls = vec!["s3://bucket".to_owned(), "/data".to_owned()];
        let data_patience = data::PATIENCE_MAX + Duration::from_millis(1);
        let options = Options { threads: 0, prefetch: 0, data_urls, data_patience, ..Options::default() };
        let wrong = options.validate().unwrap_err();
        assert_eq!(wrong.len(), 4, "{wrong:?}");
        assert!(wrong.contains(&"data_patience = 600.001s: at most 600s".to_owned()), "{wrong:?}");
        let options = Options { data_patience: data::PATIENCE_MAX, ..Options::default() };
        assert_eq!(options.validate(), Ok(()));
    }
}

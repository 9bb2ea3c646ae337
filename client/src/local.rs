//! A cluster in this process: master, ps and workers, connected without sockets.
//!
//! Control calls go over in-memory pipes ([`Network`]) with the code that real clusters use.
//! Weights and gradients go through the ps objects themselves, without a copy.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kernels::device::Devices;
use model::Device;
use model::Registry;
use net::channel::Dialer;
use proto::numerics::Numerics;
use proto::parameters::Parameters;
use store::Stores;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use worker::{Connector, ReadAhead};

pub use self::ps_memory::PsMemory;
use crate::pipe::Network;
use crate::{Client, Error, Result};

mod ps_memory;

/// The parts of a cluster in this process.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device of each worker, at least one. Their number changes the speed, never the trained
    /// bits. Default: one worker on the CPU.
    pub devices: Vec<Device>,
    /// Number of ps, at least 1. Default 1.
    pub ps: u32,
    /// Where the ps keep the model. Default: on the host.
    pub ps_memory: PsMemory,
    /// The open devices of this process, which its roles share. Default: no device is open.
    pub open: Devices,
    /// Threads of one gradient computation, per worker. Default 1. Another number gives other
    /// floating-point bits.
    pub threads: usize,
    /// Folder that the job's data paths start from, absolute ones too. Default: the job file's
    /// folder.
    pub data_root: Option<PathBuf>,
    /// Time during which a request for data by URL is repeated; see
    /// [`worker::Options::data_patience`].
    pub data_patience: Duration,
    /// Name of the job whose program this process runs. Default: empty, it runs none.
    pub program: String,
    /// Numerics class of the program's model. Default: that of the engine.
    pub numerics: Option<Numerics>,
    /// Hears of each microbatch that a worker has read ahead. Default: nobody does.
    pub read_ahead: Option<ReadAhead>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            devices: vec![Device::Cpu],
            ps: 1,
            ps_memory: PsMemory::default(),
            open: Devices::default(),
            threads: 1,
            data_root: None,
            data_patience: data::PATIENCE,
            program: String::new(),
            numerics: None,
            read_ahead: None,
        }
    }
}

impl Options {
    /// Returns the options of a worker of the cluster.
    fn worker(&self, index: u32, device: Device) -> worker::Options {
        worker::Options {
            name: format!("worker-{index}"),
            threads: self.threads,
            device,
            devices: self.open.clone(),
            data_root: self.data_root.clone(),
            data_patience: self.data_patience,
            program: self.program.clone(),
            numerics: self.numerics.clone(),
            read_ahead: self.read_ahead.clone(),
            // The user of this process chose the job's URLs.
            data_urls: data::every_url(),
            ..worker::Options::default()
        }
    }
}

/// A running cluster inside this process.
#[derive(Debug)]
pub struct Local {
    network: Network,
    stores: Stores,
    master: Roles,
    ps: Roles,
    workers: Roles,
    /// The way from workers to the ps.
    connector: Connector,
    /// The master's data folder. It is removed with the cluster.
    _folder: TempDir,
}

/// The running parts of one role: processes in a real cluster.
#[derive(Debug, Default)]
struct Roles {
    running: JoinSet<Result<()>>,
    shutdown: CancellationToken,
}

impl Local {
    /// The URL of the cluster's master, for its [`dialer`](Self::dialer).
    pub const MASTER_URL: &'static str = "http://master";

    /// Starts master, ps and workers. Checkpoints and predictions lie in `stores`; `registry` has
    /// the networks that `model.builtin` can name.
    ///
    /// # Errors
    /// A role cannot start.
    pub async fn start(options: Options, stores: Stores, registry: Registry) -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix("ebb-").tempdir().map_err(local("make a temporary folder"))?;
        let mut local = Self {
            network: Network::new(),
            stores,
            master: Roles::default(),
            ps: Roles::default(),
            workers: Roles::default(),
            connector: Connector::embedded(BTreeMap::new()),
            _folder: folder,
        };
        local.start_master()?;
        let (memory, open, devices) =
            (options.ps_memory.clone(), options.open.clone(), options.devices.clone());
        // The first use of a device compiles its kernels.
        let opening = tokio::task::spawn_blocking(move || memory.open(&open, &devices, options.ps));
        let on = opening.await.map_err(|panic| Error::Panicked(panic.to_string()))??;
        let ps =
            (0..options.ps).map(|index| local.start_ps(index, &on)).collect::<Result<BTreeMap<_, _>>>()?;
        local.connector = Connector::embedded(ps);
        for (index, &device) in (0..).zip(&options.devices) {
            local.start_worker(index, device, &options, registry.clone());
        }
        Ok(local)
    }

    /// Returns a client of the cluster's master, whose calls are tried for `patience`.
    pub fn client(&self, patience: Duration) -> Client {
        Client::new(&self.dialer(), Self::MASTER_URL, patience).expect("a constant URL")
    }

    /// Opens connections inside the cluster.
    pub fn dialer(&self) -> Dialer {
        self.network.dialer()
    }

    /// Waits until a role fails, e.g. a worker because its device is not there. The loss of a
    /// device is a failure once no other worker is left. Never returns while the cluster is well.
    pub async fn failure(&mut self) -> Error {
        loop {
            let ended = tokio::select! {
                Some(ended) = self.master.running.join_next() => ended,
                Some(ended) = self.ps.running.join_next() => ended,
                Some(ended) = self.workers.running.join_next() => ended,
                else => std::future::pending().await,
            };
            match ended {
                Ok(Ok(())) => {}
                // The worker has said so, and the others compute its part.
                Ok(Err(error)) if error.is_device_lost() && !self.workers.running.is_empty() => {}
                Ok(Err(error)) => return error,
                Err(panic) => return Error::Panicked(panic.to_string()),
            }
        }
    }

    /// Ends all roles, the master last, so that no role complains that another is gone.
    pub async fn stop(self) {
        for mut roles in [self.workers, self.ps, self.master] {
            roles.shutdown.cancel();
            let leaving = async { while roles.running.join_next().await.is_some() {} };
            // The computation of a gradient cannot be interrupted; nobody waits for it.
            let _ = tokio::time::timeout(std::time::Duration::from_millis(300), leaving).await;
        }
    }

    fn start_master(&mut self) -> Result<()> {
        let options = master::Options {
            data_dir: self._folder.path().to_owned(),
            journal: false,
            // Cheap within a process, and workers notice sooner that a job was stopped.
            heartbeat: Duration::from_millis(100),
            ..master::Options::default()
        };
        let incoming = self.network.listen("master").map_err(local("the master's pipe"))?;
        let running =
            master::run(options, self.stores.clone(), incoming, self.dialer(), self.master.shutdown.clone());
        self.master.running.spawn(async move { running.await.map_err(local("the master of this process")) });
        Ok(())
    }

    fn start_ps(
        &mut self,
        index: u32,
        (device, device_bytes_max): &(kernels::Device, Option<u64>),
    ) -> Result<(String, Arc<dyn Parameters>)> {
        let name = format!("ps-{index}");
        let url = format!("http://{name}");
        let options = ps::Options {
            name: name.clone(),
            master: Self::MASTER_URL.to_owned(),
            url: url.clone(),
            device_bytes_max: *device_bytes_max,
            ..ps::Options::default()
        };
        let ps = ps::Ps::on(device.clone(), options, self.stores.clone(), None).map_err(local(&name))?;
        let incoming = self.network.listen(&name).map_err(local(&format!("the pipe of {name}")))?;
        let running = ps::run(ps.clone(), incoming, self.dialer(), self.ps.shutdown.clone());
        self.ps
            .running
            .spawn(async move { running.await.map_err(local(&format!("{name} of this process"))) });
        Ok((url, Arc::new(ps)))
    }

    fn start_worker(&mut self, index: u32, device: Device, options: &Options, registry: Registry) {
        let options = options.worker(index, device);
        let (dialer, shutdown) = (self.dialer(), self.workers.shutdown.clone());
        let (connector, stores) = (self.connector.clone(), self.stores.clone());
        self.workers.running.spawn(async move {
            worker::run(
                options,
                Self::MASTER_URL,
                dialer,
                connector,
                registry,
                stores,
                worker::Watched::default(),
                shutdown,
            )
            .await?;
            Ok(())
        });
    }
}

/// Returns the error of one part of the cluster.
fn local<E: std::error::Error + Send + Sync + 'static>(what: &str) -> impl FnOnce(E) -> Error + use<E> {
    let what = what.to_owned();
    move |source| Error::Local { what, source: Box::new(source) }
}

#[cfg(test)]
mod hangs;
#[cfg(test)]
mod lost;

#[cfg(test)]
mod tests {
    use proto::pb;

    use super::*;
    use crate::fake::job_file;
    use crate::{Followed, JobState, Kind, Submission, report};

    const JOB: &str = r#"
name = "whole"
epochs = 2
model = { builtin = "softmax" }
data = { format = "csv", header = false, train = { features = ["x.csv"] }, validation_fraction = 0.25 }
batch = { micro = 2, effective = 4 }
optimizer = { kind = "sgd", learning_rate = 0.1 }
"#;

    #[test]
    fn workers_have_the_patience_of_the_cluster() {
        let patience = |options: Options| options.worker(0, Device::Cpu).data_patience;
        let data_patience = Duration::from_millis(1500);
        assert_eq!(patience(Options { data_patience, ..Options::default() }), data_patience);
        assert_eq!(patience(Options::default()), worker::Options::default().data_patience);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_job_is_submitted_followed_and_fetched_in_this_process() {
        let dir = tempfile::tempdir().unwrap();
        let lines: String = (0..24u32).map(|i| format!("{},{},{}\n", i % 5, i % 7, i % 3)).collect();
        std::fs::write(dir.path().join("x.csv"), lines).unwrap();
        let submission = Submission::read(&job_file(dir.path(), JOB), &[]).unwrap();
        let numerics = Numerics::computed("a program", b"its results");
        let devices = vec![Device::Cpu; 2];
        let options = Options { devices, ps: 2, numerics: Some(numerics.clone()), ..Options::default() };
        let local = Local::start(options, Stores::default(), Registry::default()).await.unwrap();
        let client = local.client(Duration::from_secs(30));
        let job = client.submit(submission).await.unwrap().name;
        let mut follow = client.follow(&job);
        let (mut steps, mut evaluations) = (0, 0);
        let status = loop {
            match follow.next().await.unwrap() {
                Followed::Event(event) => match event.kind {
                    Kind::Train(_) => steps += 1,
                    Kind::Evaluation(_) => evaluations += 1,
                    _ => {}
                },
                Followed::Ended(status) => break status,
            }
        };
        assert_eq!(status.state(), JobState::Succeeded, "{}", status.reason);
        assert!(steps > 0 && evaluations == 2, "{steps} steps, {evaluations} evaluations");
        let weights = client.weights(&status).await.unwrap().expect("a model");
        let hash = proto::artifact::sha256_hex(&weights);
        assert_eq!(report::model_sha256(&status), Some(hash.as_str()));
        let classes: Vec<_> = status.numerics.iter().filter_map(|since| since.numerics.clone()).collect();
        assert_eq!(classes, [pb::Numerics::from(numerics)]);
        local.stop().await;
    }
}

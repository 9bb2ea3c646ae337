//! A whole job in one process: master, ps and workers, connected without sockets.
//!
//! Control calls go over in-memory pipes ([`Network`]) with the code that real clusters use; weights and gradients go through
//! the ps objects themselves, without a copy. What a newcomer, an example and a test start.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use model::Registry;
use model::device::Choice;
use net::channel::Dialer;
use proto::parameters::Parameters;
use store::Stores;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use worker::Connector;

use crate::pipe::Network;

/// What runs in this process.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Number of workers, at least 1.
    pub(crate) workers: u32,
    /// Number of ps, at least 1.
    pub(crate) ps: u32,
    /// Threads of one gradient computation, per worker.
    pub(crate) threads: usize,
    /// Where workers compute.
    pub(crate) device: Choice,
    /// Folder that the job's data paths start from.
    pub(crate) data_root: Option<PathBuf>,
}

/// A running cluster inside this process.
#[derive(Debug)]
pub(crate) struct Local {
    network: Network,
    stores: Stores,
    master: Roles,
    ps: Roles,
    workers: Roles,
    /// From workers to the ps.
    connector: Connector,
    /// The master's data folder; removed with the cluster.
    _folder: TempDir,
}

/// The processes, if they were some, of one role.
#[derive(Debug, Default)]
struct Roles {
    running: JoinSet<Result<()>>,
    shutdown: CancellationToken,
}

impl Local {
    /// Where its master is, for its dialer.
    pub(crate) const MASTER_URL: &'static str = "http://master";

    /// Starts master, ps and workers, whose checkpoints lie in `stores`.
    ///
    /// # Errors
    /// One of them cannot start, e.g. because a device is not there.
    pub(crate) async fn start(options: Options, stores: Stores, registry: Registry) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ebb-").tempdir().context("make a temporary folder")?;
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
        let ps = (0..options.ps).map(|index| local.start_ps(index)).collect::<Result<BTreeMap<_, _>>>()?;
        local.connector = Connector::embedded(ps);
        for index in 0..options.workers {
            local.start_worker(index, &options, registry.clone());
        }
        Ok(local)
    }

    /// Opens connections to it.
    pub(crate) fn dialer(&self) -> Dialer {
        self.network.dialer()
    }

    /// Waits until one of the roles fails, which none of them should, and says how.
    pub(crate) async fn failure(&mut self) -> anyhow::Error {
        loop {
            let ended = tokio::select! {
                Some(ended) = self.master.running.join_next() => ended,
                Some(ended) = self.ps.running.join_next() => ended,
                Some(ended) = self.workers.running.join_next() => ended,
                else => std::future::pending().await,
            };
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error,
                Err(panic) => return anyhow!("a role of this process panicked: {panic}"),
            }
        }
    }

    /// Ends all roles, the master last, so that none of them complains that another is gone.
    pub(crate) async fn stop(self) {
        for mut roles in [self.workers, self.ps, self.master] {
            roles.shutdown.cancel();
            let leaving = async { while roles.running.join_next().await.is_some() {} };
            // A gradient that is being computed cannot be interrupted; nobody waits for it.
            let _ = tokio::time::timeout(std::time::Duration::from_millis(300), leaving).await;
        }
    }

    fn start_master(&mut self) -> Result<()> {
        let options = master::Options {
            data_dir: self._folder.path().to_owned(),
            journal: false,
            // Costs nothing within a process, and a job that is stopped is noticed by its workers sooner.
            heartbeat: Duration::from_millis(100),
            ..master::Options::default()
        };
        let incoming = self.network.listen("master").context("the master's pipe")?;
        let running =
            master::run(options, self.stores.clone(), incoming, self.dialer(), self.master.shutdown.clone());
        self.master.running.spawn(async move { running.await.context("the master of this process") });
        Ok(())
    }

    fn start_ps(&mut self, index: u32) -> Result<(String, Arc<dyn Parameters>)> {
        let name = format!("ps-{index}");
        let url = format!("http://{name}");
        let options = ps::Options {
            name: name.clone(),
            master: Self::MASTER_URL.to_owned(),
            url: url.clone(),
            ..ps::Options::default()
        };
        let ps = ps::Ps::with_stores(options, self.stores.clone()).with_context(|| name.clone())?;
        let incoming = self.network.listen(&name).with_context(|| format!("the pipe of {name}"))?;
        let running = ps::run(ps.clone(), incoming, self.dialer(), self.ps.shutdown.clone());
        self.ps
            .running
            .spawn(async move { running.await.with_context(|| format!("{name} of this process")) });
        Ok((url, Arc::new(ps)))
    }

    fn start_worker(&mut self, index: u32, options: &Options, registry: Registry) {
        let options = worker::Options {
            name: format!("worker-{index}"),
            threads: options.threads,
            device: options.device,
            data_root: options.data_root.clone(),
            ..worker::Options::default()
        };
        let (dialer, shutdown) = (self.dialer(), self.workers.shutdown.clone());
        let connector = self.connector.clone();
        self.workers.running.spawn(async move {
            worker::run(
                options,
                Self::MASTER_URL,
                dialer,
                connector,
                registry,
                worker::Watched::default(),
                shutdown,
            )
            .await?;
            Ok(())
        });
    }
}

#[cfg(test)]
mod hangs;

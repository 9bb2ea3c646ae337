//! The cluster of one run of a script: a master and ps in this process, which processes of this
//! host reach.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Error, Result, anyhow};
use model::Device;
use net::channel::Listener;
use net::security::Keys;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::{config, locks};

/// The only address: processes of other hosts do not reach it.
const ADDRESS: &str = "127.0.0.1:0";

/// Time for a role to leave. Nothing of it is needed any more then.
const LEAVE: Duration = Duration::from_millis(300);

/// A running master and its ps.
#[derive(Debug)]
pub(super) struct Fleet {
    /// URL of the master.
    pub(super) url: String,
    roles: JoinSet<Result<()>>,
    shutdown: CancellationToken,
    /// The master's data folder. It is removed with the fleet.
    _folder: TempDir,
}

impl Fleet {
    /// Starts a master and so many ps beside workers on `devices`.
    ///
    /// # Errors
    /// A role cannot start.
    pub(super) async fn start(
        ps: u32,
        memory: client::PsMemory,
        devices: Vec<Device>,
        app: &App,
    ) -> Result<Self> {
        let open = app.environment.devices();
        // The first use of a device compiles its kernels.
        let opening = tokio::task::spawn_blocking(move || memory.open(&open, &devices, ps));
        let on = opening.await.context("open the device of the ps")??;
        let folder = tempfile::Builder::new().prefix("ebb-").tempdir().context("make a temporary folder")?;
        let (listener, address) = listen(app).await?;
        let url = format!("http://{address}");
        let shutdown = CancellationToken::new();
        let mut roles = JoinSet::new();
        let options = master::Options {
            data_dir: folder.path().to_owned(),
            journal: false,
            rejoin: true,
            // Cheap on one host, and processes notice sooner that a job was stopped.
            heartbeat: Duration::from_millis(100),
            ..master::Options::default()
        };
        let stores = app.environment.stores.clone();
        let incoming = listener.accept().context("the master's socket")?;
        let running = master::run(options, stores, incoming, app.dialer.clone(), shutdown.clone());
        roles.spawn(async move { running.await.context("the master of this run") });
        let mut fleet = Self { url, roles, shutdown, _folder: folder };
        for index in 0..ps {
            fleet.start_ps(index, &on, app).await?;
        }
        Ok(fleet)
    }

    async fn start_ps(
        &mut self,
        index: u32,
        (device, device_bytes_max): &(kernels::Device, Option<u64>),
        app: &App,
    ) -> Result<()> {
        let (listener, address) = listen(app).await?;
        let name = format!("ps-{index}");
        let options = ps::Options {
            name: name.clone(),
            master: self.url.clone(),
            url: format!("http://{address}"),
            device_bytes_max: *device_bytes_max,
            ..ps::Options::default()
        };
        let (stores, memory) = (app.environment.stores.clone(), app.environment.memory()?);
        let ps = ps::Ps::on(device.clone(), options, stores, memory)?;
        let running = ps::server::run_on_threads(ps, listener, app.dialer.clone(), self.shutdown.clone());
        self.roles.spawn(async move { running.await.with_context(|| format!("{name} of this run")) });
        Ok(())
    }

    /// Waits until a role fails. Never returns while all is well.
    pub(super) async fn failure(&mut self) -> Error {
        loop {
            match self.roles.join_next().await {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => return error,
                Some(Err(panic)) => return anyhow!("a role of this run panicked: {panic}"),
                None => std::future::pending().await,
            }
        }
    }

    /// Ends all roles.
    pub(super) async fn stop(mut self) {
        self.shutdown.cancel();
        let leaving = async { while self.roles.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(LEAVE, leaving).await;
    }
}

async fn listen(app: &App) -> Result<(Listener, SocketAddr)> {
    let (listener, address) = config::bind(ADDRESS).await?;
    let listener = app.environment.listener(listener)?.behind(locks::door(Keys::default()));
    Ok((listener, address))
}

//! `ebb master`: binds, says where it listens, runs the role until it is told to stop.

use anyhow::{Context as _, Result};
use master::{ElectionOptions, Options, Outside};

use crate::App;
use crate::args;
use crate::config;
use crate::metrics;

/// # Errors
/// The address is taken, the folder cannot be written, or the role fails.
pub(crate) async fn run(args: args::Master, app: &App) -> Result<()> {
    std::fs::create_dir_all(&args.data_dir)
        .with_context(|| format!("--data-dir {}: cannot be created", args.data_dir.display()))?;
    let (listener, address) = config::bind(&args.listen).await?;
    let incoming = proto::channel::Listener::beside(listener)?.accept()?;
    let options = Options { data_dir: args.data_dir, ..Options::default() };
    let stores = app.environment.stores.clone();
    let stop = app.stop.token().clone();
    let Some(etcd) = args.etcd else {
        let master = master::Master::open(options, stores, app.dialer.clone()).await?;
        app.board.show(master.readings());
        metrics::serve(args.watched.metrics.as_deref(), app).await?;
        app.screen.print(&format!("master listening on http://{address}"))?;
        return Ok(master.serve(incoming, stop).await?);
    };
    let election = ElectionOptions {
        etcd: config::urls(&etcd),
        prefix: args.etcd_prefix,
        ttl: args.leader_ttl,
        url: config::advertised(args.advertise.as_deref(), address)?,
    };
    app.screen.print(&format!("master, one of several, listening on http://{address}"))?;
    app.board.show(|| master::Metrics::default().readings());
    metrics::serve(args.watched.metrics.as_deref(), app).await?;
    let outside = Outside { stores, dialer: app.dialer.clone(), board: app.board.clone() };
    Ok(master::run_elected(options, election, outside, incoming, stop).await?)
}

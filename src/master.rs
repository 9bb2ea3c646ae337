//! `ebb master`: binds, says where it listens, runs the role until it is told to stop.

use anyhow::{Context as _, Result};
use master::{ElectionOptions, Options, Outside};

use crate::App;
use crate::args;
use crate::config;
use crate::locks;
use crate::metrics;

/// # Errors
/// The address is taken, the folder cannot be written, or the role fails.
pub(crate) async fn run(args: args::Master, app: &App) -> Result<()> {
    std::fs::create_dir_all(&args.data_dir)
        .with_context(|| format!("--data-dir {}: cannot be created", args.data_dir.display()))?;
    let files = app.environment.keys(&args.keys, Some(&args.locks));
    let (listener, address) = config::bind_with(&args.listen, &files).await?;
    let keys = locks::follow(files.clone())?;
    let incoming = app.environment.listener(listener)?.behind(locks::door(keys.clone())).accept()?;
    let dialer = app.dialer.clone().with(keys.clone());
    let options = Options { data_dir: args.data_dir, ..Options::default() };
    let stores = app.environment.stores.clone();
    let stop = app.stop.token().clone();
    let scheme = keys.scheme();
    let Some(etcd) = args.etcd else {
        let master = master::Master::open(options, stores, dialer).await?;
        app.board.show(master.readings());
        metrics::serve(args.watched.metrics.as_deref(), &files, app).await?;
        app.screen.print(&format!("master listening on {scheme}://{address}"))?;
        return Ok(master.serve(incoming, stop).await?);
    };
    let election = ElectionOptions {
        etcd: config::urls(&etcd, "http"),
        prefix: args.etcd_prefix,
        ttl: args.leader_ttl,
        url: config::advertised(args.advertise.as_deref(), address, &keys)?,
    };
    app.screen.print(&format!("master, one of several, listening on {scheme}://{address}"))?;
    app.board.show(|| master::Metrics::default().readings());
    metrics::serve(args.watched.metrics.as_deref(), &files, app).await?;
    let outside = Outside { stores, dialer, board: app.board.clone() };
    Ok(master::run_elected(options, election, outside, incoming, stop).await?)
}

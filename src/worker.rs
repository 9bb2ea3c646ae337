//! `ebb worker`: runs the role until it is told to stop, then lets it finish its microbatch.

use std::sync::Arc;

use anyhow::Result;
use proto::channel::Dialer;
use worker::{Connector, Metrics, Options};

use crate::App;
use crate::args;
use crate::locks;
use crate::metrics;

/// # Errors
/// The device is not there, the master refuses this worker or stays away, or a ps stays away.
pub(crate) async fn run(args: args::Worker, app: &App) -> Result<()> {
    let keys = locks::follow(app.environment.keys(&args.master.keys, None))?;
    let master = app.environment.master(args.master.url.as_deref(), &keys);
    let options = Options {
        name: args.name.unwrap_or_else(|| app.environment.worker_name()),
        threads: args.compute.threads as usize,
        device: args.compute.device,
        data_root: args.compute.data_root,
        ..Options::default()
    };
    app.screen.print(&format!("worker {} of the master at {master}", options.name))?;
    let counted = Arc::new(Metrics::default());
    let counting = counted.clone();
    app.board.show(move || counting.readings());
    metrics::serve(args.watched.metrics.as_deref(), app).await?;
    let dialer = Dialer::tcp().with(keys);
    let connector = Connector::grpc(dialer.clone());
    let (registry, stop) = (app.registry.clone(), app.stop.token().clone());
    worker::run(options, &master, dialer, connector, registry, counted, stop).await?;
    Ok(())
}

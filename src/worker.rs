//! `ebb worker`: runs the role until it is told to stop, then lets it finish its microbatch.

use anyhow::Result;
use proto::channel::Dialer;
use worker::{Connector, Options};

use crate::App;
use crate::args;

/// # Errors
/// The device is not there, the master refuses this worker or stays away, or a ps stays away.
pub(crate) async fn run(args: args::Worker, app: &App) -> Result<()> {
    let master = app.environment.master(args.master.url.as_deref());
    let options = Options {
        name: args.name.unwrap_or_else(|| app.environment.worker_name()),
        threads: args.compute.threads as usize,
        device: args.compute.device,
        data_root: args.compute.data_root,
        ..Options::default()
    };
    app.screen.print(&format!("worker {} of the master at {master}", options.name))?;
    let dialer = Dialer::tcp();
    let connector = Connector::grpc(dialer.clone());
    worker::run(options, &master, dialer, connector, app.registry.clone(), app.stop.token().clone()).await?;
    Ok(())
}

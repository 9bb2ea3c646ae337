//! `ebb worker`: runs the role until it is told to stop, then lets it finish its microbatch.

use anyhow::Result;
use proto::channel::Dialer;
use worker::{Connector, Options};

use crate::App;
use crate::args;
use crate::config;

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
    let (reporter, service) = tonic_health::server::health_reporter();
    // Before the first word to the master: whoever asks while it is away hears "alive, not ready".
    let _health = match &args.health_listen {
        Some(listen) => {
            let (listener, address) = config::bind(listen).await?;
            app.screen.print(&format!("health of worker {} at http://{address}", options.name))?;
            let serving = proto::channel::server().add_service(service);
            let serving = serving.serve_with_incoming(proto::channel::accept(listener));
            Some(AbortOnDrop(tokio::spawn(serving).abort_handle()))
        }
        None => None,
    };
    let (registry, stop) = (app.registry.clone(), app.stop.token().clone());
    worker::run_with_health(options, &master, dialer, connector, registry, reporter, stop).await?;
    Ok(())
}

/// Ends a task with its owner.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

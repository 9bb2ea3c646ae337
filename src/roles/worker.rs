//! `ebb worker`: runs the role until it is told to stop, then lets it finish its microbatch.

use anyhow::{Context as _, Result, anyhow};
use worker::{Connector, Options, Watched};

use crate::app::App;
use crate::config;
use crate::locks;
use crate::settings::roles::{Worker, device, key_files};
use crate::settings::{Flags, Settings};

/// # Errors
/// The settings are wrong, the device is missing, the master refuses this worker, or the master or
/// a ps stays away.
pub(crate) async fn run(flags: Flags<Worker>, app: &App) -> Result<()> {
    let settings = Settings::of(&flags, &app.environment)?;
    let files = key_files(&settings);
    let keys = locks::follow(files.clone())?;
    let master = config::urls(settings.text("master").unwrap_or_default(), keys.scheme());
    let options = Options {
        name: settings.text("name").map_or_else(|| app.environment.worker_name(), str::to_owned),
        device: device(&settings)?,
        ..settings.options().map_err(|why| anyhow!(why))?
    };
    app.screen.print(&format!("worker {} of the master at {master}", options.name))?;
    let (health, service) = tonic_health::server::health_reporter();
    let watched = Watched { health, ..Watched::default() };
    let counting = watched.metrics.clone();
    app.numbers.board().show(move || counting.readings());
    app.numbers.serve(settings.text("metrics"), &files, &app.screen).await?;
    let dialer = app.dialer.clone().with(keys);
    let connector = match app.environment.memory()? {
        Some(memory) => Connector::shared_memory(dialer.clone(), memory, watched.metrics.clone()),
        None => Connector::socket(dialer.clone()),
    };
    // Before the first call to the master: while the master is away, probes hear "alive, not
    // ready".
    let _health = match settings.text("health_listen") {
        Some(listen) => {
            let (listener, address) =
                config::bind_to_show(listen, &files).await.context("--health-listen")?;
            app.screen.print(&format!("health of worker {} at http://{address}", options.name))?;
            let serving = net::channel::server().add_service(service);
            let serving = serving.serve_with_incoming(locks::watchers().open(listener, None));
            Some(AbortOnDrop(tokio::spawn(serving).abort_handle()))
        }
        None => None,
    };
    let (registry, stop) = (app.registry.clone(), app.stop.token().clone());
    let stores = app.environment.stores.clone();
    worker::run(options, &master, dialer, connector, registry, stores, watched, stop).await?;
    Ok(())
}

/// Ends a task when it is dropped.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

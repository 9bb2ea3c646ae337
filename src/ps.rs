//! `ebb ps`: binds, says where it listens, runs the role until it is told to stop.

use anyhow::Result;

use crate::App;
use crate::args;
use crate::config;
use crate::locks;
use crate::metrics;

/// # Errors
/// The address is taken, the master refuses this ps, or the role fails.
pub(crate) async fn run(args: args::Ps, app: &App) -> Result<()> {
    let files = app.environment.keys(&args.master.keys, Some(&args.locks));
    let (listener, address) = config::bind_with(&args.listen, &files).await?;
    let keys = locks::follow(files.clone())?;
    let url = config::advertised(args.advertise.as_deref(), address, &keys)?;
    let name = args.name.unwrap_or_else(|| app.environment.ps_name(address));
    let mut options = ps::Options {
        name: name.clone(),
        url: url.clone(),
        master: app.environment.master(args.master.url.as_deref(), &keys),
        ..ps::Options::default()
    };
    if let Some(threads) = args.threads {
        options.threads = threads as usize;
    }
    let ps = ps::Ps::with(options, app.environment.stores.clone(), app.environment.memory()?)?;
    let counting = ps.clone();
    app.board.show(move || counting.metrics().readings());
    metrics::serve(args.watched.metrics.as_deref(), &files, app).await?;
    app.screen.print(&format!("ps {name} listening on {url}"))?;
    let listener = app.environment.listener(listener)?.behind(locks::door(keys.clone()));
    let dialer = app.dialer.clone().with(keys);
    ps::server::run_on_threads(ps, listener, dialer, app.stop.token().clone()).await?;
    Ok(())
}

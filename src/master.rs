//! `ebb master`: binds, says where it listens, runs the role until it is told to stop.

use anyhow::{Context as _, Result};

use crate::App;
use crate::args;
use crate::config;

/// # Errors
/// The address is taken, the folder cannot be written, or the role fails.
pub(crate) async fn run(args: args::Master, app: &App) -> Result<()> {
    std::fs::create_dir_all(&args.data_dir)
        .with_context(|| format!("--data-dir {}: cannot be created", args.data_dir.display()))?;
    let (listener, address) = config::bind(&args.listen).await?;
    let options = master::Options { data_dir: args.data_dir, ..master::Options::default() };
    let master = master::Master::open(options, app.environment.stores.clone(), app.dialer.clone()).await?;
    app.screen.print(&format!("master listening on http://{address}"))?;
    master.serve(proto::channel::accept(listener), app.stop.token().clone()).await?;
    Ok(())
}

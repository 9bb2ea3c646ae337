//! `ebb master`: binds, says where it listens, runs the role until it is told to stop.

use anyhow::{Context as _, Result, anyhow};
use master::{ElectionOptions, Options, Outside};

use crate::app::App;
use crate::config;
use crate::locks;
use crate::settings::roles::{Master, key_files};
use crate::settings::{Flags, Settings};

/// # Errors
/// The settings are wrong, the address is taken, the folder cannot be written, or the role fails.
pub(crate) async fn run(flags: Flags<Master>, app: &App) -> Result<()> {
    let settings = Settings::of(&flags, &app.environment)?;
    let data_dir = settings.path("data_dir").context(
        "data_dir is not set; give --data-dir DIR, EBB_MASTER_DATA_DIR, or data_dir in the file of --config",
    )?;
    std::fs::create_dir_all(&data_dir)
        .with_context(|| format!("--data-dir {}: cannot be created", data_dir.display()))?;
    let files = key_files(&settings);
    let (listener, address) = config::bind_with(settings.text("listen").unwrap_or_default(), &files).await?;
    let keys = locks::follow(files.clone())?;
    let incoming = app.environment.listener(listener)?.behind(locks::door(keys.clone())).accept()?;
    let dialer = app.dialer.clone().with(keys.clone());
    let options = Options { data_dir, ..settings.options().map_err(|why| anyhow!(why))? };
    if files.tokens.is_some() && options.checkpoints.is_empty() {
        tracing::warn!(
            "jobs may name any place for checkpoints that this master and the ps can write; say which with --checkpoints PLACE"
        );
    }
    let stores = app.environment.stores.clone();
    let stop = app.stop.token().clone();
    let scheme = keys.scheme();
    let Some(etcd) = settings.text("etcd") else {
        let master = master::Master::open(options, stores, dialer).await?;
        app.numbers.board().show(master.readings());
        app.numbers.serve(settings.text("metrics"), &files, &app.screen).await?;
        app.screen.print(&format!("master listening on {scheme}://{address}"))?;
        return Ok(master.serve(incoming, stop).await?);
    };
    let election = ElectionOptions {
        etcd: config::urls(etcd, "http"),
        prefix: settings.text("etcd_prefix").unwrap_or_default().to_owned(),
        ttl: settings.duration("leader_ttl").unwrap_or_default(),
        url: config::advertised(settings.text("advertise"), address, &keys)?,
    };
    app.screen.print(&format!("master, one of several, listening on {scheme}://{address}"))?;
    app.numbers.board().show(|| master::Metrics::default().readings());
    app.numbers.serve(settings.text("metrics"), &files, &app.screen).await?;
    let outside = Outside { stores, dialer, board: app.numbers.board().clone() };
    Ok(master::run_elected(options, election, outside, incoming, stop).await?)
}

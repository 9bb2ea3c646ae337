//! `ebb ps`: binds, says where it listens, runs the role until it is told to stop.

use anyhow::{Context as _, Result, anyhow, bail};
use kernels::device::Devices;
use model::device::{Choice, Device};

use crate::app::App;
use crate::config;
use crate::locks;
use crate::settings::roles::{Ps, device, key_files, one_device};
use crate::settings::{Flags, Settings};
use crate::telemetry::devices;

/// # Errors
/// The settings are wrong, the address is taken, the master refuses this ps, or the role fails.
pub(crate) async fn run(flags: Flags<Ps>, app: &App) -> Result<()> {
    let settings = Settings::of(&flags, &app.environment)?;
    let files = key_files(&settings);
    let (listener, address) = config::bind_with(settings.text("listen").unwrap_or_default(), &files).await?;
    let keys = locks::follow(files.clone())?;
    let url = config::advertised(settings.text("advertise"), address, &keys)?;
    let name = settings.text("name").map_or_else(|| app.environment.ps_name(address), str::to_owned);
    let options = ps::Options {
        name: name.clone(),
        url: url.clone(),
        master: config::urls(settings.text("master").unwrap_or_default(), keys.scheme()),
        ..settings.options().map_err(|why| anyhow!(why))?
    };
    let device = opened(&device(&settings)?, &app.environment.devices())?;
    let watching = devices::watch(device.ordinal().into_iter().collect()).await;
    let ps = ps::Ps::on(device, options, app.environment.stores.clone(), app.environment.memory()?)?;
    let (counting, watched) = (ps.clone(), watching.devices().clone());
    app.numbers.board().show(move || [counting.metrics().readings(), devices::readings(&watched)].concat());
    app.numbers.serve(settings.text("metrics"), &files, &app.screen).await?;
    app.screen.print(&format!("ps {name} listening on {url}"))?;
    let listener = app.environment.listener(listener)?.behind(locks::door(keys.clone()));
    let dialer = app.dialer.clone().with(keys);
    ps::server::run_on_threads(ps, listener, dialer, app.stop.token().clone()).await?;
    Ok(())
}

/// Opens the device that the user asked for.
///
/// # Errors
/// The user named a CUDA device that cannot be used, or several devices.
fn opened(choice: &Choice, devices: &Devices) -> Result<ps::Device> {
    let (ordinal, is_asked) = match choice {
        Choice::Auto => (0, false),
        Choice::Only(devices) => match devices.as_slice() {
            [Device::Cpu] => return Ok(ps::Device::default()),
            [Device::Cuda(ordinal)] => (*ordinal, true),
            _ => bail!(one_device(choice)),
        },
        Choice::Uuids(_) => match worker::device::of_driver(choice)?.as_slice() {
            [Device::Cuda(ordinal)] => (*ordinal, true),
            _ => bail!(one_device(choice)),
        },
        Choice::All => bail!(one_device(choice)),
    };
    match devices.cuda(ordinal) {
        Ok(device) => {
            tracing::info!(%device, "partitions lie on a device");
            Ok(device)
        }
        Err(error) if is_asked => Err(error).with_context(|| format!("--device {choice}")),
        Err(reason) => {
            tracing::warn!(%reason, "--device auto: partitions lie in memory of the host");
            Ok(ps::Device::default())
        }
    }
}

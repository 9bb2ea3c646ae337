//! `ebb worker`: runs a worker for each device until it is told to stop, then lets them finish
//! their microbatches.

use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use model::device::{Choice, Device};
use net::channel::Dialer;
use net::metrics::by_device;
use tokio::task::JoinSet;
use worker::device::Chosen;
use worker::{Connector, Metrics, Options, Watched};

use crate::agent::{self, Agent};
use crate::app::App;
use crate::config;
use crate::launch::processors;
use crate::launch::user::User;
use crate::launch::variables::usual;
use crate::locks;
use crate::roles::devices::{drained, each, ordinals};
use crate::settings::roles::{Worker, device, exchange_device, key_files};
use crate::settings::{Flags, Settings, scripts};
use crate::telemetry::devices;

/// # Errors
/// The settings are wrong, a device is missing, the master refuses a worker, or the master or a ps
/// stays away.
pub(crate) async fn run(flags: Flags<Worker>, app: &App) -> Result<()> {
    let settings = Settings::of(&flags, &app.environment)?;
    let files = key_files(&settings);
    let keys = locks::follow(files.clone())?;
    let master = config::urls(settings.text("master").unwrap_or_default(), keys.scheme());
    let options = Options {
        name: settings.text("name").map_or_else(|| app.environment.worker_name(), str::to_owned),
        devices: app.environment.devices(),
        ..settings.options().map_err(|why| anyhow!(why))?
    };
    let registry = app.registry.clone();
    let registry = match settings.switch("torchscript") {
        true => registry.for_any_job_and_scripts().context("--torchscript")?,
        false => registry.for_any_job(),
    };
    let choice = device(&settings)?;
    let (takes_scripts, asked) = (settings.switch("scripts"), choice.to_string());
    // It may load libtorch.
    let chosen = tokio::task::spawn_blocking(move || {
        let of_scripts = takes_scripts.then(|| worker::device::for_scripts(&choice)).transpose();
        let of_scripts = of_scripts?.unwrap_or_default();
        let chosen = worker::device::beside(worker::device::chosen(&choice), &of_scripts)?;
        anyhow::Ok((chosen, of_scripts))
    });
    let (Chosen { devices, fallback }, of_scripts) = chosen.await.context("look for devices")??;
    if let Some(reason) = fallback {
        // A user who named devices does not expect the CPU.
        if asked == "auto" {
            tracing::info!(reason, "--device {asked}: computing on the CPU");
        } else {
            tracing::warn!(reason, "--device {asked}: computing on the CPU, except for scripts");
        }
    }
    app.screen.print(&format!("worker {} of the master at {master}", options.name))?;
    let (health, service) = tonic_health::server::health_reporter();
    let mut all = ordinals(&[&devices[..], &of_scripts[..]].concat());
    all.sort_unstable();
    all.dedup();
    let watching = devices::watch(all).await;
    let each = each(&options, &devices);
    let counting: Vec<_> = each.iter().map(|options| (ordinal(options), Arc::<Metrics>::default())).collect();
    let (counted, of_devices) = (counting.clone(), watching.devices().clone());
    app.numbers.board().show(move || {
        let of_workers: Vec<_> = counted.iter().map(|(device, of)| (*device, of.readings())).collect();
        [by_device(&of_workers), devices::readings(&of_devices)].concat()
    });
    app.numbers.serve(settings.text("metrics"), &files, &app.screen).await?;
    let dialer = app.dialer.clone().with(keys);
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
    let exchange = exchange_device(&settings).map_err(|why| anyhow!(why))?;
    let stop = app.stop.token().child_token();
    let agent = agent(&settings, &options, &of_scripts, &master, &dialer, app)?;
    let mut workers = JoinSet::new();
    let mut health = Some(health);
    for (options, (device, metrics)) in each.into_iter().zip(counting) {
        let device = device.map(|ordinal| watching.devices().latest(ordinal)).unwrap_or_default();
        let exported = exported(&exchange, options.device)?;
        // All are ready at about the same time, because they have one master. The first one tells.
        let health = health.take().unwrap_or_else(|| Watched::default().health);
        let watched = Watched { metrics: metrics.clone(), health, device };
        let connector = match (app.environment.memory()?, exported) {
            (Some(memory), Device::Cuda(ordinal)) => {
                Connector::device_memory(dialer.clone(), memory, ordinal, options.devices.clone(), metrics)
            }
            (Some(memory), Device::Cpu) => Connector::shared_memory(dialer.clone(), memory, metrics),
            (None, _) => Connector::socket(dialer.clone()),
        };
        let (master, dialer) = (master.clone(), dialer.clone());
        let (registry, stores) = (registry.clone(), app.environment.stores.clone());
        let stop = stop.clone();
        workers.spawn(async move {
            worker::run(options, &master, dialer, connector, registry, stores, watched, stop).await
        });
    }
    let attending = async {
        let Some(agent) = agent else { return Ok(()) };
        agent.run(&stop).await.with_context(|| format!("scripts on {}", options.name))
    };
    tokio::try_join!(drained(workers, &stop), attending).map(drop)
}

/// Returns the number of a worker's CUDA device. `None`: the worker computes on the CPU.
fn ordinal(options: &Options) -> Option<usize> {
    ordinals(&[options.device]).first().copied()
}

/// Returns the device whose memory a worker exports, if the worker computes on `own`. The CPU:
/// none.
///
/// # Errors
/// The user named a device by a UUID that none has.
fn exported(choice: &Choice, own: Device) -> Result<Device> {
    match choice {
        Choice::Auto | Choice::All => Ok(own),
        Choice::Only(devices) => Ok(devices[0]),
        Choice::Uuids(_) => Ok(worker::device::of_driver(choice).context("--exchange-device")?[0]),
    }
}

/// Creates the agent of a worker that takes scripts, and says what that means.
fn agent(
    settings: &Settings,
    options: &Options,
    devices: &[Device],
    master: &str,
    dialer: &Dialer,
    app: &App,
) -> Result<Option<Agent>> {
    let Some(processes) = scripts::processes(settings, devices) else { return Ok(None) };
    let of_agent = agent::Options {
        name: options.name.clone(),
        master: master.to_owned(),
        processes,
        python: app.environment.python(settings.path("python").as_deref()),
        hidden: app.environment.own_variables().map(str::to_owned).collect(),
        variables: usual(config::is_set),
        devices: devices.to_owned(),
        processors: processors::near(devices),
        visible: config::visible_devices(),
        user: settings.text("script_user").map(User::separate).transpose()?,
        scratch: options.scratch.clone(),
        allowed: scripts::requirements(settings),
        programs: config::programs(),
        guard: app.guard()?,
    };
    let allowed = of_agent.allowed.as_ref().map(ToString::to_string);
    let user = of_agent.user.clone();
    let has_keys = settings.path("token_file").is_some() || settings.path("tls_key").is_some();
    let agent = Agent::new(of_agent, dialer, app.screen.clone())?;
    app.screen.line(&agent::warning(processes, devices, user.as_ref(), has_keys, &agent.logs()));
    allowed.iter().for_each(|line| app.screen.line(line));
    Ok(Some(agent))
}

/// Ends a task when it is dropped.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

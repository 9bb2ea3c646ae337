//! Ebbflow: elastic deep-learning training on sharded parameter servers, exactly once and bit for
//! bit.
//!
//! The program `ebb` is [`main`] with Ebbflow's own networks. A program of yours calls it with
//! more:
//!
//! ```no_run
//! use ebbflow::model::{Context, Model, Registry};
//!
//! # fn mine(_: &Context) -> Box<dyn Model> { unimplemented!() }
//! fn main() -> std::process::ExitCode {
//!     ebbflow::main(Registry::default().with("mine", |context| Ok(mine(context))))
//! }
//! ```
//!
//! Such a program has the same commands. A job file names the network: `model.builtin = "mine"`.
//! `examples/custom_model.rs` is a whole program.
//!
//! [`client`] submits and follows jobs from a program without a command line. [`pipe`] is an
//! in-memory network for tests.

mod agent;
pub mod allocator;
mod app;
mod args;
mod config;
#[cfg(test)]
mod fake;
mod launch;
mod locks;
mod roles;
mod settings;
mod signals;
mod telemetry;
mod terminal;
mod verbs;

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result as Anyhow};
use clap::Parser as _;
use tracing::Instrument as _;

pub use ::{client, data, model};
pub use ::client::pipe;
pub use ::model::{Error, Result, device, weights};
pub use ::net::security;
pub use ::proto::{column, metrics, random, spec, tensor};

use crate::app::App;
use crate::args::{Cli, Command};
use crate::config::Environment;
use crate::launch::guard::Guard;
use crate::roles::numerics;
use crate::settings::Settings;
use crate::signals::Stop;
use crate::telemetry::metrics::Numbers;
use crate::terminal::screen::{NobodyReads, Screen};

/// Exit code when the reader of our output left: the code of programs that SIGPIPE ends.
const NOBODY_READS: u8 = 128 + 13;

/// Most threads for work that waits or computes.
const BLOCKING_THREADS_MAX: usize = 4096;

/// Exit code after a failure.
const FAILURE: u8 = 1;

/// Exit code of a worker or a ps whose device is lost. A start on the devices that are left may go
/// well.
const DEVICE_LOST: u8 = 3;

/// The whole program: parses the command line, runs it, and explains a failure on stderr.
///
/// `registry` has the networks that `model.builtin` can name. The verbs that compute (`worker`,
/// `run`, `evaluate`, `predict`) end the process here; the other verbs return.
pub fn main(registry: model::Registry) -> ExitCode {
    ExitCode::from(main_with(std::env::args_os().collect(), registry))
}

/// Returns the CUDA devices of this process, for a program that has parts of a job without
/// [`main`]. Compiled kernels lie where `ebb` keeps them. No device is open yet.
#[must_use]
pub fn devices() -> kernels::device::Devices {
    Environment::read(None).devices()
}

/// [`main`] with these arguments instead of the process's own, for a program inside another one,
/// such as a Python interpreter. The first argument is the program's name. Returns the exit code.
///
/// Call this function before the process has threads.
pub fn main_with(arguments: Vec<OsString>, registry: model::Registry) -> u8 {
    allocator::keep_free_memory(data::memory_limit());
    let environment = Environment::read(arguments.first());
    let cli = Cli::parse_from(arguments);
    if let Err(error) = numerics::hold(&cli, &environment) {
        eprintln!("error: --numerics portable: this program cannot start itself again: {error}");
        return FAILURE;
    }
    let guard = match takes_scripts(&cli, &environment).then(Guard::start).transpose() {
        Ok(guard) => guard,
        Err(error) => {
            eprintln!("error: this program cannot start the process that starts scripts: {error}");
            return FAILURE;
        }
    };
    let computes = matches!(
        cli.command,
        Command::Worker(_) | Command::Run(_) | Command::Evaluate(_) | Command::Predict(_)
    );
    let code = match start(cli, environment, registry, guard) {
        Ok(code) => code,
        Err(error) if error.is::<NobodyReads>() => NOBODY_READS,
        Err(error) => {
            eprint!("{}", explain(&error));
            failure(&error)
        }
    };
    if computes {
        leave(code)
    }
    code
}

/// Ends the process as it is. `exit` would destroy libtorch's globals while a thread still computes
/// or drops its model: a worker that drained in good order would end with SIGSEGV.
#[expect(unsafe_code, reason = "the standard library cannot end a process without running C's exit handlers")]
fn leave(code: u8) -> ! {
    // A reader that left does not change how the program ends.
    let _ = std::io::stdout().flush();
    // SAFETY: takes a number and does not return. Output is flushed above, telemetry by its guard.
    unsafe { libc::_exit(code.into()) }
}

/// Returns whether this run of the program starts processes of scripts.
fn takes_scripts(cli: &Cli, environment: &Environment) -> bool {
    match &cli.command {
        // The role itself reports wrong settings.
        Command::Worker(flags) => {
            Settings::of(flags, environment).is_ok_and(|settings| settings.switch("scripts"))
        }
        Command::Run(run) => run.launch.on.is_none() && ::client::is_script(&run.job),
        _ => false,
    }
}

fn start(cli: Cli, environment: Environment, registry: model::Registry, guard: Option<Guard>) -> Anyhow<u8> {
    let (service, level) = match &cli.command {
        Command::Master(_) => ("ebb-master", "info"),
        Command::Ps(_) => ("ebb-ps", "info"),
        Command::Worker(_) => ("ebb-worker", "info"),
        _ => ("ebb", "warn"),
    };
    let mut runtime = match cli.command {
        // A thread of its own computes a worker's gradients, so the runtime has only sockets. In a
        // runtime with more threads each message would change cores twice, which costs about a
        // quarter of a transfer's speed.
        Command::Worker(_) => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    // A ps has a thread for each push whose values it adds as they come, and a push lasts as long
    // as the backward pass that makes it. Updates need threads, too.
    runtime.max_blocking_threads(BLOCKING_THREADS_MAX);
    let runtime = runtime.enable_all().build().context("start the runtime")?;
    let screen = Screen::default();
    let outcome = {
        let _in_runtime = runtime.enter();
        let trace = cli.trace.as_deref();
        let telemetry = telemetry::start(&environment, cli.log, level, service, trace, &screen)?;
        let numbers = Numbers::new(telemetry.meter());
        let (stop, dialer) = (Stop::on_signals()?, environment.dialer()?);
        ::data::use_store_settings(environment.stores.settings().clone());
        let app = App { environment, registry, screen, stop, dialer, numbers, guard };
        let performing = perform(cli.command, &app).instrument(tracing::info_span!("ebb", role = service));
        runtime.block_on(performing).map(|success| match (success, app.stop.exit_code()) {
            (true, _) => 0,
            (false, code) => code.unwrap_or(FAILURE),
        })
    };
    // A gradient that is still being computed for nobody must not hold the program back.
    runtime.shutdown_timeout(Duration::from_millis(200));
    outcome
}

/// Runs one verb; true for success, false for a job that did not succeed.
async fn perform(command: Command, app: &App) -> Anyhow<bool> {
    match command {
        Command::Run(args) => return verbs::run::run(args, app).await,
        Command::Evaluate(args) => return verbs::evaluate::run(args, app).await,
        Command::Predict(args) => return verbs::predict::run(args, app).await,
        Command::Submit(args) => return verbs::submit::run(args, app).await,
        Command::Watch(args) => return verbs::watch::run(args, app).await,
        Command::Logs(args) => verbs::logs::run(args, app).await,
        Command::Checkpoint(verb) => return verbs::checkpoint::run(verb, app).await,
        Command::Data(verb) => return verbs::data::run(verb, app).await,
        Command::Master(args) => roles::master::run(args, app).await,
        Command::Ps(args) => roles::ps::run(args, app).await,
        Command::Worker(args) => roles::worker::run(args, app).await,
        Command::Jobs(args) => verbs::jobs::run(args, app).await,
        Command::Status(args) => verbs::status::run(args, app).await,
        Command::Scale(args) => verbs::scale::run(args, app).await,
        Command::Pause(args) => verbs::pause::run(args, app).await,
        Command::Resume(args) => verbs::resume::run(args, app).await,
        Command::Cancel(args) => verbs::cancel::run(args, app).await,
        Command::Fetch(args) => verbs::fetch::run(args, app).await,
        Command::Health(args) => return verbs::health::run(args, app).await,
        Command::Config(verb) => verbs::config::run(verb, app),
        Command::Certs(verb) => verbs::certs::run(verb, app),
        Command::Completions(args) => verbs::completions::run(&args, app),
    }
    .map(|()| true)
}

/// Returns the exit code after an error.
fn failure(error: &anyhow::Error) -> u8 {
    let lost = error.chain().any(|cause| {
        let of_worker = cause.downcast_ref::<worker::Error>().is_some_and(worker::Error::is_device_lost);
        let of_ps = matches!(cause.downcast_ref(), Some(ps::Error::Device(_)));
        of_worker || of_ps || cause.downcast_ref::<client::Error>().is_some_and(client::Error::is_device_lost)
    });
    if lost { DEVICE_LOST } else { FAILURE }
}

/// `error: what`, then its causes, each once: libraries like to repeat the cause in the message.
fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    let mut said = String::new();
    for (index, cause) in error.chain().enumerate() {
        let what = cause.to_string();
        if index == 0 || !said.contains(&what) {
            let begin = if index == 0 { "error" } else { "  because" };
            text.push_str(&format!("{begin}: {what}{}\n", advice(cause)));
        }
        said = what;
    }
    text
}

/// Advice for a user of the command line about an error of the client.
fn advice(error: &(dyn std::error::Error + 'static)) -> &'static str {
    match error.downcast_ref() {
        Some(client::Error::NoAnswer { .. }) => {
            "; start it with `ebb master`, or say where it is with --master or EBB_MASTER"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_device_has_an_exit_code_of_its_own() {
        let lost = || worker::Error::DeviceLost {
            device: "cuda:0".into(),
            reason: "CUDA error: uncorrectable ECC error encountered".to_owned(),
            by_task: false,
        };
        assert_eq!(failure(&lost().into()), DEVICE_LOST);
        assert_eq!(failure(&anyhow::Error::from(lost()).context("a worker")), DEVICE_LOST);
        assert_eq!(failure(&client::Error::from(lost()).into()), DEVICE_LOST);
        let of_ps = ps::Error::Device(kernels::Error::NoCompiler);
        assert_eq!(failure(&anyhow::Error::from(of_ps).context("a ps")), DEVICE_LOST);
        assert_eq!(failure(&worker::Error::Options(Vec::new()).into()), FAILURE);
    }

    #[test]
    fn errors_are_explained_with_their_causes_and_without_repetition() {
        let error = anyhow::anyhow!("No space left on device").context("cannot write out/model.safetensors");
        assert_eq!(
            explain(&error),
            "error: cannot write out/model.safetensors\n  because: No space left on device\n"
        );
        let url = "http://127.0.0.1:4700".to_owned();
        let away = client::Error::NoAnswer { url, patience: Duration::from_secs(10), last: None };
        assert_eq!(
            explain(&away.into()),
            "error: no answer from the master at http://127.0.0.1:4700 for 10s; start it with `ebb master`, or say \
             where it is with --master or EBB_MASTER\n"
        );
        let twice = anyhow::anyhow!("no route").context("call failed: no route");
        assert_eq!(explain(&twice), "error: call failed: no route\n");
    }
}

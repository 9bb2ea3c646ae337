//! Ebbflow: elastic deep-learning training on sharded parameter servers, exactly once and bit for bit.
//!
//! The program `ebb` is [`main`] with Ebbflow's own networks. A program of yours calls it with more:
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
//! It then has the same commands, and a job file names the network with `model.builtin = "mine"`; the whole of such a program
//! is `examples/custom_model.rs`. [`pipe`] is the in-memory network that such programs may use in their tests.

pub mod allocator;
mod args;
mod cancel;
mod certs;
mod checkpoint;
mod client;
mod completions;
mod config;
mod export;
#[cfg(test)]
mod fake;
mod fetch;
mod follow;
mod health;
mod job_file;
mod jobs;
mod local;
mod locks;
mod master;
mod metrics;
mod numerics;
mod out;
mod pause;
pub mod pipe;
mod progress;
mod ps;
mod report;
mod resume;
mod run;
mod scale;
mod screen;
mod settings;
mod show;
mod signals;
mod spans;
mod status;
mod submit;
mod telemetry;
mod timeline;
mod watch;
mod worker;

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result as Anyhow};
use clap::Parser as _;
use net::channel::Dialer;
use net::metrics::Board;
use net::security::Keys;
use opentelemetry::metrics::Meter;
use tracing::Instrument as _;

pub use ::{data, model};
pub use ::model::{Error, Result, device, weights};
pub use ::net::security;
pub use ::proto::{random, spec, tensor};

use crate::args::{Cli, Command, Reach};
use crate::client::Client;
use crate::config::Environment;
use crate::screen::{NobodyReads, Screen};
use crate::signals::Stop;

/// Exit code when the reader of our output left: that of programs which SIGPIPE ends.
const NOBODY_READS: u8 = 128 + 13;

/// Exit code of what went wrong.
const FAILURE: u8 = 1;

/// What every verb needs.
struct App {
    environment: Environment,
    registry: model::Registry,
    screen: Screen,
    stop: Stop,
    dialer: Dialer,
    /// This role's numbers.
    board: Board,
    /// Where they are registered for a collector.
    meter: Option<Meter>,
}

impl App {
    /// This program as the user calls it.
    fn program(&self) -> &str {
        &self.environment.program
    }

    /// A command about a job, for the user to copy: it reaches the same master.
    fn command(&self, verb: &str, job: &str, reach: &Reach) -> String {
        let args::MasterUrl { url, keys } = &reach.master;
        let master = url.as_ref().map(|url| format!(" --master {url}")).unwrap_or_default();
        let files = [
            ("--tls-ca", &keys.tls_ca),
            ("--tls-cert", &keys.tls_cert),
            ("--tls-key", &keys.tls_key),
            ("--token-file", &keys.token_file),
        ];
        let given = |(flag, path): (&str, &Option<_>)| {
            path.as_ref().map(|path: &std::path::PathBuf| format!(" {flag} {}", path.display()))
        };
        let keys: String = files.into_iter().filter_map(given).collect();
        format!("{} {verb} {job}{master}{keys}", self.program())
    }

    /// The master that the user means.
    fn client(&self, reach: &Reach) -> Anyhow<Client> {
        let keys = Keys::load(self.environment.keys(&reach.master.keys))?;
        let url = self.environment.master(reach.master.url.as_deref(), &keys);
        Client::new(&self.dialer.clone().with(keys), &url, reach.master_timeout, self.screen.clone())
    }
}

/// The whole program: parses the command line, runs it, and says on stderr what went wrong.
///
/// `registry` has the networks that `model.builtin` can name. Verbs that compute (`worker`, `run`) end the process here, so what
/// a program does after this call happens for the others only.
pub fn main(registry: model::Registry) -> ExitCode {
    allocator::keep_free_memory();
    let cli = Cli::parse();
    let environment = Environment::read();
    if let Err(error) = numerics::hold(&cli, &environment) {
        eprintln!("error: --numerics portable: this program cannot start itself again: {error}");
        return ExitCode::from(FAILURE);
    }
    let computes = matches!(cli.command, Command::Worker(_) | Command::Run(_));
    let code = match start(cli, environment, registry) {
        Ok(code) => code,
        Err(error) if error.is::<NobodyReads>() => NOBODY_READS,
        Err(error) => {
            eprint!("{}", explain(&error));
            FAILURE
        }
    };
    if computes {
        leave(code)
    }
    ExitCode::from(code)
}

/// Ends the process as it is. `exit` would destroy libtorch's globals below a thread that still computes for nobody, or that drops
/// its model: a worker that drained in good order would end with SIGSEGV.
#[expect(unsafe_code, reason = "the standard library cannot end a process without running C's exit handlers")]
fn leave(code: u8) -> ! {
    // A reader that left does not change how the program ends.
    let _ = std::io::stdout().flush();
    // SAFETY: takes a number and does not return; what was buffered is written, telemetry was flushed by its guard.
    unsafe { libc::_exit(code.into()) }
}

fn start(cli: Cli, environment: Environment, registry: model::Registry) -> Anyhow<u8> {
    let (service, level) = match &cli.command {
        Command::Master(_) => ("ebb-master", "info"),
        Command::Ps(_) => ("ebb-ps", "info"),
        Command::Worker(_) => ("ebb-worker", "info"),
        _ => ("ebb", "warn"),
    };
    let mut runtime = match cli.command {
        // A worker's gradients are computed by a thread of their own. What is left is sockets, and between the threads of a larger
        // runtime each message would change cores twice, which costs about a quarter of a transfer's speed.
        Command::Worker(_) => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = runtime.enable_all().build().context("start the runtime")?;
    let screen = Screen::default();
    let outcome = {
        let _in_runtime = runtime.enter();
        let board = Board::default();
        let trace = cli.trace.as_deref();
        let telemetry = telemetry::start(&environment, cli.log, level, service, trace, &screen)?;
        let meter = telemetry.meter();
        let (stop, dialer) = (Stop::on_signals()?, environment.dialer()?);
        let app = App { environment, registry, screen, stop, dialer, board, meter };
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
        Command::Run(args) => return run::run(args, app).await,
        Command::Submit(args) => return submit::run(args, app).await,
        Command::Watch(args) => return watch::run(args, app).await,
        Command::Checkpoint(verb) => return checkpoint::run(verb, app).await,
        Command::Master(args) => master::run(args, app).await,
        Command::Ps(args) => ps::run(args, app).await,
        Command::Worker(args) => worker::run(args, app).await,
        Command::Jobs(args) => jobs::run(args, app).await,
        Command::Status(args) => status::run(args, app).await,
        Command::Scale(args) => scale::run(args, app).await,
        Command::Pause(args) => pause::run(args, app).await,
        Command::Resume(args) => resume::run(args, app).await,
        Command::Cancel(args) => cancel::run(args, app).await,
        Command::Fetch(args) => fetch::run(args, app).await,
        Command::Health(args) => return health::run(args, app).await,
        Command::Config(verb) => show::run(verb, app),
        Command::Certs(verb) => certs::run(verb, app),
        Command::Completions(args) => completions::run(&args, app),
    }
    .map(|()| true)
}

/// `error: what`, then its causes, each once: libraries like to repeat the cause in the message.
fn explain(error: &anyhow::Error) -> String {
    let mut text = format!("error: {error}\n");
    let mut said = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            text.push_str(&format!("  because: {cause}\n"));
        }
        said = cause;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_explained_with_their_causes_and_without_repetition() {
        let error = anyhow::anyhow!("No space left on device").context("cannot write out/model.safetensors");
        assert_eq!(
            explain(&error),
            "error: cannot write out/model.safetensors\n  because: No space left on device\n"
        );
        let twice = anyhow::anyhow!("no route").context("call failed: no route");
        assert_eq!(explain(&twice), "error: call failed: no route\n");
    }
}

//! A user's program that reaches a scripted master, for the tests of verbs.

use std::sync::PoisonError;
use std::time::Duration;

use client::pipe::Network;
use client::{JobState, JobStatus};
use model::device::Choice;

#[path = "../client/src/fake.rs"]
#[allow(dead_code, reason = "the tests of the client use the rest")]
mod scripted;

pub(crate) use self::scripted::{Fake, JOB, evaluation, event, job_file, state, succeeded, train};
use crate::app::App;
use crate::args::{Compute, Instructions, JobFile, KeyFiles, MasterUrl, Measure, Reach};
use crate::config::Environment;
use crate::signals::Stop;
use crate::telemetry::metrics::Numbers;
use crate::terminal::screen::Screen;

impl Fake {
    /// Creates a master whose job trains, with 3 workers.
    pub(crate) fn running() -> Self {
        let fake = Self::new();
        fake.script().status = JobStatus {
            state: JobState::Running.into(),
            reason: "workers train".to_owned(),
            workers: 3,
            artifacts: Vec::new(),
            ..succeeded()
        };
        fake
    }

    /// Returns a user's program that reaches this master.
    pub(crate) fn app(&self) -> App {
        let network = Network::new();
        self.serve(&network);
        app(&network)
    }
}

/// Returns a user's program on `network`, where nobody else is yet.
pub(crate) fn app(network: &Network) -> App {
    App {
        environment: Environment::default(),
        registry: model::Registry::default(),
        screen: Screen::default(),
        stop: Stop::default(),
        dialer: network.dialer(),
        numbers: Numbers::default(),
        guard: None,
    }
}

/// Returns the default master, for which the user waits as long.
pub(crate) fn reach(master_timeout: Duration) -> Reach {
    Reach { master: MasterUrl { url: None, keys: KeyFiles::default() }, master_timeout }
}

/// One job of the default master.
pub(crate) fn one_job(job: &str, json: bool) -> crate::args::OneJob {
    crate::args::OneJob { job: job.to_owned(), reach: reach(Duration::from_secs(120)), json }
}

/// Returns the arguments of a valid job file in `dir`.
pub(crate) fn job_args(dir: &std::path::Path) -> JobFile {
    JobFile { job: job_file(dir, JOB), overrides: Vec::new() }
}

/// Returns the arguments of a job in `dir` that does not train, with one setting changed, at a
/// master and with weights that are there.
pub(crate) fn measure_args(dir: &std::path::Path, set: &str) -> Measure {
    let model = dir.join("w.safetensors");
    std::fs::write(&model, "weights").expect("a folder for the weights");
    let mut reach = reach(Duration::from_secs(120));
    reach.master.url = Some("http://127.0.0.1:9".to_owned());
    Measure {
        file: JobFile { overrides: vec![set.to_owned()], ..job_args(dir) },
        model: model.display().to_string(),
        workers: None,
        ps: None,
        compute: Compute {
            threads: 1,
            device: Choice::Auto,
            data_root: None,
            data_patience: data::PATIENCE,
            numerics: Instructions::Native,
        },
        reach,
        json: false,
    }
}

impl App {
    /// Returns the lines on stdout.
    pub(crate) fn facts(&self) -> String {
        self.screen.facts.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    /// Returns the lines on stderr.
    pub(crate) fn said(&self) -> String {
        self.screen.lines.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }
}

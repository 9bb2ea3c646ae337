//! What every verb and every role gets from the program: settings, the terminal, the way out, and the way to a master.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use net::channel::Dialer;
use net::security::Keys;
use proto::pb;

use crate::args::{MasterUrl, Reach};
use crate::client::Client;
use crate::config::Environment;
use crate::out::Written;
use crate::out::summary::Summary;
use crate::signals::Stop;
use crate::telemetry::metrics::Numbers;
use crate::terminal::report;
use crate::terminal::screen::Screen;

/// One run of the program.
pub(crate) struct App {
    pub(crate) environment: Environment,
    /// The networks that `model.builtin` can name.
    pub(crate) registry: model::Registry,
    pub(crate) screen: Screen,
    pub(crate) stop: Stop,
    pub(crate) dialer: Dialer,
    pub(crate) numbers: Numbers,
}

impl App {
    /// The program's name as the user typed it.
    pub(crate) fn program(&self) -> &str {
        &self.environment.program
    }

    /// A command about a job for the user to copy. It reaches the same master with the same keys.
    pub(crate) fn command(&self, verb: &str, job: &str, reach: &Reach) -> String {
        let MasterUrl { url, keys } = &reach.master;
        let master = url.as_ref().map(|url| format!(" --master {url}")).unwrap_or_default();
        let files = [
            ("--tls-ca", &keys.tls_ca),
            ("--tls-cert", &keys.tls_cert),
            ("--tls-key", &keys.tls_key),
            ("--token-file", &keys.token_file),
        ];
        let given = |(flag, path): (&str, &Option<_>)| {
            path.as_ref().map(|path: &PathBuf| format!(" {flag} {}", path.display()))
        };
        let keys: String = files.into_iter().filter_map(given).collect();
        format!("{} {verb} {job}{master}{keys}", self.program())
    }

    /// A client of the master that the user means.
    ///
    /// # Errors
    /// The keys cannot be read, or the URL is wrong.
    pub(crate) fn client(&self, reach: &Reach) -> Result<Client> {
        let keys = Keys::load(reach.master.keys.over(&self.environment.keys))?;
        let url = self.environment.master(reach.master.url.as_deref(), &keys);
        Client::new(&self.dialer.clone().with(keys), &url, reach.master_timeout, self.screen.clone())
    }

    /// The note of a result that was not written here: where it is.
    pub(crate) fn results_elsewhere(&self, job: &str, reach: &Reach) -> String {
        format!("the master has its results: {} --out DIR", self.command("fetch", job, reach))
    }

    /// Shows how a job ended. Returns true for a job that succeeded.
    ///
    /// # Errors
    /// The results could not be written. The job's end is shown all the same.
    pub(crate) fn show_result(
        &self,
        status: &pb::JobStatus,
        written: Result<Option<Written>>,
        elsewhere: &str,
        json: bool,
    ) -> Result<bool> {
        let files = written.as_ref().ok().and_then(Option::as_ref);
        let printed = self.screen.print(&if json {
            Summary::new(status).to_line()
        } else {
            report::result(status, files, elsewhere)
        });
        // A lost result matters more than a reader of the output that left.
        written.with_context(|| format!("the results of {} are not complete", status.name))?;
        printed?;
        Ok(report::is_success(status.state))
    }
}

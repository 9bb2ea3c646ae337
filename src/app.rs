//! The program's state for verbs and roles: settings, the terminal, the request to stop, and the
//! connections to a master.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use client::report::Summary;
use client::results::{Copy, Folder, Written};
use client::{Client, JobStatus, Notices};
use net::channel::Dialer;
use net::security::Keys;

use crate::args::{MasterUrl, Reach};
use crate::config::Environment;
use crate::launch::guard::Guard;
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
    /// Starts processes of scripts. `None`: this run of the program has none.
    pub(crate) guard: Option<Guard>,
}

impl App {
    /// Returns the program's name as the user typed it.
    pub(crate) fn program(&self) -> &str {
        &self.environment.program
    }

    /// Returns what starts processes of scripts.
    ///
    /// # Errors
    /// There is none, which is an error in [`start`](crate::main_with).
    pub(crate) fn guard(&self) -> Result<Guard> {
        self.guard.clone().context("this program was started without the process that starts scripts")
    }

    /// Returns a command about a job for the user to copy. It reaches the same master with the same
    /// keys.
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

    /// Returns a client of the master that the user means.
    ///
    /// # Errors
    /// The keys cannot be read, or the URL is wrong.
    pub(crate) fn client(&self, reach: &Reach) -> Result<Client> {
        let keys = Keys::load(reach.master.keys.over(&self.environment.keys))?;
        let url = self.environment.master(reach.master.url.as_deref(), &keys);
        let client = Client::new(&self.dialer.clone().with(keys), &url, reach.master_timeout);
        Ok(client.map_err(|error| Flagged("--master:", error))?.with_notices(self.notices()))
    }

    /// Notices that go to the screen.
    pub(crate) fn notices(&self) -> Notices {
        let screen = self.screen.clone();
        Notices::new(move |notice| screen.line(&notice.to_string()))
    }

    /// Returns the folder of `--out`, with the events of an earlier run if the job goes on from it.
    ///
    /// # Errors
    /// The folder cannot be written, or its events cannot be read.
    pub(crate) fn out(&self, dir: &Path, resumes: bool) -> Result<Folder> {
        let out = Folder::prepare(dir).map_err(|error| Flagged("--out", error))?;
        Ok(if resumes { out.resuming()? } else { out })
    }

    /// Returns the place of `--upload`. It may have results of an earlier run if the job goes on
    /// from it.
    ///
    /// # Errors
    /// The URL leads nowhere, cannot be written, or has results that are to stay.
    pub(crate) async fn upload(&self, url: Option<&str>, resumes: bool) -> Result<Option<Copy>> {
        let Some(url) = url else { return Ok(None) };
        if url.starts_with("memory:") {
            bail!(
                "--upload {url}: memory:// is the memory of one process, and ends with it; set a path or another URL"
            );
        }
        let url = &client::absolute(url)?;
        let copy = Copy::prepare(&self.environment.stores, url, resumes).await;
        Ok(Some(copy.map_err(|error| Flagged("--upload", error))?))
    }

    /// Returns the note for a user whose results were not written here: how to fetch them.
    pub(crate) fn results_elsewhere(&self, job: &str, reach: &Reach) -> String {
        format!("the master has its results: {} --out DIR", self.command("fetch", job, reach))
    }

    /// Shows how a job ended. Returns true for a job that succeeded.
    ///
    /// # Errors
    /// The results could not be written. The job's end is shown all the same.
    pub(crate) fn show_result(
        &self,
        status: &JobStatus,
        written: client::Result<Option<Written>>,
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
        Ok(status.state().is_success())
    }
}

/// An error about the value of a flag, with the flag before its message.
#[derive(Debug)]
struct Flagged(&'static str, client::Error);

impl fmt::Display for Flagged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(flag, error) = self;
        write!(f, "{flag} {error}")
    }
}

impl Error for Flagged {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.1.source()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use client::pipe::Network;

    use crate::fake::{app, reach};

    #[tokio::test(start_paused = true)]
    async fn a_user_sees_that_the_master_is_waited_for() {
        let app = app(&Network::new());
        let client = app.client(&reach(Duration::from_secs(10))).unwrap();
        client.list().await.unwrap_err();
        let said = app.said();
        assert!((3..=4).contains(&said.lines().count()), "{said}");
        assert!(said.starts_with("waiting for the master at http://127.0.0.1:4700: "), "{said}");
    }

    #[test]
    fn a_url_that_is_none_names_its_flag() {
        let mut reach = reach(Duration::ZERO);
        reach.master.url = Some("ftp://m".to_owned());
        let error = app(&Network::new()).client(&reach).unwrap_err();
        assert!(error.to_string().starts_with("--master: "), "{error}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_names_its_flag_and_the_cause() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "in the way").unwrap();
        let out = |name: &str| app(&Network::new()).out(&dir.path().join(name), false).unwrap_err();
        let error = format!("{:#}", out("file"));
        assert!(error.starts_with("--out /") && error.ends_with("is a file; choose a folder"), "{error}");
        let error = format!("{:#}", out("file/below"));
        assert!(error.contains("choose another folder: Not a directory"), "{error}");
    }
}

//! The agent of a cluster: it runs processes of scripts that users sent to the master.
//!
//! ```text
//!   attend        a stream with the master: what runs here, and what is to run here
//!   files         description and bundle of a script, unpacked into a private folder
//!   packages      what its interpreter lacks of what a script requires
//!   environments  what was installed for scripts, if the operator lets agents install
//!   reach         what processes reach by way of this agent: masters, and the ps of their jobs
//!   tails         the newest lines of each process, on their way to the master
//!   launch        a process group, its restarts and its log, as for `ebb run SCRIPT.py`
//! ```
//!
//! The master says which processes are to run. A process that it does not list is ended, and one
//! that it lists is started. The agent forgets a process that has left once it is not listed.

mod attend;
mod environments;
mod files;
mod limits;
mod packages;
mod reach;
mod tails;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use client::Dialer;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use model::Device;
use net::channel::{MESSAGE_BYTES_MAX, Purpose};
use net::failover::Failover;
use proto::pb;
use proto::pb::scripts_client::ScriptsClient;
use proto::retry::Retry;
use proto::script::{LINES_TOLD, told};
use proto::status::Failure;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::environments::{Asking, Environments};
use self::files::Files;
pub(crate) use self::limits::Allowed;
use self::reach::Reach;
use self::tails::Tails;
use crate::launch::devices;
use crate::launch::guard::Guard;
use crate::launch::processors::Processors;
use crate::launch::redaction::Redaction;
use crate::launch::restarts::{Left, Stage};
use crate::launch::slot::{Gone, Hear, Slot};
use crate::launch::user::User;
use crate::terminal::screen::Screen;

/// Time from SIGTERM to SIGKILL for processes that are to end. They hand back their leases.
const GRACE: Duration = Duration::from_secs(30);

/// A process of a script: the script, and the number of the process in it.
type Key = (u64, u32);

/// What an agent is made of.
#[derive(Debug)]
pub(crate) struct Options {
    /// Name of the agent, for people.
    pub(crate) name: String,
    /// URLs of the master, with commas between them.
    pub(crate) master: String,
    /// Largest number of processes at a time.
    pub(crate) processes: u32,
    /// The Python interpreter.
    pub(crate) python: PathBuf,
    /// Variables of this process that processes of scripts do not have.
    pub(crate) hidden: Vec<String>,
    /// Variables that all processes of scripts have.
    pub(crate) variables: Vec<(String, String)>,
    /// Devices on which the processes take turns. Empty: they see what this process sees.
    pub(crate) devices: Vec<Device>,
    /// Processors near each device, where its processes stay.
    pub(crate) processors: BTreeMap<Device, Processors>,
    /// The devices to which CUDA limits this process.
    pub(crate) visible: Option<String>,
    /// The user as whom the processes run. `None`: that of this process.
    pub(crate) user: Option<User>,
    /// Folder below which the agent has a private one.
    pub(crate) scratch: PathBuf,
    /// What may be installed for scripts. `None`: nothing.
    pub(crate) allowed: Option<Allowed>,
    /// The only variables of this process that programs have which install.
    pub(crate) programs: Vec<(String, String)>,
    /// Starts the processes.
    pub(crate) guard: Guard,
}

/// An agent.
#[derive(Debug)]
pub(crate) struct Agent {
    options: Options,
    /// Random number of this start.
    id: u64,
    dialer: Dialer,
    masters: Failover,
    client: ScriptsClient<Failover>,
    files: Files,
    environments: Environments,
    tails: Tails,
    screen: Screen,
    /// The private folder. It is removed with the agent.
    folder: TempDir,
}

/// A process that this agent has.
enum Held {
    /// It runs, or is started again. The token ends it.
    Running(CancellationToken),
    /// It has left for good, and the master has not answered since.
    Left(pb::ProcessLeft),
}

impl Agent {
    /// Creates an agent, with an empty folder that only this user can read.
    ///
    /// # Errors
    /// The folder cannot be made, or the URL is wrong.
    pub(crate) fn new(options: Options, dialer: &Dialer, screen: Screen) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ebb-scripts-").tempdir_in(&options.scratch);
        let folder = folder.with_context(|| format!("a folder below {}", options.scratch.display()))?;
        let private = |mode| std::fs::DirBuilder::new().mode(mode).create(folder.path().join(LOGS));
        private(0o700).context("the folder for logs of scripts")?;
        if options.user.is_some() {
            // The user passes through to the files of the scripts, and cannot list them.
            let through = std::fs::Permissions::from_mode(0o711);
            std::fs::set_permissions(folder.path(), through).context("the folder for scripts")?;
        }
        let mut id = [0; 8];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty()).context("a random number")?;
        let masters = Failover::new(dialer, &options.master, Purpose::Control)?;
        let client = ScriptsClient::new(masters.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let files = Files::new(client.clone(), folder.path(), options.user.clone());
        let environments = Environments::new(
            folder.path(),
            environments::Options {
                allowed: options.allowed.clone(),
                python: options.python.clone(),
                user: options.user.clone(),
                hidden: options.hidden.clone(),
                programs: options.programs.clone(),
                guard: options.guard.clone(),
            },
        )?;
        // The master takes 0 for none.
        let id = u64::from_le_bytes(id).max(1);
        let (dialer, tails) = (dialer.clone(), Tails::new());
        Ok(Self { options, id, dialer, masters, client, files, environments, tails, screen, folder })
    }

    /// Returns the folder with the logs of processes.
    pub(crate) fn logs(&self) -> PathBuf {
        self.folder.path().join(LOGS)
    }

    /// Runs processes as the master says, until `stop`. Then it ends them.
    ///
    /// # Errors
    /// The master refuses this agent, or its guard has ended.
    pub(crate) async fn run(&self, stop: &CancellationToken) -> Result<()> {
        let (order, ordered) = watch::channel(BTreeSet::new());
        let (report, reported) = watch::channel(Vec::new());
        let attending = attend::attend(self, &order, reported);
        tokio::select! {
            biased;
            () = self.supervise(ordered, &report, stop) => Ok(()),
            lost = self.options.guard.lost() => Err(lost.into()),
            refused = attending => Err(refused).context("the master takes no processes of scripts from this agent"),
        }
    }

    async fn supervise(
        &self,
        mut ordered: watch::Receiver<BTreeSet<Key>>,
        report: &watch::Sender<Vec<pb::ProcessReport>>,
        stop: &CancellationToken,
    ) {
        let (mut held, mut running) = (BTreeMap::new(), FuturesUnordered::new());
        let mut placed = BTreeMap::<Key, Device>::new();
        loop {
            let stops = stop.is_cancelled();
            if stops && running.is_empty() {
                return;
            }
            if !stops {
                let ordered = ordered.borrow_and_update().clone();
                for key in follow(&mut held, &ordered, self.options.processes as usize) {
                    let token = stop.child_token();
                    held.insert(key, Held::Running(token.clone()));
                    let device = devices::free(&self.options.devices, placed.values().copied());
                    placed.extend(device.map(|device| (key, device)));
                    running.push(self.process(key, device, token));
                }
                self.files.keep(&held.keys().map(|(script, _)| *script).collect());
            }
            let reports = reports(&held);
            report.send_if_modified(|last| {
                *last != reports && {
                    *last = reports;
                    true
                }
            });
            tokio::select! {
                biased;
                () = stop.cancelled(), if !stops => {}
                Some((key, left)) = running.next() => {
                    placed.remove(&key);
                    match left {
                        Some(left) => drop(held.insert(key, Held::Left(left))),
                        None => drop(held.remove(&key)),
                    }
                }
                Ok(()) = ordered.changed(), if !stops => {}
            }
        }
    }

    /// Runs a process until it leaves for good. `None`: it was ended.
    async fn process(
        &self,
        key: Key,
        device: Option<Device>,
        stop: CancellationToken,
    ) -> (Key, Option<pb::ProcessLeft>) {
        let (script, process) = key;
        let gone = self.run_process(key, device, &stop).await;
        if stop.is_cancelled() {
            return (key, None);
        }
        let left = match gone {
            Ok(gone) => self.left(&gone),
            Err(error) => {
                self.screen.line(&format!("process {process} of script {script}: {error:#}"));
                let (kind, reason) = (pb::LeftKind::GaveUp.into(), "could not run".to_owned());
                let lines = format!("{error:#}").lines().take(LINES_TOLD).map(told).collect();
                Some(pb::ProcessLeft { kind, reason, lines })
            }
        };
        (key, left)
    }

    async fn run_process(
        &self,
        (script, process): Key,
        device: Option<Device>,
        stop: &CancellationToken,
    ) -> Result<Gone> {
        let name = async {
            let files = self.files.get(script).await?;
            Ok::<_, anyhow::Error>((format!("{}-{script}-{process}", files.description.name), files))
        };
        let (name, files) = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(Gone { name: String::new(), left: Left::Stopped, last: Vec::new() }),
            found = name => found?,
        };
        let tails = self.tails.clone();
        let hear = Hear::new(move |line| tails.push((script, process), line));
        let slot = Slot::hearing(name, &self.logs(), self.screen.clone(), hear)?;
        let asking = Asking { script, owner: &files.owner, requirements: files.requirements.as_deref() };
        let interpreter = self.environments.interpreter(&asking, &slot.voice(), stop).await?;
        let launched = self.launched(script, &files, &interpreter.python);
        let slot = slot.with(devices::variables(device, self.options.visible.as_deref()));
        let slot = slot.on(device.and_then(|device| self.options.processors.get(&device).cloned()));
        let (dialer, masters) = (self.dialer.clone(), self.masters.clone());
        let reach = Reach::new(script, dialer, masters, &self.options.master, self.client.clone());
        let secrets = files.secrets.iter().map(|secret| (secret.name.as_str(), secret.value.as_str()));
        let slot =
            slot.redacting(Redaction::new(secrets)).forwarding(async move |relay| reach.forward(relay).await);
        slot.run(&launched, async || self.stage(script, stop).await, stop).await
    }

    /// Returns how processes of a script are started.
    fn launched(&self, script: u64, files: &files::Unpacked, python: &Path) -> crate::launch::slot::Script {
        let Options { master, hidden, variables, .. } = &self.options;
        let description = &files.description;
        let of_agent = [
            ("EBBFLOW_MASTER", master.clone()),
            ("EBBFLOW_SCRIPT", script.to_string()),
            ("EBBFLOW_JOB", description.name.clone()),
            ("EBBFLOW_WORKERS", description.processes.to_string()),
        ];
        let of_agent = of_agent.into_iter().map(|(name, value)| (name.to_owned(), value));
        let of_user =
            description.variables.iter().map(|variable| (variable.name.clone(), variable.value.clone()));
        let secret = files.secrets.iter().map(|secret| (secret.name.clone(), secret.value.clone()));
        // So that the process leaves them out of what it tells the master.
        let names = (SECRETS.to_owned(), description.secrets.join(","));
        let names = (!description.secrets.is_empty()).then_some(names);
        crate::launch::slot::Script {
            python: python.to_owned(),
            arguments: std::iter::once(&description.entry)
                .chain(&description.arguments)
                .map(Into::into)
                .collect(),
            folder: Some(files.folder.clone()),
            // Those of the user can set none of the agent's, and come after the usual ones.
            variables: variables
                .iter()
                .cloned()
                .chain(of_user)
                .chain(secret)
                .chain(of_agent)
                .chain(names)
                .collect(),
            hidden: hidden.clone(),
            grace: GRACE,
            user: self.options.user.clone(),
            guard: self.options.guard.clone(),
        }
    }

    /// Asks the master where the jobs of a script are. Its answer is newer than any call of a
    /// process that has ended.
    async fn stage(&self, script: u64, stop: &CancellationToken) -> Result<Stage> {
        let ask = || async {
            let reply =
                self.client.clone().stage(pb::StageRequest { script }).await.map_err(Failure::from)?;
            Ok::<_, Failure>(reply.into_inner().stage())
        };
        let asking = net::retry::repeat(Retry::unlimited(), self.id, |_, _| {}, ask);
        let stage = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(Stage::Ended),
            stage = asking => stage?,
        };
        Ok(match stage {
            pb::ScriptStage::Unjoined => Stage::Unjoined,
            pb::ScriptStage::Training => Stage::Training,
            pb::ScriptStage::Ended | pb::ScriptStage::Unspecified => Stage::Ended,
        })
    }

    /// Returns what the master hears of a process that has left; `None`: it was ended.
    fn left(&self, gone: &Gone) -> Option<pb::ProcessLeft> {
        let name = &gone.name;
        let (kind, reason) = match gone.left {
            Left::Stopped => return None,
            Left::Finished => (pb::LeftKind::Done, "has finished".to_owned()),
            Left::Drained => (pb::LeftKind::Done, "left before the end of the job".to_owned()),
            Left::FailedLate(exit) => (pb::LeftKind::Done, format!("{exit} after the end of the job")),
            Left::Unjoined(exit) if exit.is_good() => (pb::LeftKind::Done, exit.to_string()),
            Left::Unjoined(exit) => (pb::LeftKind::Wrong, exit.to_string()),
            Left::GaveUp(exit) => (pb::LeftKind::GaveUp, format!("{exit} too often")),
        };
        self.screen.line(&format!("{name} {reason}"));
        let skip = gone.last.len().saturating_sub(LINES_TOLD);
        let lines = gone.last.iter().skip(skip).map(|line| told(line)).collect();
        Some(pb::ProcessLeft { kind: kind.into(), reason, lines })
    }
}

/// The variable with the names of a script's secrets.
const SECRETS: &str = "EBBFLOW_SECRETS";

/// Name of the folder with logs.
const LOGS: &str = "logs";

/// Ends processes that are not ordered, forgets those that have left, and returns those to start.
/// Never more than `processes` are there: one that ends still has the memory of its device, so
/// another one waits until it is gone.
fn follow(held: &mut BTreeMap<Key, Held>, ordered: &BTreeSet<Key>, processes: usize) -> Vec<Key> {
    held.retain(|key, held| match held {
        _ if ordered.contains(key) => true,
        Held::Running(token) => {
            token.cancel();
            true
        }
        Held::Left(_) => false,
    });
    let there = held.values().filter(|held| matches!(held, Held::Running(_))).count();
    let new = ordered.iter().filter(|key| !held.contains_key(*key)).copied();
    new.take(processes.saturating_sub(there)).collect()
}

/// Returns what the master hears of all processes.
fn reports(held: &BTreeMap<Key, Held>) -> Vec<pb::ProcessReport> {
    let report = |(&(script, process), held): (&Key, &Held)| {
        let left = match held {
            // The master knows that it ends.
            Held::Running(token) if token.is_cancelled() => return None,
            Held::Running(_) => None,
            Held::Left(left) => Some(left.clone()),
        };
        Some(pb::ProcessReport { script, process, left })
    };
    held.iter().filter_map(report).collect()
}

/// Returns the line that an operator sees at the start. `has_keys`: this process has a token or a
/// certificate.
pub(crate) fn warning(
    processes: u32,
    devices: &[Device],
    user: Option<&User>,
    has_keys: bool,
    logs: &Path,
) -> String {
    let means = match (user, has_keys) {
        (Some(user), _) => format!("as user {}, with the rights of this user", user.name),
        (None, false) => RIGHTS.to_owned(),
        (None, true) => format!("{RIGHTS}, and can read its token and its key; --script-user separates them"),
    };
    let devices: Vec<_> = devices.iter().map(ToString::to_string).collect();
    let on = if devices.is_empty() { String::new() } else { format!(" on {}", devices.join(", ")) };
    format!("scripts of users run here, {processes} at a time{on}: {means}; logs in {}", logs.display())
}

/// What it means that scripts run as the user of this process.
const RIGHTS: &str = "everyone who may send scripts to this master has the rights of this process";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_started_ended_and_forgotten_as_the_master_says() {
        let running = CancellationToken::new();
        let left = pb::ProcessLeft { kind: pb::LeftKind::Done.into(), ..Default::default() };
        let mut held = BTreeMap::from([
            ((7, 0), Held::Running(running.clone())),
            ((7, 1), Held::Left(left.clone())),
            ((7, 2), Held::Left(left)),
        ]);
        assert_eq!(follow(&mut held, &BTreeSet::from([(7, 0), (7, 1), (8, 0)]), 2), [(8, 0)]);
        assert!(held.len() == 2 && !running.is_cancelled());
        assert!(reports(&held)[1].left.is_some());
        assert!(follow(&mut held, &BTreeSet::new(), 2).is_empty());
        assert!(held.len() == 1 && running.is_cancelled(), "it stays until it has ended");
        assert!(
            follow(&mut held, &BTreeSet::from([(7, 0)]), 2).is_empty(),
            "it is started again once it has"
        );
        assert!(reports(&held).is_empty());
    }

    #[test]
    fn a_process_waits_for_the_place_of_one_that_ends() {
        let ending = CancellationToken::new();
        let mut held = BTreeMap::from([((7, 0), Held::Running(ending.clone()))]);
        let ordered = BTreeSet::from([(8, 0), (8, 1), (9, 0)]);
        assert_eq!(follow(&mut held, &ordered, 2), [(8, 0)], "the oldest script goes first");
        held.insert((8, 0), Held::Running(CancellationToken::new()));
        assert!(ending.is_cancelled() && follow(&mut held, &ordered, 2).is_empty());
        held.remove(&(7, 0));
        assert_eq!(follow(&mut held, &ordered, 2), [(8, 1)]);
        // One that has left takes no place.
        held.insert((8, 0), Held::Left(pb::ProcessLeft::default()));
        assert_eq!(follow(&mut held, &ordered, 2), [(8, 1), (9, 0)]);
    }

    #[test]
    fn the_start_says_what_it_means() {
        let line = warning(2, &[], None, false, Path::new("/l"));
        assert!(line.contains("2 at a time: ") && line.contains("has the rights of this process"), "{line}");
        let line = warning(2, &[Device::Cuda(0), Device::Cuda(2)], None, true, Path::new("/l"));
        assert!(line.contains("2 at a time on cuda:0, cuda:2: "), "{line}");
        assert!(line.contains("can read its token and its key; --script-user"), "{line}");
        let user = User { name: "ebb-scripts".into(), id: 7, group: 7, home: "/".into() };
        let line = warning(2, &[], Some(&user), true, Path::new("/l"));
        assert!(
            line.contains("as user ebb-scripts") && !line.contains("has the rights of this process"),
            "{line}"
        );
    }
}

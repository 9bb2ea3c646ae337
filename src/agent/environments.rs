//! Environments with what scripts require, beside the packages of the interpreter: one for each
//! list of requirements, interpreter and owner of scripts.
//!
//! An environment is `KEY/environment`, which belongs to the user of the scripts. Only this agent
//! writes `KEY/complete`, so an install that was interrupted begins again.

use std::cell::{Cell, RefCell};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, bail};
use proto::artifact::sha256_hex;
use proto::requirements::FILE;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use super::limits::{Allowed, Limit};
use super::packages::{self, PROGRAM, Said};
use crate::launch::copying::Voice;
use crate::launch::guard::Guard;
use crate::launch::helper;
use crate::launch::program::Program;
use crate::launch::restarts::Exit;
use crate::launch::user::User;

/// Environments that no process uses and that are kept for the next one, at most.
const UNUSED_MAX: usize = 4;

/// Lines of pip that an error shows.
const LINES_TOLD: usize = 30;

/// Why an install ends that nobody waits for.
const STOPPED: &str = "this worker stops, or the script is over";

/// What environments are made of.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) allowed: Option<Allowed>,
    /// The Python interpreter of the agent.
    pub(super) python: PathBuf,
    /// The user as whom scripts run.
    pub(super) user: Option<User>,
    /// Variables of this process that no program for a script has.
    pub(super) hidden: Vec<String>,
    /// The only variables of this process that programs have which install.
    pub(super) programs: Vec<(String, String)>,
    pub(super) guard: Guard,
}

/// The environments of an agent.
#[derive(Debug)]
pub(super) struct Environments {
    options: Options,
    /// Folder of all of them.
    folder: PathBuf,
    /// The one that was used last comes last.
    known: RefCell<Vec<Rc<Environment>>>,
    /// Number of those that were removed.
    removed: Cell<u64>,
}

/// An environment, or the place of one.
#[derive(Debug)]
struct Environment {
    folder: PathBuf,
    /// Held by who makes it. Why it could not be made for a script: its other processes need not
    /// try.
    failed: Mutex<Option<(u64, String)>>,
}

impl Environment {
    /// Path of its interpreter.
    fn python(&self) -> PathBuf {
        self.folder.join("environment/bin/python")
    }

    fn is_complete(&self) -> bool {
        self.folder.join("complete").exists()
    }
}

/// An interpreter that satisfies the requirements of a script. Its environment stays until this is
/// dropped.
#[derive(Debug)]
pub(super) struct Interpreter {
    pub(super) python: PathBuf,
    _environment: Option<Rc<Environment>>,
}

/// The script for which an interpreter is looked for.
#[derive(Debug)]
pub(super) struct Asking<'a> {
    pub(super) script: u64,
    /// Its owner.
    pub(super) owner: &'a str,
    /// The file with its requirements, which only this agent writes. `None`: it has none.
    pub(super) requirements: Option<&'a Path>,
}

impl Environments {
    /// Creates a place for environments below the folder `parent`.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub(super) fn new(parent: &Path, options: Options) -> Result<Self> {
        let folder = parent.join("environments");
        make_folder(&folder, options.user.as_ref()).context("the folder for environments of scripts")?;
        Ok(Self { options, folder, known: RefCell::default(), removed: Cell::default() })
    }

    /// Returns an interpreter that satisfies the requirements of a script. What it takes to make
    /// one is said to `voice`.
    ///
    /// # Errors
    /// Nothing may be installed, or the install fails or reaches a bound. The lines are for people.
    pub(super) async fn interpreter(
        &self,
        asking: &Asking<'_>,
        voice: &Voice,
        stop: &CancellationToken,
    ) -> Result<Interpreter> {
        let Options { allowed, python, guard, .. } = &self.options;
        let own = || Interpreter { python: python.clone(), _environment: None };
        let Some(file) = asking.requirements else { return Ok(own()) };
        let answer = packages::ask(self.as_script(python), file, guard, stop).await?;
        if answer.wrong.is_empty() {
            return Ok(own());
        }
        let Some(allowed) = allowed else {
            let refusal = answer.refusal();
            refusal.lines().for_each(|line| voice(line));
            bail!(refusal)
        };
        let requirements = fs::read_to_string(file).with_context(|| format!("read {FILE}"))?;
        let key = [&answer.interpreter, asking.owner, &requirements].join("\0");
        let environment = self.known(&sha256_hex(key.as_bytes()));
        let mut failed = tokio::select! {
            biased;
            () = stop.cancelled() => bail!(STOPPED),
            failed = environment.failed.lock() => failed,
        };
        if let Some((script, reason)) = &*failed
            && *script == asking.script
        {
            bail!("{reason}");
        }
        if !environment.is_complete() {
            voice(&format!("-- {FILE}: installing from {} --", allowed.index));
            self.clear();
            let made = self.make(&environment, allowed, file, voice, stop).await;
            if let Err(error) = made {
                // So that a failure leaves nothing.
                remove(&environment.folder).await.context("remove what is left of an environment")?;
                if !stop.is_cancelled() {
                    *failed = Some((asking.script, format!("{error:#}")));
                }
                return Err(error);
            }
            *failed = None;
        }
        drop(failed);
        Ok(Interpreter { python: environment.python(), _environment: Some(environment) })
    }

    /// Returns the environment of this key, and counts it as used.
    fn known(&self, key: &str) -> Rc<Environment> {
        let folder = self.folder.join(key);
        let mut known = self.known.borrow_mut();
        let found = known.iter().position(|environment| environment.folder == folder);
        let environment = found.map_or_else(
            || Rc::new(Environment { folder, failed: Mutex::default() }),
            |found| known.remove(found),
        );
        known.push(environment.clone());
        environment
    }

    /// Removes the environments that nobody uses, except those that were used last.
    fn clear(&self) {
        let mut known = self.known.borrow_mut();
        let unused = |environment: &Rc<Environment>| Rc::strong_count(environment) == 1;
        let count = known.iter().filter(|environment| unused(environment)).count();
        let mut excess = count.saturating_sub(UNUSED_MAX);
        known.retain(|environment| {
            let goes = excess > 0 && unused(environment);
            if goes {
                excess -= 1;
                self.removed.set(self.removed.get() + 1);
                // Under another name, so that the next one of its key does not wait.
                let gone = self.folder.join(format!("removed-{}", self.removed.get()));
                // One that failed has no folder.
                if fs::rename(&environment.folder, &gone).is_ok() {
                    tokio::task::spawn_blocking(move || remove_now(&gone));
                }
            }
            !goes
        });
    }

    /// Makes an environment and installs what `file` requires.
    async fn make(
        &self,
        environment: &Environment,
        allowed: &Allowed,
        file: &Path,
        voice: &Voice,
        stop: &CancellationToken,
    ) -> Result<()> {
        let folder = &environment.folder;
        // Of an install that was interrupted.
        remove(folder).await.context("remove an incomplete environment")?;
        let user = self.options.user.as_ref();
        make_folder(folder, user).context("a folder for an environment")?;
        for name in ["environment", "temporary"] {
            let path = folder.join(name);
            fs::DirBuilder::new().mode(0o700).create(&path).context("a folder for an environment")?;
            let given = user.map_or(Ok(()), |user| chown(&path, Some(user.id), Some(user.group)));
            given.context("give an environment to --script-user")?;
        }
        let limit = Limit { allowed, folder, until: tokio::time::Instant::now() + allowed.time };
        let mut make = self.bare(&self.options.python, folder);
        make.args(["-c", PROGRAM, "make"]).args([folder.join("environment")]);
        self.step(&make, "the virtual environment: Python", voice, &limit, stop).await?;
        let mut pip = self.bare(&environment.python(), folder);
        pip.args(["-I", "-m", "pip", "install", "--isolated", "--no-input", "--disable-pip-version-check"])
            .args(["--no-cache-dir", "--no-color", "--progress-bar", "off", "--only-binary", ":all:"])
            .args(["--index-url", &allowed.index, "--requirement"])
            .args([file]);
        self.step(&pip, "pip", voice, &limit, stop).await?;
        let answer =
            packages::ask(self.as_script(&environment.python()), file, &self.options.guard, stop).await?;
        if !answer.wrong.is_empty() {
            bail!("{FILE}: pip has installed it, and the environment does not satisfy it:{}", answer.lines());
        }
        if let Some(package) = of_a_url(folder) {
            bail!(
                "{FILE}: {package} came from a URL that another package names, and this worker installs wheels of {} \
                 alone",
                allowed.index
            );
        }
        remove(&folder.join("temporary")).await.context("remove temporary files of pip")?;
        fs::write(folder.join("complete"), "").context("mark an environment as complete")
    }

    /// Runs one step of an install. Its output goes to `voice`.
    async fn step(
        &self,
        program: &Program,
        name: &str,
        voice: &Voice,
        limit: &Limit<'_>,
        stop: &CancellationToken,
    ) -> Result<()> {
        let said = Said::new(LINES_TOLD);
        let (kept, shown) = (said.voice(), voice.clone());
        let both: Voice = Arc::new(move |line| {
            kept(line);
            shown(line);
        });
        let reached = async {
            tokio::select! {
                biased;
                () = stop.cancelled() => STOPPED.to_owned(),
                reason = limit.reached() => reason,
            }
        };
        let ended = helper::run(&self.options.guard, program, [both.clone(), both], reached).await;
        let reason = match ended.with_context(|| format!("{FILE}: {name}"))? {
            Ok(Exit::Code(0)) => match limit.size().await? {
                Some(reason) => reason,
                None => return Ok(()),
            },
            Ok(exit) => {
                format!("{name} {exit}; this worker installs wheels of {} alone", limit.allowed.index)
            }
            Err(reason) => reason,
        };
        voice(&format!("-- {FILE}: {reason} --"));
        Err(anyhow!("{FILE}: {reason}{}", said.lines()))
    }

    /// Returns a program of `python` with the packages and variables that processes of scripts
    /// find.
    fn as_script(&self, python: &Path) -> Program {
        let mut program = Program::new(python);
        program.without(&self.options.hidden).in_folder(&self.folder);
        if let Some(user) = &self.options.user {
            program.as_user(user).envs(user.variables());
        }
        program
    }

    /// Returns a program of `python` for an install in `folder`, which has nothing of this process
    /// but the way to its programs.
    fn bare(&self, python: &Path, folder: &Path) -> Program {
        let (mut program, temporary) = (Program::new(python), folder.join("temporary"));
        program.bare().envs(self.options.programs.iter().cloned());
        // No file of settings is read, neither that of the machine nor that of a user.
        program.envs([("PIP_CONFIG_FILE", "/dev/null"), ("LANG", "C.UTF-8")]);
        program.envs([("HOME", &temporary), ("TMPDIR", &temporary)]);
        if let Some(user) = &self.options.user {
            program.as_user(user);
        }
        program.in_folder(temporary);
        program
    }
}

/// Returns what pip installed that a package required by a URL; `None`: nothing.
fn of_a_url(folder: &Path) -> Option<String> {
    let below = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten();
    let mut packages =
        below(folder.join("environment/lib")).flat_map(|python| below(python.path().join("site-packages")));
    // pip writes this file for such packages alone.
    let found = packages.find(|package| package.path().join("direct_url.json").exists())?;
    Some(found.file_name().to_string_lossy().trim_end_matches(".dist-info").to_owned())
}

/// Makes a folder of this process, through which the user of scripts may pass.
fn make_folder(path: &Path, user: Option<&User>) -> io::Result<()> {
    let mode = if user.is_some() { 0o711 } else { 0o700 };
    fs::DirBuilder::new().mode(mode).create(path)?;
    // Whatever this process takes away from the modes of new files.
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

async fn remove(folder: &Path) -> Result<()> {
    let folder = folder.to_owned();
    Ok(tokio::task::spawn_blocking(move || remove_now(&folder)).await??)
}

/// Removes a folder, if it is there.
fn remove_now(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environments(folder: &Path) -> Environments {
        let options = Options {
            allowed: None,
            python: "python3".into(),
            user: None,
            hidden: Vec::new(),
            programs: Vec::new(),
            guard: Guard::here(),
        };
        Environments::new(folder, options).unwrap()
    }

    #[tokio::test]
    async fn environments_that_nobody_uses_are_removed_except_the_last_ones() {
        let dir = tempfile::tempdir().unwrap();
        let environments = environments(dir.path());
        let used = environments.known("used");
        for number in 0..UNUSED_MAX + 2 {
            let environment = environments.known(&number.to_string());
            make_folder(&environment.folder, None).unwrap();
        }
        make_folder(&used.folder, None).unwrap();
        // It was used last.
        environments.known("0");
        environments.clear();
        let known = |key: &str| environments.folder.join(key).exists();
        assert!(known("used") && known("0") && !known("1") && !known("2") && known("3"));
        assert!(Rc::ptr_eq(&environments.known("used"), &used));
        assert_eq!(environments.known.borrow().len(), UNUSED_MAX + 1);
    }
}

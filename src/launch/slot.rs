//! The place of one process of a script: it starts the process, keeps what it says, and starts it
//! again.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::future::LocalBoxFuture;
use net::relay::Relay;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::launch::copying::{Copying, Voice};
use crate::launch::guard::{Guard, Process};
use crate::launch::lines::Last;
use crate::launch::log::{BYTES_MAX, Log};
use crate::launch::processors::Processors;
use crate::launch::program::Program;
use crate::launch::redaction::Redaction;
use crate::launch::restarts::{Decision, Left, Restarts, Stage};
use crate::launch::user::User;
use crate::terminal::report::duration;
use crate::terminal::screen::Screen;

/// Lines of a process that an error shows.
pub(crate) const LINES_SHOWN: usize = 50;

/// How the processes of a script are started.
#[derive(Debug)]
pub(crate) struct Script {
    /// The Python interpreter.
    pub(crate) python: PathBuf,
    /// The script and its arguments.
    pub(crate) arguments: Vec<OsString>,
    /// Folder in which the processes begin. `None`: that of this process.
    pub(crate) folder: Option<PathBuf>,
    /// Variables that the processes have.
    pub(crate) variables: Vec<(String, String)>,
    /// Variables of this process that they do not have.
    pub(crate) hidden: Vec<String>,
    /// Time from SIGTERM to SIGKILL.
    pub(crate) grace: Duration,
    /// The user as whom they run. `None`: that of this process.
    pub(crate) user: Option<User>,
    /// Starts them, and ends what they leave behind.
    pub(crate) guard: Guard,
}

/// A process that has left for good.
#[derive(Debug)]
pub(crate) struct Gone {
    /// `worker-0`, and so on.
    pub(crate) name: String,
    /// Why it left.
    pub(crate) left: Left,
    /// Its last lines, at most [`LINES_SHOWN`].
    pub(crate) last: Vec<String>,
}

/// Receiver of what processes say, line by line.
pub(crate) struct Hear(Box<dyn Fn(&str) + Send + Sync>);

impl Hear {
    /// Creates a receiver that gives each line to `line`.
    pub(crate) fn new(line: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Box::new(line))
    }
}

impl std::fmt::Debug for Hear {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hear")
    }
}

/// Forwarding of the calls of one process, until its end.
struct Forward(Box<dyn Fn(Relay) -> LocalBoxFuture<'static, ()>>);

impl std::fmt::Debug for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Forward")
    }
}

/// The place of one process.
#[derive(Debug)]
pub(crate) struct Slot {
    name: String,
    output: Arc<Output>,
    restarts: Restarts,
    screen: Screen,
    /// Variables that its processes have beside those of the script.
    variables: Vec<(String, String)>,
    /// Processors on which its processes run. `None`: those of this process.
    processors: Option<Processors>,
    /// `None`: its processes reach the cluster themselves.
    forward: Option<Forward>,
    secrets: Redaction,
}

impl Slot {
    /// Creates the place of this name, with its log in `logs`. What its processes say goes to
    /// `screen` too.
    ///
    /// # Errors
    /// The log cannot be written.
    pub(crate) fn new(name: String, logs: &Path, screen: Screen) -> Result<Self> {
        let (shown, shown_name) = (screen.clone(), name.clone());
        let hear = Hear::new(move |line| shown.line(&format!("{shown_name} | {line}")));
        Self::hearing(name, logs, screen, hear)
    }

    /// Creates the place of this name, with its log in `logs`. What its processes say goes to
    /// `hear` too, and that they are started again to `screen`.
    ///
    /// # Errors
    /// The log cannot be written.
    pub(crate) fn hearing(name: String, logs: &Path, screen: Screen, hear: Hear) -> Result<Self> {
        let path = logs.join(format!("{name}.log"));
        let log = Log::create(&path, BYTES_MAX)
            .with_context(|| format!("the log {} cannot be written", path.display()))?;
        let kept = Kept { last: Last::new(LINES_SHOWN), log: Some(log) };
        let output = Output { name: name.clone(), screen: screen.clone(), hear, kept: Mutex::new(kept) };
        Ok(Self {
            name,
            output: Arc::new(output),
            restarts: Restarts::default(),
            screen,
            variables: Vec::new(),
            processors: None,
            forward: None,
            secrets: Redaction::default(),
        })
    }

    /// Gives the processes of this place variables that win over those of the script.
    pub(crate) fn with(mut self, variables: Vec<(String, String)>) -> Self {
        self.variables = variables;
        self
    }

    /// Lets the processes of this place run on these processors alone, if there are some.
    pub(crate) fn on(self, processors: Option<Processors>) -> Self {
        Self { processors, ..self }
    }

    /// Takes secrets out of all that its processes say.
    pub(crate) fn redacting(self, secrets: Redaction) -> Self {
        Self { secrets, ..self }
    }

    /// Returns a way to say lines as if its processes had said them.
    pub(crate) fn voice(&self) -> Voice {
        let output = self.output.clone();
        Arc::new(move |line| output.line(line))
    }

    /// Lets `forward` make the calls of its processes. Each process inherits a line to it.
    pub(crate) fn forwarding(mut self, forward: impl AsyncFn(Relay) + 'static) -> Self {
        let forward = std::rc::Rc::new(forward);
        let forward = move |relay| -> LocalBoxFuture<'static, ()> {
            let forward = forward.clone();
            Box::pin(async move { forward(relay).await })
        };
        self.forward = Some(Forward(Box::new(forward)));
        self
    }

    /// Runs processes of `script`, one after the other, until one leaves for good or `stop`.
    /// `stage` says where the jobs are.
    ///
    /// # Errors
    /// The interpreter cannot be started, the guard has ended, or `stage` fails.
    pub(crate) async fn run(
        mut self,
        script: &Script,
        stage: impl AsyncFn() -> Result<Stage>,
        stop: &CancellationToken,
    ) -> Result<Gone> {
        let begin = Instant::now();
        let left = loop {
            let began = begin.elapsed();
            let (mut process, relay) = self.start(script).await?;
            let streams = process.streams().with_context(|| format!("the output of {}", self.name))?;
            let voice = self.voice();
            let copies = streams.map(|stream| Copying::start(stream, voice.clone(), self.secrets.clone()));
            let ending = async {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => process.end(script.grace).await,
                    exit = process.wait() => exit,
                }
            };
            // Also while it ends: it hands back its leases.
            let forwarding = async {
                if let (Some(Forward(forward)), Some(relay)) = (&self.forward, relay) {
                    forward(relay).await;
                }
                std::future::pending::<std::convert::Infallible>().await
            };
            let ended = tokio::select! {
                biased;
                ended = ending => ended,
                never = forwarding => match never {},
            };
            for copy in copies {
                copy.finish().await;
            }
            let exit = ended.with_context(|| format!("the end of {}", self.name))?;
            if stop.is_cancelled() {
                break Left::Stopped;
            }
            match self.restarts.decide(exit, stage().await?, began, begin.elapsed()) {
                Decision::Leave(left) => break left,
                Decision::Restart(wait) => {
                    self.screen.line(&format!(
                        "{} {exit}; it is started again in {}",
                        self.name,
                        duration(wait)
                    ));
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => break Left::Stopped,
                        () = tokio::time::sleep(wait) => {}
                    }
                    if stage().await? == Stage::Ended {
                        break Left::Finished;
                    }
                }
            }
        };
        Ok(Gone { left, last: self.output.last(), name: self.name })
    }

    async fn start(&self, script: &Script) -> Result<(Process, Option<Relay>)> {
        let mut program = Program::new(&script.python);
        program.args(&script.arguments).envs(script.variables.iter().cloned()).without(&script.hidden);
        if let Some(user) = &script.user {
            program.as_user(user).envs(user.variables());
        }
        program.envs([("EBBFLOW_WORKER", &self.name)]).envs(self.variables.iter().cloned());
        if let Some(folder) = &script.folder {
            program.in_folder(folder);
        }
        if let Some(processors) = &self.processors {
            program.on(processors.clone());
        }
        let line = self.forward.as_ref().map(|_| Relay::pair()).transpose();
        let (relay, line) = line.context("a line to a process")?.unzip();
        let process = Process::start(&script.guard, &program, line).await.with_context(|| {
            format!("cannot start `{}`; choose the Python interpreter with --python", script.python.display())
        })?;
        Ok((process, relay))
    }
}

/// The way of a place's output to the screen, to the log and to the last lines.
#[derive(Debug)]
struct Output {
    name: String,
    screen: Screen,
    hear: Hear,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    last: Last,
    /// `None` after a failure.
    log: Option<Log>,
}

impl Output {
    fn line(&self, text: &str) {
        (self.hear.0)(text);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.last.push(text);
        if let Some(Err(error)) = kept.log.as_mut().map(|log| log.line(text)) {
            kept.log = None;
            self.screen.line(&format!(
                "warning: the log of {} cannot be written: {error}; its further lines are only shown",
                self.name
            ));
        }
    }

    fn last(&self) -> Vec<String> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).last.lines()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::launch::restarts::Exit;

    /// A script of `sh`, which stands for the interpreter.
    fn script(text: &str) -> Script {
        Script {
            python: "sh".into(),
            arguments: vec!["-c".into(), text.into()],
            folder: None,
            variables: vec![("GIVEN".to_owned(), "here".to_owned())],
            hidden: vec!["HOME".to_owned()],
            grace: Duration::from_secs(30),
            user: None,
            guard: Guard::here(),
        }
    }

    async fn run(text: &str, stage: Stage) -> (Gone, String, String) {
        let (dir, screen) = (tempfile::tempdir().unwrap(), Screen::default());
        let slot = Slot::new("worker-1".to_owned(), dir.path(), screen.clone()).unwrap();
        let stop = CancellationToken::new();
        let gone = slot.run(&script(text), async || Ok(stage), &stop).await.unwrap();
        let log = std::fs::read_to_string(dir.path().join("worker-1.log")).unwrap();
        let shown = screen.lines.lock().unwrap().join("\n");
        (gone, log, shown)
    }

    #[tokio::test]
    async fn output_is_shown_with_the_name_and_kept_whole() {
        let (gone, log, shown) =
            run("echo $EBBFLOW_WORKER $GIVEN $HOME; printf unfinished >&2", Stage::Ended).await;
        assert_eq!((gone.name.as_str(), gone.left), ("worker-1", Left::Finished));
        let mut lines: Vec<_> = log.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["unfinished", "worker-1 here"]);
        assert!(shown.contains("worker-1 | worker-1 here") && shown.contains("worker-1 | unfinished"));
        assert_eq!(gone.last.len(), 2);
    }

    #[tokio::test]
    async fn variables_of_a_place_win_over_those_of_the_script() {
        let (dir, screen) = (tempfile::tempdir().unwrap(), Screen::default());
        let slot = Slot::new("worker-1".to_owned(), dir.path(), screen).unwrap();
        let slot = slot.with(vec![("GIVEN".to_owned(), "of the place".to_owned())]);
        let stop = CancellationToken::new();
        let gone = slot.run(&script("echo $GIVEN"), async || Ok(Stage::Ended), &stop).await.unwrap();
        assert_eq!(gone.last, ["of the place"]);
    }

    // Time that is paused moves on when nothing else can happen.
    #[tokio::test(start_paused = true)]
    async fn a_process_that_fails_is_started_again_until_that_is_too_often() {
        let (gone, log, shown) = run("echo begun; exit 5", Stage::Training).await;
        assert_eq!(gone.left, Left::GaveUp(Exit::Code(5)));
        assert_eq!(log, "begun\n".repeat(4));
        assert_eq!(shown.matches("started again in").count(), 3, "{shown}");
        assert!(shown.contains("worker-1 ended with exit code 5; it is started again in 1.0 s"), "{shown}");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_started_again_once_the_jobs_have_ended() {
        let (dir, asked) = (tempfile::tempdir().unwrap(), AtomicU32::new(0));
        let slot = Slot::new("worker-0".to_owned(), dir.path(), Screen::default()).unwrap();
        // The job ends during the wait before the restart.
        let stage = async || match asked.fetch_add(1, Ordering::Relaxed) {
            0 => Ok(Stage::Training),
            _ => Ok(Stage::Ended),
        };
        let gone = slot.run(&script("exit 5"), stage, &CancellationToken::new()).await.unwrap();
        assert_eq!((gone.left, asked.into_inner()), (Left::Finished, 2));
    }

    #[tokio::test]
    async fn a_run_that_stops_asks_its_processes_to_end() {
        let (dir, stop, screen) = (tempfile::tempdir().unwrap(), CancellationToken::new(), Screen::default());
        let slot = Slot::new("worker-0".to_owned(), dir.path(), screen.clone()).unwrap();
        let script = script("trap 'echo asked; exit 1' TERM; echo begun; while :; do sleep 600 & wait; done");
        let stopping = async {
            while !screen.lines.lock().unwrap().iter().any(|line| line.contains("begun")) {
                tokio::task::yield_now().await;
            }
            stop.cancel();
        };
        let (gone, ()) = tokio::join!(slot.run(&script, async || Ok(Stage::Training), &stop), stopping);
        let gone = gone.unwrap();
        assert_eq!((gone.left, gone.last), (Left::Stopped, vec!["begun".to_owned(), "asked".to_owned()]));
    }

    #[tokio::test]
    async fn lines_of_somebody_else_go_to_the_log_and_to_the_receiver_alone() {
        let (dir, screen) = (tempfile::tempdir().unwrap(), Screen::default());
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hearing = heard.clone();
        let hear = Hear::new(move |line| hearing.lock().unwrap().push(line.to_owned()));
        let slot = Slot::hearing("train-7-0".to_owned(), dir.path(), screen.clone(), hear).unwrap();
        let script = Script { folder: Some(dir.path().to_owned()), ..script("pwd; echo $EBBFLOW_WORKER") };
        let gone = slot.run(&script, async || Ok(Stage::Ended), &CancellationToken::new()).await.unwrap();
        assert_eq!(gone.last, [dir.path().display().to_string(), "train-7-0".to_owned()]);
        assert_eq!(*heard.lock().unwrap(), gone.last);
        assert!(dir.path().join("train-7-0.log").exists());
        assert!(screen.lines.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn each_process_inherits_a_line_of_its_own_and_its_children_do_not_need_it() {
        let (dir, lines) = (tempfile::tempdir().unwrap(), std::rc::Rc::new(std::cell::Cell::new(0)));
        let slot = Slot::new("worker-0".to_owned(), dir.path(), Screen::default()).unwrap();
        let counted = lines.clone();
        let slot = slot.forwarding(async move |relay| {
            counted.set(counted.get() + 1);
            std::future::pending::<()>().await;
            drop(relay);
        });
        let script = script("readlink /proc/$$/fd/$EBBFLOW_AGENT; ls -l /proc/$$/fd | grep -c socket:");
        let gone = slot.run(&script, async || Ok(Stage::Ended), &CancellationToken::new()).await.unwrap();
        assert!(gone.last[0].starts_with("socket:"), "{:?}", gone.last);
        // No other socket of this process is open there.
        assert_eq!((gone.last[1].trim(), lines.get()), ("1", 1));
    }

    #[tokio::test]
    async fn an_interpreter_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let slot = Slot::new("worker-0".to_owned(), dir.path(), Screen::default()).unwrap();
        let script = Script { python: "no-python".into(), ..script("") };
        let error =
            slot.run(&script, async || Ok(Stage::Unjoined), &CancellationToken::new()).await.unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("`no-python`") && error.contains("--python"), "{error}");
    }

    #[test]
    fn a_log_that_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = Slot::new("worker-2".to_owned(), &dir.path().join("no"), Screen::default()).unwrap_err();
        assert!(error.to_string().contains("no/worker-2.log"), "{error}");
    }
}

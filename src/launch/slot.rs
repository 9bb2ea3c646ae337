//! The place of one process of a script: it starts the process, keeps what it says, and starts it
//! again.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::process::Command;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::launch::lines::{Last, Lines};
use crate::launch::log::{BYTES_MAX, Log};
use crate::launch::process::Group;
use crate::launch::restarts::{Decision, Left, Restarts, Stage};
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
    /// Variables that the processes have.
    pub(crate) variables: Vec<(String, String)>,
    /// Variables of this process that they do not have.
    pub(crate) hidden: Vec<String>,
    /// Time from SIGTERM to SIGKILL.
    pub(crate) grace: Duration,
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

/// The place of one process.
#[derive(Debug)]
pub(crate) struct Slot {
    name: String,
    output: Arc<Output>,
    restarts: Restarts,
    screen: Screen,
}

impl Slot {
    /// Creates the place number `index`, with its log in `logs`. What its processes say goes to
    /// `screen` too.
    ///
    /// # Errors
    /// The log cannot be written.
    pub(crate) fn new(index: u32, logs: &Path, screen: Screen) -> Result<Self> {
        let name = format!("worker-{index}");
        let path = logs.join(format!("{name}.log"));
        let log = Log::create(&path, BYTES_MAX)
            .with_context(|| format!("the log {} cannot be written", path.display()))?;
        let kept = Kept { last: Last::new(LINES_SHOWN), log: Some(log) };
        let output = Output { name: name.clone(), screen: screen.clone(), kept: Mutex::new(kept) };
        Ok(Self { name, output: Arc::new(output), restarts: Restarts::default(), screen })
    }

    /// Runs processes of `script`, one after the other, until one leaves for good or `stop`.
    /// `stage` says where the jobs are.
    ///
    /// It starts processes on the calling thread: see [`Group::spawn`].
    ///
    /// # Errors
    /// The interpreter cannot be started, or `stage` fails.
    pub(crate) async fn run(
        mut self,
        script: &Script,
        stage: impl AsyncFn() -> Result<Stage>,
        stop: &CancellationToken,
    ) -> Result<Gone> {
        let begin = Instant::now();
        let left = loop {
            let began = begin.elapsed();
            let mut group = self.start(script)?;
            let streams = group.streams().with_context(|| format!("the output of {}", self.name))?;
            let copies = streams.map(|stream| Copying::start(stream, self.output.clone()));
            let ended = tokio::select! {
                biased;
                () = stop.cancelled() => group.end(script.grace).await,
                exit = group.wait() => exit,
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

    fn start(&self, script: &Script) -> Result<Group> {
        let mut command = Command::new(&script.python);
        command.args(&script.arguments).envs(script.variables.iter().map(|(name, value)| (name, value)));
        for name in &script.hidden {
            command.env_remove(name);
        }
        command.env("EBBFLOW_WORKER", &self.name);
        Group::spawn(&mut command).with_context(|| {
            format!("cannot start `{}`; choose the Python interpreter with --python", script.python.display())
        })
    }
}

/// A stream of a process that is being copied, until it is dropped.
#[derive(Debug)]
struct Copying {
    /// The process has ended.
    ended: CancellationToken,
    task: JoinHandle<()>,
}

impl Copying {
    fn start(mut from: Receiver, output: Arc<Output>) -> Self {
        let ended = CancellationToken::new();
        let is_over = ended.clone();
        let task = tokio::spawn(async move {
            let (mut lines, mut bytes) = (Lines::default(), vec![0; 16 << 10]);
            loop {
                let count = tokio::select! {
                    biased;
                    count = from.read(&mut bytes) => count.unwrap_or(0),
                    // A process that left the group may hold the pipe open. What is in it now is
                    // all that counts.
                    () = is_over.cancelled() => rustix::io::read(&from, &mut bytes[..]).unwrap_or(0),
                };
                if count == 0 {
                    break;
                }
                lines.push(&bytes[..count], |line| output.line(line));
            }
            lines.finish(|line| output.line(line));
        });
        Self { ended, task }
    }

    /// Copies what is left in the pipe of a process that has ended.
    async fn finish(mut self) {
        self.ended.cancel();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The way of a place's output to the screen, to the log and to the last lines.
#[derive(Debug)]
struct Output {
    name: String,
    screen: Screen,
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
        self.screen.line(&format!("{} | {text}", self.name));
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
            variables: vec![("GIVEN".to_owned(), "here".to_owned())],
            hidden: vec!["HOME".to_owned()],
            grace: Duration::from_secs(30),
        }
    }

    async fn run(text: &str, stage: Stage) -> (Gone, String, String) {
        let (dir, screen) = (tempfile::tempdir().unwrap(), Screen::default());
        let slot = Slot::new(1, dir.path(), screen.clone()).unwrap();
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
        let slot = Slot::new(0, dir.path(), Screen::default()).unwrap();
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
        let slot = Slot::new(0, dir.path(), screen.clone()).unwrap();
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
    async fn an_interpreter_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let slot = Slot::new(0, dir.path(), Screen::default()).unwrap();
        let script = Script { python: "no-python".into(), ..script("") };
        let error =
            slot.run(&script, async || Ok(Stage::Unjoined), &CancellationToken::new()).await.unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("`no-python`") && error.contains("--python"), "{error}");
    }

    #[test]
    fn a_log_that_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = Slot::new(2, &dir.path().join("no"), Screen::default()).unwrap_err();
        assert!(error.to_string().contains("no/worker-2.log"), "{error}");
    }
}

//! The guard of scripts: a process beside this one, which starts the processes of scripts and ends
//! them when this one ends, however it ends.
//!
//! ```text
//!   this process                           guard                        process of a script
//!   Guard::start    ──fork─────────────►  watch
//!   Process::start  ──link, streams────►  Program::start  ──exec──►  first one of a group
//!                   ◄──number, later end──  adopts what is left behind, and ends it
//!   ends            ──end of file──────►  kills all below it
//! ```
//!
//! The kernel gives a process without a parent to the nearest ancestor that adopts such processes.
//! So only an ancestor of all processes of scripts can end them, and it must outlive this process.
//! The guard is forked before this process has threads, so no Rust or Python is loaded once more.
//! It keeps the rights of this process. A process of another user can neither end nor read it.
//!
//! **Always true:** if this process or the guard ends, the other one kills all processes of
//! scripts.

mod descriptors;
mod watch;

use std::io::{self, Read as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, WaitOptions, waitpid};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::pipe::Receiver;
use tokio_util::sync::CancellationToken;

use crate::launch::orphans;
use crate::launch::program::Program;
use crate::launch::restarts::Exit;

/// Longest time in which this process waits for the end of the guard.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// The guard of this process. When the last clone is dropped, the guard kills what it has started,
/// and ends.
#[derive(Clone, Debug)]
pub(crate) struct Guard(Arc<Control>);

#[derive(Debug)]
struct Control {
    socket: StdStream,
    /// `None`: it is no process, or it has ended.
    process: Mutex<Option<Pid>>,
    lost: CancellationToken,
}

/// What the guard says of a process.
#[derive(Debug, Serialize, Deserialize)]
enum Said {
    /// It runs, as the process of this number.
    Started(i32),
    /// It cannot be started, or the system does not tell how it ended. The code is that of the
    /// system.
    Failed(Option<i32>, String),
    /// It has ended.
    Ended {
        exit: Exit,
        /// Nothing that it started is left.
        is_clean: bool,
    },
}

impl Guard {
    /// Starts the guard of this process. Call it before the process has threads.
    ///
    /// # Errors
    /// The system starts no further process.
    pub(crate) fn start() -> io::Result<Self> {
        let (mut socket, theirs) = StdStream::pair()?;
        let process = match watch::fork()? {
            None => {
                drop(socket);
                watch::main(theirs)
            }
            Some(process) => process,
        };
        drop(theirs);
        // When the guard is killed, its children are for this process to end.
        orphans::adopt()?;
        let ready = socket.read_exact(&mut [0]);
        let guard = Self::of(socket, Some(process));
        ready.map(|()| guard)
    }

    /// Starts a guard that is a thread of this process. It adopts nothing, because a test shares
    /// its process with others.
    #[cfg(test)]
    pub(crate) fn here() -> Self {
        let (socket, theirs) = StdStream::pair().unwrap();
        std::thread::spawn(|| watch::here(theirs));
        Self::of(socket, None)
    }

    fn of(socket: StdStream, process: Option<Pid>) -> Self {
        let (process, lost) = (Mutex::new(process), CancellationToken::new());
        Self(Arc::new(Control { socket, process, lost }))
    }

    /// Returns when the guard was found to have ended. Its processes have ended then, too.
    pub(crate) async fn lost(&self) -> io::Error {
        self.0.lost.cancelled().await;
        gone()
    }

    /// Ends the processes of a guard that has ended. Returns that it has.
    async fn lose(&self) -> io::Error {
        let process = self.0.process.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(process) = process {
            // One that is not dead takes this as the end of this process.
            let _ = self.0.socket.shutdown(Shutdown::Write);
            // Once it has ended, this process is the parent of all that it has left.
            let _ = waitpid(Some(process), WaitOptions::empty());
            orphans::end_all().await;
        }
        self.0.lost.cancel();
        gone()
    }
}

fn gone() -> io::Error {
    io::Error::other(
        "the process that starts the processes of scripts was killed, and they with it; start this one again",
    )
}

impl Drop for Control {
    fn drop(&mut self) {
        // The guard takes the end of the file as the end of this process.
        let _ = self.socket.shutdown(Shutdown::Write);
        let process = self.process.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(process) = process {
            // It has closed its end when it has killed all.
            let _ = self.socket.set_read_timeout(Some(ENDS_WITHIN));
            let _ = self.socket.read(&mut [0]);
            let _ = waitpid(Some(process), WaitOptions::NOHANG);
        }
    }
}

/// A running process of a script, and what it started. Dropping it kills all of them.
#[derive(Debug)]
pub(crate) struct Process {
    guard: Guard,
    link: BufReader<UnixStream>,
    /// The begin of a message.
    heard: Vec<u8>,
    streams: Option<[Receiver; 2]>,
}

impl Process {
    /// Starts `program`. It inherits the `line` to its agent.
    ///
    /// # Errors
    /// The program is not there, the system starts no further process, or the guard has ended.
    pub(crate) async fn start(guard: &Guard, program: &Program, line: Option<OwnedFd>) -> io::Result<Self> {
        let (link, theirs) = StdStream::pair()?;
        let ((stdout, to_stdout), (stderr, to_stderr)) = (io::pipe()?, io::pipe()?);
        let files = [theirs.as_fd(), to_stdout.as_fd(), to_stderr.as_fd()];
        let files: Vec<_> = files.into_iter().chain(line.as_ref().map(OwnedFd::as_fd)).collect();
        match descriptors::send(&guard.0.socket, &files) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(guard.lose().await),
            sent => sent?,
        }
        drop((theirs, to_stdout, to_stderr, line));
        link.set_nonblocking(true)?;
        let [stdout, stderr] = [stdout, stderr].map(|stream| Receiver::from_owned_fd(stream.into()));
        let (link, streams) = (BufReader::new(UnixStream::from_std(link)?), Some([stdout?, stderr?]));
        let mut process = Self { guard: guard.clone(), link, heard: Vec::new(), streams };
        // A guard that does not take it says nothing either.
        let _ = say(&mut process.link, program).await;
        match process.hear().await? {
            Said::Started(id) => {
                tracing::debug!(id, "a process of a script has started");
                Ok(process)
            }
            other => Err(unexpected(other)),
        }
    }

    /// Takes stdout and stderr of the first process. They are there once.
    ///
    /// # Errors
    /// They were taken.
    pub(crate) fn streams(&mut self) -> io::Result<[Receiver; 2]> {
        self.streams.take().ok_or_else(|| io::Error::other("taken before"))
    }

    /// Waits for the first process to end. The rest of its group has ended then, and what it has
    /// left behind. It may be called again after it was dropped.
    ///
    /// # Errors
    /// The system does not tell, or the guard has ended.
    pub(crate) async fn wait(&mut self) -> io::Result<Exit> {
        match self.hear().await? {
            Said::Ended { exit, is_clean } => {
                if !is_clean {
                    tracing::warn!(
                        "processes that a script has left behind do not end; stop this process to look for them"
                    );
                }
                Ok(exit)
            }
            other => Err(unexpected(other)),
        }
    }

    /// Asks the group to end by SIGTERM, and kills it after `grace`.
    ///
    /// # Errors
    /// The system does not tell how the first process ended, or the guard has ended.
    pub(crate) async fn end(&mut self, grace: Duration) -> io::Result<Exit> {
        // The guard may have said before that it has ended.
        let _ = say(&mut self.link, &grace).await;
        self.wait().await
    }

    async fn hear(&mut self) -> io::Result<Said> {
        match hear(&mut self.link, &mut self.heard).await {
            Ok(said) => Ok(said),
            Err(_) => Err(self.guard.lose().await),
        }
    }
}

/// Returns the error that the guard said instead of something else.
fn unexpected(said: Said) -> io::Error {
    match said {
        Said::Failed(Some(code), _) => io::Error::from_raw_os_error(code),
        Said::Failed(None, reason) => io::Error::other(reason),
        said => io::Error::other(format!("the guard of scripts says {said:?}")),
    }
}

/// Says one message over a link.
async fn say(link: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    link.write_all(&line).await
}

/// Hears one message over a link. `heard` has the begin of it if the call is dropped, for the next
/// call.
async fn hear<T: DeserializeOwned>(
    link: &mut (impl AsyncBufRead + Unpin),
    heard: &mut Vec<u8>,
) -> io::Result<T> {
    link.read_until(b'\n', heard).await?;
    let line = std::mem::take(heard);
    // JSON has no such byte within.
    if line.last() != Some(&b'\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&line)?)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    fn shell(script: &str) -> Program {
        let mut program = Program::new("sh");
        program.args(["-c", script]);
        program
    }

    async fn start(guard: &Guard, script: &str) -> (Process, BufReader<Receiver>) {
        let mut process = Process::start(guard, &shell(script), None).await.unwrap();
        let [stdout, _] = process.streams().unwrap();
        let mut stdout = BufReader::new(stdout);
        assert_eq!(stdout.read_line(&mut String::new()).await.unwrap(), 6, "begun");
        (process, stdout)
    }

    #[tokio::test]
    async fn an_end_is_told_with_its_code_or_signal() {
        let guard = Guard::here();
        for (script, exit) in [("exit 3", Exit::Code(3)), ("kill -9 $$", Exit::Signal(9))] {
            let mut process = Process::start(&guard, &shell(script), None).await.unwrap();
            assert_eq!(process.wait().await.unwrap(), exit);
        }
    }

    #[tokio::test]
    async fn a_process_is_asked_to_end_and_killed_after_the_grace() {
        let guard = Guard::here();
        let script = "trap 'exit 7' TERM; echo begun; while :; do sleep 600 & wait; done";
        let (mut process, _) = start(&guard, script).await;
        assert_eq!(process.end(Duration::from_secs(600)).await.unwrap(), Exit::Code(7));
        let (mut process, _) = start(&guard, "trap '' TERM; echo begun; while :; do sleep 600; done").await;
        assert_eq!(process.end(Duration::ZERO).await.unwrap(), Exit::Signal(9));
    }

    // Each process holds its stdout open until it is killed, and so does its child.
    #[tokio::test]
    async fn a_dropped_process_is_killed_also_while_it_is_asked_to_end() {
        let guard = Guard::here();
        let script =
            "trap 'echo asked' TERM; (trap '' TERM; exec sleep 600) & echo begun; while :; do wait; done";
        let (process, mut rest) = start(&guard, script).await;
        drop(process);
        rest.read_to_end(&mut Vec::new()).await.unwrap();
        let (mut process, mut rest) = start(&guard, script).await;
        let mut line = String::new();
        tokio::select! {
            exit = process.end(Duration::from_secs(600)) => panic!("{exit:?}"),
            count = rest.read_line(&mut line) => assert_eq!(count.unwrap(), 6, "asked"),
        }
        drop(process);
        rest.read_to_end(&mut Vec::new()).await.unwrap();
    }

    #[tokio::test]
    async fn all_processes_end_with_the_last_clone() {
        let guard = Guard::here();
        let (process, mut rest) = start(&guard, "echo begun; sleep 600 & wait").await;
        let link = process.link;
        drop((process.guard, guard));
        rest.read_to_end(&mut Vec::new()).await.unwrap();
        drop(link);
    }

    #[tokio::test]
    async fn a_wait_that_is_dropped_loses_nothing() {
        let guard = Guard::here();
        let (mut process, _) = start(&guard, "echo begun; exit 4").await;
        let exit = loop {
            tokio::select! {
                biased;
                exit = process.wait() => break exit,
                () = tokio::task::yield_now() => {}
            }
        };
        assert_eq!(exit.unwrap(), Exit::Code(4));
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_an_error() {
        let error = Process::start(&Guard::here(), &Program::new("no-such-program"), None).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn a_guard_that_is_lost_is_told_for_each_process() {
        let (socket, theirs) = StdStream::pair().unwrap();
        let guard = Guard::of(socket, None);
        drop(theirs);
        let error = Process::start(&guard, &shell(""), None).await.unwrap_err().to_string();
        assert!(error.contains("was killed") && error.contains("start this one again"), "{error}");
        assert_eq!(guard.lost().await.to_string(), error);
    }
}

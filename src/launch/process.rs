//! A process and what it starts: a process group, whose first process ends no later than this one.
#![expect(unsafe_code, reason = "what a child does between fork and exec has no safe interface")]

use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, getpid, getppid, kill_process_group};
use tokio::process::{Child, Command};

use crate::launch::restarts::Exit;

/// A running process group. Dropping it kills the group.
#[derive(Debug)]
pub(crate) struct Group {
    child: Child,
    /// The number of the process and of its group.
    id: Pid,
    /// The group has nobody left.
    is_over: bool,
}

impl Group {
    /// Starts `command` as the first process of a group, without input. Dropping the command closes
    /// its streams here. One with a `line` is a process of somebody else: it inherits the line
    /// under the same number. It leaves no core dump, which would have its secrets.
    ///
    /// The kernel kills this process when the calling *thread* ends. Call it on the main thread: it
    /// lives as long as the program.
    ///
    /// # Errors
    /// The program is not there, or the system starts no further process.
    pub(crate) fn spawn(command: &mut Command, line: Option<OwnedFd>) -> io::Result<Self> {
        command.stdin(Stdio::null());
        die_with_this_process(command);
        line.into_iter().for_each(|line| inherit(command, line));
        let child = command.spawn()?;
        let id = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
        let id = id.ok_or_else(|| io::Error::other("the process has no number"))?;
        Ok(Self { child, id, is_over: false })
    }

    /// Returns the number of the first process, of its group and of its session.
    pub(crate) const fn id(&self) -> Pid {
        self.id
    }

    /// Waits for the first process to end, and kills the rest of the group.
    ///
    /// # Errors
    /// The system does not tell.
    pub(crate) async fn wait(&mut self) -> io::Result<Exit> {
        let status = self.child.wait().await?;
        self.kill();
        Ok(status.into())
    }

    /// Asks the group to end by SIGTERM, and kills it after `grace`.
    ///
    /// # Errors
    /// The system does not tell how the first process ended.
    pub(crate) async fn end(&mut self, grace: Duration) -> io::Result<Exit> {
        // It may have ended already.
        let _ = kill_process_group(self.id, Signal::TERM);
        match tokio::time::timeout(grace, self.wait()).await {
            Ok(exit) => exit,
            Err(_) => {
                let _ = kill_process_group(self.id, Signal::KILL);
                self.wait().await
            }
        }
    }

    /// Kills what is left of the group. While there is any, no other process gets its number.
    fn kill(&mut self) {
        if !std::mem::replace(&mut self.is_over, true) {
            // Nobody is left in the usual case.
            let _ = kill_process_group(self.id, Signal::KILL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Lets the process of `command` begin a session of its own, and the kernel kill it when this one
/// ends, however it ends.
fn die_with_this_process(command: &mut Command) {
    let parent = getpid();
    let in_child = move || {
        // A session is a process group, too, and no child can leave it for another one.
        rustix::process::setsid()?;
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the call.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: the closure makes system calls only. It takes no lock and no memory.
    unsafe { command.pre_exec(in_child) };
}

/// Lets the process of `command` inherit a descriptor, which this process closes on exec, and leave
/// no core dump.
fn inherit(command: &mut Command, line: OwnedFd) {
    let no_core = Rlimit { current: Some(0), maximum: Some(0) };
    let in_child = move || {
        rustix::process::setrlimit(Resource::Core, no_core)?;
        Ok(rustix::io::fcntl_setfd(&line, rustix::io::FdFlags::empty())?)
    };
    // SAFETY: the closure makes system calls only. It takes no lock and no memory.
    unsafe { command.pre_exec(in_child) };
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
    use tokio::process::ChildStdout;

    use super::*;

    fn shell(script: &str) -> Group {
        Group::spawn(Command::new("sh").args(["-c", script]).stdout(Stdio::piped()), None).unwrap()
    }

    /// Reads the first line, after which the script is in its loop.
    async fn first_line(group: &mut Group) -> (String, BufReader<ChildStdout>) {
        let mut stdout = BufReader::new(group.child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).await.unwrap();
        (line.trim().to_owned(), stdout)
    }

    #[tokio::test]
    async fn an_end_is_told_with_its_code_or_signal() {
        assert_eq!(shell("exit 3").wait().await.unwrap(), Exit::Code(3));
        assert_eq!(shell("kill -9 $$").wait().await.unwrap(), Exit::Signal(9));
    }

    #[tokio::test]
    async fn a_group_ends_with_its_first_process() {
        // The second process holds the pipe open, until it is killed.
        let mut group = shell("sleep 600 & echo begun; exit 0");
        let (line, mut rest) = first_line(&mut group).await;
        assert_eq!((line.as_str(), group.wait().await.unwrap()), ("begun", Exit::Code(0)));
        assert_eq!(rest.read_to_end(&mut Vec::new()).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_dropped_group_is_killed() {
        let mut group = shell("sleep 600 & echo begun; wait");
        let (_, mut rest) = first_line(&mut group).await;
        drop(group);
        assert_eq!(rest.read_to_end(&mut Vec::new()).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_process_is_asked_to_end_first() {
        let mut group = shell("trap 'exit 7' TERM; echo begun; while :; do sleep 600 & wait; done");
        first_line(&mut group).await;
        assert_eq!(group.end(Duration::from_secs(600)).await.unwrap(), Exit::Code(7));
    }

    // Time that is paused moves on when nothing else can happen: the grace is over at once.
    #[tokio::test(start_paused = true)]
    async fn a_process_that_does_not_listen_is_killed() {
        let mut group = shell("trap '' TERM; echo begun; while :; do sleep 600; done");
        first_line(&mut group).await;
        assert_eq!(group.end(Duration::from_secs(30)).await.unwrap(), Exit::Signal(9));
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_an_error() {
        let error = Group::spawn(&mut Command::new("no-such-program"), None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

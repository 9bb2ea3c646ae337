//! What the guard does: it starts processes, tells their ends, and ends them with the process that
//! it was forked from.
#![expect(unsafe_code, reason = "fork, and what follows it, has no safe interface")]

use std::fs::File;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use rustix::process::Pid;
use tokio::io::{BufReader, Interest};
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};

use super::{Said, descriptors, hear, say};
use crate::launch::orphans::{self, Orphans};
use crate::launch::program::Program;

/// Forks this process. Returns `None` in the new one, and its number in the old one.
///
/// # Errors
/// The system starts no further process.
pub(super) fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: the caller promises that this process has one thread, so the new process has all of
    // it, and nobody holds a lock there.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        process => Ok(Pid::from_raw(process)),
    }
}

/// Runs the guard in a new process, until the other end of `control` is closed and all processes
/// have ended.
pub(super) fn main(control: StdStream) -> ! {
    // A panic must not reach the caller, who believes to be the old process.
    let run = std::panic::AssertUnwindSafe(|| run(control));
    let is_good = std::panic::catch_unwind(run).is_ok_and(|ended| ended.is_ok());
    // SAFETY: takes a number and does not return. What the old process does at its end is not for
    // this one.
    unsafe { libc::_exit(i32::from(!is_good)) }
}

fn run(control: StdStream) -> io::Result<()> {
    // Signals of a terminal are for the old process, which then ends its scripts in order.
    rustix::process::setsid()?;
    #[cfg(target_os = "linux")]
    rustix::thread::set_name(c"ebb-guard")?;
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    for stream in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        // SAFETY: it takes two numbers. No value of this process owns a standard stream.
        if unsafe { libc::dup2(nothing.as_raw_fd(), stream) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    on_one_thread(async {
        // A signal to all processes of a service is for the others. These are caught and not
        // ignored, because a script would inherit the latter.
        let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
        let _caught = kinds.map(signal);
        let adopted = Orphans::adopt()?;
        rustix::io::write(&control, &[0])?;
        // The old process waits for the end of this socket.
        let kept = control.try_clone()?;
        serve(control, Some(adopted)).await?;
        orphans::end_all().await;
        drop(kept);
        // Some may hang in the system. Nobody else will end them.
        while !orphans::end_all().await {}
        Ok(())
    })?
}

/// Runs a guard that adopts nothing on this thread.
#[cfg(test)]
pub(super) fn here(control: StdStream) {
    on_one_thread(serve(control, None)).unwrap().unwrap();
}

/// The kernel kills processes when the thread ends that started them, so this is one thread.
fn on_one_thread<T>(future: impl Future<Output = T>) -> io::Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future))
}

/// Starts processes until the other end of `control` is closed. Then it kills their groups.
async fn serve(control: StdStream, orphans: Option<Orphans>) -> io::Result<()> {
    control.set_nonblocking(true)?;
    let control = UnixStream::from_std(control)?;
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            files = control.async_io(Interest::READABLE, || descriptors::receive(&control)) => match files {
                Ok(Some(files)) => running.push(attend(files, orphans.as_ref())),
                Ok(None) | Err(_) => return Ok(()),
            },
            // The other end of its link may be closed, which concerns nobody.
            Some(_) = running.next() => {}
        }
    }
}

/// Starts the process that the other end of a link describes, and tells its end. Kills it when the
/// other end is closed.
async fn attend(files: Vec<OwnedFd>, orphans: Option<&Orphans>) -> io::Result<()> {
    let mut files = files.into_iter();
    let (Some(link), Some(stdout), Some(stderr), line) =
        (files.next(), files.next(), files.next(), files.next())
    else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let link = StdStream::from(link);
    link.set_nonblocking(true)?;
    let (read, mut write) = UnixStream::from_std(link)?.into_split();
    let (mut read, mut begun) = (BufReader::new(read), Vec::new());
    let program: Program = hear(&mut read, &mut begun).await?;
    let mut group = match program.start(stdout, stderr, line) {
        Ok(group) => group,
        Err(error) => return say(&mut write, &failed(&error)).await,
    };
    let session = group.id();
    orphans.iter().for_each(|orphans| orphans.begin(session));
    // When the other end is closed, the next message says it.
    let _ = say(&mut write, &Said::Started(session.as_raw_nonzero().get())).await;
    let ended = tokio::select! {
        biased;
        exit = group.wait() => exit,
        grace = hear::<Duration>(&mut read, &mut begun) => match grace {
            Ok(grace) => tokio::select! {
                biased;
                exit = group.end(grace) => exit,
                // It says nothing more, so it is closed.
                _ = hear::<Duration>(&mut read, &mut begun) => group.end(Duration::ZERO).await,
            },
            Err(_) => group.end(Duration::ZERO).await,
        },
    };
    let is_clean = match orphans {
        Some(orphans) => orphans.end(session).await,
        None => true,
    };
    let said = ended.map_or_else(|error| failed(&error), |exit| Said::Ended { exit, is_clean });
    say(&mut write, &said).await
}

fn failed(error: &io::Error) -> Said {
    Said::Failed(error.raw_os_error(), error.to_string())
}

//! A program that runs once before the processes of a script, and ends by itself.

use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::process::Command;

use crate::launch::copying::{Copying, Voice};
use crate::launch::orphans::Orphans;
use crate::launch::process::Group;
use crate::launch::redaction::Redaction;
use crate::launch::restarts::Exit;

/// Runs `command` to its end, or kills it and all that it started when `limit` ends. Its stdout and
/// its stderr go to `voices`. With `orphans` nothing of it is left when this returns.
///
/// It starts a process on the calling thread: see [`Group::spawn`].
///
/// # Errors
/// The program cannot be started.
pub(crate) async fn run<T>(
    mut command: Command,
    voices: [Voice; 2],
    orphans: Option<&Orphans>,
    limit: impl Future<Output = T>,
) -> Result<Result<Exit, T>> {
    let program = command.as_std().get_program().to_owned();
    let mut group =
        Group::spawn(&mut command, None).with_context(|| format!("cannot start `{}`", program.display()))?;
    let session = group.id();
    orphans.into_iter().for_each(|orphans| orphans.begin(session));
    let [stdout, stderr] = group.streams().context("its output")?;
    let [out, err] = voices;
    let copies = [(stdout, out), (stderr, err)];
    let copies = copies.map(|(stream, voice)| Copying::start(stream, voice, Redaction::default()));
    let ended = tokio::select! {
        biased;
        exit = group.wait() => exit.map(Ok),
        reached = limit => group.end(Duration::ZERO).await.map(|_| Err(reached)),
    };
    if let Some(orphans) = orphans {
        orphans.end(session).await;
    }
    for copy in copies {
        copy.finish().await;
    }
    ended.with_context(|| format!("the end of `{}`", program.display()))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Runs a script of `sh`. Returns its end, and the lines of stdout and stderr.
    async fn sh(script: &str, limit: impl Future<Output = u32>) -> (Result<Exit, u32>, [Vec<String>; 2]) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let said = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
        let voices = said
            .clone()
            .map(|said| -> Voice { Arc::new(move |line| said.lock().unwrap().push(line.to_owned())) });
        let ended = run(command, voices, None, limit).await.unwrap();
        (ended, said.map(|said| said.lock().unwrap().clone()))
    }

    #[tokio::test]
    async fn a_helper_ends_by_itself_and_its_streams_are_kept_apart() {
        let (ended, said) = sh("echo one; echo two >&2; exit 3", std::future::pending()).await;
        assert_eq!((ended, said), (Ok(Exit::Code(3)), [vec!["one".to_owned()], vec!["two".to_owned()]]));
    }

    #[tokio::test]
    async fn a_helper_that_reaches_its_limit_is_killed_with_all_that_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let begun = dir.path().join("begun");
        let script = format!(
            "sleep 600 & echo $! > {0}.new; mv {0}.new {0}; trap '' TERM; wait; wait",
            begun.display()
        );
        let limit = async {
            while !begun.exists() {
                tokio::task::yield_now().await;
            }
            7
        };
        let (ended, _) = sh(&script, limit).await;
        assert_eq!(ended, Err(7));
    }
}

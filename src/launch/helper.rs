//! A program that runs once before the processes of a script, and ends by itself.

use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::launch::copying::{Copying, Voice};
use crate::launch::guard::{Guard, Process};
use crate::launch::program::Program;
use crate::launch::redaction::Redaction;
use crate::launch::restarts::Exit;

/// Runs `program` to its end, or kills it when `limit` ends. Its stdout and its stderr go to
/// `voices`. Nothing that it has started is left when this returns.
///
/// # Errors
/// The program cannot be started, or the guard has ended.
pub(crate) async fn run<T>(
    guard: &Guard,
    program: &Program,
    voices: [Voice; 2],
    limit: impl Future<Output = T>,
) -> Result<Result<Exit, T>> {
    let path = program.path().display();
    let mut process =
        Process::start(guard, program, None).await.with_context(|| format!("cannot start `{path}`"))?;
    let [stdout, stderr] = process.streams().context("its output")?;
    let [out, err] = voices;
    let copies = [(stdout, out), (stderr, err)];
    let copies = copies.map(|(stream, voice)| Copying::start(stream, voice, Redaction::default()));
    let ended = tokio::select! {
        biased;
        exit = process.wait() => exit.map(Ok),
        reached = limit => process.end(Duration::ZERO).await.map(|_| Err(reached)),
    };
    for copy in copies {
        copy.finish().await;
    }
    ended.with_context(|| format!("the end of `{path}`"))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Runs a script of `sh`. Returns its end, and the lines of stdout and stderr.
    async fn sh(script: &str, limit: impl Future<Output = u32>) -> (Result<Exit, u32>, [Vec<String>; 2]) {
        let mut program = Program::new("sh");
        program.args(["-c", script]);
        let said = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
        let voices = said
            .clone()
            .map(|said| -> Voice { Arc::new(move |line| said.lock().unwrap().push(line.to_owned())) });
        let ended = run(&Guard::here(), &program, voices, limit).await.unwrap();
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

//! Which requirements of a script a Python interpreter satisfies. The interpreter says it itself.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use proto::requirements::FILE;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use crate::launch::copying::Voice;
use crate::launch::guard::Guard;
use crate::launch::helper;
use crate::launch::lines::Last;
use crate::launch::program::Program;

/// The program that the interpreter runs.
pub(super) const PROGRAM: &str = include_str!("packages.py");

/// Longest time for an answer. Some interpreters lie on slow file systems.
const ANSWER: Duration = Duration::from_secs(120);

/// Lines of an interpreter that fails which are told.
const LINES_TOLD: usize = 20;

/// Requirements that are told one by one.
const WRONG_TOLD: usize = 30;

/// Largest answer in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// What an interpreter says about requirements.
#[derive(Debug, Deserialize)]
pub(super) struct Answer {
    /// Its version and where it is.
    pub(super) interpreter: String,
    /// The requirements that it does not satisfy.
    pub(super) wrong: Vec<Wrong>,
}

/// A requirement that is not satisfied.
#[derive(Debug, Deserialize)]
pub(super) struct Wrong {
    /// The requirement.
    requirement: String,
    /// The line of the file from whose extras it comes. `None`: it is the line.
    of: Option<String>,
    /// The distribution. `None`: the line has no name.
    name: Option<String>,
    /// The version that is there. `None`: none.
    found: Option<String>,
    /// Why the line is no requirement. `None`: it is one.
    invalid: Option<String>,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { requirement, of, name, found, invalid } = self;
        let name = name.as_deref().unwrap_or("?");
        match (invalid, found) {
            (Some(reason), _) => write!(f, "`{requirement}` is no requirement: {reason}")?,
            (None, Some(version)) => write!(f, "{name}: found {version}, expected `{requirement}`")?,
            (None, None) => write!(f, "{name}: not installed, expected `{requirement}`")?,
        }
        of.as_ref().map_or(Ok(()), |line| write!(f, " for `{line}`"))
    }
}

impl Answer {
    /// Returns what users read who sent a script to an agent that installs nothing.
    pub(super) fn refusal(&self) -> String {
        format!(
            "{FILE}: the interpreter of this worker, {}, does not satisfy it, and this worker installs nothing:{}\n\
             install them for --python of the worker, start the worker with --script-requirements, or change {FILE}",
            self.interpreter,
            self.lines()
        )
    }

    /// Returns a line for each requirement that is not satisfied.
    pub(super) fn lines(&self) -> String {
        let lines: String = self.wrong.iter().take(WRONG_TOLD).map(|wrong| format!("\n  {wrong}")).collect();
        match self.wrong.len().saturating_sub(WRONG_TOLD) {
            0 => lines,
            more => format!("{lines}\n  and {more} more"),
        }
    }
}

/// Asks the interpreter of `program` about the requirements in `file`.
///
/// # Errors
/// It cannot be started, does not answer, or cannot compare versions.
pub(super) async fn ask(
    mut program: Program,
    file: &Path,
    guard: &Guard,
    stop: &CancellationToken,
) -> Result<Answer> {
    program.args(["-c", PROGRAM, "check"]).args([file]);
    let (answer, said) = (Arc::new(Mutex::new(String::new())), Said::new(LINES_TOLD));
    let whole = answer.clone();
    // A long line comes in parts.
    let voice: Voice = Arc::new(move |line| {
        let mut whole = whole.lock().unwrap_or_else(PoisonError::into_inner);
        if whole.len() <= ANSWER_BYTES_MAX {
            whole.push_str(line);
        }
    });
    let limit = async {
        tokio::select! {
            () = stop.cancelled() => "this worker stops",
            () = tokio::time::sleep(ANSWER) => "it gives no answer",
        }
    };
    let ended = helper::run(guard, &program, [voice, said.voice()], limit).await;
    let reason = match ended.context("choose the Python interpreter with --python of the worker")? {
        Ok(exit) if exit.is_good() => {
            let answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
            return serde_json::from_str(&answer).context("the answer of the Python interpreter");
        }
        Ok(exit) => format!("it {exit}"),
        Err(reason) => reason.to_owned(),
    };
    bail!(
        "the Python interpreter of this worker does not say whether it satisfies {FILE}: {reason}; it needs `packaging` or \
         pip{}",
        said.lines()
    )
}

/// The last lines that a program said.
#[derive(Clone, Debug)]
pub(super) struct Said(Arc<Mutex<Last>>);

impl Said {
    /// Creates a memory of so many lines.
    pub(super) fn new(count_max: usize) -> Self {
        Self(Arc::new(Mutex::new(Last::new(count_max))))
    }

    /// Returns what takes its lines.
    pub(super) fn voice(&self) -> Voice {
        let said = self.0.clone();
        Arc::new(move |line| said.lock().unwrap_or_else(PoisonError::into_inner).push(line))
    }

    /// Returns its lines, each after a new line.
    pub(super) fn lines(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner).lines();
        lines.iter().map(|line| format!("\n  {line}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_each_requirement_what_is_there_and_what_to_do() {
        let answer = r#"{"interpreter": "3.11.7 at /p", "wrong": [
            {"requirement": "a>=2", "of": null, "name": "a", "found": "1.0", "invalid": null},
            {"requirement": "b", "of": null, "name": "b", "found": null, "invalid": null},
            {"requirement": "c ; extra == 'x'", "of": "d[x]", "name": "c", "found": null, "invalid": null},
            {"requirement": "e=1", "of": null, "name": null, "found": null, "invalid": "no end"}]}"#;
        let answer: Answer = serde_json::from_str(answer).unwrap();
        let said = answer.refusal();
        let lines: Vec<_> = said.lines().map(str::trim).collect();
        assert!(lines[0].contains("3.11.7 at /p"), "{said}");
        let expected = [
            "a: found 1.0, expected `a>=2`",
            "b: not installed, expected `b`",
            "c: not installed, expected `c ; extra == 'x'` for `d[x]`",
            "`e=1` is no requirement: no end",
        ];
        assert_eq!(lines[1..5], expected);
        assert!(lines[5].contains("--script-requirements"), "{said}");
        let wrong = |_| Wrong { requirement: "a".into(), of: None, name: None, found: None, invalid: None };
        let many = Answer { interpreter: String::new(), wrong: (0..=WRONG_TOLD).map(wrong).collect() };
        assert!(many.lines().ends_with("\n  and 1 more"), "{}", many.lines());
    }
}

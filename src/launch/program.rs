//! A program that is to be started, as one process describes it to another one.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::launch::process::Group;
use crate::launch::processors::{Processors, Stay};
use crate::launch::user::User;

/// The variable with the number of the descriptor by which a process reaches its agent.
const AGENT: &str = "EBBFLOW_AGENT";

/// A program with its arguments and variables.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Program {
    path: OsString,
    arguments: Vec<OsString>,
    /// It gets no variable of the process that starts it.
    is_bare: bool,
    /// In this order. `None`: the variable is taken away.
    variables: Vec<(OsString, Option<OsString>)>,
    folder: Option<OsString>,
    /// Numbers of a user and a group.
    user: Option<(u32, u32)>,
    /// Processors on which it runs. `None`: those of the process that starts it.
    processors: Option<Processors>,
}

// Variables may be secrets.
impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Program {
    /// Creates the program at `path`, which is looked for if it is a plain name.
    pub(crate) fn new(path: impl Into<OsString>) -> Self {
        Self {
            path: path.into(),
            arguments: Vec::new(),
            is_bare: false,
            variables: Vec::new(),
            folder: None,
            user: None,
            processors: None,
        }
    }

    /// Returns the path.
    pub(crate) const fn path(&self) -> &OsString {
        &self.path
    }

    /// Adds arguments.
    pub(crate) fn args<A: Into<OsString>>(&mut self, arguments: impl IntoIterator<Item = A>) -> &mut Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Adds variables, which win over earlier ones.
    pub(crate) fn envs<N: Into<OsString>, V: Into<OsString>>(
        &mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> &mut Self {
        let variables = variables.into_iter();
        self.variables.extend(variables.map(|(name, value)| (name.into(), Some(value.into()))));
        self
    }

    /// Takes variables away.
    pub(crate) fn without<N: Into<OsString>>(&mut self, names: impl IntoIterator<Item = N>) -> &mut Self {
        self.variables.extend(names.into_iter().map(|name| (name.into(), None)));
        self
    }

    /// Takes all variables away that it would inherit.
    pub(crate) const fn bare(&mut self) -> &mut Self {
        self.is_bare = true;
        self
    }

    /// Lets it begin in `folder`.
    pub(crate) fn in_folder(&mut self, folder: impl Into<OsString>) -> &mut Self {
        self.folder = Some(folder.into());
        self
    }

    /// Lets it run as `user`, with the group of this user and no other one.
    pub(crate) const fn as_user(&mut self, user: &User) -> &mut Self {
        self.user = Some((user.id, user.group));
        self
    }

    /// Lets it run on these processors alone. If the system refuses, it runs on those of the
    /// process that starts it.
    pub(crate) fn on(&mut self, processors: Processors) -> &mut Self {
        self.processors = Some(processors);
        self
    }

    /// Starts it with these streams. A `line` to an agent is inherited, and a variable has its
    /// number.
    ///
    /// It starts a process on the calling thread: see [`Group::spawn`].
    ///
    /// # Errors
    /// The program is not there, or the system starts no further process.
    pub(crate) fn start(self, stdout: OwnedFd, stderr: OwnedFd, line: Option<OwnedFd>) -> io::Result<Group> {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments).stdout(stdout).stderr(stderr);
        if self.is_bare {
            command.env_clear();
        }
        for (name, value) in &self.variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        if let Some((user, group)) = self.user {
            // It also takes away all other groups.
            command.uid(user).gid(group);
        }
        if let Some(line) = &line {
            command.env(AGENT, line.as_raw_fd().to_string());
        }
        // A process inherits the processors of the thread that starts it.
        let _stay = self.processors.as_ref().and_then(Stay::on);
        Group::spawn(&mut command, line)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// Returns what a program says on stdout.
    async fn said(program: Program) -> String {
        let ((mut stdout, to_stdout), (_, to_stderr)) = (io::pipe().unwrap(), io::pipe().unwrap());
        // On its way it is text.
        let program: Program = serde_json::from_str(&serde_json::to_string(&program).unwrap()).unwrap();
        let mut group = program.start(to_stdout.into(), to_stderr.into(), None).unwrap();
        group.wait().await.unwrap();
        let mut text = String::new();
        stdout.read_to_string(&mut text).unwrap();
        text
    }

    #[tokio::test]
    async fn a_program_is_started_as_it_is_described() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().canonicalize().unwrap();
        let mut program = Program::new("/bin/sh");
        program.args(["-c", "pwd; echo \"$0 $A $B [$C] [$HOME]\"", "zero"]).in_folder(&folder);
        program.envs([("A", "1"), ("B", "1"), ("C", "1")]).envs([("B", "2")]).without(["C"]);
        let mut bare = program.clone();
        bare.bare();
        program.without(["HOME"]);
        let expected = format!("{}\nzero 1 2 [] []\n", folder.display());
        assert_eq!(said(program).await, expected);
        assert_eq!(said(bare).await, expected, "HOME of this process does not reach it");
    }

    #[tokio::test]
    async fn a_program_stays_on_its_processors_and_the_next_one_is_where_it_was() {
        let says = || {
            let mut program = Program::new("/bin/sh");
            program.args(["-c", "grep Cpus_allowed_list /proc/self/status"]);
            program
        };
        let anywhere = said(says()).await;
        let first = anywhere.split_once('\t').unwrap().1.split(['-', ',', '\n']).next().unwrap();
        let mut there = says();
        there.on([first.parse().unwrap()].into());
        assert_eq!(said(there).await, format!("Cpus_allowed_list:\t{first}\n"));
        assert_eq!(said(says()).await, anywhere);
        let mut nowhere = says();
        nowhere.on(Processors::new());
        assert_eq!(said(nowhere).await, anywhere, "the system refuses");
    }

    #[test]
    fn no_form_of_a_program_for_debugging_has_its_variables() {
        let mut program = Program::new("sh");
        program.envs([("KEY", "hunter2")]).args(["hunter2"]);
        assert!(!format!("{program:?}").contains("hunter2"));
    }
}

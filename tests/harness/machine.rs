//! What a test of `deploy/` needs of the machine: programs that may be missing, addresses that are free, waits with a deadline.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::skipped;

/// A program on the PATH, or where those of an administrator lie.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let administrators = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(administrators);
    folders.find_map(|folder| Some(folder.join(program)).filter(|path| path.is_file()))
}

/// Whether all of these are here; says loudly which one is not, and what is not tried.
pub fn has(programs: &[&str], packages: &str, untried: &str) -> bool {
    let missing = programs.iter().find(|program| find(program).is_none());
    if let Some(missing) = missing {
        skipped(&format!("no {missing} (apt-get install {packages}); {untried}"));
    }
    missing.is_none()
}

/// What a tool said, or none where it does not start.
pub fn tool(command: &mut Command, unchecked: &str) -> Option<Output> {
    match command.stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(error) => {
            skipped(&format!(
                "{}: {error}; NOT checked: {unchecked}",
                Path::new(command.get_program()).display()
            ));
            None
        }
    }
}

/// Whether a command succeeds; what it says is nobody's.
pub fn answers(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

/// Whether this process may do what only an administrator may.
pub fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// `docker-compose` of old, or the Compose that is a part of `docker`.
pub fn docker_compose() -> Option<Command> {
    let standalone = || Command::new("docker-compose");
    let plugin = || {
        let mut command = Command::new("docker");
        command.arg("compose");
        command
    };
    [standalone(), plugin()]
        .into_iter()
        .zip([standalone(), plugin()])
        .find_map(|(mut asked, fresh)| answers(asked.arg("version")).then_some(fresh))
}

/// An address of this host that was free a moment ago, for programs that take no port of the system's choice.
pub fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it is bound").to_string()
}

/// Looks until it is so, and fails when that takes longer than `patience`.
pub fn until(what: &str, patience: Duration, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < patience, "not within {patience:?}: {what}");
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

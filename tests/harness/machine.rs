//! Requirements of tests of `deploy/` on the machine: programs that may be missing, free addresses,
//! waits with a deadline.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::{Lacks, skipped};

/// Finds a program on the PATH, or in the folders of an administrator's programs.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let administrators = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(administrators);
    folders.find_map(|folder| Some(folder.join(program)).filter(|path| path.is_file()))
}

/// Returns whether all of these programs exist. It reports a skip if one is missing, with what is
/// not tested.
pub fn has(programs: &[&str], packages: &str, untried: &str) -> bool {
    let missing = programs.iter().find(|program| find(program).is_none());
    if let Some(missing) = missing {
        skipped(Lacks::Package, &format!("no {missing} (apt-get install {packages}); {untried}"));
    }
    missing.is_none()
}

/// Runs a tool and returns its output. If it does not start, it reports a skip and returns `None`.
pub fn tool(command: &mut Command, unchecked: &str) -> Option<Output> {
    match command.stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(error) => {
            let program = Path::new(command.get_program()).display();
            skipped(Lacks::Package, &format!("{program}: {error}; NOT checked: {unchecked}"));
            None
        }
    }
}

/// Returns whether a command succeeds. Its output is dropped.
pub fn answers(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

/// Returns whether this process runs as root.
pub fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Returns the old `docker-compose`, or the Compose that is a part of `docker`.
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

/// An address of this host for a program that starts later, or again. As long as this value lives,
/// the system gives the port to no other program. The program must set SO_REUSEADDR before it
/// binds, as servers do.
pub struct Reserved {
    /// Bound without listening, so another socket may listen at the same address.
    _socket: Socket,
    pub address: String,
}

impl Reserved {
    /// Reserves an address of the loopback interface.
    pub fn local() -> Self {
        Self::at(Ipv4Addr::LOCALHOST.into())
    }

    /// Reserves an address of `host`.
    pub fn at(host: IpAddr) -> Self {
        let socket = Socket::new(Domain::for_address(SocketAddr::new(host, 0)), Type::STREAM, None);
        let socket = socket.expect("a socket");
        socket.set_reuse_address(true).expect("an option of every socket");
        socket.bind(&SocketAddr::new(host, 0).into()).expect("a free port");
        let bound = socket.local_addr().expect("it is bound").as_socket().expect("an IP address");
        Self { _socket: socket, address: bound.to_string() }
    }
}

/// Waits until `is_so` returns true, and fails after `patience`.
pub fn until(what: &str, patience: Duration, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < patience, "not within {patience:?}: {what}");
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

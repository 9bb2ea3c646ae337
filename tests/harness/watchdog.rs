//! Ends a test program that hangs, and prints the logs of all its processes.
//!
//! A test is watched from its first process on. If it exceeds the limit, the watchdog prints the
//! logs of all processes and a list of live children, kills the children, and ends the program. So
//! a hang is a failure with its evidence.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

/// Longest time of one test in seconds, unless `EBB_TEST_LIMIT` sets another.
const LIMIT_SECS: u64 = 1800;

/// Time between two checks.
const LOOK: Duration = Duration::from_secs(1);

/// Lines of each log that are shown.
const LINES: usize = 300;

/// Running tests, and the logs of live processes.
struct Watched {
    tests: Vec<(String, Instant)>,
    logs: Vec<PathBuf>,
}

static WATCHED: Mutex<Watched> = Mutex::new(Watched { tests: Vec::new(), logs: Vec::new() });

thread_local! {
    /// Test of this thread. It ends with the thread.
    static TEST: Test = Test::begin();
}

/// A test from its first process to its end.
struct Test(Option<String>);

impl Test {
    fn begin() -> Self {
        // A thread without a name belongs to another thread's test.
        let name = std::thread::current().name().filter(|name| *name != "main").map(str::to_owned);
        if let Some(name) = &name {
            with(|watched| watched.tests.push((name.clone(), now())));
        }
        Self(name)
    }
}

impl Drop for Test {
    fn drop(&mut self) {
        if let Some(name) = &self.0 {
            with(|watched| watched.tests.retain(|(test, _)| test != name));
        }
    }
}

/// Watches this thread's test from now on.
pub fn watch() {
    static WATCHDOG: Once = Once::new();
    WATCHDOG.call_once(|| {
        let limit = limit();
        std::thread::spawn(move || {
            loop {
                std::thread::park_timeout(LOOK);
                let late = with(|watched| {
                    let late = watched.tests.iter().find(|(_, since)| since.elapsed() > limit);
                    late.map(|(name, _)| name.clone())
                });
                if let Some(name) = late {
                    end(&name, limit);
                }
            }
        });
    });
    TEST.with(|_| ());
}

/// Adds a process whose log is shown when a test hangs.
pub fn add(log: &Path) {
    watch();
    with(|watched| watched.logs.push(log.to_owned()));
}

/// Removes a process that has ended.
pub fn remove(log: &Path) {
    with(|watched| watched.logs.retain(|other| other != log));
}

fn with<T>(act: impl FnOnce(&mut Watched) -> T) -> T {
    act(&mut WATCHED.lock().unwrap_or_else(PoisonError::into_inner))
}

#[expect(clippy::disallowed_methods, reason = "the check says the limit through the environment")]
fn limit() -> Duration {
    let given = std::env::var("EBB_TEST_LIMIT").ok().and_then(|secs| secs.parse().ok());
    Duration::from_secs(given.unwrap_or(LIMIT_SECS))
}

#[expect(clippy::disallowed_methods, reason = "a test that hangs is ended in real time")]
fn now() -> Instant {
    Instant::now()
}

/// Prints the evidence, and ends this program and its children.
fn end(test: &str, limit: Duration) {
    // Written directly: the test runner would hold back the output of a test that never ends.
    let mut out = std::io::stderr();
    let _ = writeln!(out, "\nHANGS: `{test}` did not end within {limit:?}");
    for log in with(|watched| watched.logs.clone()) {
        let text = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let tail = lines[lines.len().saturating_sub(LINES)..].join("\n");
        let _ = writeln!(out, "--- {}\n{tail}", log.display());
    }
    let children = children();
    for child in &children {
        let _ = writeln!(out, "--- child {child}: {}", describe(*child));
    }
    for child in children {
        let _ = std::process::Command::new("kill").args(["-KILL", &child.to_string()]).status();
    }
    std::process::exit(101);
}

/// Returns the live processes that this one started.
fn children() -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| parent(*pid) == Some(std::process::id())).collect()
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
}

/// Returns the command line of a process, and the kernel function in which each of its threads
/// waits.
fn describe(pid: u32) -> String {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
    let waits = threads.map(|thread| fs::read_to_string(thread.path().join("wchan")).unwrap_or_default());
    let waits: Vec<String> = waits.collect();
    format!("{}, threads wait in {}", read("cmdline").replace('\0', " ").trim(), waits.join(" "))
}

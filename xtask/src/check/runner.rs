//! Runs test programs beside each other, as many as the machine bears: most of them wait for processes of theirs most of the time.
//!
//! What a program says goes to a file of its own and is shown when it fails. A program that takes too long is ended with all that it
//! started. Nothing is given up when one fails: the others go on, and each failure is told at once.

use crate::workspace;
use anyhow::{Context, Result};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// What a test says when it could not test, see `tests/harness/skip.rs`.
const SKIPPED: &str = "SKIPPED: ";

/// How often it looks whether a program has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Lines of a failed program's output that are shown; the file has all.
const LINES: usize = 500;

/// Something to run.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    /// The stage that it belongs to.
    pub(crate) stage: &'static str,
    /// For people; unique.
    pub(crate) label: String,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
    pub(crate) folder: PathBuf,
    pub(crate) environment: Vec<(String, OsString)>,
    /// How many places it takes; all of them when there are fewer.
    pub(crate) places: usize,
    /// It computes all the time and never waits: it gets what the others leave.
    pub(crate) in_background: bool,
    /// After which it is ended.
    pub(crate) limit: Duration,
}

/// How a task ended.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    pub(crate) stage: &'static str,
    pub(crate) label: String,
    /// Why it failed, if it did.
    pub(crate) failure: Option<String>,
    pub(crate) took: Duration,
    /// From the begin of the first task to the end of this one.
    pub(crate) ended: Duration,
    /// Tests that passed.
    pub(crate) tests: u64,
    /// What it could not test, and why.
    pub(crate) skipped: Vec<String>,
}

/// A task that runs.
struct Running {
    task: Task,
    child: Child,
    since: Instant,
    log: PathBuf,
}

/// Runs all, the first ones first, in `places` places.
///
/// # Errors
/// A program cannot be started; those that run are ended.
pub(crate) fn run(tasks: Vec<Task>, places: usize) -> Result<Vec<Done>> {
    let logs = workspace::target_dir().join("check");
    fs::create_dir_all(&logs).with_context(|| format!("create `{}`", logs.display()))?;
    let (begin, count) = (now(), tasks.len());
    let mut waiting = tasks;
    let mut running = Tasks(Vec::new());
    let mut done = Vec::new();
    while done.len() < count {
        while let Some(next) = next(&waiting, &running.0, places) {
            let task = waiting.remove(next);
            running.0.push(start(task, &logs)?);
        }
        std::thread::park_timeout(LOOK);
        let mut index = 0;
        while index < running.0.len() {
            let Some(failure) = running.0[index].look()? else {
                index += 1;
                continue;
            };
            let ended = running.0.remove(index);
            let result = ended.result(failure, begin);
            tell(&result, &ended.log, done.len() + 1, count);
            done.push(result);
        }
    }
    Ok(done)
}

/// The first of those that wait for which there is room.
fn next(waiting: &[Task], running: &[Running], places: usize) -> Option<usize> {
    let taken: usize = running.iter().map(|running| running.task.places).sum();
    waiting.iter().position(|task| taken + task.places.min(places) <= places)
}

fn start(task: Task, logs: &Path) -> Result<Running> {
    let log = logs.join(format!("{}.log", task.label.replace('/', "-")));
    let file = File::create(&log).with_context(|| format!("create `{}`", log.display()))?;
    let mut command = match task.in_background {
        true => {
            let mut command = Command::new("nice");
            command.args(["-n", "15"]).arg(&task.program);
            command
        }
        false => Command::new(&task.program),
    };
    command.args(&task.args).current_dir(&task.folder).env("CARGO_MANIFEST_DIR", &task.folder);
    command.envs(task.environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let child = command.spawn().with_context(|| format!("start {command:?}"))?;
    Ok(Running { task, child, since: now(), log })
}

impl Running {
    /// Whether it has ended; then why it failed, if it did.
    fn look(&mut self) -> Result<Option<Option<String>>> {
        if let Some(status) = self.child.try_wait().context("wait for a program")? {
            return Ok(Some(failure(status)));
        }
        if self.since.elapsed() < self.task.limit {
            return Ok(None);
        }
        self.end();
        Ok(Some(Some(format!("ended after {}: it hangs", super::seconds(self.task.limit)))))
    }

    /// Kills it and all that it started.
    fn end(&mut self) {
        let mut all = vec![self.child.id()];
        // Those that it starts meanwhile are found too, until there is nobody new.
        let mut index = 0;
        while index < all.len() {
            let parent = all[index];
            stop(&[parent]);
            all.extend(children(parent));
            index += 1;
        }
        signal("KILL", &all);
        let _ = self.child.wait();
    }

    fn result(&self, failure: Option<String>, begin: Instant) -> Done {
        let bytes = fs::read(&self.log).unwrap_or_default();
        let said = String::from_utf8_lossy(&bytes);
        let mut skipped: Vec<String> = said
            .lines()
            .filter_map(|line| line.find(SKIPPED).map(|at| line[at + SKIPPED.len()..].to_owned()))
            .collect();
        skipped.sort();
        skipped.dedup();
        Done {
            stage: self.task.stage,
            label: self.task.label.clone(),
            failure,
            took: self.since.elapsed(),
            ended: begin.elapsed(),
            tests: passed(&said),
            skipped,
        }
    }
}

fn stop(pids: &[u32]) {
    signal("STOP", pids);
}

fn signal(name: &str, pids: &[u32]) {
    let mut command = Command::new("kill");
    command.arg(format!("-{name}")).args(pids.iter().map(u32::to_string));
    // They may have ended already.
    let _ = command.stderr(Stdio::null()).status();
}

/// Processes that a process started, and that live.
fn children(parent: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let of = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse::<u32>().ok())
    };
    pids.filter(|pid| of(pid) == Some(parent)).collect()
}

/// Tasks that run; whatever ends this program's interest in them ends them too.
struct Tasks(Vec<Running>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(Running::end);
    }
}

fn failure(status: ExitStatus) -> Option<String> {
    (!status.success()).then(|| status.to_string())
}

/// Tests that passed, by the lines `test result: ok. 3 passed; ..`.
fn passed(said: &str) -> u64 {
    let counts = said.lines().filter(|line| line.starts_with("test result: "));
    let count = |line: &str| line.split(" passed").next()?.rsplit(' ').next()?.parse::<u64>().ok();
    counts.filter_map(count).sum()
}

fn tell(done: &Done, log: &Path, number: usize, count: usize) {
    let Done { label, took, tests, failure, skipped, .. } = done;
    let took = super::seconds(*took);
    let (outcome, tests) = match failure {
        None => ("passed", format!("{tests} tests")),
        Some(failure) => ("FAILED", failure.clone()),
    };
    let skips = if skipped.is_empty() { String::new() } else { format!(", {} skipped", skipped.len()) };
    eprintln!("[{number:2}/{count}] {outcome} {label} in {took}: {tests}{skips}");
    if failure.is_some() {
        let bytes = fs::read(log).unwrap_or_default();
        let said = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = said.lines().collect();
        let left_out = lines.len().saturating_sub(LINES);
        eprintln!("---- {label}: the last lines of {}", log.display());
        eprintln!("{}\n---- end of {label}", lines[left_out..].join("\n"));
    }
}

/// What was not tested, each line once, with the programs that say so.
pub(crate) fn skipped(done: &[Done]) -> BTreeMap<&str, Vec<&str>> {
    let mut all = BTreeMap::<&str, Vec<&str>>::new();
    for done in done {
        for what in &done.skipped {
            all.entry(what).or_default().push(&done.label);
        }
    }
    all
}

#[expect(clippy::disallowed_methods, reason = "programs are timed, and ended when they hang")]
fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(label: &str, script: &str, places: usize) -> Task {
        Task {
            stage: "test",
            label: format!("runner-test-{}-{label}", std::process::id()),
            program: "sh".into(),
            args: vec!["-c".into(), script.into()],
            folder: workspace::root().to_owned(),
            environment: vec![("EBB_WORD".to_owned(), "told".into())],
            places,
            in_background: false,
            limit: Duration::from_secs(600),
        }
    }

    fn logged(done: &Done) -> String {
        let log = workspace::target_dir().join("check").join(format!("{}.log", done.label));
        let said = fs::read_to_string(&log).unwrap();
        fs::remove_file(&log).unwrap();
        said
    }

    #[test]
    fn tests_skips_failures_and_output_are_seen() {
        let good =
            "echo $EBB_WORD; echo 'test result: ok. 3 passed; 0 failed'; echo 'test result: ok. 2 passed'";
        let skips = "echo 'SKIPPED: no etcd' >&2; echo 'x SKIPPED: no etcd'; echo 'SKIPPED: no GPU'";
        let tasks = vec![shell("good", good, 1), shell("skips", skips, 1), shell("bad", "exit 3", 1)];
        let mut done = run(tasks, 2).unwrap();
        done.sort_by(|one, other| one.label.cmp(&other.label));
        let [bad, good, skips] = &done[..] else { panic!("{done:?}") };
        assert!(bad.failure.as_deref().unwrap().contains('3'), "{bad:?}");
        assert!(good.failure.is_none() && good.tests == 5, "{good:?}");
        assert_eq!(skips.skipped, ["no GPU", "no etcd"]);
        let all = skipped(&done);
        assert_eq!(all["no etcd"].len(), 1);
        assert!(logged(good).starts_with("told"));
        logged(bad);
        logged(skips);
    }

    #[test]
    fn what_hangs_is_ended_with_what_it_started() {
        let mut task = shell("hangs", "sleep 1000 & echo $!; wait", 1);
        task.limit = Duration::from_secs(1);
        let done = run(vec![task], 1).unwrap();
        assert!(done[0].failure.as_deref().unwrap().contains("hangs"), "{done:?}");
        let child: u32 = logged(&done[0]).trim().parse().unwrap();
        // Its new parent has to notice.
        let lives = || fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        while !lives().is_empty() && !lives().contains("(zombie)") {
            std::thread::park_timeout(LOOK);
        }
    }

    #[test]
    fn there_is_room_for_as_many_as_there_are_places() {
        let waiting = [shell("large", "true", 9), shell("two", "true", 2), shell("one", "true", 1)];
        assert_eq!(next(&waiting, &[], 3), Some(0), "more than there are places is all of them");
        let running = vec![start(shell("runs", "sleep 1000", 2), &std::env::temp_dir()).unwrap()];
        assert_eq!(next(&waiting, &running, 3), Some(2));
        assert_eq!(next(&waiting, &running, 2), None);
        drop(Tasks(running));
    }
}

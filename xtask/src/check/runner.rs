//! Runs test programs beside each other, as many as the machine bears: most of them wait for
//! processes of theirs most of the time.
//!
//! What a program says goes to a file of its own and is shown when it fails. A program that says
//! nothing for too long is ended with all that it started. Nothing is given up when one fails: the
//! others go on, and each failure is told at once.

use super::{now, seconds};
use crate::workspace;
use anyhow::{Context, Result};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// What a test says when it could not test, see `tests/harness/skip.rs`.
const SKIPPED: &str = "SKIPPED: ";

/// How often it looks whether a program has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Lines of a failed program's output that are shown; the file has all.
const LINES: usize = 500;

/// Something to run.
#[derive(Debug)]
pub(crate) struct Task {
    /// The stage that it belongs to.
    pub(crate) stage: &'static str,
    /// A unique name, for people.
    pub(crate) label: String,
    pub(crate) command: Command,
    /// Number of places that it takes; it takes all if there are fewer.
    pub(crate) places: usize,
    /// Longest silence, after which the task is ended. A limit of its whole time would end what
    /// goes on well on a slow machine.
    pub(crate) limit: Duration,
}

/// How a task ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) stage: &'static str,
    pub(crate) label: String,
    /// Why it failed, if it did.
    pub(crate) failure: Option<String>,
    /// Time from the begin of the first task to the end of this one.
    pub(crate) ended: Duration,
    /// What the task and its processes computed. A process that its parent never waited for does
    /// not count.
    pub(crate) cpu: Duration,
    /// Tests that passed.
    pub(crate) tests: u64,
    /// The tests that it skipped, each with the reason.
    pub(crate) skipped: Vec<String>,
}

/// A task that runs. It ends, with all that it started, when it is dropped.
struct Running {
    task: Task,
    child: Child,
    since: Instant,
    said: Said,
}

/// What a task has said so far, in bytes, and when the last of them were seen.
struct Said {
    bytes: u64,
    at: Instant,
}

impl Said {
    /// Returns how long the task has been silent, now that it has said `bytes`.
    fn silence(&mut self, bytes: u64, now: Instant) -> Duration {
        if bytes != self.bytes {
            *self = Self { bytes, at: now };
        }
        now - self.at
    }
}

/// Runs all, the first ones first, in `places` places.
///
/// # Errors
/// A program cannot be started; those that run are ended.
pub(crate) fn run(mut waiting: Vec<Task>, places: usize) -> Result<Vec<Done>> {
    let (begin, count) = (now(), waiting.len());
    let mut running: Vec<Running> = Vec::new();
    let (mut done, mut cpu) = (Vec::new(), cpu_of_children());
    while done.len() < count {
        while waiting.first().is_some_and(|task| has_room(task, &running, places)) {
            running.push(Running::start(waiting.remove(0))?);
        }
        std::thread::park_timeout(LOOK);
        let mut index = 0;
        while index < running.len() {
            let Some(failure) = running[index].look()? else {
                index += 1;
                continue;
            };
            let number = done.len() + 1;
            eprint!("[{number:2}/{count}] ");
            let before = std::mem::replace(&mut cpu, cpu_of_children());
            done.push(running.remove(index).tell(failure, begin, cpu.saturating_sub(before)));
        }
    }
    Ok(done)
}

/// Returns what the processes that this one waited for have computed, with those that they waited
/// for. Zero where there is no `/proc`.
fn cpu_of_children() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name, which may hold anything: the state, then numbers. User and system time of
    // children are the 16th and 17th of all, in hundredths of a second (proc_pid_stat(5)).
    let numbers = stat.rsplit_once(") ").map_or("", |(_, numbers)| numbers).split(' ');
    let ticks = numbers.skip(13).take(2).filter_map(|number| number.parse::<u64>().ok()).sum::<u64>();
    Duration::from_millis(10 * ticks)
}

/// Returns whether there is room for a task. Tasks begin in their order, because one that needs two
/// places would wait until the end if others took each place that becomes free.
fn has_room(task: &Task, running: &[Running], places: usize) -> bool {
    let taken: usize = running.iter().map(|running| running.task.places).sum();
    taken + task.places.min(places) <= places
}

/// Returns the file with all that a task says.
pub(crate) fn log(label: &str) -> PathBuf {
    workspace::target_dir().join(format!("check/{}.log", label.replace('/', "-")))
}

impl Running {
    fn start(mut task: Task) -> Result<Self> {
        let log = log(&task.label);
        fs::create_dir_all(log.parent().context("a folder")?).context("create the folder of the logs")?;
        let file = File::create(&log).with_context(|| format!("create `{}`", log.display()))?;
        task.command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = task.command.spawn().with_context(|| format!("start {:?}", task.command))?;
        Ok(Self { task, child, since: now(), said: Said { bytes: 0, at: now() } })
    }

    /// Returns whether it has ended; then why it failed, if it did.
    fn look(&mut self) -> Result<Option<Option<String>>> {
        if let Some(status) = self.child.try_wait().context("wait for a program")? {
            return Ok(Some((!status.success()).then(|| status.to_string())));
        }
        let bytes = fs::metadata(log(&self.task.label)).context("look at a program's log")?.len();
        let hangs = self.said.silence(bytes, now()) >= self.task.limit;
        Ok(hangs.then(|| Some(format!("ended after {} of silence: it hangs", seconds(self.task.limit)))))
    }

    /// Says how it ended, and what it said if it failed.
    fn tell(self, failure: Option<String>, begin: Instant, cpu: Duration) -> Done {
        let (stage, label) = (self.task.stage, self.task.label.clone());
        let took = format!("{}, {} of CPU", seconds(self.since.elapsed()), seconds(cpu));
        // What hangs is ended before its output is read.
        drop(self);
        let bytes = fs::read(log(&label)).unwrap_or_default();
        let said = String::from_utf8_lossy(&bytes);
        let mut skipped: Vec<_> = said.lines().filter_map(skipped_line).collect();
        skipped.sort();
        skipped.dedup();
        let tests = passed(&said);
        let skips = if skipped.is_empty() { String::new() } else { format!(", {} skipped", skipped.len()) };
        match &failure {
            None => eprintln!("passed {label} in {took}: {tests} tests{skips}"),
            Some(failure) => {
                let lines: Vec<&str> = said.lines().collect();
                eprintln!("FAILED {label} in {took}: {failure}{skips}");
                eprintln!("---- {label}: the last lines of {}", log(&label).display());
                eprintln!("{}\n---- end of {label}", lines[lines.len().saturating_sub(LINES)..].join("\n"));
            }
        }
        Done { stage, label, failure, ended: begin.elapsed(), cpu, tests, skipped }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(Some(_)) = self.child.try_wait() {
            return;
        }
        let mut all = vec![self.child.id()];
        // Those that it starts meanwhile are found too, until there is nobody new.
        let mut index = 0;
        while index < all.len() {
            signal("STOP", &all[index..=index]);
            all.extend(children(all[index]));
            index += 1;
        }
        signal("KILL", &all);
        let _ = self.child.wait();
    }
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

/// Returns what a line says of a skipped test: `SKIPPED: no MNIST`, or pytest's `SKIPPED [1]
/// python/tests/test_jax.py:12: no JAX`.
fn skipped_line(line: &str) -> Option<String> {
    let of_pytest = || line.strip_prefix("SKIPPED [")?.split_once(".py:")?.1.split_once(": ");
    line.split_once(SKIPPED).or_else(of_pytest).map(|(_, what)| what.to_owned())
}

/// Returns how many tests passed, by lines such as `test result: ok. 3 passed; 0 failed` and
/// pytest's `3 passed, 1 skipped in 0.12s`.
fn passed(said: &str) -> u64 {
    let is_of_pytest =
        |line: &str| line.starts_with(|first: char| first.is_ascii_digit()) && line.contains(" in ");
    let counts = said.lines().filter(|line| line.starts_with("test result: ") || is_of_pytest(line));
    let count = |line: &str| line.split_once(" passed")?.0.rsplit(' ').next()?.parse::<u64>().ok();
    counts.filter_map(count).sum()
}

/// Returns what was not tested, each line once, with the programs that say so.
pub(crate) fn skipped(done: &[Done]) -> BTreeMap<&str, Vec<&str>> {
    let mut all = BTreeMap::<&str, Vec<&str>>::new();
    for done in done {
        for what in &done.skipped {
            all.entry(what).or_default().push(&done.label);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(label: &str, script: &str, places: usize) -> Task {
        let label = format!("runner-test-{}-{label}", std::process::id());
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Task { stage: "test", label, command, places, limit: Duration::from_secs(600) }
    }

    fn logged(done: &Done) -> String {
        let said = fs::read_to_string(log(&done.label)).unwrap();
        fs::remove_file(log(&done.label)).unwrap();
        said
    }

    #[test]
    fn tests_skips_failures_and_output_are_seen() {
        let good = "echo told; echo 'test result: ok. 3 passed; 0 failed'; echo 'test result: ok. 2 passed'; \
                    i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done";
        let skips = "echo 'SKIPPED: no etcd' >&2; echo 'x SKIPPED: no etcd'; echo 'SKIPPED: no GPU'";
        let python = "echo 'SKIPPED [2] python/tests/test_jax.py:12: no JAX'; \
                      echo '1 failed, 4 passed, 2 skipped in 0.12s'";
        let tasks = vec![
            shell("good", good, 1),
            shell("skips", skips, 1),
            shell("bad", "exit 3", 1),
            shell("python", python, 1),
        ];
        let mut done = run(tasks, 2).unwrap();
        done.sort_by(|one, other| one.label.cmp(&other.label));
        let [bad, good, python, skips] = &done[..] else { panic!("{done:?}") };
        assert!(bad.failure.as_deref().unwrap().contains('3'), "{bad:?}");
        assert!(good.failure.is_none() && good.tests == 5, "{good:?}");
        assert!(!good.cpu.is_zero(), "{good:?}");
        assert_eq!((python.tests, &*python.skipped), (4, &["no JAX".to_owned()][..]));
        assert_eq!(skips.skipped, ["no GPU", "no etcd"]);
        assert_eq!(skipped(&done)["no etcd"].len(), 1);
        assert!(logged(good).starts_with("told"));
        for done in [bad, python, skips] {
            logged(done);
        }
    }

    #[test]
    fn what_hangs_is_ended_with_what_it_started() {
        let task = Task { limit: Duration::from_secs(20), ..shell("hangs", "sleep 1000 & echo $!; wait", 1) };
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
    fn silence_begins_again_with_each_word() {
        let begin = now();
        let at = |secs| begin + Duration::from_secs(secs);
        let mut said = Said { bytes: 0, at: begin };
        let silences = [(0, 30), (5, 40), (5, 70), (6, 75), (6, 76)]
            .map(|(bytes, secs)| said.silence(bytes, at(secs)).as_secs());
        assert_eq!(silences, [30, 0, 30, 0, 1]);
    }

    #[test]
    fn there_is_room_for_as_many_as_there_are_places() {
        let task = |places| shell("waits", "true", places);
        assert!(has_room(&task(9), &[], 3), "more than there are places is all of them");
        let running = [Running::start(shell("runs", "sleep 1000", 2)).unwrap()];
        let has_room = |needed, places| has_room(&task(needed), &running, places);
        assert!(has_room(1, 3) && has_room(0, 2) && has_room(2, 4));
        assert!(!has_room(1, 2) && !has_room(2, 3) && !has_room(9, 3));
        fs::remove_file(log(&running[0].task.label)).unwrap();
    }
}

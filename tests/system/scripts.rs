//! `ebb submit SCRIPT.py` with real processes: what agents do with processes of scripts. The
//! interpreter is `sh`, so these tests need no Python. `python/tests` has scripts that train.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use net::channel::{Dialer, Purpose};
use proto::artifact::{describe, slices};
use proto::pb;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::harness::{Cluster, ebb, succeed, text};

/// A script that stays, and writes its process number into the file of its name.
const STAYS: &str = "trap 'echo asked; exit 1' TERM\necho $$ > $PLACE/$EBBFLOW_WORKER.new\n\
    mv $PLACE/$EBBFLOW_WORKER.new $PLACE/$EBBFLOW_WORKER\nwhile :; do sleep 600 & wait; done\n";

/// A cluster whose workers are agents with `sh` as interpreter, and a folder with a script.
struct Place {
    cluster: Cluster,
    dir: TempDir,
}

impl Place {
    fn new(script: &str, agents: usize) -> Self {
        let dir = TempDir::new().unwrap();
        fs::create_dir(dir.path().join("code")).unwrap();
        fs::write(dir.path().join("code/train.py"), script).unwrap();
        let mut place = Self { cluster: Cluster::start(0, 0), dir };
        (0..agents).for_each(|_| place.add_agent(&[]));
        place
    }

    fn add_agent(&mut self, more: &[&str]) {
        let more = [&["--scripts", "--python", "sh"][..], more].concat();
        self.cluster.add_worker_as(&more, &[("EBB_SOCKETS", "nearest"), ("SHELL_OF_AGENT", "yes")]);
    }

    fn script(&self) -> PathBuf {
        self.dir.path().join("code/train.py")
    }

    /// Returns `ebb submit SCRIPT` with more arguments.
    fn submit(&self, more: &[&str]) -> std::process::Command {
        let place = format!("PLACE={}", self.dir.path().display());
        let mut command = ebb(["submit", "--master", &self.cluster.url, "--env", &place]);
        command.arg(self.script()).args(more);
        command
    }

    /// Waits until a process of this name runs that is not `before`. Returns its number.
    fn process(&self, name: &str, before: Option<i32>) -> i32 {
        let file = self.dir.path().join(name);
        loop {
            let found = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
            if let Some(found) = found.filter(|found| Some(*found) != before) {
                return found;
            }
            pause();
        }
    }

    /// Returns the agent whose guard started a process, by its place among the workers.
    fn agent_of(&self, process: i32) -> usize {
        let agent = parent(parent(process)).cast_unsigned();
        self.cluster.workers.iter().position(|worker| worker.child.id() == agent).expect("an agent")
    }

    /// Waits until a process of the script has said something. Returns all of it.
    fn wait_for_logs(&self, number: &str) -> String {
        loop {
            let logs = ["logs", "train", "--worker", number, "--master", &self.cluster.url];
            let said = ebb(logs).output().unwrap().stdout;
            if !said.is_empty() {
                return String::from_utf8(said).unwrap();
            }
            pause();
        }
    }

    /// Waits until the status of the script's job has this text.
    fn wait_for_status(&self, wanted: &str) -> String {
        loop {
            let said = text(&ebb(["status", "train", "--master", &self.cluster.url]).output().unwrap());
            if said.contains(wanted) {
                return said;
            }
            pause();
        }
    }
}

fn pause() {
    std::thread::park_timeout(Duration::from_millis(5));
}

/// Returns whether a process runs. One that has ended and that nobody has waited for does not.
fn runs(process: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|state| !state.starts_with('Z')))
}

/// Returns a number of a process that the system lists behind its state.
fn listed(process: i32, index: usize) -> i32 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    stat.rsplit(") ").next().unwrap().split(' ').nth(index).unwrap().parse().unwrap()
}

fn parent(process: i32) -> i32 {
    listed(process, 1)
}

/// Returns the process group of a process.
fn group(process: i32) -> i32 {
    listed(process, 2)
}

fn wait_until_gone(process: i32) {
    while runs(process) {
        pause();
    }
}

fn kill(process: i32, signal: Signal) {
    kill_process(Pid::from_raw(process).unwrap(), signal).unwrap();
}

#[test]
fn a_script_that_never_joins_fails_with_what_it_said() {
    let script = "cat words/hello; echo \"$EBBFLOW_WORKER $1 $2 $GIVEN [$EBB_SOCKETS] $SHELL_OF_AGENT $EBBFLOW_JOB of $EBBFLOW_WORKERS\"; exit 4";
    let place = Place::new(script, 1);
    fs::create_dir(place.dir.path().join("code/words")).unwrap();
    fs::write(place.dir.path().join("code/words/hello"), "hello \x1b[2J\n").unwrap();
    fs::write(place.dir.path().join("code/.env"), "PASSWORD=1").unwrap();
    let output = place.submit(&["--env", "GIVEN=this", "--follow", "--", "--lr", "0.1"]).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("files travel with the script (2, ") && !said.contains(".env"), "{said}");
    assert!(said.contains("process 0 on worker-0 ended with exit code 4 and said last:"), "{said}");
    assert!(said.contains("train-1-0 --lr 0.1 this [] yes train of 1"), "{said}");
    assert!(said.contains("hello \\u{1b}[2J") && !said.contains('\x1b'), "control characters: {said}");
    let logs = |more: &[&str]| {
        let output = ebb(["logs", "train", "--master", &place.cluster.url]).args(more).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    // Not on a terminal, so as they came.
    let whole = logs(&[]);
    assert!(whole.starts_with("train-1-0 | hello \x1b[2J\ntrain-1-0 | train-1-0 --lr 0.1 this"), "{whole}");
    assert_eq!(logs(&["--worker", "train-1-0", "--follow"]), whole.replace("train-1-0 | ", ""));
    assert_eq!(logs(&["--worker", "1"]), "");
    let jobs = succeed(["jobs", "--json", "--master", &place.cluster.url]);
    assert!(jobs.contains("train-1") && jobs.contains("failed"), "{jobs}");
    let log = place.cluster.workers[0].log();
    assert!(
        log.contains("everyone who may send scripts to this master has the rights of this process"),
        "{log}"
    );
}

#[test]
fn only_workers_that_were_started_with_the_flag_take_processes() {
    let mut place = Place::new(STAYS, 0);
    place.cluster.add_worker();
    assert!(place.submit(&[]).status().unwrap().success());
    place.wait_for_status("waits for agents, which are workers that were started with --scripts");
    place.add_agent(&[]);
    let process = place.process("train-1-0", None);
    assert_eq!(place.agent_of(process), 1);
    let log = place.cluster.workers[0].log();
    assert!(!log.contains("scripts"), "{log}");
}

#[test]
fn processes_move_from_an_agent_that_is_killed_and_come_back_after_their_own_death() {
    let place = Place::new(STAYS, 2);
    let said = text(&place.submit(&["--workers", "2", "--name", "train"]).output().unwrap());
    assert!(said.contains("submitted train-1"), "{said}");
    let (first, second) = (place.process("train-1-0", None), place.process("train-1-1", None));
    assert_ne!(place.agent_of(first), place.agent_of(second), "they spread");
    // By a signal, which comes from outside the script: it is started again at the same agent.
    kill(first, Signal::KILL);
    let again = place.process("train-1-0", Some(first));
    assert!(!runs(first));
    // The agent of the second process has one place, so the process of a killed one waits.
    let lost = place.agent_of(second);
    place.cluster.workers[lost].signal("KILL");
    wait_until_gone(second);
    assert!(place.wait_for_status("1 of 2 processes run").contains("pending"));
    let mut place = place;
    place.add_agent(&["--script-processes", "3"]);
    let moved = place.process("train-1-1", Some(second));
    assert_eq!((place.agent_of(moved), runs(again)), (2, true));
    let cancelled = succeed(["cancel", "train", "--master", &place.cluster.url]);
    assert!(cancelled.contains("cancelled"), "{cancelled}");
    wait_until_gone(again);
    wait_until_gone(moved);
}

#[test]
fn processes_outlive_a_restart_of_the_master_and_not_the_stop_of_their_agent() {
    let mut place = Place::new(STAYS, 1);
    assert!(place.submit(&[]).status().unwrap().success());
    let process = place.process("train-1-0", None);
    place.cluster.restart_master();
    assert!(place.wait_for_status("1 of 1 processes run").contains("train-1"));
    assert!(runs(process) && place.process("train-1-0", None) == process);
    let said = text(&place.submit(&[]).output().unwrap());
    assert!(said.contains("train-1 lives; wait for its end"), "{said}");
    place.cluster.workers[0].signal("TERM");
    let left = place.cluster.workers[0].child.wait().unwrap();
    assert!(left.success() && !runs(process), "{}", place.cluster.workers[0].log());
    place.wait_for_status("waits for agents");
}

#[test]
fn processes_of_one_agent_are_apart_and_end_with_it() {
    let script = format!("readlink /proc/$$/fd/$EBBFLOW_AGENT\n{STAYS}");
    let mut place = Place::new(&script, 0);
    place.add_agent(&["--script-processes", "2"]);
    assert!(place.submit(&["--workers", "3"]).status().unwrap().success());
    let [first, second] = [0, 1].map(|number| place.process(&format!("train-1-{number}"), None));
    assert!(place.wait_for_status("2 of 3 processes run").contains("pending"));
    assert_eq!([first, second].map(group), [first, second], "each is the first one of a group");
    // Lines of one process are not among those of the other, and so are their sockets.
    let sockets = ["0", "1"].map(|number| place.wait_for_logs(number));
    assert!(sockets.iter().all(|socket| socket.starts_with("socket:[")), "{sockets:?}");
    assert_ne!(sockets[0], sockets[1]);
    kill(first, Signal::KILL);
    let again = place.process("train-1-0", Some(first));
    assert!(runs(second) && place.process("train-1-1", None) == second, "the other one goes on");
    place.cluster.workers[0].signal("KILL");
    wait_until_gone(again);
    wait_until_gone(second);
    place.add_agent(&["--script-processes", "2"]);
    let both = [("train-1-0", again), ("train-1-1", second)];
    let both = both.map(|(name, before)| place.process(name, Some(before)));
    assert_eq!(both.map(|process| place.agent_of(process)), [1, 1]);
    place.cluster.workers[1].signal("TERM");
    let left = place.cluster.workers[1].child.wait().unwrap();
    assert!(left.success() && !both.into_iter().any(runs), "{}", place.cluster.workers[1].log());
}

/// A script that stays, with a child in its process group, one in a session of its own, and one
/// whose parents have ended, as of a daemon. None of them looks for its parent.
fn with_children() -> String {
    let write = "write='echo $$ > $PLACE/$NAME.new; mv $PLACE/$NAME.new $PLACE/$NAME; exec sleep 600'\n\
        export write; NAME=child sh -c \"$write\" &\n\
        NAME=session setsid sh -c \"$write\" &\n\
        NAME=daemon setsid sh -c 'setsid sh -c \"$write\" & exit 0' &\n";
    write.to_owned() + STAYS
}

#[test]
fn what_a_process_has_started_ends_with_an_agent_that_is_killed() {
    let place = Place::new(&with_children(), 1);
    assert!(place.submit(&[]).status().unwrap().success());
    let processes = ["train-1-0", "child", "session", "daemon"].map(|name| place.process(name, None));
    let [first, child, session, daemon] = processes;
    assert_eq!([child, session, daemon].map(|process| group(process) == first), [true, false, false]);
    let guard = parent(first);
    // The parents of the daemon may not have ended yet.
    while parent(daemon) != guard {
        pause();
    }
    place.cluster.workers[0].signal("KILL");
    processes.into_iter().chain([guard]).for_each(wait_until_gone);
}

#[test]
fn an_agent_ends_with_its_guard_and_leaves_no_process() {
    let mut place = Place::new(&with_children(), 1);
    assert!(place.submit(&[]).status().unwrap().success());
    let processes = ["train-1-0", "child", "session", "daemon"].map(|name| place.process(name, None));
    kill(parent(processes[0]), Signal::KILL);
    let left = place.cluster.workers[0].child.wait().unwrap();
    let log = place.cluster.workers[0].log();
    assert!(!left.success() && log.contains("starts the processes of scripts was killed"), "{log}");
    assert!(!processes.into_iter().any(runs), "{processes:?}");
}

#[test]
fn a_script_that_hangs_before_it_joins_is_seen_and_can_be_cancelled() {
    let place = Place::new(&format!("echo begun\n{STAYS}"), 1);
    assert!(place.submit(&[]).status().unwrap().success());
    let process = place.process("train-1-0", None);
    let said = place.wait_for_status("1 of 1 processes run, and none has joined a job yet");
    assert!(said.contains("pending"), "{said}");
    assert_eq!(place.wait_for_logs("0"), "begun\n");
    assert!(runs(process));
    succeed(["cancel", "train", "--master", &place.cluster.url]);
    wait_until_gone(process);
    place.wait_for_status("cancelled");
    // Its place is free.
    assert!(place.submit(&["--name", "next"]).status().unwrap().success());
    place.process("next-2-0", None);
}

#[test]
fn a_process_that_is_killed_too_often_leaves_its_agent_and_the_other_one_stays() {
    let mut place = Place::new(STAYS, 0);
    place.add_agent(&["--script-processes", "2"]);
    assert!(place.submit(&["--workers", "2"]).status().unwrap().success());
    let (first, mut second) = (place.process("train-1-0", None), place.process("train-1-1", None));
    // Three restarts in ten minutes, for each process on each agent.
    for _ in 0..3 {
        kill(second, Signal::KILL);
        second = place.process("train-1-1", Some(second));
        assert_eq!(place.agent_of(second), 0);
    }
    kill(second, Signal::KILL);
    assert!(place.wait_for_status("1 of 2 processes run").contains("pending"));
    place.add_agent(&[]);
    let moved = place.process("train-1-1", Some(second));
    assert_eq!((place.agent_of(moved), runs(first)), (1, true));
}

#[test]
fn a_script_that_ends_before_it_joins_leaves_nobody() {
    let place = Place::new("echo done", 1);
    let output = place.submit(&["--workers", "2", "--follow"]).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no process is left, and no process has joined a job"), "{said}");
    assert!(said.contains("ended with exit code 0 and said last:\n") && said.contains("    done"), "{said}");
}

#[test]
fn logs_are_followed_until_the_script_is_over() {
    let place = Place::new("echo one; read line < $PLACE/gate; echo $line; exit 3", 1);
    let gate = place.dir.path().join("gate");
    assert!(std::process::Command::new("mkfifo").arg(&gate).status().unwrap().success());
    assert!(place.submit(&[]).status().unwrap().success());
    let mut follow = ebb(["logs", "train-1", "--follow", "--master", &place.cluster.url]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert_eq!(lines.next().as_deref(), Some("train-1-0 | one"));
    fs::write(&gate, "two\n").unwrap();
    assert_eq!(lines.collect::<Vec<_>>(), ["train-1-0 | two"]);
    assert!(follow.wait().unwrap().success());
    let said = text(&ebb(["logs", "square", "--master", &place.cluster.url]).output().unwrap());
    assert!(said.contains("no job `square`"), "{said}");
}

/// Sends a script with these bytes as its bundle.
async fn send(url: &str, bundle: Vec<u8>) -> Result<pb::SubmitReply, tonic::Status> {
    use pb::artifact_part::Part as File;
    use pb::script_request::Part;
    let (name, entry) = ("train".to_owned(), "train.py".to_owned());
    let script = pb::Script { name, entry, processes: 1, ..Default::default() };
    let file = |part| Part::Artifact(pb::ArtifactPart { part: Some(part) });
    let header = file(File::Header(describe("bundle", &bundle)));
    let content = slices(&bundle.into()).map(|slice| file(File::Content(slice)));
    let parts = [Part::Script(script), header].into_iter().chain(content);
    let parts: Vec<_> = parts.map(|part| pb::ScriptRequest { part: Some(part) }).collect();
    let channel = Dialer::tcp().channel(url, Purpose::Control).unwrap();
    let mut scripts = pb::scripts_client::ScriptsClient::new(channel);
    Ok(scripts.submit(futures::stream::iter(parts)).await?.into_inner())
}

#[tokio::test]
async fn a_hostile_bundle_is_refused_by_the_agent() {
    let place = Place::new("", 1);
    // Nobody else has a file of this name in the folder for temporary files.
    let name = format!("escaped-{}", std::process::id());
    let (bad, good) = (format!("../{name}"), "a".repeat(3 + name.len()));
    let mut bundle = proto::bundle::encode(vec![proto::bundle::File {
        path: &good,
        executable: true,
        content: b"touch escaped",
    }])
    .unwrap();
    let at = bundle.windows(good.len()).position(|part| part == good.as_bytes()).unwrap();
    bundle[at..at + bad.len()].copy_from_slice(bad.as_bytes());
    assert_eq!(send(&place.cluster.url, bundle).await.unwrap().name, "train-1");
    let said = place.wait_for_status("failed");
    assert!(said.contains(&format!("the bundle of the script is refused: the path `{bad}`")), "{said}");
    let escaped = |folder: &Path| folder.join(&name).exists();
    assert!(!escaped(place.dir.path()) && !escaped(&std::env::temp_dir()));
}

#[test]
fn settings_of_scripts_are_checked_before_anything_starts() {
    let said = text(&ebb(["worker", "--scripts", "--script-processes", "0"]).output().unwrap());
    assert!(said.contains("script_processes: from 1 to 256"), "{said}");
}

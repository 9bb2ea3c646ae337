//! What scripts of others try, with real processes: each attempt is refused or contained. The
//! interpreter is `sh`. `python/tests/test_scripts_secured.py` has those that speak to the cluster.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::harness::tmpfs::Tmpfs;
use crate::harness::{Cluster, Lacks, ebb, skipped, succeed, text};

/// A cluster with one agent, and a folder with a script.
struct Place {
    cluster: Cluster,
    dir: TempDir,
}

impl Place {
    fn new(script: &str, more: &[&str]) -> Self {
        let dir = TempDir::new().unwrap();
        for folder in ["code", "scratch"] {
            fs::create_dir(dir.path().join(folder)).unwrap();
        }
        fs::write(dir.path().join("code/train.py"), script).unwrap();
        let mut place = Self { cluster: Cluster::start(0, 0), dir };
        place.add_agent(more);
        place
    }

    fn add_agent(&mut self, more: &[&str]) {
        let scratch = self.scratch().display().to_string();
        let own = ["--scripts", "--python", "sh", "--scratch", &scratch];
        let more: Vec<_> = own.iter().chain(more).copied().collect();
        self.cluster.add_worker_as(&more, &[]);
    }

    fn scratch(&self) -> PathBuf {
        self.dir.path().join("scratch")
    }

    fn submit(&self, more: &[&str]) -> Command {
        let place = format!("PLACE={}", self.dir.path().display());
        let mut command = ebb(["submit", "--master", &self.cluster.url, "--env", &place]);
        command.arg(self.dir.path().join("code/train.py")).args(more);
        command
    }

    /// Runs the script to its end, which is a failure, because it joins no job.
    fn run(&self, more: &[&str]) -> Output {
        let output = self.submit(more).arg("--follow").output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        output
    }

    fn logs(&self) -> String {
        succeed(["logs", "train", "--master", &self.cluster.url])
    }
}

/// Returns the files below a folder that have these bytes.
fn files_with(folder: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(files_with(&path, bytes));
        } else if fs::read(&path).is_ok_and(|content| content.windows(bytes.len()).any(|part| part == bytes))
        {
            found.push(path);
        }
    }
    found
}

#[test]
fn a_secret_reaches_the_script_and_nothing_that_is_stored_or_shown() {
    let value = "hunter2-and-more";
    let script = "test ${#KEY} = 16 || exit 9\necho \"core $(ulimit -c)\"\necho \"first $KEY\"; echo \"to stderr: $KEY!\" >&2\n\
        head -c 8187 /dev/zero | tr '\\0' x; echo \"$KEY\"\nprintf \"$KEY\"\n\
        test -e $PLACE/crashed && exit 4; touch $PLACE/crashed; kill -SEGV $$";
    let place = Place::new(script, &[]);
    let output = place.submit(&["--secret", "KEY", "--follow"]).env("KEY", value).output().unwrap();
    let said = text(&output);
    assert!(said.contains("to stderr: [secret KEY]!"), "{said}");
    let logs = place.logs();
    // What its memory has when it crashes is written nowhere.
    assert!(logs.contains("core 0\n"), "{logs}");
    assert!(logs.contains("first [secret KEY]") && logs.contains("[secret KEY]\n"), "{logs}");
    let status = succeed(["status", "train", "--master", &place.cluster.url]);
    let jobs = succeed(["jobs", "--json", "--master", &place.cluster.url]);
    let watched = text(&ebb(["watch", "train", "--json", "--master", &place.cluster.url]).output().unwrap());
    let log = place.cluster.workers[0].log();
    assert!(log.contains("train-1-0 was ended by signal 11; it is started again"), "{log}");
    for shown in [said, logs, status, jobs, watched] {
        assert!(!shown.contains("hunter2"), "{shown}");
    }
    // Journal, files of jobs, and the logs of master and agent are here; logs of processes and all
    // that the agent has of scripts there.
    for folder in [place.cluster.dir.path(), place.dir.path()] {
        let stored = files_with(folder, value.as_bytes());
        assert!(stored.is_empty(), "{stored:?}");
    }
    assert!(!files_with(place.cluster.dir.path(), b"KEY").is_empty(), "the name is in the journal");
    assert!(!files_with(&place.scratch(), b"[secret KEY]").is_empty(), "the log is searched");
}

#[test]
fn secrets_do_not_outlive_the_master_and_are_asked_for_again() {
    let mut place = Place::new("echo never", &[]);
    // No agent has taken the script yet when the master starts again.
    place.cluster.workers.clear();
    let submitted = place.submit(&["--secret", "KEY"]).env("KEY", "hunter2-and-more").output().unwrap();
    assert!(submitted.status.success(), "{}", text(&submitted));
    place.cluster.restart_master();
    place.add_agent(&[]);
    let watched = ebb(["watch", "train", "--master", &place.cluster.url]).output().unwrap();
    let said = text(&watched) + &succeed(["status", "train", "--master", &place.cluster.url]);
    assert!(said.contains("the secrets of train-1 are lost") && said.contains("submit it again"), "{said}");
    assert!(!place.logs().contains("never"));
}

#[test]
fn a_secret_that_is_missing_or_cannot_be_redacted_is_refused_before_anything_travels() {
    let place = Place::new("", &[]);
    let missing = text(&place.submit(&["--secret", "NO_SUCH_SECRET"]).output().unwrap());
    assert!(missing.contains("the environment has no such variable; set it"), "{missing}");
    assert!(!missing.contains("UTF-8"), "{missing}");
    let bytes = OsStr::from_bytes(b"long-enough\xff");
    let no_text = text(&place.submit(&["--secret", "KEY"]).env("KEY", bytes).output().unwrap());
    assert!(no_text.contains("secret KEY: the value of the variable is no UTF-8"), "{no_text}");
    assert!(no_text.contains("Base64") && !no_text.contains("long-enough"), "{no_text}");
    let short = text(&place.submit(&["--secret", "KEY"]).env("KEY", "seven77").output().unwrap());
    assert!(short.contains("a line of at least 8 bytes") && !short.contains("seven77"), "{short}");
    let twice = text(&place.submit(&["--secret", "PLACE"]).env("PLACE", "long-enough").output().unwrap());
    assert!(twice.contains("Script.secrets"), "{twice}");
    assert!(!succeed(["jobs", "--master", &place.cluster.url]).contains("train"));
}

#[test]
fn a_gigabyte_of_output_takes_a_bounded_place() {
    let place = Place::new("head -c 1000000000 /dev/zero | tr '\\0' x; echo; echo done; exit 3", &[]);
    let mut peak = 0;
    let said = text(&place.run(&[]));
    assert!(said.contains("    done"), "the end of it is told");
    let status = fs::read_to_string(format!("/proc/{}/status", place.cluster.workers[0].child.id())).unwrap();
    if let Some(line) = status.lines().find(|line| line.starts_with("VmHWM:")) {
        peak = line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10;
    }
    assert!((1..400).contains(&peak), "{peak} MiB of memory");
    let kept: u64 =
        files_with(&place.scratch(), b"xxxx").iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!((1..=130 << 20).contains(&kept), "{kept} bytes of logs");
    assert!(place.logs().len() <= 300 << 10);
}

#[test]
fn what_a_script_leaves_behind_ends_with_it() {
    // One child in a session of its own, and one whose parents have ended, as of a daemon.
    let script = "write='echo $$ > $PLACE/$NAME.new; mv $PLACE/$NAME.new $PLACE/$NAME; exec sleep 600'\n\
        export write; NAME=child setsid sh -c \"$write\" &\n\
        NAME=daemon setsid sh -c 'setsid sh -c \"$write\" & exit 0' &\n\
        until test -e $PLACE/child && test -e $PLACE/daemon; do sleep 0.01; done; exit 3";
    let place = Place::new(script, &[]);
    let said = text(&place.run(&[]));
    assert!(said.contains("ended with exit code 3"), "{said}");
    for name in ["child", "daemon"] {
        let process = fs::read_to_string(place.dir.path().join(name)).unwrap();
        assert!(!Path::new("/proc").join(process.trim()).exists(), "{name} {process} lives");
    }
}

/// Two scripts of equal files run at a time. Each changes its files, and the other one does not see
/// it.
#[test]
fn scripts_of_equal_files_do_not_see_what_the_other_one_writes() {
    let script = "touch written-by-$EBBFLOW_JOB; echo \"$EBBFLOW_JOB # by $EBBFLOW_JOB\" >> train.py\n\
        touch $PLACE/$EBBFLOW_JOB; until test -e $PLACE/one && test -e $PLACE/other; do sleep 0.01; done\n\
        ls; tail -n 1 train.py; exit 3\n";
    let place = Place::new(script, &["--script-processes", "2"]);
    let names = ["one", "other"];
    let submitted = names.map(|name| {
        let mut submit = place.submit(&["--name", name, "--follow"]);
        submit.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    });
    for mut process in submitted {
        assert_eq!(process.wait().unwrap().code(), Some(1));
    }
    for name in names {
        let said = succeed(["logs", name, "--worker", "0", "--master", &place.cluster.url]);
        assert_eq!(said, format!("train.py\nwritten-by-{name}\n{name} # by {name}\n"));
    }
}

#[test]
fn a_script_of_another_user_reads_no_key_of_its_agent() {
    // Its parent is the guard of the agent, and the parent of that is the agent.
    let script = "id -un; echo \"home $HOME\"; cat $PLACE/agent.token && echo READ\n\
        cat $PLACE/agent.key && echo READ; agent=$(cut -d' ' -f4 /proc/$PPID/stat); echo \"agent $agent\"\n\
        for process in $PPID $agent; do\n\
        cat /proc/$process/environ > own && echo READ; kill -9 $process && echo KILLED; done\n\
        ls $(dirname $PWD) && echo LISTED; cat ../logs/* && echo READ\n\
        touch train.py && echo \"owns its files\"; exit 3";
    let mut place = Place::new(script, &[]);
    place.cluster.workers.clear();
    let dir = place.dir.path();
    let [token, key] = ["agent.token", "agent.key"].map(|name| dir.join(name));
    fs::write(&token, "a-token-of-an-agent-0123").unwrap();
    fs::write(&key, "-----BEGIN PRIVATE KEY-----").unwrap();
    let files = [(&token, 0o600), (&key, 0o600), (&dir.to_owned(), 0o755), (&place.scratch(), 0o755)];
    for (path, mode) in files {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let token = token.display().to_string();
    let more = ["--token-file", &token, "--script-user", "nobody"];
    if !rustix::process::geteuid().is_root() {
        let args = ["worker", "--master", &place.cluster.url, "--scripts"];
        let refused = text(&ebb(args).args(more).output().unwrap());
        assert!(refused.contains("only root starts processes of other users"), "{refused}");
        return skipped(Lacks::Machine, "no root: what a script of another user reads was not tested");
    }
    place.add_agent(&more);
    let said = text(&place.run(&[]));
    let logs = place.logs();
    assert!(said.contains("exit code 3"), "{said}");
    let agent = format!("agent {}\n", place.cluster.workers[0].child.id());
    for expected in ["nobody", "home /", &agent, "owns its files"] {
        assert!(logs.contains(expected), "{expected} in {logs}");
    }
    for unexpected in ["READ", "LISTED", "KILLED", "a-token-of", "PRIVATE KEY"] {
        assert!(!logs.contains(unexpected), "{unexpected} in {logs}");
    }
    let log = place.cluster.workers[0].log();
    assert!(log.contains("as user nobody") && !log.contains("has the rights of this process"), "{log}");
}

#[test]
fn an_agent_with_keys_says_that_scripts_of_its_own_user_can_read_them() {
    let mut place = Place::new("cat $PLACE/agent.token; exit 3", &[]);
    place.cluster.workers.clear();
    let token = place.dir.path().join("agent.token");
    fs::write(&token, "a-token-of-an-agent-0123").unwrap();
    place.add_agent(&["--token-file", &token.display().to_string()]);
    place.run(&[]);
    let log = place.cluster.workers[0].log();
    assert!(log.contains("can read its token and its key; --script-user separates them"), "{log}");
    let refused = text(&ebb(["worker", "--scripts", "--script-user", "no-such-user-here"]).output().unwrap());
    assert!(refused.contains("this machine has no such user"), "{refused}");
}

#[test]
fn a_full_disk_ends_a_script_and_no_agent() {
    let Some(disk) = Tmpfs::mount("16m") else { return };
    let script = "test $EBBFLOW_JOB = second && { echo fine; exit 4; }\n\
        cat /dev/zero > fill || echo \"the disk is full\"; exit 3";
    let mut place = Place::new(script, &[]);
    place.cluster.workers.clear();
    place.cluster.add_worker_as(
        &["--scripts", "--python", "sh", "--scratch", &disk.path().display().to_string()],
        &[],
    );
    let said = text(&place.run(&[]));
    assert!(said.contains("exit code 3") && said.contains("the disk is full"), "{said}");
    let log = place.cluster.workers[0].log();
    assert!(log.contains("the log of train-1-0 cannot be written"), "{log}");
    // Its files have made room.
    let said = text(&place.run(&["--name", "second"]));
    assert!(said.contains("exit code 4") && said.contains("fine"), "{said}");
}

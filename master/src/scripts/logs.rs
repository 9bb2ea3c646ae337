//! What processes of scripts said, as agents tell it: the newest lines of each process. Pure.
//!
//! They are in memory alone. After a restart of the master, agents tell again what they keep.

use std::collections::BTreeMap;

use proto::ids::JobId;
use proto::script::{LINE_BYTES_MAX, TAIL_BYTES_MAX};
use proto::tail::Tail;
use tokio::sync::watch;

use super::AgentId;

/// Bytes of lines that are kept of one script, about.
const SCRIPT_BYTES_MAX: usize = 8 << 20;

/// Bytes of lines that are kept of one process at least.
const PROCESS_BYTES_MIN: usize = 8 << 10;

/// Scripts that are over whose lines are kept.
const OVER_MAX: usize = 16;

/// Longest line that is kept, in bytes. Bytes that are no UTF-8 become three each.
const KEPT_BYTES_MAX: usize = 3 * LINE_BYTES_MAX;

/// Lines of one script.
#[derive(Debug)]
pub(crate) struct Log {
    /// `NAME-ID` of the script.
    pub(crate) name: String,
    /// Owner of the script, who may read them.
    pub(crate) owner: String,
    /// No process says anything any more.
    pub(crate) is_over: bool,
    bytes_max: usize,
    processes: BTreeMap<u32, Told>,
    announce: watch::Sender<u64>,
}

/// Lines of one process.
#[derive(Debug)]
struct Told {
    tail: Tail,
    /// Agent that told the newest ones.
    agent: AgentId,
    /// Number of its newest line that is here.
    heard: u64,
}

/// Lines of a process for a reader: its number, the number of the first line here, and the lines.
pub(crate) type Read = (u32, u64, Vec<String>);

impl Log {
    fn new(name: String, owner: String, processes: u32) -> Self {
        let each = SCRIPT_BYTES_MAX / processes.max(1) as usize;
        let bytes_max = each.clamp(PROCESS_BYTES_MIN, TAIL_BYTES_MAX);
        let (processes, announce) = (BTreeMap::new(), watch::Sender::new(0));
        Self { name, owner, is_over: false, bytes_max, processes, announce }
    }

    /// Takes lines of a process from its agent, of which the first has the number `first` there.
    /// Lines that came before are left out.
    pub(super) fn take(
        &mut self,
        agent: AgentId,
        agent_name: &str,
        process: u32,
        first: u64,
        lines: &[String],
    ) {
        let empty = || Told { tail: Tail::new(self.bytes_max), agent, heard: 0 };
        let told = self.processes.entry(process).or_insert_with(empty);
        if told.agent != agent {
            told.tail.push(format!("-- it goes on at {agent_name} --"));
            (told.agent, told.heard) = (agent, 0);
        }
        for (number, line) in
            (first..).zip(lines).filter(|(number, _)| *number > told.heard).collect::<Vec<_>>()
        {
            match number - told.heard - 1 {
                0 => {}
                missing => told.tail.push(format!("-- {missing} lines are missing --")),
            }
            let end = (0..=KEPT_BYTES_MAX.min(line.len())).rev().find(|&end| line.is_char_boundary(end));
            told.tail.push(line[..end.unwrap_or(0)].to_owned());
            told.heard = number;
        }
        self.announce.send_modify(|count| *count += 1);
    }

    /// Returns whether an agent told the newest lines of a process.
    pub(super) fn is_of(&self, process: u32, agent: AgentId) -> bool {
        self.processes.get(&process).is_some_and(|told| told.agent == agent)
    }

    /// Returns lines that come after those that a reader has, by process: at most `bytes_max` bytes
    /// of each process. `only`: this process alone.
    pub(crate) fn read(&self, only: Option<u32>, seen: &BTreeMap<u32, u64>, bytes_max: usize) -> Vec<Read> {
        let wanted = self.processes.iter().filter(|(process, _)| only.is_none_or(|only| only == **process));
        let read = wanted.map(|(&process, told)| {
            let (first, lines) = told.tail.after(seen.get(&process).copied().unwrap_or(0), bytes_max);
            (process, first, lines)
        });
        read.filter(|(_, _, lines)| !lines.is_empty()).collect()
    }

    /// Changes when there are new lines, or when the script is over.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.announce.subscribe()
    }
}

/// Lines of the scripts that are not over, and of the last ones that are.
#[derive(Debug, Default)]
pub(super) struct Logs {
    scripts: BTreeMap<JobId, Log>,
}

impl Logs {
    /// Begins the log of a script, and forgets the oldest one beyond the limit.
    pub(super) fn begin(&mut self, id: JobId, name: String, owner: String, processes: u32) {
        self.scripts.insert(id, Log::new(name, owner, processes));
        let over: Vec<_> = self.scripts.iter().filter(|(_, log)| log.is_over).map(|(&id, _)| id).collect();
        for id in over.iter().take(over.len().saturating_sub(OVER_MAX)) {
            self.scripts.remove(id);
        }
    }

    /// Records that a script is over.
    pub(super) fn end(&mut self, id: JobId) {
        if let Some(log) = self.scripts.get_mut(&id) {
            log.is_over = true;
            log.announce.send_modify(|count| *count += 1);
        }
    }

    pub(super) fn get(&self, id: JobId) -> Option<&Log> {
        self.scripts.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: JobId) -> Option<&mut Log> {
        self.scripts.get_mut(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: AgentId = AgentId(1);
    const TWO: AgentId = AgentId(2);

    fn lines(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    fn read(log: &Log) -> Vec<String> {
        log.read(Some(0), &BTreeMap::new(), 1 << 20).into_iter().flat_map(|(_, _, lines)| lines).collect()
    }

    #[test]
    fn lines_that_come_again_are_there_once_and_gaps_are_told() {
        let mut log = Log::new("train-7".to_owned(), String::new(), 2);
        log.take(ONE, "one", 0, 1, &lines(&["a", "b"]));
        // A new stream of the agent begins with all that it keeps.
        log.take(ONE, "one", 0, 1, &lines(&["a", "b", "c"]));
        log.take(ONE, "one", 0, 6, &lines(&["f"]));
        log.take(TWO, "two", 0, 1, &lines(&["x"]));
        let expected = ["a", "b", "c", "-- 2 lines are missing --", "f", "-- it goes on at two --", "x"];
        assert_eq!(read(&log), expected);
        assert!(log.is_of(0, TWO) && !log.is_of(0, ONE) && !log.is_of(1, TWO));
        let seen = BTreeMap::from([(0, 6)]);
        assert_eq!(log.read(None, &seen, 1 << 20), [(0, 7, lines(&["x"]))]);
        assert_eq!(log.read(Some(1), &seen, 1 << 20), []);
    }

    #[test]
    fn a_log_is_bounded_in_lines_and_bytes() {
        let mut log = Log::new("train-7".to_owned(), String::new(), 1024);
        log.take(ONE, "one", 0, 1, &lines(&[&"\u{fffd}".repeat(KEPT_BYTES_MAX)]));
        assert!(read(&log)[0].len() <= KEPT_BYTES_MAX);
        for number in 2..2000 {
            log.take(ONE, "one", 0, number, &lines(&["0123456789"]));
        }
        let kept = read(&log);
        assert!(
            kept.len() > 100 && kept.iter().map(|line| line.len() + 1).sum::<usize>() <= PROCESS_BYTES_MIN
        );
        let mut logs = Logs::default();
        for id in 1..=30 {
            logs.begin(JobId(id), String::new(), String::new(), 1);
            logs.end(JobId(id));
        }
        assert!(logs.scripts.len() <= OVER_MAX + 1 && logs.get(JobId(30)).is_some_and(|log| log.is_over));
    }
}

//! Scripts that users sent, and the agents that run their processes. Pure, `now` an argument.
//!
//! An agent says with each heartbeat which processes it has, and hears which ones it is to run. So
//! a message that is lost or comes twice changes nothing. A process is in one of three states:
//!
//! ```text
//!   Waiting --assigned--> Running(agent) --it is done--> Done
//!      ^                        |
//!      +--- the agent is gone, or gave up ---+
//! ```
//!
//! A script lives from its submission until its jobs have ended and its processes have left. It has
//! the number of its first job.

mod assignment;
mod logs;
mod verdict;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::ids::JobId;
use proto::pb;
use proto::pb::JobState;
use proto::script::{AGENT_PROCESSES_MAX, LINES_TOLD, told};
use proto::status::{Failure, Kind};
use tokio::sync::watch;

use self::assignment::Wanted;
pub(crate) use self::logs::Log;
use self::logs::Logs;
pub(crate) use self::verdict::Stage;
use self::verdict::{Standing, Verdict};
use crate::clock::Now;

/// End of the name of a job that only elects which process calls callbacks (ADR 34).
pub(crate) const ELECTION: &str = ".callbacks";

/// Processes of which one heartbeat of an agent may speak.
const REPORTS_MAX: usize = 2 * AGENT_PROCESSES_MAX as usize;

/// Process start of an agent: a random number that the agent chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AgentId(pub(crate) u64);

/// A live agent.
#[derive(Debug)]
struct Agent {
    name: String,
    /// Number of processes that it runs at most.
    room: usize,
    /// Time of its last heartbeat.
    heard: Duration,
    /// Number of its current stream. The late end of an older one means nothing.
    stream: u64,
}

/// One process of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Waiting,
    Running(AgentId),
    Done,
}

/// A script that is not over.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) description: pb::Script,
    pub(crate) bundle: pb::Artifact,
    /// Values of its secrets. Nobody writes them down, so they are missing after a restart.
    pub(crate) secrets: Vec<pb::Secret>,
    pub(crate) owner: String,
    submitted_unix_ms: u64,
    /// Its jobs, by name.
    pub(crate) jobs: BTreeMap<String, JobId>,
    places: Vec<Place>,
    /// Agents on which it failed too often.
    gave_up: BTreeSet<AgentId>,
    /// What the last process that left badly said, for people.
    last: Option<String>,
    /// How it ends, once that is decided.
    end: Option<pb::Ending>,
    /// Since when all its jobs have ended, as far as this start of the master knows.
    ended: Option<Duration>,
    /// No process is handed out before this time, so that agents of an earlier start come back.
    settles: Duration,
    /// Announces that it has a job, or is over.
    announce: watch::Sender<u64>,
    changed: bool,
}

impl Script {
    fn new(description: pb::Script, bundle: pb::Artifact, owner: String, now: Now) -> Self {
        let places = vec![Place::Waiting; description.processes as usize];
        Self {
            description,
            bundle,
            secrets: Vec::new(),
            owner,
            submitted_unix_ms: now.unix_ms,
            jobs: BTreeMap::new(),
            places,
            gave_up: BTreeSet::new(),
            last: None,
            end: None,
            ended: None,
            settles: Duration::ZERO,
            announce: watch::Sender::new(0),
            changed: true,
        }
    }

    /// Returns `NAME-ID`.
    pub(crate) fn full_name(&self, id: JobId) -> String {
        format!("{}-{id}", self.description.name)
    }

    /// Returns its jobs that train, without elections.
    pub(crate) fn trained(&self) -> impl Iterator<Item = JobId> {
        self.jobs.iter().filter(|(name, _)| !name.ends_with(ELECTION)).map(|(_, &id)| id)
    }

    /// Returns the values of its secrets.
    ///
    /// # Errors
    /// They were lost with an earlier start of the master.
    pub(crate) fn secrets(&self, id: JobId) -> Result<&[pb::Secret], Failure> {
        if self.secrets.len() == self.description.secrets.len() {
            return Ok(&self.secrets);
        }
        let message = format!(
            "the secrets of {} are lost: a master keeps them in memory alone, and another one has started since; \
             cancel the script and submit it again",
            self.full_name(id)
        );
        Err(Failure::new(Kind::NotFound, message))
    }

    fn count(&self, is: impl Fn(&Place) -> bool) -> usize {
        self.places.iter().filter(|place| is(place)).count()
    }

    fn running(&self) -> usize {
        self.count(|place| matches!(place, Place::Running(_)))
    }

    /// Returns what users see of a script that has no job yet.
    fn status(&self, id: JobId) -> pb::JobStatus {
        let (running, all) = (self.running(), self.places.len());
        let (state, reason) = match &self.end {
            Some(end) => (end.state(), end.reason.clone()),
            None if running == 0 => {
                let reason = "waits for agents, which are workers that were started with --scripts";
                (JobState::Pending, reason.to_owned())
            }
            None => {
                let reason = format!("{running} of {all} processes run, and none has joined a job yet");
                (JobState::Pending, reason)
            }
        };
        pb::JobStatus {
            job: id.get(),
            name: self.full_name(id),
            state: state.into(),
            reason,
            workers_min: 1,
            workers_max: self.description.processes,
            ..Default::default()
        }
    }

    fn record(&self, id: JobId) -> pb::ScriptRecord {
        let done = self.places.iter().enumerate().filter(|(_, place)| **place == Place::Done);
        pb::ScriptRecord {
            script: id.get(),
            description: Some(self.description.clone()),
            bundle: Some(self.bundle.clone()),
            owner: self.owner.clone(),
            submitted_unix_ms: self.submitted_unix_ms,
            jobs: self.jobs.iter().map(|(name, id)| (name.clone(), id.get())).collect(),
            done: done.map(|(process, _)| process as u32).collect(),
            ending: self.end.clone(),
        }
    }

    fn decide(&mut self, state: JobState, reason: String) {
        if self.end.is_none() {
            self.end = Some(pb::Ending { state: state.into(), reason });
            self.changed = true;
        }
    }
}

/// All scripts that are not over, and the live agents.
#[derive(Debug, Default)]
pub(crate) struct Scripts {
    scripts: BTreeMap<JobId, Script>,
    agents: BTreeMap<AgentId, Agent>,
    newest_stream: u64,
    logs: Logs,
    /// Announces that agents are to run other processes.
    orders: watch::Sender<u64>,
}

impl Scripts {
    // Users.

    pub(crate) fn submit(
        &mut self,
        now: Now,
        id: JobId,
        description: pb::Script,
        secrets: Vec<pb::Secret>,
        bundle: pb::Artifact,
        owner: String,
    ) -> pb::SubmitReply {
        let script = Script { secrets, ..Script::new(description, bundle, owner, now) };
        let reply = pb::SubmitReply { job: id.get(), name: script.full_name(id) };
        self.add(id, script);
        reply
    }

    /// Checks that no live script has this name. Their processes would take part in one job.
    ///
    /// # Errors
    /// There is one.
    pub(crate) fn check_name(&self, name: &str) -> Result<(), Failure> {
        let Some((&id, other)) = self.scripts.iter().find(|(_, script)| script.description.name == name)
        else {
            return Ok(());
        };
        let message = format!(
            "{} lives; wait for its end, cancel it, or give this script another --name",
            other.full_name(id)
        );
        Err(Failure::new(Kind::Malformed, message))
    }

    /// Takes up a script that an earlier start of the master wrote down. Agents have until
    /// `settles` to say what they run of it.
    ///
    /// # Errors
    /// It does not fit together; the reason.
    pub(crate) fn restore(&mut self, record: pb::ScriptRecord, settles: Duration) -> Result<JobId, String> {
        let id = JobId(record.script);
        let description = record.description.ok_or("it has no description")?;
        proto::script::check(&description).map_err(|error| error.to_string())?;
        let bundle = record.bundle.ok_or("it has no bundle")?;
        let now = Now { unix_ms: record.submitted_unix_ms, ..Now::default() };
        let mut script = Script::new(description, bundle, record.owner, now);
        for process in record.done {
            let place = script.places.get_mut(process as usize).ok_or("it has no such process")?;
            *place = Place::Done;
        }
        script.jobs = record.jobs.into_iter().map(|(name, id)| (name, JobId(id))).collect();
        (script.end, script.settles, script.changed) = (record.ending, settles, false);
        self.add(id, script);
        Ok(id)
    }

    fn add(&mut self, id: JobId, script: Script) {
        let pb::Script { processes, .. } = script.description;
        self.logs.begin(id, script.full_name(id), script.owner.clone(), processes);
        self.scripts.insert(id, script);
    }

    /// Returns what processes of a script said, also of one that was over a short time ago.
    pub(crate) fn log(&self, id: JobId) -> Option<&Log> {
        self.logs.get(id)
    }

    pub(crate) fn get(&self, id: JobId) -> Option<&Script> {
        self.scripts.get(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (JobId, &Script)> {
        self.scripts.iter().map(|(&id, script)| (id, script))
    }

    pub(crate) fn ids(&self) -> impl DoubleEndedIterator<Item = JobId> {
        self.scripts.keys().copied()
    }

    /// Returns what users see of a script that has no job yet.
    pub(crate) fn status(&self, id: JobId) -> Option<pb::JobStatus> {
        self.scripts.get(&id).map(|script| script.status(id))
    }

    /// Changes when a script has a job, or is over.
    pub(crate) fn watch(&self, id: JobId) -> Option<watch::Receiver<u64>> {
        self.scripts.get(&id).map(|script| script.announce.subscribe())
    }

    /// Records that a user ends a script. Its processes are ended with its job.
    pub(crate) fn cancel(&mut self, id: JobId) {
        if let Some(script) = self.scripts.get_mut(&id) {
            script.decide(JobState::Cancelled, "cancelled by a user".to_owned());
        }
    }

    /// Returns the number of a new job that a process of the script describes: that of the script
    /// for its first job, otherwise `next`.
    pub(crate) fn number(&self, script: JobId, name: &str, next: JobId) -> JobId {
        let is_first = |script: &&Script| script.trained().next().is_none() && !name.ends_with(ELECTION);
        self.scripts.get(&script).filter(is_first).map_or(next, |_| script)
    }

    /// Records that a process of the script has described a job.
    pub(crate) fn joined(&mut self, script: JobId, name: &str, job: JobId) {
        if let Some(script) = self.scripts.get_mut(&script) {
            script.jobs.insert(name.to_owned(), job);
            script.changed = true;
            script.announce.send_modify(|count| *count += 1);
        }
    }

    // Agents.

    /// Takes the first heartbeat of a stream. Returns the number of the stream.
    ///
    /// # Errors
    /// The agent says something impossible of itself, or there are `agents_max` already.
    pub(crate) fn open(
        &mut self,
        now: Duration,
        request: &pb::AttendRequest,
        agents_max: usize,
    ) -> Result<(AgentId, u64), Failure> {
        let pb::AttendRequest { agent, name, program_version, processes, .. } = request;
        let malformed = |message: String| Failure::new(Kind::Malformed, message);
        if !proto::compatible(program_version) {
            let message = format!(
                "agent `{}` is version {}, this master is {}; install one version everywhere",
                name.escape_debug(),
                program_version.escape_debug(),
                proto::PROGRAM_VERSION
            );
            return Err(Failure::new(Kind::Incompatible, message));
        }
        if *agent == 0 || !(1..=128).contains(&name.len()) || name.chars().any(char::is_control) {
            let message = "AttendRequest: expected a random number and a name of 1 to 128 bytes";
            return Err(malformed(message.to_owned()));
        }
        if !(1..=AGENT_PROCESSES_MAX).contains(processes) {
            let message =
                format!("AttendRequest.processes: expected 1 to {AGENT_PROCESSES_MAX}, found {processes}");
            return Err(malformed(message));
        }
        let id = AgentId(*agent);
        if self.agents.len() >= agents_max && !self.agents.contains_key(&id) {
            let message = format!("{agents_max} agents live, the most that this master takes (members_max)");
            return Err(Failure::new(Kind::Full, message));
        }
        self.newest_stream += 1;
        let stream = self.newest_stream;
        let room = *processes as usize;
        self.agents.insert(id, Agent { name: name.clone(), room, heard: now, stream });
        Ok((id, stream))
    }

    /// Takes lines of processes that an agent runs or ran last.
    fn take_lines(&mut self, id: AgentId, all: &[pb::ProcessLines]) {
        let Some(agent) = self.agents.get(&id) else { return };
        for pb::ProcessLines { script, process, first, lines } in all {
            let (script, process) = (JobId(*script), *process);
            let place = self.scripts.get(&script).and_then(|script| script.places.get(process as usize));
            let runs = place.is_some_and(|place| *place == Place::Running(id));
            let log = self.logs.get_mut(script).filter(|log| runs || log.is_of(process, id));
            if let Some(log) = log {
                log.take(id, &agent.name, process, *first, lines);
            }
        }
    }

    /// Takes a heartbeat of an agent: what it says of its processes.
    ///
    /// # Errors
    /// The agent counts as gone, or speaks of too many processes.
    pub(crate) fn hear(
        &mut self,
        now: Duration,
        id: AgentId,
        stream: u64,
        request: &pb::AttendRequest,
    ) -> Result<(), Failure> {
        let pb::AttendRequest { reports, lines, .. } = request;
        let agent = self.agents.get_mut(&id).filter(|agent| agent.stream == stream).ok_or_else(|| {
            Failure::new(Kind::Unavailable, "this agent counted as gone; it comes back with a new stream")
        })?;
        if reports.len() > REPORTS_MAX {
            let message =
                format!("AttendRequest.reports: expected at most {REPORTS_MAX}, found {}", reports.len());
            return Err(Failure::new(Kind::Malformed, message));
        }
        agent.heard = now;
        let name = agent.name.clone();
        for report in reports {
            let Some(script) = self.scripts.get_mut(&JobId(report.script)) else { continue };
            let Some(place) = script.places.get_mut(report.process as usize) else { continue };
            // One that waits ran there when the agent was lost, or before the master's restart.
            let is_there = *place == Place::Running(id)
                || (*place == Place::Waiting && !script.gave_up.contains(&id) && script.end.is_none());
            if !is_there {
                continue;
            }
            *place = Place::Running(id);
        }
        // Of processes that leave with this message, too.
        self.take_lines(id, lines);
        for report in reports {
            let Some(left) = &report.left else { continue };
            let Some(script) = self.scripts.get_mut(&JobId(report.script)) else { continue };
            let place = script.places.get_mut(report.process as usize);
            let Some(place) = place.filter(|place| **place == Place::Running(id)) else { continue };
            match left.kind() {
                pb::LeftKind::Done => {
                    *place = Place::Done;
                    script.changed = true;
                }
                pb::LeftKind::Wrong => {
                    *place = Place::Done;
                    let reason = format!("{}, and no process has joined a job", said(&name, report, left));
                    script.decide(JobState::Failed, reason);
                }
                pb::LeftKind::GaveUp | pb::LeftKind::Unspecified => {
                    *place = Place::Waiting;
                    script.gave_up.insert(id);
                }
            }
            if left.kind() != pb::LeftKind::Done || script.last.is_none() {
                script.last = Some(said(&name, report, left));
            }
        }
        Ok(())
    }

    /// Returns the processes that an agent is to run.
    pub(crate) fn orders(&self, agent: AgentId) -> Vec<pb::ProcessOrder> {
        let of_script = |(id, script): (JobId, &Script)| {
            let places = script.places.iter().enumerate();
            let of_agent = places.filter(move |(_, place)| **place == Place::Running(agent));
            let order = move |(process, _)| pb::ProcessOrder { script: id.get(), process: process as u32 };
            of_agent.map(order).collect::<Vec<_>>()
        };
        self.iter().flat_map(of_script).collect()
    }

    /// Changes when agents are to run other processes.
    pub(crate) fn watch_orders(&self) -> watch::Receiver<u64> {
        self.orders.subscribe()
    }

    /// Records that the stream of an agent broke.
    pub(crate) fn stream_broken(&mut self, id: AgentId, stream: u64) {
        if self.agents.get(&id).is_some_and(|agent| agent.stream == stream) {
            self.remove(id);
        }
    }

    /// Removes agents that were silent for `death`.
    pub(crate) fn expire(&mut self, now: Duration, death: Duration) {
        let silent = self.agents.iter().filter(|(_, agent)| now >= agent.heard + death);
        let silent: Vec<_> = silent.map(|(&id, _)| id).collect();
        silent.into_iter().for_each(|id| self.remove(id));
    }

    fn remove(&mut self, id: AgentId) {
        self.agents.remove(&id);
        for script in self.scripts.values_mut() {
            script.gave_up.remove(&id);
            script.places.iter_mut().filter(|place| **place == Place::Running(id)).for_each(|place| {
                *place = Place::Waiting;
            });
        }
    }

    // What follows.

    /// Assigns processes that wait, where `stage` says that they are needed.
    pub(crate) fn assign(&mut self, now: Duration, stage: impl Fn(&Script) -> Stage) {
        let mut free: BTreeMap<_, _> = self.agents.iter().map(|(&id, agent)| (id, agent.room)).collect();
        for place in self.scripts.values().flat_map(|script| &script.places) {
            if let Place::Running(agent) = place
                && let Some(room) = free.get_mut(agent)
            {
                *room = room.saturating_sub(1);
            }
        }
        let needed = self.scripts.iter().filter(|(_, script)| match stage(script) {
            Stage::Unjoined => script.end.is_none() && now >= script.settles,
            Stage::Training => now >= script.settles,
            Stage::Ended => false,
        });
        let wanted = needed.map(|(&id, script)| {
            let mut running = BTreeMap::new();
            for place in &script.places {
                if let Place::Running(agent) = place {
                    *running.entry(*agent).or_default() += 1;
                }
            }
            let waiting = script.places.iter().enumerate().filter(|(_, place)| **place == Place::Waiting);
            let waiting = waiting.map(|(process, _)| process as u32).collect();
            Wanted { script: id, waiting, running, gave_up: &script.gave_up }
        });
        let assigned = assignment::assign(&free, &wanted.collect::<Vec<_>>());
        for &(id, process, agent) in &assigned {
            if let Some(script) = self.scripts.get_mut(&id) {
                script.places[process as usize] = Place::Running(agent);
            }
        }
        if !assigned.is_empty() {
            self.orders.send_modify(|count| *count += 1);
        }
    }

    /// Returns the scripts that fail now, each with the reason, and those that are over. Processes
    /// have the time `linger` after the end of the last job.
    pub(crate) fn judge(
        &mut self,
        now: Duration,
        linger: Duration,
        stage: impl Fn(&Script) -> Stage,
    ) -> (Vec<(JobId, String)>, Vec<JobId>) {
        let (mut failed, mut over) = (Vec::new(), Vec::new());
        let agents: BTreeSet<_> = self.agents.keys().copied().collect();
        for (&id, script) in &mut self.scripts {
            let stage = stage(script);
            script.ended = script.ended.filter(|_| stage == Stage::Ended);
            let ended = (stage == Stage::Ended).then(|| *script.ended.get_or_insert(now));
            let lingers = ended.is_some_and(|ended| now >= ended + linger);
            if lingers && script.running() > 0 {
                tracing::warn!(script = %id, "processes run {linger:?} after the end of the last job; they are ended");
            }
            let mut standing = Standing {
                stage,
                lingers,
                running: script.running(),
                waiting: script.count(|place| *place == Place::Waiting),
                ends: script.end.is_some(),
                all_gave_up: !script.gave_up.is_empty() && agents.is_subset(&script.gave_up),
                settles: now < script.settles,
            };
            if standing.verdict() == Verdict::Fails {
                let joined = match standing.stage {
                    Stage::Unjoined => ", and no process has joined a job",
                    _ => ", and the job has not ended",
                };
                let last = script.last.as_deref().unwrap_or("no process has run");
                script.decide(JobState::Failed, format!("no process is left{joined}; {last}"));
                standing.ends = true;
            }
            let failure = script.end.as_ref().filter(|end| end.state() == JobState::Failed);
            match standing.verdict() {
                Verdict::Over => over.push(id),
                _ => failed.extend(failure.map(|end| (id, end.reason.clone()))),
            }
        }
        (failed, over)
    }

    /// Removes a script that is over. Returns it, and its last status for users.
    pub(crate) fn end(&mut self, id: JobId) -> Option<(Script, pb::JobStatus)> {
        let script = self.scripts.remove(&id)?;
        self.logs.end(id);
        self.orders.send_modify(|count| *count += 1);
        // Watchers wake up when the sender is dropped.
        let status = script.status(id);
        Some((script, status))
    }

    /// Returns the records that changed since the last call.
    pub(crate) fn take_records(&mut self) -> Vec<(JobId, pb::ScriptRecord)> {
        let changed = |(&id, script): (&JobId, &mut Script)| {
            std::mem::take(&mut script.changed).then(|| (id, script.record(id)))
        };
        self.scripts.iter_mut().filter_map(changed).collect()
    }
}

/// Returns what a process that has left said, for people.
fn said(agent: &str, report: &pb::ProcessReport, left: &pb::ProcessLeft) -> String {
    let (process, reason) = (report.process, told(&left.reason));
    let skip = left.lines.len().saturating_sub(LINES_TOLD);
    let lines: Vec<_> = left.lines.iter().skip(skip).map(|line| told(line)).collect();
    match lines.is_empty() {
        true => format!("process {process} on {agent} {reason} and said nothing"),
        false => {
            format!("process {process} on {agent} {reason} and said last:\n    {}", lines.join("\n    "))
        }
    }
}

#[cfg(test)]
mod tests;

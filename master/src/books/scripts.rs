//! Scripts in the books of a master: their numbers among those of jobs, what agents say, and what
//! follows for jobs.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use proto::ids::JobId;
use proto::pb;
use proto::spec::LimitsSpec;
use proto::status::{Failure, Kind};
use tokio::sync::watch;

use super::Books;
use crate::clock::Now;
use crate::ended::Ended;
use crate::job::Job;
use crate::journal::keys;
use crate::scripts::{AgentId, Log, Script, Stage};

impl Books {
    /// Returns the number of a script that may be taken now.
    ///
    /// # Errors
    /// A script of this name lives, or there are too many jobs.
    pub(crate) fn admit_script(&mut self, description: &pb::Script) -> Result<JobId, Failure> {
        self.scripts.check_name(&description.name)?;
        self.make_room()?;
        Ok(self.newest_job.next())
    }

    /// Takes the script that was just [admitted](Self::admit_script).
    pub(crate) fn submit_script(
        &mut self,
        now: Now,
        id: JobId,
        description: pb::Script,
        secrets: Vec<pb::Secret>,
        bundle: pb::Artifact,
        owner: String,
    ) -> pb::SubmitReply {
        self.newest_job = id;
        let reply = self.scripts.submit(now, id, description, secrets, bundle, owner);
        self.follow_scripts(now);
        reply
    }

    /// Takes up a script that an earlier start of the master wrote down, after its jobs.
    ///
    /// # Errors
    /// It does not fit together; the reason.
    pub(crate) fn restore_script(&mut self, now: Now, record: pb::ScriptRecord) -> Result<(), String> {
        let id = self.scripts.restore(record, now.since_start + self.options.death)?;
        self.newest_job = self.newest_job.max(id);
        let jobs = self.scripts.get(id).map(|script| script.jobs.clone()).unwrap_or_default();
        for job in jobs.values() {
            self.jobs.get_mut(job).into_iter().for_each(|job| job.set_script(id));
        }
        Ok(())
    }

    /// Returns a script that is not over.
    ///
    /// # Errors
    /// There is none of this number.
    pub(crate) fn script(&self, id: JobId) -> Result<&Script, Failure> {
        let gone = || Failure::new(Kind::NotFound, format!("no script {id} (any more)"));
        self.scripts.get(id).ok_or_else(gone)
    }

    /// Returns where the jobs of a script are.
    pub(crate) fn stage(&self, script: JobId) -> Stage {
        self.scripts.get(script).map_or(Stage::Ended, |script| stage(&self.jobs, script))
    }

    /// Returns the URLs of the ps of a script's live jobs.
    pub(crate) fn ps_of(&self, script: JobId) -> Vec<String> {
        let jobs = self.jobs.values().filter(|job| job.script == Some(script));
        jobs.flat_map(Job::ps_urls).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns the jobs of a script with larger numbers than `after`, in their order. The script
    /// itself counts as its first one.
    pub(super) fn jobs_of(&self, script: JobId, after: JobId) -> Vec<JobId> {
        let Some(found) = self.scripts.get(script) else { return Vec::new() };
        let all: BTreeSet<_> = found.jobs.values().copied().chain([script]).collect();
        all.into_iter().filter(|id| *id > after).collect()
    }

    /// Returns the job that a call names. `script`: a process of it makes the call, which reaches
    /// jobs of this script alone, and names them as the script does.
    ///
    /// # Errors
    /// There is no such job, or it is not of the script.
    pub(crate) fn named(&self, script: Option<JobId>, name: &str) -> Result<String, Failure> {
        let Some(id) = script else { return Ok(name.to_owned()) };
        let of_script = self.script(id)?.jobs.get(name).copied();
        let job = of_script.map_or_else(|| self.find(name), Ok)?;
        self.check_script(script, job)?;
        Ok(job.to_string())
    }

    /// Checks that a job is of `script`, if a process of a script asks.
    ///
    /// # Errors
    /// It is not, or the script is over.
    pub(crate) fn check_script(&self, script: Option<JobId>, job: JobId) -> Result<(), Failure> {
        let Some(id) = script else { return Ok(()) };
        let script = self.script(id)?;
        if job == id || script.jobs.values().any(|of_script| *of_script == job) {
            return Ok(());
        }
        let message = format!("job {job} is not of script {id}, whose processes take part in its jobs alone");
        Err(Failure::new(Kind::Denied, message))
    }

    /// Takes the first heartbeat of an agent's stream. Returns the number of the stream.
    ///
    /// # Errors
    /// See [`Scripts::open`] and [`Scripts::hear`].
    pub(crate) fn attend(
        &mut self,
        now: Now,
        request: &pb::AttendRequest,
    ) -> Result<(AgentId, u64), Failure> {
        let (agent, stream) = self.scripts.open(now.since_start, request, self.options.members_max)?;
        self.heard(now, agent, stream, request)?;
        Ok((agent, stream))
    }

    /// Takes a further heartbeat of an agent.
    ///
    /// # Errors
    /// See [`Scripts::hear`].
    pub(crate) fn heard(
        &mut self,
        now: Now,
        agent: AgentId,
        stream: u64,
        request: &pb::AttendRequest,
    ) -> Result<(), Failure> {
        self.scripts.hear(now.since_start, agent, stream, request)?;
        self.follow_scripts(now);
        Ok(())
    }

    /// Returns what the processes of a job's script said.
    ///
    /// # Errors
    /// The job is not known, or is of no script.
    pub(crate) fn log(&self, job: &str) -> Result<(JobId, &Log), Failure> {
        let id = self.find(job)?;
        let script = self.jobs.get(&id).and_then(|job| job.script).unwrap_or(id);
        let log = self.scripts.log(script).map(|log| (script, log));
        log.ok_or_else(|| {
            let message = format!(
                "{} has no logs; a master has those of submitted scripts, for a while after their end",
                self.name_of(id)
            );
            Failure::new(Kind::NotFound, message)
        })
    }

    /// Returns what processes of a script said, by the number of the script.
    pub(crate) fn log_of(&self, script: JobId) -> Option<&Log> {
        self.scripts.log(script)
    }

    /// Returns what an agent is to run.
    pub(crate) fn orders(&self, agent: AgentId) -> pb::AttendReply {
        let heartbeat_ms = u32::try_from(self.options.heartbeat.as_millis()).unwrap_or(u32::MAX);
        pb::AttendReply { heartbeat_ms, processes: self.scripts.orders(agent) }
    }

    /// Changes when agents are to run other processes.
    pub(crate) fn watch_orders(&self) -> watch::Receiver<u64> {
        self.scripts.watch_orders()
    }

    /// Records that the stream of an agent broke.
    pub(crate) fn agent_gone(&mut self, now: Now, agent: AgentId, stream: u64) {
        self.scripts.stream_broken(agent, stream);
        self.follow_scripts(now);
    }

    /// Ends scripts that failed or are over, and assigns processes to agents.
    pub(super) fn follow_scripts(&mut self, now: Now) {
        let linger = self.options.script_linger;
        let (failed, over) = self.scripts.judge(now.since_start, linger, |script| stage(&self.jobs, script));
        for (id, reason) in failed {
            let jobs = self.jobs.values_mut().filter(|job| job.script == Some(id) && !job.is_ended());
            jobs.filter(|job| !job.ends_early()).for_each(|job| job.abandon(now, reason.clone()));
        }
        for id in over {
            let Some((script, status)) = self.scripts.end(id) else { continue };
            self.forgotten.remove(keys::script(id));
            // Jobs that elect who calls callbacks have nobody left.
            let jobs = self.jobs.values_mut().filter(|job| job.script == Some(id));
            jobs.for_each(|job| job.cancel(now, true));
            if self.jobs.contains_key(&id) || self.archive.get(id).is_some() {
                continue;
            }
            let record = pb::JobRecord {
                job: id.get(),
                owner: script.owner.clone(),
                ended: Some(status.clone()),
                ..Default::default()
            };
            self.forgotten.set(keys::job(id), record.encode_to_vec());
            self.archive.insert(id, Ended::new(&status, LimitsSpec::default().stall));
        }
        self.scripts.assign(now.since_start, |script| stage(&self.jobs, script));
    }

    /// Returns the scripts of which no process has described a job yet.
    pub(super) fn unjoined(&self) -> impl Iterator<Item = JobId> {
        let has_job = |id: &JobId| self.jobs.contains_key(id) || self.archive.get(*id).is_some();
        self.scripts.ids().filter(move |id| !has_job(id))
    }
}

/// Returns where the jobs of a script are, by the live jobs.
fn stage(jobs: &BTreeMap<JobId, Job>, script: &Script) -> Stage {
    let lives = |id| jobs.get(&id).is_some_and(|job| !job.is_ended());
    match script.trained().next() {
        None => Stage::Unjoined,
        Some(_) if script.trained().any(lives) => Stage::Training,
        Some(_) => Stage::Ended,
    }
}

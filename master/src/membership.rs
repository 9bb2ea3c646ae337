//! The processes that live: registrations, heartbeats and their absence become a live set. Pure,
//! `now` an argument.
//!
//! A process is live from its first heartbeat until its heartbeat stream breaks or no heartbeat
//! came for the deadline. Every registration is a new incarnation; whoever is gone stays gone under
//! the old one and comes back under the next. A ps is known by its name across restarts, so two
//! live ps never share one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::sync::Arc;
use std::time::Duration;

use proto::ids::{Generation, IncarnationId};
use proto::numerics::Numerics;
use proto::pb;
use proto::status::{Failure, Kind};

use crate::device::WorkerDevice;

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberRole {
    Worker,
    Ps,
}

impl MemberRole {
    const fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Ps => "ps",
        }
    }
}

/// What a process says of itself when it registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) role: MemberRole,
    pub(crate) name: String,
    /// URL at which workers reach a ps; empty for a worker.
    pub(crate) url: String,
    /// How a worker's arithmetic rounds.
    pub(crate) numerics: Arc<Numerics>,
    /// How much a worker may compute.
    pub(crate) capacity: Capacity,
    /// The device of a worker.
    pub(crate) device: WorkerDevice,
    /// Name of the job whose program a worker runs; empty: none.
    pub(crate) program: Arc<str>,
}

impl Process {
    /// Creates a process that says nothing of its arithmetic.
    pub(crate) fn new(role: MemberRole, name: &str, url: &str) -> Self {
        let numerics = Arc::new(Numerics::unknown());
        let (capacity, program) = (Capacity::default(), Arc::from(""));
        let device = WorkerDevice::default();
        Self { role, name: name.to_owned(), url: url.to_owned(), numerics, capacity, device, program }
    }
}

/// How much workers may compute, as far as that is known before they have computed anything. Any
/// number of CUDA devices is more than any number of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Capacity {
    /// CUDA devices.
    pub(crate) cuda: u64,
    /// Threads on CPUs.
    pub(crate) threads: u64,
}

impl Add for Capacity {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { cuda: self.cuda + other.cuda, threads: self.threads + other.threads }
    }
}

/// A registered process.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) process: Process,
    /// Whether its heartbeats arrive.
    pub(crate) live: bool,
    /// Whether it wants no more work.
    pub(crate) draining: bool,
    /// What a worker said last of its device.
    pub(crate) reading: Option<pb::DeviceReading>,
    /// Time of its last message.
    heard: Duration,
    /// Number of its current heartbeat stream. The late end of an older one means nothing.
    stream: u64,
}

/// The live set changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) incarnation: IncarnationId,
    pub(crate) role: MemberRole,
    /// Whether the process left; otherwise it came.
    pub(crate) gone: bool,
    /// The process and the reason, for people.
    pub(crate) reason: String,
}

/// The fleet.
#[derive(Debug)]
pub(crate) struct Membership {
    members: BTreeMap<IncarnationId, Member>,
    generation: Generation,
    next: IncarnationId,
    next_stream: u64,
    /// Silence after which a process counts as gone.
    deadline: Duration,
    members_max: usize,
    /// Workers that live and do not get on with something, as of the last tick.
    hanging: BTreeSet<IncarnationId>,
}

impl Membership {
    pub(crate) const fn new(first: IncarnationId, deadline: Duration, members_max: usize) -> Self {
        Self {
            members: BTreeMap::new(),
            generation: Generation(0),
            next: first,
            next_stream: 0,
            deadline,
            members_max,
            hanging: BTreeSet::new(),
        }
    }

    /// Creates a fleet without processes.
    pub(crate) const fn nobody() -> Self {
        Self::new(IncarnationId(0), Duration::ZERO, 0)
    }

    /// Returns a new incarnation, not live before its first heartbeat. A ps replaces its former
    /// self at the same URL.
    ///
    /// # Errors
    /// The fleet is full, or a live ps elsewhere has this name.
    pub(crate) fn register(
        &mut self,
        now: Duration,
        process: Process,
    ) -> Result<(IncarnationId, Option<Change>), Failure> {
        let same =
            |member: &Member| member.process.role == MemberRole::Ps && member.process.name == process.name;
        let former = self.members.iter().find(|(_, member)| process.role == MemberRole::Ps && same(member));
        let former = former.map(|(&incarnation, member)| (incarnation, member.clone()));
        let mut change = None;
        if let Some((incarnation, member)) = former {
            if member.live && member.process.url != process.url {
                let (name, url) = (&process.name, &member.process.url);
                return Err(Failure::new(
                    Kind::Unavailable,
                    format!(
                        "a ps named `{name}` lives at {url}; stop it or start this one with another --name"
                    ),
                ));
            }
            change = self.remove(incarnation, "was started again");
        }
        if self.members.len() >= self.members_max {
            return Err(Failure::new(
                Kind::Full,
                format!(
                    "{} processes are registered, the most that this master takes (members_max)",
                    self.members.len()
                ),
            ));
        }
        let incarnation = self.next;
        self.next = incarnation.next();
        self.members.insert(
            incarnation,
            Member { process, live: false, draining: false, reading: None, heard: now, stream: 0 },
        );
        Ok((incarnation, change))
    }

    /// Records that a heartbeat stream of this incarnation begins; answers its number for
    /// [`stream_broken`](Self::stream_broken).
    ///
    /// # Errors
    /// Unknown incarnation.
    pub(crate) fn stream_opened(&mut self, incarnation: IncarnationId) -> Result<u64, Failure> {
        self.next_stream += 1;
        let stream = self.next_stream;
        self.member_mut(incarnation)?.stream = stream;
        Ok(stream)
    }

    /// Takes a heartbeat. The first one makes the process live.
    ///
    /// # Errors
    /// Unknown incarnation.
    pub(crate) fn beat(
        &mut self,
        now: Duration,
        incarnation: IncarnationId,
        draining: bool,
    ) -> Result<Option<Change>, Failure> {
        let member = self.member_mut(incarnation)?;
        member.heard = now;
        member.draining |= draining;
        if std::mem::replace(&mut member.live, true) {
            return Ok(None);
        }
        Ok(Some(self.changed(incarnation, false, "joined")))
    }

    /// Records what a worker says of its device.
    pub(crate) fn device_said(&mut self, incarnation: IncarnationId, reading: Option<pb::DeviceReading>) {
        if let Some(member) = self.members.get_mut(&incarnation) {
            member.reading = reading;
        }
    }

    /// Records that the stream broke, and with it the process is gone.
    pub(crate) fn stream_broken(&mut self, incarnation: IncarnationId, stream: u64) -> Option<Change> {
        let member = self.members.get(&incarnation).filter(|member| member.stream == stream)?;
        let reason = if member.draining { "has drained and left" } else { "closed its heartbeat stream" };
        self.remove(incarnation, reason)
    }

    /// Removes every process that was silent for the deadline.
    pub(crate) fn expire(&mut self, now: Duration) -> Vec<Change> {
        let silent = |member: &Member| now.saturating_sub(member.heard) >= self.deadline;
        let gone: Vec<_> = self
            .members
            .iter()
            .filter(|(_, member)| silent(member))
            .map(|(&incarnation, _)| incarnation)
            .collect();
        let reason = format!("sent no heartbeat for {:?}", self.deadline);
        gone.into_iter().filter_map(|incarnation| self.remove(incarnation, &reason)).collect()
    }

    /// Returns a registered process.
    ///
    /// # Errors
    /// Unknown incarnation: it must register again.
    pub(crate) fn member(&self, incarnation: IncarnationId) -> Result<&Member, Failure> {
        self.members.get(&incarnation).ok_or_else(|| unknown(incarnation))
    }

    fn member_mut(&mut self, incarnation: IncarnationId) -> Result<&mut Member, Failure> {
        self.members.get_mut(&incarnation).ok_or_else(|| unknown(incarnation))
    }

    /// Returns how many are registered.
    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// Workers that take new work, oldest first.
    pub(crate) fn workers(&self) -> impl Iterator<Item = (IncarnationId, &Process)> {
        let able =
            |member: &Member| member.process.role == MemberRole::Worker && member.live && !member.draining;
        self.members.iter().filter(move |(_, member)| able(member)).map(|(&id, member)| (id, &member.process))
    }

    /// Returns every live worker, draining ones included, oldest first.
    pub(crate) fn live_workers(&self) -> impl Iterator<Item = (IncarnationId, &Member)> {
        let live = |member: &Member| member.process.role == MemberRole::Worker && member.live;
        self.members.iter().filter(move |(_, member)| live(member)).map(|(&id, member)| (id, member))
    }

    /// Records that these workers, and no others, do not get on with something.
    pub(crate) fn set_hanging(&mut self, workers: BTreeSet<IncarnationId>) {
        self.hanging = workers;
    }

    /// Returns whether a worker does not get on with something.
    pub(crate) fn hangs(&self, worker: IncarnationId) -> bool {
        self.hanging.contains(&worker)
    }

    /// Returns live workers, draining ones included.
    pub(crate) fn workers_live(&self) -> u32 {
        self.count(MemberRole::Worker)
    }

    /// Returns live workers on CUDA devices, draining ones included.
    pub(crate) fn workers_cuda_live(&self) -> u64 {
        self.live_workers().filter(|(_, member)| member.process.device.is_cuda()).count() as u64
    }

    /// Returns live ps.
    pub(crate) fn ps_live(&self) -> u32 {
        self.count(MemberRole::Ps)
    }

    /// Returns live ps that take new partitions: incarnation, name and URL, oldest first.
    pub(crate) fn ps(&self) -> impl Iterator<Item = (IncarnationId, &Process)> {
        let able = |member: &Member| member.process.role == MemberRole::Ps && member.live && !member.draining;
        self.members.iter().filter(move |(_, member)| able(member)).map(|(&id, member)| (id, &member.process))
    }

    /// Returns the live ps of this name.
    pub(crate) fn ps_named(&self, name: &str) -> Option<(IncarnationId, &Process)> {
        let named = |member: &Member| {
            member.process.role == MemberRole::Ps && member.live && member.process.name == name
        };
        self.members.iter().find(|(_, member)| named(member)).map(|(&id, member)| (id, &member.process))
    }

    /// Returns whether this incarnation wants to leave.
    pub(crate) fn is_draining(&self, incarnation: IncarnationId) -> bool {
        self.members.get(&incarnation).is_some_and(|member| member.live && member.draining)
    }

    /// Returns the count of changes of the live set.
    pub(crate) const fn generation(&self) -> Generation {
        self.generation
    }

    fn count(&self, role: MemberRole) -> u32 {
        self.members.values().filter(|member| member.live && member.process.role == role).count() as u32
    }

    fn remove(&mut self, incarnation: IncarnationId, reason: &str) -> Option<Change> {
        let live = self.members.get(&incarnation)?.live;
        let change = live.then(|| self.changed(incarnation, true, reason));
        self.members.remove(&incarnation);
        change
    }

    fn changed(&mut self, incarnation: IncarnationId, gone: bool, reason: &str) -> Change {
        self.generation = self.generation.next();
        let Process { role, name, .. } = &self.members[&incarnation].process;
        let reason = format!("{} `{name}` (incarnation {incarnation}) {reason}", role.name());
        Change { incarnation, role: *role, gone, reason }
    }
}

fn unknown(incarnation: IncarnationId) -> Failure {
    Failure::new(Kind::Fenced, format!("incarnation {incarnation} is gone or was never here; register again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn membership() -> Membership {
        Membership::new(IncarnationId(1), 5 * SECOND, 3)
    }

    fn worker(name: &str) -> Process {
        Process::new(MemberRole::Worker, name, "")
    }

    fn ps(name: &str, url: &str) -> Process {
        Process::new(MemberRole::Ps, name, url)
    }

    fn join(membership: &mut Membership, now: Duration, process: Process) -> (IncarnationId, u64) {
        let (incarnation, _) = membership.register(now, process).expect("room");
        let stream = membership.stream_opened(incarnation).expect("known");
        membership.beat(now, incarnation, false).expect("known").expect("it is new");
        (incarnation, stream)
    }

    #[test]
    fn a_process_is_live_from_its_first_heartbeat() {
        let mut fleet = membership();
        let (incarnation, change) = fleet.register(SECOND, worker("w")).expect("room");
        assert_eq!((fleet.workers().count(), change), (0, None));
        let change = fleet.beat(SECOND, incarnation, false).expect("known").expect("it is new");
        assert_eq!(change.reason, "worker `w` (incarnation 1) joined");
        assert_eq!((fleet.workers().count(), fleet.generation()), (1, Generation(1)));
        assert_eq!(fleet.beat(SECOND, incarnation, false).expect("known"), None);
    }

    #[test]
    fn a_broken_stream_means_gone_at_once() {
        let mut fleet = membership();
        let (incarnation, stream) = join(&mut fleet, SECOND, worker("w"));
        let change = fleet.stream_broken(incarnation, stream).expect("it lived");
        assert!(change.gone && change.reason.contains("closed its heartbeat stream"), "{}", change.reason);
        assert_eq!(fleet.beat(SECOND, incarnation, false).unwrap_err().kind, Kind::Fenced);
        let (again, _) = join(&mut fleet, SECOND, worker("w"));
        assert_ne!(incarnation, again);
    }

    #[test]
    fn an_old_stream_that_breaks_late_means_nothing() {
        let mut fleet = membership();
        let (incarnation, old) = join(&mut fleet, SECOND, worker("w"));
        fleet.stream_opened(incarnation).expect("known");
        assert_eq!(fleet.stream_broken(incarnation, old), None);
        assert_eq!(fleet.workers_live(), 1);
    }

    #[test]
    fn silence_for_the_deadline_means_gone() {
        let mut fleet = membership();
        let (silent, _) = join(&mut fleet, SECOND, worker("silent"));
        let (loud, _) = join(&mut fleet, SECOND, worker("loud"));
        fleet.beat(4 * SECOND, loud, false).expect("known");
        assert_eq!(fleet.expire(6 * SECOND - Duration::from_millis(1)), []);
        let gone = fleet.expire(6 * SECOND);
        assert_eq!(gone.iter().map(|change| change.incarnation).collect::<Vec<_>>(), [silent]);
        assert!(gone[0].reason.contains("no heartbeat for 5s"), "{}", gone[0].reason);
        assert_eq!(fleet.workers().map(|(id, _)| id).collect::<Vec<_>>(), [loud]);
    }

    #[test]
    fn who_registers_and_never_beats_is_forgotten_without_a_word() {
        let mut fleet = membership();
        let (incarnation, _) = fleet.register(SECOND, worker("w")).expect("room");
        assert_eq!(fleet.expire(6 * SECOND), []);
        assert_eq!(
            (fleet.member(incarnation).unwrap_err().kind, fleet.generation()),
            (Kind::Fenced, Generation(0))
        );
    }

    #[test]
    fn a_draining_worker_is_live_and_takes_no_work() {
        let mut fleet = membership();
        let (incarnation, stream) = join(&mut fleet, SECOND, worker("w"));
        fleet.beat(SECOND, incarnation, true).expect("known");
        fleet.beat(SECOND, incarnation, false).expect("known");
        assert_eq!((fleet.workers().count(), fleet.workers_live()), (0, 1));
        let change = fleet.stream_broken(incarnation, stream).expect("it lived");
        assert!(change.reason.contains("has drained and left"), "{}", change.reason);
    }

    #[test]
    fn a_ps_keeps_its_name_across_restarts() {
        let mut fleet = membership();
        let (old, _) = join(&mut fleet, SECOND, ps("ps-0", "http://a:1"));
        let (new, change) = fleet.register(2 * SECOND, ps("ps-0", "http://a:1")).expect("its own place");
        assert!(change.expect("the former left").reason.contains("was started again"));
        assert_eq!(fleet.ps_named("ps-0"), None);
        fleet.beat(2 * SECOND, new, false).expect("known");
        assert_eq!(fleet.ps_named("ps-0").map(|(incarnation, _)| incarnation), Some(new));
        assert_eq!((fleet.ps_live(), fleet.member(old).is_err()), (1, true));
    }

    #[test]
    fn two_live_ps_never_share_a_name() {
        let mut fleet = membership();
        join(&mut fleet, SECOND, ps("ps-0", "http://a:1"));
        let refused = fleet.register(2 * SECOND, ps("ps-0", "http://b:1")).unwrap_err();
        assert!(refused.is_retryable() && refused.message.contains("http://a:1"), "{refused}");
        fleet.expire(6 * SECOND);
        assert!(fleet.register(6 * SECOND, ps("ps-0", "http://b:1")).is_ok());
    }

    #[test]
    fn a_full_fleet_refuses_and_says_which_limit() {
        let mut fleet = membership();
        for name in ["a", "b", "c"] {
            join(&mut fleet, SECOND, worker(name));
        }
        let refused = fleet.register(SECOND, worker("d")).unwrap_err();
        assert!(refused.kind == Kind::Full && refused.message.contains("members_max"), "{refused}");
    }
}

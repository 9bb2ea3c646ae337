//! Work that is not training (index, initialize, measure, export): a short list of tasks, first
//! come first served. Pure.
//!
//! A task is handed to one worker and stays until it is completed or its job ends. When all its
//! holders hang, whoever is free takes a copy: the first to complete it ends the leases of the
//! others. Late and foreign leases change nothing, as in the dispatcher.
//!
//! Always true here: whatever happens looks at tasks that are held, of which each worker has a few,
//! and at no other. So all tasks together cost in proportion to their number.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId, TaskId};
use proto::pb;

use crate::lease::{Attempts, Ending, Grant, HELD_MAX, LeaseIds, Limits, Lost};

/// The tasks of a job.
#[derive(Debug)]
pub(crate) struct TaskQueue<T> {
    limits: Limits,
    /// Tasks that nobody holds.
    waiting: BTreeMap<TaskId, Task<T>>,
    /// Tasks that somebody holds.
    held: BTreeMap<TaskId, Task<T>>,
    next: TaskId,
    /// How often a task was looked at: what the queue costs.
    looks: Cell<u64>,
}

#[derive(Debug)]
struct Task<T> {
    work: T,
    attempts: Attempts,
    /// The worker that holds the task, and the workers that hold copies; empty if it waits.
    holders: Vec<Grant>,
}

impl<T> Task<T> {
    fn is_held(&self, worker: IncarnationId, lease: LeaseId) -> bool {
        self.holders.iter().any(|grant| (grant.worker, grant.lease) == (worker, lease))
    }

    fn is_held_by(&self, worker: IncarnationId) -> bool {
        self.holders.iter().any(|grant| grant.worker == worker)
    }

    /// Returns when the last of its holders begins to hang; `None`: it has none.
    fn hangs_from(&self, stall: Duration) -> Option<Duration> {
        self.holders.iter().map(|grant| grant.progress.hangs_from(None, stall)).max()
    }
}

/// A task that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Done<T> {
    pub(crate) work: T,
    /// The other holders: they need not go on.
    pub(crate) beaten: Vec<(IncarnationId, LeaseId)>,
}

/// What a worker is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TaskGrant<T> {
    pub(crate) lease: LeaseId,
    pub(crate) task: TaskId,
    pub(crate) work: T,
    pub(crate) attempt: u32,
    pub(crate) deadline: Duration,
}

impl<T: Clone + std::fmt::Display> TaskQueue<T> {
    pub(crate) const fn new(limits: Limits) -> Self {
        Self { limits, waiting: BTreeMap::new(), held: BTreeMap::new(), next: TaskId(0), looks: Cell::new(0) }
    }

    pub(crate) fn push(&mut self, work: T) {
        self.waiting.insert(self.next, Task { work, attempts: Attempts::default(), holders: Vec::new() });
        self.next = self.next.next();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.held.is_empty()
    }

    /// Returns every outstanding lease.
    pub(crate) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.held().flat_map(|(_, task)| &task.holders).map(|grant| grant.lease)
    }

    /// Returns the holder of every outstanding lease.
    pub(crate) fn holders(&self) -> impl Iterator<Item = IncarnationId> {
        self.held().flat_map(|(_, task)| &task.holders).map(|grant| grant.worker)
    }

    /// Forgets all tasks; their leases have ended.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
        self.held.clear();
    }

    /// Returns the oldest task that nobody holds, unless this worker holds as many as it may.
    pub(crate) fn lease(
        &mut self,
        now: Duration,
        ids: &mut LeaseIds,
        worker: IncarnationId,
    ) -> Option<TaskGrant<T>> {
        if self.held_by(worker) >= HELD_MAX {
            return None;
        }
        let (id, task) = self.waiting.pop_first()?;
        self.held.insert(id, task);
        Some(self.grant(now, ids, worker, id))
    }

    /// Returns a copy of the oldest task whose holders all hang, for a worker that has nothing else
    /// to do.
    ///
    /// # Errors
    /// There is none; the time from which on there may be one, if nothing else happens before.
    pub(crate) fn copy(
        &mut self,
        now: Duration,
        ids: &mut LeaseIds,
        worker: IncarnationId,
    ) -> Result<TaskGrant<T>, Option<Duration>> {
        if self.held_by(worker) >= HELD_MAX {
            return Err(None);
        }
        let stall = self.limits.stall;
        let others = self.held().filter(|(_, task)| !task.is_held_by(worker));
        let oldest = others.filter_map(|(&id, task)| Some((task.hangs_from(stall)?, id))).min();
        match oldest {
            Some((from, id)) if from <= now => Ok(self.grant(now, ids, worker, id)),
            later => Err(later.map(|(from, _)| from)),
        }
    }

    /// Grants a task that is among the held to one more holder.
    fn grant(
        &mut self,
        now: Duration,
        ids: &mut LeaseIds,
        worker: IncarnationId,
        id: TaskId,
    ) -> TaskGrant<T> {
        let grant = Grant::new(now, ids.fresh(), worker, &self.limits);
        let (lease, deadline) = (grant.lease, grant.deadline);
        let task = self.held.get_mut(&id).expect("a task to grant");
        task.attempts.grants += 1;
        task.holders.push(grant);
        TaskGrant { lease, task: id, work: task.work.clone(), attempt: task.attempts.grants, deadline }
    }

    fn held(&self) -> impl Iterator<Item = (&TaskId, &Task<T>)> {
        self.held.iter().inspect(move |_| self.looks.set(self.looks.get() + 1))
    }

    /// Returns how many tasks a worker holds.
    fn held_by(&self, worker: IncarnationId) -> usize {
        self.held().filter(|(_, task)| task.is_held_by(worker)).count()
    }

    /// Returns the grants whose holders hang, each with the work and whether another holder of it
    /// gets on.
    pub(crate) fn hanging(&self, now: Duration) -> impl Iterator<Item = (&T, &Grant, bool)> {
        let stall = self.limits.stall;
        let hangs = move |grant: &Grant| grant.progress.hangs_from(None, stall) <= now;
        self.held().flat_map(move |(_, task)| {
            let taken_over = task.holders.iter().any(|grant| !hangs(grant));
            let hanging = task.holders.iter().filter(move |grant| hangs(grant));
            hanging.map(move |grant| (&task.work, grant, taken_over))
        })
    }

    /// Records that the holder of a lease lives; false when the lease has ended.
    pub(crate) fn renew(&mut self, now: Duration, worker: IncarnationId, lease: LeaseId) -> bool {
        let limits = self.limits;
        self.grant_of(worker, lease).map(|grant| grant.renew(now, &limits)).is_some()
    }

    /// Records that the holder of a lease says how it gets on; false when the lease has ended.
    pub(crate) fn progress(
        &mut self,
        now: Duration,
        worker: IncarnationId,
        said: &pb::LeaseProgress,
    ) -> bool {
        let grant = self.grant_of(worker, LeaseId(said.lease));
        grant.map(|grant| grant.progress.hear(now, said)).is_some()
    }

    fn grant_of(&mut self, worker: IncarnationId, lease: LeaseId) -> Option<&mut Grant> {
        let id = self.task_of(worker, lease)?;
        let mut grants = self.held.get_mut(&id)?.holders.iter_mut();
        grants.find(|grant| (grant.worker, grant.lease) == (worker, lease))
    }

    /// Returns the task that a good lease is for.
    fn task_of(&self, worker: IncarnationId, lease: LeaseId) -> Option<TaskId> {
        self.held().find(|(_, task)| task.is_held(worker, lease)).map(|(&id, _)| id)
    }

    /// Returns what a good lease is for.
    pub(crate) fn work(&self, worker: IncarnationId, lease: LeaseId) -> Option<&T> {
        Some(&self.held.get(&self.task_of(worker, lease)?)?.work)
    }

    /// Records that the task is done and leaves the list. `None`: the lease had ended, nothing
    /// changed.
    pub(crate) fn complete(&mut self, worker: IncarnationId, lease: LeaseId) -> Option<Done<T>> {
        let task = self.held.remove(&self.task_of(worker, lease)?)?;
        let others = task.holders.iter().filter(|grant| grant.lease != lease);
        Some(Done { beaten: others.map(|grant| (grant.worker, grant.lease)).collect(), work: task.work })
    }

    /// Records that the holder could not do its work. `None`: the lease had ended, nothing changed.
    pub(crate) fn fail(&mut self, worker: IncarnationId, lease: LeaseId, message: &str) -> Option<Lost> {
        self.end_where(|grant| {
            ((grant.worker, grant.lease) == (worker, lease)).then(|| Ending::Failed(message.to_owned()))
        })
        .pop()
    }

    /// Records that the holder gives its work back; false when the lease had ended.
    pub(crate) fn release(&mut self, worker: IncarnationId, lease: LeaseId) -> bool {
        let good = |grant: &Grant| (grant.worker, grant.lease) == (worker, lease);
        !self.end_where(|grant| good(grant).then_some(Ending::Released)).is_empty()
    }

    /// Takes back every overdue lease.
    pub(crate) fn expire(&mut self, now: Duration) -> Vec<Lost> {
        self.end_where(|grant| grant.is_overdue(now).then(|| grant.overdue()))
    }

    /// Takes back every lease of a process that is gone.
    pub(crate) fn worker_gone(&mut self, worker: IncarnationId) -> Vec<Lost> {
        self.end_where(|grant| (grant.worker == worker).then_some(Ending::Died))
    }

    /// What nobody holds any more waits again, before all later tasks.
    fn end_where(&mut self, ending: impl Fn(&Grant) -> Option<Ending>) -> Vec<Lost> {
        let mut lost = Vec::new();
        let mut free = Vec::new();
        for (&id, task) in &mut self.held {
            self.looks.set(self.looks.get() + 1);
            for grant in std::mem::take(&mut task.holders) {
                let Some(ending) = ending(&grant) else {
                    task.holders.push(grant);
                    continue;
                };
                let exhausted = task.attempts.end(ending, &self.limits);
                let exhausted = exhausted.map(|exhausted| format!("{}: {exhausted}", task.work));
                lost.push(Lost { lease: grant.lease, worker: grant.worker, exhausted });
            }
            free.extend(task.holders.is_empty().then_some(id));
        }
        let free = free.into_iter().filter_map(|id| self.held.remove_entry(&id));
        self.waiting.extend(free);
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IncarnationId = IncarnationId(1);
    const B: IncarnationId = IncarnationId(2);
    const SECOND: Duration = Duration::from_secs(1);

    fn queue() -> (TaskQueue<&'static str>, LeaseIds) {
        let limits = Limits {
            lease: 30 * SECOND,
            claim: 3 * SECOND,
            attempts_max: 2,
            deaths_max: 2,
            stall: 300 * SECOND,
        };
        let mut queue = TaskQueue::new(limits);
        ["one", "two", "three"].into_iter().for_each(|work| queue.push(work));
        (queue, LeaseIds::starting_at(1))
    }

    fn lease(
        queue: &mut TaskQueue<&'static str>,
        ids: &mut LeaseIds,
        worker: IncarnationId,
    ) -> Option<(u64, &'static str)> {
        queue.lease(SECOND, ids, worker).map(|grant| (grant.lease.get(), grant.work))
    }

    #[test]
    fn tasks_go_in_order_and_two_to_a_worker() {
        let (mut queue, mut ids) = queue();
        assert_eq!(lease(&mut queue, &mut ids, A), Some((1, "one")));
        assert_eq!(lease(&mut queue, &mut ids, A), Some((2, "two")));
        assert_eq!(lease(&mut queue, &mut ids, A), None);
        assert_eq!(lease(&mut queue, &mut ids, B), Some((3, "three")));
        assert_eq!(lease(&mut queue, &mut ids, B), None);
    }

    /// Tasks that are looked at while four workers do as many as there are.
    fn looks(tasks: u64) -> u64 {
        let (mut queue, mut ids) = queue();
        queue.clear();
        (0..tasks).for_each(|_| queue.push("one"));
        let workers = [1, 2, 3, 4].map(IncarnationId);
        let mut held = std::collections::VecDeque::new();
        let mut done = 0;
        loop {
            for worker in workers {
                let grant = queue.lease(SECOND, &mut ids, worker);
                held.extend(grant.map(|grant| (worker, grant.lease)));
                assert!(queue.copy(SECOND, &mut ids, worker).is_err());
            }
            let Some((worker, lease)) = held.pop_front() else { break };
            assert!(queue.renew(SECOND, worker, lease) && queue.work(worker, lease).is_some());
            match lease.get() % 7 {
                0 => assert!(queue.release(worker, lease)),
                _ => assert!(queue.complete(worker, lease).is_some()),
            }
            assert!(!queue.renew(SECOND, worker, lease) && queue.complete(worker, lease).is_none());
            assert!(queue.expire(SECOND).is_empty());
            done += 1;
        }
        assert!(queue.is_empty() && done >= tasks);
        queue.looks.get()
    }

    #[test]
    fn tasks_cost_in_proportion_to_their_number() {
        let (few, many) = (looks(100), looks(10_000));
        assert!(many < 110 * few, "{few} looks for 100 tasks, {many} for 10000");
    }

    #[test]
    fn a_task_is_completed_once_by_whoever_holds_it() {
        let (mut queue, mut ids) = queue();
        lease(&mut queue, &mut ids, A);
        assert_eq!(queue.complete(B, LeaseId(1)), None);
        let done = queue.complete(A, LeaseId(1)).expect("a good lease");
        assert_eq!((done.work, done.beaten), ("one", Vec::new()));
        assert_eq!(queue.complete(A, LeaseId(1)), None);
        assert!(!queue.renew(SECOND, A, LeaseId(1)));
    }

    #[test]
    fn what_ends_undone_is_handed_out_again_first() {
        let (mut queue, mut ids) = queue();
        lease(&mut queue, &mut ids, A);
        assert!(queue.release(A, LeaseId(1)) && !queue.release(A, LeaseId(1)));
        lease(&mut queue, &mut ids, A);
        assert_eq!(queue.worker_gone(A).len(), 1);
        assert_eq!(lease(&mut queue, &mut ids, B), Some((3, "one")));
        assert!(queue.renew(2 * SECOND, B, LeaseId(3)));
        assert_eq!(queue.expire(31 * SECOND), []);
        assert_eq!(queue.expire(32 * SECOND).len(), 1);
        assert!(queue.complete(B, LeaseId(3)).is_none());
    }

    /// Every holder sends heartbeats and gets on with nothing.
    fn live(queue: &mut TaskQueue<&'static str>, now: Duration, holders: &[(IncarnationId, u64)]) {
        for &(worker, lease) in holders {
            assert!(queue.renew(now, worker, LeaseId(lease)));
            let said = pb::LeaseProgress {
                lease,
                phase: pb::Phase::Reading.into(),
                idle_ms: 1_000_000,
                what: "one".to_owned(),
                ..Default::default()
            };
            assert!(queue.progress(now, worker, &said));
        }
    }

    #[test]
    fn a_task_whose_holders_hang_is_copied_to_a_third_and_ends_for_all_when_one_is_done() {
        let (mut queue, mut ids) = queue();
        let c = IncarnationId(3);
        lease(&mut queue, &mut ids, A);
        let mut copy = |queue: &mut TaskQueue<_>, now, worker| {
            queue.copy(now, &mut ids, worker).map(|grant| (grant.lease.get(), grant.work))
        };
        assert_eq!(copy(&mut queue, 2 * SECOND, B), Err(Some(301 * SECOND)), "it may be copied later");
        live(&mut queue, 1001 * SECOND, &[(A, 1)]);
        assert_eq!(queue.expire(1002 * SECOND), [], "who lives keeps what it holds");
        assert_eq!(copy(&mut queue, 1002 * SECOND, A), Err(None), "not by its own holder");
        assert_eq!(copy(&mut queue, 1002 * SECOND, B), Ok((2, "one")));
        assert_eq!(
            copy(&mut queue, 1002 * SECOND, c),
            Err(Some(1302 * SECOND)),
            "one copy is enough at first"
        );
        live(&mut queue, 2500 * SECOND, &[(A, 1), (B, 2)]);
        assert_eq!(queue.hanging(2500 * SECOND).count(), 2);
        assert!(queue.hanging(2500 * SECOND).all(|(_, _, taken_over)| !taken_over));
        assert_eq!(copy(&mut queue, 2500 * SECOND, c), Ok((3, "one")), "the copy hangs, too");
        assert!(queue.hanging(2500 * SECOND).all(|(_, _, taken_over)| taken_over));
        let done = queue.complete(c, LeaseId(3)).expect("a good lease");
        assert_eq!((done.work, done.beaten), ("one", vec![(A, LeaseId(1)), (B, LeaseId(2))]));
        assert_eq!(queue.complete(A, LeaseId(1)), None);
    }

    #[test]
    fn a_task_that_gets_on_is_not_copied() {
        let (mut queue, mut ids) = queue();
        lease(&mut queue, &mut ids, A);
        for now in (1..100).map(|minute| minute * 60 * SECOND) {
            let said = pb::LeaseProgress {
                lease: 1,
                phase: pb::Phase::Reading.into(),
                idle_ms: 10_000,
                ..Default::default()
            };
            assert!(queue.progress(now, A, &said));
            assert!(queue.copy(now, &mut ids, B).is_err());
        }
    }

    #[test]
    fn a_task_that_fails_too_often_says_what_and_why() {
        let (mut queue, mut ids) = queue();
        lease(&mut queue, &mut ids, A);
        assert_eq!(queue.fail(A, LeaseId(1), "no such file").expect("good").exhausted, None);
        lease(&mut queue, &mut ids, B);
        assert_eq!(queue.fail(A, LeaseId(2), "late"), None);
        let exhausted = queue.fail(B, LeaseId(2), "no such file: x").expect("good").exhausted.expect("twice");
        assert!(
            exhausted.starts_with("one: 2 attempts failed") && exhausted.ends_with("no such file: x"),
            "{exhausted}"
        );
    }

    #[test]
    fn an_answer_that_was_lost_on_its_way_counts_for_nothing() {
        let (mut queue, mut ids) = queue();
        for round in 1..5 {
            lease(&mut queue, &mut ids, A);
            let lost = queue.expire(SECOND + 3 * SECOND);
            assert_eq!((lost.len(), lost[0].lease, &lost[0].exhausted), (1, LeaseId(round), &None));
        }
    }
}

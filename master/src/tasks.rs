//! Work that is not training (index, initialize, measure, export): a short list of tasks, first come first served. Pure.
//!
//! A task is handed to one worker at a time and stays until it is completed or its job ends. Late and foreign leases change
//! nothing, as in the dispatcher.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId, TaskId};

use crate::lease::{Attempts, Ending, Grant, HELD_MAX, LeaseIds, Limits, Lost};

/// The tasks of a job.
#[derive(Debug)]
pub(crate) struct TaskQueue<T> {
    limits: Limits,
    tasks: BTreeMap<TaskId, Task<T>>,
    next: TaskId,
}

#[derive(Debug)]
struct Task<T> {
    work: T,
    attempts: Attempts,
    grant: Option<Grant>,
}

impl<T> Task<T> {
    fn is_held(&self, worker: IncarnationId, lease: LeaseId) -> bool {
        self.grant.as_ref().is_some_and(|grant| (grant.worker, grant.lease) == (worker, lease))
    }
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
        Self { limits, tasks: BTreeMap::new(), next: TaskId(0) }
    }

    pub(crate) fn push(&mut self, work: T) {
        self.tasks.insert(self.next, Task { work, attempts: Attempts::default(), grant: None });
        self.next = self.next.next();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Every outstanding lease.
    pub(crate) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.tasks.values().filter_map(|task| task.grant.as_ref()).map(|grant| grant.lease)
    }

    /// Forgets all tasks; their leases have ended.
    pub(crate) fn clear(&mut self) {
        self.tasks.clear();
    }

    /// The oldest task that nobody holds, unless this worker holds as many as it may.
    pub(crate) fn lease(
        &mut self,
        now: Duration,
        ids: &mut LeaseIds,
        worker: IncarnationId,
    ) -> Option<TaskGrant<T>> {
        let held = |task: &&Task<T>| task.grant.as_ref().is_some_and(|grant| grant.worker == worker);
        if self.tasks.values().filter(held).count() >= HELD_MAX {
            return None;
        }
        let (&id, task) = self.tasks.iter_mut().find(|(_, task)| task.grant.is_none())?;
        let grant = Grant::new(now, ids.fresh(), worker, &self.limits);
        let (lease, deadline) = (grant.lease, grant.deadline);
        task.attempts.grants += 1;
        task.grant = Some(grant);
        Some(TaskGrant { lease, task: id, work: task.work.clone(), attempt: task.attempts.grants, deadline })
    }

    /// Prolongs a lease; false when it has ended.
    pub(crate) fn renew(&mut self, now: Duration, worker: IncarnationId, lease: LeaseId) -> bool {
        let limits = self.limits;
        let task = self.tasks.values_mut().find(|task| task.is_held(worker, lease));
        task.and_then(|task| task.grant.as_mut()).map(|grant| grant.renew(now, &limits)).is_some()
    }

    /// What a good lease is for.
    pub(crate) fn work(&self, worker: IncarnationId, lease: LeaseId) -> Option<&T> {
        self.tasks.values().find(|task| task.is_held(worker, lease)).map(|task| &task.work)
    }

    /// The task is done and leaves the list. `None`: the lease had ended, nothing changed.
    pub(crate) fn complete(&mut self, worker: IncarnationId, lease: LeaseId) -> Option<T> {
        let (&id, _) = self.tasks.iter().find(|(_, task)| task.is_held(worker, lease))?;
        self.tasks.remove(&id).map(|task| task.work)
    }

    /// The holder could not do it. `None`: the lease had ended, nothing changed.
    pub(crate) fn fail(&mut self, worker: IncarnationId, lease: LeaseId, message: &str) -> Option<Lost> {
        self.end_where(|grant| {
            ((grant.worker, grant.lease) == (worker, lease)).then(|| Ending::Failed(message.to_owned()))
        })
        .pop()
    }

    /// The holder gives it back; false when the lease had ended.
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

    fn end_where(&mut self, ending: impl Fn(&Grant) -> Option<Ending>) -> Vec<Lost> {
        let mut lost = Vec::new();
        for task in self.tasks.values_mut() {
            let Some((grant, ending)) = task.grant.as_ref().and_then(|grant| Some((grant, ending(grant)?)))
            else {
                continue;
            };
            let (lease, worker) = (grant.lease, grant.worker);
            task.grant = None;
            let exhausted = task.attempts.end(ending, &self.limits);
            let exhausted = exhausted.map(|exhausted| format!("{}: {exhausted}", task.work));
            lost.push(Lost { lease, worker, exhausted });
        }
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
        let limits = Limits { lease: 30 * SECOND, claim: 3 * SECOND, attempts_max: 2, deaths_max: 2 };
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

    #[test]
    fn a_task_is_completed_once_by_whoever_holds_it() {
        let (mut queue, mut ids) = queue();
        lease(&mut queue, &mut ids, A);
        assert_eq!(queue.complete(B, LeaseId(1)), None);
        assert_eq!(queue.complete(A, LeaseId(1)), Some("one"));
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

//! Jobs whose end is durable. Each is its encoded status and little more, so that 100,000 of them
//! are small. Pure.
//!
//! They are apart from the jobs that live: no heartbeat, lease or tick walks them. Their events are
//! in the journal alone.

use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message as _;
use proto::ids::JobId;
use proto::pb;

/// A job that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    /// A `JobStatus`.
    status: Box<[u8]>,
    /// `limits.stall` of its specification.
    pub(crate) stall: Duration,
}

impl Ended {
    pub(crate) fn new(status: &pb::JobStatus, stall: Duration) -> Self {
        Self { status: status.encode_to_vec().into_boxed_slice(), stall }
    }

    /// Returns everything that a user may ask.
    pub(crate) fn status(&self) -> pb::JobStatus {
        pb::JobStatus::decode(&*self.status).expect("its own bytes")
    }
}

/// All jobs that have ended and are not forgotten, by number.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    jobs: BTreeMap<JobId, Ended>,
    /// Numbers of the jobs of each name, in order: users name jobs.
    names: BTreeMap<Box<str>, Vec<JobId>>,
}

impl Archive {
    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    pub(crate) fn get(&self, id: JobId) -> Option<&Ended> {
        self.jobs.get(&id)
    }

    /// Numbers of all jobs that come after `after`, in order.
    pub(crate) fn after(&self, after: JobId) -> impl DoubleEndedIterator<Item = JobId> {
        self.jobs.range(after.next()..).map(|(&id, _)| id)
    }

    pub(crate) fn insert(&mut self, id: JobId, job: Ended) {
        let name = job.status().name;
        let ids = self.names.entry(base(&name, id).into()).or_default();
        ids.insert(ids.partition_point(|&other| other < id), id);
        self.jobs.insert(id, job);
    }

    /// Forgets the oldest job.
    pub(crate) fn pop_oldest(&mut self) -> Option<JobId> {
        let (id, job) = self.jobs.pop_first()?;
        let name = job.status().name;
        let name = base(&name, id);
        if let Some(ids) = self.names.get_mut(name) {
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                self.names.remove(name);
            }
        }
        Some(id)
    }

    /// Returns the job of this name, the newest of them.
    pub(crate) fn newest_of(&self, name: &str) -> Option<JobId> {
        self.names.get(name)?.last().copied()
    }

    /// Returns the job that is called `NAME-ID`.
    pub(crate) fn called(&self, name: &str) -> Option<JobId> {
        let id = JobId(name.rsplit_once('-')?.1.parse().ok()?);
        self.names.get(base(name, id))?.binary_search(&id).is_ok().then_some(id)
    }
}

/// Returns what a job's specification calls it.
fn base(name: &str, id: JobId) -> &str {
    name.strip_suffix(&format!("-{id}")).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ended(name: &str, id: u64) -> Ended {
        let status = pb::JobStatus { job: id, name: format!("{name}-{id}"), ..Default::default() };
        Ended::new(&status, Duration::ZERO)
    }

    proptest! {
        #[test]
        fn jobs_are_found_by_name_until_they_are_forgotten(
            jobs in proptest::collection::btree_map(1u64..40, "a(-[1-9])?|b", 0..20),
            forgotten in 0usize..25,
        ) {
            let mut archive = Archive::default();
            let order = jobs.iter().rev().skip(1).step_by(2).chain(jobs.iter().rev().step_by(2));
            order.for_each(|(&id, name)| archive.insert(JobId(id), ended(name, id)));
            for id in jobs.keys().take(forgotten) {
                prop_assert_eq!(archive.pop_oldest(), Some(JobId(*id)));
            }
            let left: Vec<_> = jobs.iter().skip(forgotten).collect();
            prop_assert_eq!(archive.len(), left.len());
            for (&id, name) in &jobs {
                let known = left.iter().any(|(other, _)| **other == id);
                prop_assert_eq!(archive.called(&format!("{name}-{id}")), known.then_some(JobId(id)));
                prop_assert_eq!(archive.get(JobId(id)).is_some(), known);
                let newest = left.iter().rev().find(|(_, other)| *other == name);
                prop_assert_eq!(archive.newest_of(name), newest.map(|(id, _)| JobId(**id)));
                let after = left.iter().map(|(other, _)| JobId(**other)).filter(|other| other.get() > id);
                prop_assert!(archive.after(JobId(id)).eq(after));
            }
            prop_assert!(forgotten < jobs.len() || archive.names.is_empty());
        }
    }

    #[test]
    fn a_status_comes_back_whole() {
        let artifact = pb::Artifact { name: "model".to_owned(), size: 7, ..Default::default() };
        let status =
            pb::JobStatus { reason: "trained".to_owned(), artifacts: vec![artifact], ..Default::default() };
        assert_eq!(Ended::new(&status, Duration::ZERO).status(), status);
    }
}

//! The keys of a journal. They sort as their numbers do.
//!
//! ```text
//!   master                                             MasterRecord
//!   job/00000000000000000007                           JobRecord
//!   event/00000000000000000007/00000000000000000001    Event
//! ```

use proto::ids::JobId;

/// The master's own record.
pub(crate) const MASTER: &str = "master";

/// What keys of jobs begin with.
pub(crate) const JOBS: &str = "job/";

/// A job's record.
pub(crate) fn job(id: JobId) -> String {
    format!("{JOBS}{:020}", id.get())
}

/// The job whose record has this key.
pub(crate) fn job_of(key: &str) -> Option<JobId> {
    key.strip_prefix(JOBS)?.parse().ok().map(JobId)
}

/// The number of the event that has this key.
pub(crate) fn event_of(key: &str) -> Option<u64> {
    key.rsplit('/').next()?.parse().ok()
}

/// What keys of a job's events begin with.
pub(crate) fn events(id: JobId) -> String {
    format!("event/{:020}/", id.get())
}

/// A job's event.
pub(crate) fn event(id: JobId, number: u64) -> String {
    format!("{}{number:020}", events(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_as_their_numbers_do_and_jobs_do_not_mix() {
        assert!(event(JobId(2), 9) < event(JobId(2), 10) && event(JobId(2), u64::MAX) < event(JobId(10), 1));
        assert_eq!((job_of(&job(JobId(7))), event_of(&event(JobId(12), 3))), (Some(JobId(7)), Some(3)));
        assert!(event(JobId(12), 3).starts_with(&events(JobId(12))));
        assert!(!event(JobId(12), 3).starts_with(&events(JobId(1))) && job(JobId(2)) < job(JobId(10)));
    }
}

//! The keys of a journal. They sort as their numbers do.
//!
//! ```text
//!   master                                             MasterRecord
//!   job/00000000000000000007                           JobRecord
//!   event/00000000000000000007/00000000000000000001    Event
//!   index/64 HEX DIGITS                                IndexRecord
//!   script/00000000000000000007                        ScriptRecord
//! ```

use std::ops::Range;

use proto::ids::JobId;

/// The master's own record.
pub(crate) const MASTER: &str = "master";

/// What keys of jobs begin with.
pub(crate) const JOBS: &str = "job/";

/// What keys of events begin with.
const EVENTS: &str = "event/";

/// What keys of scripts begin with.
const SCRIPTS: &str = "script/";

/// What keys of indexes of files begin with.
const INDEXES: &str = "index/";

/// Returns the record of what was found in a file.
pub(crate) fn index(file: &str) -> String {
    format!("{INDEXES}{file}")
}

/// Returns the file whose index has this key.
pub(crate) fn index_of(key: &str) -> Option<&str> {
    key.strip_prefix(INDEXES)
}

/// Returns the keys of the indexes of all files.
pub(crate) fn indexes() -> Range<String> {
    within(INDEXES)
}

/// Returns a job's record.
pub(crate) fn job(id: JobId) -> String {
    format!("{JOBS}{:020}", id.get())
}

/// Returns the job whose record has this key.
pub(crate) fn job_of(key: &str) -> Option<JobId> {
    key.strip_prefix(JOBS)?.parse().ok().map(JobId)
}

/// Returns the keys of all records of jobs.
pub(crate) fn jobs() -> Range<String> {
    within(JOBS)
}

/// Returns a script's record.
pub(crate) fn script(id: JobId) -> String {
    format!("{SCRIPTS}{:020}", id.get())
}

/// Returns the keys of all records of scripts.
pub(crate) fn scripts() -> Range<String> {
    within(SCRIPTS)
}

/// Returns the keys of the events of all jobs.
pub(crate) fn all_events() -> Range<String> {
    within(EVENTS)
}

/// Returns the number of the event that has this key.
pub(crate) fn event_of(key: &str) -> Option<u64> {
    key.rsplit('/').next()?.parse().ok()
}

/// Returns the job whose event has this key.
pub(crate) fn job_of_event(key: &str) -> Option<JobId> {
    key.strip_prefix(EVENTS)?.split_once('/')?.0.parse().ok().map(JobId)
}

/// Returns the keys of a job's events.
pub(crate) fn events(id: JobId) -> Range<String> {
    within(&format!("{EVENTS}{:020}/", id.get()))
}

/// Returns the keys of a job's events with smaller numbers than `number`.
pub(crate) fn events_below(id: JobId, number: u64) -> Range<String> {
    events(id).start..event(id, number)
}

/// Returns the keys of a job's events with larger numbers than `number`.
pub(crate) fn events_after(id: JobId, number: u64) -> Range<String> {
    event(id, number.saturating_add(1))..events(id).end
}

/// Returns all keys that begin with `prefix`, which ends with `/`.
fn within(prefix: &str) -> Range<String> {
    prefix.to_owned()..format!("{}0", prefix.trim_end_matches('/'))
}

/// Returns a job's event.
pub(crate) fn event(id: JobId, number: u64) -> String {
    format!("{EVENTS}{:020}/{number:020}", id.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_as_their_numbers_do_and_jobs_do_not_mix() {
        assert!(event(JobId(2), 9) < event(JobId(2), 10) && event(JobId(2), u64::MAX) < event(JobId(10), 1));
        assert_eq!((job_of(&job(JobId(7))), event_of(&event(JobId(12), 3))), (Some(JobId(7)), Some(3)));
        assert_eq!(job_of_event(&event(JobId(12), 3)), Some(JobId(12)));
        assert!(job(JobId(2)) < job(JobId(10)) && jobs().contains(&job(JobId(u64::MAX))));
        assert!(scripts().contains(&script(JobId(7))) && !jobs().contains(&script(JobId(7))));
    }

    #[test]
    fn ranges_of_events_are_those_of_one_job() {
        let of = |range: Range<String>| {
            let numbers = [(1, 7), (12, 0), (12, 3), (12, 4), (12, u64::MAX), (13, 0)];
            numbers
                .into_iter()
                .filter(|&(id, number)| range.contains(&event(JobId(id), number)))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(events(JobId(12))), [(12, 0), (12, 3), (12, 4), (12, u64::MAX)]);
        assert_eq!(of(events_below(JobId(12), 4)), [(12, 0), (12, 3)]);
        assert_eq!(of(events_after(JobId(12), 3)), [(12, 4), (12, u64::MAX)]);
        assert_eq!(of(all_events()).len(), 6);
        assert!(indexes().contains(&index("ab12")) && !jobs().contains(&index("ab12")));
        assert_eq!(index_of(&index("ab12")), Some("ab12"));
    }
}

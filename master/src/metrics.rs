//! What a master counts: every name, unit and meaning in one list.

use net::metrics::Reading;

/// The counters of one master since it started, and the sizes of what it holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Jobs submitted.
    pub jobs_submitted: u64,
    /// Jobs that have not ended.
    pub jobs_live: u64,
    /// Jobs that wait for ps or for workers.
    pub jobs_pending: u64,
    /// Jobs that are being trained.
    pub jobs_running: u64,
    /// Live workers.
    pub workers_live: u64,
    /// Live workers on CUDA devices.
    pub workers_cuda_live: u64,
    /// Workers for which jobs have work.
    pub workers_wanted: u64,
    /// Live ps.
    pub ps_live: u64,
    /// Leases granted, copies included.
    pub leases_granted: u64,
    /// Leases granted as a copy of a straggler's.
    pub leases_copied: u64,
    /// Lanes of the order `window` given to another worker than the last one.
    pub lanes_moved: u64,
    /// Leases whose task was done.
    pub leases_completed: u64,
    /// Leases whose holder reported a failure.
    pub leases_failed: u64,
    /// Leases that were taken back: from who died or was silent, or because a ps lost what they
    /// were for.
    pub leases_expired: u64,
    /// Leases given back by who drained.
    pub leases_released: u64,
    /// Reports of leases that had ended, which changed nothing.
    pub reports_late: u64,
    /// Attempts to write the journal that failed.
    pub journal_failures: u64,
    /// Seconds that the write of the journal under way has taken so far; 0 when there is none.
    pub journal_overdue_seconds: u64,
}

impl Metrics {
    /// Returns every number, in a fixed order.
    pub fn readings(&self) -> Vec<Reading> {
        let (counter, gauge) = (Reading::counter, Reading::gauge);
        vec![
            counter("ebb_master_jobs_submitted_total", "Jobs submitted.", self.jobs_submitted),
            gauge("ebb_master_jobs_live", "Jobs that have not ended.", self.jobs_live),
            gauge("ebb_master_jobs_pending", "Jobs that wait for ps or for workers.", self.jobs_pending),
            gauge("ebb_master_jobs_running", "Jobs that are being trained.", self.jobs_running),
            gauge("ebb_master_workers_live", "Live workers.", self.workers_live),
            gauge("ebb_master_workers_cuda_live", "Live workers on CUDA devices.", self.workers_cuda_live),
            gauge(
                "ebb_master_workers_wanted",
                "Workers for which jobs have work, within the bounds of each job.",
                self.workers_wanted,
            ),
            gauge("ebb_master_ps_live", "Live ps.", self.ps_live),
            counter(
                "ebb_master_leases_granted_total",
                "Leases granted, copies included.",
                self.leases_granted,
            ),
            counter(
                "ebb_master_leases_copied_total",
                "Leases granted as copies of stragglers'.",
                self.leases_copied,
            ),
            counter(
                "ebb_master_lanes_moved_total",
                "Lanes of the order window given to another worker than the last one, copies included.",
                self.lanes_moved,
            ),
            counter(
                "ebb_master_leases_completed_total",
                "Leases whose task was done.",
                self.leases_completed,
            ),
            counter(
                "ebb_master_leases_failed_total",
                "Leases whose holder reported a failure.",
                self.leases_failed,
            ),
            counter(
                "ebb_master_leases_expired_total",
                "Leases taken back from the dead and silent, or because a ps lost its part.",
                self.leases_expired,
            ),
            counter(
                "ebb_master_leases_released_total",
                "Leases given back by who drained.",
                self.leases_released,
            ),
            counter("ebb_master_reports_late_total", "Reports of leases that had ended.", self.reports_late),
            counter(
                "ebb_master_journal_failures_total",
                "Attempts to write the journal that failed.",
                self.journal_failures,
            ),
            gauge(
                "ebb_master_journal_overdue_seconds",
                "Seconds that the write of the journal under way has taken so far.",
                self.journal_overdue_seconds,
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_of_one_form() {
        net::metrics::check_names("master", &Metrics::default().readings());
    }
}

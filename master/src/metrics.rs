//! What a master counts: every name, unit and meaning in one list.

/// The counters of one master since it started, and the sizes of what it holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Jobs submitted.
    pub jobs_submitted: u64,
    /// Jobs that have not ended.
    pub jobs_live: u64,
    /// Live workers.
    pub workers_live: u64,
    /// Live ps.
    pub ps_live: u64,
    /// Leases granted, copies included.
    pub leases_granted: u64,
    /// Leases granted as a copy of a straggler's.
    pub leases_copied: u64,
    /// Leases whose task was done.
    pub leases_completed: u64,
    /// Leases whose holder reported a failure.
    pub leases_failed: u64,
    /// Leases that were taken back: from who died or was silent, or because a ps lost what they were for.
    pub leases_expired: u64,
    /// Leases given back by who drained.
    pub leases_released: u64,
    /// Reports of leases that had ended, which changed nothing.
    pub reports_late: u64,
}

/// One number as a metrics system wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name; counters end in `_total`.
    pub name: &'static str,
    /// What it counts, for people.
    pub help: &'static str,
    /// It only grows.
    pub is_counter: bool,
    /// Its value; every one is a plain count.
    pub value: u64,
}

impl Metrics {
    /// Every number, in a fixed order.
    pub const fn list(&self) -> [Metric; 11] {
        const fn counter(name: &'static str, help: &'static str, value: u64) -> Metric {
            Metric { name, help, is_counter: true, value }
        }
        const fn gauge(name: &'static str, help: &'static str, value: u64) -> Metric {
            Metric { name, help, is_counter: false, value }
        }
        [
            counter("master_jobs_submitted_total", "jobs submitted", self.jobs_submitted),
            gauge("master_jobs_live", "jobs that have not ended", self.jobs_live),
            gauge("master_workers_live", "live workers", self.workers_live),
            gauge("master_ps_live", "live ps", self.ps_live),
            counter("master_leases_granted_total", "leases granted, copies included", self.leases_granted),
            counter(
                "master_leases_copied_total",
                "leases granted as copies of stragglers'",
                self.leases_copied,
            ),
            counter("master_leases_completed_total", "leases whose task was done", self.leases_completed),
            counter(
                "master_leases_failed_total",
                "leases whose holder reported a failure",
                self.leases_failed,
            ),
            counter(
                "master_leases_expired_total",
                "leases taken back from the dead and silent, or when a ps lost its part",
                self.leases_expired,
            ),
            counter("master_leases_released_total", "leases given back by who drained", self.leases_released),
            counter("master_reports_late_total", "reports of ended leases", self.reports_late),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_say_whether_they_count() {
        let list = Metrics::default().list();
        for (index, metric) in list.iter().enumerate() {
            assert!(metric.name.starts_with("master_"), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.is_counter, "{}", metric.name);
            assert!(list[..index].iter().all(|other| other.name != metric.name), "{}", metric.name);
        }
    }
}

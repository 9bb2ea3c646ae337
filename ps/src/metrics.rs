//! Everything a ps counts: names, units and meaning in one list.
//!
//! Counters only grow over the life of the process; gauges (marked as such) go both ways. Values are read one by one, so two
//! of them may be a moment apart.

use std::sync::atomic::{AtomicU64, Ordering};

/// One number.
#[derive(Debug, Default)]
pub struct Metric(AtomicU64);

impl Metric {
    /// Adds to it.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Takes away from a gauge.
    pub fn sub(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Its value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds to a gauge unless that would bring it above `max`; says whether it did.
    pub fn add_below(&self, amount: u64, max: u64) -> bool {
        let added = |now: u64| now.checked_add(amount).filter(|&sum| sum <= max);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added).is_ok()
    }
}

/// A metric's name, unit, meaning and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Name, the same as in every exporter.
    pub name: &'static str,
    /// Unit.
    pub unit: &'static str,
    /// Meaning.
    pub help: &'static str,
    /// Value.
    pub value: u64,
}

macro_rules! metrics {
    ($($field:ident: $name:literal in $unit:literal, $help:literal;)*) => {
        /// The numbers of one ps.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $(#[doc = $help] pub $field: Metric,)*
        }

        impl Metrics {
            /// All of them.
            pub fn readings(&self) -> Vec<Reading> {
                vec![$(Reading { name: $name, unit: $unit, help: $help, value: self.$field.get() },)*]
            }
        }
    };
}

metrics! {
    pushes_merged: "ebb_ps_push_merged_total" in "pushes", "Pushes that were added to a step that still lacks others.";
    pushes_completed: "ebb_ps_push_completed_total" in "pushes", "Pushes that completed their step, or version 0.";
    pushes_duplicate: "ebb_ps_push_duplicate_total" in "pushes", "Pushes that brought nothing new and were dropped.";
    pushes_refused: "ebb_ps_push_refused_total" in "pushes", "Pushes that were answered with an error.";
    push_bytes: "ebb_ps_push_bytes_total" in "bytes", "Values of all pushes that arrived whole.";
    push_bytes_in_flight: "ebb_ps_push_in_flight_bytes" in "bytes", "Gauge: values of pushes that are being received or taken up.";
    pulls: "ebb_ps_pull_total" in "pulls", "Pulls that were answered with weights.";
    pulls_refused: "ebb_ps_pull_refused_total" in "pulls", "Pulls that were answered with an error, waits that ended included.";
    pull_bytes: "ebb_ps_pull_bytes_total" in "bytes", "Values of all pulls that were answered with weights.";
    pulls_waiting: "ebb_ps_pull_waiting" in "pulls", "Gauge: pulls that wait for a version.";
    updates: "ebb_ps_update_total" in "updates", "Steps applied, over all partitions.";
    update_nanos: "ebb_ps_update_nanoseconds_total" in "nanoseconds", "Time spent applying steps.";
    saves: "ebb_ps_save_total" in "files", "Partitions' files of checkpoints that were written.";
    saves_failed: "ebb_ps_save_failed_total" in "files", "Files of checkpoints that were skipped or could not be written.";
    save_bytes: "ebb_ps_save_bytes_total" in "bytes", "Sizes of the files of checkpoints that were written.";
    partitions: "ebb_ps_partitions" in "partitions", "Gauge: partitions that are open.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_of_one_form() {
        let mut names: Vec<_> = Metrics::default().readings().iter().map(|reading| reading.name).collect();
        assert!(names.iter().all(|name| name.starts_with("ebb_ps_")), "{names:?}");
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    }

    #[test]
    fn a_bounded_gauge_never_passes_its_bound() {
        let metric = Metric::default();
        assert!(metric.add_below(7, 10) && !metric.add_below(4, 10) && metric.add_below(3, 10));
        assert!(!metric.add_below(u64::MAX, u64::MAX));
        metric.sub(7);
        assert_eq!(metric.get(), 3);
    }
}

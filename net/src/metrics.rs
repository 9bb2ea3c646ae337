//! Metrics in one form for all roles. A role lists its metrics in its `metrics.rs` with
//! [`metrics!`](crate::metrics!). Prometheus and OTLP get the same list.
//!
//! Values are read one by one, so two of them may be a moment apart.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;

/// One number that a role counts.
#[derive(Debug, Default)]
pub struct Metric(AtomicU64);

impl Metric {
    /// Adds `amount`.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Adds nanoseconds to a metric of the kind `seconds`.
    pub fn add_time(&self, time: std::time::Duration) {
        self.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Returns a timer that adds the time until it is dropped to a metric of the kind `seconds`.
    pub fn time(&self) -> Timer<'_> {
        Timer { metric: self, since: Instant::now() }
    }

    /// Subtracts `amount` from a gauge.
    pub fn sub(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Returns the current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds to a gauge unless the sum would be above `max`. Returns whether it added.
    pub fn add_below(&self, amount: u64, max: u64) -> bool {
        let added = |now: u64| now.checked_add(amount).filter(|&sum| sum <= max);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added).is_ok()
    }
}

/// A timer that adds its lifetime to a metric.
#[derive(Debug)]
#[must_use = "counts until it is dropped"]
pub struct Timer<'a> {
    metric: &'a Metric,
    since: Instant,
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        self.metric.add_time(self.since.elapsed());
    }
}

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Number that only grows while the process lives. Its name ends in `_total`.
    Counter,
    /// Number that grows and shrinks.
    Gauge,
}

/// A metric's name, meaning and value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Name with the unit, equal in every exporter.
    pub name: &'static str,
    /// Meaning, in one sentence.
    pub help: &'static str,
    /// Kind of the metric.
    pub kind: Kind,
    /// Value in the unit of the name: a count, bytes or seconds.
    pub value: f64,
    /// Number of the CUDA device that it is about. Exporters show it as the label `device`, such as
    /// `cuda:0`. `None`: it is about the process.
    pub device: Option<usize>,
}

impl Reading {
    /// Returns the reading of a number that only grows.
    pub const fn counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, kind: Kind::Counter, value: value as f64, device: None }
    }

    /// Returns the reading of a number that grows and shrinks.
    pub const fn gauge(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, kind: Kind::Gauge, value: value as f64, device: None }
    }

    /// Returns the reading of a time that only grows, counted in nanoseconds and shown in seconds.
    pub const fn seconds(name: &'static str, help: &'static str, nanos: u64) -> Self {
        Self { name, help, kind: Kind::Counter, value: nanos as f64 * 1e-9, device: None }
    }
}

/// Defines a role's `Metrics`: for each metric a field, its kind (`counter`, `gauge`, `seconds`),
/// its name and its meaning.
#[macro_export]
macro_rules! metrics {
    ($(#[$about:meta])* $($field:ident: $kind:ident $name:literal, $help:literal;)*) => {
        $(#[$about])*
        #[derive(Debug, Default)]
        pub struct Metrics {
            $(#[doc = $help] pub $field: $crate::metrics::Metric,)*
        }

        impl Metrics {
            /// Returns the readings of all metrics, in the order of their definition.
            pub fn readings(&self) -> Vec<$crate::metrics::Reading> {
                vec![$($crate::metrics::Reading::$kind($name, $help, self.$field.get()),)*]
            }
        }
    };
}

/// Writes readings in Prometheus' text format, version 0.0.4. Readings of one name follow each
/// other.
pub fn prometheus(readings: &[Reading]) -> String {
    let (mut text, mut last) = (String::new(), "");
    for Reading { name, help, kind, value, device } in readings {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        if last != *name {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        }
        last = name;
        let _ = match device {
            None => writeln!(text, "{name} {value}"),
            Some(device) => writeln!(text, "{name}{{device=\"cuda:{device}\"}} {value}"),
        };
    }
    text
}

/// Joins the readings of several devices, all of one role. Each reading gets its device, and
/// readings of one name follow each other. `None`: the readings are about the process.
pub fn by_device(of_devices: &[(Option<usize>, Vec<Reading>)]) -> Vec<Reading> {
    let count = of_devices.first().map_or(0, |(_, readings)| readings.len());
    let of_name = |index: usize| {
        let reading = move |(device, readings): &(Option<usize>, Vec<Reading>)| {
            readings.get(index).map(|reading| Reading { device: *device, ..*reading })
        };
        of_devices.iter().filter_map(reading)
    };
    (0..count).flat_map(of_name).collect()
}

type Source = dyn Fn() -> Vec<Reading> + Send + Sync;

/// The object through which a role shows its readings. It is cheap to clone. Its source changes
/// when a standby becomes the leader.
#[derive(Clone)]
pub struct Board(Arc<Mutex<Arc<Source>>>);

impl std::fmt::Debug for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Board")
    }
}

impl Default for Board {
    fn default() -> Self {
        Self::new(Vec::new)
    }
}

impl Board {
    /// Creates a board that shows the readings of `source`.
    pub fn new(source: impl Fn() -> Vec<Reading> + Send + Sync + 'static) -> Self {
        Self(Arc::new(Mutex::new(Arc::new(source))))
    }

    /// Shows the readings of another source from now on.
    pub fn show(&self, source: impl Fn() -> Vec<Reading> + Send + Sync + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(source);
    }

    /// Returns the current readings.
    pub fn read(&self) -> Vec<Reading> {
        let source = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        source()
    }
}

/// Checks a role's metric names for its tests: unique, with the prefix `ebb_ROLE_`, and with the
/// suffix `_total` exactly for counters. Also checks that each meaning ends with a full stop.
///
/// # Panics
/// If a name or meaning breaks a rule.
pub fn check_names(role: &str, readings: &[Reading]) {
    for (index, reading) in readings.iter().enumerate() {
        let name = reading.name;
        assert!(name.starts_with(&format!("ebb_{role}_")), "{name}");
        assert_eq!(name.ends_with("_total"), reading.kind == Kind::Counter, "{name}");
        assert!(reading.help.ends_with('.'), "{name}: {}", reading.help);
        assert!(readings[..index].iter().all(|other| other.name != name), "{name} twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_gauge_never_passes_its_bound() {
        let metric = Metric::default();
        assert!(metric.add_below(7, 10) && !metric.add_below(4, 10) && metric.add_below(3, 10));
        assert!(!metric.add_below(u64::MAX, u64::MAX));
        metric.sub(7);
        assert_eq!(metric.get(), 3);
    }

    #[test]
    fn prometheus_gets_help_type_and_value() {
        let readings = [
            Reading::counter("ebb_ps_push_total", "Pushes.", 3),
            Reading::seconds("ebb_ps_update_seconds_total", "Time.", 1_500_000_000),
            Reading::gauge("ebb_ps_partitions", "Partitions.", 0),
        ];
        let expected = "\
# HELP ebb_ps_push_total Pushes.
# TYPE ebb_ps_push_total counter
ebb_ps_push_total 3
# HELP ebb_ps_update_seconds_total Time.
# TYPE ebb_ps_update_seconds_total counter
ebb_ps_update_seconds_total 1.5
# HELP ebb_ps_partitions Partitions.
# TYPE ebb_ps_partitions gauge
ebb_ps_partitions 0
";
        assert_eq!(prometheus(&readings), expected);
    }

    #[test]
    fn prometheus_gets_the_device_as_a_label_and_help_and_type_of_a_name_once() {
        let of = |device| Reading { device: Some(device), ..Reading::gauge("ebb_device_lost", "Lost.", 1) };
        let expected = "\
# HELP ebb_device_lost Lost.
# TYPE ebb_device_lost gauge
ebb_device_lost{device=\"cuda:0\"} 1
ebb_device_lost{device=\"cuda:2\"} 1
";
        assert_eq!(prometheus(&[of(0), of(2)]), expected);
    }

    #[test]
    fn readings_of_devices_are_joined_name_by_name() {
        let readings =
            |value| vec![Reading::gauge("ebb_x_a", "A.", value), Reading::gauge("ebb_x_b", "B.", 7)];
        assert_eq!(by_device(&[(None, readings(1))]), readings(1));
        let of = |device, reading: Reading| Reading { device: Some(device), ..reading };
        let [a, b] = [readings(1), readings(2)];
        let expected = vec![of(0, a[0]), of(2, b[0]), of(0, a[1]), of(2, b[1])];
        assert_eq!(by_device(&[(Some(0), a), (Some(2), b)]), expected);
        assert_eq!(by_device(&[]), []);
    }

    #[test]
    fn a_board_shows_its_newest_source() {
        let board = Board::default();
        let clone = board.clone();
        assert!(board.read().is_empty());
        board.show(|| vec![Reading::gauge("ebb_x_y", "Y.", 2)]);
        assert_eq!(clone.read()[0].value, 2.0);
    }
}

//! The numbers of CUDA devices: what NVML says of them, in the form of all other numbers.

use kernels::telemetry::{Devices, Observer, Reading, Throttle};
use net::metrics::{self, Kind};

/// A number of a device.
struct Number {
    name: &'static str,
    help: &'static str,
    kind: Kind,
    /// `None`: the device does not tell.
    of: fn(&Reading) -> Option<f64>,
}

/// All numbers of a device.
const NUMBERS: [Number; 11] = [
    Number {
        name: "ebb_device_busy_ratio",
        help: "Share of the driver's last sampling period in which a kernel ran on the device, 0 to 1.",
        kind: Kind::Gauge,
        of: |reading| reading.busy_percent.map(|percent| f64::from(percent) / 100.0),
    },
    Number {
        name: "ebb_device_memory_used_bytes",
        help: "Memory of the device that is in use, by all processes.",
        kind: Kind::Gauge,
        of: |reading| reading.memory_used_bytes.map(|bytes| bytes as f64),
    },
    Number {
        name: "ebb_device_memory_total_bytes",
        help: "All memory of the device.",
        kind: Kind::Gauge,
        of: |reading| reading.memory_total_bytes.map(|bytes| bytes as f64),
    },
    Number {
        name: "ebb_device_power_watts",
        help: "Electric power of the device.",
        kind: Kind::Gauge,
        of: |reading| reading.power_milliwatts.map(|power| f64::from(power) / 1e3),
    },
    Number {
        name: "ebb_device_temperature_celsius",
        help: "Temperature of the device's chip.",
        kind: Kind::Gauge,
        of: |reading| reading.temperature_celsius.map(f64::from),
    },
    Number {
        name: "ebb_device_throttled_by_heat",
        help: "1 while heat keeps the clocks of the device down.",
        kind: Kind::Gauge,
        of: |reading| throttled(reading, |throttle| throttle.by_heat),
    },
    Number {
        name: "ebb_device_throttled_by_power",
        help: "1 while the limit of power keeps the clocks of the device down, as it often does at full load.",
        kind: Kind::Gauge,
        of: |reading| throttled(reading, |throttle| throttle.by_power),
    },
    Number {
        name: "ebb_device_throttled_by_hardware",
        help: "1 while the hardware has at least halved the clocks of the device: heat, power or a fault.",
        kind: Kind::Gauge,
        of: |reading| throttled(reading, |throttle| throttle.by_hardware),
    },
    Number {
        name: "ebb_device_ecc_corrected_total",
        help: "Errors of the device's memory that were corrected, since its driver was loaded.",
        kind: Kind::Counter,
        of: |reading| reading.ecc_corrected.map(|errors| errors as f64),
    },
    Number {
        name: "ebb_device_ecc_uncorrected_total",
        help: "Errors of the device's memory that lost values, since its driver was loaded.",
        kind: Kind::Counter,
        of: |reading| reading.ecc_uncorrected.map(|errors| errors as f64),
    },
    Number {
        name: "ebb_device_lost",
        help: "1 if the driver does not reach the device any more.",
        kind: Kind::Gauge,
        of: |reading| Some(f64::from(u8::from(reading.is_lost))),
    },
];

fn throttled(reading: &Reading, by: fn(&Throttle) -> bool) -> Option<f64> {
    reading.throttle.as_ref().map(|throttle| f64::from(u8::from(by(throttle))))
}

/// Returns the numbers of devices, each device with a label. All devices of one number follow each
/// other.
fn numbers(devices: &[(usize, Reading)]) -> Vec<metrics::Reading> {
    let of_device = |number: &Number, (device, reading): &(usize, Reading)| {
        let Number { name, help, kind, of } = *number;
        Some(metrics::Reading { name, help, kind, value: of(reading)?, device: Some(*device) })
    };
    NUMBERS
        .iter()
        .flat_map(|number| devices.iter().filter_map(move |device| of_device(number, device)))
        .collect()
}

/// Returns the current numbers of watched devices.
pub(crate) fn readings(devices: &Devices) -> Vec<metrics::Reading> {
    numbers(&devices.readings())
}

/// Watches CUDA devices by their numbers in this process, until the handle is dropped. It says once
/// why nothing is known of a device.
pub(crate) async fn watch(ordinals: Vec<usize>) -> Observer {
    // The first answer of a driver takes a while.
    let watching = tokio::task::spawn_blocking(move || Observer::start(&ordinals)).await.unwrap_or_default();
    if let Some(reason) = watching.missing() {
        tracing::debug!(reason, "no telemetry of a device");
    }
    watching
}

#[cfg(test)]
mod tests {
    use net::metrics::{check_names, prometheus};

    use super::*;

    /// A device that tells everything.
    fn full() -> Reading {
        Reading {
            busy_percent: Some(87),
            memory_used_bytes: Some(1 << 30),
            memory_total_bytes: Some(1 << 36),
            power_milliwatts: Some(250_500),
            temperature_celsius: Some(64),
            throttle: Some(Throttle { by_heat: true, ..Throttle::default() }),
            ecc_corrected: Some(7),
            ecc_uncorrected: Some(1),
            is_lost: false,
        }
    }

    #[test]
    fn names_are_unique_and_of_one_form() {
        let all = numbers(&[(0, full())]);
        assert_eq!(all.len(), NUMBERS.len());
        check_names("device", &all);
    }

    #[test]
    fn a_reading_becomes_numbers_in_the_units_of_their_names() {
        let all = numbers(&[(3, full())]);
        let value = |name: &str| all.iter().find(|number| number.name == name).map(|number| number.value);
        for (name, expected) in [
            ("ebb_device_busy_ratio", 0.87),
            ("ebb_device_memory_used_bytes", 1_073_741_824.0),
            ("ebb_device_power_watts", 250.5),
            ("ebb_device_temperature_celsius", 64.0),
            ("ebb_device_throttled_by_heat", 1.0),
            ("ebb_device_throttled_by_power", 0.0),
            ("ebb_device_ecc_uncorrected_total", 1.0),
            ("ebb_device_lost", 0.0),
        ] {
            assert_eq!(value(name), Some(expected), "{name}");
        }
        assert!(all.iter().all(|number| number.device == Some(3)));
    }

    #[test]
    fn what_a_device_does_not_tell_is_left_out_and_devices_of_a_number_follow_each_other() {
        let lost = Reading { is_lost: true, ..Reading::default() };
        let text = prometheus(&numbers(&[(0, full()), (1, lost)]));
        assert!(
            text.contains("ebb_device_lost{device=\"cuda:0\"} 0\nebb_device_lost{device=\"cuda:1\"} 1\n")
        );
        assert_eq!(text.matches("device=\"cuda:1\"").count(), 1, "{text}");
        assert_eq!(text.matches("# TYPE ebb_device_lost ").count(), 1, "{text}");
    }

    #[tokio::test]
    async fn a_process_on_the_cpu_has_no_numbers_of_devices() {
        let watching = watch(Vec::new()).await;
        assert!(readings(watching.devices()).is_empty());
    }
}

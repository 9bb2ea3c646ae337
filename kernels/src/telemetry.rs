//! What NVIDIA's management library (NVML) says of CUDA devices: how busy and warm they are, and
//! whether they fail.
//!
//! A thread of its own asks once a second. A device that fails can hold a call of its driver, and
//! neither a computation nor a runtime may wait for that.
//!
//! Always true here: without NVML nothing is known, and nothing fails.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Time between two samples.
const PERIOD: Duration = Duration::from_secs(1);

/// Longest wait for the first sample, and for the end of the thread.
const PATIENCE: Duration = Duration::from_secs(2);

/// State of a CUDA device at one time. What the device or its driver does not tell is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Share of the driver's last sampling period in which a kernel ran, in percent.
    pub busy_percent: Option<u32>,
    /// Memory that is in use, by all processes, in bytes.
    pub memory_used_bytes: Option<u64>,
    /// All memory, in bytes.
    pub memory_total_bytes: Option<u64>,
    /// Electric power, in milliwatts.
    pub power_milliwatts: Option<u32>,
    /// Temperature of the chip, in degrees Celsius.
    pub temperature_celsius: Option<u32>,
    /// What keeps the clocks below those that the work would get.
    pub throttle: Option<Throttle>,
    /// Errors of the memory that were corrected, since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Errors of the memory that were not corrected, since the driver was loaded. Values were lost.
    pub ecc_uncorrected: Option<u64>,
    /// Whether the driver does not reach the device any more.
    pub is_lost: bool,
}

/// What keeps the clocks of a device down. Idle devices and clocks that an operator has set do not
/// count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttle {
    /// The chip or its memory is too hot.
    pub by_heat: bool,
    /// The limit of power, or the brake of the power supply. A device at full load is often at its
    /// limit of power.
    pub by_power: bool,
    /// The hardware has at least halved the clocks, because of heat, power or a fault.
    pub by_hardware: bool,
}

impl Throttle {
    /// Reads the bits of `nvmlClocksEventReasons`.
    ///
    /// ```
    /// use kernels::telemetry::Throttle;
    ///
    /// // Idle, and clocks that an operator has set.
    /// assert_eq!(Throttle::of(0x3), Throttle::default());
    /// // Hardware slowdown, because of heat.
    /// let hot = Throttle::of(0x48);
    /// assert!(hot.by_heat && hot.by_hardware && !hot.by_power);
    /// ```
    #[must_use]
    pub const fn of(bits: u64) -> Self {
        const SOFTWARE_POWER_CAP: u64 = 0x4;
        const HARDWARE_SLOWDOWN: u64 = 0x8;
        const SOFTWARE_THERMAL: u64 = 0x20;
        const HARDWARE_THERMAL: u64 = 0x40;
        const HARDWARE_POWER_BRAKE: u64 = 0x80;
        Self {
            by_heat: bits & (SOFTWARE_THERMAL | HARDWARE_THERMAL) != 0,
            by_power: bits & (SOFTWARE_POWER_CAP | HARDWARE_POWER_BRAKE) != 0,
            by_hardware: bits & HARDWARE_SLOWDOWN != 0,
        }
    }
}

impl Reading {
    /// Returns whether heat or a fault slows the device down. The limit of power is no fault.
    #[must_use]
    pub fn is_throttled(&self) -> bool {
        self.throttle.is_some_and(|throttle| throttle.by_heat || throttle.by_hardware)
    }

    /// Returns whether the device has lost values or is gone.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.is_lost || self.ecc_uncorrected.is_some_and(|errors| errors > 0)
    }
}

/// The newest reading of a device. Clones show the same one.
#[derive(Clone, Debug, Default)]
pub struct LatestReading(Arc<Mutex<Option<Reading>>>);

impl LatestReading {
    /// Returns the newest reading. `None`: nothing is known of the device.
    #[must_use]
    pub fn get(&self) -> Option<Reading> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the reading.
    pub fn set(&self, reading: Reading) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(reading);
    }
}

/// Devices by their numbers, each with its newest reading.
#[derive(Clone, Debug, Default)]
pub struct Devices(Vec<(usize, LatestReading)>);

impl Devices {
    /// Returns the newest reading of each device of which something is known.
    #[must_use]
    pub fn readings(&self) -> Vec<(usize, Reading)> {
        self.0.iter().filter_map(|(ordinal, latest)| Some((*ordinal, latest.get()?))).collect()
    }

    /// Returns the newest reading of a device, now and later.
    #[must_use]
    pub fn latest(&self, ordinal: usize) -> LatestReading {
        let found = self.0.iter().find(|(of, _)| *of == ordinal);
        found.map(|(_, latest)| latest.clone()).unwrap_or_default()
    }
}

/// A thread that asks for the state of devices, until it is dropped.
#[derive(Debug, Default)]
pub struct Observer {
    devices: Devices,
    missing: Option<String>,
    /// Its drop wakes the thread, which then ends.
    stop: Option<Sender<()>>,
    /// What the thread says after its first sample. The channel closes when the thread ends.
    told: Option<Receiver<Option<String>>>,
}

impl Observer {
    /// Watches CUDA devices by their numbers in this process. Returns when each was asked once.
    #[must_use]
    pub fn start(ordinals: &[usize]) -> Self {
        if ordinals.is_empty() {
            return Self::default();
        }
        let devices = Devices(ordinals.iter().map(|&ordinal| (ordinal, LatestReading::default())).collect());
        let (stop, stopped) = channel();
        let (tell, told) = channel();
        let watched = devices.clone();
        let thread = thread::Builder::new().name("device-watch".to_owned());
        let started = thread.spawn(move || {
            let tell = |missing| {
                // Nobody listens if the process ends.
                let _ = tell.send(missing);
            };
            watch(&watched.0, tell, || stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout));
        });
        let missing = match started {
            Err(error) => Some(format!("no thread to watch devices: {error}")),
            Ok(_) => match told.recv_timeout(PATIENCE) {
                Ok(missing) => missing,
                Err(_) => Some(format!("NVML has not answered within {PATIENCE:?}")),
            },
        };
        Self { devices, missing, stop: Some(stop), told: Some(told) }
    }

    /// Returns the devices, whose readings go on changing.
    #[must_use]
    pub const fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Returns why nothing is known of a device, in one sentence. `None`: all have answered.
    #[must_use]
    pub fn missing(&self) -> Option<&str> {
        self.missing.as_deref()
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        drop(self.stop.take());
        let Some(told) = self.told.take() else { return };
        // A call that a device holds must not keep the process from leaving.
        while told.recv_timeout(PATIENCE).is_ok() {}
    }
}

/// Asks until `stops`, and says after the first sample what is missing.
#[cfg(feature = "cuda")]
fn watch(devices: &[(usize, LatestReading)], tell: impl Fn(Option<String>), stops: impl Fn() -> bool) {
    crate::cuda::nvml::watch(devices, tell, stops);
}

/// Says that this program was built without CUDA.
#[cfg(not(feature = "cuda"))]
fn watch(_: &[(usize, LatestReading)], tell: impl Fn(Option<String>), _: impl Fn() -> bool) {
    tell(Some(crate::Error::NotBuilt.to_string()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_and_hardware_are_throttling_and_the_limit_of_power_is_not() {
        let with = |bits| Reading { throttle: Some(Throttle::of(bits)), ..Reading::default() };
        for bits in [0x8, 0x20, 0x40, 0x48, 0x60] {
            assert!(with(bits).is_throttled(), "{bits:#x}");
        }
        for bits in [0, 0x1, 0x2, 0x4, 0x10, 0x80, 0x100] {
            assert!(!with(bits).is_throttled(), "{bits:#x}");
        }
        assert!(Throttle::of(0x4).by_power && Throttle::of(0x80).by_power);
        assert!(!Reading::default().is_throttled());
    }

    #[test]
    fn lost_values_and_a_lost_device_are_failures_and_corrected_errors_are_not() {
        let good = Reading { ecc_corrected: Some(9), ecc_uncorrected: Some(0), ..Reading::default() };
        assert!(!good.is_failing() && !Reading::default().is_failing());
        assert!(Reading { ecc_uncorrected: Some(1), ..good }.is_failing());
        assert!(Reading { is_lost: true, ..good }.is_failing());
    }

    #[test]
    fn a_process_without_devices_watches_nothing() {
        let watching = Observer::start(&[]);
        assert_eq!((watching.missing(), watching.devices().readings()), (None, Vec::new()));
        assert_eq!(watching.devices().latest(3).get(), None);
    }
}

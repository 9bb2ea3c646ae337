//! The CUDA devices on which a worker can compute, and what is missing where there is none.
//!
//! The driver is asked first, then the compute engine. So the first thing that is missing is named:
//! driver, device, a newer driver, the CUDA half of libtorch, or in a program without libtorch
//! NVRTC. Nothing here opens a device.

use std::fmt;
use std::sync::Arc;

use kernels::Error as Kernels;
use kernels::device::Listed;
use kernels::telemetry::Reading;
use model::device::{Choice, Device, Found};
use model::engines;
use proto::{pb, size};

use crate::error::Result;
use crate::waits::Shares;

/// The driver is there and shows no device.
const NO_DEVICE: &str =
    "no CUDA device: the driver shows none (CUDA_VISIBLE_DEVICES may hide them); compute on the CPU";

/// The driver shows devices, and the engine none.
const NO_DEVICE_OF_ENGINE: &str =
    "no CUDA device: libtorch finds none (the driver may be too old for it); compute on the CPU";

/// Why `auto` leaves devices alone that a user may name.
const NOT_FAST: &str = "this program has no libtorch, and the kernels of its own engine are made for equal bits and \
                        not for speed (`--device all` uses them)";

/// Devices for the workers of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The devices, at least one.
    pub devices: Vec<Device>,
    /// Why `auto` chose the CPU, in one line for people. `None`: the user chose it, or it is not
    /// chosen.
    pub fallback: Option<String>,
}

/// Returns the devices to compute on. It may take a second, because it loads the engine.
///
/// # Errors
/// A CUDA device is asked for and not there.
pub fn chosen(choice: &Choice) -> Result<Chosen> {
    let found = if choice.asks() { found() } else { Found::default() };
    of(choice, found, engines::IS_FAST_ON_CUDA)
}

/// Returns the devices to compute on, of those that the process has found. `auto` takes a CUDA
/// device only if the engine is fast there.
fn of(choice: &Choice, found: Found, is_fast: bool) -> Result<Chosen> {
    let is_auto = *choice == Choice::Auto;
    let left = is_auto && !is_fast && !found.memory_bytes.is_empty();
    let found = if left { Found::nothing(NOT_FAST.to_owned()) } else { found };
    let devices = choice.devices(&found)?;
    let falls_back = is_auto && devices == [Device::Cpu];
    Ok(Chosen { devices, fallback: falls_back.then(|| reason(&found.missing)) })
}

/// Returns what is missing without the advice behind it.
fn reason(missing: &str) -> String {
    missing.split(';').next().unwrap_or_default().to_owned()
}

/// Returns the devices for processes of scripts. These bring an engine of their own, so only the
/// driver is asked. Empty: the user chose `auto`, and there is no CUDA device.
///
/// # Errors
/// A CUDA device is asked for and not there.
pub fn for_scripts(choice: &Choice) -> Result<Vec<Device>> {
    let devices = of_driver(choice)?;
    let is_fallback = *choice == Choice::Auto && devices == [Device::Cpu];
    Ok(if is_fallback { Vec::new() } else { devices })
}

/// Returns the devices that the user asked for, of those that the driver alone shows.
///
/// # Errors
/// A CUDA device is asked for and not there.
pub fn of_driver(choice: &Choice) -> Result<Vec<Device>> {
    let found = if choice.asks() { shown(kernels::device::listed()) } else { Found::default() };
    Ok(choice.devices(&found)?)
}

/// Returns the devices of a worker whose processes of scripts have the devices `of_scripts`. The
/// engine of this program may lack what the user named, and that of a script have it. The worker
/// then computes on the CPU.
///
/// # Errors
/// A CUDA device is asked for and not there, and no process of a script has one.
pub fn beside(chosen: Result<Chosen>, of_scripts: &[Device]) -> Result<Chosen> {
    match chosen {
        Err(error) if !of_scripts.is_empty() => {
            Ok(Chosen { devices: vec![Device::Cpu], fallback: Some(reason(&error.to_string())) })
        }
        chosen => chosen,
    }
}

/// Returns what the driver alone shows.
fn shown(driver: Result<Vec<Listed>, Kernels>) -> Found {
    match driver {
        Ok(listed) if listed.is_empty() => Found::nothing(NO_DEVICE.to_owned()),
        Ok(listed) => {
            let (memory_bytes, uuids) =
                listed.into_iter().map(|device| (device.memory_bytes, device.uuid)).unzip();
            Found { memory_bytes, uuids, missing: String::new() }
        }
        Err(error) => Found::nothing(error.to_string()),
    }
}

/// Returns the CUDA devices on which this process can compute.
pub fn found() -> Found {
    let engine = || engines::cuda_devices().map_err(|error| error.to_string());
    join(kernels::device::listed(), engine)
}

/// Joins what the driver shows with the number of devices on which the engine computes. The engine
/// is not asked without a device.
fn join(driver: Result<Vec<Listed>, Kernels>, engine: impl FnOnce() -> Result<usize, String>) -> Found {
    let mut found = match driver {
        // Then only the engine knows the devices.
        Err(Kernels::NotBuilt) => Found::default(),
        driver => match shown(driver) {
            found if found.memory_bytes.is_empty() => return found,
            found => found,
        },
    };
    match engine() {
        Err(reason) => Found::nothing(reason),
        Ok(0) => Found::nothing(NO_DEVICE_OF_ENGINE.to_owned()),
        Ok(count) => {
            found.memory_bytes.resize(count, 0);
            found.uuids.resize(count, String::new());
            found
        }
    }
}

/// Checks that a device is there. Returns its memory in bytes; 0 if it is not known.
///
/// # Errors
/// A CUDA device is not there.
pub(crate) fn check(device: Device) -> Result<u64> {
    if device == Device::Cpu {
        return Ok(0);
    }
    let found = found();
    Choice::Only(vec![device]).devices(&found)?;
    Ok(found.memory_of(device))
}

/// Returns a device with its memory for people, such as `cuda:1 with 79.6 GiB`.
pub(crate) fn told(device: &dyn fmt::Display, memory_bytes: u64) -> Arc<str> {
    match memory_bytes {
        0 => device.to_string().into(),
        bytes => format!("{device} with {}", size::text(bytes)).into(),
    }
}

/// Returns what heartbeats say of a device: what its driver tells, and what the worker waits for.
pub(crate) fn said(reading: Option<&Reading>, waits: Option<Shares>) -> pb::DeviceReading {
    pb::DeviceReading {
        busy_percent: reading.and_then(|reading| reading.busy_percent),
        memory_used_bytes: reading.and_then(|reading| reading.memory_used_bytes).unwrap_or(0),
        throttled: reading.is_some_and(Reading::is_throttled),
        failing: reading.is_some_and(Reading::is_failing),
        waits_data_percent: waits.map(|waits| waits.data),
        waits_weights_percent: waits.map(|waits| waits.weights),
        waits_push_percent: waits.map(|waits| waits.push),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists devices with so many bytes. The UUID of each is its place.
    fn listed(memory: &[u64]) -> Vec<Listed> {
        let device = |(place, memory_bytes): (usize, &u64)| Listed {
            memory_bytes: *memory_bytes,
            uuid: place.to_string(),
            ..Listed::default()
        };
        memory.iter().enumerate().map(device).collect()
    }

    fn never() -> Result<usize, String> {
        panic!("the engine is asked although there is no device")
    }

    #[test]
    fn the_first_thing_that_is_missing_is_named() {
        let old = Kernels::DriverTooOld { version: 11_040, reason: "expected 12.0".to_owned() };
        for (driver, said) in [
            (Err(Kernels::NoDriver), "no CUDA driver: "),
            (Err(old), "the CUDA driver is too old: it supports CUDA 11.4"),
            (Ok(Vec::new()), "no CUDA device: the driver shows none"),
        ] {
            let found = join(driver, never);
            assert!(found.memory_bytes.is_empty() && found.missing.starts_with(said), "{found:?}");
        }
        let found = join(Ok(listed(&[7])), || Err("no CUDA in libtorch".to_owned()));
        assert_eq!(found, Found::nothing("no CUDA in libtorch".to_owned()));
        assert!(join(Ok(listed(&[7])), || Ok(0)).missing.starts_with("no CUDA device: libtorch"));
    }

    #[test]
    fn devices_are_those_on_which_the_engine_computes_with_what_the_driver_knows() {
        let known = |driver, count| {
            let found = join(driver, || Ok(count));
            (found.memory_bytes, found.uuids)
        };
        let told = |memory: &[u64], uuids: &[&str]| {
            (memory.to_vec(), uuids.iter().map(|uuid| (*uuid).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(known(Ok(listed(&[7, 8])), 2), told(&[7, 8], &["0", "1"]));
        assert_eq!(known(Ok(listed(&[7, 8])), 1), told(&[7], &["0"]));
        assert_eq!(known(Err(Kernels::NotBuilt), 2), told(&[0, 0], &["", ""]), "only their number is known");
    }

    #[test]
    fn auto_takes_a_device_only_where_the_engine_is_fast_and_a_name_takes_it_anyway() {
        let found = || shown(Ok(listed(&[7, 8])));
        let chosen = |text: &str, is_fast| of(&text.parse().unwrap(), found(), is_fast).unwrap();
        let both = vec![Device::Cuda(0), Device::Cuda(1)];
        assert_eq!(chosen("auto", true), Chosen { devices: both.clone(), fallback: None });
        let left = chosen("auto", false);
        assert_eq!(left.devices, [Device::Cpu]);
        assert!(left.fallback.unwrap().starts_with("this program has no libtorch, and the kernels"));
        assert_eq!(chosen("all", false), Chosen { devices: both, fallback: None });
        assert_eq!(chosen("cuda:1", false), Chosen { devices: vec![Device::Cuda(1)], fallback: None });
        let missing = of(&Choice::Auto, Found::nothing("no CUDA driver; install one".to_owned()), false);
        assert_eq!(missing.unwrap().fallback.unwrap(), "no CUDA driver");
    }

    #[test]
    fn a_heartbeat_says_whether_the_device_waits_is_slowed_down_or_fails() {
        assert_eq!(said(Some(&Reading::default()), None), pb::DeviceReading::default());
        assert_eq!(said(None, None), pb::DeviceReading::default());
        let throttle = Some(kernels::telemetry::Throttle { by_heat: true, ..Default::default() });
        let hot =
            Reading { busy_percent: Some(0), throttle, memory_used_bytes: Some(7), ..Reading::default() };
        let expected = pb::DeviceReading {
            busy_percent: Some(0),
            memory_used_bytes: 7,
            throttled: true,
            ..Default::default()
        };
        assert_eq!(said(Some(&hot), None), expected);
        assert!(said(Some(&Reading { is_lost: true, ..hot }), None).failing);
        let waits = said(None, Some(Shares { data: 1, weights: 20, push: 3 }));
        let told = [waits.waits_data_percent, waits.waits_weights_percent, waits.waits_push_percent];
        assert_eq!((told, waits.busy_percent), ([1, 20, 3].map(Some), None));
    }

    #[test]
    fn processes_of_scripts_need_a_driver_and_no_engine() {
        assert_eq!(shown(Ok(listed(&[7, 8]))).memory_bytes, [7, 8]);
        assert_eq!(shown(Ok(Vec::new())), Found::nothing(NO_DEVICE.to_owned()));
        assert!(shown(Err(Kernels::NoDriver)).missing.starts_with("no CUDA driver: "));
        assert_eq!(for_scripts(&"cpu".parse().unwrap()).unwrap(), [Device::Cpu]);
    }

    #[test]
    fn a_worker_beside_scripts_computes_on_the_cpu_where_its_engine_lacks_their_devices() {
        let lacks = || {
            let devices = Choice::All.devices(&Found::nothing("no CUDA in libtorch; do this".to_owned()));
            devices.map(|devices| Chosen { devices, fallback: None }).map_err(Into::into)
        };
        let found = beside(lacks(), &[Device::Cuda(0)]).unwrap();
        assert_eq!(found.devices, [Device::Cpu]);
        assert!(found.fallback.unwrap().ends_with("no CUDA in libtorch"));
        assert!(beside(lacks(), &[]).unwrap_err().to_string().contains("no CUDA in libtorch; do this"));
        let has = Chosen { devices: vec![Device::Cuda(0)], fallback: None };
        assert_eq!(beside(Ok(has.clone()), &[Device::Cuda(0)]).unwrap(), has);
    }

    #[test]
    fn the_cpu_needs_no_driver_and_nothing_is_said_of_it() {
        let chosen = chosen(&"cpu".parse().unwrap()).unwrap();
        assert_eq!(chosen, Chosen { devices: vec![Device::Cpu], fallback: None });
        assert_eq!(check(Device::Cpu).unwrap(), 0);
        assert_eq!(&*told(&Device::Cpu, 0), "cpu");
        assert_eq!(&*told(&Device::Cuda(1), 85_520_809_984), "cuda:1 with 79.6 GiB");
    }
}

//! Asks NVIDIA's management library about devices.
//!
//! CUDA and NVML number devices in different orders, and CUDA_VISIBLE_DEVICES changes the numbers
//! of CUDA alone. So a device is looked for by its UUID.

use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::cuda;
use crate::telemetry::{LatestReading, Reading, Throttle};

/// Asks until `stops`, and says after the first sample what is missing.
pub(crate) fn watch(
    devices: &[(usize, LatestReading)],
    tell: impl Fn(Option<String>),
    stops: impl Fn() -> bool,
) {
    let nvml = match Nvml::init() {
        Ok(nvml) => nvml,
        Err(error) => return tell(Some(format!("no NVML: {error}"))),
    };
    let listed = match cuda::Device::list() {
        Ok(listed) => listed,
        Err(error) => return tell(Some(error.to_string())),
    };
    let (mut found, mut missing) = (Vec::new(), None);
    for (ordinal, latest) in devices {
        let device = listed.get(*ordinal).map(|device| find(&nvml, &device.uuid));
        match device {
            Some(Ok(device)) => found.push((device, latest)),
            Some(Err(error)) => missing = Some(format!("NVML does not know cuda:{ordinal}: {error}")),
            None => missing = Some(format!("the driver shows no cuda:{ordinal}")),
        }
    }
    let sample = || found.iter().for_each(|(device, latest)| latest.set(read(device)));
    sample();
    tell(missing);
    while !found.is_empty() && !stops() {
        sample();
    }
}

/// Finds a device, or an instance of one (MIG).
fn find<'nvml>(nvml: &'nvml Nvml, uuid: &str) -> Result<Device<'nvml>, NvmlError> {
    let whole = nvml.device_by_uuid(format!("GPU-{uuid}"));
    whole.or_else(|error| nvml.device_by_uuid(format!("MIG-{uuid}")).map_err(|_| error))
}

/// Asks a device for everything. Most devices do not tell all of it.
fn read(device: &Device<'_>) -> Reading {
    let mut is_lost = false;
    let busy = known(device.utilization_rates(), &mut is_lost);
    let memory = known(device.memory_info(), &mut is_lost);
    let reasons = known(device.current_throttle_reasons(), &mut is_lost);
    let mut errors = |kind| known(device.total_ecc_errors(kind, EccCounter::Volatile), &mut is_lost);
    let (ecc_corrected, ecc_uncorrected) = (errors(MemoryError::Corrected), errors(MemoryError::Uncorrected));
    Reading {
        busy_percent: busy.map(|busy| busy.gpu),
        memory_used_bytes: memory.as_ref().map(|memory| memory.used),
        memory_total_bytes: memory.as_ref().map(|memory| memory.total),
        power_milliwatts: known(device.power_usage(), &mut is_lost),
        temperature_celsius: known(device.temperature(TemperatureSensor::Gpu), &mut is_lost),
        throttle: reasons.map(|reasons| Throttle::of(reasons.bits())),
        ecc_corrected,
        ecc_uncorrected,
        is_lost,
    }
}

/// Returns what a device tells. `is_lost` is set if the driver does not reach it.
fn known<T>(told: Result<T, NvmlError>, is_lost: &mut bool) -> Option<T> {
    *is_lost |= matches!(told, Err(NvmlError::GpuLost));
    told.ok()
}

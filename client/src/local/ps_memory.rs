//! Where the ps of this process keep the model: on the host, or on a CUDA device that they share
//! with each other and with workers.

use kernels::device::Devices;
use model::Device;

use super::local;
use crate::Result;

/// Memory of the ps of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PsMemory {
    /// Device of all ps. Default: the host.
    pub device: Device,
    /// Bytes of a CUDA device that each ps may take. Default: an equal share of what is free when
    /// the cluster starts, and of half of it if a worker computes on the device.
    pub bytes_max: Option<u64>,
}

impl PsMemory {
    /// Opens the device. Returns it with the bytes that each of `count` ps may take. `None`: there
    /// is no limit but what the device has.
    ///
    /// # Errors
    /// The device cannot be opened, or does not say what is free.
    pub fn open(
        &self,
        devices: &Devices,
        workers: &[Device],
        count: u32,
    ) -> Result<(kernels::Device, Option<u64>)> {
        let Device::Cuda(ordinal) = self.device else { return Ok((kernels::Device::default(), None)) };
        let failed = || format!("--ps-device {}", self.device);
        let device = devices.cuda(ordinal).map_err(local(&failed()))?;
        let free = device.memory().map_err(local(&failed()))?.map_or(0, |(free, _)| free);
        let share = share(free, workers.contains(&self.device), count);
        Ok((device, Some(self.bytes_max.unwrap_or(share))))
    }
}

/// Returns what each ps may take of `free` bytes. One part in 16 is left to operations.
fn share(free: u64, has_worker: bool, count: u32) -> u64 {
    let of_ps = if has_worker { free / 2 } else { free - free / 16 };
    of_ps / u64::from(count.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ps_share_what_workers_leave_them() {
        assert_eq!(share(1600, false, 1), 1500);
        assert_eq!(share(1600, false, 3), 500);
        assert_eq!(share(1600, true, 2), 400);
    }

    #[test]
    fn on_the_host_nothing_is_opened_and_nothing_limited() {
        let memory = PsMemory { bytes_max: Some(1), ..PsMemory::default() };
        let (device, bytes_max) = memory.open(&Devices::default(), &[], 1).unwrap();
        assert!(device.is_host() && bytes_max.is_none());
    }
}

//! The devices of workers: what a worker says of its device, and what users are told of the workers
//! of a job. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use proto::numerics::Numerics;
use proto::spec::{DeviceKind, FleetSpec};
use proto::status::{Failure, Kind};
use proto::{pb, size};

use crate::membership::Process;

/// Longest name of a device, in bytes.
const NAME_BYTES_MAX: usize = 32;

/// Kinds of device in the reason why a job waits.
const DEVICES_TOLD: usize = 4;

/// Groups of workers in the status of a job; the largest ones are shown.
const GROUPS: usize = 64;

/// Names of workers in a group.
const NAMED: usize = 8;

/// The device of a worker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WorkerDevice {
    /// `cpu` or `cuda:N`, with the number on the worker's host.
    name: Arc<str>,
    /// Memory of a CUDA device in bytes. 0: not known.
    memory_bytes: u64,
}

impl Default for WorkerDevice {
    fn default() -> Self {
        Self { name: Arc::from("cpu"), memory_bytes: 0 }
    }
}

impl WorkerDevice {
    /// Returns the device that a worker names when it registers. A worker that names none computes
    /// on the CPU.
    ///
    /// # Errors
    /// The name is no name of a device.
    pub(crate) fn told(name: &str, memory_bytes: u64) -> Result<Self, Failure> {
        if name.is_empty() || name == "cpu" {
            return Ok(Self::default());
        }
        if name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            let message = format!(
                "RegisterRequest.device: expected cpu or cuda:N, at most {NAME_BYTES_MAX} bytes, found `{}`",
                name.escape_debug()
            );
            return Err(Failure::new(Kind::Malformed, message));
        }
        Ok(Self { name: Arc::from(name), memory_bytes })
    }

    /// Returns whether it is a CUDA device.
    pub(crate) fn is_cuda(&self) -> bool {
        self.name.starts_with("cuda")
    }
}

/// Writes the device with its memory, as in `cuda:1 with 79.6 GiB`.
impl fmt::Display for WorkerDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.memory_bytes {
            0 => f.write_str(&self.name),
            bytes => write!(f, "{} with {}", self.name, size::text(bytes)),
        }
    }
}

/// The device that a job wants its workers to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WantedDevice {
    /// `None`: any device.
    pub(crate) kind: Option<DeviceKind>,
    /// Least memory of a CUDA device in bytes. 0: any.
    pub(crate) memory_bytes: u64,
}

impl WantedDevice {
    /// Returns what a job asks for.
    pub(crate) fn of(fleet: &FleetSpec) -> Self {
        Self { kind: fleet.device, memory_bytes: fleet.device_memory.unwrap_or(0) }
    }

    /// Returns whether a worker on this device may take part. A device of unknown memory has too
    /// little.
    pub(crate) fn takes(self, device: &WorkerDevice) -> bool {
        let is_of_kind = self.kind.is_none_or(|kind| (kind == DeviceKind::Cuda) == device.is_cuda());
        is_of_kind && device.memory_bytes >= self.memory_bytes
    }
}

/// Writes which workers the job takes: `on a CUDA device with at least 16.0 GiB`.
impl fmt::Display for WantedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            None => "on any device",
            Some(DeviceKind::Cpu) => "on the CPU",
            Some(DeviceKind::Cuda) => "on a CUDA device",
        })?;
        match self.memory_bytes {
            0 => Ok(()),
            bytes => write!(f, " with at least {}", size::text(bytes)),
        }
    }
}

/// Returns the devices of workers with their numbers, the most frequent first, at most
/// [`DEVICES_TOLD`]: `2 on cpu, 1 on cuda:0 with 8.0 GiB`.
pub(crate) fn counted<'a>(devices: impl Iterator<Item = &'a WorkerDevice>) -> String {
    let mut counts: BTreeMap<&WorkerDevice, u32> = BTreeMap::new();
    devices.for_each(|device| *counts.entry(device).or_default() += 1);
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| Reverse(*count));
    let more = counts.split_off(DEVICES_TOLD.min(counts.len()));
    let mut told: Vec<_> = counts.iter().map(|(device, count)| format!("{count} on {device}")).collect();
    if !more.is_empty() {
        told.push(format!("{} on others", more.iter().map(|(_, count)| count).sum::<u32>()));
    }
    told.join(", ")
}

/// The mean of shares of time in percent.
#[derive(Default)]
struct Mean {
    sum: u64,
    count: u64,
}

impl Mean {
    /// Adds a share that is known.
    fn add(&mut self, percent: Option<u32>) {
        if let Some(percent) = percent {
            self.sum += u64::from(percent.min(100));
            self.count += 1;
        }
    }

    /// Returns the mean. `None`: no share is known.
    fn get(&self) -> Option<u32> {
        self.sum.checked_div(self.count).map(|mean| mean as u32)
    }
}

/// Workers with equal devices, how busy the devices are, and what they wait for.
struct Group {
    told: pb::WorkersOnDevice,
    busy: Mean,
    data: Mean,
    weights: Mean,
    push: Mean,
}

impl Group {
    fn add(&mut self, reading: &pb::DeviceReading) {
        let told = &mut self.told;
        self.busy.add(reading.busy_percent);
        self.data.add(reading.waits_data_percent);
        self.weights.add(reading.waits_weights_percent);
        self.push.add(reading.waits_push_percent);
        told.memory_used_bytes = told.memory_used_bytes.max(reading.memory_used_bytes);
        told.throttled += u32::from(reading.throttled);
        told.failing += u32::from(reading.failing);
    }

    fn told(self) -> pb::WorkersOnDevice {
        pb::WorkersOnDevice {
            busy_percent: self.busy.get(),
            waits_data_percent: self.data.get(),
            waits_weights_percent: self.weights.get(),
            waits_push_percent: self.push.get(),
            ..self.told
        }
    }
}

/// Returns workers grouped by device, memory and numerics class, the largest groups first. Each
/// worker comes with what it said last of its device.
pub(crate) fn groups<'a>(
    workers: impl Iterator<Item = (&'a Process, Option<pb::DeviceReading>)>,
) -> Vec<pb::WorkersOnDevice> {
    let mut groups: BTreeMap<(&WorkerDevice, &str), Group> = BTreeMap::new();
    for (Process { name, device, numerics, .. }, reading) in workers {
        let new = || Group {
            told: pb::WorkersOnDevice {
                device: device.name.to_string(),
                memory_bytes: device.memory_bytes,
                numerics: Some(Numerics::clone(numerics).into()),
                ..Default::default()
            },
            busy: Mean::default(),
            data: Mean::default(),
            weights: Mean::default(),
            push: Mean::default(),
        };
        let group = groups.entry((device, numerics.class.as_str())).or_insert_with(new);
        group.told.count += 1;
        if group.told.workers.len() < NAMED {
            group.told.workers.push(name.clone());
        }
        if let Some(reading) = reading {
            group.add(&reading);
        }
    }
    let mut groups: Vec<_> = groups.into_values().map(Group::told).collect();
    groups.sort_by_key(|group| Reverse(group.count));
    groups.truncate(GROUPS);
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::MemberRole;

    fn on(name: &str, device: &str, memory_bytes: u64) -> Process {
        let device = WorkerDevice::told(device, memory_bytes).expect("a device");
        Process { device, ..Process::new(MemberRole::Worker, name, "") }
    }

    #[test]
    fn a_worker_without_a_word_computes_on_the_cpu_and_long_names_are_refused() {
        assert_eq!(WorkerDevice::told("", 7).expect("the CPU"), WorkerDevice::default());
        let device = WorkerDevice::told("cuda:1", 85_520_809_984).expect("a device");
        assert!(device.is_cuda() && !WorkerDevice::default().is_cuda());
        assert_eq!(device.to_string(), "cuda:1 with 79.6 GiB");
        assert_eq!(WorkerDevice::told("cuda:1", 0).expect("a device").to_string(), "cuda:1");
        for wrong in ["cuda:1\n", &"x".repeat(33)] {
            assert_eq!(WorkerDevice::told(wrong, 0).unwrap_err().kind, Kind::Malformed);
        }
    }

    #[test]
    fn workers_are_grouped_by_device_memory_and_class_the_largest_group_first() {
        let gib = 1 << 30;
        let workers =
            [on("a", "cuda:0", gib), on("b", "cuda:0", 2 * gib), on("c", "cpu", 0), on("d", "cpu", 0)];
        let groups = groups(workers.iter().map(|worker| (worker, None)));
        let told: Vec<_> =
            groups.iter().map(|group| (group.device.as_str(), group.memory_bytes, group.count)).collect();
        assert_eq!(told, [("cpu", 0, 2), ("cuda:0", gib, 1), ("cuda:0", 2 * gib, 1)]);
        assert_eq!(groups[0].workers, ["c", "d"]);
        assert_eq!(groups[0].numerics.as_ref().map(|of| of.class.as_str()), Some("unknown"));
    }

    #[test]
    fn a_group_tells_the_mean_of_its_devices_and_how_many_are_slow_or_fail() {
        let workers = [on("a", "cuda:0", 8), on("b", "cuda:0", 8), on("c", "cuda:0", 8), on("d", "cpu", 0)];
        let said = |busy_percent: Option<u32>, memory_used_bytes, throttled, failing| {
            let of_waits = pb::DeviceReading {
                waits_data_percent: busy_percent.map(|percent| percent / 9),
                waits_weights_percent: Some(40),
                ..Default::default()
            };
            Some(pb::DeviceReading { busy_percent, memory_used_bytes, throttled, failing, ..of_waits })
        };
        let readings = [
            said(Some(90), 5, true, false),
            said(Some(45), 7, false, true),
            said(None, 0, true, false),
            None,
        ];
        let groups = groups(workers.iter().zip(readings));
        let [cuda, cpu] = &groups[..] else { panic!("{groups:?}") };
        let told = (cuda.busy_percent, cuda.memory_used_bytes, cuda.throttled, cuda.failing);
        assert_eq!(told, (Some(67), 7, 2, 1));
        let waits = |of: &pb::WorkersOnDevice| {
            [of.waits_data_percent, of.waits_weights_percent, of.waits_push_percent]
        };
        assert_eq!((waits(cuda), waits(cpu)), ([Some(7), Some(40), None], [None; 3]));
        assert_eq!((cpu.busy_percent, cpu.memory_used_bytes, cpu.throttled, cpu.failing), (None, 0, 0, 0));
    }

    #[test]
    fn a_job_takes_workers_on_devices_of_its_kind_with_enough_memory() {
        let [cpu, unknown, small, large] = [("cpu", 0), ("cuda:0", 0), ("cuda:0", 8), ("cuda:1", 16)]
            .map(|(name, memory)| WorkerDevice::told(name, memory).expect("a device"));
        let all = [&cpu, &unknown, &small, &large];
        let takes = |kind, memory_bytes| {
            let wanted = WantedDevice { kind, memory_bytes };
            all.map(|device| wanted.takes(device))
        };
        assert_eq!(takes(None, 0), [true; 4]);
        assert_eq!(takes(Some(DeviceKind::Cpu), 0), [true, false, false, false]);
        assert_eq!(takes(Some(DeviceKind::Cuda), 0), [false, true, true, true]);
        assert_eq!(takes(Some(DeviceKind::Cuda), 16), [false, false, false, true]);
    }

    #[test]
    fn devices_are_counted_for_people() {
        let devices: Vec<_> = ["cpu", "cuda:0", "cpu", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]
            .map(|name| WorkerDevice::told(name, 0).expect("a device"))
            .into();
        let told = counted(devices.iter());
        assert_eq!(told, "2 on cpu, 1 on cuda:0, 1 on cuda:1, 1 on cuda:2, 2 on others");
        assert_eq!(counted([].iter()), "");
    }

    #[test]
    fn a_large_group_names_its_first_workers_and_counts_all() {
        let workers: Vec<_> = (0..20).map(|index| on(&format!("w{index}"), "cuda:0", 1)).collect();
        let groups = groups(workers.iter().map(|worker| (worker, None)));
        assert_eq!((groups.len(), groups[0].count, groups[0].workers.len()), (1, 20, NAMED));
        assert_eq!(groups[0].workers[0], "w0");
    }
}

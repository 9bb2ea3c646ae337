//! The processors near a device, on which its process runs. Pure, except for what reads the system.
//!
//! A host with several sockets has some of its devices at each. A process that runs at the other
//! socket gives its device everything over the link between them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use model::device::Device;
#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The folder of the system with its hardware.
const SYS: &str = "/sys";

/// One more than the largest number of a processor that the kernel takes in one call.
const MAX: usize = 1024;

/// Numbers of processors.
pub(crate) type Processors = BTreeSet<usize>;

/// Returns the processors near each of these devices, where its processes stay. A device is missing
/// if they may run anywhere.
///
/// Processes stay near their device only if there are several devices, and nobody has limited this
/// process to some processors: whoever did wants something else.
pub(crate) fn near(devices: &[Device]) -> BTreeMap<Device, Processors> {
    let cuda: BTreeSet<_> = devices.iter().copied().filter(|device| *device != Device::Cpu).collect();
    if cuda.len() < 2 {
        return BTreeMap::new();
    }
    let listed = kernels::device::listed().unwrap_or_default();
    let addresses: Vec<_> = listed.into_iter().map(|device| device.pci).collect();
    let near = own().map(|own| on_host(&cuda, &addresses, &own, Path::new(SYS))).unwrap_or_default();
    for (device, processors) in &near {
        tracing::info!(%device, processors = %list(processors), "processes stay near their device");
    }
    near
}

/// Returns the processors near each of these devices. `addresses` are those of all devices on the
/// PCI bus, `own` the processors of this process, and `sys` is the folder of the system.
fn on_host(
    devices: &BTreeSet<Device>,
    addresses: &[String],
    own: &Processors,
    sys: &Path,
) -> BTreeMap<Device, Processors> {
    let Some(online) = read(&sys.join("devices/system/cpu/online")) else { return BTreeMap::new() };
    let near = |device: &Device| {
        let Device::Cuda(ordinal) = device else { return None };
        let local = local(sys, addresses.get(*ordinal)?)?;
        Some((*device, stay(&online, own, &local)?))
    };
    devices.iter().filter_map(near).collect()
}

/// Returns the processors on which a process of a device stays, of those of this process. `None`:
/// it may run anywhere.
fn stay(online: &Processors, own: &Processors, local: &Processors) -> Option<Processors> {
    let near: Processors = own.intersection(local).copied().collect();
    (own == online && !near.is_empty() && near != *own).then_some(near)
}

/// Returns the processors near the device at this address of the PCI bus, such as `0000:3B:00.0`.
fn local(sys: &Path, pci: &str) -> Option<Processors> {
    let is_address =
        !pci.is_empty() && pci.bytes().all(|letter| letter.is_ascii_hexdigit() || b":.".contains(&letter));
    let address = is_address.then(|| pci.to_ascii_lowercase())?;
    read(&sys.join("bus/pci/devices").join(address).join("local_cpulist"))
}

fn read(path: &Path) -> Option<Processors> {
    parse(&fs::read_to_string(path).ok()?)
}

/// Reads a list of the kernel, such as `0-15,32-47`.
fn parse(list: &str) -> Option<Processors> {
    let mut processors = Processors::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX {
            return None;
        }
        processors.extend(first..=last);
    }
    Some(processors)
}

/// Writes processors as the kernel does.
fn list(processors: &Processors) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &processor in processors {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == processor => *last = processor,
            _ => ranges.push((processor, processor)),
        }
    }
    let range = |(first, last): (usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.into_iter().map(range).collect::<Vec<_>>().join(",")
}

/// Returns the processors of the calling thread. `None`: the system does not tell.
#[cfg(target_os = "linux")]
fn own() -> Option<Processors> {
    let own = sched_getaffinity(None).ok()?;
    Some((0..MAX).filter(|processor| own.is_set(*processor)).collect())
}

#[cfg(not(target_os = "linux"))]
const fn own() -> Option<Processors> {
    None
}

/// Keeps the calling thread on some processors, and so the processes that it starts meanwhile.
#[derive(Debug)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "nothing keeps a thread there"))]
pub(crate) struct Stay(#[cfg(target_os = "linux")] CpuSet);

#[cfg(target_os = "linux")]
impl Stay {
    /// Keeps the calling thread there until the value is dropped. `None`: the system refuses, and
    /// the thread is where it was.
    pub(crate) fn on(processors: &Processors) -> Option<Self> {
        let before = sched_getaffinity(None).ok()?;
        let mut set = CpuSet::new();
        processors.iter().filter(|processor| **processor < MAX).for_each(|&processor| set.set(processor));
        sched_setaffinity(None, &set).ok()?;
        Some(Self(before))
    }
}

#[cfg(not(target_os = "linux"))]
impl Stay {
    /// Keeps the calling thread nowhere.
    pub(crate) const fn on(_: &Processors) -> Option<Self> {
        None
    }
}

#[cfg(target_os = "linux")]
impl Drop for Stay {
    fn drop(&mut self) {
        // What was allowed before still is, unless somebody else has changed it.
        let _ = sched_setaffinity(None, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(list: &str) -> Processors {
        parse(list).unwrap()
    }

    #[test]
    fn lists_of_the_kernel_are_read_and_others_are_not() {
        assert_eq!(set("0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8].into());
        assert_eq!(set("\n"), Processors::new());
        for wrong in ["0-", "a", "3-1", "-1", "0-99999999", "1,,x"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_process_stays_near_its_device_unless_that_is_everywhere_nowhere_or_the_user_said_where() {
        let stay = |online, own, local| stay(&set(online), &set(own), &set(local)).map(|near| list(&near));
        assert_eq!(stay("0-31", "0-31", "16-31").as_deref(), Some("16-31"));
        // Some of the near ones are off.
        assert_eq!(stay("0-19", "0-19", "16-31").as_deref(), Some("16-19"));
        assert_eq!(stay("0-31", "0-31", "0-31"), None, "one socket");
        assert_eq!(stay("0-31", "0-31", "0-63"), None);
        assert_eq!(stay("0-31", "0-31", "32-63"), None, "none of them is on");
        assert_eq!(stay("0-31", "0-31", ""), None);
        assert_eq!(stay("0-31", "8-23", "16-31"), None, "the user has chosen processors");
    }

    proptest! {
        #[test]
        fn lists_are_read_as_they_are_written(processors in prop::collection::btree_set(0..MAX, 0..40)) {
            prop_assert_eq!(parse(&list(&processors)), Some(processors));
        }

        #[test]
        fn whatever_a_file_says_is_a_list_or_nothing(text in "[-0-9,a ]{0,12}") {
            let _ = parse(&text);
        }

        #[test]
        fn processors_are_always_some_of_those_of_this_process_and_never_all(
            online in prop::collection::btree_set(0usize..8, 1..8),
            own in prop::collection::btree_set(0usize..8, 1..8),
            local in prop::collection::btree_set(0usize..8, 0..8),
        ) {
            if let Some(near) = stay(&online, &own, &local) {
                prop_assert!(!near.is_empty() && near.len() < own.len());
                prop_assert!(near.is_subset(&own) && near.is_subset(&local) && own == online);
            }
        }
    }

    #[test]
    fn the_system_tells_what_is_near_an_address_and_other_texts_are_no_addresses() {
        let sys = tempfile::tempdir().unwrap();
        let folder = sys.path().join("bus/pci/devices/0000:3b:00.0");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("local_cpulist"), "4-7\n").unwrap();
        let local = |pci| local(sys.path(), pci);
        assert_eq!(local("0000:3B:00.0"), Some(set("4-7")));
        assert_eq!(local("0000:5E:00.0"), None);
        assert_eq!((local(""), local("../3b")), (None, None));
    }

    #[test]
    fn each_device_has_the_processors_at_its_address_and_one_alone_has_all() {
        let sys = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("devices/system/cpu/online", "0-15\n");
        write("bus/pci/devices/0000:a0:00.0/local_cpulist", "0-7\n");
        write("bus/pci/devices/0000:a1:00.0/local_cpulist", "8-15\n");
        let [a, b, c, d] = [0, 1, 2, 3].map(Device::Cuda);
        // The driver tells no address of `c`, and the host shows no `d`.
        let addresses = ["0000:A0:00.0", "0000:A1:00.0", ""].map(str::to_owned);
        let found = |own: &str| on_host(&[a, b, c, d].into(), &addresses, &set(own), sys.path());
        assert_eq!(found("0-15"), BTreeMap::from([(a, set("0-7")), (b, set("8-15"))]));
        assert!(found("0-3").is_empty(), "the user has chosen processors");
        let nowhere = Path::new("/nothing/is/here");
        assert!(on_host(&[a, b].into(), &addresses, &set("0-15"), nowhere).is_empty());
        for devices in [&[][..], &[Device::Cpu], &[a], &[a, a]] {
            assert!(near(devices).is_empty());
        }
    }

    #[test]
    fn a_thread_is_kept_on_processors_for_a_while() {
        let before = own().unwrap();
        let one = Processors::from([*before.first().unwrap()]);
        let stay = Stay::on(&one).unwrap();
        assert_eq!(own().unwrap(), one);
        drop(stay);
        assert_eq!(own().unwrap(), before);
        assert!(Stay::on(&Processors::new()).is_none(), "the system refuses");
        assert_eq!(own().unwrap(), before);
    }
}

//! Devices that compute gradients: which ones a user asks for, which ones a process has, and which
//! worker gets which. Pure.

use std::fmt;
use std::str::FromStr;

use proto::spec::DeviceKind;

use crate::error::{Error, Result};

/// Devices that the user asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Every CUDA device if there is one, otherwise the CPU.
    #[default]
    Auto,
    /// Every CUDA device. There must be one.
    All,
    /// Exactly these devices: the CPU alone, or CUDA devices, each once. Never empty.
    Only(Vec<Device>),
    /// The CUDA devices with these UUIDs, as `nvidia-smi -L` spells them, each once. Never empty.
    /// `GPU-` stands before a UUID or the beginning of one, `MIG-` before a whole one.
    Uuids(Vec<String>),
}

/// A device that computes gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// The host's processor.
    #[default]
    Cpu,
    /// CUDA device of this index.
    Cuda(usize),
}

/// The CUDA devices on which a process can compute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Bytes of memory of each device, in the order of their indices. 0: not known.
    pub memory_bytes: Vec<u64>,
    /// UUID of each device, without `GPU-` or `MIG-`. Empty: not known.
    pub uuids: Vec<String>,
    /// Why there is no device, and what to do. Empty if there is one.
    pub missing: String,
}

impl Found {
    /// Returns a process without a device. `missing` says why, and what to do.
    pub const fn nothing(missing: String) -> Self {
        Self { memory_bytes: Vec::new(), uuids: Vec::new(), missing }
    }

    /// Returns the memory of a device in bytes. 0: it is not known.
    pub fn memory_of(&self, device: Device) -> u64 {
        match device {
            Device::Cpu => 0,
            Device::Cuda(index) => self.memory_bytes.get(index).copied().unwrap_or(0),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = match self {
            Self::Auto => return f.write_str("auto"),
            Self::All => return f.write_str("all"),
            Self::Uuids(names) => return f.write_str(&names.join(",")),
            Self::Only(devices) => devices,
        };
        for (place, device) in devices.iter().enumerate() {
            match (place, device) {
                (0, device) => write!(f, "{device}")?,
                (_, Device::Cpu) => f.write_str(",cpu")?,
                (_, Device::Cuda(index)) => write!(f, ",{index}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "all" => Ok(Self::All),
            "cpu" => Ok(Self::Only(vec![Device::Cpu])),
            "cuda" => Ok(Self::Only(vec![Device::Cuda(0)])),
            _ if PREFIXES.iter().any(|prefix| text.starts_with(prefix)) => uuids(text).map(Self::Uuids),
            _ => cuda(text).map(Self::Only),
        }
    }
}

/// Parses `cuda:0,2` and `cuda:0,cuda:2`.
fn cuda(text: &str) -> Result<Vec<Device>> {
    let unknown = || Error::UnknownDevice(text.to_owned());
    if !text.starts_with("cuda:") {
        return Err(unknown());
    }
    let mut devices = Vec::new();
    for part in text.split(',') {
        let part = part.trim();
        let digits = part.strip_prefix("cuda:").unwrap_or(part);
        let is_number = digits.bytes().all(|letter| letter.is_ascii_digit());
        let index = digits.parse::<usize>().ok().filter(|_| is_number).ok_or_else(unknown)?;
        let device = Device::Cuda(index);
        if devices.contains(&device) {
            return Err(Error::RepeatedDevice { device: device.to_string(), text: text.to_owned() });
        }
        devices.push(device);
    }
    Ok(devices)
}

/// What stands before the UUID of a whole device and of an instance of one (MIG).
const PREFIXES: [&str; 2] = ["GPU-", "MIG-"];

/// Letters of a UUID.
const UUID_LEN: usize = 36;

/// Parses `GPU-8932f937,GPU-5`, and `MIG-` with a whole UUID.
fn uuids(text: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for name in text.split(',').map(str::trim) {
        if !is_uuid(name) {
            return Err(Error::UnknownDevice(text.to_owned()));
        }
        let (prefix, uuid) = name.split_at(PREFIXES[0].len());
        let name = format!("{prefix}{}", uuid.to_ascii_lowercase());
        if names.contains(&name) {
            return Err(Error::RepeatedDevice { device: name, text: text.to_owned() });
        }
        names.push(name);
    }
    Ok(names)
}

/// Returns whether it is a UUID with its prefix. The driver takes the beginning of a UUID for a
/// whole device only.
fn is_uuid(name: &str) -> bool {
    let (uuid, shortest) = match name.split_at_checked(PREFIXES[0].len()) {
        Some(("GPU-", uuid)) => (uuid, 1),
        Some(("MIG-", uuid)) => (uuid, UUID_LEN),
        _ => return false,
    };
    let fits = |(at, letter): (usize, u8)| match at {
        8 | 13 | 18 | 23 => letter == b'-',
        _ => letter.is_ascii_hexdigit(),
    };
    (shortest..=UUID_LEN).contains(&uuid.len()) && uuid.bytes().enumerate().all(fits)
}

impl Choice {
    /// Parses the name of one device.
    ///
    /// # Errors
    /// The text names several devices, or none in particular.
    pub fn one(text: &str) -> Result<Self> {
        match text.parse() {
            Ok(Self::Auto | Self::All) | Err(Error::UnknownDevice(_)) => {
                Err(Error::NotOneDevice(text.to_owned()))
            }
            Ok(choice) if choice.is_several() => Err(Error::NotOneDevice(text.to_owned())),
            parsed => parsed,
        }
    }

    /// Returns whether it matters which CUDA devices there are.
    pub fn asks(&self) -> bool {
        !matches!(self, Self::Only(devices) if devices.as_slice() == [Device::Cpu])
    }

    /// Returns whether it asks for several devices, or for all of any number.
    pub fn is_several(&self) -> bool {
        match self {
            Self::Auto => false,
            Self::All => true,
            Self::Only(devices) => devices.len() > 1,
            Self::Uuids(names) => names.len() > 1,
        }
    }

    /// Returns the choice for the workers of one process and one job, which may ask for a kind of
    /// device. `auto` then means that kind.
    ///
    /// # Errors
    /// The user chose devices of another kind.
    pub fn for_job(self, kind: Option<DeviceKind>) -> Result<Self> {
        match kind {
            None => Ok(self),
            Some(DeviceKind::Cpu) if self == Self::Auto => Ok(Self::Only(vec![Device::Cpu])),
            Some(DeviceKind::Cuda) if self == Self::Auto => Ok(Self::All),
            Some(kind) if self.is(kind) => Ok(self),
            Some(kind) => Err(Error::OtherDevice { chosen: self.to_string(), wanted: kind }),
        }
    }

    /// Returns whether all these devices are of one kind. `auto` may be of any.
    fn is(&self, kind: DeviceKind) -> bool {
        match self {
            Self::Auto => false,
            Self::All | Self::Uuids(_) => kind == DeviceKind::Cuda,
            Self::Only(devices) => {
                devices.iter().all(|device| (*device == Device::Cpu) == (kind == DeviceKind::Cpu))
            }
        }
    }

    /// Returns the devices to compute on, at least one, of those that the process has found.
    ///
    /// # Errors
    /// A CUDA device is asked for and not there, several begin with one UUID, or two UUIDs name
    /// one.
    pub fn devices(&self, found: &Found) -> Result<Vec<Device>> {
        let count = found.memory_bytes.len();
        let every = || (0..count).map(Device::Cuda).collect();
        match self {
            Self::Auto if count == 0 => Ok(vec![Device::Cpu]),
            Self::All if count == 0 => Err(missing("all", found)),
            Self::Auto | Self::All => Ok(every()),
            Self::Uuids(names) => {
                let mut devices = Vec::new();
                for name in names {
                    let device = with_uuid(name, found)?;
                    if devices.contains(&device) {
                        let device = device.to_string();
                        return Err(Error::RepeatedDevice { device, text: self.to_string() });
                    }
                    devices.push(device);
                }
                Ok(devices)
            }
            Self::Only(devices) => {
                let absent = |device: &&Device| matches!(device, Device::Cuda(index) if *index >= count);
                match devices.iter().find(absent) {
                    Some(device) => Err(missing(&device.to_string(), found)),
                    None => Ok(devices.clone()),
                }
            }
        }
    }
}

/// Returns the device with this UUID, of those that the process has found.
fn with_uuid(name: &str, found: &Found) -> Result<Device> {
    let refused = |reason| Err(Error::NoSuchDevice { device: name.to_owned(), reason });
    let (prefix, uuid) = name.split_at(PREFIXES[0].len());
    let seen = || {
        let seen = found.uuids.iter().enumerate();
        seen.map(|(index, uuid)| format!("cuda:{index} is {uuid}")).collect::<Vec<_>>().join(", ")
    };
    let fits = |index: &usize| found.uuids[*index].starts_with(uuid);
    let fitting: Vec<_> = (0..found.uuids.len()).filter(fits).collect();
    match fitting[..] {
        [index] => Ok(Device::Cuda(index)),
        [] if found.uuids.is_empty() => refused(found.missing.clone()),
        [] if found.uuids.iter().all(String::is_empty) => refused(
            "this program was built without the feature `cuda` and knows no UUIDs; name cuda:N".to_owned(),
        ),
        [] if prefix == "MIG-" => refused(format!(
            "CUDA shows an instance (MIG) only to a process that is started with its name: put \
             CUDA_VISIBLE_DEVICES={name} before the command, and start a process for each instance; this process \
             sees others: {}",
            seen()
        )),
        [] => refused(format!(
            "this process sees others: {}; name one of these, or compute on the CPU; CUDA_VISIBLE_DEVICES may hide \
             devices",
            seen()
        )),
        _ => refused(format!("several devices begin so: {}; write more of the UUID", seen())),
    }
}

fn missing(device: &str, found: &Found) -> Error {
    let reason = match found.memory_bytes.len() {
        0 => found.missing.clone(),
        count => format!(
            "this process sees {count} CUDA devices, counted from 0; name one of these, or compute on the CPU; \
             CUDA_VISIBLE_DEVICES may hide devices"
        ),
    };
    Error::NoSuchDevice { device: device.to_owned(), reason }
}

/// Returns how many workers to start: as many as `asked` for, otherwise one for each CUDA device
/// within the bounds of the job. A job that computes on the CPU gets `min` workers.
pub fn workers(devices: &[Device], asked: Option<u32>, min: u32, max: u32) -> u32 {
    let cuda = devices.iter().filter(|device| **device != Device::Cpu).count();
    asked.unwrap_or_else(|| u32::try_from(cuda).unwrap_or(max).min(max).max(min))
}

/// Returns the device of each worker, in turns. A worker keeps its device whatever the number of
/// workers is: with devices A and B, five workers get A B A B A. Empty without a device.
pub fn spread(devices: &[Device], workers: u32) -> Vec<Device> {
    devices.iter().copied().cycle().take(workers as usize).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn found(devices: usize) -> Found {
        match devices {
            0 => Found::nothing("no CUDA driver; install one".to_owned()),
            _ => Found {
                memory_bytes: vec![1 << 30; devices],
                uuids: (0..devices).map(|index| uuid(&format!("{index}"))).collect(),
                missing: String::new(),
            },
        }
    }

    /// Returns a UUID that begins with `8932f93` and these letters.
    fn uuid(letters: &str) -> String {
        format!("8932f93{letters}-d72c-4106-c12f-20bd9faed9f6")
    }

    fn choice(text: &str) -> Choice {
        text.parse().unwrap()
    }

    #[test]
    fn devices_are_read_as_written() {
        for text in ["auto", "all", "cpu", "cuda:3", "cuda:0,2"] {
            assert_eq!(choice(text).to_string(), text);
        }
        assert_eq!(choice("cuda:2,cuda:0"), Choice::Only(vec![Device::Cuda(2), Device::Cuda(0)]));
        assert_eq!(choice("cuda").to_string(), "cuda:0");
        for text in ["gpu", "cuda:", "cuda:+1", "cuda:0,", "0,1", "cpu,cuda:0", "cuda:0,cpu", ""] {
            let said = text.parse::<Choice>().unwrap_err().to_string();
            assert!(said.contains("cuda:N") && said.contains(&format!("`{text}`")), "{said}");
        }
        let said = "cuda:1,0,1".parse::<Choice>().unwrap_err().to_string();
        assert!(said.contains("cuda:1 twice"), "{said}");
    }

    #[test]
    fn uuids_are_read_as_nvidia_spells_them() {
        let (gpu, mig) = (format!("GPU-{}", uuid("7")), format!("MIG-{}", uuid("8")));
        for text in [&*gpu, &mig, "GPU-8", "GPU-8932f937-", "GPU-8932f937,GPU-5"] {
            assert_eq!(choice(text).to_string(), text);
        }
        assert_eq!(choice("GPU-8932F937, GPU-5").to_string(), "GPU-8932f937,GPU-5");
        let longer = format!("{gpu}0");
        let older = format!("MIG-{gpu}/1/0");
        for text in [
            "GPU-",
            "GPU-x",
            "GPU-8932f9371",
            "MIG-8932f937",
            "gpu-8",
            "GPU-8,cuda:0",
            "GPU-8,",
            "GPU-é",
            &longer,
            &older,
        ] {
            let said = text.parse::<Choice>().unwrap_err().to_string();
            assert!(said.contains("nvidia-smi -L") && said.contains(&format!("`{text}`")), "{said}");
        }
        let said = "GPU-aa,GPU-AA".parse::<Choice>().unwrap_err().to_string();
        assert!(said.contains("names GPU-aa twice"), "{said}");
        assert!(choice("GPU-8,GPU-5").is_several() && !choice(&mig).is_several());
        assert!(
            choice("all").is_several() && choice("cuda:0,1").is_several() && !choice("auto").is_several()
        );
    }

    #[test]
    fn a_uuid_names_the_device_that_has_it_and_what_fits_none_or_several_is_refused() {
        let devices = |text: &str| choice(text).devices(&found(3));
        let (gpu, mig) = (format!("GPU-{}", uuid("1")), format!("MIG-{}", uuid("2")));
        assert_eq!(devices(&format!("{mig},{gpu}")).unwrap(), [Device::Cuda(2), Device::Cuda(1)]);
        assert_eq!(devices("GPU-8932f930").unwrap(), [Device::Cuda(0)]);
        let refused = |text: &str| devices(text).unwrap_err().to_string();
        let said = refused("GPU-8932f93");
        assert!(
            said.starts_with("device GPU-8932f93: several devices begin so: cuda:0 is 8932f930-"),
            "{said}"
        );
        assert!(said.contains(&format!("cuda:2 is {}; write more", uuid("2"))), "{said}");
        let said = refused("GPU-7");
        assert!(said.starts_with("device GPU-7: this process sees others: cuda:0 is "), "{said}");
        assert!(said.contains("CUDA_VISIBLE_DEVICES may hide"), "{said}");
        let hidden = format!("MIG-{}", uuid("9"));
        let said = refused(&hidden);
        assert!(said.contains(&format!("put CUDA_VISIBLE_DEVICES={hidden} before the command")), "{said}");
        let said = refused("GPU-8932f931,GPU-8932f931-d");
        assert!(said.contains("names cuda:1 twice"), "{said}");
        let said = choice(&gpu).devices(&found(0)).unwrap_err().to_string();
        assert_eq!(said, format!("device {gpu}: no CUDA driver; install one"));
        let unknown = Found { uuids: vec![String::new()], ..found(1) };
        let said = choice(&gpu).devices(&unknown).unwrap_err().to_string();
        assert!(said.ends_with("knows no UUIDs; name cuda:N"), "{said}");
    }

    #[test]
    fn a_device_that_is_not_there_is_refused_and_auto_falls_back() {
        assert_eq!(Choice::Auto.devices(&found(0)).unwrap(), [Device::Cpu]);
        assert_eq!(Choice::Auto.devices(&found(2)).unwrap(), [Device::Cuda(0), Device::Cuda(1)]);
        assert_eq!(Choice::All.devices(&found(1)).unwrap(), [Device::Cuda(0)]);
        assert_eq!(choice("cpu").devices(&found(2)).unwrap(), [Device::Cpu]);
        let refused = |text, devices| choice(text).devices(&found(devices)).unwrap_err().to_string();
        assert_eq!(refused("all", 0), "device all: no CUDA driver; install one");
        assert_eq!(refused("cuda:0", 0), "device cuda:0: no CUDA driver; install one");
        let said = refused("cuda:0,3", 2);
        assert!(said.starts_with("device cuda:3: this process sees 2 CUDA devices"), "{said}");
    }

    #[test]
    fn a_job_that_wants_a_kind_of_device_decides_what_auto_means() {
        let of = |text, kind| choice(text).for_job(kind).map(|choice| choice.to_string());
        assert_eq!(of("auto", None).unwrap(), "auto");
        assert_eq!(of("auto", Some(DeviceKind::Cuda)).unwrap(), "all");
        assert_eq!(of("auto", Some(DeviceKind::Cpu)).unwrap(), "cpu");
        assert_eq!(of("cuda:1", Some(DeviceKind::Cuda)).unwrap(), "cuda:1");
        assert_eq!(of("GPU-8", Some(DeviceKind::Cuda)).unwrap(), "GPU-8");
        for (text, kind) in [
            ("cpu", DeviceKind::Cuda),
            ("all", DeviceKind::Cpu),
            ("cuda:0", DeviceKind::Cpu),
            ("GPU-8", DeviceKind::Cpu),
        ] {
            let said = of(text, Some(kind)).unwrap_err().to_string();
            assert!(said.contains(&format!("fleet.device = \"{kind}\"")) && said.contains(text), "{said}");
        }
    }

    #[test]
    fn only_the_cpu_alone_needs_no_look_at_the_driver() {
        assert!(!choice("cpu").asks());
        assert!(["auto", "all", "cuda:0", "GPU-8"].into_iter().all(|text| choice(text).asks()));
    }

    #[test]
    fn without_a_number_each_cuda_device_gets_a_worker_within_the_bounds_of_the_job() {
        let devices = [Device::Cuda(0), Device::Cuda(1), Device::Cuda(2)];
        let cases = [((1, 8), 3), ((1, 2), 2), ((5, 8), 5)];
        for ((min, max), expected) in cases {
            assert_eq!(workers(&devices, None, min, max), expected);
            assert_eq!(workers(&devices, Some(7), min, max), 7);
            assert_eq!(workers(&[Device::Cpu], None, min, max), min);
        }
    }

    proptest! {
        #[test]
        fn workers_are_spread_evenly_and_keep_their_devices(devices in 1usize..9, workers in 0u32..40) {
            let devices: Vec<_> = (0..devices).map(Device::Cuda).collect();
            let spread = spread(&devices, workers);
            prop_assert_eq!(spread.len(), workers as usize);
            let count = |device: &Device| spread.iter().filter(|of| *of == device).count();
            let counts: Vec<_> = devices.iter().map(count).collect();
            prop_assert_eq!(counts.iter().sum::<usize>(), spread.len(), "each has a chosen device");
            prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{:?}", counts);
            let more = super::spread(&devices, workers + 1);
            prop_assert_eq!(&more[..spread.len()], &spread[..], "another worker moves nobody");
        }

        #[test]
        fn each_chosen_device_has_a_worker_unless_the_job_takes_fewer(
            devices in 1usize..9, min in 1u32..9, more in 0u32..9
        ) {
            let devices: Vec<_> = (0..devices).map(Device::Cuda).collect();
            let max = min + more;
            let number = workers(&devices, None, min, max);
            prop_assert!((min..=max).contains(&number));
            let spread = spread(&devices, number);
            let used = devices.iter().filter(|device| spread.contains(device)).count();
            prop_assert_eq!(used, devices.len().min(number as usize));
            prop_assert!(number as usize >= devices.len().min(max as usize));
        }
    }

    #[test]
    fn one_device_is_read_and_what_is_not_one_is_told_what_to_write() {
        for device in ["cpu", "cuda:3", "GPU-8", "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"] {
            assert_eq!(Choice::one(device).unwrap().to_string(), device);
        }
        for wrong in ["cuda:0,1", "GPU-8,GPU-9", "all", "auto", "gpu", "MIG-8", ""] {
            let said = Choice::one(wrong).unwrap_err().to_string();
            let expected = "expected one device, cpu, cuda:N, GPU-UUID or MIG-UUID";
            assert_eq!(said, format!("device `{wrong}`: {expected}"));
        }
    }
}

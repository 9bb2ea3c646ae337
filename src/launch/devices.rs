//! Which device a process of a script gets, and how it hears of it. Pure.

use model::device::Device;

/// The variable by which CUDA hides devices from a process.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The variable with the name that the device of a process has on its host. CUDA numbers devices
/// anew in each process.
const NAME: &str = "EBBFLOW_DEVICE";

/// Returns the variables that show a process its device alone. `own` is [`VISIBLE`] of this
/// process: devices count within it. Without a device the process sees what this process sees.
pub(crate) fn variables(device: Option<Device>, own: Option<&str>) -> Vec<(String, String)> {
    let variable = |name: &str, value: String| (name.to_owned(), value);
    match device {
        None => Vec::new(),
        // CUDA ignores all from the first number that is no device.
        Some(Device::Cpu) => vec![variable(VISIBLE, "-1".to_owned())],
        Some(Device::Cuda(index)) => {
            vec![variable(VISIBLE, entry(index, own)), variable(NAME, format!("cuda:{index}"))]
        }
    }
}

/// Returns how CUDA names a device to all processes: by the number or the UUID in the list of this
/// process.
fn entry(index: usize, own: Option<&str>) -> String {
    let listed = own.and_then(|own| own.split(',').nth(index)).map(str::trim);
    listed.filter(|entry| !entry.is_empty()).map_or_else(|| index.to_string(), str::to_owned)
}

/// Returns the device with the fewest processes, the first one of several. `taken` has the device
/// of each process. `None` without devices.
pub(crate) fn free(devices: &[Device], taken: impl IntoIterator<Item = Device>) -> Option<Device> {
    let taken: Vec<Device> = taken.into_iter().collect();
    devices.iter().copied().min_by_key(|device| taken.iter().filter(|of| *of == device).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(device: Option<Device>, own: Option<&str>) -> Option<String> {
        variables(device, own).into_iter().find(|(name, _)| name == VISIBLE).map(|(_, value)| value)
    }

    #[test]
    fn a_process_sees_its_device_alone_and_hears_its_name() {
        let given = variables(Some(Device::Cuda(2)), None);
        let expected = [(VISIBLE, "2"), ("EBBFLOW_DEVICE", "cuda:2")];
        assert_eq!(given, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(variables(Some(Device::Cpu), Some("0,1")), [(VISIBLE.to_owned(), "-1".to_owned())]);
        assert!(variables(None, Some("0,1")).is_empty(), "it sees what the launcher sees");
    }

    #[test]
    fn devices_count_within_the_list_of_the_user() {
        for (index, own, expected) in [
            (0, "3,5", "3"),
            (1, "3, 5", "5"),
            (1, "GPU-aa,GPU-bb", "GPU-bb"),
            (0, "MIG-cc", "MIG-cc"),
            // The driver ignores such ends, and so shows no such device.
            (2, "3,5", "2"),
            (1, "3,", "1"),
        ] {
            assert_eq!(visible(Some(Device::Cuda(index)), Some(own)).as_deref(), Some(expected), "{own}");
        }
    }

    #[test]
    fn a_new_process_gets_the_device_with_the_fewest() {
        let [a, b, c] = [0, 1, 2].map(Device::Cuda);
        let free = |taken: &[Device]| free(&[a, b, c], taken.iter().copied());
        assert_eq!(free(&[]), Some(a));
        assert_eq!(free(&[a]), Some(b));
        assert_eq!(free(&[a, b, c, a]), Some(b));
        // Another process of `b` has ended.
        assert_eq!(free(&[a, a, c]), Some(b));
        assert_eq!(super::free(&[], [a]), None);
    }
}

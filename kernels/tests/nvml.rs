//! Telemetry of devices: what NVML says is what a reader sees, and what is missing is said once.
#![expect(unsafe_code, reason = "calls into a library that this process has just built")]

use std::ffi::{CString, c_char, c_void};
use std::mem;
use std::time::Duration;

use kernels::device::listed;
use kernels::telemetry::{Observer, Reading, Throttle};

use self::fake::Driver;

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of devices")]
#[path = "cuda/fake.rs"]
mod fake;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of devices")]
#[path = "cuda/library.rs"]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

/// Tells the library of `nvml.cpp` what to say.
fn says(library: *mut c_void, values: &str) {
    let function = library::function(library, c"fake_nvml");
    let values = CString::new(values).expect("a text");
    // SAFETY: the type of the function in `nvml.cpp`.
    let function = unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char)>(function) };
    // SAFETY: the library copies the text.
    unsafe { function(values.as_ptr()) }
}

/// Watches devices. On a busy machine the first answer may come later than an observer waits for
/// it, so it is asked for again.
fn watch(ordinals: &[usize]) -> Observer {
    let is_late = |why: &str| why.starts_with("NVML has not answered");
    let mut tries = (0..10).map(|_| Observer::start(ordinals));
    tries.find(|watching| !watching.missing().is_some_and(is_late)).expect("an answer")
}

/// Waits until a device has this reading.
fn until(watching: &Observer, expected: Reading) {
    while watching.devices().latest(0).get() != Some(expected) {
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// One test, because what a process has loaded stays loaded.
#[test]
fn a_reader_sees_what_the_device_says_and_what_is_missing_is_named() {
    let driver = Driver::load();
    assert_eq!(listed().expect("a device")[0].uuid, "00000000-0000-0000-0000-000000000000");
    let watching = watch(&[0]);
    match watching.missing() {
        Some(missing) => assert!(missing.starts_with("no NVML: "), "{missing}"),
        None => {
            return skip::skipped(skip::Lacks::Machine, "an NVML is here: its absence was not tested");
        }
    }
    assert!(watching.devices().readings().is_empty());
    drop(watching);

    let folder = tempfile::tempdir().expect("a folder for the library");
    library::build("nvml.cpp", "", folder.path(), "libnvidia-ml.so.1");
    let library = library::load(&folder.path().join("libnvidia-ml.so.1"));
    says(library, "busy 87\nmemory_total 100\nmemory_used 40\n0.throttle 72\n");
    let watching = watch(&[0]);
    assert_eq!(watching.missing(), None);
    let expected = Reading {
        busy_percent: Some(87),
        memory_used_bytes: Some(40),
        memory_total_bytes: Some(100),
        throttle: Some(Throttle { by_heat: true, by_power: false, by_hardware: true }),
        ..Reading::default()
    };
    assert_eq!(watching.devices().readings(), [(0, expected)], "what it does not say is not known");

    // Readers see changes.
    says(library, "busy 3\npower 250000\ntemperature 64\nthrottle 4\necc_corrected 7\necc_uncorrected 1\n");
    let expected = Reading {
        busy_percent: Some(3),
        power_milliwatts: Some(250_000),
        temperature_celsius: Some(64),
        throttle: Some(Throttle { by_power: true, ..Throttle::default() }),
        ecc_corrected: Some(7),
        ecc_uncorrected: Some(1),
        ..Reading::default()
    };
    until(&watching, expected);
    says(library, "lost 1\n");
    until(&watching, Reading { is_lost: true, ..Reading::default() });

    // A device that NVML does not know hides no other one.
    driver.devices(2);
    let watching = watch(&[0, 1, 2]);
    assert_eq!(watching.devices().readings().len(), 1);
    assert_eq!(watching.missing(), Some("the driver shows no cuda:2"));
    let missing = watch(&[1]);
    assert!(
        missing.missing().is_some_and(|why| why.starts_with("NVML does not know cuda:1: ")),
        "{missing:?}"
    );
    driver.devices(0);
    assert_eq!(watch(&[0]).missing(), Some("the driver shows no cuda:0"));
    driver.devices(1);
}

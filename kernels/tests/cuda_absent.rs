//! A machine without a CUDA driver, or without NVRTC: the call says so, and nothing panics.

use kernels::cuda::{Device, Error};
use kernels::device::listed;

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

/// One test, because what a process has loaded stays loaded.
#[test]
fn a_machine_without_driver_or_compiler_is_told_so_and_goes_on() {
    // Twice: a failure is not remembered.
    for _ in 0..2 {
        match Device::open(0, None) {
            Err(Error::NoDriver) => {}
            _ => {
                return skip::skipped(
                    skip::Lacks::Machine,
                    "a CUDA driver is here: its absence was not tested",
                );
            }
        }
    }
    assert_eq!(listed(), Err(Error::NoDriver));
    let said = Error::NoDriver.to_string();
    assert!(said.starts_with("no CUDA driver: ") && said.contains("libcuda.so.1"), "{said}");

    // A driver, but no device. No compiler is needed to say so.
    let driver = Driver::load();
    driver.devices(0);
    assert_eq!(listed(), Ok(Vec::new()));
    let said = Device::open(0, None).expect_err("no device").to_string();
    assert!(said.starts_with("no CUDA device 0: the driver shows 0 devices"), "{said}");
    driver.devices(2);
    let both = listed().expect("two devices");
    assert_eq!(both.len(), 2);
    assert!(both.iter().all(|device| !device.name.is_empty() && device.memory_bytes == 1 << 26), "{both:?}");
    driver.devices(1);

    driver.version(11_040);
    assert!(matches!(listed(), Err(Error::DriverTooOld { version: 11_040, .. })));
    let said = Device::open(0, None).expect_err("an old driver").to_string();
    let expected =
        "the CUDA driver is too old: it supports CUDA 11.4, expected 12.0 or newer; install a newer driver";
    assert_eq!(said, expected);
    driver.version(13_000);

    match Device::open(0, None) {
        Err(Error::NoCompiler) => {}
        _ => return skip::skipped(skip::Lacks::Machine, "an NVRTC is here: its absence was not tested"),
    }
    let said = Error::NoCompiler.to_string();
    assert!(said.starts_with("no NVRTC: ") && said.contains("LD_LIBRARY_PATH"), "{said}");
}

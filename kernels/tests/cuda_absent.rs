//! A machine without a CUDA driver, or without NVRTC: the call says so, and nothing panics.

use kernels::cuda::{Device, Error, SOURCE};

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
    let said = Error::NoDriver.to_string();
    assert!(said.starts_with("no CUDA driver: ") && said.contains("libcuda.so.1"), "{said}");

    let folder = tempfile::tempdir().expect("a folder for the driver");
    library::build("driver.cpp", SOURCE, folder.path(), "libcuda.so");
    library::load(&folder.path().join("libcuda.so"));
    match Device::open(0, None) {
        Err(Error::NoCompiler) => {}
        _ => return skip::skipped(skip::Lacks::Machine, "an NVRTC is here: its absence was not tested"),
    }
    let said = Error::NoCompiler.to_string();
    assert!(said.starts_with("no NVRTC: ") && said.contains("LD_LIBRARY_PATH"), "{said}");
}

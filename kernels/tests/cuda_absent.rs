//! A machine without a CUDA driver, or without NVRTC: the call says so, and nothing panics.
//!
//! This program starts itself as another process, which has NVRTC.
#![expect(
    clippy::disallowed_methods,
    reason = "this program starts itself, and says so through the environment"
)]

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use kernels::cuda::{Device, Error};
use kernels::device::listed;
use sha2::{Digest as _, Sha256};

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

/// Environment variable with the folder for compiled kernels that another process fills.
const CACHE: &str = "EBB_TEST_CACHE";

/// Not a test: what another process does.
#[test]
fn another_process_with_a_compiler_fills_the_cache() {
    let Some(cache) = env::var_os(CACHE) else { return };
    library::load_nvrtc();
    Driver::load();
    Device::open(0, Some(Path::new(&cache))).expect("a driver and a compiler");
}

/// A device opens without NVRTC if another process has left compiled kernels.
fn kernels_of_another_process_are_enough() {
    if env::var_os("EBB_NVRTC").is_none_or(|folder| folder.is_empty()) {
        return skip::skipped(skip::Lacks::Package, "no NVRTC: nobody could compile kernels");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().join("kernels");
    let mut other = Command::new(env::current_exe().expect("this program has a path"));
    other.args(["--exact", "another_process_with_a_compiler_fills_the_cache"]).env(CACHE, &cache);
    let output = other.output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));

    let open = || Device::open(0, Some(&cache));
    assert_eq!(open().expect("compiled before").ordinal(), 0);
    // What a newer compiler made comes first, and the driver refuses it.
    let entry = fs::read_dir(&cache).expect("a cache").next().expect("an entry").expect("an entry").path();
    let newer = ".version 99.0\n";
    let hash: String = Sha256::digest(newer).iter().map(|byte| format!("{byte:02x}")).collect();
    let (key, _) = entry.to_str().expect("a text").rsplit_once('-').expect("a version");
    fs::write(format!("{key}-99.0.ptx"), format!("{hash}\n{newer}")).expect("written");
    assert_eq!(open().expect("the other entry").ordinal(), 0);
    fs::remove_file(entry).expect("removed");
    assert!(matches!(open(), Err(Error::DriverTooOld { .. })), "the newer one alone");
}

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
    kernels_of_another_process_are_enough();
}

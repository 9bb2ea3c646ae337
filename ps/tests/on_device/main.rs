//! The tests of `tests/integration`, and more, with ps that keep their partitions on a CUDA device.
//!
//! The driver is the one of `kernels/tests/cuda/driver.cpp`, which runs the kernels on the host and
//! each operation as late as it may. Of three ps that a test starts, two are on the device and one
//! is on the host. So tests with several ps mix them.

use std::cell::Cell;
use std::sync::OnceLock;

use ps::Device;

use self::fake::Driver;

#[path = "../integration/bits.rs"]
mod bits;
#[path = "../integration/checkpoint.rs"]
mod checkpoint;
mod embedded;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../../kernels/tests/cuda/fake.rs"]
mod fake;
#[path = "../integration/faulty.rs"]
mod faulty;
#[path = "../integration/harness.rs"]
mod harness;
#[allow(unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../../kernels/tests/cuda/library.rs"]
mod library;
#[path = "../integration/life.rs"]
mod life;
#[path = "../integration/limits.rs"]
mod limits;
mod memory;
#[path = "../integration/norms.rs"]
mod norms;
mod optimizers;
#[path = "../integration/order.rs"]
mod order;
#[path = "../integration/refusals.rs"]
mod refusals;
#[path = "../integration/served.rs"]
mod served;
#[path = "../integration/session.rs"]
mod session;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../../tests/harness/skip.rs"]
mod skip;
#[path = "../integration/wire.rs"]
mod wire;

/// Bytes of the driver's memory.
const MEMORY: usize = 1 << 30;

/// Returns the device of the next ps that a test starts.
fn device() -> Device {
    thread_local! { static STARTED: Cell<usize> = const { Cell::new(0) } }
    let number = STARTED.replace(STARTED.get() + 1);
    if number % 3 == 2 { Device::default() } else { cuda().unwrap_or_default() }
}

/// Returns the device that all tests share. `None`: there is no NVRTC.
fn cuda() -> Option<Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let opened = || {
        library::load_nvrtc();
        Driver::load().memory(MEMORY);
        match Device::cuda(0, None) {
            Ok(device) => Some(device),
            Err(kernels::Error::NoCompiler) => {
                skip::skipped(skip::Lacks::Package, "no NVRTC: no ps used a device");
                None
            }
            Err(error) => panic!("{error}"),
        }
    };
    DEVICE.get_or_init(opened).clone()
}

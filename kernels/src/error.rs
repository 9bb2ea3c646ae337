//! Failures of a CUDA device.

/// A failure of a device, of its driver, or of the compiler of its kernels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This program was built without CUDA.
    #[error(
        "no CUDA in this program: it was built without the feature `cuda`; build it with `--features cuda`, or compute \
         on the CPU"
    )]
    NotBuilt,
    /// The processor of the host exports no memory, and opens none.
    #[error("memory of a CUDA device does not cross to or from the processor of the host")]
    OnHost,
    /// The machine has no CUDA driver.
    #[error(
        "no CUDA driver: the loader found no `libcuda.so.1` on this machine; install NVIDIA's driver, or compute on \
         the CPU"
    )]
    NoDriver,
    /// The driver has no such device.
    #[error(
        "no CUDA device {ordinal}: the driver shows {found} devices, counted from 0; name one of these, or compute on \
         the CPU; CUDA_VISIBLE_DEVICES may hide devices"
    )]
    NoDevice {
        /// The device that was asked for.
        ordinal: usize,
        /// Number of devices.
        found: usize,
    },
    /// The driver lacks a function, or does not know what the compiler writes.
    #[error("the CUDA driver is too old: it supports CUDA {}.{}, {reason}", version / 1000, version % 1000 / 10)]
    DriverTooOld {
        /// Version of CUDA that the driver supports, like 12040 for 12.4.
        version: i32,
        /// What was expected, and what to do.
        reason: String,
    },
    /// The machine has no NVRTC.
    #[error(
        "no NVRTC: the loader found no `libnvrtc.so.13` or `libnvrtc.so.12`, which compiles the kernels; install the \
         CUDA toolkit or the Python package nvidia-cuda-nvrtc, and add its folder to LD_LIBRARY_PATH"
    )]
    NoCompiler,
    /// NVRTC has no target that the device runs.
    #[error("no kernels for compute capability {capability}: NVRTC compiles for {oldest} and newer")]
    Unsupported {
        /// The device's own, like 90 for 9.0.
        capability: i32,
        /// The oldest one that NVRTC knows.
        oldest: i32,
    },
    /// NVRTC refused the kernels.
    #[error("NVRTC does not compile the kernels for {architecture}: {reason}")]
    NotCompiled {
        /// The target.
        architecture: String,
        /// What NVRTC says.
        reason: String,
    },
    /// The device has too little free memory.
    #[error(
        "CUDA device {ordinal} has no {bytes} bytes left: {free} of {total} bytes are free; give the device fewer \
         partitions, or other processes on it less memory"
    )]
    OutOfMemory {
        /// The device.
        ordinal: usize,
        /// What was asked for.
        bytes: usize,
        /// What was free.
        free: usize,
        /// What the device has.
        total: usize,
    },
    /// The driver refused a call. Most such errors stay until the process ends.
    #[error("CUDA device {ordinal} could not {what}: {reason}")]
    Failed {
        /// The device.
        ordinal: usize,
        /// What was asked for.
        what: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// The driver passes no memory between processes, or not between these.
    #[error(
        "CUDA device {ordinal} could not {what}: {reason}; CUDA passes memory between processes of one user and one \
         container, and not on every device; pass the values through memory of the host"
    )]
    NotShared {
        /// The device.
        ordinal: usize,
        /// What was asked for.
        what: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// Memory of another process lies on a device that this one has no access to.
    #[error(
        "memory of another process lies on the CUDA device {found}, and CUDA device {ordinal} of this process is \
         {expected}, which has no access to it: {reason}; start both on one device, or pass the values through memory \
         of the host"
    )]
    OtherDevice {
        /// The device of this process, by its number here.
        ordinal: usize,
        /// UUID of the device of the memory.
        found: String,
        /// UUID of the device of this process.
        expected: String,
        /// What the driver says.
        reason: String,
    },
    /// Memory of another process is not there any more.
    #[error(
        "CUDA device {ordinal} could not open memory of another process: {reason}; the other process has freed it or \
         has ended; ask it again"
    )]
    Gone {
        /// The device.
        ordinal: usize,
        /// What the driver says.
        reason: String,
    },
    /// The device computed a sum that is not the host's.
    #[error("CUDA device {ordinal} computes wrong: {found:?} instead of {expected:?}; do not use it")]
    Wrong {
        /// The device.
        ordinal: usize,
        /// Bits of the device's values.
        found: Vec<u32>,
        /// Bits of the host's values.
        expected: Vec<u32>,
    },
}

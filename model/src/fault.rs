//! What the error of a compute engine says of a CUDA device. Pure.
//!
//! Engines report errors as texts. These are the texts of the CUDA runtime and driver, of cuBLAS,
//! cuDNN and NCCL, as libtorch passes them on, and those of [`kernels::Error`]. No error of a real
//! device has been seen yet: the texts are those of their documentation.

/// Fault of a CUDA device, or of a process's use of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The device has too little free memory. It goes on with what it has.
    OutOfMemory,
    /// The device is gone, damaged, or cannot run this program, whatever was computed.
    Lost,
    /// This process cannot use the device any more. What it computed may be the reason, such as an
    /// index beyond a tensor's end.
    Spoiled,
}

/// Beginnings by which CUDA and its libraries are known.
const CUDA: [&str; 11] = [
    "CUDA out of memory",
    "CUDA error",
    "CUDA driver error",
    "CUDA_ERROR_",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "CUSOLVER_STATUS_",
    "NCCL error",
    FAILED,
    KERNELS_FULL,
    KERNELS_WRONG,
];

/// What is said of a device of [`kernels`] that has failed. It does nothing any more.
const FAILED: &str = "the CUDA device has failed";

/// What [`kernels::Error::OutOfMemory`] says.
const KERNELS_FULL: &str = " bytes are free";

/// What [`kernels::Error::Wrong`] says.
const KERNELS_WRONG: &str = " computes wrong: ";

/// Returns what an engine says of a device whose kernels have failed with this error: it keeps the
/// failure, and no value on it means anything.
pub fn of_failed(error: &kernels::Error) -> String {
    format!("{FAILED}: {error}")
}

/// What a full device says.
const FULL: [&str; 4] = ["out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED", KERNELS_FULL];

/// What a device says that is gone or damaged, or that this program was not built for.
const LOST: [&str; 19] = [
    "uncorrectable ECC error",
    "ECC_UNCORRECTABLE",
    "uncorrectable NVLink error",
    "NVLINK_UNCORRECTABLE",
    "fallen off the bus",
    "GPU is lost",
    "no CUDA-capable device is detected",
    "CUDA_ERROR_NO_DEVICE",
    "busy or unavailable",
    "DEVICE_UNAVAILABLE",
    "driver shutting down",
    "CUDA_ERROR_DEINITIALIZED",
    "hardware stack error",
    "HARDWARE_STACK_ERROR",
    "no kernel image is available",
    "NO_BINARY_FOR_GPU",
    "driver version is insufficient",
    "SYSTEM_DRIVER_MISMATCH",
    KERNELS_WRONG,
];

/// What is said of a wrong call. The device goes on.
const REFUSED: [&str; 7] = [
    "NOT_SUPPORTED",
    "operation not supported",
    "BAD_PARAM",
    "INVALID_VALUE",
    "invalid argument",
    "invalid configuration argument",
    "ARCH_MISMATCH",
];

/// Returns what an engine's error says of a CUDA device. `None`: nothing.
pub fn fault(error: &str) -> Option<Fault> {
    let says = |texts: &[&str]| texts.iter().any(|text| error.contains(text));
    if !says(&CUDA) {
        return None;
    }
    let has_failed = error.contains(FAILED);
    if says(&FULL) && !has_failed {
        Some(Fault::OutOfMemory)
    } else if says(&LOST) {
        Some(Fault::Lost)
    } else if says(&REFUSED) && !has_failed {
        None
    } else {
        Some(Fault::Spoiled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_device_goes_on() {
        for said in [
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25 GiB \
             is free.",
            "CUDA error: out of memory",
            "CUDA driver error: out of memory",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
        ] {
            assert_eq!(fault(said), Some(Fault::OutOfMemory), "{said}");
        }
    }

    #[test]
    fn a_device_that_is_gone_or_damaged_is_lost() {
        for said in [
            "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
            "CUDA error: uncorrectable NVLink error detected during the execution",
            "CUDA error: unknown error: the GPU has fallen off the bus",
            "CUDA error: no CUDA-capable device is detected",
            "CUDA error: all CUDA-capable devices are busy or unavailable",
            "CUDA error: driver shutting down",
            "CUDA error: no kernel image is available for execution on the device",
            "DriverError(CUDA_ERROR_ECC_UNCORRECTABLE, \"uncorrectable ECC error encountered\")",
        ] {
            assert_eq!(fault(said), Some(Fault::Lost), "{said}");
        }
    }

    #[test]
    fn an_error_that_the_computation_may_have_caused_spoils_the_process() {
        for said in [
            "CUDA error: device-side assert triggered",
            "CUDA error: an illegal memory access was encountered",
            "CUDA error: unspecified launch failure",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
            "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            "CUDA error: unknown error",
        ] {
            assert_eq!(fault(said), Some(Fault::Spoiled), "{said}");
        }
    }

    #[test]
    fn errors_of_kernels_say_whether_the_device_goes_on() {
        let failed = |reason: &str| {
            let reason = reason.to_owned();
            kernels::Error::Failed { ordinal: 0, what: "compute", reason }
        };
        let full = kernels::Error::OutOfMemory { ordinal: 0, bytes: 7, free: 3, total: 9 };
        let wrong = kernels::Error::Wrong { ordinal: 0, found: vec![1], expected: vec![2] };
        let damaged = failed("uncorrectable ECC error encountered (CUDA_ERROR_ECC_UNCORRECTABLE)");
        let illegal = failed("an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)");
        let invalid = failed("invalid argument (CUDA_ERROR_INVALID_VALUE)");
        for (error, goes_on, has_failed) in [
            (full, Some(Fault::OutOfMemory), Fault::Spoiled),
            (wrong, Some(Fault::Lost), Fault::Lost),
            (damaged, Some(Fault::Lost), Fault::Lost),
            (illegal, Some(Fault::Spoiled), Fault::Spoiled),
            (invalid, None, Fault::Spoiled),
        ] {
            assert_eq!(fault(&error.to_string()), goes_on, "{error}");
            assert_eq!(fault(&of_failed(&error)), Some(has_failed), "{error}");
        }
    }

    #[test]
    fn other_errors_say_nothing_of_a_device() {
        for said in [
            "",
            "DefaultCPUAllocator: not enough memory: you tried to allocate 2 bytes",
            "out of memory",
            "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
            "Torch not compiled with CUDA enabled",
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
            "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`",
            "CUDA error: invalid argument",
        ] {
            assert_eq!(fault(said), None, "{said}");
        }
    }
}

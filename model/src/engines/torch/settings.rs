//! The settings that make libtorch's results depend on nothing but the inputs, and the loading of
//! CUDA.
//!
//! libtorch has settings of the process and of each thread. [`start`] makes the first once, before
//! anything else asks libtorch whether there is CUDA. [`enter`] makes the second on the thread that
//! is about to compute.
#![expect(unsafe_code, reason = "loads a library at run time")]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::shim;
use crate::error::{Error, Result};

/// Name of the file with the CUDA half of libtorch.
const CUDA_HALF: &str = "libtorch_cuda.so";

/// Why libtorch has no CUDA; `None`: its CUDA half is loaded.
static NO_CUDA: OnceLock<Option<String>> = OnceLock::new();

/// Returns the number of CUDA devices that this process can compute on.
pub(in crate::engines) fn cuda_devices() -> Result<usize> {
    start()?;
    match NO_CUDA.get() {
        Some(Some(reason)) => Err(Error::NoTorchCuda(reason.clone())),
        _ => Ok(usize::try_from(tch::Cuda::device_count()).unwrap_or(0)),
    }
}

/// Prepares the process: loads CUDA's half of libtorch where there is one, and requires
/// deterministic algorithms. An operation without one then fails by name, instead of breaking the
/// promise of equal bits.
pub(super) fn start() -> Result<()> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    let started = STARTED.get_or_init(|| {
        NO_CUDA.get_or_init(|| load_cuda().err());
        shim::settings()
    });
    started.clone().map_err(|reason| Error::Engine { what: "libtorch's settings".to_owned(), reason })
}

/// Prepares the calling thread. It is cheap, and runs before every computation: a model may have
/// moved to another thread, or share its thread with a model that has another number of threads.
pub(super) fn enter(threads: usize) -> Result<()> {
    shim::thread(threads).map_err(|reason| Error::Engine { what: format!("{threads} threads"), reason })
}

/// Loads the CUDA half of libtorch. Programs are linked to the CPU half only, so that they start
/// everywhere. The CUDA half registers itself when it is loaded, provided that nothing asked for
/// CUDA before.
///
/// # Errors
/// What is missing.
fn load_cuda() -> Result<(), String> {
    let cpu = shim::library().ok_or("libtorch does not say where it lies")?;
    let library = candidates(&cpu).into_iter().find(|path| path.exists());
    let library = library.ok_or_else(|| format!("there is no `{CUDA_HALF}` beside {}", cpu.display()))?;
    // cuBLAS is deterministic only with a workspace of fixed size (NVIDIA: cuBLAS, "Results
    // reproducibility"). SAFETY: both are C strings. CUDA, whose C code reads the environment, is
    // not loaded yet.
    unsafe { libc::setenv(c"CUBLAS_WORKSPACE_CONFIG".as_ptr(), c":4096:8".as_ptr(), 0) };
    let path = CString::new(library.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: the library is the other half of the libtorch that is already loaded. Its
    // initialisers register CUDA's kernels, which is what they are for.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        let (library, reason) = (library.display(), dlopen_error());
        tracing::warn!(%library, reason, "libtorch's CUDA half does not load");
        return Err(format!("{library} does not load: {reason}"));
    }
    Ok(())
}

/// Returns the paths where the CUDA half may be: beside the CPU half (a wheel of CUDA), or in the
/// folder that `cargo xtask libtorch --cuda` fills.
fn candidates(cpu: &Path) -> Vec<PathBuf> {
    let Some(folder) = cpu.parent() else { return Vec::new() };
    vec![folder.join(CUDA_HALF), folder.join("../cuda").join(CUDA_HALF)]
}

fn dlopen_error() -> String {
    // SAFETY: dlerror gives null or a C string that lives until this thread's next call of the dl
    // functions.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "unknown".to_owned();
        }
        std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_is_looked_for_beside_the_cpu_half_first() {
        let found = candidates(Path::new("/lib/torch/libtorch_cpu.so"));
        let expected = ["/lib/torch/libtorch_cuda.so", "/lib/torch/../cuda/libtorch_cuda.so"];
        assert_eq!(found, expected.map(PathBuf::from));
    }

    #[test]
    fn the_linked_library_is_found_and_tells_the_devices() {
        assert!(
            shim::library().is_some_and(|path| path.ends_with("libtorch_cpu.so")),
            "{:?}",
            shim::library()
        );
        start().unwrap();
        let devices = cuda_devices();
        let some = devices.as_ref().is_ok_and(|count| *count > 0);
        assert_eq!(some, tch::Cuda::is_available(), "{devices:?}");
        if let Err(error) = devices {
            let said = error.to_string();
            assert!(said.starts_with("no CUDA in libtorch: ") && said.contains("libtorch_cuda.so"), "{said}");
        }
    }

    #[test]
    fn each_thread_keeps_its_own_number_of_threads() {
        start().unwrap();
        let barrier = &std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                enter(1).unwrap();
                barrier.wait();
                barrier.wait();
                // A thread's first loop takes over the last setting of the process, unless the
                // thread's own is made before.
                let _ = tch::Tensor::ones([1 << 17], (tch::Kind::Float, tch::Device::Cpu)).exp();
                tch::get_num_threads()
            });
            barrier.wait();
            enter(2).unwrap();
            barrier.wait();
            assert_eq!((other.join().unwrap(), tch::get_num_threads()), (1, 2));
        });
    }
}

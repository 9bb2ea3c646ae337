//! The settings that make libtorch's results depend on nothing but the inputs, and the loading of
//! CUDA.
//!
//! libtorch has settings of the process and of each thread. [`start`] makes the first once, before
//! anything else asks libtorch whether there is CUDA. [`enter`] makes the second on the thread that
//! is about to compute. [`compute`] also chooses TF32, a setting of the process that jobs choose.
//!
//! **Always true:** TF32 is off, unless every computation that runs is of a job that allows it.
#![expect(unsafe_code, reason = "loads a library at run time")]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

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

/// A computation. While it lives, the process has the TF32 of its job.
#[derive(Debug)]
pub(super) struct Computation(());

/// Whether TF32 is allowed, and who relies on it.
struct Tf32 {
    allowed: bool,
    /// Computations that run.
    computations: usize,
    /// Computations that wait until no other one runs.
    waiting: usize,
}

impl Tf32 {
    /// Returns whether a computation with this choice cannot run beside those that run.
    const fn keeps_out(&self, tf32: bool) -> bool {
        self.computations > 0 && self.allowed != tf32
    }

    /// Returns whether a new computation has to wait. It waits behind those that wait already:
    /// otherwise a job of many workers would keep others out for ever.
    const fn makes_wait(&self, tf32: bool) -> bool {
        self.keeps_out(tf32) || self.computations > 0 && self.waiting > 0
    }
}

static TF32: Mutex<Tf32> = Mutex::new(Tf32 { allowed: false, computations: 0, waiting: 0 });

/// Notified when no computation is left.
static NONE_LEFT: Condvar = Condvar::new();

fn tf32_of_process() -> MutexGuard<'static, Tf32> {
    TF32.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prepares the calling thread like [`enter`], and chooses TF32 until the answer is dropped. Waits
/// for computations with the other choice. A thread begins one computation at a time.
pub(super) fn compute(threads: usize, tf32: bool) -> Result<Computation> {
    enter(threads)?;
    let mut state = tf32_of_process();
    if state.makes_wait(tf32) {
        state.waiting += 1;
        let waited = NONE_LEFT.wait_while(state, |state| state.keeps_out(tf32));
        state = waited.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
    }
    if state.allowed != tf32 {
        shim::allow_tf32(tf32)
            .map_err(|reason| Error::Engine { what: "libtorch's TF32".to_owned(), reason })?;
        state.allowed = tf32;
    }
    state.computations += 1;
    Ok(Computation(()))
}

impl Drop for Computation {
    fn drop(&mut self) {
        let mut state = tf32_of_process();
        state.computations -= 1;
        if state.computations == 0 {
            // A network of the program's own may compute without asking for TF32.
            if state.allowed && shim::allow_tf32(false).is_ok() {
                state.allowed = false;
            }
            NONE_LEFT.notify_all();
        }
    }
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

    /// Waits until nobody computes. As long as the answer lives, nobody begins.
    fn nobody() -> MutexGuard<'static, Tf32> {
        NONE_LEFT.wait_while(tf32_of_process(), |state| state.computations > 0).unwrap()
    }

    #[test]
    fn no_switch_lets_a_gpu_round_or_choose_as_it_likes() {
        start().unwrap();
        let _nobody_begins = nobody();
        // What PyTorch has for cuDNN.
        shim::allow_tf32(true).unwrap();
        shim::settings().unwrap();
        let on = ["cudnn deterministic", "deterministic", "onednn deterministic", "autocast cache"];
        for (name, is_on) in shim::switches() {
            assert_eq!(is_on, on.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn tf32_is_on_for_the_computations_of_a_job_that_allows_it_and_for_no_other() {
        start().unwrap();
        let is_on = || {
            let switches = shim::switches();
            [switches["cublas tf32"], switches["cudnn tf32"]]
        };
        let one = compute(1, true).unwrap();
        assert_eq!(is_on(), [true, true]);
        std::thread::scope(|scope| {
            let begin = |tf32| {
                scope.spawn(move || {
                    let _computation = compute(1, tf32).unwrap();
                    is_on()
                })
            };
            let without = begin(false);
            while tf32_of_process().waiting == 0 && !without.is_finished() {
                std::thread::yield_now();
            }
            let behind = begin(true);
            assert_eq!(is_on(), [true, true], "a computation is left");
            drop(one);
            assert_eq!(without.join().unwrap(), [false, false]);
            assert_eq!(behind.join().unwrap(), [true, true]);
        });
        drop(compute(1, true).unwrap());
        let _nobody_begins = nobody();
        assert_eq!(is_on(), [false, false], "for code that does not ask");
    }

    #[test]
    fn computations_wait_for_others_with_another_tf32_and_behind_those_that_wait() {
        let state = |allowed, computations, waiting| Tf32 { allowed, computations, waiting };
        for tf32 in [false, true] {
            assert!(!state(!tf32, 0, 0).makes_wait(tf32) && !state(tf32, 3, 0).makes_wait(tf32));
            assert!(!state(!tf32, 0, 2).makes_wait(tf32), "nobody runs, so one may begin");
            assert!(state(!tf32, 1, 0).makes_wait(tf32) && state(tf32, 1, 1).makes_wait(tf32));
            assert!(!state(tf32, 1, 1).keeps_out(tf32), "who waits runs beside its equals");
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

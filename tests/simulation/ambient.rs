//! Randomness and time as functions of the seed, in place of the operating system's.
//!
//! Libraries below us draw from the operating system: the keys of hash maps, and from them the
//! order in which tokio's `select!` looks at its branches; and `Instant::now` in hyper and h2. This
//! program brings its own `getrandom` and `clock_gettime`, which the linker prefers to the C
//! library's. Once a seed is [entered](enter), the simulating thread gets keyed numbers and the
//! simulated time. All other threads, and earlier calls, get the real ones.
#![expect(unsafe_code, reason = "replaces two functions of the C library")]

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ebbflow::random::Keyed;
use libc::{c_int, c_uint, c_void, clockid_t, size_t, ssize_t, timespec};
use rustix::process::{Resource, Rlimit, setrlimit};

/// Wall clock at the beginning of every simulation: 2026-01-01.
const EPOCH: Duration = Duration::from_secs(1_767_225_600);

/// Steady clock at the beginning of every simulation. It is large enough to subtract from.
const START: Duration = Duration::from_secs(1_000_000);

/// Most time of the processor for one simulation. It ends a task that never yields, and no
/// simulation that waits for a processor.
const STUCK_SECS: u64 = 300;

thread_local! {
    static RANDOM: RefCell<Option<Keyed>> = const { RefCell::new(None) };
    /// Steady clock and wall clock.
    static TIME: Cell<Option<(Duration, Duration)>> = const { Cell::new(None) };
}

/// Moves this thread into the simulation of `seed`. The process ends with it: tokio counts its
/// runtimes in a global, so that only the first simulation of a process repeats itself.
pub(crate) fn enter(seed: u64) {
    assert!(TIME.get().is_none(), "one simulation a process");
    RANDOM.set(Some(Keyed::new(seed, "ambient", 0)));
    TIME.set(Some((START, EPOCH)));
    let limit = Rlimit { current: Some(STUCK_SECS), maximum: Some(STUCK_SECS) };
    setrlimit(Resource::Cpu, limit).expect("a process may limit itself");
}

/// Advances both clocks.
pub(crate) fn advance(by: Duration) {
    let (steady, wall) = TIME.get().expect("a simulation");
    TIME.set(Some((steady + by, wall + by)));
}

/// Sets the wall clock to another time.
pub(crate) fn jump(to: impl FnOnce(Duration) -> Duration) {
    let (steady, wall) = TIME.get().expect("a simulation");
    TIME.set(Some((steady, to(wall))));
}

/// Returns the simulated time since the simulation began.
pub(crate) fn elapsed() -> Duration {
    TIME.get().map_or(Duration::ZERO, |(steady, _)| steady - START)
}

/// Replaces the C library's `getrandom`.
///
/// # Safety
/// `buffer` points to `len` writable bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut c_void, len: size_t, flags: c_uint) -> ssize_t {
    let keyed = RANDOM.try_with(|random| {
        let mut random = random.borrow_mut();
        let Some(keyed) = random.as_mut() else { return false };
        for at in 0..len {
            // SAFETY: `at` is below `len`, and the caller owns that many bytes.
            unsafe { buffer.cast::<u8>().add(at).write(keyed.next_u64() as u8) };
        }
        true
    });
    match keyed {
        Ok(true) => len as ssize_t,
        // SAFETY: the same arguments, which the caller guarantees.
        _ => unsafe { libc::syscall(libc::SYS_getrandom, buffer, len, flags) as ssize_t },
    }
}

/// Replaces the C library's `clock_gettime`.
///
/// # Safety
/// `now` points to a writable `timespec`.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: clockid_t, now: *mut timespec) -> c_int {
    let Some((steady, wall)) = TIME.try_with(Cell::get).ok().flatten() else {
        // SAFETY: the same arguments, which the caller guarantees.
        return unsafe { libc::syscall(libc::SYS_clock_gettime, clock, now) as c_int };
    };
    let time = if clock == libc::CLOCK_REALTIME { wall } else { steady };
    let spec = timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    // SAFETY: the caller owns it.
    unsafe { now.write(spec) };
    0
}

//! Settings of the two allocators: mimalloc for Rust, the C library's for libtorch. They keep free
//! memory for longer, in huge pages where the system permits them.
#![expect(
    unsafe_code,
    reason = "the allocators' options are C functions, and an environment variable is libtorch's"
)]

use std::ffi::c_long;

/// `mi_option_purge_delay` of mimalloc.h.
const PURGE_DELAY: i32 = 15;

/// Time after which mimalloc returns free memory to the system, in milliseconds. When it is over,
/// mimalloc returns everything that is free then, so it must be long compared with a step.
const KEPT_MS: c_long = 60_000;

/// Time after which it does so where memory is scarce. Decoding 256 MiB of tables then takes half a
/// GiB instead of one.
const KEPT_MS_IF_SCARCE: c_long = 100;

/// Memory is scarce where a process may use less than this, in bytes.
const SCARCE: u64 = 4 << 30;

/// The variable by which libtorch asks the system for huge pages, for tensors of 2 MiB and more
/// (`c10/core/impl/alloc_cpu.cpp`).
const HUGE_PAGES: &str = "THP_MEM_ALLOC_ENABLE";

/// Keeps free memory for a minute instead of a second, and libtorch's for good. `memory` is what
/// the process may use, in bytes: below 4 GiB it keeps free memory for 0.1 s.
///
/// Each step receives and sends the whole model in memory that the step before gave back. If the
/// system took this memory meanwhile, the system must clear every page of it again, which took a
/// third of the time of a receiving thread. `MIMALLOC_PURGE_DELAY` (milliseconds) in the
/// environment wins.
///
/// Call this function before the process has threads.
///
/// In each microbatch libtorch takes and frees memory for the results and gradients of every layer.
/// The C library asks the system for each large piece, and takes the memory of threads from heaps
/// that shrink again. This took a fifth of the time of a small convolutional network, and more with
/// two workers in one process, which then wait for each other in the kernel. One heap that never
/// shrinks avoids it. `GLIBC_TUNABLES` in the environment wins for each of the three settings that
/// it names.
///
/// libtorch's large tensors get huge pages if the system permits them: 2 % of the network's time
/// went into looking up small pages. `THP_MEM_ALLOC_ENABLE=0` in the environment prevents it.
pub fn keep_free_memory(memory: u64) {
    // SAFETY: takes two numbers; not thread-safe, and there are no threads yet. Without mimalloc it
    // has no effect.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, kept_ms(memory)) }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    keep_free_memory_of_c();
    if !crate::config::is_set(HUGE_PAGES) {
        ask_for_huge_pages();
    }
}

const fn kept_ms(memory: u64) -> c_long {
    if memory < SCARCE { KEPT_MS_IF_SCARCE } else { KEPT_MS }
}

#[expect(
    clippy::disallowed_methods,
    reason = "libtorch has no other way, and nobody reads the environment yet"
)]
fn ask_for_huge_pages() {
    // SAFETY: there are no threads that read the environment.
    unsafe { std::env::set_var(HUGE_PAGES, "1") }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_free_memory_of_c() {
    let named = crate::config::c_tunables();
    let options = [
        ("glibc.malloc.arena_max", libc::M_ARENA_MAX, 1),
        ("glibc.malloc.mmap_max", libc::M_MMAP_MAX, 0),
        ("glibc.malloc.trim_threshold", libc::M_TRIM_THRESHOLD, i32::MAX),
    ];
    for (_, option, value) in options.into_iter().filter(|(name, ..)| !named.contains(name)) {
        // SAFETY: takes two numbers. What it refuses stays as it was: slower.
        let _ = unsafe { libc::mallopt(option, value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other tests of this program have threads already, and the C library gave them heaps.
    #[test]
    fn the_options_are_those_that_they_should_be() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let name = concat!(module_path!(), "::alone").split_once("::").unwrap().1;
        let output = alone.args(["--exact", name, "--ignored", "--test-threads=1"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "the test above runs it in a process of its own"]
    fn alone() {
        // SAFETY: takes a number.
        let now = || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        assert_eq!(now(), 1000, "mimalloc's own");
        keep_free_memory(u64::MAX);
        assert_eq!(now(), KEPT_MS);
        assert_eq!((kept_ms(1 << 30), kept_ms(SCARCE)), (KEPT_MS_IF_SCARCE, KEPT_MS));

        // The test's thread was there before the options, as no thread of a process of ours is.
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        std::thread::spawn(|| {
            // SAFETY: takes nothing; what malloc gives is freed.
            unsafe {
                let mapped = libc::mallinfo2().hblks;
                // The optimiser removes memory that nobody looks at.
                let memory = std::hint::black_box(libc::malloc(256 << 20));
                assert!(!memory.is_null());
                assert_eq!(libc::mallinfo2().hblks, mapped, "it is of the heap");
                libc::free(memory);
            }
        })
        .join()
        .unwrap();
    }
}

//! How long the allocators keep memory that is free: mimalloc, which is Rust's, and the C library's, which is libtorch's. And in which pages.
#![expect(
    unsafe_code,
    reason = "the allocators' options are C functions, and an environment variable is libtorch's"
)]

use std::ffi::c_long;

/// `mi_option_purge_delay` of mimalloc.h.
const PURGE_DELAY: i32 = 15;

/// Milliseconds. mimalloc gives back at once all that is free when this time is over, however short it has been free, so it is to be long
/// beside a step.
const KEPT_MS: c_long = 60_000;

/// Whether libtorch asks the system for huge pages, for tensors of 2 MiB and more (`c10/core/impl/alloc_cpu.cpp`).
const HUGE_PAGES: &str = "THP_MEM_ALLOC_ENABLE";

/// Memory that is free goes back to the system after a minute instead of a second, and libtorch's not at all.
///
/// Each step receives and sends the whole model in memory that the step before gave back. When the system has taken it meanwhile, it has to
/// clear every page of it again, which took a third of the time of a thread that receives. The environment's `MIMALLOC_PURGE_DELAY`
/// (milliseconds) counts more. To be called before there are threads.
///
/// libtorch takes memory for the results and gradients of every layer, and gives it back, in each microbatch. The C library asks the system for
/// each that is large, and takes that of threads from heaps that it shrinks again: a fifth of a small convolutional network's time, more
/// with two workers in one process, which then wait for each other in the kernel. One heap that does not shrink has none of that. The
/// environment's `GLIBC_TUNABLES` counts more where it names one of the three.
///
/// And libtorch's large tensors have huge pages, where the system allows a program to ask for them: 2 % of that network's time went into looking up
/// small ones. `THP_MEM_ALLOC_ENABLE=0` in the environment is without.
pub fn keep_free_memory() {
    // SAFETY: takes two numbers; not thread-safe, and there are no threads yet. Where another allocator is in use nothing comes of it.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, KEPT_MS) }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    keep_free_memory_of_c();
    if !crate::config::is_set(HUGE_PAGES) {
        ask_for_huge_pages();
    }
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

    #[test]
    fn the_options_are_those_that_they_should_be() {
        // SAFETY: takes a number.
        let now = || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        assert_eq!(now(), 1000, "mimalloc's own");
        keep_free_memory();
        assert_eq!(now(), KEPT_MS);

        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        // SAFETY: takes nothing; what malloc gives is freed.
        unsafe {
            let mapped = libc::mallinfo2().hblks;
            let memory = libc::malloc(256 << 20);
            assert!(!memory.is_null());
            assert_eq!(libc::mallinfo2().hblks, mapped, "it is of the heap");
            libc::free(memory);
        }
    }
}

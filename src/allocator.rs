//! How long the allocator keeps memory that is free.
#![expect(unsafe_code, reason = "the allocator's options are C functions")]

use std::ffi::c_long;

/// `mi_option_purge_delay` of mimalloc.h.
const PURGE_DELAY: i32 = 15;

/// Milliseconds. mimalloc gives back at once all that is free when this time is over, however short it has been free, so it is to be long
/// beside a step.
const KEPT_MS: c_long = 60_000;

/// Memory that is free goes back to the system after a minute instead of a second.
///
/// Each step receives and sends the whole model in memory that the step before gave back. When the system has taken it meanwhile, it has to
/// clear every page of it again, which took a third of the time of a thread that receives. The environment's `MIMALLOC_PURGE_DELAY`
/// (milliseconds) counts more. To be called before there are threads.
pub fn keep_free_memory() {
    // SAFETY: takes two numbers; not thread-safe, and there are no threads yet. Where another allocator is in use nothing comes of it.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, KEPT_MS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_is_the_one_that_it_should_be() {
        // SAFETY: takes a number.
        let now = || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        assert_eq!(now(), 1000, "mimalloc's own");
        keep_free_memory();
        assert_eq!(now(), KEPT_MS);
    }
}

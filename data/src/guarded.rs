//! Decoders of other projects, which may panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls a decoder of another project that may panic on damaged bytes.
///
/// # Errors
/// The error of the decoder, or its panic.
pub(crate) fn guarded<T, E: ToString>(decode: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(decode)) {
        Ok(decoded) => decoded.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(text.unwrap_or("the decoder gave up").to_owned())
        }
    }
}

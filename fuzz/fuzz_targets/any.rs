//! One decoder for libFuzzer. All programs are this file, and their names say which decoder it is.
//!
//! libfuzzer-sys ends the process at each panic. But decoders of other projects may panic where
//! ours catch it and refuse the bytes. So only a panic that leaves the decoder ends the process
//! here.
#![no_main]

#[path = "../../tests/fuzz/messages.rs"]
mod messages;
#[path = "../../tests/fuzz/targets.rs"]
mod targets;

use std::backtrace::Backtrace;
use std::panic::catch_unwind;
use std::sync::{LazyLock, Mutex, PoisonError};

/// The decoder of this program.
static TARGET: LazyLock<data::fuzz::Target> = LazyLock::new(|| {
    let name = env!("CARGO_BIN_NAME");
    match targets::all().into_iter().find(|(known, _)| *known == name) {
        Some((_, decode)) => decode,
        None => panic!("tests/fuzz/targets.rs has no target {name}"),
    }
});

/// The last panic, and where it was.
static PANIC: Mutex<String> = Mutex::new(String::new());

libfuzzer_sys::fuzz_target!(
    init: {
        LazyLock::force(&TARGET);
        std::panic::set_hook(Box::new(|panic| {
            *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = format!("{panic}\n{}", Backtrace::capture());
        }));
    },
    |bytes: &[u8]| {
        if catch_unwind(|| (*TARGET)(bytes)).is_err() {
            eprintln!("{}", PANIC.lock().unwrap_or_else(PoisonError::into_inner));
            std::process::abort();
        }
    }
);

//! One decoder for libFuzzer. All programs are this file, and their names say which decoder it is.
#![no_main]

#[path = "../../tests/fuzz/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let name = env!("CARGO_BIN_NAME");
    match targets::all().into_iter().find(|(known, _)| *known == name) {
        Some((_, decode)) => {
            decode(bytes);
        }
        None => panic!("tests/fuzz/targets.rs has no target {name}"),
    }
});

//! The job of `examples/digits` at a pace that leaves tests time for their faults.
//!
//! Each microbatch takes a fixed time, and its worker sleeps for most of it. So a job of few steps
//! still trains when a fault meets it, on a fast machine and on a busy one. The bits are those of
//! the example.

use std::path::PathBuf;

/// Settings of the job, for processes of [`program`]: 10 ms for each microbatch.
pub const PACED: [&str; 2] =
    ["model.builtin=paced", r#"model.options={ of = "mlp", millis = 10, hidden = [128] }"#];

/// Arguments with settings of a pace for platforms that are slow themselves: 40 ms for each of the
/// four microbatches of a step.
pub const SLOW: [&str; 4] =
    ["--set", "model.builtin=paced", "--set", r#"model.options={ of = "mlp", millis = 40, hidden = [128] }"#];

/// Returns the path of `ebb` with the network `paced`.
pub fn program() -> PathBuf {
    super::example("oracle")
}

/// Returns arguments with these settings of the job and those of its pace.
pub fn arguments<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().chain(&PACED).flat_map(|set| ["--set", set]).collect()
}

//! Reaches: each weight of `counts` ends as the number of times its record was applied.
//!
//! `ebb` with one more network, the counting oracle: what the tests that kill real processes train, and a way to see for
//! yourself that no record is lost or applied twice on your own cluster. See `docs/guarantees.md`.

use std::process::ExitCode;

#[path = "../tests/simulation/model.rs"]
mod model;

fn main() -> ExitCode {
    ebbflow::main(model::registry())
}

//! Reaches: each weight of `counts` ends as the number of times its record was applied.
//!
//! `ebb` with two more networks: the counting oracle, what the tests that kill real processes train, and a way to see for
//! yourself that no record is lost or applied twice on your own cluster; and `paced`, which takes its time. See
//! `docs/guarantees.md`.

use std::process::ExitCode;

#[path = "../tests/simulation/model.rs"]
mod model;
#[path = "../tests/harness/paced.rs"]
mod paced;

fn main() -> ExitCode {
    ebbflow::main(paced::with_paced(model::registry(model::CLASSES[0])))
}

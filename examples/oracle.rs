//! Reaches: each weight of `counts` ends as the number of times its record was applied.
//!
//! The program is `ebb` with two more networks. The counting oracle is the network of tests that
//! kill real processes. It also shows on your own cluster that no record is lost or applied twice.
//! `paced` takes a fixed time for each microbatch. See `docs/guarantees.md`.

use std::process::ExitCode;

#[path = "../tests/simulation/model.rs"]
mod model;
#[path = "../tests/harness/paced.rs"]
mod paced;

fn main() -> ExitCode {
    ebbflow::main(paced::with_paced(model::registry(model::CLASSES[0])))
}

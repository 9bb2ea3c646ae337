//! The program `ebb`: Ebbflow's command line with its own networks.

use std::process::ExitCode;

/// Keeps the pages of freed weights and gradients for the next ones. The system's allocator would
/// return these pages and fault them in again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    ebbflow::main(ebbflow::model::Registry::default())
}

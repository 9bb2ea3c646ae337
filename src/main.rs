//! The program `ebb`: Ebbflow's command line with its own networks.

use std::process::ExitCode;

/// Keeps pages between the large buffers of weights and gradients; the system's allocator returns and faults them in again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    ebbflow::main(ebbflow::model::Registry::default())
}

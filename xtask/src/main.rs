//! Project chores, as `cargo xtask CHORE`: what a newcomer, a maintainer and the CI type, with
//! nothing to install first but Rust, a C++ compiler and Python 3 with pip.

mod bench;
mod check;
mod gpu;
mod install;
mod libtorch;
mod mutants;
mod needs;
mod run;
mod sim;
mod soak;
mod workspace;

use clap::Parser;
use std::process::ExitCode;

/// Project chores.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask", version, max_term_width = 100)]
enum Chore {
    Libtorch(libtorch::Args),
    Run(run::Args),
    Test(check::Args),
    Sim(sim::Args),
    Mutants(mutants::Args),
    Soak(soak::Args),
    Bench(bench::Args),
    Gpu(gpu::Args),
}

fn main() -> ExitCode {
    let result = match Chore::parse() {
        Chore::Libtorch(args) => libtorch::run(&args),
        Chore::Run(args) => run::run(&args),
        Chore::Test(args) => check::run(&args),
        Chore::Sim(args) => sim::run(&args),
        Chore::Mutants(args) => mutants::run(&args),
        Chore::Soak(args) => soak::run(&args),
        Chore::Bench(args) => bench::run(&args),
        Chore::Gpu(args) => gpu::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

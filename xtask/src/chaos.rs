//! `cargo xtask chaos`: real processes killed, stopped, drained and added, the whole matrix of scenarios.

use anyhow::{Result, bail};

use crate::{libtorch, workspace};

/// Run real clusters under chaos: {sync, pipelined} x {3, 5 workers} x {1, 2, 3 ps} against undisturbed runs, and the
/// counting oracle in all four modes.
///
/// 16 scenarios, 20 to 35 minutes on 2 cores. Prints a line for each: what was done to the workers, what the job counted, the
/// model's hash. The bits are those of MNIST's script model; where its data is not found (EBB_MNIST_DIR, examples/mnist/data) those
/// of digits' MLP, and then it says so.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which faults in which order; when exactly they meet the job is the machine's choice
    #[arg(long, value_name = "S", default_value_t = 7)]
    seed: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    libtorch::ensure_installed()?;
    eprintln!("chaos: 16 scenarios, 20 to 35 minutes on 2 cores, once everything is built");
    // As the whole check does it, so that nothing is compiled twice.
    let mut build = workspace::cargo();
    build.args(["build", "--workspace", "--examples", "--tests"]).current_dir(workspace::root());
    if !build.status()?.success() {
        bail!("it does not build");
    }
    let mut command = workspace::cargo();
    command
        .args(["test", "--workspace", "--test", "chaos", "--", "--nocapture", "--test-threads", "1"])
        .env("EBB_CHAOS_WHOLE", "1")
        .env("EBB_CHAOS_SEED", args.seed.to_string())
        .current_dir(workspace::root());
    if !command.status()?.success() {
        bail!("a promise is broken, or a job was too short; the lines above say which (seed {})", args.seed);
    }
    Ok(())
}

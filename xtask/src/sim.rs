//! `cargo xtask sim`: whole clusters in one thread, one for each seed.

use anyhow::{Result, bail};

use crate::{check::programs::WITHOUT_TORCH, workspace};

/// Simulate whole clusters with faults, one for each seed; prints the seed of a failure, which
/// replays it exactly.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many seeds
    #[arg(long, value_name = "N", default_value_t = 300)]
    seeds: u64,
    /// The first seed; with `--seeds 1` it replays one run, with its log. Without it: new seeds,
    /// beside those that failed once
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut command = workspace::cargo();
    // As the whole check does it, so that nothing is compiled twice.
    command
        .arg("test")
        .args(WITHOUT_TORCH.split(' '))
        .args(["--test", "simulation", "--", "--nocapture", "seeds"])
        .env("EBB_SIM_SEEDS", args.seeds.to_string())
        .envs(args.seed.map(|seed| ("EBB_SIM_SEED", seed.to_string())))
        .current_dir(workspace::root());
    if !command.status()?.success() {
        bail!("a simulation failed; the seed is printed above");
    }
    Ok(())
}

//! Whole clusters in one thread, each from one seed: the real master, ps and worker code, a
//! simulated network and clock, and faults. `cargo xtask sim --seeds N [--seed S]` runs more of
//! them, or repeats one with its log.
//!
//! A seed fixes everything: two runs do the same in the same order. Libraries below us draw random
//! numbers, read clocks and count in globals. So each seed is a process of its own, whose
//! randomness and time derive from the seed (`ambient.rs`).
//!
//! Checked while it runs (`checks.rs`, `store.rs`):
//!
//! - A partition applies each step once, one version after the other.
//! - No gradient is accepted from another era, or before the weights from which it may be computed.
//! - A pull gets the version it names, and never an older one than before.
//! - A lease that ended is never accepted as done, and no microbatch is done twice.
//! - No process works for a job whose end a user has seen, and no claim in the name of another
//!   process is accepted.
//! - A ps holds nothing that the journal does not know, no more versions than it must and no more
//!   pushes than it may.
//! - Every checkpoint with a manifest can be read whole, when it is published and for as long as it
//!   is kept.
//!
//! Checked at the end (`run.rs`):
//!
//! - The jobs finish once faults stop.
//! - Every record is applied once per epoch (the counting oracle). Bad records are not: exactly
//!   they are skipped, and the job says so.
//! - Canonical runs end with the bits of a serial loop in one numerics class, and so does every
//!   checkpoint that was ever published.
//! - Each epoch is evaluated once, and no step is reported twice without a rewind.
//! - A run without a lost ps has no rewind.
//! - A run without faults of processes and networks ends no lease early, not even that of a worker
//!   that hangs.
//! - A job whose ps do not share a store says so and publishes nothing.
//! - The numbers of the summary are right, also after one more restart of the master.
//! - The ps hold nothing of jobs that have ended.
//!
//! A simulation that finds nothing may be blind: `cargo xtask mutants` breaks the program on
//! purpose, and shows what it finds.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(clippy::disallowed_methods, reason = "seeds come from the command line through the environment")]
#![cfg(target_os = "linux")]

mod ambient;
mod checks;
mod cluster;
mod faults;
mod journal;
mod liar;
mod model;
mod plan;
mod run;
mod seeds;
mod serial;
mod store;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Seeds that broke a promise once. A change of the code may send them another way, so what they
/// showed has a unit test too.
const BROKE_ONCE: [u64; 19] = [
    771_234_673,
    2_000_007,
    3_000_054,
    5_000_068,
    829_776_418,
    1182,
    731_000_054,
    731_000_256,
    731_000_588,
    1_795_429_693,
    395_368_330,
    667_911_496,
    3_674_817_053,
    3_674_817_189,
    1_124_145_786,
    1_827_235_500,
    1_827_238_441,
    887_792_746,
    415_768_414,
];

/// Returns the first seed: the requested one, or one that no run had before.
fn base() -> u64 {
    number("EBB_SIM_SEED").unwrap_or_else(|| RandomState::new().build_hasher().finish() % 1_000_000_000)
}

#[test]
fn seeds_keep_both_promises() {
    let (first, count) = (base(), number("EBB_SIM_SEEDS").unwrap_or(100));
    println!(
        "seeds {first} to {}; these again: cargo xtask sim --seeds {count} --seed {first}",
        first + count - 1
    );
    let kept = match (number("EBB_SIM_SEED"), count) {
        (Some(seed), 1) => seeds::replay(seed),
        (Some(_), _) => seeds::survey(first..first + count),
        (None, _) => seeds::survey(BROKE_ONCE.into_iter().chain(first..first + count)),
    };
    kept.unwrap_or_else(|broken| panic!("{broken}"));
}

#[test]
fn a_seed_does_the_same_in_the_same_order_again() {
    let (first, count) = (base(), number("EBB_SIM_TWICE").unwrap_or(10));
    let mut outcomes = BTreeMap::new();
    let twice = (first..first + count).chain(first..first + count);
    let run = seeds::run(twice, |outcome| {
        if let Some(before) = outcomes.get(&outcome.seed) {
            assert_eq!(&outcome, before, "seed {} went another way", outcome.seed);
        }
        outcomes.insert(outcome.seed, outcome);
    });
    run.unwrap_or_else(|broken| panic!("{broken}"));
    let mut digests: Vec<_> = outcomes.values().map(|outcome| outcome.digest).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len() as u64, count, "other seeds go other ways");
}

/// Begins a process of [`seeds`]. Without a seed there is nothing to do.
#[test]
fn one_seed() {
    if let Some(seed) = number(seeds::ONE) {
        seeds::tell(&run::run(seed, std::env::var_os(seeds::LOG).is_some()));
    }
}

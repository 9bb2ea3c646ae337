//! Damaged bytes for each decoder of bytes from outside (`targets.rs`): it may refuse them, but it
//! must neither panic nor take more memory than its bound.
//!
//! Without settings the inputs are the same in each run. `cargo xtask soak --only fuzz` runs for
//! longer, from another seed. A failure prints how to do one input again. These variables of the
//! environment are settings:
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `EBB_FUZZ_SEED` | seed of all inputs | 1; a new one with `EBB_FUZZ_SECONDS` |
//! | `EBB_FUZZ_SECONDS` | time for all targets together | 300 inputs for each target |
//! | `EBB_FUZZ_TARGET` | the only target | all |
//! | `EBB_FUZZ_ITERATION` | the only input | all |
//! | `EBB_FUZZ_SEEDS` | folder to which the good inputs are written | none |
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(clippy::disallowed_methods, reason = "settings come from the command line through the environment")]

mod memory;
mod messages;
mod mutate;
mod seeds;
mod targets;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use proto::random::Keyed;

use targets::Target;

/// Inputs of each target, without a time.
const INPUTS: u64 = 300;

/// Memory of a decoder that keeps what it reads, for an input of some bytes.
const PLAIN: Bound = Bound { fixed: 4 << 20, each: 512 };

/// Memory of decoders that are not [`PLAIN`].
const BOUNDS: [(&str, Bound); 12] = [
    // An array of pixels may be said to be large: 2^26 pixels with 4 channels, and a copy with 3. A
    // decoder of PNG or WebP may take half a gigabyte beside them.
    ("jpeg", Bound { fixed: 1 << 30, each: 64 }),
    ("png", Bound { fixed: 1 << 30, each: 64 }),
    ("webp", Bound { fixed: 1 << 30, each: 64 }),
    // Deflate makes 1032 bytes of one, and a growing vector doubles.
    ("npz", Bound { fixed: 4 << 20, each: 4096 }),
    // A block of Zstandard makes 128 KiB of 4 bytes.
    ("packed", Bound { fixed: 4 << 20, each: 128 << 10 }),
    // A page that announces more than 65,536 times its compressed bytes, or more than
    // `data_memory`, is refused before it is decoded. A column has a page at hand, and one with its
    // dictionary.
    ("parquet", Bound { fixed: 64 << 20, each: 128 << 10 }),
    // A compressed array may become 65,536 times as large.
    ("arrow", Bound { fixed: 4 << 20, each: 128 << 10 }),
    // A description of a job is checked with all its defaults and hints.
    ("job_file", Bound { fixed: 16 << 20, each: 2048 }),
    ("manifest_with_checksum", Bound { fixed: 16 << 20, each: 2048 }),
    ("open", Bound { fixed: 16 << 20, each: 2048 }),
    ("record", Bound { fixed: 16 << 20, each: 2048 }),
    // A file may fill up each part of a text to 2^20 tokens of 100 bytes.
    ("tokenizer", Bound { fixed: 4 << 30, each: 4096 }),
];

/// Most bytes that a decoder holds at once.
#[derive(Clone, Copy, Debug)]
struct Bound {
    /// Bytes for any input.
    fixed: usize,
    /// Bytes for each byte of the input.
    each: usize,
}

impl Bound {
    fn of(target: &str) -> Self {
        BOUNDS.iter().find(|(name, _)| *name == target).map_or(PLAIN, |(_, bound)| *bound)
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Runs one input of a target.
///
/// # Errors
/// It panics or takes too much memory: what happened, and how to do it again.
fn run((name, decode): Target, inputs: &[Vec<u8>], seed: u64, iteration: u64) -> Result<(), String> {
    let bytes = mutate::mutated(inputs, &mut Keyed::new(seed, name, iteration));
    let mut outcome = Ok(false);
    let held = memory::most(name, seed, iteration, || {
        outcome = catch_unwind(AssertUnwindSafe(|| decode(&bytes)));
    });
    let Bound { fixed, each } = Bound::of(name);
    let most = fixed + each * bytes.len();
    let what = match outcome {
        Err(_) => "it panics".to_owned(),
        Ok(_) if held > most => format!("it takes {held} bytes of memory, at most {most}"),
        Ok(_) => return Ok(()),
    };
    Err(format!(
        "target {name}, an input of {} bytes: {what}\nagain: EBB_FUZZ_TARGET={name} EBB_FUZZ_SEED={seed} \
         EBB_FUZZ_ITERATION={iteration} cargo test --workspace --no-default-features --test fuzz -- --nocapture",
        bytes.len()
    ))
}

#[test]
fn decoders_of_damaged_bytes_neither_panic_nor_take_unbounded_memory() {
    let only = std::env::var("EBB_FUZZ_TARGET").ok();
    let targets =
        targets::all().into_iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name));
    let targets: Vec<Target> = targets.collect();
    assert!(!targets.is_empty(), "no target {only:?}; there are {:?}", names());
    let time = number("EBB_FUZZ_SECONDS").map(|seconds| Duration::from_secs(seconds) / targets.len() as u32);
    let fresh =
        || if time.is_some() { RandomState::new().build_hasher().finish() % 1_000_000_000 } else { 1 };
    let seed = number("EBB_FUZZ_SEED").unwrap_or_else(fresh);
    println!("seed {seed}");
    let folder = tempfile::tempdir().unwrap();
    let seeds = seeds::all(folder.path());
    if let Some(kept) = std::env::var_os("EBB_FUZZ_SEEDS") {
        keep(Path::new(&kept), &seeds);
    }
    let mut failures = Vec::new();
    for target in targets {
        let (inputs, began) = (&seeds[target.0], Instant::now());
        let iterations = match number("EBB_FUZZ_ITERATION") {
            Some(one) => one..one + 1,
            None => 0..if time.is_some() { u64::MAX } else { INPUTS },
        };
        let mut done = 0;
        for iteration in iterations {
            if time.is_some_and(|time| began.elapsed() > time) {
                break;
            }
            if let Err(failure) = run(target, inputs, seed, iteration) {
                failures.push(failure);
                break;
            }
            done += 1;
        }
        println!("{:24} {done} inputs in {:.1} s", target.0, began.elapsed().as_secs_f64());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn good_inputs_are_those_of_all_targets_and_are_decoded() {
    let folder = tempfile::tempdir().unwrap();
    let seeds = seeds::all(folder.path());
    let mut known = names();
    known.sort_unstable();
    assert_eq!(seeds.keys().copied().collect::<Vec<_>>(), known);
    let mut refused = Vec::new();
    for target in targets::all() {
        assert!(!seeds[target.0].is_empty(), "{} has no good input", target.0);
        for (number, input) in seeds[target.0].iter().enumerate() {
            assert!(input.len() > 4, "{}: {input:?}", target.0);
            let mut is_read = false;
            let held = memory::most(target.0, 0, 0, || is_read = (target.1)(input));
            if !is_read {
                refused.push((target.0, number));
            }
            let Bound { fixed, each } = Bound::of(target.0);
            assert!(held <= fixed + each * input.len(), "{}: {held} bytes", target.0);
        }
    }
    assert!(refused.is_empty(), "good inputs that were refused, by target and number: {refused:?}");
}

#[test]
fn cargo_fuzz_has_a_program_for_each_target() {
    let manifest =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/Cargo.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let programs = manifest["bin"].as_array().unwrap().iter();
    let mut programs: Vec<_> = programs.map(|program| program["name"].as_str().unwrap()).collect();
    let mut known = names();
    programs.sort_unstable();
    known.sort_unstable();
    assert_eq!(programs, known);
}

#[test]
fn a_panic_and_an_allocation_without_a_bound_are_found() {
    let inputs = [vec![0; 9]];
    let found = |decode: fn(&[u8]) -> bool| {
        (0..5000)
            .find_map(|iteration| run(("tokens", decode), &inputs, 1, iteration).err())
            .unwrap_or_default()
    };
    let message = found(|bytes| {
        assert!(bytes.first() != Some(&255), "a defect");
        true
    });
    assert!(
        message.contains("it panics") && message.contains("EBB_FUZZ_TARGET=tokens EBB_FUZZ_SEED=1"),
        "{message}"
    );
    let message = found(|bytes| {
        let length = bytes.first().map_or(0, |&length| usize::from(length) << 20);
        std::hint::black_box(vec![1u8; length]).is_empty()
    });
    assert!(message.contains("bytes of memory, at most"), "{message}");
    assert_eq!(found(|_| false), "");
}

fn names() -> Vec<&'static str> {
    targets::all().into_iter().map(|(name, _)| name).collect()
}

/// Writes good inputs as a corpus of libFuzzer: a folder for each target.
fn keep(folder: &Path, seeds: &BTreeMap<&'static str, Vec<Vec<u8>>>) {
    for (name, inputs) in seeds {
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        for (number, input) in inputs.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{number}")), input).unwrap();
        }
    }
}

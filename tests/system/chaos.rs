//! Both promises with real processes: workers are killed, stopped, drained and added at random
//! while a job runs.
//!
//! Every run checks what must hold. The machine's speed decides whether the faults met the job's
//! work. If they did not, the job was too short, and the scenario runs again with one that is twice
//! as long.
//!
//! `cargo xtask test` runs one scenario of each mode. `cargo xtask soak --only chaos` runs all of
//! {sync, pipelined} x {3, 5 workers} x {1, 2, 3 ps}, and longer. There the bits are those of
//! MNIST's script model where libtorch and the data exist, else of digits' MLP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::harness::chaos::{Chaos, Fault};
use crate::harness::oracle::Oracle;
use crate::harness::{self, Cluster, Lacks, digits, mnist, mnist_sets, model, root, skipped, summary, text};

/// One job under chaos.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    mode: &'static str,
    workers: usize,
    ps: usize,
}

const fn scenario(mode: &'static str, workers: usize, ps: usize) -> Scenario {
    Scenario { mode, workers, ps }
}

/// Settings of this run of the tests.
struct Asked {
    whole: bool,
    seed: u64,
}

impl Asked {
    #[expect(clippy::disallowed_methods, reason = "the chore's wishes come through the environment")]
    fn read() -> Self {
        let seed = std::env::var("EBB_CHAOS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
        Self { whole: std::env::var_os("EBB_CHAOS_WHOLE").is_some(), seed }
    }

    /// Returns the whole matrix of a mode, or only the scenario `one`.
    fn scenarios(&self, one: Scenario) -> Vec<Scenario> {
        let all = [3, 5].into_iter().flat_map(|workers| [1, 2, 3].map(|ps| scenario(one.mode, workers, ps)));
        if self.whole { all.collect() } else { vec![one] }
    }

    /// Returns the epochs of a job. It lasts 10 to 20 s, and 30 to 60 s in the whole matrix.
    const fn epochs(&self, short: u64) -> u64 {
        if self.whole { 3 * short } else { short }
    }

    /// Returns the fewest faults of a run. With fewer it was too short to show anything.
    const fn faults_min(&self) -> u32 {
        if self.whole { 10 } else { 4 }
    }

    /// Returns whether the faults met work: those of each run, and those of all runs together.
    fn is_met(&self, runs: &[Met]) -> bool {
        let sum = |count: fn(&Met) -> u64| runs.iter().map(count).sum::<u64>();
        runs.iter().all(|met| met.faults >= self.faults_min())
            && sum(|met| met.returned.into()) > 0
            && sum(|met| met.duplicates_dropped) > 0
            && sum(|met| met.leases_expired) > 0
    }
}

/// Effects of the faults on a job.
#[derive(Clone, Copy, Debug)]
struct Met {
    faults: u32,
    /// Workers that were seen working again after a stop.
    returned: u32,
    duplicates_dropped: u64,
    leases_expired: u64,
}

impl Met {
    fn of(chaos: &Chaos, out: &Path) -> Self {
        let summary = summary(out);
        let number = |name: &str| summary[name].as_u64().unwrap();
        Self {
            faults: chaos.faults.values().sum(),
            returned: chaos.returned,
            duplicates_dropped: number("duplicates_dropped"),
            leases_expired: number("leases_expired"),
        }
    }
}

/// Runs with the usual number of epochs, and doubles it until the faults met work.
fn until_met(asked: &Asked, epochs: u64, mut run: impl FnMut(u64) -> Vec<Met>) {
    for factor in [1, 2, 4, 8, 16] {
        let met = run(factor * epochs);
        if asked.is_met(&met) {
            return;
        }
        println!("{} epochs: the faults met no work, the job was too short: {met:?}", factor * epochs);
    }
    panic!("the faults met no work in jobs of up to {} epochs", 16 * epochs);
}

impl Scenario {
    /// Runs a job under chaos, checks what must hold for every job, and prints a line of the table.
    /// Returns the script and the job's folder.
    fn run(&self, asked: &Asked, program: &Path, job: &Path, sets: &[String]) -> (Chaos, PathBuf) {
        let Self { mode, workers, ps } = *self;
        let mut chaos = Chaos::new(asked.seed, Cluster::of(program, ps, workers));
        let out = chaos.cluster.dir.path().join("out");
        let mut sets = sets.to_vec();
        sets.extend([format!("consistency.mode={mode}"), format!("fleet.ps={ps}")]);
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let mut submission = chaos.cluster.submission(job, &out, &sets);
        let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        chaos.rage(&mut child, &out);
        let output = child.wait_with_output().unwrap();
        println!("{self:?}, seed {}: {chaos}", asked.seed);
        assert!(output.status.success(), "{}", text(&output));
        self.tell(&chaos, &out);
        chaos.check();
        (chaos, out)
    }

    /// Trains without faults on one worker and one ps, and under chaos, and compares the bits.
    /// The job under chaos has further settings, which do not change its bits.
    fn has_bits_of_calm(
        &self,
        asked: &Asked,
        program: &Path,
        job: &Path,
        sets: &[String],
        more: &[String],
    ) -> Met {
        let calm = tempfile::tempdir().unwrap();
        let calm = calm.path().join("out");
        let mode = format!("consistency.mode={}", self.mode);
        let args = ["run", "--workers", "1", "--ps", "1", "--device", "cpu", "--set", &mode, "--out"];
        let mut run = harness::ebb(args);
        run.arg(&calm).arg(job).args(sets.iter().flat_map(|set| ["--set", set]));
        let output = run.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let (bits, undisturbed) = (model(&calm), summary(&calm));
        println!("undisturbed: {undisturbed}");
        let (chaos, out) = self.run(asked, program, job, &[sets, more].concat());
        let disturbed = summary(&out);
        assert!(model(&out) == bits, "{self:?}: other bits than the undisturbed run: {disturbed}");
        assert_eq!(disturbed["model_sha256"], undisturbed["model_sha256"]);
        Met::of(&chaos, &out)
    }

    fn tell(&self, chaos: &Chaos, out: &Path) {
        let Self { mode, workers, ps } = self;
        let summary = summary(out);
        let [kill, stop, drain, add] =
            [Fault::Kill, Fault::Stop, Fault::Drain, Fault::Add].map(|fault| chaos.count(fault));
        let number = |name: &str| summary[name].as_u64().unwrap_or_default();
        let sha = &summary["model_sha256"].as_str().unwrap_or_default()[..12];
        println!(
            "| job | mode | workers | ps | kill | stop | drain | add | seen | duplicates | expired | wall s | sha256 |\n\
             | {} | {mode} | {workers} | {ps} | {kill} | {stop} | {drain} | {add} | {} | {} | {} | {:.1} | {sha} |",
            summary["job"].as_str().unwrap_or_default(),
            number("workers_seen"),
            number("duplicates_dropped"),
            number("leases_expired"),
            summary["wall_seconds"].as_f64().unwrap_or_default(),
        );
    }
}

/// Checks that every run under chaos ends with the model of an undisturbed run with one worker and
/// one ps.
fn same_bits(one: Scenario) {
    let asked = Asked::read();
    let torch = (asked.whole && cfg!(feature = "torch")).then(mnist).flatten();
    let instead = torch.is_none() && asked.whole;
    let say_instead = || {
        let what =
            "the bits of MNIST's script model under chaos: NOT checked; those of digits' MLP stand for them";
        skipped(Lacks::Machine, what);
    };
    if instead {
        say_instead();
    }
    let example = |name: &str| root().join("examples").join(name).join("job.toml");
    let paced = digits::PACED.map(str::to_owned).to_vec();
    let (job, program, epochs, mut sets, pace) = match torch {
        Some(data) => (example("mnist"), harness::ebb_path(), 6, mnist_sets(&data), Vec::new()),
        None => (example("digits"), digits::program(), 50, Vec::new(), paced),
    };
    let epochs = asked.epochs(epochs);
    if one.mode == "pipelined" {
        sets.push("consistency.delay=2".to_owned());
    }
    for scenario in asked.scenarios(one) {
        until_met(&asked, epochs, |epochs| {
            let sets = [&sets[..], &[format!("epochs={epochs}")]].concat();
            vec![scenario.has_bits_of_calm(&asked, &program, &job, &sets, &pace)]
        });
    }
    // Repeated at the end of a long run, where people look.
    if instead {
        say_instead();
    }
}

#[test]
fn killed_stopped_drained_and_added_workers_do_not_change_the_model_in_sync() {
    same_bits(scenario("sync", 3, 2));
}

#[test]
fn killed_stopped_drained_and_added_workers_do_not_change_the_model_in_pipelined() {
    same_bits(scenario("pipelined", 5, 3));
}

#[test]
fn every_record_is_counted_once_an_epoch_in_all_modes() {
    let asked = Asked::read();
    // 10 ms for each of 128 microbatches of an epoch: about 2 epochs a second with 3 workers.
    let scenarios = [
        scenario("sync", 3, 1),
        scenario("pipelined", 5, 2),
        scenario("bounded", 3, 3),
        scenario("async", 5, 1),
    ];
    until_met(&asked, asked.epochs(20), |epochs| {
        let oracle = Oracle::new(epochs, Some(10));
        let counted = |scenario: &Scenario| {
            let (chaos, out) = scenario.run(&asked, &harness::example("oracle"), &oracle.job(), &[]);
            oracle.check(&out, &format!("{scenario:?}"));
            Met::of(&chaos, &out)
        };
        scenarios.iter().map(counted).collect()
    });
}

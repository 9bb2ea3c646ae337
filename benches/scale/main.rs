//! Growth of the rate with the number of workers: 1, 2, 4 and 8 of them, a model of 100 MiB on 1
//! and on 4 ps, real processes on one host.
//!
//! A microbatch takes 50 ms, which are slept away, so that workers do not wait for the processor
//! because of it. Its gradients have the size of the model. Each worker has four microbatches of
//! each step, and adds them up before it pushes.
//!
//! *Efficiency*: samples/s of n workers, over n times those of one worker with one ps in the same
//! mode.
//!
//! Expected, with c = 50 ms, four microbatches, b = 100 MiB and r bytes/s that the host moves
//! between all its processes together: a step takes 4 c = 0.2 s of each worker, and the exchange of
//! n workers 2 n b / r. `pipelined` hides the exchange behind the computation until 2 n b / r = 0.2
//! s: with r = 2.5 GiB/s (TCP) at n = 2.5, with three times as much at n = 7.5. `sync` shows all of
//! it: 1 / (1 + n b / (0.1 s r)). On a host of two cores the additions count too: three in a worker
//! and one on the ps for each worker and step, of 300 MiB of memory traffic each.
//!
//! `cargo bench --no-default-features --bench scale` takes 5 minutes.
#![expect(clippy::disallowed_methods, reason = "a bench measures real processes in real time")]

#[path = "../../tests/harness/mod.rs"]
mod harness;
#[path = "../support/report.rs"]
mod report;

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use ebbflow::data::Batch;
use ebbflow::model::{Allocator, Evaluation, Gradients, Model, Registry};
use ebbflow::tensor::{TensorSpec, Values};
use harness::{Cluster, events, text};
use report::{Figure, Target};

/// Allocator of `ebb`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const COMPUTE: Duration = Duration::from_millis(50);
const TENSORS: usize = 25;
const TENSOR_LEN: usize = 1 << 20;
const MICRO: u64 = 8;
/// Microbatches of each worker in each step.
const EACH: u64 = 4;
/// First steps, which are not measured.
const WARMUP: usize = 4;

fn main() -> ExitCode {
    let verbs = ["master", "ps", "worker"];
    if std::env::args().nth(1).is_some_and(|first| verbs.contains(&first.as_str())) {
        let registry = Registry::default();
        return ebbflow::main(registry.with("still", |_| Ok(Box::new(Still))));
    }
    let full = std::env::args().any(|arg| arg == "--bench");
    let mut figures = Vec::new();
    for mode in ["sync", "pipelined"] {
        figures.extend(if full {
            curve(mode, &[1, 2, 4, 8], &[1, 4], 20)
        } else {
            curve(mode, &[2], &[1], 1)
        });
    }
    report::print(&figures);
    if full {
        report::write(&figures, &harness::root().join("target/bench/scale.json"));
    }
    ExitCode::SUCCESS
}

/// Measures the rates of one mode.
fn curve(mode: &str, workers: &[usize], ps: &[usize], steps: u64) -> Vec<Figure> {
    let mut alone = None;
    let mut figures = Vec::new();
    for &ps in ps {
        for &workers in workers {
            let rate = rate(mode, workers, ps, steps);
            let one = *alone.get_or_insert(rate / workers as f64);
            let name = format!("{mode}, {workers} workers, {ps} ps: efficiency");
            // The reach of the efficiency is the finding. With two workers the exchange must still
            // be hidden.
            let target = (mode == "pipelined" && workers == 2 && ps == 1).then_some(Target::AtLeast(0.9));
            let efficiency = rate / (workers as f64 * one);
            figures.push(Figure::new(name.leak(), "ratio", vec![efficiency], 1.0, target));
            let ideal = (MICRO * workers as u64) as f64 / COMPUTE.as_secs_f64();
            figures.push(Figure::new("  samples/s", "1/s", vec![rate], ideal, None));
        }
    }
    figures
}

/// Returns the samples per second after the first steps.
fn rate(mode: &str, workers: usize, ps: usize, steps: u64) -> f64 {
    let program = std::env::current_exe().expect("this program");
    let cluster = Cluster::of(&program, ps, workers);
    let (job, out) = (cluster.dir.path().join("job.toml"), cluster.dir.path().join("out"));
    let data = harness::root().join("examples/digits");
    let steps = steps + WARMUP as u64;
    let effective = MICRO * EACH * workers as u64;
    // digits has 1,797 records.
    let per_epoch = steps.min(1797 / effective);
    let file = format!(
        r#"
name = "scale"
epochs = {}
fleet = {{ ps = {ps}, workers = {{ min = {workers} }} }}
[model]
builtin = "still"
[data]
format = "idx"
[data.train]
features = ["{}"]
labels = ["{}"]
records = [0, {}]
[batch]
micro = {MICRO}
effective = {effective}
[optimizer]
kind = "momentum"
learning_rate = 0.01
[consistency]
mode = "{mode}"
"#,
        steps.div_ceil(per_epoch),
        data.join("images.idx3.gz").display(),
        data.join("labels.idx1.gz").display(),
        per_epoch * effective,
    );
    fs::write(&job, file).expect("the job file");
    let output = cluster.submit(&job, &out, &[]);
    assert!(output.status.success(), "{}", text(&output));
    let (mut samples, mut seconds) = (0.0, 0.0);
    for step in events(&out, "train").iter().skip(WARMUP) {
        let number = |name: &str| step[name].as_f64().expect("a number");
        samples += number("samples");
        seconds += number("samples") / number("samples_per_second");
    }
    samples / seconds
}

/// A network that computes nothing.
struct Still;

impl Model for Still {
    fn tensors(&self) -> Vec<TensorSpec> {
        (0..TENSORS).map(|number| TensorSpec::parameter(format!("{number}"), [TENSOR_LEN])).collect()
    }

    fn initial(&mut self, _: u64) -> ebbflow::Result<Vec<Values>> {
        Ok(self.tensors().iter().map(TensorSpec::zeros).collect())
    }

    fn load(&mut self, _: &[Values]) -> ebbflow::Result<()> {
        Ok(())
    }

    fn gradients(&mut self, _: &Batch, _: u64) -> ebbflow::Result<Gradients> {
        std::thread::sleep(COMPUTE);
        Ok(Gradients { loss: 0.0, values: self.tensors().iter().map(TensorSpec::zeros).collect() })
    }

    fn weighted_gradients(
        &mut self,
        batch: &Batch,
        key: u64,
        _: &dyn Allocator,
    ) -> ebbflow::Result<Gradients> {
        self.gradients(batch, key)
    }

    fn evaluate(&mut self, batch: &Batch) -> ebbflow::Result<Evaluation> {
        Ok(Evaluation { samples: batch.samples as u64, ..Evaluation::default() })
    }
}

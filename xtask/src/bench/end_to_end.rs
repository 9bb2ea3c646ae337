//! Whole trainings of two networks on MNIST by two workers of one thread each, beside peers that do the same.
//!
//! The limit is the *silent pair*: two PyTorch processes that train a network each and never talk. What Ebbflow adds is the exchange,
//! and one update where they make two. Windows of about 3 s alternate, with one of the silent pair before and after each two
//! others, and every ratio is of neighbours: the machine's own ups and downs cancel. A window has no start in it: peers stay up,
//! and of a job of ours the first steps do not count. Beside each rate of ours stands that from the submission to the end of the job.

use super::{
    ours::{self, Fleet, Rate, Where},
    peers::{Peer, Python},
    rows::{self, Row},
};
use crate::workspace;
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
};

const BATCH: usize = 64;
const PER_STEP: usize = 2 * BATCH;
/// Steps of a job that do not count.
const WARMUP: usize = 15;
/// A whole number of steps; MNIST's test set has 10,000.
const RECORDS: usize = 9984;
const ROUNDS: usize = 5;

/// How Ebbflow trains: what the row is called, where, in which mode, and what is asked of it.
struct Way {
    name: &'static str,
    at: At,
    mode: &'static str,
    of_silent: Option<f64>,
    of_ddp: Option<f64>,
}

#[derive(Clone, Copy, PartialEq)]
enum At {
    /// Separate processes, as they find each other.
    Separate,
    /// The same over TCP.
    Tcp,
    Embedded,
    /// Separate processes, whose workers agree with those of other processors.
    Portable,
}

struct Network {
    name: &'static str,
    ways: &'static [Way],
}

const NETWORKS: [Network; 2] = [
    Network {
        name: "convnet",
        ways: &[
            Way { name: "sync", at: At::Separate, mode: "sync", of_silent: Some(0.95), of_ddp: Some(1.1) },
            Way {
                name: "pipelined",
                at: At::Separate,
                mode: "pipelined",
                of_silent: Some(0.98),
                of_ddp: None,
            },
            Way { name: "embedded", at: At::Embedded, mode: "sync", of_silent: Some(0.98), of_ddp: None },
            PORTABLE,
        ],
    },
    Network {
        name: "mlp",
        ways: &[
            Way { name: "sync", at: At::Separate, mode: "sync", of_silent: Some(0.85), of_ddp: Some(1.25) },
            Way {
                name: "sync over TCP",
                at: At::Tcp,
                mode: "sync",
                of_silent: Some(0.75),
                of_ddp: Some(1.1),
            },
            Way { name: "embedded", at: At::Embedded, mode: "sync", of_silent: Some(0.9), of_ddp: None },
            Way {
                name: "pipelined",
                at: At::Separate,
                mode: "pipelined",
                of_silent: Some(0.95),
                of_ddp: None,
            },
            PORTABLE,
        ],
    },
];

/// Its price is a row, and nobody's target.
const PORTABLE: Way =
    Way { name: "sync, portable", at: At::Portable, mode: "sync", of_silent: None, of_ddp: None };

pub(super) fn measure(program: &Path, folder: &Path, quick: bool) -> Result<Vec<Row>> {
    let python = Python::torch()?.context("there is no PyTorch to compare with")?;
    let data = workspace::mnist()
        .context("no MNIST: put t10k-*-ubyte.gz into examples/mnist/data, or set EBB_MNIST_DIR")?;
    let tensorflow = Python::tensorflow()?;
    let folder = ours::empty(folder.join("end_to_end"))?;
    let made = python.script("torch_common.py").arg(&folder).status().context("start Python")?;
    ensure!(made.success(), "the networks' TorchScript was not made: {made}");

    let mut rows = Vec::new();
    for network in &NETWORKS {
        let arena = Arena::open(program, network, &data, &folder, &python, tensorflow.as_ref())?;
        rows.extend(arena.rows(if quick { 1 } else { ROUNDS })?);
    }
    Ok(rows)
}

/// All who train one network. Only one of them works at a time.
struct Arena<'a> {
    program: &'a Path,
    network: &'a Network,
    data: &'a Path,
    folder: &'a Path,
    silent: Peer,
    ddp: Peer,
    tensorflow: Option<Peer>,
    ways: Vec<Where>,
}

/// Who is measured.
#[derive(Clone, Copy)]
enum Who {
    Ours(usize),
    Ddp,
    TensorFlow,
}

/// What was seen of one contestant: its rates, each with the mean of the silent pair's just before and after.
#[derive(Default)]
struct Seen {
    rates: Vec<f64>,
    beside: Vec<f64>,
    /// Of a job of ours: from its submission to its end.
    whole: Vec<f64>,
}

impl Seen {
    fn ratios(&self) -> Vec<f64> {
        self.rates.iter().zip(&self.beside).map(|(rate, beside)| rate / beside).collect()
    }
}

impl<'a> Arena<'a> {
    fn open(
        program: &'a Path,
        network: &'a Network,
        data: &'a Path,
        folder: &'a Path,
        python: &Python,
        tensorflow: Option<&Python>,
    ) -> Result<Self> {
        let name = network.name;
        let log = |who: &str| folder.join(format!("{name}-{who}.log"));
        let pair = |who: &str| {
            let args = [who.as_ref(), name.as_ref(), data.as_os_str()];
            Peer::start(python, "pair.py", args, &log(who))
        };
        let tensorflow = tensorflow.map(|python| {
            Peer::start(python, "tf_ps.py", [name.as_ref(), data.as_os_str()], &log("tensorflow"))
        });
        let mut ways = Vec::new();
        for way in network.ways {
            let environment: &[_] = if way.at == At::Tcp { &[("EBB_SOCKETS", "tcp")] } else { &[] };
            let arguments: &[_] = if way.at == At::Portable { &["--numerics", "portable"] } else { &[] };
            let files = folder.join(format!("{name}-{}", way.name));
            let fleet = || Fleet::start(program, environment, arguments, &files);
            ways.push(if way.at == At::Embedded { Where::Embedded } else { Where::Fleet(fleet()?) });
        }
        let (silent, ddp, tensorflow) = (pair("silent")?, pair("ddp")?, tensorflow.transpose()?);
        Ok(Self { program, network, data, folder, silent, ddp, tensorflow, ways })
    }

    fn rows(mut self, rounds: usize) -> Result<Vec<Row>> {
        let name = self.network.name;
        // Everybody's first window waits until it is up, and is not counted.
        let silent = self.silent.rate()?;
        self.ddp.rate()?;
        if let Some(Err(error)) = self.tensorflow.as_mut().map(Peer::rate) {
            eprintln!("\n== tensorflow: {error:#}\n   its rows are SKIPPED");
            self.tensorflow = None;
        }
        // The first job of a fleet finds memory that it has never touched.
        for way in 0..self.ways.len() {
            self.job(way, WARMUP + 1)?;
        }
        let steps = WARMUP + (3.0 * silent / PER_STEP as f64).ceil() as usize;
        // DDP between ours.
        let mut order: Vec<Who> = (0..self.ways.len()).map(Who::Ours).collect();
        order.insert(1, Who::Ddp);
        order.extend(self.tensorflow.is_some().then_some(Who::TensorFlow));
        let mut ours: Vec<Seen> = self.ways.iter().map(|_| Seen::default()).collect();
        let (mut ddp, mut tensorflow) = (Seen::default(), Seen::default());
        let mut before = self.silent.rate()?;
        let mut silents = vec![before];
        for round in 1..=rounds {
            for some in order.chunks(2) {
                let rates = some.iter().map(|&who| self.rate(who, steps)).collect::<Result<Vec<_>>>()?;
                let after = self.silent.rate()?;
                silents.push(after);
                for (&who, rate) in some.iter().zip(rates) {
                    let (seen, called) = match who {
                        Who::Ours(way) => (&mut ours[way], self.network.ways[way].name),
                        Who::Ddp => (&mut ddp, "DDP"),
                        Who::TensorFlow => (&mut tensorflow, "TensorFlow"),
                    };
                    seen.rates.push(rate.steady);
                    seen.whole.push(rate.whole);
                    seen.beside.push(f64::midpoint(before, after));
                    eprintln!(
                        "{name}, round {round} of {rounds}: {called} {:.0}, silent pair {before:.0} and {after:.0} samples/s",
                        rate.steady
                    );
                }
                before = after;
            }
        }
        Ok(self.summed_up(silents, &ours, &ddp, &tensorflow))
    }

    /// One window. That of a peer, which stays up, has no start and no end.
    fn rate(&mut self, who: Who, steps: usize) -> Result<Rate> {
        let window = match who {
            Who::Ours(way) => return self.job(way, steps),
            Who::Ddp => self.ddp.rate()?,
            Who::TensorFlow => self.tensorflow.as_mut().context("it is up")?.rate()?,
        };
        Ok(Rate { steady: window, whole: window })
    }

    fn summed_up(&self, silents: Vec<f64>, ours: &[Seen], ddp: &Seen, tensorflow: &Seen) -> Vec<Row> {
        let name = self.network.name;
        let silent = rows::median(&silents);
        let unit = "samples/s";
        let mut found = vec![
            Row::new(format!("{name}: silent pair"), unit, silents, None),
            Row::new(format!("{name}: PyTorch DDP"), unit, ddp.rates.clone(), silent),
            Row::ratio(format!("{name}: PyTorch DDP, of the silent pair"), ddp.ratios(), None),
        ];
        if !tensorflow.rates.is_empty() {
            found.push(Row::new(format!("{name}: TensorFlow ps"), unit, tensorflow.rates.clone(), silent));
            found.push(Row::ratio(
                format!("{name}: TensorFlow ps, of the silent pair"),
                tensorflow.ratios(),
                None,
            ));
        }
        for (way, seen) in self.network.ways.iter().zip(ours) {
            let row = format!("{name}: {}", way.name);
            found.push(Row::new(&row, unit, seen.rates.clone(), silent));
            found.push(Row::new(format!("{row}, submission to end"), unit, seen.whole.clone(), silent));
            found.push(Row::ratio(format!("{row}, of the silent pair"), seen.ratios(), way.of_silent));
            if way.of_ddp.is_some() {
                // Both over their neighbours.
                let ratios = seen.ratios().iter().zip(ddp.ratios()).map(|(ours, ddp)| ours / ddp).collect();
                found.push(Row::ratio(format!("{row}, of DDP"), ratios, way.of_ddp));
            }
            if way.at == At::Portable {
                let native = ours.first().map(Seen::ratios).unwrap_or_default();
                let ratios =
                    seen.ratios().iter().zip(native).map(|(portable, native)| portable / native).collect();
                found.push(Row::ratio(format!("{row}, of native"), ratios, None));
            }
        }
        found
    }

    /// Trains a job of ours.
    fn job(&self, way: usize, steps: usize) -> Result<Rate> {
        let Way { mode, name, .. } = self.network.ways[way];
        let folder = ours::empty(self.folder.join("job"))?;
        let job = job_file(self.network.name, mode, steps, self.data, self.folder)?;
        let rate = self.ways[way].rate(self.program, &job, WARMUP, &folder);
        rate.with_context(|| format!("{}, {name}", self.network.name))
    }
}

/// A job of at least so many steps.
fn job_file(network: &str, mode: &str, steps: usize, data: &Path, scripts: &Path) -> Result<String> {
    let per_epoch = steps.min(RECORDS / PER_STEP);
    let absolute = |path: PathBuf| {
        let path = fs::canonicalize(&path).with_context(|| format!("find `{}`", path.display()))?;
        Ok::<_, anyhow::Error>(path.display().to_string())
    };
    Ok(format!(
        r#"
name = "{network}"
epochs = {epochs}
seed = 7
[model]
script = "{script}"
[data]
format = "idx"
shape = [1, 28, 28]
normalize = {{ scale = 255, mean = 0.1307, std = 0.3081 }}
[data.train]
features = ["{images}"]
labels = ["{labels}"]
records = [0, {records}]
[batch]
micro = {BATCH}
effective = {PER_STEP}
[optimizer]
kind = "momentum"
learning_rate = 0.01
[consistency]
mode = "{mode}"
[fleet]
workers = {{ min = 2, max = 2 }}
"#,
        epochs = steps.div_ceil(per_epoch),
        records = per_epoch * PER_STEP,
        script = absolute(scripts.join(format!("{network}.pt")))?,
        images = absolute(data.join("t10k-images-idx3-ubyte.gz"))?,
        labels = absolute(data.join("t10k-labels-idx1-ubyte.gz"))?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_at_least_the_steps_and_no_short_one() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["mlp.pt", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let job = |steps| job_file("mlp", "sync", steps, dir.path(), dir.path()).unwrap();
        assert!(job(40).contains("epochs = 1\n") && job(40).contains("records = [0, 5120]"));
        assert!(job(100).contains("epochs = 2\n") && job(100).contains("records = [0, 9984]"));
    }

    #[test]
    fn ratios_are_of_neighbours_in_time() {
        let seen = Seen { rates: vec![90.0, 45.0], beside: vec![100.0, 50.0], whole: Vec::new() };
        assert_eq!(seen.ratios(), [0.9, 0.9]);
    }
}

//! Time for which a job stands still when a ps or the master dies: real processes on loopback,
//! SIGKILL, immediate restart.
//!
//! Four workers train digits' MLP in `sync` with 8 microbatches of 5 ms in each step
//! (`tests/harness/paced.rs`), on two ps, with a checkpoint every 100 steps. *Killed to first new
//! step*: from the signal to the end of the longest time without an applied step after it, as the
//! workers' traces show.
//!
//! Expected, with c = 5 ms, M = 8, W = 4 (a step takes 10 ms) and a process that starts in 30 ms:
//!
//! | figure                          | limit | because                                        |
//! | ------------------------------- | ----- | ---------------------------------------------- |
//! | ps killed to first new step     | 60 ms | start, register, two reads of 100 KB, one step |
//! | steps lost with a ps            | 50    | half the distance of checkpoints               |
//! | master killed to first new step | 40 ms | start; leases last one more step               |
//!
//! In canonical order all partitions go back to the checkpoint after the loss of a ps. A new master
//! causes no rewind.
//!
//! Workers and ps retry with a growing wait (`proto/src/retry.rs`), which adds up to one such wait.
//! `cargo bench --no-default-features --bench recovery` takes 2 minutes. Without `--bench` one
//! round of each runs.
#![expect(clippy::disallowed_methods, reason = "a bench measures real processes in real time")]

#[path = "../support/fleet.rs"]
mod fleet;
#[path = "../../tests/harness/mod.rs"]
mod harness;
#[path = "../../tests/harness/paced.rs"]
mod paced;
#[path = "../support/report.rs"]
mod report;
#[path = "../support/trace.rs"]
mod trace;

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use fleet::{Job, now};
use harness::Cluster;
use report::{Figure, Target};

/// Time between two kills. Rounds differ by a tenth of it, so that the kills hit different moments
/// between two checkpoints.
const APART: Duration = Duration::from_millis(2500);

const JOB: Job = Job {
    name: "recovery",
    compute_ms: 5,
    optimizer: "kind = \"adam\"\nlearning_rate = 0.001",
    more: "checkpoint = { url = \"checkpoints\", every_steps = 100 }",
};

fn main() -> ExitCode {
    fleet::main("recovery", |full| {
        let rounds = if full { 20 } else { 1 };
        let ps = Killed::many(rounds, |cluster, round| cluster.restart_ps(round as usize % 2));
        let master = Killed::many(rounds, |cluster, _| cluster.restart_master());
        vec![
            ps.figure("ps killed to first new step", 60.0),
            Figure::new(
                "  restored: weights and slots of both partitions",
                "KiB",
                vec![ps.checkpoint_kib],
                0.0,
                None,
            ),
            Figure::new("  steps lost", "", ps.lost, 50.0, None),
            master.figure("master killed to first new step", 40.0),
            Figure::new("  steps lost", "", master.lost, 0.0, Some(Target::Below(1.0))),
        ]
    })
}

/// Cost of each round of one kind of kill.
struct Killed {
    pauses_ms: Vec<f64>,
    lost: Vec<f64>,
    /// Size of a checkpoint, all of which is read after the loss of a ps.
    checkpoint_kib: f64,
}

impl Killed {
    /// Trains a job and kills a process `rounds` times.
    fn many(rounds: u32, kill: impl Fn(&mut Cluster, u32)) -> Self {
        let (mut cluster, traces) = JOB.start(4);
        let mut killed = Vec::new();
        for round in 0..rounds {
            sleep(APART + APART / 10 * (round % 10));
            while listed(&cluster).is_none() {
                sleep(APART / 10);
            }
            killed.push(now());
            kill(&mut cluster, round);
        }
        sleep(APART);
        let checkpoint_kib = checkpoint_bytes(&cluster) / 1024.0;
        let trace = fleet::trace(&traces);
        let (pauses_ms, lost) = killed
            .iter()
            .map(|&at| {
                let (end, lost) = trace.standstill(&(at..at + APART));
                ((end - at).as_secs_f64() * 1e3, lost as f64)
            })
            .unzip();
        Self { pauses_ms, lost, checkpoint_kib }
    }

    fn figure(&self, name: &'static str, limit_ms: f64) -> Figure {
        Figure::new(name, "ms", self.pauses_ms.clone(), limit_ms, None)
    }
}

/// Returns the list of the job's checkpoints, if there are any.
fn listed(cluster: &Cluster) -> Option<String> {
    let list = ["checkpoint", "list", "--json", "--job", JOB.name, "--master", &cluster.url];
    let output = harness::ebb(list).output().expect("`ebb` starts");
    output.status.success().then(|| String::from_utf8(output.stdout).expect("JSON"))
}

/// Returns the size of the newest checkpoint.
fn checkpoint_bytes(cluster: &Cluster) -> f64 {
    let listed = listed(cluster).expect("checkpoints");
    let newest = listed.lines().last().expect("a checkpoint");
    let newest: serde_json::Value = serde_json::from_str(newest).expect("one JSON object a line");
    newest["bytes"].as_f64().expect("its bytes")
}

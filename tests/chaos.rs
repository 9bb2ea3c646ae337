//! Both promises with real processes: workers are killed, stopped for a while, drained and added at random while a job runs.
//!
//! What happens when is drawn from a seed that is printed; when exactly it meets the job is the machine's choice.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod harness;

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use ebbflow::random::Keyed;
use harness::{Cluster, events, model, root, summary, text};

/// Workers at most; one always lives.
const WORKERS_MAX: usize = 5;

struct Chaos {
    keyed: Keyed,
    cluster: Cluster,
    /// Stopped workers and how many rounds they still stand still.
    stopped: Vec<(usize, u32)>,
    /// Workers that were killed or drained.
    gone: Vec<usize>,
    done: Vec<String>,
}

impl Chaos {
    fn new(seed: u64, cluster: Cluster) -> Self {
        println!("chaos from seed {seed}");
        let keyed = Keyed::new(seed, "chaos", 0);
        Self { keyed, cluster, stopped: Vec::new(), gone: Vec::new(), done: Vec::new() }
    }

    /// Strikes every few hundred milliseconds until the job has ended.
    fn rage(&mut self, job: &mut Child, out: &Path) {
        while job.try_wait().unwrap().is_none() {
            // The rhythm of the faults, not a wait for a state.
            std::thread::park_timeout(Duration::from_millis(250 + self.keyed.next_u64() % 250));
            if out.join("metrics.jsonl").exists() && !events(out, "train").is_empty() {
                self.strike();
            }
        }
    }

    fn strike(&mut self) {
        for (worker, rounds) in &mut self.stopped {
            *rounds -= 1;
            if *rounds == 0 {
                self.cluster.workers[*worker].signal("CONT");
            }
        }
        self.stopped.retain(|(_, rounds)| *rounds > 0);
        let busy = |worker: &usize| {
            !self.gone.contains(worker) && self.stopped.iter().all(|(stopped, _)| stopped != worker)
        };
        let busy: Vec<usize> = (0..self.cluster.workers.len()).filter(busy).collect();
        let action = self.keyed.next_u64() % 4;
        if busy.len() < 2 || (action == 0 && busy.len() < WORKERS_MAX) {
            self.done.push("add".to_owned());
            self.cluster.add_worker();
            return;
        }
        let worker = busy[self.keyed.next_u64() as usize % busy.len()];
        let signal = ["KILL", "KILL", "STOP", "TERM"][action as usize];
        self.done.push(format!("{signal} worker-{worker}"));
        self.cluster.workers[worker].signal(signal);
        match signal {
            "STOP" => self.stopped.push((worker, 8)),
            _ => self.gone.push(worker),
        }
    }
}

/// Runs a job under chaos and answers its folder.
fn run(chaos: &mut Chaos, job: &Path, sets: &[String]) -> PathBuf {
    let out = chaos.cluster.dir.path().join("out");
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let mut submission = chaos.cluster.submission(job, &out, &sets);
    let mut child = submission.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    chaos.rage(&mut child, &out);
    let output = child.wait_with_output().unwrap();
    println!("{} faults: {}", chaos.done.len(), chaos.done.join(", "));
    println!("{}", summary(&out));
    assert!(output.status.success(), "{}", text(&output));
    out
}

#[test]
fn killed_stopped_drained_and_added_workers_do_not_change_the_model() {
    let job = root().join("examples/digits/job.toml");
    let epochs = "epochs=150";
    for mode in ["sync", "pipelined"] {
        let mode = format!("consistency.mode={mode}");
        let calm = tempfile::tempdir().unwrap();
        let calm_out = calm.path().join("out");
        let args = ["run", "--workers", "1", "--ps", "1", "--set", epochs, "--set", &mode, "--out"];
        let output = harness::ebb(args).arg(&calm_out).arg(&job).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let mut chaos = Chaos::new(7, Cluster::start(2, 3));
        let out = run(&mut chaos, &job, &[epochs.to_owned(), mode.clone()]);
        assert!(
            model(&out) == model(&calm_out),
            "{mode}: other bits than an undisturbed run with 1 worker and 1 ps"
        );
        assert!(chaos.done.len() >= 5, "the job ended before the chaos began: {:?}", chaos.done);
    }
}

#[test]
fn every_record_is_counted_once_an_epoch_in_all_modes() {
    let program = harness::example("oracle");
    let (records, epochs) = (1024, 60);
    let folder = tempfile::tempdir().unwrap();
    let data: String = (0..records).map(|record| format!("{record},0\n")).collect();
    std::fs::write(folder.path().join("data.csv"), data).unwrap();
    let job = folder.path().join("job.toml");
    std::fs::write(
        &job,
        format!(
            r#"
name = "oracle"
epochs = {epochs}
model = {{ builtin = "oracle", options = {{ records = {records} }}, loss = "mse" }}
data = {{ format = "csv", header = false, train = {{ features = ["data.csv"] }} }}
batch = {{ micro = 8, effective = 32 }}
optimizer = {{ kind = "sgd", learning_rate = 4.0 }}
fleet = {{ ps = 2 }}
limits = {{ deaths_max = 1000, lease = "3s" }}
"#
        ),
    )
    .unwrap();
    for mode in ["sync", "pipelined", "bounded", "async"] {
        let mut chaos = Chaos::new(11, Cluster::of(&program, 2, 3));
        let out = run(&mut chaos, &job, &[format!("consistency.mode={mode}")]);
        let file = model(&out);
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let counts = tensors.tensor("counts").unwrap();
        for (record, raw) in counts.data().as_chunks::<4>().0.iter().enumerate() {
            let count = f32::from_le_bytes(*raw);
            assert!(
                (count - epochs as f32).abs() < 1e-3,
                "{mode}: record {record} counts {count}, not {epochs}"
            );
        }
        assert_eq!(summary(&out)["samples_applied"], records * epochs, "{mode}");
    }
}

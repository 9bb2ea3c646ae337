//! What goes wrong in a run, and when: a function of its seed.

use std::ops::Range;

use ebbflow::random::Keyed;

/// One run in numbers. Probabilities are per simulated 100 ms.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) workers: u32,
    pub(crate) ps: u32,
    pub(crate) records: u32,
    pub(crate) micro: u32,
    pub(crate) microbatches_per_step: u32,
    pub(crate) epochs: u32,
    /// "sync", "pipelined", "bounded" or "async".
    pub(crate) mode: &'static str,
    pub(crate) delay: Option<u32>,
    /// A worker is killed.
    pub(crate) crash: f32,
    /// A killed worker starts again.
    pub(crate) restart: f32,
    /// A worker is cut off from everybody, or only from one ps.
    pub(crate) cut: f32,
    /// A cut heals.
    pub(crate) heal: f32,
    /// A worker's messages are held and delivered late, together.
    pub(crate) hold: f32,
    /// Longest delay of one message, in milliseconds: delays differ, so connections overtake each other.
    pub(crate) latency_ms: u64,
    /// Workers with links ten times as slow.
    pub(crate) slow: u32,
    /// Until when faults happen, in simulated milliseconds. Afterwards everything heals and the job must finish.
    pub(crate) until_ms: u64,
}

impl Plan {
    /// The run of `seed`.
    pub(crate) fn of(seed: u64) -> Self {
        let mut keyed = Keyed::new(seed, "faults", 0);
        let mut pick =
            |range: Range<u32>| range.start + (keyed.next_u64() % u64::from(range.end - range.start)) as u32;
        let workers = pick(1..5);
        let mode = ["sync", "pipelined", "bounded", "async"][pick(0..4) as usize];
        let delay = match mode {
            "pipelined" => Some(pick(1..4)),
            "bounded" => Some(pick(0..4)),
            _ => None,
        };
        let (micro, microbatches_per_step) = (pick(1..6), pick(1..7));
        let mut chance =
            |highest: f32| if pick(0..3) == 0 { 0.0 } else { highest * pick(1..101) as f32 / 100.0 };
        let (crash, cut, hold) = (chance(0.15), chance(0.1), chance(0.1));
        Self {
            workers,
            ps: pick(1..4),
            records: pick(8..60),
            micro,
            microbatches_per_step,
            epochs: pick(1..4),
            mode,
            delay,
            crash,
            restart: 0.3,
            cut,
            heal: 0.3,
            hold,
            latency_ms: u64::from(pick(1..40)),
            slow: pick(0..2).min(workers - 1),
            until_ms: u64::from(pick(0..12_000)),
        }
    }

    pub(crate) fn is_canonical(&self) -> bool {
        matches!(self.mode, "sync" | "pipelined")
    }

    /// The job of this run, on the data in `folder`.
    pub(crate) fn job(&self, seed: u64) -> String {
        let delay = self.delay.map(|delay| format!("delay = {delay}")).unwrap_or_default();
        let Self { records, micro, microbatches_per_step, epochs, mode, workers, ps, .. } = self;
        format!(
            r#"
name = "simulated"
epochs = {epochs}
seed = {seed}
[model]
builtin = "oracle"
options = {{ records = {records} }}
loss = "mse"
[data]
format = "csv"
header = false
train = {{ features = ["data.csv"] }}
[batch]
micro = {micro}
effective = {effective}
[optimizer]
kind = "sgd"
learning_rate = {microbatches_per_step}.0
[consistency]
mode = "{mode}"
{delay}
[fleet]
workers = {{ min = 1, max = {workers} }}
ps = {ps}
[limits]
lease = "3s"
deaths_max = 1000
attempts_max = 1000
pull_timeout = "1s"
pull_attempts_max = 1000
"#,
            effective = micro * microbatches_per_step,
        )
    }
}

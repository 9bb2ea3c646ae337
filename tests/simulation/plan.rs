//! One run in numbers: the job, the cluster, and the chances of faults. A function of the seed.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use ebbflow::random::Keyed;

use crate::model;

/// Name of the job.
pub(crate) const JOB: &str = "simulated";

/// Name of the job beside it.
pub(crate) const BESIDE: &str = "beside";

/// Factor by which messages of a slow link take longer.
pub(crate) const SLOW_LINK: u64 = 10;

/// Longest time that a slow worker may train alone, except in rare runs. Idle simulated time costs
/// processor time too.
const ALONE_MAX: Duration = Duration::from_secs(200);

/// Values of the tensor `bits` in a large model, so that a partition has more than 1 MiB, and more
/// than one chunk.
const MANY_BITS: usize = 300_007;

/// Place of the checkpoints.
pub(crate) const CHECKPOINTS: &str = "memory://checkpoints";

/// One run. Chances are per simulated 100 ms and per process, or per pair of processes for their
/// links.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    // The job.
    pub(crate) records: u64,
    pub(crate) micro: u64,
    pub(crate) microbatches_per_step: u64,
    pub(crate) epochs: u64,
    /// Number of data files, each with about the same number of records.
    pub(crate) files: u64,
    /// Records that lack a value or have a broken one, and are skipped.
    pub(crate) bad: BTreeSet<u64>,
    /// The order `window` with this `(window, interleave)`. `None`: a permutation of all records.
    pub(crate) windows: Option<(u64, u64)>,
    /// Mode: "sync", "pipelined", "bounded" or "async".
    pub(crate) mode: &'static str,
    pub(crate) delay: Option<u64>,
    /// Optimizer: "sgd", with which the weights count how often a record was applied, or one with
    /// slots in canonical order.
    pub(crate) optimizer: &'static str,
    /// Norm at which steps are clipped, over the whole model, so that several ps must exchange
    /// theirs.
    pub(crate) clip_norm: Option<f64>,
    /// Whether some tensors have settings of their own.
    pub(crate) groups: bool,
    /// Whether the model has a loss scale.
    pub(crate) scaled: bool,
    /// Type of the exchange.
    pub(crate) dtype: &'static str,
    /// Whether a part of the records evaluates the model after each epoch.
    pub(crate) evaluates: bool,
    /// Epochs between evaluations.
    pub(crate) evaluates_epochs: Option<u64>,
    /// Steps between further evaluations.
    pub(crate) evaluates_every: Option<u64>,
    /// Selection of the best version, in canonical order.
    pub(crate) selects: Option<Selects>,
    /// Time-outs of a pull or push, of a second each, after which a worker gives up and its process
    /// ends.
    pub(crate) pull_attempts_max: u64,
    /// Time for which a lease holds without a heartbeat.
    pub(crate) lease_secs: u64,
    // The cluster.
    /// Longest silence of a process. Above `lease_secs`, leases end while their process lives on
    /// and reports them.
    pub(crate) death_secs: u64,
    pub(crate) workers: u64,
    /// Workers among them that join while the job runs.
    pub(crate) late: u64,
    /// Length of a tick. Events within one tick have an order but the same time. Coarse ticks cost
    /// less than half and let more happen at once. Fine ones let messages of short links overtake
    /// each other.
    pub(crate) tick_ms: u64,
    /// Ps that the job asks for.
    pub(crate) ps: u64,
    /// Further ps.
    pub(crate) spare_ps: u64,
    /// Time that the master waits for a ps before another one replaces it.
    pub(crate) ps_grace_secs: u64,
    /// Time of one microbatch on a worker.
    pub(crate) compute_ms: u64,
    /// Time of one microbatch on `worker-0`, which may be slow.
    pub(crate) slow_compute_ms: u64,
    /// Longest time between two gradients of a microbatch, which are pushed as they are made. 0:
    /// all of them are made at once.
    pub(crate) gradient_ms: u64,
    /// Longest delay of one message. Delays differ, so connections overtake each other.
    pub(crate) latency_ms: u64,
    /// Workers whose links to the ps are ten times as slow.
    pub(crate) slow_links: u64,
    /// Speed of the master's clock.
    pub(crate) clock_rate: f64,
    // The faults.
    pub(crate) clock_jump: f32,
    pub(crate) join: f32,
    pub(crate) worker_crash: f32,
    pub(crate) worker_drain: f32,
    /// Chance that a ps dies, with its part of the model.
    pub(crate) ps_crash: f32,
    /// Chance that the master dies. Its journal survives.
    pub(crate) master_crash: f32,
    /// Chance that a process that ended starts again.
    pub(crate) restart: f32,
    /// Chance that two processes, or one and all its peers, are cut off from each other.
    pub(crate) cut: f32,
    /// Chance that messages are cut off in one direction.
    pub(crate) cut_one_way: f32,
    /// Chance that messages between two processes are held, and delivered together later.
    pub(crate) hold: f32,
    /// Chance that a cut ends.
    pub(crate) mend: f32,
    /// Chance that a hold ends. Most last longer than a lease.
    pub(crate) release: f32,
    /// Chance that a message is lost, with all others on their way between the two processes.
    pub(crate) loss: f64,
    /// Whether nothing happens to a ps and its link to the master, so that no rewind may happen.
    pub(crate) steady_ps: bool,
    /// Chance that some process dies at once when a partition or the job enters another phase.
    pub(crate) at_phase: f32,
    /// Chance that the master's process stands still for some seconds.
    pub(crate) master_stop: f32,
    /// Longest time that one write of the journal takes.
    pub(crate) journal_ms: u64,
    /// Chance that a write of the journal fails.
    pub(crate) journal_fails: f32,
    /// Chance that the master dies with a write of the journal.
    pub(crate) journal_crash: f32,
    /// Chance that the journal's disk is full, until space is freed.
    pub(crate) journal_full: f32,
    /// Whether a user pauses, scales and continues jobs.
    pub(crate) meddles: bool,
    /// Whether a member of the fleet lies.
    pub(crate) lies: bool,
    /// Whether another job is submitted beside the first.
    pub(crate) beside: bool,
    /// Chance that the job beside is cancelled.
    pub(crate) cancel: f32,
    /// Whether the cluster goes on after the end of its jobs. The master is started again and must
    /// know them, and the ps must have dropped them.
    pub(crate) lingers: bool,
    /// Workers (those with the lowest numbers) that may hang: until they are started again they
    /// send heartbeats and make no progress.
    pub(crate) hanging: u64,
    /// Chance that one of them begins to hang.
    pub(crate) hang: f32,
    /// Time without progress after which work is copied.
    pub(crate) stall_secs: u64,
    /// Whether nothing happens to processes and links, so that no process may be taken for dead.
    pub(crate) calm: bool,
    /// Workers (those with the highest numbers) of another numerics class.
    pub(crate) strangers: u64,
    /// Whether the model has more than 1 MiB.
    pub(crate) large: bool,
    /// Most bytes of pushes that a ps accepts at once, as a multiple of the model. 0: the default.
    pub(crate) push_room: u64,
    /// Whether each ps has a store of its own at the place of the checkpoints.
    pub(crate) apart: bool,
    /// End of the faults, in simulated milliseconds. Afterwards everything recovers and the job
    /// must finish.
    pub(crate) until_ms: u64,
    // Checkpoints.
    /// Times of checkpoints, as in the job file. Without them a lost job begins again.
    pub(crate) saves: Option<Saves>,
    /// Chance that master, ps and workers die at once.
    pub(crate) all_crash: f32,
    /// Chance that a file of a checkpoint is damaged, cut short or lost.
    pub(crate) rot: f32,
    /// Chance that master, ps and workers die at once, and the master's data folder with its
    /// journal is lost. The user then submits the job again, to go on from its checkpoints.
    pub(crate) all_lost: f32,
    /// Chance that a ps is told to leave.
    pub(crate) ps_drain: f32,
    /// Longest time that one call of the store takes.
    pub(crate) store_ms: u64,
    /// Chance that the disk is full, until space is freed.
    pub(crate) store_full: f32,
    /// Chance that the store is unreachable, until it is mended.
    pub(crate) store_away: f32,
    /// Chance that either of these two faults ends.
    pub(crate) store_mend: f32,
    /// Chance that a call of the store fails.
    pub(crate) store_fails: f32,
    /// Chance that half of a written file exists before the whole, or alone.
    pub(crate) store_torn: f32,
    /// Chance that a written file exists, and the writer gets an error.
    pub(crate) store_unheard: f32,
}

/// Selection of the best version by the loss of the evaluations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selects {
    /// Whether a larger loss is better.
    pub(crate) larger: bool,
    pub(crate) patience: Option<u64>,
    pub(crate) min_delta: f64,
}

/// Times of checkpoints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saves {
    /// Unit of `count`: "steps", "epochs" or "seconds".
    pub(crate) every: &'static str,
    pub(crate) count: u64,
    pub(crate) keep: u64,
}

impl Plan {
    /// Draws the run of `seed`.
    pub(crate) fn of(seed: u64) -> Self {
        let mut plan = Self::without_norms(seed);
        let mut dice = Dice(Keyed::new(seed, "clip", 0));
        // In arrival order a clipped job has one ps only, and there are no clipped weights to
        // compare with.
        let clips = [0.02, 0.2, 1e9];
        match plan.is_canonical() {
            true if dice.one_in(3) => plan.clip_norm = Some(clips[dice.range(0, 2) as usize]),
            false if dice.one_in(3) && plan.ps == 1 => plan.clip_norm = Some(clips[2]),
            _ => {}
        }
        let mut dice = Dice(Keyed::new(seed, "exchange", 0));
        plan.dtype = ["f32", "f32", "bf16", "f16"][dice.range(0, 3) as usize];
        let mut dice = Dice(Keyed::new(seed, "optimizer", 0));
        if plan.is_canonical() && dice.one_in(3) {
            plan.optimizer = ["momentum", "adam", "lamb"][dice.range(0, 2) as usize];
            // Lamb has norms of its own.
            plan.clip_norm = plan.clip_norm.filter(|_| plan.optimizer != "lamb");
        }
        plan.groups = Dice(Keyed::new(seed, "groups", 0)).one_in(3);
        // The weights of other runs are not compared with the serial loop.
        plan.scaled = plan.is_canonical() && Dice(Keyed::new(seed, "scale", 0)).one_in(4);
        let mut dice = Dice(Keyed::new(seed, "gradients", 0));
        plan.gradient_ms = if dice.one_in(2) { 0 } else { dice.range(1, 40) };
        let mut plan = plan.with_faults_at_the_edges(seed).with_faults_of_members(seed);
        if plan.workers == 1 && plan.alone() > ALONE_MAX && !seed.is_multiple_of(50) {
            (plan.slow_compute_ms, plan.slow_links) = (plan.compute_ms, 0);
        }
        let mut dice = Dice(Keyed::new(seed, "windows", 0));
        plan.files = if dice.one_in(2) { 1 } else { dice.range(2, 6) };
        let windows = (dice.range(1, 20), dice.range(1, 4));
        // The order `window` leaves no records of a training file to an evaluation.
        plan.windows = Some(windows).filter(|_| dice.one_in(3) && !plan.evaluates);
        let mut dice = Dice(Keyed::new(seed, "bad", 0));
        if dice.one_in(3) {
            // The model is tried on a good record, and an evaluation measures at least one.
            let most = if plan.evaluates { (plan.records / 5).max(2) - 1 } else { plan.records / 2 };
            let count = dice.range(1, most);
            plan.bad = (0..count).map(|_| dice.range(0, plan.records - 1)).collect();
        }
        let mut dice = Dice(Keyed::new(seed, "evaluation", 0));
        plan.evaluates_every = Some(dice.range(1, 9)).filter(|_| plan.evaluates && dice.one_in(2));
        if plan.evaluates && plan.is_canonical() && dice.one_in(2) {
            let larger = dice.one_in(2);
            let patience = if dice.one_in(3) { None } else { Some(dice.range(1, 6)) };
            let min_delta = if dice.one_in(3) { 0.01 } else { 0.0 };
            plan.selects = Some(Selects { larger, patience, min_delta });
        }
        plan.evaluates_epochs = Some(dice.range(1, 3)).filter(|_| plan.evaluates && dice.one_in(3));
        plan
    }

    /// Draws faults of members: workers that hang or are of another numerics class, ps with a store
    /// of their own or with little room. Also draws models of more than one chunk.
    fn with_faults_of_members(mut self, seed: u64) -> Self {
        let mut dice = Dice(Keyed::new(seed, "others", 0));
        let (several, saves) = (self.workers > 1, self.saves.is_some());
        let (hangs, other, large) = (dice.one_in(4), dice.one_in(4), dice.one_in(16));
        let (calm, apart, room) = (dice.one_in(2), dice.one_in(8), dice.one_in(3));
        if several && hangs {
            self.hanging = dice.range(1, self.workers - 1);
            self.hang = 0.02 + dice.chance(0.4);
            self.stall_secs = dice.range(3, 12);
            self.calm = calm;
        } else if several && other {
            self.strangers = dice.range(1, self.workers - 1);
        }
        if saves && apart {
            (self.apart, self.rot, self.calm) = (true, 0.0, calm);
            (self.store_full, self.store_away, self.store_fails) = (0.0, 0.0, 0.0);
            (self.store_torn, self.store_unheard) = (0.0, 0.0);
        }
        if large {
            (self.large, self.ps, self.latency_ms, self.slow_links) = (true, 1, self.latency_ms.min(5), 0);
            (self.records, self.epochs) = (self.records.min(20), self.epochs.min(3));
            // Other tests compare norms of a tensor of several chunks.
            (self.clip_norm, self.scaled) = (None, false);
            self.optimizer = if self.optimizer == "lamb" { "adam" } else { self.optimizer };
        }
        if room {
            self.push_room = dice.range(1, 6);
        }
        if self.calm {
            (self.worker_crash, self.worker_drain, self.ps_crash, self.ps_drain) = (0.0, 0.0, 0.0, 0.0);
            (self.master_crash, self.all_crash, self.all_lost, self.at_phase) = (0.0, 0.0, 0.0, 0.0);
            (self.cut, self.cut_one_way, self.hold, self.loss) = (0.0, 0.0, 0.0, 0.0);
            (self.master_stop, self.journal_fails, self.journal_full) = (0.0, 0.0, 0.0);
            (self.journal_crash, self.pull_attempts_max) = (0.0, 1000);
        }
        self
    }

    /// Draws faults at changes of state of a job, a partition or the journal.
    fn with_faults_at_the_edges(mut self, seed: u64) -> Self {
        let mut dice = Dice(Keyed::new(seed, "edges", 0));
        self.steady_ps = dice.one_in(4);
        self.at_phase = dice.chance(0.5);
        self.master_stop = dice.chance(0.01);
        self.journal_ms = [0, dice.range(1, 20), dice.range(20, 300)][dice.range(0, 2) as usize];
        self.journal_fails = dice.chance(0.1);
        self.journal_crash = dice.chance(0.02);
        self.journal_full = dice.chance(0.01);
        self.meddles = dice.one_in(4);
        self.lies = dice.one_in(4);
        self.beside = dice.one_in(4);
        self.cancel = dice.chance(1.0);
        self.lingers = dice.one_in(4) && self.all_lost == 0.0;
        if self.steady_ps {
            (self.ps_crash, self.ps_drain, self.all_crash, self.all_lost) = (0.0, 0.0, 0.0, 0.0);
            // More than the faults of the journal cause, and less than a grace.
            self.master_crash = self.master_crash.max(0.005);
        }
        self
    }

    fn without_norms(seed: u64) -> Self {
        let mut dice = Dice(Keyed::new(seed, "plan", 0));
        let workers = dice.range(1, 5);
        let mode = ["sync", "pipelined", "bounded", "async"][dice.range(0, 3) as usize];
        let delay = match mode {
            "pipelined" => Some(dice.range(1, 3)),
            "bounded" => Some(dice.range(0, 3)),
            _ => None,
        };
        let compute_ms = [0, dice.range(1, 60), dice.range(60, 300)][dice.range(0, 2) as usize];
        let plan = Self {
            records: dice.range(8, 80),
            micro: dice.range(1, 5),
            microbatches_per_step: dice.range(1, 7),
            epochs: dice.range(1, 4),
            files: 1,
            bad: BTreeSet::new(),
            windows: None,
            mode,
            delay,
            optimizer: "sgd",
            clip_norm: None,
            groups: false,
            scaled: false,
            dtype: "f32",
            evaluates: dice.one_in(3),
            evaluates_epochs: None,
            evaluates_every: None,
            selects: None,
            lease_secs: dice.range(2, 5),
            death_secs: if dice.one_in(3) { 5 } else { dice.range(10, 30) },
            pull_attempts_max: if dice.one_in(4) { dice.range(1, 4) } else { 1000 },
            workers,
            late: if dice.one_in(3) { dice.range(0, workers - 1) } else { 0 },
            tick_ms: if seed.is_multiple_of(20) { 1 } else { 5 },
            ps: dice.range(1, 3),
            spare_ps: dice.range(0, 1),
            ps_grace_secs: dice.range(5, 60),
            compute_ms,
            slow_compute_ms: if dice.one_in(3) { 8 * compute_ms } else { compute_ms },
            gradient_ms: 0,
            latency_ms: dice.range(1, 40),
            slow_links: if dice.one_in(3) { 1 } else { 0 },
            clock_rate: if dice.one_in(2) { 1.0 } else { 0.8 + 0.01 * dice.range(0, 40) as f64 },
            clock_jump: dice.chance(0.1),
            join: 0.05,
            worker_crash: dice.chance(0.1),
            worker_drain: dice.chance(0.05),
            ps_crash: dice.chance(0.03),
            master_crash: dice.chance(0.03),
            restart: 0.02 + dice.chance(0.3),
            cut: dice.chance(0.05),
            cut_one_way: dice.chance(0.05),
            hold: dice.chance(0.05),
            mend: 0.02 + dice.chance(0.2),
            release: 0.02 + dice.chance(0.1),
            loss: f64::from(dice.chance(0.002)),
            steady_ps: false,
            at_phase: 0.0,
            master_stop: 0.0,
            journal_ms: 0,
            journal_fails: 0.0,
            journal_crash: 0.0,
            journal_full: 0.0,
            meddles: false,
            lies: false,
            beside: false,
            cancel: 0.0,
            lingers: false,
            hanging: 0,
            hang: 0.0,
            stall_secs: 300,
            calm: false,
            strangers: 0,
            large: false,
            push_room: 0,
            apart: false,
            until_ms: dice.range(0, 20_000),
            saves: None,
            all_crash: 0.0,
            rot: 0.0,
            all_lost: 0.0,
            ps_drain: 0.0,
            store_ms: 0,
            store_full: 0.0,
            store_away: 0.0,
            store_mend: 1.0,
            store_fails: 0.0,
            store_torn: 0.0,
            store_unheard: 0.0,
        };
        if dice.one_in(2) {
            return plan;
        }
        let every = ["steps", "steps", "epochs", "seconds"][dice.range(0, 3) as usize];
        let count = if every == "steps" { dice.range(1, 12) } else { dice.range(1, 2) };
        Self {
            // Long enough to be lost in the middle.
            epochs: plan.epochs + dice.range(4, 24),
            saves: Some(Saves { every, count, keep: dice.range(1, 3) }),
            all_crash: dice.chance(0.02),
            rot: dice.chance(0.05),
            all_lost: dice.chance(0.01),
            ps_drain: dice.chance(0.03),
            store_ms: [0, dice.range(1, 100), dice.range(100, 3000)][dice.range(0, 2) as usize],
            store_full: dice.chance(0.03),
            store_away: dice.chance(0.02),
            store_mend: 0.01 + dice.chance(0.2),
            store_fails: dice.chance(0.1),
            store_torn: dice.chance(0.3),
            store_unheard: dice.chance(0.1),
            ..plan
        }
    }

    /// Returns the time that the slowest worker would need alone. Each microbatch is computed, its
    /// gradients are made, and it waits for a message to a ps and the answer. The sum is doubled,
    /// because some work may be repeated.
    pub(crate) fn alone(&self) -> Duration {
        let microbatches = self.epochs * self.records.div_ceil(self.micro);
        // Five tensors and the end, with half of the longest pause before each.
        let compute_ms = self.slow_compute_ms.max(self.compute_ms) + 3 * self.gradient_ms;
        let latency_ms = if self.slow_links > 0 { SLOW_LINK * self.latency_ms } else { self.latency_ms };
        Duration::from_millis(2 * microbatches * (compute_ms + 2 * latency_ms))
    }

    /// Returns the number of values of the tensor `bits`.
    pub(crate) const fn bits(&self) -> usize {
        if self.large { MANY_BITS } else { model::BITS }
    }

    /// Returns the bytes of the weights.
    pub(crate) const fn model_bytes(&self) -> u64 {
        let integers = if self.scaled { 3 } else { 1 };
        4 * (self.records + (self.bits() + model::RUNNING) as u64) + 8 * integers
    }

    /// Returns the bytes of sums that a full ps accepts: the first nodes of the oldest step of each
    /// job. Their number is that of the binary digits of its microbatches.
    pub(crate) const fn first_bytes(&self) -> u64 {
        let (jobs, last) = (1 + self.beside as u64, self.microbatches_per_step - 1);
        jobs * (u64::BITS - last.leading_zeros()) as u64 * self.model_bytes()
    }

    /// Returns the numerics class of a worker.
    pub(crate) fn class_of(&self, worker: u64) -> &'static str {
        model::CLASSES[usize::from(worker + self.strangers >= self.workers)]
    }

    /// Returns the most versions that a partition may keep, of this job or the one beside it.
    pub(crate) fn versions_max(&self) -> u64 {
        let newest = if self.is_canonical() { 2 * self.delay.unwrap_or(0) + 2 } else { 1 };
        // The job beside has a delay of 1 at most, and no evaluation.
        let newest = if self.beside { newest.max(4) } else { newest };
        let steps = self.records.div_ceil(self.micro).div_ceil(self.microbatches_per_step) * self.epochs;
        let between = self.evaluates_every.map_or(0, |every| steps / every);
        newest + if self.evaluates { self.epochs + between } else { 0 }
    }

    /// Returns whether the weights count how often a record was applied: no step is clipped, and
    /// none goes through slots or overflows.
    pub(crate) fn counts(&self) -> bool {
        !self.scaled && self.optimizer == "sgd" && self.clip_norm.is_none_or(|norm| norm >= 1e9)
    }

    pub(crate) fn is_canonical(&self) -> bool {
        matches!(self.mode, "sync" | "pipelined")
    }

    /// Returns the name of a data file.
    pub(crate) fn file(file: u64) -> String {
        format!("data{file}.csv")
    }

    /// Returns the records of a data file. No file is empty, because a run has 8 records or more.
    pub(crate) const fn records_of(&self, file: u64) -> Range<u64> {
        file * self.records / self.files..(file + 1) * self.records / self.files
    }

    /// Returns the line of a record in its data file. A bad one has no number, or no value at all.
    pub(crate) fn line(&self, record: u64) -> String {
        match (self.bad.contains(&record), record % 2) {
            (false, _) => format!("{record},0\n"),
            (true, 0) => ",0\n".to_owned(),
            (true, _) => format!("x{record},0\n"),
        }
    }

    /// Returns the job file of this run.
    pub(crate) fn job(&self, seed: u64) -> String {
        let delay = self.delay.map(|delay| format!("delay = {delay}")).unwrap_or_default();
        let clip_norm = self.clip_norm.map(|norm| format!("clip_norm = {norm:?}")).unwrap_or_default();
        let groups = "[[optimizer.groups]]\ntensors = [\"b*\"]\nlearning_rate = 0.003\nweight_decay = 0.1";
        let groups = if self.groups { groups } else { "" };
        let validation = if self.evaluates { "validation_fraction = 0.2" } else { "" };
        let every = [("every_epochs", self.evaluates_epochs), ("every_steps", self.evaluates_every)];
        let every = every.into_iter().filter_map(|(key, every)| Some(format!("{key} = {}", every?)));
        let evaluation = every.fold("[evaluation]".to_owned(), |section, line| format!("{section}\n{line}"));
        let selection = self.selects.map(|Selects { larger, patience, min_delta }| {
            let mode = if larger { "max" } else { "min" };
            let patience = patience.map(|patience| format!("patience = {patience}")).unwrap_or_default();
            format!(
                "[early_stopping]\nmetric = \"loss\"\nmode = \"{mode}\"\nmin_delta = {min_delta:?}\n{patience}"
            )
        });
        let selection = selection.unwrap_or_default();
        let Self { records, micro, microbatches_per_step, epochs, mode, workers, ps, .. } = self;
        let Self { lease_secs, stall_secs, pull_attempts_max, dtype, optimizer, scaled, .. } = self;
        let (bits, pull_secs) = (self.bits(), if self.large { 10 } else { 1 });
        let learning_rate = if self.optimizer == "sgd" { *microbatches_per_step as f64 } else { 0.01 };
        let checkpoint = self.saves.map(|Saves { every, count, keep }| {
            format!("[checkpoint]\nurl = \"{CHECKPOINTS}\"\nevery_{every} = {count}\nkeep = {keep}")
        });
        let checkpoint = checkpoint.unwrap_or_default();
        let shuffle = self.windows.map(|(window, interleave)| {
            format!("shuffle = \"window\"\nwindow = {window}\ninterleave = {interleave}")
        });
        let shuffle = shuffle.unwrap_or_default();
        let bad = "on_error = \"skip\"\nmissing = { 0 = \"skip\" }\nmax_bad = 1.0";
        let bad = if self.bad.is_empty() { "" } else { bad };
        let files: Vec<_> = (0..self.files).map(|file| format!("\"{}\"", Self::file(file))).collect();
        let files = files.join(", ");
        format!(
            r#"
name = "{JOB}"
epochs = {epochs}
seed = {seed}
[model]
builtin = "oracle"
options = {{ records = {records}, bits = {bits}, scaled = {scaled} }}
loss = "mse"
[data]
format = "csv"
header = false
train = {{ features = [{files}] }}
{validation}
{shuffle}
{bad}
[batch]
micro = {micro}
effective = {effective}
[optimizer]
kind = "{optimizer}"
learning_rate = {learning_rate:?}
{clip_norm}
{groups}
[consistency]
mode = "{mode}"
{delay}
[fleet]
workers = {{ min = 1, max = {workers} }}
ps = {ps}
[exchange]
dtype = "{dtype}"
[limits]
lease = "{lease_secs}s"
stall = "{stall_secs}s"
deaths_max = 1000
attempts_max = 1000
pull_timeout = "{pull_secs}s"
pull_attempts_max = {pull_attempts_max}
{checkpoint}
{evaluation}
{selection}
"#,
            effective = micro * microbatches_per_step,
        )
    }

    /// Returns the job file of another user, in canonical order.
    pub(crate) fn beside(&self, seed: u64) -> Option<String> {
        let mode = if self.mode == "pipelined" { "sync" } else { "pipelined" };
        let plan = Self {
            epochs: 2,
            mode,
            delay: (mode == "pipelined").then_some(1),
            optimizer: "adam",
            clip_norm: None,
            groups: false,
            evaluates: false,
            evaluates_epochs: None,
            evaluates_every: None,
            selects: None,
            ps: 1,
            saves: None,
            ..self.clone()
        };
        let job = plan.job(seed + 1).replace(&format!("name = \"{JOB}\""), &format!("name = \"{BESIDE}\""));
        self.beside.then_some(job)
    }
}

/// Random numbers from a seed.
#[derive(Debug)]
pub(crate) struct Dice(pub(crate) Keyed);

impl Dice {
    /// Returns a number from `low` to `high`, both included.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.0.next_u64() % (high - low + 1)
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.range(1, count) == 1
    }

    /// Returns true with this chance.
    pub(crate) fn happens(&mut self, chance: f32) -> bool {
        self.0.next_f32() < chance
    }

    /// Returns a chance for the whole run: zero in every third, otherwise up to `highest`.
    fn chance(&mut self, highest: f32) -> f32 {
        if self.one_in(3) { 0.0 } else { highest * self.range(1, 100) as f32 / 100.0 }
    }
}

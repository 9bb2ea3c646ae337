//! One run from its seed to its checked outcome.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebbflow::data::Dataset;
use ebbflow::spec::{self, DataSet, JobSpec, Records};
use ebbflow::tensor::Values;
use proto::ids::{MicrobatchId, Step, Version};
use proto::numerics::Since;
use proto::pb::event::Kind;
use proto::selection::Selection;
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::prelude::*;

use crate::cluster::{self, Cluster, Seen};
use crate::faults::{self, Faults};
use crate::plan::Plan;
use crate::store::Published;
use crate::{ambient, checks, serial};

/// Simulated time that a job may take after the last fault, in addition to its computation.
const PATIENCE: Duration = Duration::from_secs(600);

/// Time between two moments at which faults begin and end, in whole ticks.
const FAULTS_MS: u64 = 100;

/// Exit code of a run that broke a promise.
pub(crate) const BROKEN: i32 = 70;

/// Outcome of a run.
#[derive(Debug, Deserialize, Serialize, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) seed: u64,
    /// Digest of all events, in order and with their times.
    pub(crate) digest: u64,
    /// SHA-256 of the trained model.
    pub(crate) model_sha256: String,
    pub(crate) simulated_ms: u64,
    pub(crate) counts: BTreeMap<String, u64>,
}

/// Runs and checks a seed. It takes over this process: a broken promise ends it with [`BROKEN`].
pub(crate) fn run(seed: u64, log: bool) -> Outcome {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default(info);
        eprintln!("after {:?} of simulated time", ambient::elapsed());
        std::process::exit(BROKEN);
    }));
    // The name is drawn before the seed is entered, and never reaches the cluster.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let plan = Plan::of(seed);
    for file in 0..plan.files {
        let data: String = plan.records_of(file).map(|record| plan.line(record)).collect();
        std::fs::write(folder.path().join(Plan::file(file)), data).expect("the data can be written");
    }
    let job = spec::parse(&plan.job(seed), Path::new("/simulated/job.toml"), &[]).expect("a valid job");
    // A thread of its own, because a thread keeps what it once drew from the operating system.
    let beside = plan.beside(seed);
    let beside =
        beside.map(|text| spec::parse(&text, Path::new("/simulated/job.toml"), &[]).expect("a valid job"));
    let body = || watched(seed, log, &plan, &job, beside.as_ref(), folder.path());
    std::thread::scope(|scope| scope.spawn(body).join()).expect("a panic ends the process")
}

fn watched(
    seed: u64,
    log: bool,
    plan: &Plan,
    job: &JobSpec,
    beside: Option<&JobSpec>,
    folder: &Path,
) -> Outcome {
    let threads = threads();
    ambient::enter(seed);
    let watch = checks::Watch.with_filter(LevelFilter::DEBUG);
    let log = log.then(|| {
        let shown = Targets::new().with_default(LevelFilter::DEBUG).with_target("h2", LevelFilter::INFO);
        tracing_subscriber::fmt::layer().with_timer(Simulated).with_ansi(false).with_filter(shown)
    });
    let subscriber = tracing_subscriber::registry().with(watch).with(log);
    let seen = tracing::subscriber::with_default(subscriber, || simulate(seed, plan, job, beside, folder));
    assert_eq!(threads, self::threads(), "work went to other threads, whose order nobody knows");
    if !says_that_stores_are_apart(plan, &seen) {
        check(plan, job, folder, &seen);
    }
    check_beside(plan, beside, folder, &seen);
    let status = seen.status.expect("checked");
    checks::add("duplicates dropped", status.duplicates_dropped);
    checks::add("leases ended early", status.leases_expired);
    let (counts, digest) = checks::take(status.steps_done > 0);
    let model_sha256 = proto::artifact::sha256_hex(&seen.model);
    Outcome { seed, digest, model_sha256, simulated_ms: ambient::elapsed().as_millis() as u64, counts }
}

/// Simulated time for the log.
struct Simulated;

impl FormatTime for Simulated {
    fn format_time(&self, writer: &mut Writer<'_>) -> std::fmt::Result {
        write!(writer, "{:.3}", ambient::elapsed().as_secs_f64())
    }
}

/// Returns the number of threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

fn simulate(seed: u64, plan: &Plan, job: &JobSpec, beside: Option<&JobSpec>, folder: &Path) -> Seen {
    let tick = Duration::from_millis(plan.tick_ms);
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .enable_random_order()
        .tick_duration(tick)
        .min_message_latency(Duration::from_micros(100))
        .max_message_latency(Duration::from_millis(plan.latency_ms))
        .fail_rate(plan.loss)
        .repair_rate(0.3)
        .simulation_duration(Duration::from_millis(plan.until_ms) + PATIENCE + plan.alone())
        .tcp_capacity(4096)
        .build();
    let cluster = Cluster::new(seed, plan, folder.to_owned());
    checks::watch(cluster.journal.clone(), plan.versions_max());
    let late = cluster.start(&mut sim);
    let seen = Arc::new(Mutex::new(Seen::default()));
    sim.client("user", cluster::run_user(plan.clone(), job.to_json(), cluster.disk.clone(), seen.clone()));
    let beside = beside.map(JobSpec::to_json);
    sim.client("other-user", cluster::run_other_user(seed, plan.clone(), beside, seen.clone()));
    sim.client("liar", cluster::run_liar(seed, plan.clone()));
    // Users reach the master without faults.
    sim.set_link_fail_rate("user", "master", 0.0);
    sim.set_link_fail_rate("other-user", "master", 0.0);
    for ps in cluster.hosts(&[]).filter(|host| plan.steady_ps && host.starts_with("ps-")) {
        sim.set_link_fail_rate(ps, "master", 0.0);
    }
    let mut faults = Faults::new(seed, plan, late);
    let mut elapsed_ms = 0;
    while !sim.step().expect("no role fails and the job ends in time") {
        ambient::advance(tick);
        elapsed_ms += plan.tick_ms;
        cluster.check_memory(false);
        if cluster.journal.take_crash() && sim.is_host_running("master") {
            faults::kill(&mut sim, "master");
        }
        // Also after the other faults: a job's end is a change of phase.
        if checks::take_phase() {
            faults.strike_at_phase(&mut sim, &cluster);
        }
        if checks::take_restart() {
            faults::kill(&mut sim, "master");
            faults::start(&mut sim, "master");
        }
        if elapsed_ms % FAULTS_MS == 0 {
            if elapsed_ms < plan.until_ms {
                faults.strike(&mut sim, &cluster);
            } else {
                faults.end(&mut sim, &cluster);
            }
        }
    }
    for ps in cluster.hosts(&[]).filter(|host| plan.lingers && host.starts_with("ps-")) {
        let held = checks::held_by(ps);
        assert!(held.is_empty(), "all jobs have ended, and {ps} holds the jobs and partitions {held:?}");
    }
    if plan.lingers {
        cluster.check_memory(true);
    }
    if plan.rot == 0.0 {
        cluster.disk.check_manifests();
    }
    cluster::count_leases(&cluster.master);
    let mut seen = std::mem::take(&mut *seen.lock().unwrap());
    seen.published = cluster.disk.take_published();
    // The end of the process is no part of the run: nothing more is checked, and nothing needs to
    // be closed in order.
    std::mem::forget(sim);
    seen
}

/// Returns the newest version from which the job resumed since its last submission.
fn resumed_from(seen: &Seen) -> u64 {
    let version = |event: &proto::pb::Event| match &event.kind {
        Some(Kind::Warning(warning)) => {
            let from = warning.message.split_once("from the checkpoint of version ")?.1;
            from.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
        }
        _ => None,
    };
    seen.events.iter().filter_map(version).max().unwrap_or(0)
}

/// Returns the texts of the warnings.
fn warnings(events: &[proto::pb::Event]) -> impl Iterator<Item = &str> {
    events.iter().filter_map(|event| match &event.kind {
        Some(Kind::Warning(warning)) => Some(warning.message.as_str()),
        _ => None,
    })
}

/// Returns whether the job has failed at once, because its ps have stores of their own. A job
/// continues only when no ps could be asked, with a warning, and publishes no checkpoints in either
/// case.
fn says_that_stores_are_apart(plan: &Plan, seen: &Seen) -> bool {
    if !plan.apart {
        return false;
    }
    let status = seen.status.as_ref().expect("the user saw the job's end");
    checks::count("runs with a store for each ps");
    if status.state() == proto::pb::JobState::Failed {
        assert!(status.reason.contains("do not see one store"), "{}", status.reason);
        assert!(!plan.calm || status.steps_done == 0, "{} steps before anybody said so", status.steps_done);
        return true;
    }
    let warned =
        warnings(&seen.events).any(|message| message.contains("whether all ps and the master see one"));
    assert!(warned && !plan.calm, "nobody said that ps and master have different stores");
    false
}

fn check(plan: &Plan, job: &JobSpec, folder: &Path, seen: &Seen) {
    let status = seen.status.as_ref().expect("the user saw the job's end");
    assert_eq!(status.state(), proto::pb::JobState::Succeeded, "{}", status.reason);
    let data = Dataset::open(job, DataSet::Train, Some(folder)).expect("the data can be read");
    let numbers = job.plan(data.len());
    let skipped = check_skipped(plan, job, seen);
    let stopped = is_stopped_early(status);
    if !stopped {
        assert_eq!(status.samples_applied, (numbers.records - skipped) * numbers.epochs, "samples_applied");
        assert_eq!(status.microbatches_applied, numbers.microbatches(), "microbatches_applied");
        assert_eq!(status.steps_done, numbers.steps(), "steps");
    }
    assert_eq!(status.steps, numbers.steps(), "steps");
    checks::add("steps that overflowed", status.overflows);

    let tensors = safetensors::SafeTensors::deserialize(&seen.model).expect("a model file");
    let floats = |name: &str| -> Vec<f32> {
        let data = tensors.tensor(name).expect("the tensor is there");
        data.data().as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
    };
    // Each epoch applies each good record once, with its microbatch's share of its step.
    let mut expected = vec![0.0f64; plan.records as usize];
    // The validation part has records of the same files.
    let in_files = records_of(plan, job, DataSet::Train).expect("training records");
    let (mut microbatches, mut of_steps) = (Vec::new(), BTreeMap::<Step, usize>::new());
    for id in 0..numbers.microbatches() {
        let microbatch = numbers.microbatch(MicrobatchId(id));
        let order = job.order(&data.shards(), microbatch.epoch);
        let records = order.records(microbatch.positions.0..microbatch.positions.1).into_iter();
        let good: Vec<_> = records
            .map(|record| in_files.in_files(record))
            .filter(|record| !plan.bad.contains(record))
            .collect();
        *of_steps.entry(microbatch.step).or_default() += good.len();
        microbatches.push((microbatch.step, good));
    }
    for (step, good) in &microbatches {
        let share = job.optimizer.learning_rate * good.len() as f64 / of_steps[step] as f64;
        good.iter().for_each(|&record| expected[record as usize] += share);
    }
    checks::add("steps without a good record", of_steps.values().filter(|&&good| good == 0).count() as u64);
    for (record, (expected, found)) in expected.iter().zip(floats("counts")).enumerate() {
        // Other runs are compared with the serial loop, because they are canonical.
        assert!(
            !plan.counts() || plan.selects.is_some() || (expected - f64::from(found)).abs() < 1e-3,
            "record {record}: {found} where {expected} belongs"
        );
    }

    // Events since the last begin of the training. The loss curve goes back only after a rewind.
    let mut steps = Vec::new();
    let mut evaluations = BTreeMap::new();
    let (mut lives, mut measured, mut within) = (1, 0, 0);
    for event in &seen.events {
        match &event.kind {
            Some(Kind::Train(train)) => {
                assert!(
                    steps.last().is_none_or(|last| *last < train.step),
                    "step {} after {steps:?}",
                    train.step
                );
                steps.push(train.step);
            }
            Some(Kind::Evaluation(evaluation)) => {
                let loss = evaluation.metrics.get("loss").copied().expect("every model has a loss");
                let again = evaluations.insert(evaluation.step, loss).filter(|_| plan.is_canonical());
                assert!(again.is_none_or(|before| before == loss), "{evaluation:?}: not {again:?} as before");
                measured += 1;
                within += u64::from(evaluation.within_epoch);
            }
            Some(Kind::Rewind(_)) => steps.clear(),
            Some(Kind::Warning(warning)) if warning.message.contains("lost its part of the model") => {
                lives += 1;
            }
            _ => {}
        }
    }
    assert!(
        !plan.steady_ps || (rewinds(&seen.events), lives) == (0, 1),
        "no ps was lost, and the job was rewound"
    );
    let told = |words: &str| warnings(&seen.events).filter(|message| message.contains(words)).count() as u64;
    let ended_early = status.leases_expired;
    assert!(!plan.calm || ended_early == 0, "{ended_early} leases were taken from workers that all lived");
    checks::add("classes told to stand by", told("stand by, because their results"));
    checks::add("large models", u64::from(plan.large));
    checks::add(
        "rewinds",
        told("training starts again from version 0") + told("training goes on from the checkpoint"),
    );
    checks::add("rewinds to a checkpoint", told("training goes on from the checkpoint"));
    checks::add("lost parts trained again", told("that part is trained again"));
    checks::add("checkpoints that could not be restored", told("cannot be restored"));
    let complete = |event: &&proto::pb::Event| matches!(event.kind, Some(Kind::Checkpoint(_)));
    checks::add("checkpoints", seen.events.iter().filter(complete).count() as u64);
    checks::add("resumptions", seen.resumed);
    checks::add("runs with norms", u64::from(plan.clip_norm.is_some()));
    checks::add("runs with groups of tensors", u64::from(plan.groups));
    checks::add("runs with norms of several ps", u64::from(plan.clip_norm.is_some() && plan.ps > 1));
    checks::add("runs that exchange 16 bits", u64::from(plan.dtype != "f32"));
    checks::add("ps back with their parts", told("is back with its partitions"));
    if plan.evaluates {
        let occasions = job.occasions(numbers).expect("it evaluates");
        let due = (1..=numbers.steps()).filter(|&version| occasions.contains(Version(version)));
        // Nobody is told of an evaluation after the stop.
        let last = status.selection.as_ref().filter(|_| stopped).map_or(u64::MAX, |found| found.last);
        // Evaluations before the last submission were reported then.
        let begun = if seen.resumed > 0 { resumed_from(seen) } else { 0 };
        let measured_now: Vec<_> = evaluations.keys().copied().filter(|version| *version > begun).collect();
        let due: Vec<_> = due.filter(|version| *version > begun && *version <= last).collect();
        // A run that goes on after its stop ends as soon as it has the best version again.
        match stopped && seen.resumed > 0 {
            true => assert!(measured_now.iter().all(|version| due.contains(version)), "{measured_now:?}"),
            false => assert_eq!(measured_now, due, "measured"),
        }
        checks::add("evaluations within epochs", within);
        assert!(measured <= lives * evaluations.len(), "{measured} times measured in {lives} lives");
    }
    if plan.is_canonical() {
        let train = |class: &str| serial::train(job, &data, plan, class);
        let versions = train(class_of(status));
        let exported = check_selection(plan, job, seen, &versions);
        check_bits(&versions[exported], &seen.model);
        for Published { manifest, weights } in &seen.published {
            let [Since { numerics, .. }] = manifest.numerics.as_slice() else {
                panic!("of several classes: {:?}", manifest.numerics);
            };
            let version = manifest.version.get() as usize;
            // Before everything was lost, another class may have begun.
            let same = match numerics.class == class_of(status) {
                true => &versions[version] == weights,
                false => &train(&numerics.class)[version] == weights,
            };
            assert!(same, "the published version {version} has other bits than the serial loop");
            checks::count("published checkpoints with the bits of the serial loop");
        }
        for (version, loss) in evaluations {
            let expected = f64::from(versions[version as usize][1].as_f32().unwrap()[0]);
            assert!((loss - expected).abs() <= 1e-9, "version {version}: loss {loss}, serial {expected}");
        }
    }
}

fn is_stopped_early(status: &proto::pb::JobStatus) -> bool {
    status.selection.as_ref().is_some_and(|selection| selection.stopped)
}

/// Checks that a job has selected the version that the rule selects from the weights of the serial
/// loop, and stopped where it stops. Returns the version that is to be exported.
fn check_selection(plan: &Plan, job: &JobSpec, seen: &Seen, versions: &[Vec<Values>]) -> usize {
    let Some(criterion) = job.criterion() else { return versions.len() - 1 };
    let status = seen.status.as_ref().expect("the user saw the job's end");
    let found = status.selection.as_ref().expect("a version was measured");
    let best = found.best as usize;
    let begun_anew = warnings(&seen.events).any(|message| message.contains("the selection begins anew"));
    checks::add("selections that begin anew", u64::from(begun_anew));
    // Before everything was lost, another class may have begun.
    if seen.resumed > 0 && (plan.strangers > 0 || begun_anew) {
        return best;
    }
    let loss = |version: Version| {
        f64::from(versions[version.get() as usize][1].as_f32().expect("bits are floats")[0])
    };
    let told = status.final_metrics["loss"];
    assert!((told - loss(Version(found.best))).abs() <= 1e-9, "the final loss {told} is of another version");
    let numbers = job.plan(records_of(plan, job, DataSet::Train).expect("training records").len());
    let occasions = job.occasions(numbers).expect("it evaluates");
    let mut due = std::iter::successors(occasions.after(Version(0)), |version| occasions.after(*version));
    let first = due.next().expect("the end of an epoch");
    let mut expected = Selection::first(criterion, first, loss(first));
    for version in due {
        if expected.stops(job.patience()) {
            break;
        }
        expected.observe(version, loss(version));
    }
    let stops = expected.stops(job.patience());
    assert_eq!(
        (found.best, found.last, found.waited, found.stopped),
        (expected.best.get(), expected.last.get(), expected.waited, stops),
        "the best version, the last one, and whether training stopped"
    );
    checks::count("best versions");
    checks::add("early stops", u64::from(stops));
    checks::add("best versions that are not the last", u64::from(best + 1 < versions.len()));
    best
}

/// Returns the records of a data set of a job, or `None` if the job has no such set.
fn records_of(plan: &Plan, job: &JobSpec, set: DataSet) -> Option<Records> {
    let count = |file| plan.records_of(file).count() as u64;
    let in_files: Vec<u64> = (0..plan.files).map(count).collect();
    job.data.records(set, &in_files, job.seed).expect("good files")
}

/// Checks that a job has skipped the bad records and no others, as far as it says. Returns the
/// number of bad training records.
fn check_skipped(plan: &Plan, job: &JobSpec, seen: &Seen) -> u64 {
    let status = seen.status.as_ref().expect("the user saw the job's end");
    let skipped = status.skipped.clone().unwrap_or_default();
    let bad = |set| -> BTreeSet<u64> {
        let records = records_of(plan, job, set);
        let all =
            records.iter().flat_map(|records| (0..records.len()).map(move |record| records.in_files(record)));
        all.filter(|record| plan.bad.contains(record)).collect()
    };
    let (train, validation) = (bad(DataSet::Train), bad(DataSet::Validation));
    // A run that goes on from a checkpoint may not meet all of them again. Nor does one that stops
    // early.
    let whole = seen.resumed == 0 && !is_stopped_early(status);
    for (what, found, bad) in
        [("training", skipped.train, &train), ("validation", skipped.validation, &validation)]
    {
        let expected = bad.len() as u64;
        assert!(
            found == expected || (!whole && found < expected),
            "{found} of {expected} bad {what} records"
        );
    }
    for record in &skipped.records {
        let file = (0..plan.files).find(|&file| Plan::file(file) == record.file).expect("a data file");
        let number = plan.records_of(file).start + record.record;
        let bad = if record.validation { &validation } else { &train };
        assert!(bad.contains(&number), "{record:?} was skipped and is good");
        let reason = if number.is_multiple_of(2) { "has no value" } else { "is no finite number" };
        assert!(record.reason.contains(reason), "{record:?}");
    }
    assert!(skipped.records.is_sorted_by_key(|record| (
        record.validation,
        record.file.clone(),
        record.record
    )));
    checks::add("skipped records", skipped.train + skipped.validation);
    train.len() as u64
}

/// Returns the numerics class that trained a job in canonical order.
fn class_of(status: &proto::pb::JobStatus) -> &str {
    let [since] = status.numerics.as_slice() else { panic!("one class, found {:?}", status.numerics) };
    &since.numerics.as_ref().expect("a class").class
}

fn rewinds(events: &[proto::pb::Event]) -> usize {
    events.iter().filter(|event| matches!(event.kind, Some(Kind::Rewind(_)))).count()
}

/// Checks that a model file has the bits of the serial loop.
fn check_bits(serial: &[Values], model: &[u8]) {
    let tensors = safetensors::SafeTensors::deserialize(model).expect("a model file");
    for (name, values) in ["counts", "bits", "running", "seen"].into_iter().zip(serial) {
        let found = tensors.tensor(name).expect("the tensor is there");
        assert_eq!(found.data(), values.bytes(), "`{name}` has other bits than the serial loop");
    }
}

/// Checks the job of the other user, which trains in canonical order.
fn check_beside(plan: &Plan, beside: Option<&JobSpec>, folder: &Path, seen: &Seen) {
    let (Some(job), Some((status, model, events))) = (beside, &seen.beside) else { return };
    assert_eq!(status.state(), proto::pb::JobState::Succeeded, "{}", status.reason);
    let data = Dataset::open(job, DataSet::Train, Some(folder)).expect("the data can be read");
    check_bits(serial::train(job, &data, plan, class_of(status)).last().expect("version 0"), model);
    assert!(!plan.steady_ps || rewinds(events) == 0, "no ps was lost, and the job beside was rewound");
    checks::count("jobs beside the first");
}

//! Watches a run from the inside. Every tracing event goes into the digest of the schedule, and the
//! events of ps and master are checked as they happen. A broken promise panics at once, which ends
//! the process.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::ambient;
use crate::journal::Journal;

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

#[derive(Default)]
struct State {
    digest: Digest,
    /// Host whose code runs now.
    host: String,
    counts: BTreeMap<String, u64>,
    parts: BTreeMap<Part, Life>,
    /// Granted leases that have not ended, and their tasks.
    leases: BTreeMap<u64, Lease>,
    /// Leases that were taken from their holders.
    lost: BTreeSet<u64>,
    /// Microbatches that are done: job, era, start of the master, and number in the job.
    microbatches_done: BTreeSet<(u64, u64, u64, u64)>,
    /// Number of partitions opened so far.
    opened: u64,
    granted: u64,
    /// Partitions that the ps hold now: host, job, partition.
    open: BTreeSet<(String, u64, u64)>,
    /// Jobs whose end a user has seen.
    ended: BTreeSet<u64>,
    /// Whether a partition or job has entered another phase since the last look.
    phase: bool,
    /// Whether the master is to be restarted, so that the user sees what it still knows.
    restart: bool,
    /// Journal of the master.
    journal: Option<Journal>,
    /// Most versions that a partition may keep.
    versions_max: u64,
}

/// States of a job that end a phase of it, as the master logs them.
const STATES: [&str; 5] = ["indexing: ", "running: ", "exporting: ", "succeeded: ", "cancelled: "];

/// Key of a partition on a ps: host, job, partition, era.
type Part = (String, u64, u64, u64);

/// History of a partition since it was opened.
#[derive(Default)]
struct Life {
    /// Whether it replaces a lost partition in the same era. Then gradients from before the loss
    /// may arrive.
    again: bool,
    version: u64,
    applied: BTreeSet<u64>,
}

#[derive(Clone, Copy)]
struct Lease {
    job: u64,
    era: u64,
    first: u64,
    microbatches: u64,
}

/// Counts one occurrence for the summary.
pub(crate) fn count(what: impl Into<String>) {
    add(what, 1);
}

/// Counts `amount` occurrences for the summary.
pub(crate) fn add(what: impl Into<String>, amount: u64) {
    STATE.with_borrow_mut(|state| *state.counts.entry(what.into()).or_default() += amount);
}

/// Sets the journal and the most versions against which a run is checked.
pub(crate) fn watch(journal: Journal, versions_max: u64) {
    STATE.with_borrow_mut(|state| (state.journal, state.versions_max) = (Some(journal), versions_max));
}

/// Returns a lease that is valid, or was not long ago, and its number of microbatches.
pub(crate) fn some_lease(luck: u64) -> Option<(u64, u64)> {
    STATE.with_borrow(|state| {
        let count = state.leases.len().max(1) as u64;
        let (lease, of) = state.leases.iter().nth((luck % count) as usize)?;
        Some((*lease, of.microbatches))
    })
}

/// Forgets everything, because the numbers of jobs and leases begin again.
pub(crate) fn forget() {
    STATE.with_borrow_mut(|state| {
        state.parts.clear();
        state.leases.clear();
        state.lost.clear();
        state.microbatches_done.clear();
        state.open.clear();
        state.ended.clear();
    });
}

/// Returns whether a partition or job has entered another phase since the last call.
pub(crate) fn take_phase() -> bool {
    STATE.with_borrow_mut(|state| std::mem::take(&mut state.phase))
}

/// Removes the partitions of a process that ended.
pub(crate) fn gone(host: &str) {
    STATE.with_borrow_mut(|state| state.open.retain(|(of, ..)| of != host));
}

/// Returns the job and the partition of each partition that a ps holds.
pub(crate) fn held_by(host: &str) -> Vec<(u64, u64)> {
    STATE.with_borrow(|state| {
        let held = state.open.iter().filter(|(of, ..)| of == host);
        held.map(|(_, job, partition)| (*job, *partition)).collect()
    })
}

/// Notes that a user has seen the end of a job. From now on no process may work for it.
pub(crate) fn ended(job: u64) {
    STATE.with_borrow_mut(|state| state.ended.insert(job));
}

/// Requests a restart of the master.
pub(crate) fn restart_master() {
    STATE.with_borrow_mut(|state| state.restart = true);
}

/// Returns whether a restart of the master was requested since the last call.
pub(crate) fn take_restart() -> bool {
    STATE.with_borrow_mut(|state| std::mem::take(&mut state.restart))
}

/// Returns the counts, and the digest of all events in order and with their times. `trained`: some
/// job had a model.
pub(crate) fn take(trained: bool) -> (BTreeMap<String, u64>, u64) {
    STATE.with_borrow_mut(|state| {
        // If this fails, the events have other names now, and the checks see none.
        assert!((state.opened > 0 || !trained) && state.granted > 0, "nothing was checked");
        (std::mem::take(&mut state.counts), state.digest.0)
    })
}

/// The layer that sees every event.
pub(crate) struct Watch;

impl<S: Subscriber> Layer<S> for Watch {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        // The network creates this span whenever a host's code runs.
        if attributes.metadata().name() == "node" {
            STATE.with_borrow_mut(|state| attributes.record(&mut Host(&mut state.host)));
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        STATE.with_borrow_mut(|state| {
            let metadata = event.metadata();
            let mut facts = Facts::default();
            // Writing to a digest cannot fail.
            let _ = write!(state.digest, "{:?} {} {} ", ambient::elapsed(), state.host, metadata.target());
            event.record(&mut Fields { digest: &mut state.digest, facts: &mut facts });
            match metadata.target() {
                "ebbflow::checks" => state.on_ps(&facts),
                "ps::partitions" => state.on_partitions(&facts),
                "worker::task_loop" if facts.message == "pulling weights ahead" => {
                    *state.counts.entry("pulls ahead".to_owned()).or_default() += 1;
                }
                target if target.starts_with("master::") => state.on_master(&facts),
                _ => {}
            }
        });
    }
}

impl State {
    /// Checks an event of a ps that opens or closes a partition.
    fn on_partitions(&mut self, facts: &Facts) {
        let held = || (self.host.clone(), facts.get("job"), facts.get("partition"));
        match facts.message.as_str() {
            "partition opened" => {
                let written = self.journal.as_ref().is_some_and(|journal| journal.has_said(&self.host));
                assert!(
                    written,
                    "{} holds a partition, and the journal does not know it: {facts:?}",
                    self.host
                );
                self.open.insert(held());
            }
            "partition closed" => drop(self.open.remove(&held())),
            _ => return,
        }
        self.phase = true;
    }

    /// Checks an event of a partition.
    fn on_ps(&mut self, facts: &Facts) {
        if facts.message == "refused" {
            let kind = facts.error.split([' ', '(', '{']).next().unwrap_or_default();
            *self.counts.entry(format!("refused: {kind}")).or_default() += 1;
            return;
        }
        let (job, partition, era) = (facts.get("job"), facts.get("partition"), facts.get("era"));
        let part = (self.host.clone(), job, partition, era);
        if facts.message == "opened" {
            let again = self.parts.keys().any(|part| (part.1, part.2, part.3) == (job, partition, era));
            self.parts.insert(part, Life { again, ..Life::default() });
            self.opened += 1;
            return;
        }
        let life = self.parts.get_mut(&part).unwrap_or_else(|| panic!("{part:?} is not open: {facts:?}"));
        let sender = facts.numbers.get("sender_era").copied();
        assert!(sender.is_none_or(|sender| sender == era), "a worker of another era got through: {facts:?}");
        match facts.message.as_str() {
            "restored" => {
                let (version, watermark) = (facts.get("version"), facts.get("watermark"));
                assert!(life.version == 0 && life.applied.is_empty(), "restored twice: {facts:?}");
                life.version = version;
                life.applied = (0..watermark).collect();
                *self.counts.entry("partitions restored".to_owned()).or_default() += 1;
            }
            "taken up" => {
                let (step, watermark) = (facts.get("step"), facts.get("watermark"));
                let delay = facts.numbers.get("delay");
                // Only canonical steps (whose partition is at its watermark) and bounded ones have
                // a delay.
                assert!(
                    life.again || delay.is_none_or(|delay| step <= watermark + delay),
                    "a gradient came before the weights that it may be computed from: {facts:?}"
                );
                if life.applied.contains(&step) {
                    *self.counts.entry("pushes of applied steps".to_owned()).or_default() += 1;
                }
            }
            "applied" => {
                let (step, version) = (facts.get("step"), facts.get("version"));
                assert!(life.applied.insert(step), "a step was applied twice: {facts:?}");
                assert_eq!(version, life.version + 1, "versions come one after the other: {facts:?}");
                assert!(facts.get("kept") <= self.versions_max, "more than {}: {facts:?}", self.versions_max);
                life.version = version;
            }
            "pulled" => {
                let (version, watermark) = (facts.get("version"), facts.get("watermark"));
                let (exact, at_least) = (facts.numbers.get("exact"), facts.numbers.get("at_least"));
                assert!(version <= life.version, "a version that was not made: {facts:?}");
                assert!(exact.is_none_or(|exact| *exact == version), "another version: {facts:?}");
                assert!(at_least.is_none_or(|steps| *steps <= watermark), "too old a version: {facts:?}");
                assert!(exact.is_some() || version == life.version, "the version fell: {facts:?}");
            }
            other => panic!("ebbflow::checks tells `{other}`, which nobody checks"),
        }
    }

    /// Checks an event of the master.
    fn on_master(&mut self, facts: &Facts) {
        if facts.message == "partition placed" {
            // From here on the dispatcher begins anew, with the steps that are on every partition.
            let placed = facts.get("job");
            self.microbatches_done.retain(|(job, ..)| *job != placed);
        }
        if STATES.iter().any(|state| facts.message.starts_with(state)) {
            self.phase = true;
            let job = facts.get("job");
            assert!(!self.ended.contains(&job), "job {job} had ended: {facts:?}");
        }
        let Some(lease) = facts.numbers.get("lease").copied() else { return };
        match facts.message.as_str() {
            "lease granted" => {
                let [job, era, first, microbatches] =
                    ["job", "era", "task", "microbatches"].map(|name| facts.get(name));
                self.granted += 1;
                assert!(!self.ended.contains(&job), "job {job} had ended: {facts:?}");
                let before = self.leases.insert(lease, Lease { job, era, first, microbatches });
                assert!(before.is_none(), "lease {lease} was granted twice");
                if facts.get("attempt") > 1 {
                    *self.counts.entry("leases granted again".to_owned()).or_default() += 1;
                }
            }
            "lease lost" => {
                self.leases.remove(&lease);
                self.lost.insert(lease);
            }
            "lease released" | "task failed" => drop(self.leases.remove(&lease)),
            "task completed" if facts.get("accepted") == 0 => {
                let why = if self.lost.contains(&lease) { "lost" } else { "copied" };
                *self.counts.entry(format!("late reports of {why} leases")).or_default() += 1;
            }
            "task completed" => {
                let ended = || panic!("lease {lease} had ended, and its report was taken: {facts:?}");
                let Lease { job, era, first, microbatches } =
                    self.leases.remove(&lease).unwrap_or_else(ended);
                for id in first..first + microbatches {
                    // Each start of the master has its own lease ids, and a new dispatcher.
                    let start = lease >> 40;
                    let new = self.microbatches_done.insert((job, era, start, id));
                    assert!(new, "microbatch {id} was written down as done twice: lease {lease}");
                }
            }
            _ => {}
        }
    }
}

/// Reads the name of a host.
struct Host<'a>(&'a mut String);

impl Visit for Host<'_> {
    fn record_str(&mut self, _: &Field, name: &str) {
        name.clone_into(self.0);
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

/// Fields of one event.
#[derive(Debug, Default)]
struct Facts {
    message: String,
    error: String,
    numbers: BTreeMap<&'static str, u64>,
}

impl Facts {
    fn get(&self, name: &str) -> u64 {
        *self.numbers.get(name).unwrap_or_else(|| panic!("no field `{name}`: {self:?}"))
    }
}

struct Fields<'a> {
    digest: &'a mut Digest,
    facts: &'a mut Facts,
}

impl Visit for Fields<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.facts.numbers.insert(field.name(), value);
        self.record_debug(field, &value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.record_u64(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.digest, "{}={value:?} ", field.name());
        match field.name() {
            "message" => self.facts.message = format!("{value:?}"),
            "error" => self.facts.error = format!("{value:?}"),
            // These fields are written as text, for people.
            "job" | "partition" => {
                let number = format!("{value:?}").parse().ok();
                self.facts.numbers.extend(number.map(|number| (field.name(), number)));
            }
            _ => {}
        }
    }
}

/// FNV-1a hash of the bytes written to it.
struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl fmt::Write for Digest {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Ok(())
    }
}

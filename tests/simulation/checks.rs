//! Watches a run from the inside: every tracing event goes into the digest of the schedule, and what a ps or the master
//! tells of itself is checked as it happens. A broken promise panics in the middle of it, which ends the process.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::ambient;

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

#[derive(Default)]
struct State {
    digest: Digest,
    counts: BTreeMap<String, u64>,
    parts: BTreeMap<Part, Life>,
    /// Leases that nobody has ended, and what they are for.
    leases: BTreeMap<u64, Lease>,
    /// By job, placement, and number in the job: when a ps was lost, they are done again for the one in its place.
    microbatches_done: BTreeSet<(u64, u64, u64)>,
}

/// Job, partition, era.
type Part = (u64, u64, u64);

/// A partition from when it was opened.
#[derive(Default)]
struct Life {
    version: u64,
    applied: BTreeSet<u64>,
    /// In the place of one that was lost, in the same era.
    again: bool,
}

#[derive(Clone, Copy)]
struct Lease {
    job: u64,
    placement: u64,
    first: u64,
    microbatches: u64,
}

/// Something that goes into the summary.
pub(crate) fn count(what: impl Into<String>) {
    add(what, 1);
}

/// The same, several times.
pub(crate) fn add(what: impl Into<String>, amount: u64) {
    STATE.with_borrow_mut(|state| *state.counts.entry(what.into()).or_default() += amount);
}

/// What was counted, and the digest of everything that happened, in order and with its time.
pub(crate) fn take() -> (BTreeMap<String, u64>, u64) {
    STATE.with_borrow_mut(|state| {
        // Otherwise the events have other names now, and the checks are asleep.
        assert!(!state.parts.is_empty() && !state.microbatches_done.is_empty(), "nothing was checked");
        (std::mem::take(&mut state.counts), state.digest.0)
    })
}

/// The layer that sees every event.
pub(crate) struct Watch;

impl<S: Subscriber> Layer<S> for Watch {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        STATE.with_borrow_mut(|state| {
            let metadata = event.metadata();
            let mut facts = Facts::default();
            // Writing to a digest cannot fail.
            let _ = write!(state.digest, "{:?} {} ", ambient::elapsed(), metadata.target());
            event.record(&mut Fields { digest: &mut state.digest, facts: &mut facts });
            match metadata.target() {
                "ebbflow::checks" => state.on_ps(&facts),
                target if target.starts_with("master::") => state.on_master(&facts),
                _ => {}
            }
        });
    }
}

impl State {
    /// Something happened to a partition.
    fn on_ps(&mut self, facts: &Facts) {
        if facts.message == "refused" {
            let kind = facts.error.split([' ', '(', '{']).next().unwrap_or_default();
            *self.counts.entry(format!("refused: {kind}")).or_default() += 1;
            return;
        }
        let part = (facts.get("job"), facts.get("partition"), facts.get("era"));
        if facts.message == "opened" {
            let again = self.parts.contains_key(&part);
            self.parts.insert(part, Life { again, ..Life::default() });
            return;
        }
        let life = self.parts.get_mut(&part).unwrap_or_else(|| panic!("{part:?} is not open: {facts:?}"));
        let (era, sender) = (part.2, facts.numbers.get("sender_era").copied());
        assert!(sender.is_none_or(|sender| sender == era), "a worker of another era got through: {facts:?}");
        match facts.message.as_str() {
            "taken up" => {
                let (step, watermark) = (facts.get("step"), facts.get("watermark"));
                let delay = facts.numbers.get("delay");
                // Only canonical steps (whose partition is at its watermark) and bounded ones have a delay. What was computed
                // before a partition was lost may come late to the one in its place, and is not too old for it.
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

    /// Something happened to a lease.
    fn on_master(&mut self, facts: &Facts) {
        let Some(lease) = facts.numbers.get("lease").copied() else { return };
        match facts.message.as_str() {
            "lease granted" => {
                let [job, placement, first, microbatches] =
                    ["job", "placement", "task", "microbatches"].map(|name| facts.get(name));
                let before = self.leases.insert(lease, Lease { job, placement, first, microbatches });
                assert!(before.is_none(), "lease {lease} was granted twice");
                if facts.get("attempt") > 1 {
                    *self.counts.entry("leases granted again".to_owned()).or_default() += 1;
                }
            }
            "lease lost" | "lease released" | "task failed" => drop(self.leases.remove(&lease)),
            "task completed" if facts.get("accepted") == 0 => {
                *self.counts.entry("late reports".to_owned()).or_default() += 1;
            }
            "task completed" => {
                let ended = || panic!("lease {lease} had ended, and its report was taken: {facts:?}");
                let Lease { job, placement, first, microbatches } =
                    self.leases.remove(&lease).unwrap_or_else(ended);
                for id in first..first + microbatches {
                    let new = self.microbatches_done.insert((job, placement, id));
                    assert!(new, "microbatch {id} was written down as done twice: lease {lease}");
                }
            }
            _ => {}
        }
    }
}

/// The fields of one event.
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
            _ => {}
        }
    }
}

/// FNV-1a over what is written to it.
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

//! Computed microbatches with worker and time, read from the traces that workers write
//! (`tests/harness/paced.rs`).

#![allow(dead_code, reason = "each bench uses a part of it")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// One computed microbatch. Times since 1970.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Computed {
    pub(crate) worker: u32,
    pub(crate) microbatch: u64,
    pub(crate) begin: Duration,
    pub(crate) end: Duration,
}

/// All computed microbatches, by the time of their end.
#[derive(Debug)]
pub(crate) struct Trace {
    computed: Vec<Computed>,
    /// Time when the first microbatch of each step was begun. In `sync` the step before it was
    /// applied at that time.
    begun: BTreeMap<u64, Duration>,
    per_step: u64,
}

impl Trace {
    /// Reads the traces in `folder` of a job with the seed `seed`, `microbatches` in all and
    /// `per_step` in each step.
    pub(crate) fn read(folder: &Path, seed: u64, microbatches: u64, per_step: u64) -> Self {
        let key = |id| (ebbflow::random::key(seed, "dropout", id), id);
        let ids: HashMap<u64, u64> = (0..microbatches).map(key).collect();
        let mut computed = Vec::new();
        for entry in fs::read_dir(folder).expect("the traces' folder") {
            let path = entry.expect("a trace").path();
            let name = path.file_name().and_then(|name| name.to_str());
            let worker = name.and_then(|name| name.parse().ok()).expect("a trace has its process's id");
            let text = fs::read_to_string(&path).expect("a trace");
            // A worker that lives may be writing its newest line.
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            for line in whole.lines() {
                let numbers: Vec<u64> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
                let [begin, end, key] = numbers[..] else { panic!("{}: `{line}`", path.display()) };
                // Key 0 is the trial of the worker that describes the model.
                let Some(&microbatch) = ids.get(&key) else { continue };
                computed.push(Computed {
                    worker,
                    microbatch,
                    begin: Duration::from_micros(begin),
                    end: Duration::from_micros(end),
                });
            }
        }
        computed.sort_by_key(|one| one.end);
        let mut begun: BTreeMap<u64, Duration> = BTreeMap::new();
        for one in &computed {
            let first = begun.entry(one.microbatch / per_step).or_insert(one.begin);
            *first = one.begin.min(*first);
        }
        Self { computed, begun, per_step }
    }

    pub(crate) fn step(&self, microbatch: u64) -> u64 {
        microbatch / self.per_step
    }

    /// Returns the time when `step` was applied, as the first worker of the next step saw it.
    pub(crate) fn applied(&self, step: u64) -> Option<Duration> {
        self.begun.get(&(step + 1)).copied()
    }

    /// Returns the times between one applied step and the next, for the steps applied in `window`.
    pub(crate) fn intervals(&self, window: &Range<Duration>) -> Vec<Duration> {
        let pairs = self.begun.values().zip(self.begun.values().skip(1));
        pairs.filter(|(_, to)| window.contains(*to)).map(|(&from, &to)| to.saturating_sub(from)).collect()
    }

    /// Returns the number of microbatches whose first computation ended in `window`.
    pub(crate) fn progress(&self, window: &Range<Duration>) -> usize {
        let mut seen = BTreeSet::new();
        let first = self.computed.iter().filter(|one| seen.insert(one.microbatch));
        first.filter(|one| window.contains(&one.end)).count()
    }

    /// Returns how many computations of microbatches that were computed before ended in `window`,
    /// and how many of those began after their step was applied.
    pub(crate) fn repeated(&self, window: &Range<Duration>) -> (usize, usize) {
        let mut seen = BTreeSet::new();
        let again = self.computed.iter().filter(|one| !seen.insert(one.microbatch));
        let again: Vec<_> = again.filter(|one| window.contains(&one.end)).collect();
        let late = |one: &&&Computed| {
            self.applied(self.step(one.microbatch)).is_some_and(|applied| applied < one.begin)
        };
        (again.len(), again.iter().filter(late).count())
    }

    /// Returns the end of the longest time without a begun step, among those that end in `window`.
    /// If the job was rewound (by more than a late copy of the step before), it also returns how
    /// many steps the next one lies before the newest.
    pub(crate) fn standstill(&self, window: &Range<Duration>) -> (Duration, u64) {
        let mut by_begin: Vec<_> =
            self.computed.iter().map(|one| (one.begin, self.step(one.microbatch))).collect();
        by_begin.sort_unstable();
        let (mut newest, mut before) = (0, Duration::ZERO);
        let mut longest = (Duration::ZERO, window.end, 0);
        for (begin, step) in by_begin {
            let rewound = step + 2 < newest;
            if step > newest || rewound {
                if window.contains(&begin) {
                    longest = longest.max((begin - before, begin, newest.saturating_sub(step)));
                }
                (newest, before) = (step, begin);
            }
        }
        (longest.1, longest.2)
    }

    /// Returns the first microbatch that a worker computed.
    pub(crate) fn first_of(&self, worker: u32) -> Option<Computed> {
        self.computed.iter().find(|one| one.worker == worker).copied()
    }
}

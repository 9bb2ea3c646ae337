//! How fast each worker of a job computes: pure, from the durations of its leases. It outlives the
//! books of a training, so that a rewind forgets nobody's speed.
//!
//! - A speed is a time per microbatch: the median of the latest five leases, so that one hiccup is
//!   none. What is within half of the fleet's median *is* the fleet's median: equal machines get
//!   equal shares whatever the noise.
//! - Opening the job and the first pull of its weights are not speed: the worker says how long it
//!   worked on a lease without them.
//! - A worker is *unknown* until its second lease, for the first computation of a process takes
//!   longer. It counts as the median.
//! - A lease that somebody else completed first says something about a known worker when it was
//!   late: its holder is at least that slow. It says nothing about a worker that has completed no
//!   two leases yet, which may have been opening the job. Such a worker becomes known by what it
//!   says in heartbeats that a microbatch takes it to compute, if that is far more than usual.
//! - A slow worker that holds nothing cannot show that it has become fast again. So it is *tried*:
//!   it is given one microbatch after the time of four of its own or of 32 usual ones, whichever
//!   comes first. The others take it for as slow as before meanwhile, so that the first of them
//!   with nothing else to do takes a copy at once: a trial delays no step. A worker that takes 100
//!   ms instead of 10 is tried every 0.32 s.
//!
//! Each lease asks for the fleet's median several times, and a fleet may have thousands of workers:
//! medians are kept sorted, so that a question costs nothing and a completed lease a binary search.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use proto::ids::IncarnationId;

/// Leases that a speed is the median of.
const TIMES: usize = 5;

/// An idle slow worker is tried again after this many of its microbatches.
const TRIAL_OWN: u32 = 4;

/// An idle slow worker waits for at most this many usual microbatches, even if it was once very
/// slow.
const TRIAL_USUAL: u32 = 32;

/// Groups of like speed, for a quick look at all workers.
const GROUPS: usize = 32;

/// Workers of a larger fleet at which a lease looks, for each lease asks what all can do: of 64
/// workers whose speeds differ by a third the mean is known to one part in 24, and the next time it
/// is of others. With 24 workers large steps lost a quarter of their speed.
const SAMPLE_MAX: usize = 64;

/// A worker is late after this many times its usual duration, even if it has taken longer lately.
const PATIENCE: u32 = 3;

/// What is known of a worker, and guessed of one that is unknown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub(crate) worker: IncarnationId,
    /// What a microbatch is expected to take.
    pub(crate) expected: Duration,
    /// What one has taken lately at worst, within reason: beyond that it is late.
    pub(crate) worst: Duration,
    /// When its latest lease ended.
    pub(crate) freed: Duration,
    /// When it last asked for work.
    asked: Duration,
}

/// The speeds of a job's workers.
#[derive(Debug, Default)]
pub(crate) struct Speeds {
    workers: BTreeMap<IncarnationId, Speed>,
    /// The workers in the order of the crew.
    crew: Vec<IncarnationId>,
    /// Medians of those who have completed a second lease, ascending.
    warm: Vec<(Duration, IncarnationId)>,
    /// Medians of the other workers, ascending.
    cold: Vec<(Duration, IncarnationId)>,
    changes: u64,
}

#[derive(Debug)]
struct Speed {
    /// Time per microbatch in its latest leases, oldest first.
    times: VecDeque<Duration>,
    /// The median of `times`.
    median: Option<Duration>,
    /// Whether its first lease is over.
    warm: bool,
    /// When its latest lease ended, so when it began the next one at the earliest.
    freed: Duration,
    /// When it last asked for work.
    asked: Duration,
    /// Whether it is tried again: its next lease is one microbatch.
    on_trial: bool,
}

/// How slow a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slow {
    /// Time of a microbatch on this worker.
    pub(crate) time: Duration,
    /// Usual time of a microbatch.
    pub(crate) usual: Duration,
    /// Time at which this worker is tried again.
    pub(crate) again: Duration,
}

impl Speeds {
    /// Records that exactly these workers take part.
    pub(crate) fn follow(&mut self, now: Duration, crew: &[IncarnationId]) {
        if self.crew == crew {
            return;
        }
        self.crew = crew.to_vec();
        self.changes += 1;
        let members: BTreeSet<_> = crew.iter().collect();
        self.workers.retain(|worker, _| members.contains(worker));
        self.warm.retain(|(_, worker)| members.contains(worker));
        self.cold.retain(|(_, worker)| members.contains(worker));
        for &worker in crew {
            let new = || Speed {
                times: VecDeque::new(),
                median: None,
                warm: false,
                freed: now,
                asked: now,
                on_trial: false,
            };
            self.workers.entry(worker).or_insert_with(new);
        }
    }

    /// Changes what is known of a worker.
    fn change(&mut self, worker: IncarnationId, change: impl FnOnce(&mut Speed)) {
        let Some(speed) = self.workers.get_mut(&worker) else { return };
        self.changes += 1;
        let before = (speed.warm, speed.median);
        change(speed);
        speed.median = median(speed.times.iter().copied());
        let after = (speed.warm, speed.median);
        if before == after {
            return;
        }
        if let (warm, Some(median)) = before {
            let sorted = if warm { &mut self.warm } else { &mut self.cold };
            let at = sorted.binary_search(&(median, worker)).expect("it was put there");
            sorted.remove(at);
        }
        if let (warm, Some(median)) = after {
            let sorted = if warm { &mut self.warm } else { &mut self.cold };
            let at = sorted.partition_point(|other| *other < (median, worker));
            sorted.insert(at, (median, worker));
        }
    }

    /// Returns how often anything changed that copies depend on.
    pub(crate) const fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns whether a worker takes part.
    pub(crate) fn takes_part(&self, worker: IncarnationId) -> bool {
        self.workers.contains_key(&worker)
    }

    /// Returns what is known of a worker.
    pub(crate) fn of(&self, worker: IncarnationId, usual: Duration) -> Known {
        let speed = self.workers.get(&worker);
        let warm = speed.filter(|speed| speed.warm);
        let own = warm.and_then(|speed| speed.median);
        let expected = own.map_or(usual, |own| like(own, usual));
        let worst = warm.and_then(|speed| speed.times.iter().max().copied());
        Known {
            worker,
            expected,
            worst: worst.map_or(usual, |worst| worst.clamp(expected, expected * PATIENCE)),
            freed: speed.map_or(Duration::ZERO, |speed| speed.freed),
            asked: speed.map_or(Duration::MAX, |speed| speed.asked),
        }
    }

    /// Returns an upper bound on the microbatches that all workers do in `time`, were all free. It
    /// takes workers in a few groups of like speed, each as fast as the fastest of its group.
    pub(crate) fn capacity(&self, time: Duration, usual: Duration) -> u64 {
        let of_each = |expected: Duration| (time.as_nanos() / expected.as_nanos().max(1)) as u64;
        let group = self.warm.len().div_ceil(GROUPS).max(1);
        let warm = self.warm.chunks(group).map(|group| {
            let (fastest, _) = group[0];
            of_each(like(fastest, usual)).saturating_mul(group.len() as u64)
        });
        // Of the others nothing is known.
        let cold = of_each(usual).saturating_mul((self.workers.len() - self.warm.len()) as u64);
        warm.fold(cold, u64::saturating_add)
    }

    /// Returns n and every n-th worker; n is 1 in a small fleet.
    pub(crate) fn sample(&self, usual: Duration) -> (u64, impl Iterator<Item = Known>) {
        let stride = self.crew.len().div_ceil(SAMPLE_MAX).max(1);
        // Others each time that anything is learnt.
        let others = self.changes as usize % stride;
        let sample = self.crew.iter().skip(others).step_by(stride);
        (stride as u64, sample.map(move |&worker| self.of(worker, usual)))
    }

    /// Records that a worker asks for work; `idle`: it holds none. One that is too slow is tried
    /// when it is time.
    pub(crate) fn asked(&mut self, now: Duration, worker: IncarnationId, idle: bool) {
        let usual = self.usual();
        let Some(speed) = self.workers.get_mut(&worker) else { return };
        speed.asked = now;
        speed.on_trial = idle && speed.tried_again(usual).is_some_and(|again| again <= now);
    }

    /// Returns how slow a worker is; `None` if it is about as fast as usual, or not known well
    /// enough.
    pub(crate) fn slow(&self, worker: IncarnationId) -> Option<Slow> {
        let usual = self.usual();
        let speed = self.workers.get(&worker)?;
        Some(Slow { time: speed.median?, usual: usual?, again: speed.tried_again(usual)? })
    }

    /// Records that a lease was completed: its time per microbatch.
    pub(crate) fn completed(&mut self, now: Duration, worker: IncarnationId, time: Duration) {
        self.change(worker, |speed| {
            if std::mem::take(&mut speed.on_trial) {
                // What it was before the trial is over.
                speed.times.clear();
            }
            if !speed.times.is_empty() && !std::mem::replace(&mut speed.warm, true) {
                // The first one was only better than nothing.
                speed.times.clear();
            }
            speed.learn(time);
            speed.freed = now;
        });
    }

    /// Records that a lease ended because somebody else completed it; `at_least`: its time per
    /// microbatch up to then, if it was late.
    pub(crate) fn beaten(&mut self, now: Duration, worker: IncarnationId, at_least: Option<Duration>) {
        self.change(worker, |speed| {
            speed.on_trial = false;
            speed.freed = now;
            // Of any other worker nobody knows whether it has computed yet.
            if let Some(time) = at_least.filter(|_| speed.warm) {
                speed.learn(time);
            }
        });
    }

    /// Records that a worker says that a microbatch takes it so long to compute. That is news of
    /// one that has completed nothing, because copies of its leases are always faster.
    pub(crate) fn computes(&mut self, worker: IncarnationId, time: Duration) {
        let usual = self.usual();
        let unknown = self.workers.get(&worker).is_some_and(|speed| !speed.warm);
        if unknown && usual.is_some_and(|usual| like(time, usual) > usual) {
            self.change(worker, |speed| {
                speed.times = [time].into();
                speed.warm = true;
            });
        }
    }

    /// Returns the fleet's median time per microbatch. While nobody has a second lease behind it
    /// the first ones count.
    pub(crate) fn usual(&self) -> Option<Duration> {
        middle(&self.warm).or_else(|| middle(&self.cold))
    }

    /// Returns whether the fleet's speed is known and this worker's is not.
    pub(crate) fn is_newcomer(&self, worker: IncarnationId) -> bool {
        let known = self.workers.get(&worker).is_some_and(|speed| speed.warm);
        !known && !self.warm.is_empty()
    }

    /// Returns whether the fleet's speed is known and this worker has completed nothing yet: it may
    /// be opening the job.
    pub(crate) fn is_untried(&self, worker: IncarnationId) -> bool {
        let tried = self.workers.get(&worker).is_some_and(|speed| !speed.times.is_empty());
        !tried && !self.warm.is_empty()
    }

    /// Returns whether this slow worker, which holds nothing, is tried now.
    pub(crate) fn is_on_trial(&self, worker: IncarnationId) -> bool {
        self.workers.get(&worker).is_some_and(|speed| speed.on_trial)
    }
}

impl Speed {
    fn learn(&mut self, time: Duration) {
        self.times.push_back(time);
        if self.times.len() > TIMES {
            self.times.pop_front();
        }
    }

    /// Returns when it is tried, if it is too slow and holds nothing.
    fn tried_again(&self, usual: Option<Duration>) -> Option<Duration> {
        let (usual, median) = (usual?, self.median.filter(|_| self.warm)?);
        let pause = (median * TRIAL_OWN).min(usual * TRIAL_USUAL);
        (like(median, usual) > usual).then(|| self.freed + pause)
    }
}

impl Known {
    /// Returns how long this worker has not asked for work.
    pub(crate) fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.asked)
    }
}

/// What differs less than by half is noise.
fn like(time: Duration, usual: Duration) -> Duration {
    if time * 2 <= usual * 3 && usual * 2 <= time * 3 { usual } else { time }
}

/// Returns the lower one of an even number.
fn middle(sorted: &[(Duration, IncarnationId)]) -> Option<Duration> {
    sorted.get(sorted.len().saturating_sub(1) / 2).map(|(median, _)| *median)
}

/// Returns the median of times in any order; the lower one of an even number.
fn median(times: impl Iterator<Item = Duration>) -> Option<Duration> {
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    proptest! {
        #[test]
        fn no_fleet_does_more_than_its_capacity(
            times in proptest::collection::vec(proptest::collection::vec(1u32..2000, 0..4), 1..200),
            free in 0u32..5000,
        ) {
            let crew: Vec<_> = (1..).map(IncarnationId).take(times.len()).collect();
            let mut speeds = Speeds::default();
            speeds.follow(Duration::ZERO, &crew);
            for (&worker, times) in crew.iter().zip(&times) {
                times.iter().for_each(|&time| speeds.completed(Duration::ZERO, worker, time * MS));
            }
            let (free, usual) = (free * MS, speeds.usual().unwrap_or(MS));
            let exact = |worker| (free.as_nanos() / speeds.of(worker, usual).expected.as_nanos()) as u64;
            let done = crew.iter().map(|&worker| exact(worker)).sum::<u64>();
            let capacity = speeds.capacity(free, usual);
            prop_assert!(done <= capacity, "{done} of {capacity}");
            // Groups of one.
            prop_assert!(crew.len() > GROUPS || done == capacity, "{done} of {capacity}");
        }
    }
}

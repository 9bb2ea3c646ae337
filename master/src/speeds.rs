//! How fast each worker of a job computes: pure, from the durations of its leases. It outlives the books of a training, so that
//! a rewind forgets nobody's speed.
//!
//! - A speed is a time per microbatch: the median of the latest five leases, so that one hiccup is none. What is within half of
//!   the fleet's median *is* the fleet's median: equal machines get equal shares whatever the noise.
//! - A worker is *unknown* until its second lease, for the first one includes opening the job. It counts as the median.
//! - A lease that somebody else completed first still says something when it was late: its holder is at least that slow.
//! - A slow worker that holds nothing cannot show that it has become fast again. So it is forgotten after 32 of its own
//!   microbatches' time: it is unknown then, is given one microbatch, and its lease is copied if it is late. A worker that
//!   takes 100 ms instead of 10 is tried every 3.2 s, for the price of about one microbatch: 0.3 %.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proto::ids::IncarnationId;

/// Leases that a speed is the median of.
const TIMES: usize = 5;

/// An idle slow worker is tried again after this many of its microbatches.
const TRUST: u32 = 32;

/// A worker is late after this many times its usual duration, even if it has taken longer lately.
const PATIENCE: u32 = 3;

/// The speeds of a job's workers.
#[derive(Debug, Default)]
pub(crate) struct Speeds {
    workers: BTreeMap<IncarnationId, Speed>,
}

#[derive(Debug)]
struct Speed {
    /// Time per microbatch in its latest leases, oldest first.
    times: VecDeque<Duration>,
    /// Its first lease is over.
    warm: bool,
    /// When its latest lease ended, so when it began the next one at the earliest.
    freed: Duration,
    /// When it last asked for work.
    asked: Duration,
}

impl Speed {
    fn median(&self) -> Option<Duration> {
        median(self.times.iter().copied())
    }
}

impl Speeds {
    /// Exactly these workers take part, in ascending order.
    pub(crate) fn follow(&mut self, now: Duration, crew: &[IncarnationId]) {
        if !self.workers.keys().eq(crew) {
            self.workers.retain(|worker, _| crew.contains(worker));
            for &worker in crew {
                let new = || Speed { times: VecDeque::new(), warm: false, freed: now, asked: now };
                self.workers.entry(worker).or_insert_with(new);
            }
        }
    }

    /// All who take part.
    pub(crate) fn crew(&self) -> impl Iterator<Item = IncarnationId> {
        self.workers.keys().copied()
    }

    /// A worker asks for work; `idle`: it holds none. Forgets a speed that is too old to be believed.
    pub(crate) fn asked(&mut self, now: Duration, worker: IncarnationId, idle: bool) {
        let usual = self.usual();
        let Some(speed) = self.workers.get_mut(&worker) else { return };
        speed.asked = now;
        if let (Some(median), Some(usual)) = (speed.median(), usual)
            && idle
            && like(median, usual) > usual
            && now >= speed.freed + median * TRUST
        {
            speed.times.clear();
        }
    }

    /// A lease was completed: its time per microbatch.
    pub(crate) fn completed(&mut self, now: Duration, worker: IncarnationId, time: Duration) {
        let Some(speed) = self.workers.get_mut(&worker) else { return };
        if speed.times.is_empty() || std::mem::replace(&mut speed.warm, true) {
            speed.times.push_back(time);
        } else {
            // The first one is only better than nothing.
            speed.times = [time].into();
        }
        if speed.times.len() > TIMES {
            speed.times.pop_front();
        }
        speed.freed = now;
    }

    /// A lease ended because somebody else completed it; `at_least`: its time per microbatch up to then, if it was late.
    pub(crate) fn beaten(&mut self, now: Duration, worker: IncarnationId, at_least: Option<Duration>) {
        match at_least {
            Some(time) => self.completed(now, worker, time),
            None => drop(self.workers.get_mut(&worker).map(|speed| speed.freed = now)),
        }
    }

    /// The fleet's median time per microbatch. While nobody has a second lease behind it the first ones count.
    pub(crate) fn usual(&self) -> Option<Duration> {
        self.median(true).or_else(|| self.median(false))
    }

    /// Whether the fleet's speed is known and this worker's is not.
    pub(crate) fn is_newcomer(&self, worker: IncarnationId) -> bool {
        let known = self.workers.get(&worker).is_some_and(|speed| speed.warm && !speed.times.is_empty());
        !known && self.median(true).is_some()
    }

    fn median(&self, warm: bool) -> Option<Duration> {
        median(self.workers.values().filter(|speed| speed.warm == warm).filter_map(Speed::median))
    }

    /// What a microbatch of this worker is expected to take.
    pub(crate) fn expected(&self, worker: IncarnationId, usual: Duration) -> Duration {
        let own = self.workers.get(&worker).filter(|speed| speed.warm).and_then(Speed::median);
        own.map_or(usual, |own| like(own, usual))
    }

    /// What a microbatch of this worker has taken lately at worst, within reason: beyond that it is late.
    pub(crate) fn worst(&self, worker: IncarnationId, usual: Duration) -> Duration {
        let speed = self.workers.get(&worker).filter(|speed| speed.warm);
        let worst = speed.and_then(|speed| speed.times.iter().max().copied());
        let expected = self.expected(worker, usual);
        worst.map_or(usual, |worst| worst.clamp(expected, expected * PATIENCE))
    }

    /// When its latest lease ended.
    pub(crate) fn freed(&self, worker: IncarnationId) -> Duration {
        self.workers.get(&worker).map_or(Duration::ZERO, |speed| speed.freed)
    }

    /// For how long it has not asked for work.
    pub(crate) fn silence(&self, now: Duration, worker: IncarnationId) -> Duration {
        self.workers.get(&worker).map_or(Duration::ZERO, |speed| now.saturating_sub(speed.asked))
    }
}

/// What differs less than by half is noise.
fn like(time: Duration, usual: Duration) -> Duration {
    if time * 2 <= usual * 3 && usual * 2 <= time * 3 { usual } else { time }
}

/// The lower one of an even number.
fn median(times: impl Iterator<Item = Duration>) -> Option<Duration> {
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied()
}

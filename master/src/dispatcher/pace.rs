//! How the speeds of workers decide: who gets how much of a step, and when a lease is worth a copy.
//!
//! One number carries it, the *rest*: how much longer the holder of a lease will take. Its expected duration minus its age; and
//! once it is late, as long again as it is late already.
//!
//! **Parts.** What is left of a step goes to whoever brings it to its end soonest. The *level* is the shortest time in which the
//! fleet can do all that is left, each worker from when it is free; a worker's part is what it can do by then, which may be
//! nothing. M = 8, three workers that take 10 ms and one that takes 100 ms: the level is 30 ms (3 + 3 + 3 + 0 microbatches), so
//! the fourth gets nothing, and the step takes as long as if it were not there. M = 32: 110 ms (11 + 11 + 11 + 1), it gets one.
//!
//! **Copies.** A worker that has nothing to begin takes a copy when it will be done with it earlier than the holder. Two
//! microbatches at 10 ms: a holder that usually takes 20 ms is late from then on, and at 40 ms it is expected to take another
//! 20 ms, which is what a copy takes. Of a holder known to take 200 ms there is a copy at once.
//!
//! Nobody waits for ever: who is silent, with a lease or without one, is expected to stay silent for as long again. So the
//! level rises until it reaches whoever asks, and a slow worker gets everything when the fast ones are gone.

use std::collections::BTreeMap;

use super::*;

/// A microbatch's time while nothing is known; any length will do, for only proportions count.
const UNKNOWN: Duration = Duration::from_secs(1);

impl Dispatcher {
    /// How many microbatches of what is left around `step` fall to `worker`.
    pub(super) fn part(&self, now: Duration, worker: IncarnationId, step: Step) -> u64 {
        let window = self.window(step);
        let returned = self.returned.range(..window.end);
        let left = returned.map(|(&first, returned)| returned.end.min(window.end) - first).sum::<u64>()
            + window.end.saturating_sub(self.next);
        let usual = self.speeds.usual().unwrap_or(UNKNOWN);
        let mut backlogs = self.backlogs(now, &window, usual);
        let mut free = |who| {
            let silent = || self.speeds.silence(now, who);
            (nanos(backlogs.remove(&who).unwrap_or_else(silent)), nanos(self.speeds.expected(who, usual)))
        };
        let crew: Vec<_> = self.speeds.crew().map(|who| (who, free(who))).collect();
        let Some(&(_, (begin, time))) = crew.iter().find(|&&(who, _)| who == worker) else { return 0 };
        let done_by =
            |end: u64| crew.iter().map(|&(_, (begin, time))| end.saturating_sub(begin) / time).sum::<u64>();
        // Alone it would take this long, so the level is not above.
        let (mut low, mut level) = (0, begin.saturating_add(time.saturating_mul(left)));
        while low < level {
            let middle = low.midpoint(level);
            if done_by(middle) >= left { level = middle } else { low = middle + 1 }
        }
        let part = (level.saturating_sub(begin) / time).min(left);
        // A small one shows how fast it is.
        if self.speeds.is_newcomer(worker) { part.min(1) } else { part }
    }

    /// The steps that are computed side by side with this one.
    fn window(&self, step: Step) -> Range<u64> {
        let first_of = |step| match step {
            step if step < self.plan.steps() => self.plan.first_of(Step(step)).get(),
            _ => self.plan.microbatches(),
        };
        let ahead = self.ahead();
        first_of(step.get().saturating_sub(ahead))..first_of(step.get() + ahead + 1)
    }

    /// How long each worker that holds something is busy with what it holds of these microbatches. What it holds before them does
    /// not count: they begin when that is done.
    fn backlogs(
        &self,
        now: Duration,
        window: &Range<u64>,
        usual: Duration,
    ) -> BTreeMap<IncarnationId, Duration> {
        let mut backlogs = BTreeMap::new();
        for (&first, run) in &self.runs {
            for grant in &run.holders {
                let backlog = backlogs.entry(grant.worker).or_insert(Duration::ZERO);
                if first >= window.end || run.end <= window.start {
                    continue;
                }
                // It computes one after the other, so the age of all but the first means nothing.
                *backlog += match backlog.is_zero() {
                    true => self.rest(now, first, run, grant, usual),
                    false => times(self.speeds.expected(grant.worker, usual), run.end - first),
                };
            }
        }
        backlogs
    }

    /// How much longer this holder is expected to take.
    fn rest(&self, now: Duration, first: u64, run: &Run, grant: &Grant, usual: Duration) -> Duration {
        let expected = times(self.speeds.expected(grant.worker, usual), run.end - first);
        let Some(begun) = self.begun(run, grant) else { return expected };
        let age = now.saturating_sub(begun);
        let late = age.saturating_sub(times(self.speeds.worst(grant.worker, usual), run.end - first));
        expected.saturating_sub(age).max(late)
    }

    /// When a copy of this run by `worker` pays, if it does not at once, and how much longer its holder will take.
    pub(super) fn copy_pays(
        &self,
        now: Duration,
        worker: IncarnationId,
        first: u64,
    ) -> Option<(Duration, Duration)> {
        let run = &self.runs[&first];
        let [holder] = run.holders.as_slice() else { return None };
        let begun = self.begun(run, holder)?;
        if holder.worker == worker {
            return None;
        }
        let Some(usual) = self.speeds.usual() else {
            // Nobody knows what is slow.
            return Some((begun + self.limits.lease, now.saturating_sub(begun)));
        };
        let len = run.end - first;
        let own = times(self.speeds.expected(worker, usual), len);
        let rest = self.rest(now, first, run, holder, usual);
        let late = begun + times(self.speeds.worst(holder.worker, usual), len);
        Some((if rest > own { now } else { late + own + Duration::from_nanos(1) }, rest))
    }

    /// Whether this worker holds something that can be computed now.
    pub(super) fn is_busy(&self, worker: IncarnationId) -> bool {
        self.runs.values().any(|run| run.ready.is_some() && run.is_held_by(worker))
    }

    /// Learns from a run that is completed: from its holder `winner`, and from the other one.
    pub(super) fn learn(&mut self, now: Duration, winner: LeaseId, first: u64, run: &Run) {
        let len = u32::try_from(run.end - first).unwrap_or(u32::MAX);
        let usual = self.speeds.usual();
        for grant in &run.holders {
            let age = now.saturating_sub(self.begun(run, grant).unwrap_or(grant.granted));
            let time = age / len;
            if grant.lease == winner {
                self.speeds.completed(now, grant.worker, time);
            } else {
                let late = usual.is_some_and(|usual| time > self.speeds.worst(grant.worker, usual));
                self.speeds.beaten(now, grant.worker, late.then_some(time));
            }
        }
    }

    /// Runs whose weights exist from now on can be computed.
    pub(super) fn ready(&mut self, now: Duration) {
        let until = self.step_at(self.watermark().get()).get() + self.ahead();
        let plan = self.plan;
        let waiting = self.runs.iter_mut().filter(|(_, run)| run.ready.is_none());
        for (_, run) in
            waiting.take_while(|(first, _)| plan.microbatch(MicrobatchId(**first)).step.get() <= until)
        {
            run.ready = Some(now);
        }
    }

    /// Steps that are computed before those before them are applied.
    pub(super) fn ahead(&self) -> u64 {
        self.delay.map_or(LOOK_AHEAD, u64::from)
    }

    /// When a holder began; `None`: it waits for weights.
    fn begun(&self, run: &Run, grant: &Grant) -> Option<Duration> {
        Some(run.ready?.max(grant.granted).max(self.speeds.freed(grant.worker)))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).max(1)
}

fn times(duration: Duration, count: u64) -> Duration {
    duration.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}

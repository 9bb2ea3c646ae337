//! How the speeds of workers decide: who gets how much of a step, and when a lease is worth a copy.
//!
//! One number carries it, the *rest*: how much longer the holder of a lease will take. Its expected
//! duration minus its age; and once it is late, as long again as it is late already.
//!
//! **Parts.** What is left of a step goes to whoever brings it to its end soonest. The *level* is
//! the shortest time in which the fleet can do all that is left, each worker from when it is free;
//! a worker's part is what it can do by then, which may be nothing. M = 8, three workers that take
//! 10 ms and one that takes 100 ms: the level is 30 ms (3 + 3 + 3 + 0 microbatches), so the fourth
//! gets nothing, and the step takes as long as if it were not there. M = 32: 110 ms (11 + 11 + 11 +
//! 1), it gets one.
//!
//! **Copies.** A worker that has nothing to begin takes a copy when it will be done with it earlier
//! than the holder. Two microbatches at 10 ms: a holder that usually takes 20 ms is late from then
//! on, and at 40 ms it is expected to take another 20 ms, which is what a copy takes. Of a holder
//! known to take 200 ms there is a copy at once, also when it is only tried; and of one that has
//! completed nothing yet, while others have.
//!
//! A run that has a copy gets another one when all its holders *hang*, see `progress`.
//!
//! Every wait ends: a silent worker, with a lease or without one, is expected to stay silent for as
//! long again. So the level rises until it reaches the workers that ask, and a slow worker gets
//! everything when the fast ones are gone.
//!
//! In a large fleet only a sample is examined. Each worker of it stands for several.

use super::*;
use crate::speeds::Known;

/// A microbatch's time while nothing is known; any length will do, for only proportions count.
const UNKNOWN: Duration = Duration::from_secs(1);

impl Dispatcher {
    /// Returns how many microbatches of what is left around `step` fall to `worker`, as far as
    /// `most` matter to who asks.
    ///
    /// A part is at least k exactly when all together cannot do what is left before this worker has
    /// done k. So the level need not be found, and mostly one look at k = `most` is enough.
    pub(super) fn part(&self, now: Duration, worker: IncarnationId, step: Step, most: u64) -> u64 {
        let window = self.window(step);
        self.part_of(now, worker, &window, self.left_before(window.end), most)
    }

    /// Returns whether a worker brings `claims` of what is left until the end of `step` to its end
    /// no later than the others would.
    pub(super) fn keeps_up(&self, now: Duration, worker: IncarnationId, step: Step, claims: u64) -> bool {
        let window = self.window(step);
        let end = self.plan.first_of(step).get() + u64::from(self.plan.of(step));
        self.part_of(now, worker, &window, self.left_before(end), claims) >= claims
    }

    /// Returns how many microbatches before `end` are to be handed out.
    fn left_before(&self, end: u64) -> u64 {
        let returned = self.returned.range(..end);
        returned.map(|(&first, returned)| returned.end.min(end) - first).sum::<u64>()
            + end.saturating_sub(self.next)
    }

    /// Returns how many of `left` microbatches fall to `worker`, at most `most`. `window`: the
    /// microbatches that keep workers busy before these.
    fn part_of(
        &self,
        now: Duration,
        worker: IncarnationId,
        window: &Range<u64>,
        left: u64,
        most: u64,
    ) -> u64 {
        if !self.speeds.takes_part(worker) {
            return 0;
        }
        let usual = self.speeds.usual().unwrap_or(UNKNOWN);
        let mut own = self.speeds.of(worker, usual);
        let tried = self.speeds.is_on_trial(worker);
        if tried {
            own.expected = usual;
        }
        let (begin, time) = (nanos(self.free(now, &own, window)), nanos(own.expected));
        // A small one shows how fast it is.
        let small = tried || self.speeds.is_newcomer(worker);
        let most = if small { most.min(1) } else { most }.min(left);
        let reaches = |part: u64| {
            let end = begin.saturating_add(time.saturating_mul(part)) - 1;
            part == 0 || !self.is_done_by(now, end, left, window, usual)
        };
        if reaches(most) {
            return most;
        }
        let (mut part, mut beyond) = (0, most);
        while part + 1 < beyond {
            let middle = part.midpoint(beyond);
            if reaches(middle) { part = middle } else { beyond = middle }
        }
        part
    }

    /// Returns whether all together can do `left` microbatches until `end`, in nanoseconds from
    /// now, each from when it is free.
    fn is_done_by(&self, now: Duration, end: u64, left: u64, window: &Range<u64>, usual: Duration) -> bool {
        let Some(longest) = end.checked_sub(1) else { return left == 0 };
        // Nobody is free before the first nanosecond. Mostly that is enough to know, and costs less
        // than a look at what each holds.
        if self.speeds.capacity(Duration::from_nanos(longest), usual) < left {
            return false;
        }
        let (each, sample) = self.speeds.sample(usual);
        let mut done = 0;
        sample.into_iter().any(|one| {
            let begin = nanos(self.free(now, &one, window));
            done += each * (end.saturating_sub(begin) / nanos(one.expected));
            done >= left
        })
    }

    /// Returns the steps that are computed side by side with this one.
    fn window(&self, step: Step) -> Range<u64> {
        let first_of = |step| match step {
            step if step < self.plan.steps() => self.plan.first_of(Step(step)).get(),
            _ => self.plan.microbatches(),
        };
        let ahead = self.ahead();
        first_of(step.get().saturating_sub(ahead))..first_of(step.get() + ahead + 1)
    }

    /// Returns when a worker is free: how long it is busy with these microbatches, or how long it
    /// has been silent. Earlier microbatches that it holds do not count: these begin when those are
    /// done. A worker that waits for room on a ps is free.
    fn free(&self, now: Duration, worker: &Known, window: &Range<u64>) -> Duration {
        let Some(held) = self.held.get(&worker.worker) else { return worker.silence(now) };
        let mut backlog = Duration::ZERO;
        for &first in held {
            let run = &self.runs[&first];
            let grant = run.holders.iter().find(|grant| grant.worker == worker.worker);
            let grant = grant.expect("it holds the run");
            let full = grant.progress.phase == pb::Phase::WaitingForRoom;
            if full && self.waits_for_room(worker.worker).is_some() {
                return Duration::ZERO;
            }
            if first >= window.end || run.end <= window.start {
                continue;
            }
            // It computes one after the other, so the age of all but the first means nothing.
            backlog += match backlog.is_zero() {
                true => rest(now, worker, first, run, grant),
                false => times(worker.expected, run.end - first),
            };
        }
        backlog
    }

    /// Returns when a copy of this run by `worker` pays, if it does not at once, and how much
    /// longer its holder will take.
    pub(super) fn copy_pays(
        &self,
        now: Duration,
        worker: IncarnationId,
        first: u64,
    ) -> Option<(Duration, Duration)> {
        let run = &self.runs[&first];
        let [holder] = run.holders.as_slice() else { return self.another_copy(now, worker, run) };
        let usual = self.speeds.usual();
        let known = self.speeds.of(holder.worker, usual.unwrap_or(UNKNOWN));
        let begun = begun(run, holder, &known)?;
        if holder.worker == worker {
            return None;
        }
        let Some(usual) = usual else {
            // Nobody knows what is slow.
            return Some((begun + self.limits.lease, now.saturating_sub(begun)));
        };
        let len = run.end - first;
        let own = times(self.speeds.of(worker, usual).expected, len);
        let rest = rest(now, &known, first, run, holder);
        let late = begun + times(known.worst, len);
        // A worker that may still be opening the job delays no step.
        let at_once = rest > own || self.speeds.is_untried(holder.worker);
        Some((if at_once { now } else { late + own + Duration::from_nanos(1) }, rest))
    }

    /// Returns when one more copy of this run by `worker` pays, like
    /// [`copy_pays`](Self::copy_pays): once all its holders hang. A late holder is not enough, or a
    /// run that no worker can compute would soon keep all of them busy.
    fn another_copy(&self, now: Duration, worker: IncarnationId, run: &Run) -> Option<(Duration, Duration)> {
        if run.is_held_by(worker) {
            return None;
        }
        let hang = run.holders.iter().map(|grant| self.hangs_from(run, grant));
        let from = hang.collect::<Option<Vec<_>>>()?.into_iter().max()?;
        Some((from, now.saturating_sub(run.ready?)))
    }

    /// Returns when the holder of a run begins to hang unless it advances. `None`: the weights of
    /// the run do not exist yet.
    pub(super) fn hangs_from(&self, run: &Run, grant: &Grant) -> Option<Duration> {
        let known = self.speeds.usual().map(|usual| self.speeds.of(grant.worker, usual).worst);
        let from = grant.progress.hangs_from(known, self.limits.stall);
        // Until there are weights nobody gets on.
        Some(from + run.ready?.saturating_sub(grant.progress.since))
    }

    /// Returns whether this worker holds something that it can complete without others, and does
    /// not only wait for room on a ps. Of a copy of several steps it may compute only the first
    /// ones, because others hold what the later ones wait for.
    pub(super) fn is_busy(&self, worker: IncarnationId) -> bool {
        let until = self.step_at(self.lowest_without(worker)).get() + self.ahead();
        let completes = |run: &Run| run.ready.is_some() && self.step_at(run.end - 1).get() <= until;
        self.held_by(worker).iter().any(|first| completes(&self.runs[first]))
            && self.waits_for_room(worker).is_none()
    }

    /// Learns from a run that is completed: from its holder `winner`, which says that it `took` so
    /// long, and from the other one.
    ///
    /// What a lease costs the others is the time since it could begin; what of this was opening the
    /// job is not in `took`.
    pub(super) fn learn(
        &mut self,
        now: Duration,
        winner: LeaseId,
        took: Option<Duration>,
        first: u64,
        run: &Run,
    ) {
        let len = u32::try_from(run.end - first).unwrap_or(u32::MAX);
        let usual = self.speeds.usual();
        for grant in &run.holders {
            let known = self.speeds.of(grant.worker, usual.unwrap_or(UNKNOWN));
            let age = now.saturating_sub(begun(run, grant, &known).unwrap_or(grant.granted));
            let time = age / len;
            if grant.lease == winner {
                let time = took.map_or(time, |took| time.min(took / len));
                self.speeds.completed(now, grant.worker, time);
            } else {
                let late = usual.is_some() && time > known.worst;
                self.speeds.beaten(now, grant.worker, late.then_some(time));
            }
        }
    }

    /// Runs whose weights exist from now on can be computed.
    pub(super) fn ready(&mut self, now: Duration) {
        let until = self.step_at(self.watermark().get()).get() + self.ahead();
        while let Some(&first) = self.waiting.first().filter(|&&first| self.step_at(first).get() <= until) {
            self.waiting.remove(&first);
            self.no_copies = None;
            self.runs.get_mut(&first).expect("a run waits").ready = Some(now);
        }
    }

    /// Steps that are computed before those before them are applied.
    pub(super) fn ahead(&self) -> u64 {
        self.delay.map_or(LOOK_AHEAD, u64::from)
    }
}

/// Returns how much longer this holder is expected to take.
fn rest(now: Duration, holder: &Known, first: u64, run: &Run, grant: &Grant) -> Duration {
    let expected = times(holder.expected, run.end - first);
    let Some(begun) = begun(run, grant, holder) else { return expected };
    let age = now.saturating_sub(begun);
    let late = age.saturating_sub(times(holder.worst, run.end - first));
    expected.saturating_sub(age).max(late)
}

/// Returns when this holder began; `None`: it waits for weights.
fn begun(run: &Run, grant: &Grant, holder: &Known) -> Option<Duration> {
    Some(run.ready?.max(grant.granted).max(holder.freed))
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).max(1)
}

fn times(duration: Duration, count: u64) -> Duration {
    duration.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}

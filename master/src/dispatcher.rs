//! Which worker computes which microbatches: pure arithmetic on their numbers, `now` an argument.
//!
//! A microbatch is in exactly one of four places: done, in an outstanding run, in a returned run,
//! or at or past the frontier. Only the middle two are stored, so memory grows with what is handed
//! out and not with the job:
//!
//! ```text
//!   done  done  [ run ]  done  [ returned )  [ run ]  | next ............ microbatches
//!               ^ watermark                           ^ the frontier
//! ```
//!
//! A run is a node of its step's reduction tree, or several whole steps, so that a worker reduces
//! all of it before it pushes. A lease names one holder of a run; a copy for an idle worker is a
//! second lease of the same run. A late or foreign lease changes nothing.
//!
//! Nobody waits in a circle: whoever asks gets the oldest work that there is, and a worker that
//! holds as much as it may still gets what is of an earlier step than all that it holds. Only who
//! would keep all others waiting gets none, see `pace`.
//!
//! A ps with little room takes only what its oldest step lacks first. A worker whose gradients it
//! refuses waits for that, so it is *free for what goes before*: it gets every run that begins
//! before all that it holds, returned or as a copy. It gets no copy of later ones, which would wait
//! as well. So the first microbatch that a step lacks always finds somebody who computes it, also
//! when its holder hangs or has died and all others wait for room. To take their leases back would
//! not do: they would compute the same ones again.

mod lanes;
mod pace;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use proto::ids::{IncarnationId, LeaseId, MicrobatchId, Step};
use proto::pb;
use proto::plan::Plan;
use proto::tree;

use self::lanes::Lanes;
use crate::applied::Applied;
use crate::lease::{Asker, Attempts, Ending, Exhausted, Grant, HELD_MAX, LeaseIds, Limits, Lost};
use crate::speeds::Speeds;
use crate::why::Why;

/// Microbatches that a run of several whole steps may have: enough to hide the round trip to the
/// master.
const RUN_MAX: u64 = 16;

/// Time that the run of a worker which is alone takes, unless one step takes longer. A worker that
/// joins waits for two such runs.
const RUN_TIME: Duration = Duration::from_millis(500);

/// Microbatches that any lease may have, so that a worker that joins finds work soon even when M is
/// huge.
const LEASE_MAX: u64 = 1024;

/// Steps that may be handed out ahead of the first incomplete one when nothing else bounds them.
const LOOK_AHEAD: u64 = 64;

/// Least time between two looks at lanes that others keep.
const KEPT_MIN: Duration = Duration::from_millis(10);

/// The books of one job's training.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    plan: Plan,
    /// Steps that computing may run ahead of applying; `None`: no bound.
    delay: Option<u32>,
    limits: Limits,
    /// The frontier: no microbatch at or past it was ever handed out.
    next: u64,
    /// No microbatch at or past it will be.
    end: u64,
    /// No microbatch at or past it is handed out for now.
    held_back: u64,
    /// Handed out and come back undone, or passed over for other lanes, by the first microbatch;
    /// disjoint.
    returned: BTreeMap<u64, Returned>,
    /// Handed out, by the first microbatch; disjoint, each with a holder.
    runs: BTreeMap<u64, Run>,
    /// The first microbatches of the runs whose weights do not exist yet.
    waiting: BTreeSet<u64>,
    /// The first microbatches of the runs that each worker holds, ascending; of all who hold some.
    held: BTreeMap<IncarnationId, Vec<u64>>,
    /// What somebody was told who found nothing to copy, until something changes.
    no_copies: Option<NoCopies>,
    /// The run of each lease.
    leases: BTreeMap<LeaseId, u64>,
    /// The speeds of the workers, which outlive these books.
    pub(crate) speeds: Speeds,
    lanes: Lanes,
}

#[derive(Debug)]
struct Returned {
    end: u64,
    attempts: Attempts,
}

#[derive(Debug)]
struct Run {
    end: u64,
    attempts: Attempts,
    /// Time since which its weights exist, while it was held.
    ready: Option<Duration>,
    /// The holder, and the holders of copies.
    holders: Vec<Grant>,
}

/// No copy pays for a worker that holds nothing.
#[derive(Debug)]
struct NoCopies {
    /// What a microbatch of that worker takes, and how often speeds had changed.
    expected: Option<Duration>,
    speeds: u64,
    /// Before this time, if nothing else happens.
    until: Option<Duration>,
}

impl Run {
    fn is_held_by(&self, worker: IncarnationId) -> bool {
        self.holders.iter().any(|grant| grant.worker == worker)
    }
}

/// What a worker is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrainGrant {
    pub(crate) lease: LeaseId,
    pub(crate) run: Range<MicrobatchId>,
    /// Grants of these microbatches so far, this one included.
    pub(crate) attempt: u32,
    pub(crate) deadline: Duration,
}

/// What is done, and whose leases ended by that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Completed {
    pub(crate) run: Range<MicrobatchId>,
    /// The holder of a copy or of the original: it need not go on.
    pub(crate) beaten: Vec<(IncarnationId, LeaseId)>,
}

impl Dispatcher {
    pub(crate) fn new(plan: Plan, delay: Option<u32>, limits: Limits) -> Self {
        Self {
            plan,
            delay,
            limits,
            next: 0,
            end: plan.microbatches(),
            held_back: plan.microbatches(),
            returned: BTreeMap::new(),
            runs: BTreeMap::new(),
            waiting: BTreeSet::new(),
            held: BTreeMap::new(),
            no_copies: None,
            leases: BTreeMap::new(),
            speeds: Speeds::default(),
            lanes: Lanes::default(),
        }
    }

    /// Returns the books of an order of so many lanes. A worker is given the lanes that it had.
    pub(crate) fn with_lanes(mut self, lanes: usize) -> Self {
        self.lanes = Lanes::new(lanes);
        self
    }

    /// Returns the books with the applied steps done. Steps between them are handed out first.
    pub(crate) fn after(mut self, applied: &Applied) -> Self {
        let first_of = |step: Step| self.plan.first_of(step).get();
        let gap = |gap: Range<Step>| {
            let end = first_of(gap.end);
            (first_of(gap.start), Returned { end, attempts: Attempts::default() })
        };
        self.returned = applied.gaps().into_iter().map(gap).collect();
        self.next = first_of(applied.end());
        self
    }

    /// Returns the next work for the asker: returned runs first, then the frontier. `crew`: the
    /// workers that share a step.
    ///
    /// # Errors
    /// The asker may have none now, and why.
    pub(crate) fn lease(
        &mut self,
        now: Duration,
        ids: &mut LeaseIds,
        asker: Asker,
        crew: &[IncarnationId],
    ) -> Result<TrainGrant, Why> {
        self.speeds.follow(now, crew);
        let candidate = self.candidate(asker)?;
        self.speeds.asked(now, asker.worker, self.held_by(asker.worker).is_empty());
        let run = self.choose(now, asker.worker, crew, candidate)?;
        self.begin(&run);
        self.lanes.given(&self.plan, asker.worker, &run);
        self.ready(now);
        Ok(self.grant(now, ids, asker.worker, run.start))
    }

    /// Returns the microbatches that are to be handed out next, if the asker may hold one more run.
    fn candidate(&self, asker: Asker) -> Result<Range<u64>, Why> {
        let returned = self.returned.first_key_value().map(|(&first, returned)| first..returned.end);
        let candidate = returned.unwrap_or(self.next..self.end.min(self.held_back));
        if candidate.is_empty() {
            if self.next < self.end {
                return Err(Why::Measuring);
            }
            return Err(match self.end < self.plan.microbatches() {
                true => Why::Closing,
                false => Why::NothingLeft { epochs: self.plan.epochs },
            });
        }
        if !self.may_hold(asker, candidate.start) {
            return Err(Why::HoldsEnough);
        }
        Ok(candidate)
    }

    /// Hands out no microbatch from `first` on that was never handed out, until the next call.
    pub(crate) fn hold_back(&mut self, first: MicrobatchId) {
        self.held_back = first.get();
    }

    /// Returns what of `candidate`, or of the rest of its step, falls to a worker. `crew`: the
    /// workers that share a step.
    fn choose(
        &self,
        now: Duration,
        worker: IncarnationId,
        crew: &[IncarnationId],
        candidate: Range<u64>,
    ) -> Result<Range<u64>, Why> {
        let (step, undone) = (self.step_at(candidate.start), self.step_at(self.lowest_without(worker)));
        let ahead_max = self.delay.map_or(LOOK_AHEAD, |delay| u64::from(delay) + 1);
        if step.get() > undone.get() + ahead_max {
            return Err(Why::TooFarAhead { step, undone });
        }
        let of = u64::from(self.plan.microbatch(MicrobatchId(candidate.start)).of);
        let share = match crew.len() as u64 {
            1 => self.share(of, 1),
            workers => self.part(now, worker, step, self.share(of, workers)),
        };
        if share == 0 {
            return Err(Why::TooSlow { step, slow: self.speeds.slow(worker) });
        }
        let share = match self.lanes.exist() && crew.len() > 1 {
            true => share.min(self.lanes.fair(crew.len())),
            false => share,
        };
        let Some(candidate) = self.of_own_lanes(now, worker, crew, candidate, share) else {
            // A holder that asks for nothing keeps its lanes for about as long as this takes.
            let again = now + self.speeds.of(worker, self.speeds.usual().unwrap_or(KEPT_MIN)).expected;
            return Err(Why::LanesKept { step, again: again.max(now + KEPT_MIN) });
        };
        Ok(candidate.start..candidate.start + self.cut(worker, &candidate, share))
    }

    /// Returns the part of the candidate's step from which a worker is given `share`: one that
    /// begins with a lane that it had, if there is one. `None`: others keep the lanes of what is
    /// left.
    fn of_own_lanes(
        &self,
        now: Duration,
        worker: IncarnationId,
        crew: &[IncarnationId],
        candidate: Range<u64>,
        share: u64,
    ) -> Option<Range<u64>> {
        let first = self.plan.microbatch(MicrobatchId(candidate.start));
        let end = candidate.start - u64::from(first.index) + u64::from(first.of);
        // Whoever waits for room is given what comes first, for that is what a ps has room for.
        if !self.lanes.exist() || crew.len() < 2 || self.waits_for_room(worker).is_some() {
            return Some(candidate);
        }
        let returned = self.returned.range(..end).map(|(&first, returned)| first..returned.end.min(end));
        let frontier = self.next..end.min(self.end).min(self.held_back);
        let free: Vec<_> = returned.chain([frontier]).filter(|range| !range.is_empty()).collect();
        let keeps = |holder, left| self.keeps(now, holder, candidate.start, left);
        let start = self.lanes.choose(&self.plan, &free, share, worker, crew, keeps)?;
        let within = free.into_iter().find(|range| range.contains(&start));
        Some(within.map_or(candidate, |range| start..range.end))
    }

    /// Returns whether the step's end comes no later if `holder` alone computes the `left`
    /// microbatches of its lanes in the step of `first`. Whoever cannot ask for them soon keeps
    /// none: it waits for room on a ps, or holds later steps.
    fn keeps(&self, now: Duration, holder: IncarnationId, first: u64, left: u64) -> bool {
        let step = self.step_at(first);
        self.held_by(holder).last().is_none_or(|&last| self.step_at(last) <= step)
            && self.waits_for_room(holder).is_none()
            && self.keeps_up(now, holder, step, left)
    }

    /// Moves a run from the returned ones or the frontier to those that are held.
    fn begin(&mut self, run: &Range<u64>) {
        let mut attempts = Attempts::default();
        let before = self.returned.range(..=run.start).next_back().map(|(&first, _)| first);
        if run.start >= self.next {
            if self.next < run.start {
                let passed_over = Returned { end: run.start, attempts: Attempts::default() };
                self.returned.insert(self.next, passed_over);
            }
            self.next = run.end;
        } else if let Some(first) = before {
            let rest = self.returned.remove(&first).expect("just seen");
            attempts = rest.attempts.clone();
            if first < run.start {
                self.returned.insert(first, Returned { end: run.start, attempts: attempts.clone() });
            }
            if run.end < rest.end {
                self.returned.insert(run.end, rest);
            }
        }
        self.runs.insert(run.start, Run { end: run.end, attempts, ready: None, holders: Vec::new() });
        self.waiting.insert(run.start);
    }

    /// Returns a copy of the lease of somebody else that will be done last, for a worker that has
    /// nothing else to do and would be done earlier. Whoever completes first wins; the gradients
    /// are the same bits, so the other's pushes are duplicates.
    ///
    /// # Errors
    /// There is none; the time from which on there is one, if nothing else happens before.
    pub(crate) fn copy(
        &mut self,
        now: Duration,
        ids: &mut LeaseIds,
        asker: Asker,
    ) -> Result<TrainGrant, Option<Duration>> {
        let worker = asker.worker;
        if self.is_busy(worker) {
            return Err(None);
        }
        // Many may ask with the same answer, each after a look at all runs.
        let idle = self.held_by(worker).is_empty() && asker.room > 0;
        let expected = self.speeds.usual().map(|usual| self.speeds.of(worker, usual).expected);
        if let Some(known) = self.no_copies.as_ref().filter(|_| idle)
            && (known.expected, known.speeds) == (expected, self.speeds.changes())
            && known.until.is_none_or(|until| now < until)
        {
            return Err(known.until);
        }
        let before = self.waits_for_room(worker);
        let permitted = self
            .runs
            .keys()
            .filter(|&&first| self.may_hold(asker, first) && before.is_none_or(|before| first < before));
        let copies = permitted.filter_map(|&first| Some((self.copy_pays(now, worker, first)?, first)));
        let copies: Vec<_> = copies.collect();
        let paying = copies.iter().filter(|((from, _), _)| *from <= now);
        // Room comes with the first of them.
        let rests = |rest| before.map_or(rest, |_| Duration::ZERO);
        match paying.max_by_key(|((_, rest), first)| (rests(*rest), Reverse(*first))) {
            Some(&(_, first)) => {
                let run = first..self.runs[&first].end;
                self.lanes.copied(&self.plan, worker, &run);
                Ok(self.grant(now, ids, worker, first))
            }
            None => {
                let until = copies.into_iter().map(|((from, _), _)| from).min();
                let speeds = self.speeds.changes();
                self.no_copies = idle.then_some(NoCopies { expected, speeds, until });
                Err(until)
            }
        }
    }

    /// Returns how often a worker was given a lane that another one had last, since the last call.
    pub(crate) fn take_moved_lanes(&mut self) -> u64 {
        self.lanes.take_moved()
    }

    /// Records that the holder of a lease lives; false when the lease has ended.
    pub(crate) fn renew(&mut self, now: Duration, worker: IncarnationId, lease: LeaseId) -> bool {
        let limits = self.limits;
        self.grant_of(worker, lease).map(|grant| grant.renew(now, &limits)).is_some()
    }

    /// Records that the holder of a lease says how it gets on; nothing changes when the lease has
    /// ended.
    pub(crate) fn progress(&mut self, now: Duration, worker: IncarnationId, said: &pb::LeaseProgress) {
        let Some(grant) = self.grant_of(worker, LeaseId(said.lease)) else { return };
        grant.progress.hear(now, said);
        if said.microbatch_us > 0 {
            self.speeds.computes(worker, Duration::from_micros(said.microbatch_us));
        }
    }

    fn grant_of(&mut self, worker: IncarnationId, lease: LeaseId) -> Option<&mut Grant> {
        let run = self.runs.get_mut(self.leases.get(&lease)?)?;
        run.holders.iter_mut().find(|grant| (grant.lease, grant.worker) == (lease, worker))
    }

    /// Returns the grants whose holders hang, each with its run and whether another holder of it
    /// gets on.
    pub(crate) fn hanging(&self, now: Duration) -> impl Iterator<Item = (Range<MicrobatchId>, &Grant, bool)> {
        self.runs.iter().flat_map(move |(&first, run)| {
            let range = MicrobatchId(first)..MicrobatchId(run.end);
            let hangs = move |grant: &Grant| self.hangs_from(run, grant).is_some_and(|from| from <= now);
            let taken_over = run.holders.iter().any(|grant| !hangs(grant));
            let hanging = run.holders.iter().filter(move |grant| hangs(grant));
            hanging.map(move |grant| (range.clone(), grant, taken_over))
        })
    }

    /// Returns whether a worker hangs in one of its runs.
    pub(crate) fn hangs(&self, now: Duration, worker: IncarnationId) -> bool {
        self.held_by(worker).iter().any(|first| {
            let run = &self.runs[first];
            let mut own = run.holders.iter().filter(|grant| grant.worker == worker);
            own.any(|grant| self.hangs_from(run, grant).is_some_and(|from| from <= now))
        })
    }

    /// Returns what a good lease is for.
    pub(crate) fn run_of(&self, worker: IncarnationId, lease: LeaseId) -> Option<Range<MicrobatchId>> {
        let first = *self.leases.get(&lease)?;
        let run = &self.runs[&first];
        let good = run.holders.iter().any(|grant| (grant.lease, grant.worker) == (lease, worker));
        good.then_some(MicrobatchId(first)..MicrobatchId(run.end))
    }

    /// Records that the run of the lease is done, for all its holders; `took`: how long it took the
    /// worker by its own clock, when it says so. `None`: the lease had ended, nothing changed.
    pub(crate) fn complete(
        &mut self,
        now: Duration,
        worker: IncarnationId,
        lease: LeaseId,
        took: Option<Duration>,
    ) -> Option<Completed> {
        let range = self.run_of(worker, lease)?;
        let first = range.start.get();
        let run = self.runs.remove(&first).expect("a good lease has a run");
        self.learn(now, lease, took, first, &run);
        self.ready(now);
        self.waiting.remove(&first);
        self.no_copies = None;
        for grant in &run.holders {
            self.leases.remove(&grant.lease);
            self.let_go(grant.worker, first);
        }
        let others = run.holders.iter().filter(|grant| grant.lease != lease);
        Some(Completed { run: range, beaten: others.map(|grant| (grant.worker, grant.lease)).collect() })
    }

    /// Records that the holder could not do its work. `None`: the lease had ended, nothing changed.
    pub(crate) fn fail(&mut self, worker: IncarnationId, lease: LeaseId, message: &str) -> Option<Lost> {
        self.run_of(worker, lease)?;
        Some(self.end(lease, Ending::Failed(message.to_owned())))
    }

    /// Records that the holder gives its work back with its first `done` microbatches finished.
    /// Answers what is done by that, which may be nothing. `None`: the lease had ended, nothing
    /// changed.
    pub(crate) fn release(
        &mut self,
        now: Duration,
        worker: IncarnationId,
        lease: LeaseId,
        done: u64,
    ) -> Option<Range<MicrobatchId>> {
        let run = self.run_of(worker, lease)?;
        let (first, end) = (run.start.get(), run.end.get());
        let holders = self.runs[&first].holders.len();
        // With a copy the other holder reports the whole run; to count its beginning here would
        // count it twice.
        let middle = if holders == 1 { end.min(first + done) } else { first };
        self.end(lease, Ending::Released);
        if middle > first {
            let rest = self.returned.remove(&first).expect("the only holder gave it back");
            if middle < rest.end {
                self.returned.insert(middle, rest);
            }
            self.ready(now);
        }
        Some(MicrobatchId(first)..MicrobatchId(middle))
    }

    /// Takes back every overdue lease.
    pub(crate) fn expire(&mut self, now: Duration) -> Vec<Lost> {
        self.take_back(|grant| grant.is_overdue(now).then(|| grant.overdue()))
    }

    /// Takes back every lease of a process that is gone.
    pub(crate) fn worker_gone(&mut self, worker: IncarnationId) -> Vec<Lost> {
        self.take_back(|grant| (grant.worker == worker).then_some(Ending::Died))
    }

    /// Returns the microbatch below which all microbatches are done.
    pub(crate) fn watermark(&self) -> MicrobatchId {
        let returned = self.returned.keys().next().copied();
        let held = self.runs.keys().next().copied();
        MicrobatchId([returned, held].into_iter().flatten().fold(self.next, u64::min))
    }

    /// Returns whether the holder of some work waits for work that came back: a step needs all
    /// those before it but `delay`.
    pub(crate) fn is_waited_for(&self) -> bool {
        let Some(delay) = self.delay else { return false };
        let returned = self.returned.keys().next().map(|&first| self.step_at(first));
        let held = self.runs.values().next_back().map(|run| self.step_at(run.end - 1));
        returned.zip(held).is_some_and(|(returned, held)| returned.get() + u64::from(delay) < held.get())
    }

    /// Returns how many microbatches are done.
    pub(crate) fn done(&self) -> u64 {
        let returned = self.returned.iter().map(|(first, returned)| returned.end - first).sum::<u64>();
        let held = self.runs.iter().map(|(first, run)| run.end - first).sum::<u64>();
        self.next - returned - held
    }

    /// Returns the first step of which no microbatch, nor one of a later step, was handed out.
    pub(crate) fn frontier(&self) -> Step {
        match self.next.checked_sub(1) {
            Some(last) => self.step_at(last).next(),
            None => Step(0),
        }
    }

    /// Ends the job at the [`frontier`](Self::frontier) and returns it. Microbatches of earlier
    /// steps are still handed out, later ones are not.
    pub(crate) fn close(&mut self) -> Step {
        let step = self.frontier();
        self.end = self.plan.first_of(step).get();
        step
    }

    /// Returns whether every microbatch of the job is done.
    pub(crate) fn is_done(&self) -> bool {
        self.watermark().get() == self.plan.microbatches()
    }

    /// Returns the first microbatches of the runs that a worker holds, ascending.
    fn held_by(&self, worker: IncarnationId) -> &[u64] {
        self.held.get(&worker).map_or(&[], Vec::as_slice)
    }

    /// Returns how many leases a worker holds.
    pub(crate) fn leases_of(&self, worker: IncarnationId) -> usize {
        self.held_by(worker).len()
    }

    fn let_go(&mut self, worker: IncarnationId, first: u64) {
        let held = self.held.get_mut(&worker).expect("it holds the run");
        held.retain(|&other| other != first);
        if held.is_empty() {
            self.held.remove(&worker);
        }
    }

    /// Returns every lease and its holder.
    pub(crate) fn holders(&self) -> impl Iterator<Item = (IncarnationId, LeaseId)> {
        self.runs.values().flat_map(|run| &run.holders).map(|grant| (grant.worker, grant.lease))
    }

    /// Returns the step of a microbatch; of the end of the job the number of steps.
    fn step_at(&self, microbatch: u64) -> Step {
        if microbatch < self.plan.microbatches() {
            self.plan.microbatch(MicrobatchId(microbatch)).step
        } else {
            Step(self.plan.steps())
        }
    }

    /// Returns the lowest microbatch that is not done and that `worker` does not hold: what its own
    /// work may have to wait for.
    fn lowest_without(&self, worker: IncarnationId) -> u64 {
        let returned = self.returned.keys().next().copied();
        [returned, self.lowest_of_others(worker)].into_iter().flatten().fold(self.next, u64::min)
    }

    fn lowest_of_others(&self, worker: IncarnationId) -> Option<u64> {
        self.runs.iter().find(|(_, run)| !run.is_held_by(worker)).map(|(&first, _)| first)
    }

    /// Returns whether a worker may hold a run from `first` on. A worker holds at most `room`
    /// leases, so that others find work too. A run of an earlier step than all its leases is
    /// exempt, as these may wait for it. While they wait for room on a ps, an earlier run of their
    /// step is exempt too.
    fn may_hold(&self, Asker { worker, room }: Asker, first: u64) -> bool {
        let held = self.held_by(worker);
        let Some(&lowest) = held.first() else { return room > 0 };
        held.len() < room
            || self.step_at(first) < self.step_at(lowest)
            || self.waits_for_room(worker).is_some_and(|before| first < before)
    }

    /// Returns the first microbatch that a worker holds, when it waits for room on a ps: with all
    /// that it holds and could compute, but for what stands behind that in its own queue.
    fn waits_for_room(&self, worker: IncarnationId) -> Option<u64> {
        let held = self.held_by(worker);
        let runs = || held.iter().map(|first| &self.runs[first]);
        let in_phase = |run: &Run, phase| {
            let mut own = run.holders.iter().filter(|grant| grant.worker == worker);
            own.any(|grant| grant.progress.phase == phase)
        };
        let waits = |run: &Run| in_phase(run, pb::Phase::WaitingForRoom);
        let works = |run: &Run| run.ready.is_some() && !waits(run) && !in_phase(run, pb::Phase::Queued);
        held.first().copied().filter(|_| runs().any(waits) && !runs().any(works))
    }

    /// Returns how many microbatches of `candidate`, from its first on, make one lease of at most
    /// `share`.
    fn cut(&self, worker: IncarnationId, candidate: &Range<u64>, share: u64) -> u64 {
        let first = self.plan.microbatch(MicrobatchId(candidate.start));
        let left = candidate.end - candidate.start;
        let of = u64::from(first.of);
        if first.index > 0 || share < of || left < of {
            let end = of.min(u64::from(first.index) + left) as u32;
            return tree::largest_from(first.index, end, first.of, share as u32).len().into();
        }
        // Step t needs all steps below t - delay: the holder's own, or others would keep it waiting
        // in mid-lease.
        let foreign = self.lowest_of_others(worker).map(|microbatch| self.step_at(microbatch).get());
        let ahead = self.ahead();
        let (mut count, mut step) = (of, first.step.next());
        while count < left && foreign.is_none_or(|foreign| step.get() <= foreign + ahead) {
            let more = u64::from(self.plan.of(step));
            if count + more > share.min(left) {
                break;
            }
            (count, step) = (count + more, step.next());
        }
        count
    }

    /// Returns a worker's fair share in microbatches, for steps of `of`: all workers work on one
    /// step, unless steps may be computed side by side anyway and sharing one would only make more
    /// and smaller pushes.
    fn share(&self, of: u64, workers: u64) -> u64 {
        let workers = workers.max(1);
        let share = match self.delay {
            _ if workers == 1 => of.max(self.run_of_one()),
            None => (of / workers).max(RUN_MAX.min(LOOK_AHEAD * of / (HELD_MAX as u64 * workers))),
            Some(_) if of >= workers => of / workers,
            Some(delay) => RUN_MAX.min((u64::from(delay) + 1) * of / workers),
        };
        share.clamp(1, LEASE_MAX)
    }

    /// Returns how many microbatches a worker that is alone gets at once. Another worker may join
    /// at any time, and gets none of them.
    fn run_of_one(&self) -> u64 {
        // Nobody knows yet how long one takes.
        let Some(usual) = self.speeds.usual() else { return 1 };
        let count = RUN_TIME.as_nanos() / usual.as_nanos().max(1);
        u64::try_from(count).map_or(RUN_MAX, |count| count.min(RUN_MAX))
    }

    fn grant(&mut self, now: Duration, ids: &mut LeaseIds, worker: IncarnationId, first: u64) -> TrainGrant {
        self.no_copies = None;
        let grant = Grant::new(now, ids.fresh(), worker, &self.limits);
        let (lease, deadline) = (grant.lease, grant.deadline);
        let run = self.runs.get_mut(&first).expect("a run to grant");
        run.attempts.grants += 1;
        run.holders.push(grant);
        let (attempt, end) = (run.attempts.grants, run.end);
        self.leases.insert(lease, first);
        let held = self.held.entry(worker).or_default();
        held.insert(held.partition_point(|&other| other < first), first);
        TrainGrant { lease, run: MicrobatchId(first)..MicrobatchId(end), attempt, deadline }
    }

    fn take_back(&mut self, ending: impl Fn(&Grant) -> Option<Ending>) -> Vec<Lost> {
        let grants = self.runs.values().flat_map(|run| &run.holders);
        let ended: Vec<_> = grants.filter_map(|grant| Some((grant.lease, ending(grant)?))).collect();
        ended.into_iter().map(|(lease, ending)| self.end(lease, ending)).collect()
    }

    /// Ends a good lease whose work is not done. The run is returned when nobody else holds it.
    fn end(&mut self, lease: LeaseId, ending: Ending) -> Lost {
        self.no_copies = None;
        let first = self.leases.remove(&lease).expect("a good lease");
        let run = self.runs.get_mut(&first).expect("a good lease has a run");
        let position = run.holders.iter().position(|grant| grant.lease == lease).expect("its holder");
        let worker = run.holders.remove(position).worker;
        let exhausted = run.attempts.end(ending, &self.limits);
        let exhausted = exhausted.map(|exhausted| describe(&self.plan, first..run.end, &exhausted));
        if run.holders.is_empty() {
            let run = self.runs.remove(&first).expect("just seen");
            self.waiting.remove(&first);
            self.returned.insert(first, Returned { end: run.end, attempts: run.attempts });
        }
        self.let_go(worker, first);
        Lost { lease, worker, exhausted }
    }
}

/// Names the records that cannot be trained, as far as a master knows them.
fn describe(plan: &Plan, run: Range<u64>, exhausted: &Exhausted) -> String {
    let (first, last) =
        (plan.microbatch(MicrobatchId(run.start)), plan.microbatch(MicrobatchId(run.end - 1)));
    format!(
        "microbatches {} to {} (epoch {}, steps {} to {}) cannot be trained: {exhausted}",
        first.id, last.id, first.epoch, first.step, last.step
    )
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod throughput;

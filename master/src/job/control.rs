//! What a user may change while a job goes on: how many workers take part, and whether it rests.
//! Ending it is in `ending`.
//!
//! All of it is safe to repeat and changes the speed, never the trained bits.

use proto::pb;
use proto::pb::event::Kind as Event;
use proto::spec::WorkersSpec;
use proto::status::{Failure, Kind};

use super::{Job, Outcome};
use crate::clock::Now;
use crate::membership::Membership;
use crate::scheduler::Demand;
use crate::why::Why;

/// What users and the fleet let a job do.
#[derive(Debug)]
pub(super) struct Control {
    /// What the job wants of the fleet.
    pub(super) demand: Demand,
    /// A user holds the job.
    paused: bool,
    /// What the fleet lacks for the job, at the last look.
    waits: Option<String>,
}

impl Control {
    /// Returns the control of a new job.
    pub(super) const fn new(demand: Demand) -> Self {
        Self { demand, paused: false, waits: None }
    }

    /// Records that a user wants so many workers to take part from now on.
    fn on_scaled(&mut self, workers: u32, fleet: &Membership) -> Option<Outcome> {
        let before = self.demand.bounds();
        self.demand.scale(workers);
        let WorkersSpec { min, max } = self.demand.bounds();
        let event = pb::FleetEvent {
            generation: fleet.generation().get(),
            workers: fleet.workers_live(),
            ps: fleet.ps_live(),
            reason: format!("a user scaled the job to {max} workers (at least {min})"),
        };
        (before != self.demand.bounds()).then_some(Outcome::Event(Event::Fleet(event)))
    }

    /// Records that a user holds the job, or lets it go on.
    pub(super) const fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Records that the job looked at the fleet, which lacks this for it.
    pub(super) fn on_look(&mut self, lacks: Option<String>) {
        self.waits = lacks;
    }

    /// Returns whether a user holds the job.
    pub(super) const fn is_paused(&self) -> bool {
        self.paused
    }

    /// Returns what the fleet lacks for the job, at the last look.
    pub(super) fn waits(&self) -> Option<&str> {
        self.waits.as_deref()
    }
}

impl Job {
    /// Records that a user wants so many workers to take part from now on. The next look at the
    /// fleet chooses them.
    ///
    /// # Errors
    /// It is ending or has ended; nothing changed.
    pub(crate) fn scale(&mut self, now: Now, workers: u32, fleet: &Membership) -> Result<(), Failure> {
        self.may_be("scaled")?;
        let outcome = self.control.on_scaled(workers, fleet);
        self.changed |= outcome.is_some();
        self.take_up(now, outcome.into_iter().collect());
        Ok(())
    }

    /// Records that a user holds it: nothing new is handed out, what is held is finished.
    ///
    /// # Errors
    /// It is ending or has ended; nothing changed.
    pub(crate) fn pause(&mut self, now: Now) -> Result<(), Failure> {
        self.may_be("paused")?;
        self.control.set_paused(true);
        self.changed = true;
        self.tell_state(now);
        Ok(())
    }

    /// Records that a user lets it go on; `numerics` names the class to go on in, unless it is
    /// empty.
    ///
    /// # Errors
    /// It is ending or has ended, or cannot go on in that class; nothing changed.
    pub(crate) fn resume(&mut self, now: Now, numerics: &str, fleet: &Membership) -> Result<(), Failure> {
        self.may_be("resumed")?;
        if !numerics.is_empty() {
            self.change_class(now, numerics, fleet)?;
        }
        self.control.set_paused(false);
        self.changed = true;
        self.tell_state(now);
        self.maybe_trained_out(now);
        Ok(())
    }

    /// Returns whether a user holds it; what is ending ends, also when it has to find its way back
    /// first (see `record`).
    pub(super) fn paused(&self) -> bool {
        self.control.is_paused() && self.goes_on()
    }

    /// Returns why nothing new is handed out, if a user holds the job or the fleet lacks something.
    pub(super) fn rests(&self) -> Option<Why> {
        match (self.is_closing(), self.paused(), self.waits()) {
            (false, true, _) => Some(Why::Paused),
            (false, false, Some(_)) => Some(Why::JobWaits),
            _ => None,
        }
    }

    /// Returns whether it trains or will, and its end is not decided.
    fn goes_on(&self) -> bool {
        self.needs_fleet() && !self.ends_early()
    }

    fn may_be(&self, changed: &str) -> Result<(), Failure> {
        if self.goes_on() {
            return Ok(());
        }
        let (state, reason) = self.state();
        Err(unchangeable(&self.name(), changed, state, &reason))
    }
}

/// Returns the refusal of a user who wants a job `changed` which is ending or has ended.
pub(crate) fn unchangeable(name: &str, changed: &str, state: pb::JobState, reason: &str) -> Failure {
    Failure::new(
        Kind::Ended,
        format!(
            "{name} cannot be {changed} any more, it is {}: {reason}; submit it again to train it anew",
            state.name()
        ),
    )
}

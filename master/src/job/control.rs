//! What a user may change while a job goes on: how many workers take part, and whether it rests. Ending it is in `ending`.
//!
//! All of it is safe to repeat and changes the speed, never the trained bits.

use proto::pb;
use proto::pb::event::Kind as Event;
use proto::spec::WorkersSpec;
use proto::status::{Failure, Kind};

use super::Job;
use crate::clock::Now;
use crate::membership::Membership;

impl Job {
    /// A user wants so many workers to take part from now on.
    ///
    /// # Errors
    /// It is ending or has ended; nothing changed.
    pub(crate) fn scale(&mut self, now: Now, workers: u32, fleet: &Membership) -> Result<(), Failure> {
        self.may_be("scaled")?;
        let before = self.crew.bounds();
        self.crew.scale(workers);
        let WorkersSpec { min, max } = self.crew.bounds();
        if before != self.crew.bounds() {
            self.changed = true;
            let event = pb::FleetEvent {
                generation: fleet.generation().get(),
                workers: fleet.workers_live(),
                ps: fleet.ps_live(),
                reason: format!("a user scaled the job to {max} workers (at least {min})"),
            };
            self.log.append(now.unix_ms, Event::Fleet(event));
        }
        self.on_fleet(now, fleet);
        Ok(())
    }

    /// A user holds it: nothing new is handed out, what is held is finished.
    ///
    /// # Errors
    /// It is ending or has ended; nothing changed.
    pub(crate) fn pause(&mut self, now: Now) -> Result<(), Failure> {
        self.may_be("paused")?;
        self.paused = true;
        self.changed = true;
        self.tell_state(now);
        Ok(())
    }

    /// A user lets it go on; `numerics` names the class to go on in, unless it is empty.
    ///
    /// # Errors
    /// It is ending or has ended, or cannot go on in that class; nothing changed.
    pub(crate) fn resume(&mut self, now: Now, numerics: &str, fleet: &Membership) -> Result<(), Failure> {
        self.may_be("resumed")?;
        if !numerics.is_empty() {
            self.change_class(now, numerics)?;
        }
        self.paused = false;
        self.changed = true;
        self.on_fleet(now, fleet);
        self.maybe_trained_out(now);
        Ok(())
    }

    /// Whether a user holds it; what is ending ends, also when it has to find its way back first (see `record`).
    pub(super) fn paused(&self) -> bool {
        self.paused && self.goes_on()
    }

    /// Whether nothing new is handed out, because a user holds it or the fleet lacks something.
    pub(super) fn rests(&self) -> bool {
        !self.is_closing() && (self.paused() || self.waits().is_some())
    }

    /// Whether it trains or will, and its end is not decided.
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

/// What a user is told that wants a job `changed` which is ending or has ended.
pub(crate) fn unchangeable(name: &str, changed: &str, state: pb::JobState, reason: &str) -> Failure {
    Failure::new(
        Kind::Ended,
        format!(
            "{name} cannot be {changed} any more, it is {}: {reason}; submit it again to train it anew",
            state.name()
        ),
    )
}

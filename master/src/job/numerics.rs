//! The numerics class of a job: when it is decided, what users are told of workers of another one,
//! and how a user changes it. Pure.

use std::sync::Arc;

use proto::ids::Version;
use proto::numerics::{self, Numerics, Since};
use proto::status::{Failure, Kind};

use super::Job;
use super::phase::{Begin, Beginning, Phase};
use crate::clock::Now;
use crate::membership::Membership;

impl Job {
    /// Returns whether the scheduler may decide the class: once the model is about to be built.
    /// Until then any worker may count records.
    pub(super) fn may_decide_class(&self) -> bool {
        match self.phase {
            // The checkpoint that the job goes on from may have a class.
            Phase::Beginning(Beginning { stage: Begin::Initializing, .. }) => !self.queue.is_empty(),
            Phase::Beginning(_) | Phase::Training { .. } => true,
            Phase::Indexing { .. } | Phase::Ending(_) => false,
        }
    }

    /// Returns whether the job must not hand out work that depends on the class, because no class
    /// is decided.
    pub(super) fn waits_for_class(&self) -> bool {
        self.control.demand.is_undecided()
            && !matches!(self.phase, Phase::Indexing { .. })
            && self.needs_fleet()
    }

    /// Tells users once of each class that stands by.
    pub(super) fn tell_strangers(&mut self, now: Now) {
        let Some(class) = self.control.demand.class().filter(|_| self.needs_fleet()) else { return };
        let (told, own) = (&self.strangers_told, class.to_string());
        let news = self.crew.strangers().filter(|(numerics, _)| !told.contains(&numerics.class));
        let news: Vec<Numerics> = news.map(|(numerics, _)| numerics.clone()).collect();
        for numerics in news {
            self.warn(
                now,
                format!(
                    "workers of numerics class {numerics} stand by, because their results may differ in the last bit: the job \
                     computes with class {own}"
                ),
            );
            self.strangers_told.insert(numerics.class);
        }
    }

    /// Returns what a job that lacks workers says of their class.
    pub(super) fn lacks_of_class(&self) -> String {
        let strangers = self.crew.strangers();
        let strangers: Vec<_> =
            strangers.map(|(numerics, count)| format!("{count} of class {numerics}")).collect();
        let there = strangers.join(", ");
        match (self.control.demand.class(), strangers.is_empty()) {
            (None, true) => String::new(),
            (None, false) => format!(" of one numerics class; there are {there}"),
            (Some(class), true) if *class == Numerics::unknown() => String::new(),
            (Some(class), true) => format!(" of numerics class {class}"),
            (Some(class), false) => format!(
                " of numerics class {class}; {there} stand by, and `ebb resume {} --numerics CLASS` goes on with them{} (in `ebb \
                 run`: --set numerics=any)",
                self.name(),
                if self.checkpoints.is_some() { " from the newest checkpoint" } else { " from version 0" },
            ),
        }
    }

    /// Training goes on from this version, in the class of the job.
    ///
    /// A master that was killed before its journal had the first class knows of none. The ps may
    /// have trained meanwhile, in the era that is told here. An era has one class, so that class
    /// counts from the version with which the job began.
    pub(super) fn note_class(&mut self, version: Version) {
        let Some(class) = self.control.demand.class() else { return };
        let begun = self.checkpoints.as_ref().map(|checkpoints| checkpoints.begun);
        let from = begun.filter(|_| self.numerics.is_empty()).unwrap_or(version);
        numerics::note(&mut self.numerics, from, class);
    }

    /// Takes over the classes that computed the checkpoint of an earlier run. The job goes on in
    /// the last of them, unless a user has named one.
    pub(super) fn take_over_classes(&mut self, history: Vec<Since>) {
        if let Some(last) = history.last().filter(|_| self.control.demand.is_undecided()) {
            self.set_class(Arc::new(last.numerics.clone()));
        }
        self.numerics = history;
    }

    fn set_class(&mut self, class: Arc<Numerics>) {
        self.control.demand.set_class(class);
        self.unscheduled = true;
    }

    /// Records that a user wants it to go on in another class, from the newest checkpoint.
    ///
    /// # Errors
    /// No live worker is of that class, or the job takes every class; nothing changed.
    pub(super) fn change_class(&mut self, now: Now, name: &str, fleet: &Membership) -> Result<(), Failure> {
        let refuse = |message| Err(Failure::new(Kind::Malformed, message));
        if !self.control.demand.needs_one_class() {
            return refuse(format!(
                "{} takes workers of every numerics class; leave out --numerics",
                self.name()
            ));
        }
        let mut live = fleet.workers().map(|(_, process)| &process.numerics);
        let class = match live.find(|numerics| numerics.class == name) {
            Some(class) => class.clone(),
            // Whoever is not there computes nothing, so there is nothing to change.
            None if self.control.demand.class().is_some_and(|class| class.class == name) => return Ok(()),
            None => {
                let classes = self
                    .control
                    .demand
                    .class()
                    .into_iter()
                    .chain(self.crew.strangers().map(|(class, _)| class));
                let classes: Vec<_> = classes.map(ToString::to_string).collect();
                return refuse(format!(
                    "no live worker is of numerics class `{name}`; there are {}",
                    if classes.is_empty() { "none".to_owned() } else { classes.join(", ") }
                ));
            }
        };
        if self.control.demand.class() == Some(&*class) {
            return Ok(());
        }
        let before = self.control.demand.class().cloned();
        self.set_class(class.clone());
        self.strangers_told.clear();
        self.changed = true;
        if let Some(before) = before {
            self.begin_again(now, &format!("a user changed the numerics class from {before} to {class}"));
        }
        Ok(())
    }
}

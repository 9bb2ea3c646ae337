//! Where a job's model lives, and whether those ps are still the same. Pure.
//!
//! A partition is *fresh* from when it is to be begun anew until the ps were asked what they have
//! applied: there is nothing in it to lose, so any ps may take it. One that is not fresh belongs to
//! its ps: a ps that lost its connection has its data still, so it gets time to come back; a new
//! process of its name has not, so it is asked before it is believed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::ids::{Era, IncarnationId, Step, Version};
use proto::pb;
use proto::status::{Failure, Kind};
use proto::tensor::TensorSpec;

use crate::membership::Membership;
use crate::ps_address::PsAddress;

/// The partitions of one job.
#[derive(Debug)]
pub(super) struct Partitions {
    tensors: Vec<TensorSpec>,
    homes: Vec<Home>,
    /// How often a partition found another process.
    number: u64,
    /// Every ps has opened its own.
    pub(super) open: bool,
    /// Ps that are missing, or back and not yet believed.
    missing: BTreeMap<String, Missing>,
    /// Ps that are here and asked what they hold, because a worker says that it is not all.
    doubted: BTreeSet<String>,
}

/// The ps that holds a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Home {
    /// Name of the ps; empty before the first placement.
    ps: String,
    url: String,
    incarnation: IncarnationId,
    fresh: bool,
    /// What a fresh one is begun with, once that is decided: the version of a checkpoint, or 0.
    begin: Option<Version>,
}

#[derive(Clone, Copy, Debug)]
struct Missing {
    since: Duration,
    /// The incarnation that is being asked what it holds.
    asked: Option<IncarnationId>,
}

/// A partition that could not load the checkpoint that it was to begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NotRestored {
    pub(super) partition: u32,
    pub(super) version: Version,
    /// The reason, for people.
    pub(super) reason: String,
}

/// What became of the ps since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Watched {
    /// Ps that have to be asked what they hold.
    pub(super) ask: Vec<(PsAddress, IncarnationId)>,
    /// Warnings for the user.
    pub(super) warnings: Vec<String>,
    /// Ps that were missing for too long.
    pub(super) lost: Vec<String>,
    /// A fresh partition was opened at a process that is gone.
    pub(super) unsettled: bool,
}

/// What a ps that came back has of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Back {
    /// Nobody asks any more, or it must be asked again; or it was doubted, and has all that it had.
    Late,
    /// All that it had.
    Whole,
    /// Less than it had: it was started again.
    Empty,
}

/// The holder of a partition, as far as the process that reports of it is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The process itself.
    Sender,
    /// A ps of its name. Whether it is that process is being asked.
    SenderUnlessRestarted,
    /// Another ps, or none.
    Another,
}

impl Partitions {
    /// Creates `count` fresh partitions without a place.
    pub(super) fn new(tensors: Vec<TensorSpec>, count: u32) -> Self {
        let (ps, url) = (String::new(), String::new());
        let home = Home { ps, url, incarnation: IncarnationId(0), fresh: true, begin: None };
        let homes = vec![home; count as usize];
        let (missing, doubted) = (BTreeMap::new(), BTreeSet::new());
        Self { tensors, homes, number: 0, open: false, missing, doubted }
    }

    /// Restores partitions that an earlier start of this master placed. Each ps has to be asked
    /// before its content is relied on.
    ///
    /// # Errors
    /// What is written down does not fit together.
    pub(super) fn restore(placement: pb::Placement, fresh: &[bool], begin: &[u64]) -> Result<Self, Failure> {
        let pb::Placement { tensors, partitions, number } = placement;
        let tensors = proto::convert::tensors(tensors)?;
        if partitions.is_empty() || partitions.len() != fresh.len() {
            let message = format!("{} partitions, {} of them described", partitions.len(), fresh.len());
            return Err(Failure::new(Kind::Malformed, message));
        }
        // Written down as one more than the version.
        let begin =
            begin.iter().map(|begin| begin.checked_sub(1).map(Version)).chain(std::iter::repeat(None));
        let home = |((address, &fresh), begin): ((pb::PartitionAddress, &bool), _)| Home {
            ps: address.ps,
            url: address.url,
            incarnation: IncarnationId(0),
            fresh,
            begin,
        };
        let homes = partitions.into_iter().zip(fresh).zip(begin).map(home).collect();
        let (missing, doubted) = (BTreeMap::new(), BTreeSet::new());
        Ok(Self { tensors, homes, number, open: false, missing, doubted })
    }

    /// Returns for each partition whether it holds nothing that could be lost.
    pub(super) fn fresh(&self) -> Vec<bool> {
        self.homes.iter().map(|home| home.fresh).collect()
    }

    /// Returns for each partition the version that it begins with plus one, as the journal stores
    /// it. 0: no version.
    pub(super) fn begin(&self) -> Vec<u64> {
        self.homes.iter().map(|home| home.begin.map_or(0, |begin| begin.get() + 1)).collect()
    }

    /// Returns whether it is open what some fresh partition is begun with.
    pub(super) fn undecided(&self) -> bool {
        self.homes.iter().any(|home| home.fresh && home.begin.is_none())
    }

    /// Sets the first version of the fresh partitions that have none yet.
    pub(super) fn decide(&mut self, begin: Version) {
        let open = self.homes.iter_mut().filter(|home| home.fresh && home.begin.is_none());
        open.for_each(|home| home.begin = Some(begin));
    }

    /// Makes a partition fresh again, without a first version.
    pub(super) fn begin_again(&mut self, partition: u32) {
        if let Some(home) = self.homes.get_mut(partition as usize) {
            (home.fresh, home.begin) = (true, None);
        }
        self.open = false;
    }

    /// Returns the fresh partitions, each with its ps and what it is begun with.
    pub(super) fn beginning(&self) -> impl Iterator<Item = (u32, PsAddress, Version)> {
        let fresh = (0..).zip(&self.homes).filter(|(_, home)| home.fresh);
        fresh.map(|(partition, home)| {
            (partition, address(&self.homes, &home.ps, &home.url), home.begin.unwrap_or_default())
        })
    }

    /// Returns the newest version that a fresh partition is begun with.
    pub(super) fn begun(&self) -> Option<Version> {
        self.beginning().map(|(.., begin)| begin).max()
    }

    /// Returns the fresh partitions that could not load their checkpoint.
    pub(super) fn not_restored(&self, ledgers: &[pb::PartitionLedger], era: Era) -> Vec<NotRestored> {
        let failed =
            |ledger: &&pb::PartitionLedger| ledger.era == era.get() && !ledger.restore_error.is_empty();
        let of = |ledger: &pb::PartitionLedger| {
            let (partition, home) = (ledger.partition, self.homes.get(ledger.partition as usize)?);
            let version = home.begin.filter(|begin| home.fresh && *begin > Version(0))?;
            Some(NotRestored { partition, version, reason: ledger.restore_error.clone() })
        };
        ledgers.iter().filter(failed).filter_map(of).collect()
    }

    /// Records that a worker says which tensors the model has.
    ///
    /// # Errors
    /// Others than those of which partitions are filled already.
    pub(super) fn describe(&mut self, tensors: Vec<TensorSpec>) -> Result<(), Failure> {
        if self.tensors != tensors && self.homes.iter().any(|home| !home.fresh) {
            let message = "DescribeRequest.tensors: expected those of the model that is being trained, found others; \
                           this worker builds another model";
            return Err(Failure::new(Kind::Malformed, message));
        }
        self.tensors = tensors;
        Ok(())
    }

    /// Finds a ps for each fresh partition that has none: the one of its name, or else the one that
    /// has least to do, by `load` (partitions by name of the ps). No ps gets two partitions of one
    /// job.
    ///
    /// # Errors
    /// Too few ps live at the moment.
    pub(super) fn place(
        &mut self,
        fleet: &Membership,
        load: &BTreeMap<String, usize>,
    ) -> Result<(), Failure> {
        if let Some(lack) = self.lack(fleet) {
            return Err(Failure::new(Kind::NotYet, format!("the job waits for {lack}")));
        }
        let homes: Vec<Home> = self.find(fleet, load).into_iter().flatten().collect();
        if homes != self.homes {
            self.homes = homes;
            self.number += 1;
            self.open = false;
        }
        self.missing.clear();
        Ok(())
    }

    /// Returns what the fleet lacks to hold all partitions, for people.
    pub(super) fn lack(&self, fleet: &Membership) -> Option<String> {
        let found = self.find(fleet, &BTreeMap::new());
        let without: Vec<_> = self
            .homes
            .iter()
            .zip(&found)
            .filter(|(_, found)| found.is_none())
            .map(|(home, _)| home)
            .collect();
        if without.is_empty() {
            return None;
        }
        let names: BTreeSet<_> =
            without.iter().filter(|home| !home.ps.is_empty()).map(|home| format!("`{}`", home.ps)).collect();
        Some(match names.is_empty() {
            true => format!("ps ({} of {} live)", fleet.ps().count(), self.homes.len()),
            false => {
                let names = names.into_iter().collect::<Vec<_>>().join(", ");
                format!("ps {names} to come back or for another ps")
            }
        })
    }

    /// Returns where each partition can be now.
    fn find(&self, fleet: &Membership, load: &BTreeMap<String, usize>) -> Vec<Option<Home>> {
        let at = |(incarnation, process): (IncarnationId, &crate::membership::Process)| Home {
            ps: process.name.clone(),
            url: process.url.clone(),
            incarnation,
            fresh: true,
            begin: None,
        };
        let taken = |home: &Home| self.homes.iter().any(|other| other.ps == home.ps);
        let mut spare: Vec<_> = fleet.ps().map(at).filter(|home| !taken(home)).collect();
        spare.sort_by_key(|home| (load.get(&home.ps).copied().unwrap_or_default(), home.ps.clone()));
        let mut spare = spare.into_iter();
        let find = |home: &Home| match fleet.ps_named(&home.ps) {
            Some((incarnation, _)) if incarnation == home.incarnation => Some(home.clone()),
            Some(found) if home.fresh => Some(Home { begin: home.begin, ..at(found) }),
            _ if home.fresh => spare.next().map(|found| Home { begin: home.begin, ..found }),
            _ => None,
        };
        self.homes.iter().map(find).collect()
    }

    /// Partitions on these ps must be begun anew.
    pub(super) fn lose(&mut self, lost: impl Fn(&str) -> bool) {
        let lost = self.homes.iter_mut().filter(|home| lost(&home.ps));
        lost.for_each(|home| (home.fresh, home.begin) = (true, None));
        self.open = false;
    }

    /// Records that the ps have said what they have applied: from now on there is something to
    /// lose.
    pub(super) fn keep(&mut self) {
        self.open = true;
        self.homes.iter_mut().for_each(|home| (home.fresh, home.begin) = (false, None));
    }

    /// Returns how often a partition found another process.
    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    /// Returns whether a ps that holds something to lose wants to leave.
    pub(super) fn is_left(&self, fleet: &Membership) -> bool {
        self.homes.iter().any(|home| !home.fresh && fleet.is_draining(home.incarnation))
    }

    /// Returns whether this process holds something to lose.
    pub(super) fn need(&self, ps: IncarnationId) -> bool {
        self.homes.iter().any(|home| !home.fresh && home.incarnation == ps)
    }

    /// Returns whether the process `ps` called `name` holds a partition.
    pub(super) fn holder(&self, partition: u32, ps: IncarnationId, name: &str) -> Holder {
        match self.homes.get(partition as usize) {
            Some(home) if home.incarnation == ps => Holder::Sender,
            Some(home) if home.ps == name => Holder::SenderUnlessRestarted,
            _ => Holder::Another,
        }
    }

    /// Returns whether no ps is missing.
    pub(super) fn are_all_here(&self) -> bool {
        self.missing.is_empty()
    }

    pub(super) fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Returns the placement as workers receive it.
    pub(super) fn placement(&self) -> pb::Placement {
        let address = |home: &Home| pb::PartitionAddress { ps: home.ps.clone(), url: home.url.clone() };
        pb::Placement {
            tensors: self.tensors.iter().map(pb::TensorSpec::from).collect(),
            partitions: self.homes.iter().map(address).collect(),
            number: self.number,
        }
    }

    /// Returns the ps of each partition, in partition order.
    pub(super) fn addresses(&self) -> impl Iterator<Item = PsAddress> {
        self.homes.iter().map(|home| address(&self.homes, &home.ps, &home.url))
    }

    /// Returns each ps once, except those that are missing.
    pub(super) fn reachable(&self) -> Vec<PsAddress> {
        let mut seen = BTreeSet::new();
        self.addresses()
            .filter(|ps| !ps.name.is_empty() && !self.missing.contains_key(&ps.name))
            .filter(|ps| seen.insert(ps.name.clone()))
            .collect()
    }

    /// Checks whether `ledgers` has every partition, in this era and with a version; of one ps
    /// when `ps` names it.
    ///
    /// # Errors
    /// The partition that is not there.
    pub(super) fn check_all(
        &self,
        ledgers: &[pb::PartitionLedger],
        ps: Option<&str>,
        era: Era,
    ) -> Result<(), u32> {
        for (partition, home) in (0..).zip(&self.homes) {
            let is_it = |ledger: &pb::PartitionLedger| {
                ledger.partition == partition && ledger.era == era.get() && ledger.version.is_some()
            };
            if ps.is_none_or(|ps| ps == home.ps) && !ledgers.iter().any(is_it) {
                return Err(partition);
            }
        }
        Ok(())
    }

    /// Looks at the fleet: who is missing, who is back, who was missing for longer than `grace`.
    pub(super) fn watch(&mut self, now: Duration, fleet: &Membership, grace: Duration) -> Watched {
        let mut watched = Watched::default();
        for home in self.homes.iter().filter(|home| !home.ps.is_empty()) {
            let found = fleet.ps_named(&home.ps);
            if found.is_some_and(|(incarnation, _)| incarnation == home.incarnation) {
                self.missing.remove(&home.ps);
                continue;
            }
            let missing = self.missing.entry(home.ps.clone()).or_insert_with(|| {
                if !home.fresh {
                    watched.warnings.push(format!(
                        "ps `{}` is gone; training waits up to {grace:?} for it to come back with its partitions",
                        home.ps
                    ));
                }
                Missing { since: now, asked: None }
            });
            if home.fresh {
                watched.unsettled |= self.open;
                continue;
            }
            if let Some((incarnation, process)) =
                found.filter(|(incarnation, _)| missing.asked != Some(*incarnation))
            {
                missing.asked = Some(incarnation);
                watched.ask.push((address(&self.homes, &process.name, &process.url), incarnation));
            }
            if now.saturating_sub(missing.since) >= grace {
                watched.lost.push(home.ps.clone());
            }
        }
        // It is opened again before it counts as open.
        self.open &= !watched.unsettled;
        watched
    }

    /// Records that a worker misses a partition at its ps. Returns the ps to ask, unless it was
    /// asked already or is missing.
    pub(super) fn doubt(&mut self, partition: u32) -> Option<(PsAddress, IncarnationId)> {
        let home = self.homes.get(partition as usize).filter(|home| !home.fresh && !home.ps.is_empty())?;
        let known = self.missing.contains_key(&home.ps) || !self.doubted.insert(home.ps.clone());
        (!known).then(|| (address(&self.homes, &home.ps, &home.url), home.incarnation))
    }

    /// Records that a ps that came back, or that is [doubted](Self::doubt), has answered what it
    /// holds. It must have every step below `watermark`, which the books have as done.
    pub(super) fn on_answer(
        &mut self,
        ps: &PsAddress,
        incarnation: IncarnationId,
        ledgers: Result<Vec<pb::PartitionLedger>, Failure>,
        era: Era,
        watermark: Step,
    ) -> Back {
        let is_it = |home: &Home| home.ps == ps.name && home.incarnation == incarnation;
        let doubted = self.doubted.remove(&ps.name) && self.homes.iter().any(is_it);
        let missing = self.missing.get_mut(&ps.name).filter(|missing| missing.asked == Some(incarnation));
        let back = missing.is_some();
        if !back && !doubted {
            return Back::Late;
        }
        let Ok(ledgers) = ledgers else {
            // Ask again; the grace goes on.
            missing.into_iter().for_each(|missing| missing.asked = None);
            return Back::Late;
        };
        let behind = |ledger: &pb::PartitionLedger| ledger.watermark < watermark.get();
        if self.check_all(&ledgers, Some(&ps.name), era).is_err() {
            return Back::Empty;
        }
        if ledgers.iter().any(behind) {
            // It has all gradients of these steps, or nobody had reported them, and applies them in
            // a moment: when another ps has told its norms, for example. Ask again; the grace goes
            // on.
            if let Some(missing) = self.missing.get_mut(&ps.name) {
                missing.asked = None;
            }
            return Back::Late;
        }
        if !back {
            return Back::Late;
        }
        self.missing.remove(&ps.name);
        for home in self.homes.iter_mut().filter(|home| home.ps == ps.name) {
            self.number += u64::from(home.url != ps.url);
            (home.url, home.incarnation) = (ps.url.clone(), incarnation);
        }
        Back::Whole
    }
}

fn address(homes: &[Home], name: &str, url: &str) -> PsAddress {
    let here = (0..).zip(homes).filter(|(_, home)| home.ps == name).map(|(partition, _)| partition);
    PsAddress { name: name.to_owned(), url: url.to_owned(), partitions: here.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::{MemberRole, Process};

    const SECOND: Duration = Duration::from_secs(1);
    const GRACE: Duration = Duration::from_secs(30);

    fn fleet(names: &[&str]) -> Membership {
        let mut fleet = Membership::new(IncarnationId(1), 5 * SECOND, 9);
        names.iter().for_each(|name| join(&mut fleet, name));
        fleet
    }

    fn join(fleet: &mut Membership, name: &str) {
        let process = Process::new(MemberRole::Ps, name, &format!("http://{name}"));
        let (incarnation, _) = fleet.register(Duration::ZERO, process).expect("room");
        fleet.beat(Duration::ZERO, incarnation, false).expect("known");
    }

    fn place(fleet: &Membership, count: u32, load: &[(&str, usize)]) -> Result<Partitions, Failure> {
        let load = load.iter().map(|&(name, count)| (name.to_owned(), count)).collect();
        let mut partitions = Partitions::new(vec![TensorSpec::parameter("w", [3])], count);
        partitions.place(fleet, &load).map(|()| partitions)
    }

    /// Partitions that are trained.
    fn kept(fleet: &Membership, count: u32) -> Partitions {
        let mut partitions = place(fleet, count, &[]).expect("enough");
        partitions.open = true;
        partitions.keep();
        partitions
    }

    fn again(partitions: &mut Partitions, fleet: &Membership) -> Result<Vec<String>, String> {
        let placed = partitions.place(fleet, &BTreeMap::new());
        placed.map(|()| names(partitions)).map_err(|failure| failure.message)
    }

    fn names(partitions: &Partitions) -> Vec<String> {
        partitions.addresses().map(|address| address.name).collect()
    }

    fn ledger(partition: u32, watermark: u64) -> pb::PartitionLedger {
        pb::PartitionLedger { partition, watermark, version: Some(watermark), ..Default::default() }
    }

    #[test]
    fn what_is_left_from_an_earlier_placement_is_not_counted() {
        let homes = place(&fleet(&["a", "b"]), 2, &[]).expect("enough");
        let told = vec![ledger(0, 0), ledger(1, 3)];
        let [a, b] = [0, 1].map(|at| homes.addresses().nth(at).expect("two").own(told.clone()));
        assert_eq!((a, b), (vec![ledger(0, 0)], vec![ledger(1, 3)]));
    }

    #[test]
    fn only_the_process_that_holds_a_partition_may_report_of_it() {
        let mut fleet = fleet(&["a", "b"]);
        let homes = place(&fleet, 2, &[]).expect("enough");
        let [a, b] = ["a", "b"].map(|name| fleet.ps_named(name).expect("it lives").0);
        assert_eq!(homes.holder(0, a, "a"), Holder::Sender);
        assert_eq!(homes.holder(1, a, "a"), Holder::Another);
        assert_eq!(homes.holder(0, b, "b"), Holder::Another);
        assert_eq!(homes.holder(2, b, "b"), Holder::Another);
        join(&mut fleet, "b");
        let again = fleet.ps_named("b").expect("it lives").0;
        assert_eq!(homes.holder(1, again, "b"), Holder::SenderUnlessRestarted);
    }

    #[test]
    fn each_partition_has_a_ps_of_its_own_the_least_loaded_first() {
        let fleet = fleet(&["c", "a", "b"]);
        assert_eq!(names(&place(&fleet, 2, &[]).expect("enough")), ["a", "b"]);
        assert_eq!(names(&place(&fleet, 2, &[("a", 2), ("b", 1)]).expect("enough")), ["c", "b"]);
        let few = place(&fleet, 4, &[]).unwrap_err();
        assert!(few.is_retryable() && few.message.contains("ps (3 of 4 live)"), "{few}");
    }

    #[test]
    fn a_ps_that_comes_back_is_asked_before_it_is_believed() {
        let mut fleet = fleet(&["a", "b"]);
        let mut partitions = kept(&fleet, 2);
        assert_eq!(partitions.watch(SECOND, &fleet, GRACE), Watched::default());
        fleet.expire(5 * SECOND);
        join(&mut fleet, "b");
        let watched = partitions.watch(6 * SECOND, &fleet, GRACE);
        assert_eq!((watched.warnings.len(), watched.ask.len(), watched.lost.len()), (2, 1, 0));
        let (address, incarnation) = watched.ask[0].clone();
        assert_eq!((address.name.as_str(), partitions.reachable().len()), ("b", 0));
        assert_eq!(
            partitions.watch(7 * SECOND, &fleet, GRACE),
            Watched::default(),
            "asked once, warned once"
        );
        let answer = |partitions: &mut Partitions, ledgers| {
            partitions.on_answer(&address, incarnation, ledgers, Era(0), Step(3))
        };
        let unreachable = Err(Failure::new(Kind::Unavailable, "down"));
        assert_eq!(answer(&mut partitions, unreachable), Back::Late);
        assert_eq!(partitions.watch(8 * SECOND, &fleet, GRACE).ask.len(), 1, "asked again");
        assert_eq!(answer(&mut partitions, Ok(vec![ledger(1, 3)])), Back::Whole);
        assert_eq!(answer(&mut partitions, Ok(vec![])), Back::Late, "a repeat");
        assert_eq!((partitions.reachable().len(), partitions.number()), (1, 1));
        assert_eq!(partitions.watch(36 * SECOND, &fleet, GRACE).lost, ["a"]);
    }

    #[test]
    fn a_ps_that_is_doubted_is_asked_once_at_a_time_and_goes_on_if_it_has_all() {
        let mut fleet = fleet(&["a", "b"]);
        let mut partitions = kept(&fleet, 2);
        let ask = |partitions: &mut Partitions| partitions.doubt(1);
        let (b, incarnation) = ask(&mut partitions).expect("to be asked");
        assert_eq!((b.name.as_str(), ask(&mut partitions), partitions.doubt(2)), ("b", None, None));
        let answer = |partitions: &mut Partitions, ledgers| {
            partitions.on_answer(&b, incarnation, ledgers, Era(0), Step(3))
        };
        assert_eq!(answer(&mut partitions, Ok(vec![ledger(1, 3)])), Back::Late);
        assert_eq!(answer(&mut partitions, Ok(vec![])), Back::Late, "nobody asks any more");
        assert!(ask(&mut partitions).is_some());
        assert_eq!(answer(&mut partitions, Err(Failure::new(Kind::Unavailable, "down"))), Back::Late);
        assert!(ask(&mut partitions).is_some());
        assert_eq!(answer(&mut partitions, Ok(vec![])), Back::Empty);
        partitions.lose(|ps| ps == "b");
        assert_eq!(ask(&mut partitions), None, "there is nothing in it to lose");
        fleet.expire(5 * SECOND);
    }

    #[test]
    fn a_ps_that_has_yet_to_apply_what_it_took_is_asked_again() {
        let mut fleet = fleet(&["a"]);
        let mut partitions = kept(&fleet, 1);
        join(&mut fleet, "a");
        for (version, expected) in [(2, Back::Late), (3, Back::Whole)] {
            let (address, incarnation) = partitions.watch(SECOND, &fleet, GRACE).ask.remove(0);
            let ledgers = Ok(vec![ledger(0, version)]);
            assert_eq!(partitions.on_answer(&address, incarnation, ledgers, Era(0), Step(3)), expected);
        }
    }

    #[test]
    fn a_ps_that_has_less_than_it_had_was_started_again() {
        for ledgers in [
            vec![],
            vec![pb::PartitionLedger { version: None, ..ledger(0, 3) }],
            vec![pb::PartitionLedger { era: 1, ..ledger(0, 3) }],
        ] {
            let mut fleet = fleet(&["a"]);
            let mut partitions = kept(&fleet, 1);
            join(&mut fleet, "a");
            let (address, incarnation) = partitions.watch(SECOND, &fleet, GRACE).ask.remove(0);
            let back = partitions.on_answer(&address, incarnation, Ok(ledgers.clone()), Era(0), Step(3));
            assert_eq!(back, Back::Empty, "{ledgers:?}");
        }
    }

    #[test]
    fn a_lost_partition_goes_to_its_ps_or_to_a_spare_and_the_others_stay() {
        let mut fleet = fleet(&["a", "b"]);
        let mut partitions = kept(&fleet, 2);
        let b = fleet.ps_named("b").expect("it lives").0;
        let stream = fleet.stream_opened(b).expect("known");
        fleet.stream_broken(b, stream);
        partitions.lose(|ps| ps == "b");
        let waits = again(&mut partitions, &fleet).unwrap_err();
        assert_eq!(waits, "the job waits for ps `b` to come back or for another ps");
        join(&mut fleet, "c");
        assert_eq!(
            (again(&mut partitions, &fleet), partitions.number()),
            (Ok(vec!["a".into(), "c".into()]), 2)
        );
        assert_eq!(
            (again(&mut partitions, &fleet), partitions.number()),
            (Ok(vec!["a".into(), "c".into()]), 2)
        );
        partitions.lose(|ps| ps == "c");
        join(&mut fleet, "b");
        join(&mut fleet, "c");
        assert_eq!(
            (again(&mut partitions, &fleet), partitions.number()),
            (Ok(vec!["a".into(), "c".into()]), 3)
        );
    }

    #[test]
    fn a_fresh_partition_is_given_up_without_waiting() {
        let mut fleet = fleet(&["a"]);
        let mut partitions = place(&fleet, 1, &[]).expect("enough");
        join(&mut fleet, "a");
        assert_eq!(partitions.watch(SECOND, &fleet, GRACE), Watched::default(), "it is not open yet");
        partitions.open = true;
        let watched = partitions.watch(SECOND, &fleet, GRACE);
        assert_eq!(watched, Watched { unsettled: true, ..Watched::default() });
        assert_eq!(partitions.watch(SECOND, &fleet, GRACE), Watched::default());
        assert_eq!((again(&mut partitions, &fleet), partitions.number()), (Ok(vec!["a".into()]), 2));
        assert!(partitions.are_all_here());
    }

    #[test]
    fn another_model_is_refused_once_there_is_something_to_lose() {
        let fleet = fleet(&["a"]);
        let mut partitions = place(&fleet, 1, &[]).expect("enough");
        let (first, second) = (vec![TensorSpec::parameter("v", [3])], vec![TensorSpec::parameter("w", [3])]);
        assert_eq!(partitions.describe(first.clone()), Ok(()));
        partitions.keep();
        assert_eq!(partitions.describe(first), Ok(()));
        assert_eq!(partitions.describe(second).unwrap_err().kind, Kind::Malformed);
    }
}

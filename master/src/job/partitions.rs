//! Where a job's model lives, and whether those ps are still the same. Pure.
//!
//! Partitions are placed once, when the model is described. A ps that lost its connection has its data still, so it gets time to
//! come back; a new process of its name has not, so it is asked before it is believed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::ids::IncarnationId;
use proto::pb;
use proto::status::{Failure, Kind};
use proto::tensor::TensorSpec;

use crate::membership::Membership;

/// The partitions of one job.
#[derive(Debug)]
pub(super) struct Partitions {
    tensors: Vec<TensorSpec>,
    homes: Vec<Home>,
    /// Every ps has opened its own.
    pub(super) open: bool,
    /// Ps that are missing, or back and not yet believed.
    missing: BTreeMap<String, Missing>,
}

/// The ps that holds a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Home {
    ps: String,
    url: String,
    incarnation: IncarnationId,
}

#[derive(Clone, Copy, Debug)]
struct Missing {
    since: Duration,
    /// The incarnation that is being asked what it holds.
    asked: Option<IncarnationId>,
}

/// A ps to speak to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PsAddress {
    pub(crate) name: String,
    pub(crate) url: String,
}

/// What became of the ps since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Watched {
    /// Ask these what they hold.
    pub(super) ask: Vec<(PsAddress, IncarnationId)>,
    /// For the user.
    pub(super) warnings: Vec<String>,
    /// Gone for good: why.
    pub(super) lost: Option<String>,
}

impl Partitions {
    /// Assigns `count` partitions to live ps, the least loaded first: `load` is how many partitions a ps has by name.
    ///
    /// # Errors
    /// Too few ps live at the moment.
    pub(super) fn place(
        tensors: Vec<TensorSpec>,
        count: u32,
        fleet: &Membership,
        load: &BTreeMap<String, usize>,
    ) -> Result<Self, Failure> {
        let mut ps: Vec<_> = fleet
            .ps()
            .map(|(incarnation, process)| Home {
                ps: process.name.clone(),
                url: process.url.clone(),
                incarnation,
            })
            .collect();
        if ps.len() < count as usize {
            let message = format!("{} of {count} ps live; waiting for the others", ps.len());
            return Err(Failure::new(Kind::Unavailable, message));
        }
        ps.sort_by_key(|home| (load.get(&home.ps).copied().unwrap_or_default(), home.ps.clone()));
        ps.truncate(count as usize);
        Ok(Self { tensors, homes: ps, open: false, missing: BTreeMap::new() })
    }

    /// Whether these partitions are of this model and all their ps live as they did when they were placed.
    pub(super) fn still_fit(&self, tensors: &[TensorSpec], fleet: &Membership) -> bool {
        let here = |home: &Home| fleet.ps_named(&home.ps).is_some_and(|(id, _)| id == home.incarnation);
        self.tensors == tensors && self.homes.iter().all(here)
    }

    pub(super) fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// As workers are told.
    pub(super) fn placement(&self) -> pb::Placement {
        let address = |home: &Home| pb::PartitionAddress { ps: home.ps.clone(), url: home.url.clone() };
        pb::Placement {
            tensors: self.tensors.iter().map(pb::TensorSpec::from).collect(),
            partitions: self.homes.iter().map(address).collect(),
        }
    }

    /// The ps of each partition, in partition order.
    pub(super) fn addresses(&self) -> impl Iterator<Item = PsAddress> {
        self.homes.iter().map(|home| PsAddress { name: home.ps.clone(), url: home.url.clone() })
    }

    /// Each ps once, except those that are missing.
    pub(super) fn reachable(&self) -> Vec<PsAddress> {
        let mut seen = BTreeSet::new();
        self.addresses()
            .filter(|ps| !self.missing.contains_key(&ps.name) && seen.insert(ps.name.clone()))
            .collect()
    }

    /// Whether `ledgers` has every partition; of one ps when `ps` names it.
    ///
    /// # Errors
    /// The partition that is not there.
    pub(super) fn check_all(&self, ledgers: &[pb::PartitionLedger], ps: Option<&str>) -> Result<(), u32> {
        for (partition, home) in (0..).zip(&self.homes) {
            let wanted = ps.is_none_or(|ps| ps == home.ps);
            if wanted && !ledgers.iter().any(|ledger| ledger.partition == partition) {
                return Err(partition);
            }
        }
        Ok(())
    }

    /// Looks at the fleet: who is missing, who is back, who was missing for longer than `grace`.
    pub(super) fn watch(&mut self, now: Duration, fleet: &Membership, grace: Duration) -> Watched {
        let mut watched = Watched::default();
        for home in &self.homes {
            let found = fleet.ps_named(&home.ps);
            if found.is_some_and(|(incarnation, _)| incarnation == home.incarnation) {
                self.missing.remove(&home.ps);
                continue;
            }
            let missing = self.missing.entry(home.ps.clone()).or_insert_with(|| {
                watched.warnings.push(format!(
                    "ps `{}` is gone; training waits up to {grace:?} for it to come back with its partitions",
                    home.ps
                ));
                Missing { since: now, asked: None }
            });
            if let Some((incarnation, process)) =
                found.filter(|(incarnation, _)| missing.asked != Some(*incarnation))
            {
                missing.asked = Some(incarnation);
                let address = PsAddress { name: process.name.clone(), url: process.url.clone() };
                watched.ask.push((address, incarnation));
            }
            if now.saturating_sub(missing.since) >= grace {
                watched.lost = Some(format!(
                    "ps `{}` was gone for {grace:?} and holds part of the model; this version writes no checkpoints, \
                     submit the job again",
                    home.ps
                ));
            }
        }
        watched
    }

    /// A ps that came back has answered what it holds. `Ok`: what to tell the user.
    ///
    /// # Errors
    /// It is a new process without the data: why the job is lost.
    pub(super) fn on_answer(
        &mut self,
        ps: &PsAddress,
        incarnation: IncarnationId,
        ledgers: Result<Vec<pb::PartitionLedger>, Failure>,
    ) -> Result<Option<String>, String> {
        let Some(missing) =
            self.missing.get_mut(&ps.name).filter(|missing| missing.asked == Some(incarnation))
        else {
            return Ok(None);
        };
        let Ok(ledgers) = ledgers else {
            // Ask again; the grace goes on.
            missing.asked = None;
            return Ok(None);
        };
        if let Err(partition) = self.check_all(&ledgers, Some(&ps.name)) {
            return Err(format!(
                "ps `{}` was started again and lost partition {partition} of the model; this version writes no \
                 checkpoints, submit the job again",
                ps.name
            ));
        }
        self.missing.remove(&ps.name);
        for home in self.homes.iter_mut().filter(|home| home.ps == ps.name) {
            (home.url, home.incarnation) = (ps.url.clone(), incarnation);
        }
        Ok(Some(format!("ps `{}` is back with its partitions", ps.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::{Process, Role};

    const SECOND: Duration = Duration::from_secs(1);
    const GRACE: Duration = Duration::from_secs(30);

    fn fleet(names: &[&str]) -> Membership {
        let mut fleet = Membership::new(IncarnationId(1), 5 * SECOND, 9);
        names.iter().for_each(|name| join(&mut fleet, name));
        fleet
    }

    fn join(fleet: &mut Membership, name: &str) {
        let process = Process { role: Role::Ps, name: name.to_owned(), url: format!("http://{name}") };
        let (incarnation, _) = fleet.register(Duration::ZERO, process).expect("room");
        fleet.beat(Duration::ZERO, incarnation, false).expect("known");
    }

    fn place(fleet: &Membership, count: u32, load: &[(&str, usize)]) -> Result<Partitions, Failure> {
        let load = load.iter().map(|&(name, count)| (name.to_owned(), count)).collect();
        Partitions::place(vec![TensorSpec::parameter("w", [3])], count, fleet, &load)
    }

    fn names(partitions: &Partitions) -> Vec<String> {
        partitions.addresses().map(|address| address.name).collect()
    }

    fn ledger(partition: u32) -> pb::PartitionLedger {
        pb::PartitionLedger { partition, ..Default::default() }
    }

    #[test]
    fn each_partition_has_a_ps_of_its_own_the_least_loaded_first() {
        let fleet = fleet(&["c", "a", "b"]);
        assert_eq!(names(&place(&fleet, 2, &[]).expect("enough")), ["a", "b"]);
        assert_eq!(names(&place(&fleet, 2, &[("a", 2), ("b", 1)]).expect("enough")), ["c", "b"]);
        let few = place(&fleet, 4, &[]).unwrap_err();
        assert!(few.is_retryable() && few.message.contains("3 of 4 ps"), "{few}");
    }

    #[test]
    fn a_ps_that_comes_back_is_asked_before_it_is_believed() {
        let mut fleet = fleet(&["a", "b"]);
        let mut partitions = place(&fleet, 2, &[]).expect("enough");
        assert_eq!(partitions.watch(SECOND, &fleet, GRACE), Watched::default());
        fleet.expire(5 * SECOND);
        join(&mut fleet, "b");
        let watched = partitions.watch(6 * SECOND, &fleet, GRACE);
        assert_eq!((watched.warnings.len(), watched.ask.len(), &watched.lost), (2, 1, &None));
        let (address, incarnation) = watched.ask[0].clone();
        assert_eq!((address.name.as_str(), partitions.reachable().len()), ("b", 0));
        assert_eq!(
            partitions.watch(7 * SECOND, &fleet, GRACE),
            Watched::default(),
            "asked once, warned once"
        );
        let unreachable = Err(Failure::new(Kind::Unavailable, "down"));
        assert_eq!(partitions.on_answer(&address, incarnation, unreachable), Ok(None));
        assert_eq!(partitions.watch(8 * SECOND, &fleet, GRACE).ask.len(), 1, "asked again");
        let back = partitions.on_answer(&address, incarnation, Ok(vec![ledger(1)])).expect("it has it");
        assert!(back.expect("news").contains("`b` is back"));
        assert_eq!(partitions.reachable().len(), 1);
        let lost = partitions.watch(36 * SECOND, &fleet, GRACE).lost.expect("a is gone");
        assert!(lost.contains("ps `a` was gone for 30s"), "{lost}");
    }

    #[test]
    fn a_new_process_without_the_data_is_the_end() {
        let mut fleet = fleet(&["a"]);
        let mut partitions = place(&fleet, 1, &[]).expect("enough");
        join(&mut fleet, "a");
        let (address, incarnation) = partitions.watch(SECOND, &fleet, GRACE).ask.remove(0);
        let lost = partitions.on_answer(&address, incarnation, Ok(vec![])).unwrap_err();
        assert!(lost.contains("lost partition 0"), "{lost}");
    }

    #[test]
    fn a_placement_fits_while_model_and_ps_are_the_same() {
        let mut fleet = fleet(&["a"]);
        let partitions = place(&fleet, 1, &[]).expect("enough");
        let tensors = partitions.tensors().to_vec();
        assert!(partitions.still_fit(&tensors, &fleet));
        assert!(!partitions.still_fit(&[TensorSpec::parameter("v", [3])], &fleet));
        join(&mut fleet, "a");
        assert!(!partitions.still_fit(&tensors, &fleet));
    }
}

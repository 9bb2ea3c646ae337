//! Which of the live workers take part in a job. Pure.
//!
//! Whoever takes part stays as long as it lives and there is room: neither a join nor another number of workers moves anybody
//! else. Room is taken by the oldest who stand by; too many means that those who came last stand by. With at most 2:
//!
//! ```text
//!   live 1 2 3    crew 1 2    3 stands by
//!   live 2 3 4    crew 2 3    4 stands by          1 died
//!   max 1         crew 2      3 and 4 stand by
//! ```
//!
//! A worker that stands by gets nothing new and finishes what it holds. To hand that back instead would save it no time worth
//! having, since a lease is short, and would compute some microbatches twice.

use std::collections::BTreeSet;

use proto::ids::IncarnationId;
use proto::spec::WorkersSpec;

/// The workers of a job.
#[derive(Debug)]
pub(super) struct Crew {
    /// What the specification asks for.
    specified: WorkersSpec,
    /// What is in force.
    bounds: WorkersSpec,
    /// Who takes part, whoever came first first.
    members: Vec<IncarnationId>,
    standby: u32,
}

impl Crew {
    pub(super) const fn new(specified: WorkersSpec) -> Self {
        Self { specified, bounds: specified, members: Vec::new(), standby: 0 }
    }

    /// At most `workers` take part from now on, after the next [`choose`](Self::choose). Fewer than the specification asks for
    /// are enough then. The bounds depend on the last number alone and not on those before.
    pub(super) fn scale(&mut self, workers: u32) {
        self.bounds = WorkersSpec { min: self.specified.min.min(workers), max: workers };
    }

    /// From those who take work now.
    pub(super) fn choose(&mut self, able: impl Iterator<Item = IncarnationId>) {
        let mut others: BTreeSet<_> = able.collect();
        self.members.retain(|member| others.remove(member));
        let max = self.bounds.max as usize;
        let surplus = self.members.len().saturating_sub(max);
        let room = max.saturating_sub(self.members.len());
        self.standby = (surplus + others.len().saturating_sub(room)) as u32;
        self.members.truncate(max);
        self.members.extend(others.into_iter().take(room));
    }

    pub(super) fn contains(&self, worker: IncarnationId) -> bool {
        self.members.contains(&worker)
    }

    /// Who takes part, whoever came first first.
    pub(super) fn members(&self) -> &[IncarnationId] {
        &self.members
    }

    /// How many a user lets take part, when one has said so.
    pub(super) fn scaled_to(&self) -> Option<u32> {
        (self.bounds != self.specified).then_some(self.bounds.max)
    }

    /// How many take part.
    pub(super) const fn len(&self) -> u32 {
        self.members.len() as u32
    }

    /// How many stand by.
    pub(super) const fn standby(&self) -> u32 {
        self.standby
    }

    /// How many could take part, if all might.
    pub(super) const fn live(&self) -> u32 {
        self.len() + self.standby
    }

    /// How many workers it needs and may have.
    pub(super) const fn bounds(&self) -> WorkersSpec {
        self.bounds
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(numbers: &[u64]) -> Vec<IncarnationId> {
        numbers.iter().copied().map(IncarnationId).collect()
    }

    fn crew(max: u32) -> Crew {
        Crew::new(WorkersSpec { min: 2, max })
    }

    #[test]
    fn the_oldest_take_part_and_the_others_stand_by() {
        let mut crew = crew(2);
        crew.choose(ids(&[1, 2, 3]).into_iter());
        assert_eq!((crew.members.clone(), crew.len(), crew.standby(), crew.live()), (ids(&[1, 2]), 2, 1, 3));
        crew.choose(ids(&[2, 3, 4]).into_iter());
        assert_eq!((crew.members.clone(), crew.standby()), (ids(&[2, 3]), 1), "the oldest takes over");
        crew.choose(ids(&[0, 2, 3, 4]).into_iter());
        assert_eq!(
            (crew.members.clone(), crew.standby()),
            (ids(&[2, 3]), 2),
            "who registered long ago moves nobody"
        );
    }

    #[test]
    fn scaling_down_keeps_who_came_first_and_scaling_up_adds_the_oldest() {
        let mut crew = crew(3);
        crew.choose(ids(&[2, 5]).into_iter());
        crew.choose(ids(&[1, 2, 5, 9]).into_iter());
        assert_eq!(crew.members, ids(&[2, 5, 1]));
        crew.scale(2);
        crew.choose(ids(&[1, 2, 5, 9]).into_iter());
        assert_eq!((crew.members.clone(), crew.standby()), (ids(&[2, 5]), 2));
        crew.scale(4);
        crew.choose(ids(&[1, 2, 5, 9]).into_iter());
        assert_eq!((crew.members.clone(), crew.standby()), (ids(&[2, 5, 1, 9]), 0));
    }

    #[test]
    fn the_bounds_depend_on_the_last_number_alone() {
        let mut crew = crew(3);
        for (workers, min) in [(1, 1), (1, 1), (9, 2), (2, 2)] {
            crew.scale(workers);
            assert_eq!(crew.bounds(), WorkersSpec { min, max: workers });
        }
    }

    proptest! {
        #[test]
        fn nobody_who_may_stay_is_moved(
            changes in proptest::collection::vec((1u32..6, proptest::collection::btree_set(0u64..9, 0..9)), 1..20)
        ) {
            let mut crew = crew(3);
            for (max, live) in changes {
                let before = crew.members.clone();
                crew.scale(max);
                crew.choose(live.iter().copied().map(IncarnationId));
                prop_assert_eq!(crew.len() as usize, live.len().min(max as usize));
                prop_assert_eq!(crew.live() as usize, live.len());
                prop_assert!(crew.members.iter().all(|member| live.contains(&member.get())));
                let stay: Vec<_> = before.into_iter().filter(|member| live.contains(&member.get())).take(max as usize).collect();
                prop_assert_eq!(&crew.members[..stay.len()], &stay[..]);
            }
        }
    }
}

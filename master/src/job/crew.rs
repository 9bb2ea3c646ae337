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
//! A worker that hangs gives its place to one that stands by and gets on, when there is no room for both: with at most 1 nobody else
//! would be left. It has no other claim than those who stand by when it gets on again.
//!
//! A worker that stands by gets nothing new and finishes what it holds. To hand that back instead would save it no time worth
//! having, since a lease is short, and would compute some microbatches twice.
//!
//! The members of a job in canonical order are of one numerics class. It is decided once, when the model is built: of the classes that
//! have enough workers the one with the most capacity. Workers of other classes stand by. Whoever exports the trained model computes
//! nothing, so the class does not matter then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proto::ids::IncarnationId;
use proto::numerics::Numerics;
use proto::spec::WorkersSpec;

use crate::membership::{Capacity, Process};

/// The workers of a job.
#[derive(Debug)]
pub(super) struct Crew {
    /// What the specification asks for.
    specified: WorkersSpec,
    /// What is in force.
    bounds: WorkersSpec,
    /// Its members must be of one numerics class.
    one_class: bool,
    /// The numerics class of the crew, once it is decided.
    class: Option<Arc<Numerics>>,
    /// What its members do now depends on their class.
    computes: bool,
    /// Workers that take work, as of the last look at the fleet; oldest first.
    able: Vec<Able>,
    /// Who takes part, whoever came first first.
    members: Vec<IncarnationId>,
    standby: u32,
}

/// A worker that takes work.
#[derive(Clone, Debug)]
struct Able {
    id: IncarnationId,
    /// It lives, and does not get on.
    hangs: bool,
    numerics: Arc<Numerics>,
    capacity: Capacity,
}

impl Crew {
    /// A crew without members. `one_class`: they must be of one numerics class.
    pub(super) const fn new(specified: WorkersSpec, one_class: bool) -> Self {
        Self {
            specified,
            bounds: specified,
            one_class,
            class: None,
            computes: true,
            able: Vec::new(),
            members: Vec::new(),
            standby: 0,
        }
    }

    /// At most `workers` take part from now on, after the next [`choose`](Self::choose). Fewer than the specification asks for
    /// are enough then. The bounds depend on the last number alone and not on those before.
    pub(super) fn scale(&mut self, workers: u32) {
        self.bounds = WorkersSpec { min: self.specified.min.min(workers), max: workers };
    }

    /// Chooses from those who take work now. `hangs`: who of them does not get on; `computes`: what they are to do depends on their class.
    pub(super) fn choose<'a>(
        &mut self,
        able: impl Iterator<Item = (IncarnationId, &'a Process)>,
        hangs: impl Fn(IncarnationId) -> bool,
        computes: bool,
    ) {
        let able = able.map(|(id, process)| Able {
            id,
            hangs: hangs(id),
            numerics: process.numerics.clone(),
            capacity: process.capacity,
        });
        self.able = able.collect();
        self.computes = computes;
        self.arrange();
    }

    fn arrange(&mut self) {
        let fits = |able: &&Able| self.fits(&able.numerics);
        let mut others: BTreeSet<_> = self.able.iter().filter(fits).map(|able| able.id).collect();
        self.members.retain(|member| others.remove(member));
        let max = self.bounds.max as usize;
        let hanging: BTreeSet<_> = self.able.iter().filter(|able| able.hangs).map(|able| able.id).collect();
        if others.len() + self.members.len() > max && !hanging.is_empty() {
            let hangs = |worker: &IncarnationId| hanging.contains(worker);
            let (hang, get_on): (Vec<_>, Vec<_>) = self.members.iter().copied().partition(hangs);
            let (hang_too, wait): (Vec<_>, Vec<_>) = others.into_iter().partition(hangs);
            self.members = [get_on, wait, hang, hang_too].concat();
        } else {
            self.members.extend(others);
        }
        self.members.truncate(max);
        self.standby = (self.able.len() - self.members.len()) as u32;
    }

    fn fits(&self, numerics: &Numerics) -> bool {
        let other = |class: &Arc<Numerics>| class.class != numerics.class;
        !(self.computes && self.class.as_ref().is_some_and(other))
    }

    // The numerics class.

    /// The class of its members; `None`: every class, or it is not decided.
    pub(super) fn class(&self) -> Option<&Numerics> {
        self.class.as_deref()
    }

    /// Whether the class is still to be decided, so that nobody may compute.
    pub(super) const fn is_undecided(&self) -> bool {
        self.one_class && self.class.is_none()
    }

    /// Decides the class, if that is to be done and enough workers of one are there; answers whether it did.
    pub(super) fn decide(&mut self) -> bool {
        if !self.is_undecided() {
            return false;
        }
        let max = self.bounds.max as usize;
        // The capacity of those who would take part, then the oldest worker.
        let rank = |ables: &Vec<&Able>| {
            let capacity = ables.iter().take(max).fold(Capacity::default(), |sum, able| sum + able.capacity);
            (capacity, std::cmp::Reverse(ables[0].id))
        };
        let classes = self.classes();
        let enough = classes.values().filter(|ables| ables.len() >= self.bounds.min as usize);
        let best = enough.max_by_key(|ables| rank(ables)).map(|ables| ables[0].numerics.clone());
        let decided = best.is_some();
        if decided {
            self.class = best;
            self.arrange();
        }
        decided
    }

    /// Its members are of this class from now on.
    pub(super) fn change_class(&mut self, class: Numerics) {
        self.class = self.one_class.then(|| Arc::new(class));
        self.arrange();
    }

    /// Whether its members must be of one class.
    pub(super) const fn needs_one_class(&self) -> bool {
        self.one_class
    }

    /// A class that a live worker is of, by its name.
    pub(super) fn class_named(&self, name: &str) -> Option<Numerics> {
        let named = self.able.iter().find(|able| able.numerics.class == name);
        named.map(|able| Numerics::clone(&able.numerics))
    }

    /// The classes of live workers that stand by because of it, with their numbers. While no class is decided: all classes, if there
    /// are several.
    pub(super) fn strangers(&self) -> impl Iterator<Item = (&Numerics, u32)> {
        let classes = Some(self.classes()).filter(|classes| {
            self.computes && self.one_class && { self.class.is_some() || classes.len() > 1 }
        });
        let own = self.class.as_ref().map(|class| class.class.as_str());
        let others = classes.into_iter().flatten().filter(move |(name, _)| Some(*name) != own);
        others.map(|(_, ables)| (&*ables[0].numerics, ables.len() as u32))
    }

    /// Workers that take work, by the names of the classes; oldest first.
    fn classes(&self) -> BTreeMap<&str, Vec<&Able>> {
        let mut classes: BTreeMap<&str, Vec<&Able>> = BTreeMap::new();
        for able in &self.able {
            classes.entry(able.numerics.class.as_str()).or_default().push(able);
        }
        classes
    }

    // Who takes part.

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

    /// How many could take part together, if there were no upper bound.
    pub(super) fn live(&self) -> u32 {
        if self.computes && self.is_undecided() {
            return self.classes().values().map(Vec::len).max().unwrap_or(0) as u32;
        }
        self.able.iter().filter(|able| self.fits(&able.numerics)).count() as u32
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
    use crate::membership::Role;

    fn ids(numbers: &[u64]) -> Vec<IncarnationId> {
        numbers.iter().copied().map(IncarnationId).collect()
    }

    fn crew(max: u32) -> Crew {
        Crew::new(WorkersSpec { min: 2, max }, true)
    }

    fn of(class: &str, capacity: Capacity) -> Process {
        let numerics = Numerics { class: class.to_owned(), facts: format!("facts of {class}") };
        Process { numerics: Arc::new(numerics), capacity, ..Process::new(Role::Worker, "w", "") }
    }

    const fn threads(threads: u64) -> Capacity {
        Capacity { cuda: 0, threads }
    }

    const CUDA: Capacity = Capacity { cuda: 1, threads: 0 };

    impl Crew {
        /// Workers of one class.
        fn look(&mut self, ids: &[u64]) {
            self.look_at(ids.iter().map(|&id| (id, "a", threads(1))), true);
        }

        fn look_at<'a>(&mut self, workers: impl Iterator<Item = (u64, &'a str, Capacity)>, computes: bool) {
            let workers = workers.map(|(id, class, capacity)| (IncarnationId(id), of(class, capacity)));
            let workers: Vec<_> = workers.collect();
            self.choose(workers.iter().map(|(id, process)| (*id, process)), |_| false, computes);
        }

        /// Workers of one class, some of which hang.
        fn look_while(&mut self, ids: &[u64], hanging: &[u64]) {
            let workers: Vec<_> = ids.iter().map(|&id| (IncarnationId(id), of("a", threads(1)))).collect();
            let hangs = |worker: IncarnationId| hanging.contains(&worker.get());
            self.choose(workers.iter().map(|(id, process)| (*id, process)), hangs, true);
        }

        fn classes_standing_by(&self) -> Vec<(String, u32)> {
            self.strangers().map(|(numerics, count)| (numerics.class.clone(), count)).collect()
        }
    }

    #[test]
    fn the_oldest_take_part_and_the_others_stand_by() {
        let mut crew = crew(2);
        crew.look(&[1, 2, 3]);
        assert_eq!((crew.members.clone(), crew.len(), crew.standby(), crew.live()), (ids(&[1, 2]), 2, 1, 3));
        crew.look(&[2, 3, 4]);
        assert_eq!((crew.members.clone(), crew.standby()), (ids(&[2, 3]), 1), "the oldest takes over");
        crew.look(&[0, 2, 3, 4]);
        assert_eq!(
            (crew.members.clone(), crew.standby()),
            (ids(&[2, 3]), 2),
            "who registered long ago moves nobody"
        );
    }

    #[test]
    fn who_hangs_gives_its_place_to_who_stands_by() {
        let mut crew = crew(2);
        crew.look(&[1, 2, 3, 4]);
        crew.look_while(&[1, 2, 3, 4], &[1, 3]);
        assert_eq!((crew.members.clone(), crew.standby()), (ids(&[2, 4]), 2));
        crew.look_while(&[1, 2, 3, 4], &[3]);
        assert_eq!(crew.members, ids(&[2, 4]), "nobody is moved without need");
        crew.look_while(&[1, 2, 3, 4], &[1, 2, 3, 4]);
        assert_eq!((crew.members.clone(), crew.len()), (ids(&[2, 4]), 2));
        crew.look_while(&[1, 2], &[1, 2]);
        assert_eq!((crew.members.clone(), crew.standby()), (ids(&[2, 1]), 0), "there is room for both");
    }

    #[test]
    fn scaling_down_keeps_who_came_first_and_scaling_up_adds_the_oldest() {
        let mut crew = crew(3);
        crew.look(&[2, 5]);
        crew.look(&[1, 2, 5, 9]);
        assert_eq!(crew.members, ids(&[2, 5, 1]));
        crew.scale(2);
        crew.look(&[1, 2, 5, 9]);
        assert_eq!((crew.members.clone(), crew.standby()), (ids(&[2, 5]), 2));
        crew.scale(4);
        crew.look(&[1, 2, 5, 9]);
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

    #[test]
    fn the_class_with_the_most_capacity_takes_part_and_the_others_stand_by() {
        let mut crew = crew(3);
        let fleet = [(1, "a", 1), (2, "b", 2), (3, "a", 1), (4, "b", 2), (5, "c", 9)];
        let fleet = fleet.map(|(id, class, count)| (id, class, threads(count)));
        crew.look_at(fleet.into_iter(), true);
        assert_eq!((crew.len(), crew.live()), (3, 2), "whoever computes nothing yet may be of any class");
        assert!(crew.decide() && !crew.decide(), "it is decided once");
        assert_eq!(crew.class().map(|class| class.class.as_str()), Some("b"), "`c` has too few workers");
        assert_eq!((crew.members.clone(), crew.standby(), crew.live()), (ids(&[2, 4]), 3, 2));
        assert_eq!(crew.classes_standing_by(), [("a".to_owned(), 2), ("c".to_owned(), 1)]);
        crew.look_at(fleet.into_iter().filter(|(_, class, _)| *class != "b"), true);
        assert_eq!(
            (crew.len(), crew.live(), crew.standby()),
            (0, 0, 3),
            "nobody takes the place of that class"
        );
        crew.look_at(fleet.into_iter().filter(|(_, class, _)| *class != "b"), false);
        assert_eq!((crew.len(), crew.standby()), (3, 0), "what depends on no class may be done by anybody");
    }

    #[test]
    fn cuda_is_more_than_any_threads_and_only_those_who_would_take_part_count() {
        let mut crew = crew(2);
        let many = (1..9).map(|id| (id, "many", threads(2)));
        crew.look_at(many.clone().chain((10..12).map(|id| (id, "large", threads(3)))), true);
        assert!(crew.decide());
        assert_eq!(crew.members, ids(&[10, 11]), "two of them are more than two of the others");
        let mut crew = Crew::new(WorkersSpec { min: 1, max: 2 }, true);
        crew.look_at(many.chain([(10, "gpu", CUDA)]), true);
        assert!(crew.decide());
        assert_eq!(crew.members, ids(&[10]));
    }

    #[test]
    fn no_class_is_decided_before_one_has_enough_workers() {
        let mut crew = crew(2);
        let fleet = [(1, "a", threads(1)), (2, "b", threads(1))];
        crew.look_at(fleet.into_iter(), true);
        assert!(!crew.decide() && crew.is_undecided());
        assert_eq!(
            (crew.live(), crew.classes_standing_by().len()),
            (1, 2),
            "two are there, and one of each class"
        );
        crew.look_at(fleet.into_iter().chain([(3, "b", threads(1))]), true);
        assert!(crew.decide());
        assert_eq!(crew.members, ids(&[2, 3]));
    }

    #[test]
    fn a_crew_of_any_class_has_none() {
        let mut crew = Crew::new(WorkersSpec { min: 2, max: 2 }, false);
        crew.look_at([(1, "a", threads(1)), (2, "b", threads(1))].into_iter(), true);
        assert!(!crew.decide() && crew.class().is_none() && crew.classes_standing_by().is_empty());
        assert_eq!((crew.members.clone(), crew.live()), (ids(&[1, 2]), 2));
    }

    #[test]
    fn a_user_may_change_the_class() {
        let mut crew = Crew::new(WorkersSpec { min: 1, max: 9 }, true);
        crew.look_at([(1, "a", threads(2)), (2, "b", threads(1))].into_iter(), true);
        assert!(crew.decide() && crew.class_named("c").is_none());
        let other = crew.class_named("b").expect("it is there");
        crew.change_class(other);
        assert_eq!(
            (crew.members.clone(), crew.classes_standing_by()),
            (ids(&[2]), vec![("a".to_owned(), 1)])
        );
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
                crew.look(&live.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(crew.len() as usize, live.len().min(max as usize));
                prop_assert_eq!(crew.live() as usize, live.len());
                prop_assert!(crew.members.iter().all(|member| live.contains(&member.get())));
                let stay: Vec<_> = before.into_iter().filter(|member| live.contains(&member.get())).take(max as usize).collect();
                prop_assert_eq!(&crew.members[..stay.len()], &stay[..]);
            }
        }
    }
}

//! Which workers take part in which job, and why the others do not. Pure.
//!
//! A job states its [`Demand`]. [`schedule`] looks at the fleet and all demands, and answers the
//! [`Crew`] of each job. A worker may take part in several jobs. [`turns`] says in which order it
//! asks them for work.
//!
//! A worker that takes part stays as long as it lives and there is room: neither a join nor another
//! number of workers moves it. The oldest workers that stand by take free places. If there are too
//! many members, those that came last stand by. With at most 2:
//!
//! ```text
//!   live 1 2 3    crew 1 2    3 stands by
//!   live 2 3 4    crew 2 3    4 stands by          1 died
//!   max 1         crew 2      3 and 4 stand by
//! ```
//!
//! A worker that hangs gives its place to one that stands by and gets on, when there is no room for
//! both: with at most 1 no other worker would be left. Once it gets on again, it has no better
//! claim than the others that stand by.
//!
//! A worker that stands by gets nothing new and finishes what it holds. To hand that back instead
//! would save no time worth having, since a lease is short, and would compute some microbatches
//! twice.
//!
//! The members of a job in canonical order are of one numerics class. The class is decided once,
//! when the model is built: of the classes with enough workers, the one with the most capacity.
//! Workers of other classes stand by. The export of a trained model computes nothing, so any class
//! may do it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proto::ids::{IncarnationId, JobId};
use proto::numerics::Numerics;
use proto::spec::{JobSpec, WorkersSpec};

use crate::device::{WantedDevice, WorkerDevice};
use crate::lease::Asker;
use crate::membership::{Capacity, Membership};
use crate::why::Why;

/// A worker that takes new work, as the scheduler sees it.
#[derive(Clone, Debug)]
pub(crate) struct Able {
    pub(crate) id: IncarnationId,
    /// The worker lives, and does not get on with something.
    pub(crate) hangs: bool,
    pub(crate) numerics: Arc<Numerics>,
    pub(crate) capacity: Capacity,
    /// Name of the job whose program the worker runs; empty: none.
    pub(crate) program: Arc<str>,
    pub(crate) device: WorkerDevice,
}

/// Returns the workers of a fleet that take new work, oldest first.
pub(crate) fn able(fleet: &Membership) -> Vec<Able> {
    let able = fleet.workers().map(|(id, process)| Able {
        id,
        hangs: fleet.hangs(id),
        numerics: process.numerics.clone(),
        capacity: process.capacity,
        program: process.program.clone(),
        device: process.device.clone(),
    });
    able.collect()
}

/// Returns the name of a program. Programs of two scripts have two names, also if their jobs have
/// one. `script`: 0 for none.
pub(crate) fn program(name: &str, script: JobId) -> Arc<str> {
    match script {
        JobId(0) => Arc::from(name),
        script => Arc::from(format!("{name}/{script}")),
    }
}

/// What a job wants of the fleet.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    /// Members run the program of this name; empty: they run none.
    program: Arc<str>,
    /// Members compute on such a device.
    device: WantedDevice,
    /// Numbers of workers in the specification.
    specified: WorkersSpec,
    /// Numbers of workers in force.
    bounds: WorkersSpec,
    /// Members must be of one numerics class.
    one_class: bool,
    /// The numerics class of the members, once it is decided.
    class: Option<Arc<Numerics>>,
    /// The class is to be decided as soon as enough workers of one class are there.
    decides: bool,
    /// What members do now depends on their class.
    computes: bool,
}

impl Demand {
    /// Returns the demand of a new job. `one_class`: its members must be of one numerics class.
    pub(crate) fn new(specified: WorkersSpec, one_class: bool) -> Self {
        Self {
            program: Arc::from(""),
            device: WantedDevice::default(),
            specified,
            bounds: specified,
            one_class,
            class: None,
            decides: false,
            computes: true,
        }
    }

    /// Returns this demand for workers that run the program of a job, if a program drives it, and
    /// that compute on the devices that the job wants.
    pub(crate) fn of_program(self, spec: &JobSpec) -> Self {
        let name = if spec.is_driven() { spec.name.as_str() } else { "" };
        Self { program: program(name, JobId(0)), device: WantedDevice::of(&spec.fleet), ..self }
    }

    /// Limits the job to workers that are processes of a script.
    pub(crate) fn set_script(&mut self, name: &str, script: JobId) {
        self.program = program(name, script);
    }

    /// Returns the device that members have.
    pub(crate) const fn device(&self) -> WantedDevice {
        self.device
    }

    /// Returns why a worker cannot take part, whatever its numerics class is.
    fn excludes(&self, able: &Able) -> Option<Why> {
        if able.program != self.program {
            return Some(Why::OtherProgram);
        }
        let other = || Why::OtherDevice { has: able.device.clone(), wants: self.device };
        (!self.device.takes(&able.device)).then(other)
    }

    /// Returns the demand at one moment. `decides`: the class is to be decided as soon as enough
    /// workers of one class are there; `computes`: what members do depends on their class.
    pub(crate) fn when(&self, decides: bool, computes: bool) -> Self {
        Self { decides, computes, ..self.clone() }
    }

    /// Limits the job to `workers` workers from now on. The lower bound of the specification falls
    /// with it. The bounds depend on the last call alone.
    pub(crate) fn scale(&mut self, workers: u32) {
        self.bounds = WorkersSpec { min: self.specified.min.min(workers), max: workers };
    }

    /// Returns the number of workers that a user set; `None` if no user has.
    pub(crate) fn scaled_to(&self) -> Option<u32> {
        (self.bounds != self.specified).then_some(self.bounds.max)
    }

    /// Returns how many workers the job needs and may have.
    pub(crate) const fn bounds(&self) -> WorkersSpec {
        self.bounds
    }

    /// Returns whether members must be of one class.
    pub(crate) const fn needs_one_class(&self) -> bool {
        self.one_class
    }

    /// Returns the class of the members; `None`: every class, or it is not decided.
    pub(crate) fn class(&self) -> Option<&Numerics> {
        self.class.as_deref()
    }

    /// Returns whether the class is still to be decided, so that no worker may compute.
    pub(crate) const fn is_undecided(&self) -> bool {
        self.one_class && self.class.is_none()
    }

    /// Members are of this class from now on, if they must be of one.
    pub(crate) fn set_class(&mut self, class: Arc<Numerics>) {
        self.class = self.one_class.then_some(class);
    }

    fn fits(&self, numerics: &Numerics) -> bool {
        let other = |class: &Arc<Numerics>| class.class != numerics.class;
        !(self.computes && self.class.as_ref().is_some_and(other))
    }

    /// Returns the class to decide for: of those with enough workers the one with the most
    /// capacity, then with the oldest worker.
    fn decide(&self, fleet: &[Able]) -> Option<Arc<Numerics>> {
        if !(self.decides && self.is_undecided()) {
            return None;
        }
        let max = self.bounds.max as usize;
        // The capacity of those that would take part.
        let rank = |ables: &Vec<&Able>| {
            let capacity = ables.iter().take(max).fold(Capacity::default(), |sum, able| sum + able.capacity);
            (capacity, Reverse(ables[0].id))
        };
        let classes = classes(fleet);
        let enough = classes.values().filter(|ables| ables.len() >= self.bounds.min as usize);
        enough.max_by_key(|ables| rank(ables)).map(|ables| ables[0].numerics.clone())
    }
}

/// The workers of a job, and why the others are not among them.
#[derive(Debug, Default)]
pub(crate) struct Crew {
    /// Workers that take part, in the order in which they came.
    members: Vec<IncarnationId>,
    /// Why each other worker of the fleet stands by.
    standing_by: BTreeMap<IncarnationId, Why>,
    /// The class of the members, if it is decided.
    class: Option<Arc<Numerics>>,
    /// Workers that could take part together, if there were no upper bound.
    live: u32,
    /// Classes that stand by because of their class, with the numbers of their workers.
    strangers: Vec<(Arc<Numerics>, u32)>,
}

impl Crew {
    /// Workers that take part, in the order in which they came.
    pub(crate) fn members(&self) -> &[IncarnationId] {
        &self.members
    }

    /// Returns whether a worker takes part.
    pub(crate) fn contains(&self, worker: IncarnationId) -> bool {
        self.members.contains(&worker)
    }

    /// Returns why a worker takes no part; `None`: it does. A worker that the scheduler has not
    /// seen is not known to the job yet.
    pub(crate) fn refusal(&self, worker: IncarnationId) -> Option<Why> {
        let why = || self.standing_by.get(&worker).cloned().unwrap_or(Why::NotSeen);
        (!self.contains(worker)).then(why)
    }

    /// Returns how many take part.
    pub(crate) const fn len(&self) -> u32 {
        self.members.len() as u32
    }

    /// Returns how many stand by.
    pub(crate) fn standby(&self) -> u32 {
        self.standing_by.len() as u32
    }

    /// Returns how many could take part together, if there were no upper bound.
    pub(crate) const fn live(&self) -> u32 {
        self.live
    }

    /// Returns the class of the members, if it is decided.
    pub(crate) fn class(&self) -> Option<&Arc<Numerics>> {
        self.class.as_ref()
    }

    /// Returns the devices of live workers that stand by because of their device.
    pub(crate) fn other_devices(&self) -> impl Iterator<Item = &WorkerDevice> {
        self.standing_by.values().filter_map(|why| match why {
            Why::OtherDevice { has, .. } => Some(has),
            _ => None,
        })
    }

    /// Returns the classes of live workers that stand by because of their class, with their
    /// numbers. While no class is decided: all classes, if there are several.
    pub(crate) fn strangers(&self) -> impl Iterator<Item = (&Numerics, u32)> {
        self.strangers.iter().map(|(numerics, count)| (&**numerics, *count))
    }
}

/// Returns the crew of each job. `demands`: the jobs, each with its crew so far.
pub(crate) fn schedule<'a>(
    fleet: &[Able],
    demands: impl IntoIterator<Item = (JobId, Demand, &'a Crew)>,
) -> Vec<(JobId, Crew)> {
    let demands = demands.into_iter();
    demands.map(|(job, demand, before)| (job, crew(fleet, demand, before.members()))).collect()
}

/// Returns the crew of one job. `before`: its members so far.
pub(crate) fn crew(fleet: &[Able], mut demand: Demand, before: &[IncarnationId]) -> Crew {
    let elsewhere = fleet.iter().filter_map(|able| Some((able.id, demand.excludes(able)?)));
    let elsewhere: Vec<_> = elsewhere.collect();
    let running: Vec<Able>;
    let fleet = match elsewhere.is_empty() {
        true => fleet,
        false => {
            running = fleet.iter().filter(|able| demand.excludes(able).is_none()).cloned().collect();
            running.as_slice()
        }
    };
    demand.class = demand.class.take().or_else(|| demand.decide(fleet));
    let (fit, misfit): (Vec<_>, Vec<_>) = fleet.iter().partition(|able| demand.fits(&able.numerics));
    let mut others: BTreeSet<_> = fit.iter().map(|able| able.id).collect();
    let mut members: Vec<_> = before.iter().copied().filter(|member| others.remove(member)).collect();
    let max = demand.bounds.max as usize;
    let hanging: BTreeSet<_> = fleet.iter().filter(|able| able.hangs).map(|able| able.id).collect();
    if others.len() + members.len() > max && !hanging.is_empty() {
        let hangs = |worker: &IncarnationId| hanging.contains(worker);
        let (hang, get_on): (Vec<_>, Vec<_>) = members.into_iter().partition(hangs);
        let (hang_too, wait): (Vec<_>, Vec<_>) = others.into_iter().partition(hangs);
        members = [get_on, wait, hang, hang_too].concat();
    } else {
        members.extend(others);
    }
    let beyond = members.split_off(max.min(members.len()));
    let beyond = beyond.into_iter().map(|worker| (worker, Why::StandsBy { max: demand.bounds.max }));
    let misfit = misfit.into_iter().map(|able| (able.id, Why::OtherClass(able.numerics.clone())));
    Crew {
        members,
        standing_by: beyond.chain(misfit).chain(elsewhere).collect(),
        live: live(fleet, fit.len(), &demand),
        strangers: strangers(fleet, &demand),
        class: demand.class,
    }
}

/// Returns the jobs that a worker asks for work, in this order, each with the training leases that
/// it may hold of it. Jobs are served oldest first: a later one gets the workers for which the
/// earlier ones have no work. `held`: the training leases that the worker holds of each job.
pub(crate) fn turns(
    worker: IncarnationId,
    held: impl IntoIterator<Item = (JobId, usize)>,
) -> Vec<(JobId, Asker)> {
    let mut turns: Vec<_> = held.into_iter().collect();
    turns.sort_unstable();
    let all: usize = turns.iter().map(|(_, held)| held).sum();
    turns.into_iter().map(|(job, held)| (job, Asker::new(worker, all - held))).collect()
}

/// Returns how many workers could take part together, if there were no upper bound. `fit`: how many
/// are of the class.
fn live(fleet: &[Able], fit: usize, demand: &Demand) -> u32 {
    match demand.computes && demand.is_undecided() {
        true => classes(fleet).values().map(Vec::len).max().unwrap_or(0) as u32,
        false => fit as u32,
    }
}

fn strangers(fleet: &[Able], demand: &Demand) -> Vec<(Arc<Numerics>, u32)> {
    if !(demand.computes && demand.one_class) {
        return Vec::new();
    }
    let classes = classes(fleet);
    if demand.class.is_none() && classes.len() == 1 {
        return Vec::new();
    }
    let own = demand.class.as_ref().map(|class| class.class.as_str());
    let others = classes.into_iter().filter(|(name, _)| Some(*name) != own);
    others.map(|(_, ables)| (ables[0].numerics.clone(), ables.len() as u32)).collect()
}

/// Workers by the names of their classes, oldest first.
fn classes(fleet: &[Able]) -> BTreeMap<&str, Vec<&Able>> {
    let mut classes: BTreeMap<&str, Vec<&Able>> = BTreeMap::new();
    for able in fleet {
        classes.entry(able.numerics.class.as_str()).or_default().push(able);
    }
    classes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(numbers: &[u64]) -> Vec<IncarnationId> {
        numbers.iter().copied().map(IncarnationId).collect()
    }

    const fn threads(threads: u64) -> Capacity {
        Capacity { cuda: 0, threads }
    }

    const CUDA: Capacity = Capacity { cuda: 1, threads: 0 };

    fn worker(id: u64, class: &str, capacity: Capacity) -> Able {
        let numerics = Numerics { class: class.to_owned(), facts: format!("facts of {class}") };
        let (program, device) = (Arc::from(""), WorkerDevice::default());
        Able { id: IncarnationId(id), hangs: false, numerics: Arc::new(numerics), capacity, program, device }
    }

    /// A job that looks at the fleet from time to time.
    struct Job {
        demand: Demand,
        crew: Crew,
        fleet: Vec<Able>,
    }

    /// Returns a job of one class that needs two workers.
    fn job(max: u32) -> Job {
        Job::new(WorkersSpec { min: 2, max }, true)
    }

    impl Job {
        fn new(specified: WorkersSpec, one_class: bool) -> Self {
            Self { demand: Demand::new(specified, one_class), crew: Crew::default(), fleet: Vec::new() }
        }

        /// Workers of one class.
        fn look(&mut self, ids: &[u64]) {
            self.look_at(ids.iter().map(|&id| (id, "a", threads(1))), true);
        }

        fn look_at<'a>(&mut self, workers: impl Iterator<Item = (u64, &'a str, Capacity)>, computes: bool) {
            self.fleet = workers.map(|(id, class, capacity)| worker(id, class, capacity)).collect();
            self.demand.computes = computes;
            self.choose();
        }

        /// Workers of one class, some of which hang.
        fn look_while(&mut self, ids: &[u64], hanging: &[u64]) {
            let able = |&id: &u64| Able { hangs: hanging.contains(&id), ..worker(id, "a", threads(1)) };
            self.fleet = ids.iter().map(able).collect();
            self.choose();
        }

        fn choose(&mut self) {
            let mut crews = schedule(&self.fleet, [(JobId(1), self.demand.clone(), &self.crew)]);
            self.crew = crews.pop().expect("one job").1;
            self.demand.class = self.crew.class.clone();
        }

        /// Decides the class, if enough workers of one are there; answers whether it did.
        fn decide(&mut self) -> bool {
            let before = self.demand.is_undecided();
            self.demand.decides = true;
            self.choose();
            self.demand.decides = false;
            before && !self.demand.is_undecided()
        }

        fn scale(&mut self, workers: u32) {
            self.demand.scale(workers);
        }

        fn members(&self) -> Vec<IncarnationId> {
            self.crew.members.clone()
        }

        fn classes_standing_by(&self) -> Vec<(String, u32)> {
            self.crew.strangers().map(|(numerics, count)| (numerics.class.clone(), count)).collect()
        }
    }

    #[test]
    fn the_oldest_take_part_and_the_others_stand_by() {
        let mut job = job(2);
        job.look(&[1, 2, 3]);
        assert_eq!(
            (job.members(), job.crew.len(), job.crew.standby(), job.crew.live()),
            (ids(&[1, 2]), 2, 1, 3)
        );
        job.look(&[2, 3, 4]);
        assert_eq!((job.members(), job.crew.standby()), (ids(&[2, 3]), 1), "the oldest takes over");
        job.look(&[0, 2, 3, 4]);
        assert_eq!(
            (job.members(), job.crew.standby()),
            (ids(&[2, 3]), 2),
            "who registered long ago moves nobody"
        );
    }

    #[test]
    fn who_hangs_gives_its_place_to_who_stands_by() {
        let mut job = job(2);
        job.look(&[1, 2, 3, 4]);
        job.look_while(&[1, 2, 3, 4], &[1, 3]);
        assert_eq!((job.members(), job.crew.standby()), (ids(&[2, 4]), 2));
        job.look_while(&[1, 2, 3, 4], &[3]);
        assert_eq!(job.members(), ids(&[2, 4]), "nobody is moved without need");
        job.look_while(&[1, 2, 3, 4], &[1, 2, 3, 4]);
        assert_eq!((job.members(), job.crew.len()), (ids(&[2, 4]), 2));
        job.look_while(&[1, 2], &[1, 2]);
        assert_eq!((job.members(), job.crew.standby()), (ids(&[2, 1]), 0), "there is room for both");
    }

    #[test]
    fn a_job_that_a_program_drives_takes_the_workers_that_run_it() {
        let mut fleet: Vec<_> = (1..=4).map(|id| worker(id, "a", threads(1))).collect();
        fleet[1].program = Arc::from("digits");
        fleet[2].program = Arc::from("letters");
        let demand = |program| {
            let program = Arc::from(program);
            Demand { program, ..Demand::new(WorkersSpec { min: 1, max: 9 }, true) }
        };
        for (program, members) in
            [("digits", &[2][..]), ("letters", &[3][..]), ("", &[1, 4][..]), ("other", &[][..])]
        {
            let crew = crew(&fleet, demand(program), &ids(&[1, 2, 3, 4]));
            assert_eq!(crew.members, ids(members), "{program}");
            assert_eq!(crew.standby() as usize, 4 - members.len());
            let why = crew.refusal(IncarnationId(if program == "letters" { 1 } else { 3 }));
            assert_eq!(why, Some(Why::OtherProgram), "{program}");
        }
    }

    #[test]
    fn a_job_that_wants_a_device_takes_the_workers_that_have_it() {
        use proto::pb::Why;
        use proto::spec::DeviceKind;

        let mut fleet: Vec<_> = (1..=4).map(|id| worker(id, "a", threads(1))).collect();
        fleet[1].device = WorkerDevice::told("cuda:0", 8).expect("a device");
        fleet[3].device = WorkerDevice::told("cuda:1", 16).expect("a device");
        let demand = |kind, memory_bytes| Demand {
            device: WantedDevice { kind, memory_bytes },
            ..Demand::new(WorkersSpec { min: 1, max: 9 }, true)
        };
        for (kind, memory, members) in [
            (None, 0, &[1, 2, 3, 4][..]),
            (Some(DeviceKind::Cpu), 0, &[1, 3][..]),
            (Some(DeviceKind::Cuda), 0, &[2, 4][..]),
            (Some(DeviceKind::Cuda), 9, &[4][..]),
            (Some(DeviceKind::Cuda), 99, &[][..]),
        ] {
            let crew = crew(&fleet, demand(kind, memory), &ids(&[1, 2, 3, 4]));
            assert_eq!(crew.members, ids(members));
            assert_eq!((crew.live(), crew.other_devices().count()), (crew.len(), 4 - members.len()));
            for other in (1..=4).filter(|id| !members.contains(id)) {
                let why = crew.refusal(IncarnationId(other)).map(|why| why.word());
                assert_eq!(why, Some(Why::OtherDevice));
            }
        }
    }

    #[test]
    fn scaling_down_keeps_who_came_first_and_scaling_up_adds_the_oldest() {
        let mut job = job(3);
        job.look(&[2, 5]);
        job.look(&[1, 2, 5, 9]);
        assert_eq!(job.members(), ids(&[2, 5, 1]));
        job.scale(2);
        job.look(&[1, 2, 5, 9]);
        assert_eq!((job.members(), job.crew.standby()), (ids(&[2, 5]), 2));
        job.scale(4);
        job.look(&[1, 2, 5, 9]);
        assert_eq!((job.members(), job.crew.standby()), (ids(&[2, 5, 1, 9]), 0));
    }

    #[test]
    fn the_bounds_depend_on_the_last_number_alone() {
        let mut job = job(3);
        for (workers, min) in [(1, 1), (1, 1), (9, 2), (2, 2)] {
            job.scale(workers);
            assert_eq!(job.demand.bounds(), WorkersSpec { min, max: workers });
        }
    }

    #[test]
    fn the_class_with_the_most_capacity_takes_part_and_the_others_stand_by() {
        let mut job = job(3);
        let fleet = [(1, "a", 1), (2, "b", 2), (3, "a", 1), (4, "b", 2), (5, "c", 9)];
        let fleet = fleet.map(|(id, class, count)| (id, class, threads(count)));
        job.look_at(fleet.into_iter(), true);
        assert_eq!(
            (job.crew.len(), job.crew.live()),
            (3, 2),
            "whoever computes nothing yet may be of any class"
        );
        assert!(job.decide() && !job.decide(), "it is decided once");
        assert_eq!(
            job.demand.class().map(|class| class.class.as_str()),
            Some("b"),
            "`c` has too few workers"
        );
        assert_eq!((job.members(), job.crew.standby(), job.crew.live()), (ids(&[2, 4]), 3, 2));
        assert_eq!(job.classes_standing_by(), [("a".to_owned(), 2), ("c".to_owned(), 1)]);
        job.look_at(fleet.into_iter().filter(|(_, class, _)| *class != "b"), true);
        assert_eq!(
            (job.crew.len(), job.crew.live(), job.crew.standby()),
            (0, 0, 3),
            "nobody takes the place of that class"
        );
        job.look_at(fleet.into_iter().filter(|(_, class, _)| *class != "b"), false);
        assert_eq!(
            (job.crew.len(), job.crew.standby()),
            (3, 0),
            "what depends on no class may be done by anybody"
        );
    }

    #[test]
    fn cuda_is_more_than_any_threads_and_only_those_who_would_take_part_count() {
        let mut job = job(2);
        let many = (1..9).map(|id| (id, "many", threads(2)));
        job.look_at(many.clone().chain((10..12).map(|id| (id, "large", threads(3)))), true);
        assert!(job.decide());
        assert_eq!(job.members(), ids(&[10, 11]), "two of them are more than two of the others");
        let mut job = Job::new(WorkersSpec { min: 1, max: 2 }, true);
        job.look_at(many.chain([(10, "gpu", CUDA)]), true);
        assert!(job.decide());
        assert_eq!(job.members(), ids(&[10]));
    }

    #[test]
    fn no_class_is_decided_before_one_has_enough_workers() {
        let mut job = job(2);
        let fleet = [(1, "a", threads(1)), (2, "b", threads(1))];
        job.look_at(fleet.into_iter(), true);
        assert!(!job.decide() && job.demand.is_undecided());
        assert_eq!(
            (job.crew.live(), job.classes_standing_by().len()),
            (1, 2),
            "two are there, and one of each class"
        );
        job.look_at(fleet.into_iter().chain([(3, "b", threads(1))]), true);
        assert!(job.decide());
        assert_eq!(job.members(), ids(&[2, 3]));
    }

    #[test]
    fn a_crew_of_any_class_has_none() {
        let mut job = Job::new(WorkersSpec { min: 2, max: 2 }, false);
        job.look_at([(1, "a", threads(1)), (2, "b", threads(1))].into_iter(), true);
        assert!(!job.decide() && job.demand.class().is_none() && job.classes_standing_by().is_empty());
        assert_eq!((job.members(), job.crew.live()), (ids(&[1, 2]), 2));
    }

    #[test]
    fn whoever_takes_no_part_has_a_reason() {
        use proto::pb::Why;

        let mut job = Job::new(WorkersSpec { min: 1, max: 1 }, true);
        job.look_at([(1, "a", threads(2)), (2, "b", threads(1)), (3, "a", threads(1))].into_iter(), true);
        assert!(job.decide());
        let refusals = [1, 2, 3, 4].map(|id| job.crew.refusal(IncarnationId(id)).map(|why| why.word()));
        assert_eq!(refusals, [None, Some(Why::OtherClass), Some(Why::StandsBy), Some(Why::NotSeen)]);
    }

    #[test]
    fn each_demand_gets_its_crew_and_a_worker_serves_the_oldest_job_first() {
        let fleet: Vec<_> = (1..=3).map(|id| worker(id, "a", threads(1))).collect();
        let demand = |max| Demand::new(WorkersSpec { min: 1, max }, false);
        let before = Crew::default();
        let crews = schedule(&fleet, [(JobId(4), demand(1), &before), (JobId(5), demand(9), &before)]);
        let crews: Vec<_> = crews.into_iter().map(|(job, crew)| (job, crew.members)).collect();
        assert_eq!(crews, [(JobId(4), ids(&[1])), (JobId(5), ids(&[1, 2, 3]))]);
        let turns = turns(IncarnationId(1), [(JobId(5), 1), (JobId(4), 1), (JobId(6), 0)]);
        let rooms: Vec<_> = turns.into_iter().map(|(job, asker)| (job, asker.room)).collect();
        assert_eq!(rooms, [(JobId(4), 1), (JobId(5), 1), (JobId(6), 0)], "two leases in all");
    }

    #[test]
    fn a_user_may_change_the_class() {
        let mut job = Job::new(WorkersSpec { min: 1, max: 9 }, true);
        job.look_at([(1, "a", threads(2)), (2, "b", threads(1))].into_iter(), true);
        assert!(job.decide());
        job.demand.set_class(worker(0, "b", CUDA).numerics);
        job.choose();
        assert_eq!((job.members(), job.classes_standing_by()), (ids(&[2]), vec![("a".to_owned(), 1)]));
    }

    proptest! {
        #[test]
        fn nobody_who_may_stay_is_moved(
            changes in proptest::collection::vec((1u32..6, proptest::collection::btree_set(0u64..9, 0..9)), 1..20)
        ) {
            let mut job = job(3);
            for (max, live) in changes {
                let before = job.members();
                job.scale(max);
                job.look(&live.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(job.crew.len() as usize, live.len().min(max as usize));
                prop_assert_eq!(job.crew.live() as usize, live.len());
                prop_assert!(job.crew.members.iter().all(|member| live.contains(&member.get())));
                let stay: Vec<_> = before.into_iter().filter(|member| live.contains(&member.get())).take(max as usize).collect();
                prop_assert_eq!(&job.crew.members[..stay.len()], &stay[..]);
            }
        }
    }
}

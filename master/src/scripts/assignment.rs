//! Which agent runs which process of a script. Pure.
//!
//! A process stays where it runs: only processes without an agent are assigned. Scripts have their
//! turn in the order of their numbers, and processes of one script spread over agents.

use std::collections::{BTreeMap, BTreeSet};

use proto::ids::JobId;

use super::AgentId;

/// A script with processes that no agent runs.
#[derive(Clone, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) script: JobId,
    /// The numbers of these processes.
    pub(super) waiting: Vec<u32>,
    /// Number of its processes on each agent.
    pub(super) running: BTreeMap<AgentId, usize>,
    /// Agents on which it failed too often.
    pub(super) gave_up: &'a BTreeSet<AgentId>,
}

/// A process with the agent that is to run it.
pub(super) type Assigned = (JobId, u32, AgentId);

/// Assigns waiting processes. `free` has the number of further processes that each agent runs.
///
/// An agent with two free places and one with one: of three processes of a script, the first goes
/// to the agent with two, the second to the other one, and the third to the first again.
pub(super) fn assign(free: &BTreeMap<AgentId, usize>, wanted: &[Wanted<'_>]) -> Vec<Assigned> {
    let (mut free, mut assigned) = (free.clone(), Vec::new());
    for Wanted { script, waiting, running, gave_up } in wanted {
        let mut running = running.clone();
        for &process in waiting {
            let of_script = |agent: &AgentId| running.get(agent).copied().unwrap_or(0);
            let open = free.iter().filter(|(agent, room)| **room > 0 && !gave_up.contains(*agent));
            let best = open.min_by_key(|(agent, room)| (of_script(agent), usize::MAX - **room, **agent));
            let Some((&agent, _)) = best else { break };
            free.entry(agent).and_modify(|room| *room -= 1);
            *running.entry(agent).or_default() += 1;
            assigned.push((*script, process, agent));
        }
    }
    assigned
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn free(rooms: &[usize]) -> BTreeMap<AgentId, usize> {
        (1..).map(AgentId).zip(rooms.iter().copied()).collect()
    }

    #[test]
    fn processes_spread_over_agents_with_room() {
        let none = BTreeSet::new();
        let wanted = |script, waiting: u32| Wanted {
            script: JobId(script),
            waiting: (0..waiting).collect(),
            running: BTreeMap::new(),
            gave_up: &none,
        };
        let agents =
            |found: Vec<Assigned>| found.into_iter().map(|(_, _, agent)| agent.0).collect::<Vec<_>>();
        assert_eq!(agents(assign(&free(&[1, 2]), &[wanted(7, 3)])), [2, 1, 2]);
        let two = assign(&free(&[1, 1]), &[wanted(7, 1), wanted(9, 2)]);
        assert_eq!(
            two,
            [(JobId(7), 0, AgentId(1)), (JobId(9), 0, AgentId(2))],
            "the older script goes first"
        );
        assert_eq!(assign(&free(&[0]), &[wanted(7, 1)]), []);
    }

    #[test]
    fn an_agent_that_gave_up_gets_no_process_of_this_script() {
        let gave_up = BTreeSet::from([AgentId(1)]);
        let wanted = Wanted {
            script: JobId(7),
            waiting: vec![4],
            running: BTreeMap::from([(AgentId(2), 3)]),
            gave_up: &gave_up,
        };
        assert_eq!(assign(&free(&[9, 1]), std::slice::from_ref(&wanted)), [(JobId(7), 4, AgentId(2))]);
        assert_eq!(assign(&free(&[9, 0]), &[wanted]), []);
    }

    proptest! {
        #[test]
        fn each_process_is_assigned_once_within_the_room_and_nobody_waits_in_vain(
            rooms in proptest::collection::vec(0usize..4, 0..5),
            scripts in proptest::collection::vec(
                (0u32..5, proptest::collection::btree_set((1u64..6).prop_map(AgentId), 0..3)), 0..4,
            ),
        ) {
            let free = free(&rooms);
            let wanted: Vec<_> = (1..).map(JobId).zip(&scripts).map(|(script, (waiting, gave_up))| {
                Wanted { script, waiting: (0..*waiting).collect(), running: BTreeMap::new(), gave_up }
            }).collect();
            let assigned = assign(&free, &wanted);
            let processes: BTreeSet<_> = assigned.iter().map(|(script, process, _)| (script, process)).collect();
            prop_assert_eq!(processes.len(), assigned.len());
            let mut left = free;
            for (script, process, agent) in &assigned {
                let of = wanted.iter().find(|wanted| wanted.script == *script).unwrap();
                prop_assert!(of.waiting.contains(process) && !of.gave_up.contains(agent));
                let room = left.get_mut(agent).unwrap();
                prop_assert!(*room > 0);
                *room -= 1;
            }
            for of in &wanted {
                let got: Vec<_> = assigned.iter().filter(|(script, ..)| *script == of.script).collect();
                let open = left.iter().any(|(agent, room)| *room > 0 && !of.gave_up.contains(agent));
                prop_assert!(got.len() == of.waiting.len() || !open, "{:?} waits with {:?}", of, left);
                // Spread: an agent has two more than another one only if that one is full.
                let count = |agent: &AgentId| got.iter().filter(|(.., of)| of == agent).count();
                for one in left.keys() {
                    for (other, room) in &left {
                        let may = !of.gave_up.contains(other) && *room > 0;
                        prop_assert!(!may || count(one) <= count(other) + 1);
                    }
                }
            }
        }
    }
}

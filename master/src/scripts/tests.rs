//! Tests of scripts and agents: what becomes of processes when agents come, go and give up.

use proptest::prelude::*;
use proto::artifact::describe;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const DEATH: Duration = Duration::from_secs(5);
const LINGER: Duration = Duration::from_secs(60);

fn description(processes: u32) -> pb::Script {
    let (name, entry) = ("train".to_owned(), "train.py".to_owned());
    pb::Script { name, entry, processes, ..Default::default() }
}

fn with_script(processes: u32) -> Scripts {
    let mut scripts = Scripts::default();
    let bundle = describe("bundle", b"files");
    scripts.submit(Now::default(), JobId(7), description(processes), Vec::new(), bundle, String::new());
    scripts
}

fn attend(agent: u64, processes: u32) -> pb::AttendRequest {
    pb::AttendRequest {
        agent,
        name: format!("agent-{agent}"),
        program_version: proto::PROGRAM_VERSION.to_owned(),
        processes,
        ..Default::default()
    }
}

fn join(scripts: &mut Scripts, agent: u64, processes: u32) -> u64 {
    scripts.open(SECOND, &attend(agent, processes), 9).expect("room").1
}

fn report(process: u32, left: Option<(pb::LeftKind, &str)>) -> pb::ProcessReport {
    let left = left.map(|(kind, line)| pb::ProcessLeft {
        kind: kind.into(),
        reason: "ended with exit code 3".to_owned(),
        lines: vec![line.to_owned()],
    });
    pb::ProcessReport { script: 7, process, left }
}

/// Returns a heartbeat with these reports.
fn says(reports: &[pb::ProcessReport]) -> pb::AttendRequest {
    pb::AttendRequest { reports: reports.to_vec(), ..Default::default() }
}

fn orders(scripts: &Scripts, agent: u64) -> Vec<u32> {
    scripts.orders(AgentId(agent)).iter().map(|order| order.process).collect()
}

fn assign(scripts: &mut Scripts, stage: Stage) {
    scripts.assign(SECOND, |_| stage);
}

#[test]
fn processes_of_a_lost_agent_go_to_another_one() {
    let mut scripts = with_script(2);
    let (one, _) = (join(&mut scripts, 1, 1), join(&mut scripts, 2, 1));
    assign(&mut scripts, Stage::Unjoined);
    assert_eq!((orders(&scripts, 1), orders(&scripts, 2)), (vec![0], vec![1]));
    scripts.stream_broken(AgentId(1), one + 7);
    assert_eq!(orders(&scripts, 1), [0], "an older stream");
    scripts.stream_broken(AgentId(1), one);
    assign(&mut scripts, Stage::Training);
    assert_eq!(orders(&scripts, 2), [1], "it is full");
    join(&mut scripts, 3, 4);
    assign(&mut scripts, Stage::Training);
    assert_eq!(orders(&scripts, 3), [0]);
    scripts.expire(SECOND + DEATH, DEATH);
    assert!(scripts.agents.is_empty() && orders(&scripts, 3).is_empty());
}

#[test]
fn an_agent_that_comes_back_keeps_what_it_runs_unless_somebody_else_does() {
    let mut scripts = with_script(2);
    let stream = join(&mut scripts, 1, 2);
    assign(&mut scripts, Stage::Training);
    scripts.stream_broken(AgentId(1), stream);
    let again = join(&mut scripts, 1, 2);
    scripts.hear(SECOND, AgentId(1), again, &says(&[report(0, None), report(1, None)])).unwrap();
    assert_eq!(orders(&scripts, 1), [0, 1]);
    scripts.stream_broken(AgentId(1), again);
    join(&mut scripts, 2, 1);
    assign(&mut scripts, Stage::Training);
    let late = join(&mut scripts, 1, 2);
    scripts.hear(SECOND, AgentId(1), late, &says(&[report(0, None), report(1, None)])).unwrap();
    assert_eq!((orders(&scripts, 1), orders(&scripts, 2)), (vec![1], vec![0]));
    let fenced = scripts.hear(SECOND, AgentId(1), again, &says(&[])).unwrap_err();
    assert_eq!(fenced.kind, Kind::Unavailable, "an older stream says nothing");
}

#[test]
fn a_script_fails_with_the_last_lines_when_it_failed_too_often_everywhere() {
    let mut scripts = with_script(1);
    let (one, two) = (join(&mut scripts, 1, 1), join(&mut scripts, 2, 1));
    let training = |_: &Script| Stage::Training;
    assign(&mut scripts, Stage::Training);
    let gave_up = |line| [report(0, Some((pb::LeftKind::GaveUp, line)))];
    scripts.hear(SECOND, AgentId(1), one, &says(&gave_up("no memory"))).unwrap();
    assert_eq!(scripts.judge(SECOND, LINGER, training), (Vec::new(), Vec::new()), "another agent may try");
    assign(&mut scripts, Stage::Training);
    assert_eq!((orders(&scripts, 1), orders(&scripts, 2)), (vec![], vec![0]));
    // It is told again until the agent heard that it need not run it.
    scripts.hear(SECOND, AgentId(1), one, &says(&gave_up("no memory"))).unwrap();
    scripts.hear(SECOND, AgentId(2), two, &says(&gave_up("no \u{1b}[31mspace"))).unwrap();
    let (failed, over) = scripts.judge(SECOND, LINGER, training);
    assert_eq!((failed.len(), over.len()), (1, 0));
    let said = &failed[0].1;
    assert!(
        said.starts_with("no process is left, and the job has not ended; process 0 on agent-2 "),
        "{said}"
    );
    assert!(said.ends_with("ended with exit code 3 and said last:\n    no \\u{1b}[31mspace"), "{said}");
    assert_eq!(scripts.judge(SECOND, LINGER, |_| Stage::Ended).1, [JobId(7)]);
}

#[test]
fn a_script_that_is_wrong_fails_at_once_and_is_over_when_it_has_no_job() {
    let mut scripts = with_script(3);
    let stream = join(&mut scripts, 1, 3);
    assign(&mut scripts, Stage::Unjoined);
    let wrong = report(1, Some((pb::LeftKind::Wrong, "SyntaxError")));
    scripts.hear(SECOND, AgentId(1), stream, &says(&[wrong])).unwrap();
    assert_eq!(scripts.judge(SECOND, LINGER, |_| Stage::Unjoined), (Vec::new(), vec![JobId(7)]));
    let (_, status) = scripts.end(JobId(7)).unwrap();
    assert_eq!(status.state(), JobState::Failed);
    assert!(status.reason.contains("SyntaxError") && status.reason.contains("has joined"), "{status:?}");
    assert!(orders(&scripts, 1).is_empty(), "the other processes are ended");
}

#[test]
fn a_process_that_hangs_after_the_last_job_gives_its_place_back() {
    let mut scripts = with_script(1);
    join(&mut scripts, 1, 1);
    assign(&mut scripts, Stage::Training);
    let over = |scripts: &mut Scripts, at, stage| scripts.judge(at, LINGER, |_: &Script| stage).1;
    assert!(over(&mut scripts, SECOND, Stage::Ended).is_empty());
    // It joins another job: the time begins anew.
    assert!(over(&mut scripts, 30 * SECOND, Stage::Training).is_empty());
    assert!(over(&mut scripts, 40 * SECOND, Stage::Ended).is_empty());
    assert!(over(&mut scripts, 99 * SECOND, Stage::Ended).is_empty());
    assert_eq!(over(&mut scripts, 100 * SECOND, Stage::Ended), [JobId(7)]);
    scripts.end(JobId(7)).unwrap();
    assert!(orders(&scripts, 1).is_empty(), "its agent ends the process");
}

#[test]
fn processes_that_are_done_are_not_started_again_by_the_next_master() {
    let mut scripts = with_script(2);
    let stream = join(&mut scripts, 1, 2);
    assign(&mut scripts, Stage::Training);
    scripts.joined(JobId(7), "train", JobId(7));
    scripts.hear(SECOND, AgentId(1), stream, &says(&[report(1, Some((pb::LeftKind::Done, "")))])).unwrap();
    let records = scripts.take_records();
    assert!(scripts.take_records().is_empty(), "nothing has changed");

    let mut next = Scripts::default();
    assert_eq!(next.restore(records[0].1.clone(), 3 * SECOND), Ok(JobId(7)));
    assert_eq!(next.get(JobId(7)).unwrap().jobs["train"], JobId(7));
    let stream = join(&mut next, 2, 2);
    assign(&mut next, Stage::Training);
    assert!(orders(&next, 2).is_empty(), "agent 1 may come back");
    next.hear(SECOND, AgentId(2), stream, &says(&[report(0, None)])).unwrap();
    assert_eq!(orders(&next, 2), [0]);
    next.assign(3 * SECOND, |_| Stage::Training);
    assert_eq!(orders(&next, 2), [0]);
    for damaged in [
        pb::ScriptRecord::default(),
        pb::ScriptRecord { done: vec![2], ..records[0].1.clone() },
        pb::ScriptRecord { description: Some(description(0)), ..records[0].1.clone() },
    ] {
        next.restore(damaged, SECOND).unwrap_err();
    }
}

#[test]
fn lines_are_those_of_the_agent_that_runs_the_process() {
    let mut scripts = with_script(2);
    let (one, two) = (join(&mut scripts, 1, 1), join(&mut scripts, 2, 1));
    assign(&mut scripts, Stage::Training);
    let line = |process, text: &str| {
        let lines = vec![pb::ProcessLines { script: 7, process, first: 1, lines: vec![text.to_owned()] }];
        pb::AttendRequest { lines, ..Default::default() }
    };
    scripts.hear(SECOND, AgentId(1), one, &line(0, "mine")).unwrap();
    scripts.hear(SECOND, AgentId(2), two, &line(0, "forged")).unwrap();
    scripts.hear(SECOND, AgentId(2), two, &line(9, "no process")).unwrap();
    let last =
        pb::AttendRequest { reports: vec![report(1, Some((pb::LeftKind::Done, "")))], ..line(1, "last") };
    scripts.hear(SECOND, AgentId(2), two, &last).unwrap();
    let late = pb::ProcessLines { first: 2, ..line(1, "late").lines[0].clone() };
    let late = pb::AttendRequest { lines: vec![late], ..Default::default() };
    scripts.hear(SECOND, AgentId(2), two, &late).unwrap();
    scripts.end(JobId(7)).unwrap();
    let log = scripts.log(JobId(7)).unwrap();
    let found = log.read(None, &BTreeMap::new(), 100);
    let text = |text: &str| text.to_owned();
    assert_eq!(found, [(0, 1, vec![text("mine")]), (1, 1, vec![text("last"), text("late")])]);
    assert!(log.is_over && log.name == "train-7");
}

#[test]
fn the_first_job_has_the_number_of_the_script_and_elections_have_not() {
    let mut scripts = with_script(2);
    let next = JobId(9);
    assert_eq!(scripts.number(JobId(7), "mine.callbacks", next), next);
    scripts.joined(JobId(7), "mine.callbacks", next);
    assert_eq!(scripts.number(JobId(7), "mine", next), JobId(7));
    scripts.joined(JobId(7), "mine", JobId(7));
    assert_eq!(scripts.number(JobId(7), "other", next), next);
    assert_eq!(scripts.number(JobId(8), "mine", next), next);
    assert_eq!(scripts.get(JobId(7)).unwrap().trained().collect::<Vec<_>>(), [JobId(7)]);
    let refused = scripts.check_name("train").unwrap_err();
    assert!(refused.message.contains("train-7 lives"), "{refused}");
    scripts.check_name("mine").unwrap();
}

#[test]
fn an_agent_says_who_it_is() {
    let mut scripts = Scripts::default();
    for wrong in [
        pb::AttendRequest { agent: 0, ..attend(1, 1) },
        pb::AttendRequest { name: "a\nb".to_owned(), ..attend(1, 1) },
        pb::AttendRequest { processes: 0, ..attend(1, 1) },
        pb::AttendRequest { processes: AGENT_PROCESSES_MAX + 1, ..attend(1, 1) },
        pb::AttendRequest { program_version: "0.0.1".to_owned(), ..attend(1, 1) },
    ] {
        scripts.open(SECOND, &wrong, 2).unwrap_err();
    }
    scripts.open(SECOND, &attend(1, 1), 1).unwrap();
    assert_eq!(scripts.open(SECOND, &attend(2, 1), 1).unwrap_err().kind, Kind::Full);
    scripts.open(SECOND, &attend(1, 1), 1).unwrap();
}

proptest! {
    /// Whatever agents say and whenever they leave, no process runs at two agents, and no agent is
    /// to run more than it said.
    #[test]
    fn no_process_runs_twice_and_no_agent_is_too_full(
        steps in proptest::collection::vec((0u8..5, 1u64..4, 0u32..4), 0..60),
    ) {
        let mut scripts = with_script(4);
        let mut streams: BTreeMap<u64, u64> = BTreeMap::new();
        for (what, agent, process) in steps {
            match (what, streams.get(&agent).copied()) {
                (0, _) => drop(streams.insert(agent, join(&mut scripts, agent, 2))),
                (1, Some(stream)) => scripts.stream_broken(AgentId(agent), stream),
                (2, Some(stream)) => {
                    // It speaks of what it was told to run alone.
                    let known: Vec<_> = orders(&scripts, agent).into_iter().map(|process| report(process, None)).collect();
                    drop(scripts.hear(SECOND, AgentId(agent), stream, &says(&known)));
                }
                (3, Some(stream)) if orders(&scripts, agent).contains(&process) => {
                    let kind = if process == 0 { pb::LeftKind::Done } else { pb::LeftKind::GaveUp };
                    drop(scripts.hear(SECOND, AgentId(agent), stream, &says(&[report(process, Some((kind, "x")))])));
                }
                _ => assign(&mut scripts, Stage::Training),
            }
            let all: Vec<_> = (1..4).map(|agent| orders(&scripts, agent)).collect();
            let together = all.concat();
            prop_assert_eq!(together.iter().collect::<BTreeSet<_>>().len(), together.len());
            prop_assert!(all.iter().all(|orders| orders.len() <= 2), "{:?}", all);
            let live = |agent: u64| scripts.agents.contains_key(&AgentId(agent));
            prop_assert!((1..4).all(|agent| live(agent) || orders(&scripts, agent).is_empty()));
        }
    }
}

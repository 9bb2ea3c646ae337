//! The aggregator against the serial sum, in every order that a random scheduler finds, and as
//! written traces.
//!
//! A trace (`src/testdata/aggregator/*.txt`) is a list of blocks with an empty line between them: a
//! command, the outcome in lines that begin with `> `, and the reasoning. Values are expressions,
//! so that a trace shows who was added to whom.
//!
//!     step 7 of 6        the commands below are about this step, which has 6 microbatches
//!     offer 0..2         a push brings this node
//!     merged 0..2        the merge that makes this node has ended
//!     held               the nodes that hold values
//!     forget             the step is applied

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use proptest::prelude::*;
use proto::tree::cover;

use super::*;

/// Returns the sum below a node as a worker would bring it: the tree written as a recursion.
fn serial(node: Node, leaf: &impl Fn(u32) -> f32) -> f32 {
    node.children().map_or_else(|| leaf(node.begin), |(left, right)| serial(left, leaf) + serial(right, leaf))
}

fn expression(node: Node) -> String {
    match node.children() {
        None => node.begin.to_string(),
        Some((left, right)) => format!("({}+{})", expression(left), expression(right)),
    }
}

/// Values whose sum depends on the order of the additions.
fn uneven(index: u32) -> f32 {
    let scale = [1e-4, 1.0, 3e4, 1e8][(index % 4) as usize];
    (0.1 + f64::from(index).sin()) as f32 * scale
}

/// Returns a step's pushes: several covers of `0..of` by nodes of any size, shuffled. Each cover
/// alone would complete the step.
fn pushes() -> impl Strategy<Value = (u32, Vec<Node>)> {
    (1u32..70, proptest::collection::vec(proptest::collection::vec(1u32..70, 0..6), 1..4)).prop_flat_map(
        |(of, covers)| {
            let nodes = covers.into_iter().flat_map(|mut cuts| {
                cuts.retain(|&cut| cut < of);
                cuts.extend([0, of]);
                cuts.sort_unstable();
                cuts.windows(2).flat_map(|pair| cover(pair[0], pair[1], of)).collect::<Vec<_>>()
            });
            (Just(of), Just(nodes.collect::<Vec<_>>()).prop_shuffle())
        },
    )
}

proptest! {
    #[test]
    fn any_order_duplication_and_mixture_of_nodes_gives_the_serial_bits(
        (of, nodes) in pushes(),
        choices in proptest::collection::vec(any::<u8>(), 400),
    ) {
        let step = Step(3);
        let at = |node| StepNode { step, node, of };
        let mut choices = choices.into_iter().cycle();
        let mut aggregator = Aggregator::default();
        let mut waiting = nodes.iter();
        // Merges that have begun and not ended.
        let mut merging: Vec<(StepNode, f32)> = Vec::new();
        // Nodes that are added to their sibling while they come.
        let mut arriving: Vec<(StepNode, f32)> = Vec::new();
        let mut complete = Vec::new();
        loop {
            let pick = usize::from(choices.next().unwrap());
            let begins = pick % 3 > 0 || merging.is_empty();
            let arrived = arriving.len() > 1 + pick % 4 || waiting.len() == 0;
            let offer = if let Some((parent, sum)) = arriving.pop_if(|_| arrived) {
                aggregator.offer(parent, sum)
            } else if let Some(&node) = begins.then(|| waiting.next()).flatten() {
                let values = serial(node, &uneven);
                let sibling = aggregator.sibling(at(node)).filter(|_| pick % 2 == 0);
                if let Some((parent, sibling)) = sibling {
                    arriving.insert(0, (parent, sibling + values));
                    continue;
                }
                aggregator.offer(at(node), values)
            } else if merging.is_empty() {
                break;
            } else {
                let (parent, sum) = merging.swap_remove(pick % merging.len());
                aggregator.merged(parent, sum)
            };
            match offer {
                Offer::Merge { parent, left, right } => merging.push((parent, left + right)),
                Offer::Complete(sum) => complete.push(sum.to_bits()),
                Offer::Duplicate(_) | Offer::Superseded(_) | Offer::Held => {}
            }
        }
        prop_assert_eq!(complete, [serial(Node::root(of), &uneven).to_bits()]);
        prop_assert_eq!(aggregator.held(step).count(), 0);
    }

    #[test]
    fn leaves_in_order_hold_as_few_nodes_as_a_counter_has_ones(of in 1u32..500) {
        let mut aggregator = Aggregator::default();
        for index in 0..of {
            let mut offer = aggregator.offer(StepNode { step: Step(0), node: Node::leaf(index), of }, ());
            while let Offer::Merge { parent, .. } = offer {
                offer = aggregator.merged(parent, ());
            }
            let last = index + 1 == of;
            prop_assert_eq!(matches!(offer, Offer::Complete(())), last);
            // Nodes of the last, shorter branches do not line up with the counter's bits; they are
            // at most as many again.
            let limit = if last { 0 } else { (index + 1).count_ones() + of.count_ones() };
            prop_assert!(aggregator.held(Step(0)).count() as u32 <= limit);
        }
    }
}

#[test]
fn steps_do_not_know_each_other() {
    let mut aggregator = Aggregator::default();
    let at = |step| StepNode { step: Step(step), node: Node::root(1), of: 1 };
    assert_eq!(aggregator.offer(at(0), 'a'), Offer::Complete('a'));
    assert_eq!(aggregator.offer(at(1), 'b'), Offer::Complete('b'));
    assert_eq!(aggregator.offer(at(0), 'c'), Offer::Duplicate('c'));
    aggregator.forget(Step(0));
    assert_eq!((aggregator.steps(), aggregator.has(Step(0)), aggregator.has(Step(1))), (1, false, true));
}

#[test]
#[should_panic(expected = "[1, 3) is no node of the tree over 4")]
fn a_range_across_a_split_is_a_broken_invariant() {
    Aggregator::default().offer(StepNode { step: Step(0), node: Node::new(1, 3), of: 4 }, ());
}

/// Runs the commands of a trace.
#[derive(Default)]
struct Tracer {
    aggregator: Aggregator<String>,
    at: Option<(Step, u32)>,
    merging: BTreeMap<(Step, Node), String>,
}

impl Tracer {
    fn run(&mut self, command: &str) -> String {
        let words: Vec<&str> = command.split_whitespace().collect();
        let range = |word: &str| {
            let (begin, end) = word.split_once("..").expect("BEGIN..END");
            Node::new(begin.parse().expect("a number"), end.parse().expect("a number"))
        };
        if let ["step", step, "of", of] = words[..] {
            self.at = Some((Step(step.parse().expect("a number")), of.parse().expect("a number")));
            return String::new();
        }
        let (step, of) = self.at.expect("a trace begins with `step N of M`");
        let at = |word| StepNode { step, node: range(word), of };
        match words[..] {
            ["offer", word] => {
                let offer = self.aggregator.offer(at(word), expression(range(word)));
                self.outcome(offer)
            }
            ["merged", word] => {
                let sum = self.merging.remove(&(step, range(word))).expect("a merge that has begun");
                let offer = self.aggregator.merged(at(word), sum);
                self.outcome(offer)
            }
            ["held"] => {
                let mut list = String::new();
                for node in self.aggregator.held(step) {
                    write!(list, "{}..{} ", node.begin, node.end).expect("strings take everything");
                }
                if list.is_empty() { "nothing".to_owned() } else { list.trim_end().to_owned() }
            }
            ["forget"] => {
                self.aggregator.forget(step);
                String::new()
            }
            _ => panic!("unknown command `{command}`"),
        }
    }

    fn outcome(&mut self, offer: Offer<String>) -> String {
        match offer {
            Offer::Duplicate(_) => "duplicate".to_owned(),
            Offer::Superseded(_) => "superseded".to_owned(),
            Offer::Held => "held".to_owned(),
            Offer::Complete(sum) => format!("complete {sum}"),
            Offer::Merge { parent, left, right } => {
                let node = parent.node;
                let said = format!("merge {left} + {right} into {}..{}", node.begin, node.end);
                self.merging.insert((parent.step, node), format!("({left}+{right})"));
                said
            }
        }
    }
}

#[test]
fn traces_read_as_written() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/testdata/aggregator");
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).expect("the folder of traces") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a text file");
        let mut tracer = Tracer::default();
        for block in text.split("\n\n").map(str::trim).filter(|block| !block.is_empty()) {
            let (command, rest) = block.split_once('\n').unwrap_or((block, ""));
            if command.starts_with('#') {
                continue;
            }
            let (expected, reasoning): (Vec<&str>, Vec<&str>) =
                rest.lines().partition(|line| line.starts_with("> "));
            let expected = expected.iter().map(|line| &line[2..]).collect::<Vec<_>>().join("\n");
            assert!(!reasoning.is_empty(), "{}: `{command}` has no reasoning", path.display());
            assert_eq!(tracer.run(command), expected, "{}: `{command}`", path.display());
            count += 1;
        }
    }
    assert!(count > 30, "only {count} commands were found in {}", folder.display());
}

#[test]
fn what_is_missing_first_is_counted_from_the_left_without_a_gap() {
    let (mut aggregator, step) = (Aggregator::default(), Step(3));
    let node = |begin, end| StepNode { step, node: Node::new(begin, end), of: 6 };
    assert_eq!((aggregator.first_missing(step), aggregator.values()), (0, 0));
    aggregator.offer(node(1, 2), ());
    aggregator.offer(node(2, 4), ());
    assert_eq!((aggregator.first_missing(step), aggregator.values()), (0, 2));
    // Busy: somebody adds 0 and 1 up.
    aggregator.offer(node(0, 1), ());
    assert_eq!((aggregator.first_missing(step), aggregator.values()), (4, 1));
}

//! The canonical reduction tree: the one order in which the M gradients of a step are summed.
//!
//! Floating-point addition is not associative, so the order of a sum decides its bits. Here the
//! order is one binary tree over the indices `0..M`: a range splits at the largest power of two
//! below its length. For M = 6: `((0+1)+(2+3))+(4+5)`. Any node may be reduced anywhere, on a
//! worker that computed both halves or on the ps; the bits of the root are the same. The addition
//! at a node is always `left + right`.

use std::fmt;

use crate::ids::Step;

/// A node of the reduction tree: a half-open range of microbatch indices within one step.
///
/// Only some ranges are nodes: see [`Node::is_in`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node {
    /// First microbatch index.
    pub begin: u32,
    /// End of the range: one past the last index.
    pub end: u32,
}

impl Node {
    /// Returns the node over `begin..end`. It need not be in any particular tree.
    ///
    /// # Panics
    /// If the range is empty.
    pub const fn new(begin: u32, end: u32) -> Self {
        assert!(begin < end, "a node covers at least one microbatch");
        Self { begin, end }
    }

    /// Returns the root of the tree over `of` microbatches.
    pub const fn root(of: u32) -> Self {
        Self::new(0, of)
    }

    /// Returns the leaf of one microbatch.
    pub const fn leaf(index: u32) -> Self {
        Self::new(index, index + 1)
    }

    /// Returns the number of microbatches below this node.
    pub const fn len(self) -> u32 {
        self.end - self.begin
    }

    /// Returns false: a node covers at least one microbatch.
    pub const fn is_empty(self) -> bool {
        false
    }

    /// Returns whether every microbatch of `other` is below this node.
    pub const fn covers(self, other: Self) -> bool {
        self.begin <= other.begin && other.end <= self.end
    }

    /// Returns both halves, or `None` for a leaf.
    ///
    /// ```
    /// use proto::tree::Node;
    /// assert_eq!(Node::root(6).children(), Some((Node::new(0, 4), Node::new(4, 6))));
    /// ```
    pub const fn children(self) -> Option<(Self, Self)> {
        if self.len() == 1 {
            return None;
        }
        let middle = self.begin + split(self.len());
        Some((Self::new(self.begin, middle), Self::new(middle, self.end)))
    }

    /// Returns whether this range is a node of the tree over `of` microbatches.
    pub fn is_in(self, of: u32) -> bool {
        self.end <= of && path(self, of).is_some()
    }

    /// Returns parent and sibling in the tree over `of` microbatches. `None`: the range is the root
    /// or no node.
    pub fn parent_and_sibling(self, of: u32) -> Option<(Self, Self)> {
        path(self, of).flatten()
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.begin, self.end)
    }
}

/// A node of one step's tree. A push carries the sum below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepNode {
    /// Step of the gradients.
    pub step: Step,
    /// Range of the summed microbatches.
    pub node: Node,
    /// M of the step. The last step of an epoch may have fewer microbatches than the others.
    pub of: u32,
}

/// Returns the fewest nodes of the tree over `of` microbatches whose disjoint union is
/// `begin..end`, left to right.
///
/// ```
/// use proto::tree::{Node, cover};
/// assert_eq!(cover(1, 6, 6), [Node::leaf(1), Node::new(2, 4), Node::new(4, 6)]);
/// ```
pub fn cover(begin: u32, end: u32, of: u32) -> Vec<Node> {
    fn walk(at: Node, begin: u32, end: u32, out: &mut Vec<Node>) {
        if end <= at.begin || at.end <= begin {
            return;
        }
        if begin <= at.begin && at.end <= end {
            out.push(at);
        } else if let Some((left, right)) = at.children() {
            walk(left, begin, end, out);
            walk(right, begin, end, out);
        }
    }
    let mut out = Vec::new();
    if begin < end && end <= of {
        walk(Node::root(of), begin, end, &mut out);
    }
    out
}

/// Returns the largest node that starts at `begin`, ends by `end`, and covers at most `len_max`
/// microbatches.
///
/// # Panics
/// If `begin >= end`, `end > of` or `len_max` is 0.
pub fn largest_from(begin: u32, end: u32, of: u32, len_max: u32) -> Node {
    assert!(
        begin < end && end <= of && len_max > 0,
        "no node from {begin} within {end} of {of} by {len_max}"
    );
    let mut at = Node::root(of);
    while at.begin != begin || at.end > end || at.len() > len_max {
        let (left, right) = at.children().expect("a leaf that starts at `begin` satisfies every bound");
        at = if right.begin <= begin { right } else { left };
    }
    at
}

/// Returns the largest power of two below `len`.
const fn split(len: u32) -> u32 {
    1 << (31 - (len - 1).leading_zeros())
}

/// Finds parent and sibling of a node. `None`: no such node. `Some(None)`: the root.
/// `Some(Some((parent, sibling)))` otherwise.
#[allow(clippy::option_option, reason = "three answers of one walk, private to this file")]
fn path(node: Node, of: u32) -> Option<Option<(Node, Node)>> {
    let mut at = Node::root(of.max(1));
    let mut above = None;
    while at != node {
        let (left, right) = at.children()?;
        if left.covers(node) {
            (above, at) = (Some((at, right)), left);
        } else if right.covers(node) {
            (above, at) = (Some((at, left)), right);
        } else {
            return None;
        }
    }
    Some(above)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the tree as an expression. This recursion is the reference.
    fn expression(node: Node) -> String {
        match node.children() {
            None => node.begin.to_string(),
            Some((left, right)) => format!("({}+{})", expression(left), expression(right)),
        }
    }

    #[test]
    fn six_microbatches_sum_as_the_design_says() {
        assert_eq!(expression(Node::root(6)), "(((0+1)+(2+3))+(4+5))");
        assert_eq!(expression(Node::root(1)), "0");
        assert_eq!(expression(Node::root(3)), "((0+1)+2)");
    }

    #[test]
    fn ranges_that_cross_a_split_are_no_nodes() {
        assert!(Node::new(0, 4).is_in(6));
        assert!(!Node::new(1, 3).is_in(6));
        assert!(!Node::new(0, 6).is_in(7));
        assert!(!Node::new(4, 8).is_in(6));
    }

    proptest! {
        #[test]
        fn children_split_a_node_and_know_their_parent(of in 1u32..300, pick in any::<u64>()) {
            let mut node = Node::root(of);
            let mut bits = pick;
            while let Some((left, right)) = node.children() {
                prop_assert_eq!((left.begin, left.end, right.end), (node.begin, right.begin, node.end));
                prop_assert_eq!(left.parent_and_sibling(of), Some((node, right)));
                prop_assert_eq!(right.parent_and_sibling(of), Some((node, left)));
                prop_assert!(left.is_in(of) && right.is_in(of));
                prop_assert!(left.len().is_power_of_two() && left.len() >= right.len());
                node = if bits & 1 == 0 { left } else { right };
                bits >>= 1;
            }
            prop_assert_eq!(Node::root(of).parent_and_sibling(of), None);
        }

        #[test]
        fn cover_is_disjoint_complete_and_minimal(of in 1u32..200, a in 0u32..200, b in 0u32..200) {
            let (begin, end) = (a.min(b).min(of), a.max(b).min(of));
            let nodes = cover(begin, end, of);
            let mut at = begin;
            for node in &nodes {
                prop_assert_eq!(node.begin, at);
                prop_assert!(node.is_in(of));
                at = node.end;
            }
            prop_assert!(begin == end || at == end);
            for pair in nodes.windows(2) {
                // Two adjacent siblings would have been one node.
                let (_, sibling) = pair[0].parent_and_sibling(of).unwrap();
                prop_assert_ne!(sibling, pair[1]);
            }
        }

        #[test]
        fn largest_from_is_the_first_of_a_cover(of in 1u32..200, a in 0u32..200, b in 0u32..200) {
            let (begin, end) = (a.min(b).min(of - 1), (a.max(b) + 1).min(of));
            prop_assert_eq!(largest_from(begin, end, of, u32::MAX), cover(begin, end, of)[0]);
            prop_assert_eq!(largest_from(begin, end, of, 1), Node::leaf(begin));
        }
    }
}

//! The free ranges of a memory. Pure.
//!
//! Always true here: free ranges are not empty, do not touch and do not overlap. So ranges given
//! back in any order join into one.

use std::collections::BTreeMap;
use std::ops::Range;

/// Free ranges: begin and length.
#[derive(Debug)]
pub(super) struct Ranges(BTreeMap<usize, usize>);

impl Ranges {
    /// Returns ranges in which all of `0..end` is free.
    pub(super) fn new(end: usize) -> Self {
        Self(BTreeMap::from_iter((end > 0).then_some((0, end))))
    }

    /// Takes the first `len` of the first free range that is large enough, or returns `None`.
    ///
    /// # Panics
    /// If `len` is 0.
    pub(super) fn take(&mut self, len: usize) -> Option<Range<usize>> {
        assert!(len > 0, "an empty range");
        let (&begin, &free) = self.0.iter().find(|(_, free)| **free >= len)?;
        self.0.remove(&begin);
        if free > len {
            self.0.insert(begin + len, free - len);
        }
        Some(begin..begin + len)
    }

    /// Gives a range back.
    ///
    /// # Panics
    /// If a part of it is free already.
    pub(super) fn give(&mut self, range: Range<usize>) {
        let (mut begin, mut end) = (range.start, range.end);
        if let Some((&before, &len)) = self.0.range(..=begin).next_back() {
            assert!(before + len <= begin, "{range:?} is free already");
            if before + len == begin {
                begin = before;
            }
        }
        if let Some((&after, &len)) = self.0.range(range.start..).next() {
            assert!(end <= after, "{range:?} is free already");
            if end == after {
                self.0.remove(&after);
                end += len;
            }
        }
        self.0.insert(begin, end - begin);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: usize = 100;

    proptest! {
        #[test]
        fn ranges_never_overlap_and_come_back_whole(
            steps in proptest::collection::vec((any::<bool>(), 1usize..30, any::<prop::sample::Index>()), 0..200)
        ) {
            let (mut ranges, mut held) = (Ranges::new(END), Vec::<Range<usize>>::new());
            for (takes, len, which) in steps {
                if takes {
                    let free = |at: &usize| !held.iter().any(|range| range.contains(at));
                    let fits = (0..=END - len).any(|begin| (begin..begin + len).all(|at| free(&at)));
                    let taken = ranges.take(len);
                    prop_assert_eq!(taken.is_some(), fits, "{} of {:?}", len, held);
                    if let Some(taken) = taken {
                        prop_assert!(taken.len() == len && taken.end <= END && taken.clone().all(|at| free(&at)));
                        held.push(taken);
                    }
                } else if !held.is_empty() {
                    ranges.give(held.swap_remove(which.index(held.len())));
                }
            }
            held.into_iter().for_each(|range| ranges.give(range));
            prop_assert_eq!(ranges.take(END), Some(0..END));
        }
    }

    #[test]
    #[should_panic(expected = "is free already")]
    fn nothing_is_given_back_twice() {
        let mut ranges = Ranges::new(END);
        let taken = ranges.take(10).unwrap();
        ranges.give(taken.clone());
        ranges.give(taken);
    }
}

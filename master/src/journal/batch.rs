//! Changes to a store, and how a later batch of changes joins an earlier one. Pure.

use std::collections::BTreeMap;
use std::ops::Range;

/// Changes to a store: first every key of `ranges` is removed, then `keys` are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Ranges of keys to remove: the first key of each, and the key at which it ends, which stays.
    pub ranges: BTreeMap<String, String>,
    /// Keys with their new values; `None` removes one.
    pub keys: BTreeMap<String, Option<Vec<u8>>>,
}

impl Batch {
    /// Returns whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.keys.is_empty()
    }

    /// Sets a key.
    pub(crate) fn set(&mut self, key: String, value: Vec<u8>) {
        self.keys.insert(key, Some(value));
    }

    /// Removes a key.
    pub(crate) fn remove(&mut self, key: String) {
        self.keys.insert(key, None);
    }

    /// Removes every key of a range, also those that this batch sets.
    pub(crate) fn remove_range(&mut self, range: Range<String>) {
        self.keys.retain(|key, _| !range.contains(key));
        let end = self.ranges.entry(range.start).or_default();
        *end = range.end.max(std::mem::take(end));
    }

    /// Adds a later batch: this one then does what both do, one after the other.
    pub(crate) fn append(&mut self, later: Self) {
        later.ranges.into_iter().for_each(|(begin, end)| self.remove_range(begin..end));
        self.keys.extend(later.keys);
    }

    /// Does to `all` what a store does.
    pub(crate) fn apply(&self, all: &mut BTreeMap<String, Vec<u8>>) {
        for (begin, end) in &self.ranges {
            let inside = all.range(begin.clone()..end.clone().max(begin.clone()));
            let inside: Vec<_> = inside.map(|(key, _)| key.clone()).collect();
            inside.iter().for_each(|key| drop(all.remove(key)));
        }
        for (key, value) in &self.keys {
            match value {
                Some(value) => drop(all.insert(key.clone(), value.clone())),
                None => drop(all.remove(key)),
            }
        }
    }
}

impl FromIterator<(String, Option<Vec<u8>>)> for Batch {
    fn from_iter<I: IntoIterator<Item = (String, Option<Vec<u8>>)>>(keys: I) -> Self {
        Self { ranges: BTreeMap::new(), keys: keys.into_iter().collect() }
    }
}

impl<const N: usize> From<[(String, Option<Vec<u8>>); N]> for Batch {
    fn from(keys: [(String, Option<Vec<u8>>); N]) -> Self {
        keys.into_iter().collect()
    }
}

/// Batches for the tests of stores.
#[cfg(test)]
pub(crate) mod any {
    use proptest::prelude::*;

    use super::*;

    fn key() -> impl Strategy<Value = String> {
        prop_oneof!["[ab]{1,2}", "job/[0-9]{1}", "event/[0-9]{1}/[0-9]{1}"]
    }

    /// Batches of short keys, many of which meet, with `value`s.
    pub(crate) fn batch(value: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Batch> {
        let keys = proptest::collection::btree_map(key(), proptest::option::weighted(0.7, value), 0..6);
        let ranges = proptest::collection::vec((key(), key()), 0..3);
        (ranges, keys).prop_map(|(ranges, keys)| {
            let mut batch = Batch::default();
            ranges.into_iter().for_each(|(one, other)| {
                batch.remove_range(one.clone().min(other.clone())..one.max(other));
            });
            batch.keys = keys;
            batch
        })
    }

    proptest! {
        #[test]
        fn two_batches_as_one_do_what_they_do_one_after_the_other(
            before in batch(Just(vec![0])),
            first in batch(Just(vec![1])),
            second in batch(Just(vec![2])),
        ) {
            let mut apart = BTreeMap::new();
            before.apply(&mut apart);
            let mut joined = apart.clone();
            first.apply(&mut apart);
            second.apply(&mut apart);
            let mut both = first;
            both.append(second);
            both.apply(&mut joined);
            prop_assert_eq!(apart, joined);
        }
    }
}

//! The order `window`: files are read in sequence, some side by side, and shuffled within windows.
//!
//! - The data shards, one for each file, are permuted and dealt to *lanes* like cards.
//! - A lane is the sequence of its shards. Each run of `window` records of a lane, counted from its
//!   beginning, is permuted in itself.
//! - A lane is cut into microbatches of `micro` records. The epoch takes one microbatch from each
//!   lane in turn. A lane without a whole microbatch is passed over.
//! - The records that are left at the ends of the lanes come last, lane after lane.
//!
//! So an epoch has as many microbatches, of the same sizes, as with any other order. Whoever reads
//! microbatches of one lane reads its files in sequence.
//!
//! Two shards of 5 and 4 records, `micro` = 2, `interleave` = 2, without permutations:
//!
//! ```text
//! lane 0    0 1 | 2 3 | 4
//! lane 1    5 6 | 7 8 |
//! epoch     0 1   5 6   2 3   7 8   4
//! ```

use std::ops::Range;

use super::Permutation;
use crate::ids::Epoch;
use crate::random;

/// Settings of the order `window`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Records of a microbatch.
    pub micro: u32,
    /// Records that are permuted among each other; at least 1.
    pub window: u64,
    /// Most lanes; at least 1.
    pub interleave: u32,
}

/// The order `window` of one epoch. It takes memory in proportion to the number of shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowOrder {
    micro: u64,
    window: u64,
    lanes: Vec<Lane>,
    stages: Vec<Stage>,
    /// Microbatches that come from lanes in turn.
    whole: u64,
    /// First position of each lane's rest, counted from the end of the last whole microbatch.
    rests: Vec<u64>,
}

/// A sequence of whole shards.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lane {
    /// First position of each shard in the lane, and the shard's first record.
    shards: Vec<(u64, u64)>,
    records: u64,
    /// Key of the permutations of its windows.
    key: u64,
}

/// Turns in which the same lanes have whole microbatches.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stage {
    /// First microbatch of the stage.
    first: u64,
    /// Microbatches that each of its lanes has given before.
    before: u64,
    /// Lanes of the stage, in order.
    lanes: Vec<u32>,
}

impl WindowOrder {
    /// Returns the order of an epoch over shards of these numbers of records. The records of all
    /// shards are numbered one after the other.
    pub fn new(shards: &[u64], settings: Windows, seed: u64, epoch: Epoch) -> Self {
        let filled =
            shards.iter().scan(0, |next, &records| Some((std::mem::replace(next, *next + records), records)));
        let filled: Vec<(u64, u64)> = filled.filter(|(_, records)| *records > 0).collect();
        let count = (settings.interleave.max(1) as usize).min(filled.len());
        let of_epoch = random::key(seed, "window", epoch.get());
        let lane = |lane| Lane { shards: Vec::new(), records: 0, key: random::key(of_epoch, "lane", lane) };
        let mut lanes: Vec<Lane> = (0..count as u64).map(lane).collect();
        let order =
            Permutation { len: filled.len() as u64, key: Some(random::key(seed, "shards", epoch.get())) };
        for at in 0..filled.len() {
            let (begin, records) = filled[order.apply(at as u64) as usize];
            let lane = &mut lanes[at % count];
            lane.shards.push((lane.records, begin));
            lane.records += records;
        }
        let micro = u64::from(settings.micro.max(1));
        let (stages, whole) = stages(&lanes, micro);
        let rests =
            lanes.iter().scan(0, |next, lane| Some(std::mem::replace(next, *next + lane.records % micro)));
        Self { micro, window: settings.window.max(1), rests: rests.collect(), lanes, stages, whole }
    }

    /// Returns the lane that a position of the epoch belongs to, the position in the lane, and how
    /// many positions of the epoch from there on follow each other in the lane.
    fn in_lane(&self, position: u64) -> (usize, u64, u64) {
        let (microbatch, offset) = (position / self.micro, position % self.micro);
        if microbatch < self.whole {
            let stage = self.stages.partition_point(|stage| stage.first <= microbatch) - 1;
            let Stage { first, before, lanes } = &self.stages[stage];
            let (turn, at) =
                ((microbatch - first) / lanes.len() as u64, (microbatch - first) % lanes.len() as u64);
            let in_lane = (before + turn) * self.micro + offset;
            return (lanes[at as usize] as usize, in_lane, self.micro - offset);
        }
        let rest = position - self.whole * self.micro;
        let lane = self.rests.partition_point(|&first| first <= rest) - 1;
        let records = self.lanes[lane].records;
        let of_rest = rest - self.rests[lane];
        let run = (records % self.micro).saturating_sub(of_rest).max(1);
        (lane, records - records % self.micro + of_rest, run)
    }

    /// Returns the records at these positions of this order.
    ///
    /// # Panics
    /// If a position is not below the number of records.
    pub fn records(&self, positions: Range<u64>) -> Vec<u64> {
        let mut found = Vec::with_capacity(positions.end.saturating_sub(positions.start) as usize);
        let mut position = positions.start;
        while position < positions.end {
            let run = self.in_window(position, positions.end);
            position += run.len() as u64;
            found.extend(run);
        }
        found
    }

    /// Returns the records at a position and at those after it, up to `end`, that lie in the same
    /// microbatch or rest, and in the same window of a lane.
    fn in_window(&self, position: u64, end: u64) -> Vec<u64> {
        let (lane, at, run) = self.in_lane(position);
        let Lane { shards, records, key } = &self.lanes[lane];
        assert!(at < *records, "position {position} is beyond the records of the epoch");
        let number = at / self.window;
        let begin = number * self.window;
        let len = self.window.min(records - begin);
        let window = Permutation { len, key: Some(random::key(*key, "window", number)) };
        let count = run.min(end - position).min(begin + len - at);
        let mut found = window.apply_all(at - begin..at - begin + count);
        for at in &mut found {
            *at += begin;
            let (first, record) = shards[shards.partition_point(|&(first, _)| first <= *at) - 1];
            *at = record + *at - first;
        }
        found
    }
}

/// Returns the stages of an epoch, and the number of their microbatches.
fn stages(lanes: &[Lane], micro: u64) -> (Vec<Stage>, u64) {
    let (mut stages, mut first, mut before) = (Vec::new(), 0, 0);
    let whole = |lane: &Lane| lane.records / micro;
    loop {
        let in_turn = |(_, lane): &(usize, &Lane)| whole(lane) > before;
        let alive: Vec<_> = lanes.iter().enumerate().filter(in_turn).collect();
        let Some(until) = alive.iter().map(|(_, lane)| whole(lane)).min() else { return (stages, first) };
        let count = alive.len() as u64;
        stages.push(Stage { first, before, lanes: alive.iter().map(|(at, _)| *at as u32).collect() });
        first += (until - before) * count;
        before = until;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn order(
        shards: &[u64],
        (micro, window, interleave): (u32, u64, u32),
        seed: u64,
        epoch: u64,
    ) -> Vec<u64> {
        let order = WindowOrder::new(shards, Windows { micro, window, interleave }, seed, Epoch(epoch));
        order.records(0..shards.iter().sum())
    }

    #[test]
    fn lanes_give_microbatches_in_turn_and_their_rests_at_the_end() {
        // A window of one record permutes nothing. One of these seeds leaves the two shards in
        // place.
        let orders: BTreeSet<_> = (0..20).map(|seed| order(&[5, 4], (2, 1, 2), seed, 0)).collect();
        let [kept, swapped] = [[0, 1, 5, 6, 2, 3, 7, 8, 4], [5, 6, 0, 1, 7, 8, 2, 3, 4]];
        assert_eq!(orders, BTreeSet::from([kept.to_vec(), swapped.to_vec()]));
        // A lane that has ended is passed over.
        let orders: BTreeSet<_> = (0..20).map(|seed| order(&[6, 2], (2, 1, 2), seed, 0)).collect();
        let [kept, swapped] = [[0, 1, 6, 7, 2, 3, 4, 5], [6, 7, 0, 1, 2, 3, 4, 5]];
        assert_eq!(orders, BTreeSet::from([kept.to_vec(), swapped.to_vec()]));
    }

    #[test]
    fn one_lane_with_one_window_is_a_permutation_of_everything() {
        let found = order(&[100, 100], (8, 1000, 1), 3, 0);
        assert!(
            found[..100].iter().any(|&record| record >= 100)
                && found[..100].iter().any(|&record| record < 100)
        );
    }

    fn shapes() -> impl Strategy<Value = (Vec<u64>, (u32, u64, u32))> {
        let shards = proptest::collection::vec(prop_oneof![Just(0), 1u64..60], 1..12);
        (shards, (1u32..9, 1u64..40, 1u32..6))
            .prop_filter("records", |(shards, _)| shards.iter().sum::<u64>() > 0)
    }

    proptest! {
        #[test]
        fn an_epoch_has_every_record_once((shards, settings) in shapes(), seed in any::<u64>(), epoch in 0u64..4) {
            let mut found = order(&shards, settings, seed, epoch);
            found.sort_unstable();
            prop_assert_eq!(found, (0..shards.iter().sum()).collect::<Vec<_>>());
        }

        #[test]
        fn a_whole_microbatch_lies_in_at_most_two_windows_of_one_lane((shards, settings) in shapes(), seed in any::<u64>()) {
            let (micro, window, interleave) = settings;
            let windows = Windows { micro, window, interleave };
            let order = WindowOrder::new(&shards, windows, seed, Epoch(0));
            let per_micro = u64::from(micro);
            let mut turns = Vec::new();
            for microbatch in 0..order.whole {
                let places: Vec<_> =
                    (0..per_micro).map(|offset| order.in_lane(microbatch * per_micro + offset)).collect();
                prop_assert!(places.iter().all(|(lane, ..)| *lane == places[0].0));
                prop_assert!(places.windows(2).all(|pair| pair[0].1 + 1 == pair[1].1 && pair[0].2 == pair[1].2 + 1));
                turns.push(places[0].0);
            }
            // While every lane has whole microbatches, lane i gives microbatch i, i + lanes, ..
            let shortest = order.lanes.iter().map(|lane| lane.records / per_micro).min().unwrap_or(0);
            let lanes = order.lanes.len();
            for (at, lane) in turns.iter().take(shortest as usize * lanes).enumerate() {
                prop_assert_eq!(*lane, at % lanes);
            }
        }

        #[test]
        fn a_window_stays_within_its_records_of_the_lane((shards, settings) in shapes(), seed in any::<u64>()) {
            let (micro, window, interleave) = settings;
            let order = WindowOrder::new(&shards, Windows { micro, window, interleave }, seed, Epoch(1));
            // Records of a lane, in the order of its files.
            let starts: Vec<u64> = shards.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len))).collect();
            for position in 0..shards.iter().sum() {
                let (lane, at, _) = order.in_lane(position);
                let record = order.records(position..position + 1)[0];
                let shard = starts.iter().rposition(|&start| start <= record).unwrap();
                let shard = (0..=shard).rev().find(|&shard| shards[shard] > 0).unwrap();
                let (first, begin) = *order.lanes[lane].shards.iter().find(|(_, begin)| *begin == starts[shard]).unwrap();
                prop_assert_eq!((first + record - begin) / window, at / window);
            }
        }

        #[test]
        fn some_positions_have_the_records_of_the_whole((shards, settings) in shapes(), seed in any::<u64>(), a: u64, b: u64) {
            let (micro, window, interleave) = settings;
            let order = WindowOrder::new(&shards, Windows { micro, window, interleave }, seed, Epoch(0));
            let records = shards.iter().sum::<u64>();
            let (a, b) = (a % (records + 1), b % (records + 1));
            let (begin, end) = (a.min(b), a.max(b));
            prop_assert_eq!(&order.records(0..records)[begin as usize..end as usize], order.records(begin..end));
        }

        #[test]
        fn orders_differ_between_epochs_and_seeds(seed in any::<u64>()) {
            let of = |seed, epoch| order(&[200, 300, 100], (8, 100, 2), seed, epoch);
            prop_assert_ne!(of(seed, 0), of(seed, 1));
            prop_assert_ne!(of(seed, 0), of(seed.wrapping_add(1), 0));
        }
    }
}

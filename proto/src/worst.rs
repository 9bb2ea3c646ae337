//! The worst records of an evaluation: those with the largest losses. Pure.
//!
//! ```text
//! most = 3    one shard      (record 4, 2.5) (record 0, 0.5)
//!             another one    (record 9, 0.7) (record 8, 0.5) (record 7, 0.1)
//!             both           (record 4, 2.5) (record 9, 0.7) (record 0, 0.5)
//! ```
//!
//! **Always true:** the list is the begin of all records, sorted by falling loss and, among equal
//! losses, by rising number. It does not depend on the order in which records are added. A loss
//! that is NaN is worse than every other one.

use std::cmp::Ordering;

use bytes::Bytes;

/// Most numbers of a record's label, and most of its outputs, that travel with its loss.
pub const VALUES_MAX: usize = 32;

/// Most previews of a job, over all validation sets, because the job's status has them.
pub const PREVIEWS_MAX: u32 = 16;

/// Bytes of the image of a preview, at most.
pub const PREVIEW_BYTES_MAX: usize = 16 << 10;

/// Characters of the text of a preview, at most.
pub const PREVIEW_CHARACTERS_MAX: usize = 1000;

/// A record and its loss.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordLoss {
    /// Number of the record over all files of its data set.
    pub record: u64,
    /// Loss of the record.
    pub loss: f64,
    /// Its label.
    pub label: Label,
    /// Outputs of the model for the record, at most [`VALUES_MAX`].
    pub outputs: Vec<f32>,
    /// Places of these outputs among all of the record, row-major. Empty: they are all, in order.
    pub places: Vec<u32>,
    /// What a person sees of the record. `None`: its inputs are neither images nor texts, or other
    /// records come first.
    pub preview: Option<Preview>,
}

/// What a person sees of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preview {
    /// Its image as a PNG file of at most [`PREVIEW_BYTES_MAX`]. Empty: no input is an image.
    pub png: Bytes,
    /// Begin of its text, at most [`PREVIEW_CHARACTERS_MAX`]. Empty: no input is a text.
    pub text: String,
}

/// The label of a record.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Label {
    /// It has more than [`VALUES_MAX`] numbers.
    #[default]
    Long,
    /// Classes.
    Classes(Vec<i64>),
    /// Values.
    Values(Vec<f32>),
}

impl RecordLoss {
    /// Creates an entry with as much of the label and the outputs as may travel. `outputs` are all
    /// of the record, row-major.
    ///
    /// If there are too many outputs, one class keeps the largest ones, the first of equals first.
    /// Any other label keeps none.
    pub fn new(record: u64, loss: f64, label: Label, outputs: &[f32]) -> Self {
        let is_class = matches!(&label, Label::Classes(classes) if classes.len() == 1);
        let label = match label {
            Label::Classes(classes) if classes.len() > VALUES_MAX => Label::Long,
            Label::Values(values) if values.len() > VALUES_MAX => Label::Long,
            label => label,
        };
        let (mut kept, mut places) = (Vec::new(), Vec::new());
        if outputs.len() <= VALUES_MAX {
            kept = outputs.to_vec();
        } else if is_class {
            places = (0..u32::try_from(outputs.len()).unwrap_or(u32::MAX)).collect();
            let larger = |one: &u32, other: &u32| {
                let [one_of, other_of] = [one, other].map(|&place| outputs[place as usize]);
                plain(other_of).total_cmp(&plain(one_of)).then(one.cmp(other))
            };
            places.select_nth_unstable_by(VALUES_MAX - 1, larger);
            places.truncate(VALUES_MAX);
            places.sort_unstable_by(larger);
            kept = places.iter().map(|&place| outputs[place as usize]).collect();
        }
        Self { record, loss, label, outputs: kept, places, preview: None }
    }

    /// Returns the order of two records, the worse one first.
    pub fn order(&self, other: &Self) -> Ordering {
        order((self.loss, self.record), (other.loss, other.record))
    }
}

/// Returns the value as `total_cmp` is to see it: NaN above all, and one zero.
fn plain(value: f32) -> f32 {
    if value.is_nan() { f32::NAN.abs() } else { value + 0.0 }
}

fn order((loss, record): (f64, u64), (other, other_record): (f64, u64)) -> Ordering {
    let plain = |loss: f64| if loss.is_nan() { f64::NAN.abs() } else { loss + 0.0 };
    plain(other).total_cmp(&plain(loss)).then(record.cmp(&other_record))
}

/// The records with the largest losses, of those that were added. Each record is added once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Worst {
    most: usize,
    /// Number of records that keep their previews: the first ones.
    previews: usize,
    /// The worst one first.
    records: Vec<RecordLoss>,
}

impl Worst {
    /// Creates the empty list of at most so many records, without previews.
    pub const fn new(most: usize) -> Self {
        Self { most, previews: 0, records: Vec::new() }
    }

    /// Sets how many records keep their previews: the first ones.
    #[must_use]
    pub const fn with_previews(mut self, previews: usize) -> Self {
        self.previews = previews;
        self
    }

    /// Returns how many records have a place in the list.
    pub const fn most(&self) -> usize {
        self.most
    }

    /// Returns whether a record with this loss has a place in the list.
    pub fn takes(&self, record: u64, loss: f64) -> bool {
        match self.records.last() {
            _ if self.records.len() < self.most => true,
            Some(last) => order((loss, record), (last.loss, last.record)).is_lt(),
            None => false,
        }
    }

    /// Adds a record, if it has a place.
    pub fn add(&mut self, found: RecordLoss) {
        if self.takes(found.record, found.loss) {
            let at = self.records.partition_point(|record| record.order(&found).is_lt());
            self.records.insert(at, found);
            self.records.truncate(self.most);
            // The record that came too late for a preview, or that has just lost its place.
            if let Some(hidden) = self.records.get_mut(at.max(self.previews)) {
                hidden.preview = None;
            }
        }
    }

    /// Returns the records, the worst one first.
    pub fn into_records(self) -> Vec<RecordLoss> {
        self.records
    }
}

impl Extend<RecordLoss> for Worst {
    fn extend<T: IntoIterator<Item = RecordLoss>>(&mut self, records: T) {
        records.into_iter().for_each(|record| self.add(record));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(record: u64, loss: f64) -> RecordLoss {
        let preview = Some(Preview { text: record.to_string(), ..Preview::default() });
        let found = RecordLoss::new(record, loss, Label::Classes(vec![1]), &[0.5, loss as f32]);
        RecordLoss { preview, ..found }
    }

    fn numbers(worst: Worst) -> Vec<u64> {
        worst.into_records().iter().map(|found| found.record).collect()
    }

    #[test]
    fn equal_losses_have_the_order_of_their_records_and_nan_is_the_worst() {
        let mut worst = Worst::new(5);
        let losses = [(7, 1.0), (3, -f64::NAN), (5, f64::INFINITY), (2, 1.0), (9, 0.0), (1, -0.0)];
        worst.extend(losses.map(|(record, loss)| of(record, loss)));
        assert_eq!(numbers(worst), [3, 5, 2, 7, 1]);
    }

    #[test]
    fn a_list_of_no_records_takes_none() {
        let mut worst = Worst::default();
        assert!(!worst.takes(0, f64::NAN));
        worst.add(of(0, f64::NAN));
        assert!(numbers(worst).is_empty());
    }

    #[test]
    fn a_full_list_takes_only_worse_records() {
        let mut worst = Worst::new(2);
        worst.extend([of(4, 2.0), of(5, 1.0)]);
        let taken = [(9, 2.5), (3, 1.0), (5, 1.0), (6, 1.0), (1, 0.5)];
        let taken = taken.map(|(record, loss)| worst.takes(record, loss));
        assert_eq!(taken, [true, true, false, false, false]);
    }

    #[test]
    fn labels_of_at_most_so_many_numbers_are_kept() {
        let label = |label| RecordLoss::new(0, 1.0, label, &[]).label;
        for values in [Label::Values(vec![0.5; VALUES_MAX]), Label::Classes(vec![7; VALUES_MAX])] {
            assert_eq!(label(values.clone()), values);
        }
        assert_eq!(label(Label::Values(vec![0.5; VALUES_MAX + 1])), Label::Long);
        assert_eq!(label(Label::Classes(vec![7; VALUES_MAX + 1])), Label::Long);
    }

    #[test]
    fn an_output_that_is_no_number_is_larger_than_every_other_one() {
        let mut outputs = vec![1.0; 100];
        (outputs[60], outputs[70]) = (-f32::NAN, f32::INFINITY);
        let found = RecordLoss::new(0, 1.0, Label::Classes(vec![4]), &outputs);
        assert_eq!(found.places[..4], [60, 70, 0, 1]);
    }

    #[test]
    fn of_many_outputs_the_largest_beside_a_class_are_kept() {
        let outputs: Vec<f32> = (0..100).map(|place| (place % 50) as f32).collect();
        let class = RecordLoss::new(0, 1.0, Label::Classes(vec![4]), &outputs);
        assert_eq!((class.places.len(), &class.places[..4]), (VALUES_MAX, &[49, 99, 48, 98][..]));
        assert_eq!(class.outputs[..4], [49.0, 49.0, 48.0, 48.0]);
        let values = RecordLoss::new(0, 1.0, Label::Values(outputs.clone()), &outputs);
        assert_eq!((values.label, values.outputs, values.places), (Label::Long, vec![], vec![]));
        let texts = RecordLoss::new(0, 1.0, Label::Classes(vec![1; 2]), &outputs);
        assert_eq!((texts.label, texts.outputs), (Label::Classes(vec![1; 2]), vec![]));
        let few = RecordLoss::new(0, 1.0, Label::Values(vec![0.5]), &outputs[..VALUES_MAX]);
        assert_eq!((few.outputs.len(), few.places), (VALUES_MAX, vec![]));
    }

    proptest! {
        /// Losses have few values, so that many are equal.
        #[test]
        fn the_lists_of_any_shards_merge_into_the_begin_of_all_records_sorted(
            losses in proptest::collection::vec(prop_oneof![(0u8..4).prop_map(f64::from), Just(f64::NAN)], 0..80),
            shards in proptest::collection::vec(0usize..5, 80),
            order in Just((0usize..80).collect::<Vec<_>>()).prop_shuffle(),
            most in 0usize..20,
            previews in 0usize..20,
        ) {
            let all: Vec<_> = losses.iter().zip(0..).map(|(&loss, record)| of(record, loss)).collect();
            let mut lists = vec![Worst::new(most).with_previews(previews); 5];
            for at in order.iter().copied().filter(|&at| at < all.len()) {
                lists[shards[at]].add(all[at].clone());
            }
            let mut merged = Worst::new(most).with_previews(previews);
            for at in order.into_iter().filter(|&at| at < 5) {
                merged.extend(std::mem::take(&mut lists[at]).into_records());
            }
            let key = |found: &RecordLoss| {
                let loss = if found.loss.is_nan() { 99 } else { found.loss as i64 };
                (-loss, found.record)
            };
            let mut sorted = all;
            sorted.sort_by_key(key);
            sorted.truncate(most);
            sorted.iter_mut().skip(previews).for_each(|found| found.preview = None);
            let merged = merged.into_records();
            let shown = |list: &[RecordLoss]| list.iter().map(|found| found.preview.clone()).collect::<Vec<_>>();
            prop_assert_eq!(shown(&merged), shown(&sorted));
            prop_assert_eq!(merged.iter().map(key).collect::<Vec<_>>(), sorted.iter().map(key).collect::<Vec<_>>());
        }
    }
}

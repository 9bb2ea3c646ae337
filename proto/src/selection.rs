//! Selection of the best version of a training, and its early end. Pure.
//!
//! ```text
//! patience = 2, larger is better    version   10    20    30    40    50
//!                                   value    0.5   0.7   0.6   0.7     -
//!                                   best      10    20    20    20
//!                                   waited     0     0     1     2 -> stops at 40; 20 is the best
//! ```
//!
//! **Always true:** the state is a function of the evaluations in the order of their versions. An
//! evaluation that is observed again changes nothing. So a job that goes back to a checkpoint, or
//! whose master starts again, stops at the same version and has the same best one.
//!
//! Early stopping is that of Prechelt, "Early Stopping - But When?" (1998), with the settings of
//! Keras's `EarlyStopping`.

use serde::{Deserialize, Serialize};

use crate::ids::Version;

/// What makes a version the best one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Criterion {
    /// Metric, as a job's status names it: `loss`, or `dev/accuracy` for a named validation set.
    pub metric: String,
    /// Whether a larger value is better. Otherwise a smaller one is.
    pub larger: bool,
    /// Difference that a better value must exceed; at least 0 and finite.
    pub min_delta: f64,
}

impl Criterion {
    /// Returns whether a value is better than the best one so far. NaN never is, and every other
    /// value is better than NaN.
    pub fn is_better(&self, value: f64, best: f64) -> bool {
        let gain = if self.larger { value - best } else { best - value };
        !value.is_nan() && (best.is_nan() || gain > self.min_delta)
    }
}

/// The best version so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selection {
    /// What makes it the best one.
    pub criterion: Criterion,
    /// The best version: the first one that no later version was better than.
    pub best: Version,
    /// Its value, as bits of an f64, because JSON has no NaN.
    value_bits: u64,
    /// Newest version that was observed.
    pub last: Version,
    /// Number of evaluations since the best one.
    pub waited: u32,
}

/// All parts are compared bit by bit, so NaN equals itself.
impl Eq for Selection {}

impl Selection {
    /// Creates the selection after the first evaluation, whatever its value.
    pub const fn first(criterion: Criterion, version: Version, value: f64) -> Self {
        Self { criterion, best: version, value_bits: value.to_bits(), last: version, waited: 0 }
    }

    /// Returns a selection of these parts, for example from a journal.
    pub const fn of(criterion: Criterion, best: (Version, f64), last: Version, waited: u32) -> Self {
        Self { criterion, best: best.0, value_bits: best.1.to_bits(), last, waited }
    }

    /// Returns this selection for a job with a criterion of its own. `None`: other versions may be
    /// the best by that.
    pub fn under(mut self, criterion: Criterion) -> Option<Self> {
        let same =
            |one: &Criterion, other: &Criterion| one.metric == other.metric && one.larger == other.larger;
        same(&self.criterion, &criterion).then(|| {
            self.criterion = criterion;
            self
        })
    }

    /// Returns the value of the best version.
    pub const fn value(&self) -> f64 {
        f64::from_bits(self.value_bits)
    }

    /// Observes the value of a version. Versions come in order; one that was observed before
    /// changes nothing.
    pub fn observe(&mut self, version: Version, value: f64) {
        if version <= self.last {
            return;
        }
        self.last = version;
        if self.criterion.is_better(value, self.value()) {
            (self.best, self.value_bits, self.waited) = (version, value.to_bits(), 0);
        } else {
            self.waited = self.waited.saturating_add(1);
        }
    }

    /// Returns whether training stops: `patience` evaluations since the best one were not better.
    pub fn stops(&self, patience: Option<u32>) -> bool {
        patience.is_some_and(|patience| self.waited >= patience)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn criterion(larger: bool, min_delta: f64) -> Criterion {
        Criterion { metric: "accuracy".to_owned(), larger, min_delta }
    }

    /// Observes values of the versions 10, 20 and so on until training stops.
    fn observed(criterion: Criterion, patience: Option<u32>, values: &[f64]) -> Selection {
        let mut evaluations = (1..).map(|at| Version(10 * at)).zip(values.iter().copied());
        let (version, value) = evaluations.next().unwrap();
        let mut selection = Selection::first(criterion, version, value);
        for (version, value) in evaluations {
            if selection.stops(patience) {
                break;
            }
            selection.observe(version, value);
        }
        selection
    }

    fn outcome(selection: &Selection) -> (u64, u64, u32) {
        (selection.best.0, selection.last.0, selection.waited)
    }

    #[test]
    fn training_stops_when_no_later_version_is_better_for_long_enough() {
        let selection = observed(criterion(true, 0.0), Some(2), &[0.5, 0.7, 0.6, 0.7, 0.9]);
        assert_eq!((outcome(&selection), selection.value()), ((20, 40, 2), 0.7));
        let selection = observed(criterion(true, 0.0), None, &[0.5, 0.7, 0.6, 0.7, 0.9]);
        assert_eq!(outcome(&selection), (50, 50, 0));
        let selection = observed(criterion(false, 0.0), Some(1), &[0.5, 0.4, 0.4, 0.3]);
        assert_eq!(outcome(&selection), (20, 30, 1), "the first of equals is the best");
    }

    #[test]
    fn a_better_value_exceeds_the_least_difference() {
        let selection = observed(criterion(true, 0.25), Some(3), &[0.5, 0.75, 1.25, 1.0]);
        assert_eq!(outcome(&selection), (30, 40, 1), "0.25 more is not enough");
        let selection = observed(criterion(false, 1.0), None, &[3.0, 2.5, 1.5]);
        assert_eq!(outcome(&selection), (30, 30, 0), "compared with the best, not with the last");
    }

    #[test]
    fn no_number_is_better_than_none_and_none_is_never_better() {
        let nan = f64::NAN;
        assert_eq!(outcome(&observed(criterion(false, 0.0), Some(2), &[nan, nan, nan, 1.0])), (10, 30, 2));
        assert_eq!(outcome(&observed(criterion(false, 0.0), Some(2), &[nan, 9.0, nan])), (20, 30, 1));
        let infinite = [f64::INFINITY, f64::INFINITY, 1.0];
        assert_eq!(outcome(&observed(criterion(false, 0.0), None, &infinite)), (30, 30, 0));
    }

    #[test]
    fn a_job_takes_a_selection_over_with_its_own_least_difference() {
        let selection = Selection::first(criterion(true, 0.0), Version(3), 0.5);
        let taken = selection.clone().under(criterion(true, 0.25)).unwrap();
        assert_eq!((taken.criterion.min_delta, taken.best), (0.25, Version(3)));
        assert_eq!(selection.clone().under(criterion(false, 0.0)), None);
        let other = Criterion { metric: "loss".to_owned(), ..criterion(true, 0.0) };
        assert_eq!(selection.under(other), None);
    }

    #[test]
    fn a_selection_survives_json_without_a_number_too() {
        for value in [f64::NAN, 0.1, f64::NEG_INFINITY] {
            let selection = Selection::first(criterion(true, 0.1), Version(3), value);
            let text = serde_json::to_string(&selection).unwrap();
            assert_eq!(serde_json::from_str::<Selection>(&text).unwrap(), selection);
        }
    }

    proptest! {
        /// After any number of losses, each of which goes back by any number of evaluations.
        #[test]
        fn what_is_observed_again_changes_nothing(
            values in proptest::collection::vec(0u8..6, 1..20),
            losses in proptest::collection::vec((0usize..20, 0usize..20), 0..6),
            larger in any::<bool>(),
            patience in proptest::option::of(1u32..5),
            min_delta in 0u8..3,
        ) {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let criterion = criterion(larger, f64::from(min_delta));
            let calm = observed(criterion.clone(), patience, &values);
            let mut selection = Selection::first(criterion, Version(10), values[0]);
            let (mut at, mut losses) = (1, losses.into_iter().collect::<std::collections::VecDeque<_>>());
            while at < values.len() && !selection.stops(patience) {
                selection.observe(Version(10 * (at as u64 + 1)), values[at]);
                at += 1;
                if let Some((_, back)) = losses.pop_front_if(|(after, _)| *after <= at) {
                    at = at.saturating_sub(back);
                }
            }
            prop_assert_eq!(selection, calm);
        }

        /// The best version is the one that a look at all values finds.
        #[test]
        fn without_least_difference_the_best_is_the_first_extreme(values in proptest::collection::vec(-5i8..5, 1..20)) {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let first = values.iter().position(|value| *value == most).unwrap() as u64;
            let selection = observed(criterion(true, 0.0), None, &values);
            prop_assert_eq!(selection.best, Version(10 * (first + 1)));
        }
    }
}

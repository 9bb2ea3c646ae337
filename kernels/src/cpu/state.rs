//! Update rules of state tensors: values that travel with the weights but have no gradient (BatchNorm's statistics).
//!
//! Each of a step's M microbatches starts from version v and brings its own value. Version v + 1 is their mean; for
//! counters (`num_batches_tracked`) it is their maximum. Both are elementwise and, the sum being reduced along the
//! canonical tree, the same bits whoever computed what.

/// `next = sum / count`: the mean of the `count` values that were summed, each element rounded once.
///
/// 2 values summing to [3, -1] give [1.5, -0.5].
///
/// # Panics
///
/// If the lengths differ, or `count` is 0 or above 2^24 (no longer exact as an f32).
pub fn mean(sum: &[f32], count: u64, next: &mut [f32]) {
    assert_eq!(next.len(), sum.len(), "the mean has {} values, the sum has {}", next.len(), sum.len());
    assert!((1..=1 << 24).contains(&count), "mean of {count} values, expected 1 to 2^24");
    let count = count as f32;
    for (next, &sum) in next.iter_mut().zip(sum) {
        *next = sum / count;
    }
}

/// `merged = max(merged, values)`: takes up one more microbatch's counters.
///
/// # Panics
///
/// If the lengths differ.
pub fn max(merged: &mut [i64], values: &[i64]) {
    assert_eq!(merged.len(), values.len(), "{} counters meet {} counters", merged.len(), values.len());
    for (merged, &value) in merged.iter_mut().zip(values) {
        *merged = (*merged).max(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_divides_and_does_not_multiply_by_a_rounded_inverse() {
        let mut next = [f32::NAN; 3];
        mean(&[3.0, -1.5, 0.0], 3, &mut next);
        assert_eq!(next, [1.0, -0.5, 0.0]);
        // 5 * (1 / 5) is 1 in f32 by luck; 41 * (1 / 41) is not.
        mean(&[41.0, 82.0, 0.41], 41, &mut next);
        assert_eq!(next, [1.0, 2.0, 0.41 / 41.0]);
    }

    #[test]
    fn counters_take_the_maximum_in_any_order() {
        let (one, other) = ([7, -3, i64::MIN], [5, 4, i64::MAX]);
        let (mut forth, mut back) = (one, other);
        max(&mut forth, &other);
        max(&mut back, &one);
        assert_eq!(forth, [7, 4, i64::MAX]);
        assert_eq!(back, forth);
    }

    #[test]
    #[should_panic(expected = "mean of 0 values")]
    fn the_mean_of_nothing_is_a_broken_invariant() {
        mean(&[1.0], 0, &mut [0.0]);
    }
}

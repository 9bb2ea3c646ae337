//! Update rules of state tensors: values that travel with the weights but have no gradient
//! (BatchNorm's statistics).
//!
//! Each of a step's M microbatches starts from version v and brings its own value. Version v + 1 is
//! their mean; for counters (`num_batches_tracked`) it is their maximum. Both are elementwise and,
//! the sum being reduced along the canonical tree, the same bits whoever computed what.

/// `next = sum / count`: the mean of the `count` values that were summed, each element rounded
/// once. `sum` is little-endian f32 at any alignment.
///
/// 2 values summing to [3, -1] give [1.5, -0.5].
///
/// # Panics
///
/// If the lengths differ, or `count` is 0 or above 2^24 (no longer exact as an f32).
pub fn mean(sum: &[u8], count: u64, next: &mut [f32]) {
    let values = sum.len() / size_of::<f32>();
    assert!(next.len() == values, "the mean has {} values, the sum has {values}", next.len());
    assert!((1..=1 << 24).contains(&count), "mean of {count} values, expected 1 to 2^24");
    let count = count as f32;
    for (next, sum) in next.iter_mut().zip(sum.as_chunks().0) {
        *next = f32::from_le_bytes(*sum) / count;
    }
}

/// `merged = max(merged, values)`: takes up one more microbatch's counters. `values` is
/// little-endian i64 at any alignment.
///
/// # Panics
///
/// If the lengths differ.
pub fn max(merged: &mut [i64], values: &[u8]) {
    let found = values.len() / size_of::<i64>();
    assert!(merged.len() == found, "{} counters meet {found} counters", merged.len());
    for (merged, value) in merged.iter_mut().zip(values.as_chunks().0) {
        *merged = (*merged).max(i64::from_le_bytes(*value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_divides_and_does_not_multiply_by_a_rounded_inverse() {
        let mut next = [f32::NAN; 3];
        mean(bytemuck::bytes_of(&[3.0f32, -1.5, 0.0]), 3, &mut next);
        assert_eq!(next, [1.0, -0.5, 0.0]);
        // 5 * (1 / 5) is 1 in f32 by luck; 41 * (1 / 41) is not.
        mean(bytemuck::bytes_of(&[41.0f32, 82.0, 0.41]), 41, &mut next);
        assert_eq!(next, [1.0, 2.0, 0.41 / 41.0]);
    }

    #[test]
    fn counters_take_the_maximum_in_any_order() {
        let (one, other) = ([7, -3, i64::MIN], [5, 4, i64::MAX]);
        let (mut forth, mut back) = (one, other);
        max(&mut forth, bytemuck::bytes_of(&other));
        max(&mut back, bytemuck::bytes_of(&one));
        assert_eq!(forth, [7, 4, i64::MAX]);
        assert_eq!(back, forth);
        let mut left = [3, 5];
        max(&mut left, bytemuck::bytes_of(&[9i64, 0]));
        assert_eq!(left, [9, 5]);
    }

    #[test]
    #[should_panic(expected = "mean of 0 values")]
    fn the_mean_of_nothing_is_a_broken_invariant() {
        mean(&1.0f32.to_le_bytes(), 0, &mut [0.0]);
    }
}

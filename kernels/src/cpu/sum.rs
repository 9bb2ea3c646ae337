//! The sum of two gradients at a node of the reduction tree: in memory of its own, or in that of
//! one of them.
//!
//! Moves 12 bytes per parameter: reads both, writes the sum.

use super::dispatch::{Kernel, Path, Write, apply};
use super::lanes::Lanes;
use super::mean::Mean;

/// A sum of at least this many values goes past the caches: by the time it is wanted, the other
/// chunks of its partition were there.
const STREAMED_LEN_MIN: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
struct Sum;

impl Kernel<0> for Sum {
    #[inline(always)]
    fn update<V: Lanes>(&self, _: &Mean, left: V, right: V, _: [V; 0]) -> (V, [V; 0]) {
        (left + right, [])
    }
}

/// `sum = left + right`, which are little-endian f32 at any alignment.
///
/// # Panics
///
/// If the lengths differ.
pub fn add(left: &[u8], right: &[u8], sum: &mut [f32]) {
    let write = if sum.len() < STREAMED_LEN_MIN { Write::Cached } else { Write::Streamed };
    apply((Path::widest(), write), &Mean::NONE, &Sum, left, right, [], sum);
}

/// `left += right`, where `right` is little-endian f32 at any alignment.
///
/// # Panics
///
/// If the lengths differ.
pub fn add_assign(left: &mut [f32], right: &[u8]) {
    assert_eq!(left.len() * 4, right.len(), "sum of different lengths");
    for (left, right) in left.iter_mut().zip(right.as_chunks().0) {
        *left += f32::from_le_bytes(*right);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::tensor::Values;

    use super::*;

    #[test]
    fn every_way_to_add_gives_the_same_bits() {
        for len in (0..70).chain([STREAMED_LEN_MIN, STREAMED_LEN_MIN + 13]) {
            let value = |at: usize| (at as f32 * 0.37 - 9.0) * if at.is_multiple_of(3) { 1e-6 } else { 1e3 };
            let left: Vec<f32> = (0..len).map(value).collect();
            let right: Vec<f32> = (0..len).map(|at| value(at + 5)).collect();
            let expected: Vec<u32> = left.iter().zip(&right).map(|(l, r)| (l + r).to_bits()).collect();
            for shift in 0..4 {
                let bytes = |values: &[f32]| {
                    let mut raw = vec![0; shift];
                    raw.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                    raw
                };
                let mut sum = vec![f32::NAN; len];
                add(&bytes(&left)[shift..], &bytes(&right)[shift..], &mut sum);
                assert!(sum.iter().map(|sum| sum.to_bits()).eq(expected.iter().copied()), "{len} values");
            }
        }
    }

    proptest! {
        #[test]
        fn adding_bytes_equals_merging_values(a in proptest::collection::vec(-1e6f32..1e6, 1..70)) {
            let right: Vec<f32> = a.iter().map(|v| v * 0.37 - 1.0).collect();
            let mut merged = Values::F32(a.clone());
            merged.merge(&Values::F32(right.clone()));
            let (mut added, right) = (a, Values::F32(right));
            add_assign(&mut added, right.bytes());
            prop_assert_eq!(merged, Values::F32(added));
        }
    }
}

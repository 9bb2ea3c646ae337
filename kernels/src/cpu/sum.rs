//! The sum of two gradients at a node of the reduction tree, in memory of its own. Moves 12 bytes per parameter: reads both, writes the sum.

use super::dispatch::{Kernel, Path, Write, apply};
use super::lanes::Lanes;

/// A sum of at least this many values goes past the caches: by the time it is wanted, the other chunks of its partition were there.
const STREAMED_LEN_MIN: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
struct Sum;

impl Kernel<0> for Sum {
    #[inline(always)]
    fn update<V: Lanes>(&self, left: V, right: V, _: [V; 0]) -> (V, [V; 0]) {
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
    apply((Path::widest(), write), &Sum, left, right, [], sum);
}

#[cfg(test)]
mod tests {
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
}

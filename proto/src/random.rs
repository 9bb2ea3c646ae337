//! Keyed randomness: every random number of a job is a pure function of (job seed, purpose,
//! position).
//!
//! Process state never enters. So every process computes the same record order, initial weights and
//! dropout masks, however often. The generator is SplitMix64 (Steele, Lea, Flood 2014), whose
//! output function is a bijection with good avalanche. The hash of a stream's key is its starting
//! state, which separates the streams.

use crate::ids::MicrobatchId;

/// A deterministic stream of random numbers for one purpose.
///
/// ```
/// use proto::random::Keyed;
/// let a = Keyed::new(7, "init/layer.weight", 0).next_u64();
/// assert_eq!(a, Keyed::new(7, "init/layer.weight", 0).next_u64());
/// assert_ne!(a, Keyed::new(7, "init/layer.bias", 0).next_u64());
/// ```
#[derive(Clone, Debug)]
pub struct Keyed {
    state: u64,
}

impl Keyed {
    /// Returns the stream for `purpose` (a tensor name, "dropout", "order") at `position`
    /// (microbatch, epoch, row).
    pub fn new(seed: u64, purpose: &str, position: u64) -> Self {
        Self { state: key(seed, purpose, position) }
    }

    /// Returns the next 64 uniform bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// Returns a uniform number in `[0, 1)` with 24 bits, exact in f32.
    pub fn next_f32(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 * (1.0 / (1u32 << 24) as f32)
    }

    /// Returns a uniform number in `[0, 1)` with 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns a uniform number in `[low, high)`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.next_f32()
    }

    /// Returns a standard normal number by the Box-Muller transform (two uniform numbers for each,
    /// computed in f64). Logarithm and cosine are not the C library's, which differ between
    /// versions and processors.
    pub fn normal(&mut self) -> f32 {
        let u = ((self.next_u64() >> 11) as f64 + 1.0) * (1.0 / (1u64 << 53) as f64);
        let v = self.next_f64();
        ((-2.0 * libm::log(u)).sqrt() * libm::cos(std::f64::consts::TAU * v)) as f32
    }
}

/// Returns the key of every random number in a microbatch of a job with `seed`, such as dropout.
pub fn microbatch_key(seed: u64, microbatch: MicrobatchId) -> u64 {
    key(seed, "dropout", microbatch.get())
}

/// Returns the 64-bit key of (seed, purpose, position). It also seeds a library's own generator for
/// keyed dropout.
pub fn key(seed: u64, purpose: &str, position: u64) -> u64 {
    let mut state = mix(seed ^ GOLDEN);
    for byte in purpose.bytes() {
        state = mix(state ^ u64::from(byte)).wrapping_add(GOLDEN);
    }
    mix(state ^ mix(position.wrapping_add(GOLDEN)))
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Applies SplitMix64's output function (variant 13 of Stafford's mixers), a bijection on `u64`.
pub(crate) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_by_seed_purpose_and_position() {
        let first = |seed, purpose, position| Keyed::new(seed, purpose, position).next_u64();
        let all = [first(1, "a", 0), first(2, "a", 0), first(1, "b", 0), first(1, "a", 1), first(1, "", 0)];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{all:?}");
        }
    }

    #[test]
    fn normal_has_mean_zero_and_variance_one() {
        let mut keyed = Keyed::new(3, "normal", 0);
        let values: Vec<f64> = (0..20_000).map(|_| f64::from(keyed.normal())).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.03, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.05, "variance {variance}");
    }
}

//! Mixup: training records that are mixed with each other (Zhang et al. 2018), as torchvision's
//! `MixUp` does it.

use serde::{Deserialize, Serialize};

use crate::random::Keyed;

/// Mixture of each training record with the one before it in its microbatch, the first one with the
/// last. One share is drawn for each microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table with `alpha` and `classes`")]
pub struct MixupSpec {
    /// Both parameters of the beta distribution of a record's own share; above 0. Default 1: all
    /// shares are equally probable.
    #[serde(default = "one")]
    pub alpha: f64,
    /// Number of classes, which is the number of the network's outputs.
    pub classes: usize,
}

impl MixupSpec {
    /// Draws the share that records of a microbatch keep of themselves, in [0, 1]. It depends on
    /// the seed and the microbatch's number in the whole job alone, and so on the epoch.
    ///
    /// ```
    /// let mixup = proto::spec::MixupSpec { alpha: 0.2, classes: 10 };
    /// assert_eq!(mixup.share(7, 3), mixup.share(7, 3));
    /// assert!((0.0..=1.0).contains(&mixup.share(7, 4)));
    /// ```
    pub fn share(self, seed: u64, microbatch: u64) -> f64 {
        let mut keyed = Keyed::new(seed, "mixup", microbatch);
        let [own, other] = [(); 2].map(|()| log_gamma(&mut keyed, self.alpha));
        1.0 / (1.0 + libm::exp(other - own))
    }
}

/// Smallest parameter of the distribution. Below, every share is 0 or 1.
pub(super) const ALPHA_MIN: f64 = 1e-3;

/// Largest parameter of the distribution. Above, every share is one half.
pub(super) const ALPHA_MAX: f64 = 1e6;

/// Draws the logarithm of a number with a gamma distribution (Marsaglia and Tsang 2000), which
/// has no least value that a small `alpha` could fall below.
fn log_gamma(keyed: &mut Keyed, alpha: f64) -> f64 {
    if alpha < 1.0 {
        let larger = log_gamma(keyed, alpha + 1.0);
        return larger + libm::log(above_zero(keyed)) / alpha;
    }
    let d = alpha - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = f64::from(keyed.normal());
        let v = 1.0 + c * x;
        if v <= 0.0 {
            continue;
        }
        let v = v * v * v;
        if libm::log(above_zero(keyed)) < 0.5 * x * x + d - d * v + d * libm::log(v) {
            return libm::log(d) + libm::log(v);
        }
    }
}

/// Draws a uniform number in (0, 1].
fn above_zero(keyed: &mut Keyed) -> f64 {
    1.0 - keyed.next_f64()
}

const fn one() -> f64 {
    1.0
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Golden {
        alpha: f64,
        seed: u64,
        microbatch: u64,
        share: f64,
    }

    #[test]
    fn shares_are_those_of_the_definition() {
        #[derive(Deserialize)]
        struct File {
            shares: Vec<Golden>,
        }
        let File { shares } = serde_json::from_str(include_str!("../../../tests/golden/mixup.json")).unwrap();
        assert!(shares.len() > 30);
        for Golden { alpha, seed, microbatch, share } in shares {
            let found = MixupSpec { alpha, classes: 2 }.share(seed, microbatch);
            assert!(
                (found - share).abs() < 1e-12,
                "alpha {alpha}, {seed}, {microbatch}: {found}, not {share}"
            );
        }
    }

    #[test]
    fn shares_have_the_mean_and_the_variance_of_their_distribution() {
        for alpha in [1e-3, 0.2, 1.0, 3.0, 1e6] {
            let spec = MixupSpec { alpha, classes: 2 };
            let shares: Vec<f64> = (0..20_000).map(|microbatch| spec.share(5, microbatch)).collect();
            assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)), "alpha {alpha}");
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            let squares = shares.iter().map(|share| (share - 0.5).powi(2)).sum::<f64>();
            let (found, expected) = (squares / shares.len() as f64, 0.25 / (2.0 * alpha + 1.0));
            assert!((mean - 0.5).abs() < 0.01, "alpha {alpha}: mean {mean}");
            assert!((found / expected - 1.0).abs() < 0.05, "alpha {alpha}: variance {found}, not {expected}");
        }
    }
}

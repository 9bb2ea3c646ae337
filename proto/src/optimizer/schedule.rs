//! Learning-rate schedules: pure functions of the step, the same bits in every process and on every
//! CPU.
//!
//! The formulas are those of `torch.optim.lr_scheduler` in closed form. Only `+ - * /` of f64 are
//! used: the platform's `pow` and `cos` may differ in the last bit from one C library, or one CPU,
//! to the next.

use std::f64::consts::FRAC_PI_2;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The `schedule` table inside `[optimizer]`: how the learning rate changes over a job's steps.
///
/// The first `warmup_steps` steps climb linearly from near zero to the full rate. The schedule of
/// `kind` starts after them, with its own step 0. (PyTorch: `SequentialLR([LinearLR, ..],
/// milestones=[warmup_steps])`.)
///
/// ```
/// use proto::optimizer::{Schedule, ScheduleKind};
///
/// let schedule = Schedule { kind: ScheduleKind::Cosine, warmup_steps: 3, ..Schedule::default() };
/// let factors: Vec<f64> =
///     [0, 1, 2, 3, 8, 13].into_iter().map(|step| schedule.factor(step, 13)).collect();
/// assert_eq!(factors[..4], [0.25, 0.5, 0.75, 1.0]);
/// assert!((factors[4] - 0.5).abs() < 1e-15); // half way from step 3 to step 13
/// assert_eq!(factors[5], 0.0);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of a schedule")]
pub struct Schedule {
    /// The shape after the warm-up. Default: constant.
    #[serde(default)]
    pub kind: ScheduleKind,
    /// Number of first steps below the full rate. Step t of them has the factor `(t + 1) /
    /// (warmup_steps + 1)`, so that no step has a rate of zero. Default 0. Use some percent of the
    /// job for adam with a large batch. (PyTorch: `LinearLR(start_factor=1 / (warmup_steps + 1),
    /// total_iters=warmup_steps)`.)
    #[serde(default)]
    pub warmup_steps: u64,
    /// step: number of steps between two reductions, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// step, exponential: factor of the rate at each reduction or at each step, in (0, 1]. Default
    /// for step 0.1. Exponential has no default, because 0.1 at each step would stop the training
    /// at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    /// cosine: the step, counted from the start of the job, at which the rate reaches its minimum
    /// and stays there. Default: the end of the job. Set it if the job may be prolonged later, so
    /// that the earlier steps keep their rates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// cosine: the factor at the end, in [0, 1]. Default 0. (PyTorch's `eta_min` divided by the
    /// learning rate.)
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum_factor: Option<f64>,
    /// table: factors of the rate, each with the first step that has it, in the order of the steps,
    /// from step 0 on. A factor is at least 0. At most 65,536 of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub table: Vec<(u64, f64)>,
}

/// Most entries of [`Schedule::table`].
const TABLE_MAX: usize = 1 << 16;

/// The shapes of a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// The full rate throughout.
    #[default]
    Constant,
    /// `StepLR`: the rate is multiplied by `factor` after each `every_steps` steps.
    Step,
    /// `ExponentialLR`: the rate is multiplied by `factor` after each step.
    Exponential,
    /// `CosineAnnealingLR`: half a cosine from the full rate to the minimum (Loshchilov and Hutter,
    /// 2016), no restarts.
    Cosine,
    /// The factors that the job lists: any schedule that does not look at the training.
    Table,
}

impl Schedule {
    /// Returns the factor of the learning rate at `step` (from 0) of a job of `total_steps`: in [0,
    /// 1], or as the table says.
    ///
    /// The schedule must be valid; a missing setting counts as "no change" here.
    pub fn factor(&self, step: u64, total_steps: u64) -> f64 {
        let Some(step_after_warmup) = step.checked_sub(self.warmup_steps) else {
            return (step as f64 + 1.0) / (self.warmup_steps as f64 + 1.0);
        };
        match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Step => {
                let reductions = step_after_warmup / self.every_steps.unwrap_or(u64::MAX).max(1);
                power(self.factor.unwrap_or(0.1), reductions)
            }
            ScheduleKind::Exponential => power(self.factor.unwrap_or(1.0), step_after_warmup),
            ScheduleKind::Cosine => {
                let steps = self.total_steps.unwrap_or(total_steps).saturating_sub(self.warmup_steps);
                let minimum = self.minimum_factor.unwrap_or(0.0);
                minimum + (1.0 - minimum) * half_cosine(step_after_warmup, steps)
            }
            ScheduleKind::Table => {
                let after = self.table.partition_point(|(first, _)| *first <= step_after_warmup);
                after.checked_sub(1).map_or(1.0, |at| self.table[at].1)
            }
        }
    }

    /// Appends one message for each violation.
    pub(super) fn check(&self, violations: &mut Vec<String>) {
        let kind = self.kind;
        for (name, given, owners) in [
            ("every_steps", self.every_steps.is_some(), &[ScheduleKind::Step][..]),
            ("factor", self.factor.is_some(), &[ScheduleKind::Step, ScheduleKind::Exponential]),
            ("total_steps", self.total_steps.is_some(), &[ScheduleKind::Cosine]),
            ("minimum_factor", self.minimum_factor.is_some(), &[ScheduleKind::Cosine]),
            ("table", !self.table.is_empty(), &[ScheduleKind::Table]),
        ] {
            if given && !owners.contains(&kind) {
                let owners: Vec<_> = owners.iter().map(ToString::to_string).collect();
                violations.push(format!(
                    "optimizer.schedule.{name}: not a setting of kind `{kind}`; remove it or choose a kind that has \
                     it: {}",
                    owners.join(", ")
                ));
            }
        }
        for (name, missing) in [
            ("every_steps", kind == ScheduleKind::Step && self.every_steps.is_none()),
            ("factor", kind == ScheduleKind::Exponential && self.factor.is_none()),
            ("table", kind == ScheduleKind::Table && self.table.is_empty()),
        ] {
            if missing {
                violations.push(format!("optimizer.schedule.{name}: missing, kind `{kind}` needs it"));
            }
        }
        if self.table.len() > TABLE_MAX {
            violations.push(format!(
                "optimizer.schedule.table: {} entries, expected at most {TABLE_MAX}",
                self.table.len()
            ));
        }
        let begins = self.table.first().is_none_or(|(first, _)| *first == 0);
        if !begins || !self.table.is_sorted_by(|(one, _), (next, _)| one < next) {
            violations.push("optimizer.schedule.table: expected rising steps, from 0 on".to_owned());
        }
        if let Some((step, factor)) =
            self.table.iter().find(|(_, factor)| !(*factor >= 0.0 && factor.is_finite()))
        {
            violations.push(format!(
                "optimizer.schedule.table: factor {factor} from step {step} on, expected a finite number, at least 0"
            ));
        }
        if self.every_steps == Some(0) {
            violations.push("optimizer.schedule.every_steps = 0, expected at least 1".to_owned());
        }
        if let Some(factor) = self.factor.filter(|&factor| !(factor > 0.0 && factor <= 1.0)) {
            violations.push(format!("optimizer.schedule.factor = {factor}, expected a number in (0, 1]"));
        }
        if let Some(minimum) = self.minimum_factor.filter(|minimum| !(0.0..=1.0).contains(minimum)) {
            violations
                .push(format!("optimizer.schedule.minimum_factor = {minimum}, expected a number in [0, 1]"));
        }
        if let Some(total_steps) = self.total_steps.filter(|&total_steps| total_steps <= self.warmup_steps) {
            violations.push(format!(
                "optimizer.schedule.total_steps = {total_steps}, expected more than the {} of `warmup_steps`, which \
                 it includes",
                self.warmup_steps
            ));
        }
    }
}

impl fmt::Display for ScheduleKind {
    /// Writes the name in the job file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Constant => "constant",
            Self::Step => "step",
            Self::Exponential => "exponential",
            Self::Cosine => "cosine",
            Self::Table => "table",
        })
    }
}

/// Raises `base` to the power of `exponent` by repeated squaring, in f64. The bits are equal on
/// every machine.
///
/// The relative error is about `exponent * 1e-16`: below an f32's last bit for every result that is
/// not negligible.
pub fn power(base: f64, exponent: u64) -> f64 {
    let (mut square, mut rest, mut result) = (base, exponent, 1.0);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

/// Returns `(1 + cos(pi * step / steps)) / 2`, and 0 from `steps` on.
///
/// The value is the square of `cos(angle / 2)`, which keeps full relative precision where `1 + cos`
/// cancels. One sine on the first eighth of the circle suffices.
fn half_cosine(step: u64, steps: u64) -> f64 {
    if step >= steps {
        return 0.0;
    }
    let remaining = steps - step;
    let half_angle = FRAC_PI_2 * (step.min(remaining) as f64 / steps as f64);
    let square = sine(half_angle) * sine(half_angle);
    if step < remaining { 1.0 - square } else { square }
}

/// Returns the sine of `x` in [0, pi / 4] by its Taylor series. The first omitted term is below
/// 5e-17.
fn sine(x: f64) -> f64 {
    let square = x * x;
    let mut sum = 1.0;
    for n in (1..8).rev() {
        sum = 1.0 - square / f64::from(2 * n * (2 * n + 1)) * sum;
    }
    x * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_is_never_wasted() {
        for kind in
            [ScheduleKind::Constant, ScheduleKind::Step, ScheduleKind::Exponential, ScheduleKind::Cosine]
        {
            for warmup_steps in [0, 1, 7] {
                let schedule = Schedule {
                    kind,
                    warmup_steps,
                    every_steps: Some(3),
                    factor: Some(0.5),
                    ..Schedule::default()
                };
                assert!(schedule.factor(0, 20) > 0.0, "{schedule:?}");
                assert_eq!(schedule.factor(warmup_steps, 20), 1.0, "{schedule:?}");
            }
        }
    }

    #[test]
    fn the_cosine_falls_at_every_step_and_stays_at_its_minimum() {
        let schedule =
            Schedule { kind: ScheduleKind::Cosine, minimum_factor: Some(0.1), ..Schedule::default() };
        for step in 0..1000 {
            assert!(schedule.factor(step, 1000) > schedule.factor(step + 1, 1000), "step {step}");
        }
        assert_eq!(schedule.factor(1000, 1000), 0.1);
        assert_eq!(schedule.factor(5000, 1000), 0.1);
    }

    #[test]
    fn a_table_holds_each_factor_until_the_next() {
        let table = vec![(0, 0.5), (3, 2.0), (4, 0.0)];
        let schedule = Schedule { kind: ScheduleKind::Table, table, ..Schedule::default() };
        let factors: Vec<f64> = (0..6).map(|step| schedule.factor(step, 6)).collect();
        assert_eq!(factors, [0.5, 0.5, 0.5, 2.0, 0.0, 0.0]);
        let violations = |table: Vec<(u64, f64)>| {
            let mut violations = Vec::new();
            Schedule { table, ..schedule.clone() }.check(&mut violations);
            violations.join("; ")
        };
        assert_eq!(violations(schedule.table.clone()), "");
        assert!(violations(Vec::new()).contains("table: missing"));
        assert!(violations(vec![(1, 1.0)]).contains("expected rising steps, from 0 on"));
        assert!(violations(vec![(0, 1.0), (0, 2.0)]).contains("expected rising steps"));
        assert!(violations(vec![(0, f64::NAN)]).contains("expected a finite number"));
        assert!(violations(vec![(0, 1.0); TABLE_MAX + 1]).contains("at most 65536"));
    }

    #[test]
    fn a_warm_up_longer_than_the_job_still_climbs() {
        let schedule = Schedule { kind: ScheduleKind::Cosine, warmup_steps: 9, ..Schedule::default() };
        assert_eq!(schedule.factor(4, 5), 0.5);
        assert_eq!(schedule.factor(9, 5), 0.0);
    }

    #[test]
    fn own_arithmetic_is_as_good_as_the_platforms() {
        for step in 0..=1000_u32 {
            let expected = (f64::from(step) * std::f64::consts::PI / 2000.0).cos().powi(2);
            let found = half_cosine(u64::from(step), 1000);
            assert!((found - expected).abs() <= 4e-16, "step {step}: {found:e} against {expected:e}");
        }
        for exponent in [0, 1, 2, 3, 10, 100, 1000, 12_345_u32] {
            let expected = 0.999_f64.powf(f64::from(exponent));
            let found = power(0.999, u64::from(exponent));
            assert!(
                (found / expected - 1.0).abs() <= 1e-12,
                "exponent {exponent}: {found:e} against {expected:e}"
            );
        }
    }

    #[test]
    fn settings_of_another_kind_and_impossible_values_are_named() {
        let schedule = Schedule {
            kind: ScheduleKind::Exponential,
            warmup_steps: 10,
            every_steps: Some(0),
            factor: None,
            total_steps: Some(10),
            minimum_factor: Some(f64::NAN),
            table: Vec::new(),
        };
        let mut violations = Vec::new();
        schedule.check(&mut violations);
        let named = |name: &str| violations.iter().filter(|text| text.contains(name)).count();
        assert_eq!(named("optimizer.schedule.every_steps"), 2, "{violations:?}");
        assert_eq!(named("optimizer.schedule.factor: missing"), 1, "{violations:?}");
        assert_eq!(named("optimizer.schedule.total_steps"), 2, "{violations:?}");
        assert_eq!(named("optimizer.schedule.minimum_factor"), 2, "{violations:?}");
    }
}

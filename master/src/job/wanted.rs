//! The number of workers for which a job has work. Pure.

use proto::plan::Plan;
use proto::spec::WorkersSpec;

/// Returns for how many workers a job has work, within its bounds. `plan` is known once the data is
/// counted. `delay`: steps that computing may run ahead of applying; `None`: no bound.
///
/// A worker more than there are microbatches that may be computed at once would only wait.
pub(super) fn workers(bounds: WorkersSpec, plan: Option<&Plan>, delay: Option<u32>) -> u64 {
    let Some(plan) = plan else { return bounds.min.into() };
    let all = plan.microbatches_per_epoch().saturating_mul(plan.epochs);
    let steps = delay.map(|delay| u64::from(delay) + 1);
    let at_once = steps.map_or(all, |steps| steps.saturating_mul(plan.microbatches_per_step.into()).min(all));
    at_once.min(bounds.max.into()).max(bounds.min.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: WorkersSpec = WorkersSpec { min: 2, max: 64 };

    #[test]
    fn a_job_has_work_for_as_many_workers_as_microbatches_may_be_computed_at_once() {
        let plan = Plan { records: 800, micro: 8, microbatches_per_step: 16, epochs: 3 };
        assert_eq!(workers(BOUNDS, Some(&plan), Some(0)), 16);
        assert_eq!(workers(BOUNDS, Some(&plan), Some(1)), 32);
        assert_eq!(workers(BOUNDS, Some(&plan), Some(u32::MAX)), 64, "its own bound");
        assert_eq!(workers(BOUNDS, Some(&plan), None), 64);
        let small = Plan { records: 24, micro: 8, microbatches_per_step: 16, epochs: 1 };
        assert_eq!(workers(BOUNDS, Some(&small), Some(0)), 3, "all its microbatches");
    }

    #[test]
    fn a_job_wants_at_least_what_it_needs_and_no_more_before_its_data_is_counted() {
        let one = Plan { records: 8, micro: 8, microbatches_per_step: 1, epochs: 1 };
        assert_eq!(workers(BOUNDS, Some(&one), Some(0)), 2);
        assert_eq!(workers(BOUNDS, None, Some(0)), 2);
    }
}

//! Why a worker gets no lease. Every refusal returns its reason, and users read the last one of
//! each idle worker. Pure.
//!
//! ```text
//!   fleet                  NotSeen, NotAsked, Drains, Hangs, WorksFor
//!   scheduler              StandsBy, OtherClass, OtherProgram, OtherDevice, NoClass
//!   phase of the job       Paused, JobWaits, Indexing, Initializing, Surveying, Ending
//!   dispatcher             NothingLeft, AllHandedOut, Closing, Measuring, HoldsEnough,
//!                          TooFarAhead, TooSlow, LanesKept
//! ```

use std::sync::Arc;
use std::time::Duration;

use proto::ids::Step;
use proto::numerics::Numerics;
use proto::pb;

use crate::device::{WantedDevice, WorkerDevice};
use crate::speeds::Slow;

/// The reason why a worker gets no lease of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The worker registered a moment ago, and no job has seen it.
    NotSeen,
    /// The worker has not asked for work since it registered.
    NotAsked,
    /// The worker drains.
    Drains,
    /// The worker does not get on with something that it was given before.
    Hangs,
    /// The worker holds leases of this other job.
    WorksFor(String),
    /// The job takes at most so many workers, and others came first.
    StandsBy { max: u32 },
    /// The worker is of this numerics class, and the job computes with another one.
    OtherClass(Arc<Numerics>),
    /// The worker runs the program of another job, or the job needs one that it does not run.
    OtherProgram,
    /// The worker computes on this device, and the job wants another one.
    OtherDevice { has: WorkerDevice, wants: WantedDevice },
    /// The numerics class of the job is not decided.
    NoClass,
    /// A user paused the job.
    Paused,
    /// The job waits for workers or ps.
    JobWaits,
    /// Other workers hold all files that are to be counted.
    Indexing,
    /// Another worker initializes the model, or the store is asked first.
    Initializing,
    /// The ps are asked what they have applied.
    Surveying,
    /// The job trains no more.
    Ending,
    /// Every microbatch of all these epochs is handed out.
    NothingLeft { epochs: u64 },
    /// All records of a job that only evaluates or predicts are handed out.
    AllHandedOut,
    /// The job closes, so it begins no new step.
    Closing,
    /// The next epoch begins when the one before it is measured.
    Measuring,
    /// The worker holds as many leases as it may.
    HoldsEnough,
    /// The next work is of `step`, and its gradients must wait for step `undone` for too long.
    TooFarAhead { step: Step, undone: Step },
    /// The other workers bring the rest of this step to its end sooner without this worker.
    TooSlow { step: Step, slow: Option<Slow> },
    /// Other workers go on with the lanes of what is left of this step, as far as is known before
    /// `again`.
    LanesKept { step: Step, again: Duration },
}

impl Why {
    /// Returns when there may be a lease, although nothing else happened.
    pub(crate) const fn again(&self) -> Option<Duration> {
        match self {
            Self::LanesKept { again, .. } => Some(*again),
            _ => None,
        }
    }

    /// Returns the reason in one word, as it travels.
    pub(crate) const fn word(&self) -> pb::Why {
        match self {
            Self::NotSeen => pb::Why::NotSeen,
            Self::NotAsked => pb::Why::NotAsked,
            Self::Drains => pb::Why::Drains,
            Self::Hangs => pb::Why::Hangs,
            Self::WorksFor(_) => pb::Why::WorksElsewhere,
            Self::StandsBy { .. } => pb::Why::StandsBy,
            Self::OtherClass(_) => pb::Why::OtherClass,
            Self::OtherProgram => pb::Why::OtherProgram,
            Self::OtherDevice { .. } => pb::Why::OtherDevice,
            Self::NoClass => pb::Why::NoClass,
            Self::Paused => pb::Why::Paused,
            Self::JobWaits => pb::Why::JobWaits,
            Self::Indexing => pb::Why::Indexing,
            Self::Initializing => pb::Why::Initializing,
            Self::Surveying => pb::Why::Surveying,
            Self::Ending => pb::Why::Ending,
            Self::NothingLeft { .. } | Self::AllHandedOut => pb::Why::NothingLeft,
            Self::Closing => pb::Why::Closing,
            Self::Measuring => pb::Why::Measuring,
            Self::HoldsEnough => pb::Why::HoldsEnough,
            Self::TooFarAhead { .. } => pb::Why::TooFarAhead,
            Self::TooSlow { .. } | Self::LanesKept { .. } => pb::Why::TooSlow,
        }
    }

    /// Returns the reason for people, as it is at `now`. It fits one worker and several.
    pub(crate) fn reason(&self, now: Duration) -> String {
        match self {
            Self::NotSeen => "registered a moment ago".to_owned(),
            Self::NotAsked => "no request for work yet".to_owned(),
            Self::Drains => "draining, so no new work".to_owned(),
            Self::Hangs => "hanging in earlier work, so no new work".to_owned(),
            Self::WorksFor(job) => format!("at work for {job}"),
            Self::StandsBy { max: 1 } => "standing by, the job takes 1 worker".to_owned(),
            Self::StandsBy { max } => format!("standing by, the job takes at most {max} workers"),
            Self::OtherClass(numerics) => format!("standing by, of another numerics class: {numerics}"),
            Self::OtherProgram => "standing by, it does not run the program of this job".to_owned(),
            Self::OtherDevice { has, wants } => {
                format!("standing by, on {has}, and the job takes workers {wants}")
            }
            Self::NoClass => "the numerics class of the job is not decided".to_owned(),
            Self::Paused => "a user paused the job".to_owned(),
            Self::JobWaits => "the job waits, see its state".to_owned(),
            Self::Indexing => "no data file is left to count".to_owned(),
            Self::Initializing => "the model is not initialized".to_owned(),
            Self::Surveying => "the ps are asked what they have applied".to_owned(),
            Self::Ending => "the job trains no more".to_owned(),
            Self::NothingLeft { epochs } => format!("epoch {epochs} of {epochs} has no task left"),
            Self::AllHandedOut => "every record is handed out".to_owned(),
            Self::Closing => "the job closes and begins no new step".to_owned(),
            Self::Measuring => "the next epoch begins when this one is measured".to_owned(),
            Self::HoldsEnough => "as many leases as a worker may hold".to_owned(),
            Self::TooFarAhead { step, undone } => {
                format!("step {step} is too far ahead of step {undone}, which is not done")
            }
            Self::TooSlow { step, slow: None } => {
                format!("the other workers finish step {step} sooner without it")
            }
            Self::LanesKept { step, .. } => format!("other workers go on with their lanes of step {step}"),
            Self::TooSlow { slow: Some(Slow { time, usual, again }), .. } => {
                let millis = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
                let again = match again.saturating_sub(now) {
                    Duration::ZERO => "now".to_owned(),
                    again => format!("in {:.1} s", again.as_secs_f64()),
                };
                format!(
                    "takes {} for a microbatch, others {}; it is tried again {again}",
                    millis(*time),
                    millis(*usual)
                )
            }
        }
    }

    /// Returns what users are told of idle workers with this reason, without their names.
    pub(crate) fn idle(&self, now: Duration) -> pb::Idle {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let slow = match self {
            Self::TooSlow { slow: Some(slow), .. } => Some(pb::Slow {
                microbatch_us: micros(slow.time),
                usual_us: micros(slow.usual),
                again_ms: micros(slow.again.saturating_sub(now)) / 1000,
            }),
            _ => None,
        };
        let numerics = match self {
            Self::OtherClass(numerics) => Some(Numerics::clone(numerics).into()),
            _ => None,
        };
        pb::Idle { why: self.word().into(), reason: self.reason(now), slow, numerics, ..Default::default() }
    }
}

#[cfg(test)]
mod tests {
    use proto::spec::DeviceKind;

    use super::*;

    #[test]
    fn a_reason_says_its_numbers() {
        let now = Duration::from_secs(10);
        let slow = |again| Slow {
            time: Duration::from_micros(512_300),
            usual: Duration::from_millis(140),
            again: Duration::from_millis(again),
        };
        let too_slow = |again| Why::TooSlow { step: Step(7), slow: Some(slow(again)) };
        for (why, reason) in [
            (Why::NothingLeft { epochs: 2 }, "epoch 2 of 2 has no task left"),
            (
                Why::TooFarAhead { step: Step(9), undone: Step(3) },
                "step 9 is too far ahead of step 3, which is not done",
            ),
            (
                too_slow(11_900),
                "takes 512.3 ms for a microbatch, others 140.0 ms; it is tried again in 1.9 s",
            ),
            (too_slow(9_000), "takes 512.3 ms for a microbatch, others 140.0 ms; it is tried again now"),
            (Why::TooSlow { step: Step(7), slow: None }, "the other workers finish step 7 sooner without it"),
            (
                Why::LanesKept { step: Step(7), again: Duration::ZERO },
                "other workers go on with their lanes of step 7",
            ),
            (Why::StandsBy { max: 1 }, "standing by, the job takes 1 worker"),
            (
                Why::OtherDevice {
                    has: WorkerDevice::told("cuda:1", 8 << 30).expect("a device"),
                    wants: WantedDevice { kind: Some(DeviceKind::Cuda), memory_bytes: 16 << 30 },
                },
                "standing by, on cuda:1 with 8.0 GiB, and the job takes workers on a CUDA device with at least \
                 16.0 GiB",
            ),
        ] {
            assert_eq!(why.reason(now), reason);
        }
        let told = too_slow(11_900).idle(now);
        assert_eq!((told.why(), told.slow.expect("its speed").again_ms), (pb::Why::TooSlow, 1900));
    }
}

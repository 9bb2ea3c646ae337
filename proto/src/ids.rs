//! Newtypes for every id and counter, so that two bare `u64` never stand side by side.
//!
//! Each type wraps a `u64`, or a `u32` for small indices. It is ordered, printed and serialized as
//! its number.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// Returns the number itself.
            pub const fn get(self) -> $inner {
                self.0
            }

            /// Returns the number after this one.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0 + 1)
            }

            /// Returns the number as an index into memory.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

number!(
    /// A job, numbered by the master from 1. Users also name it `NAME-ID`.
    JobId(u64)
);
number!(
    /// One process start of a worker or ps, numbered by the master from 1 and never reused.
    IncarnationId(u64)
);
number!(
    /// The part of a job's model that one ps holds. 0-based within the job.
    PartitionId(u32)
);
number!(
    /// A chunk of a dense tensor: its 0-based index in the job's
    /// [`Layout`](crate::placement::Layout).
    ChunkId(u32)
);
number!(
    /// A unit of work that the master hands out, numbered within the job.
    TaskId(u64)
);
number!(
    /// One time-limited grant of a task; never reused while a master lives.
    LeaseId(u64)
);
number!(
    /// One pass over the data set, 0-based.
    Epoch(u64)
);
number!(
    /// One update of the model, 0-based over the whole job.
    Step(u64)
);
number!(
    /// Number of steps applied to the weights; version 0 is the initial weights.
    Version(u64)
);
number!(
    /// The records of one gradient, 0-based over the whole job.
    MicrobatchId(u64)
);
number!(
    /// Count of rewinds of a job to a checkpoint. A ps refuses pushes and pulls of an older era.
    Era(u64)
);
number!(
    /// Count of membership changes of the fleet. It is informative: no call is refused because of
    /// it.
    Generation(u64)
);

impl Step {
    /// Returns the version that this step reads when every earlier step is applied.
    pub const fn reads(self) -> Version {
        Version(self.0)
    }

    /// Returns the version that exists once this step and all before it are applied.
    pub const fn produces(self) -> Version {
        Version(self.0 + 1)
    }
}

//! Decoders of a journal's bytes as plain functions, for tests with damaged bytes (`tests/fuzz/`).

use std::time::Duration;

use prost::Message as _;
use proto::pb;
use proto::spec::LimitsSpec;

use crate::clock::Now;
use crate::ended::Ended;
use crate::events::EventLog;
use crate::job::{Job, Settings};

/// Takes up the job of a record in a journal, as a start of the master does. Returns whether the
/// record was read and fits together.
pub fn record(bytes: &[u8]) -> bool {
    let Ok(record) = pb::JobRecord::decode(bytes) else { return false };
    if let Some(status) = record.ended {
        std::hint::black_box(Ended::new(&status, LimitsSpec::default().stall).status());
        return true;
    }
    let wait = Duration::from_secs(1);
    let settings = Settings { claim: wait, ps_grace: wait, stop: wait };
    let Ok(mut job) = Job::restore(record, EventLog::default(), settings, Now::default()) else {
        return false;
    };
    // What users ask for, and what the master writes down next.
    std::hint::black_box((job.status(Now::default()), job.take_record(Now::default())));
    true
}

//! Processes of a user's script: starting them, what they say, and what follows when one ends.
//!
//! ```text
//!   pure:   restarts (what follows an end)  lines (output as lines)  variables (which may be set)
//!           devices (who gets which)  redaction (secrets in output)
//!   edge:   user (as whom)   orphans (what they leave behind)
//!           log (a bounded file)   process (a process group)   copying (its output)
//!           slot (one process after the other)   helper (one program before them)
//! ```

pub(crate) mod copying;
pub(crate) mod devices;
pub(crate) mod helper;
pub(crate) mod lines;
pub(crate) mod log;
pub(crate) mod orphans;
pub(crate) mod process;
pub(crate) mod redaction;
pub(crate) mod restarts;
pub(crate) mod slot;
pub(crate) mod user;
pub(crate) mod variables;

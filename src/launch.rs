//! Processes of a user's script: starting them, what they say, and what follows when one ends.
//!
//! ```text
//!   pure:   restarts (what follows an end)  lines (output as lines)  variables (which may be set)
//!           devices (who gets which)  redaction (secrets in output)
//!   edge:   user (as whom)   program (what is to be started)   guard (starts it, and ends it)
//!           process (a process group)   orphans (what it leaves behind)
//!           processors (near a device)  log (a bounded file)   copying (output)
//!           slot (one process after the other)   helper (one program before them)
//! ```

pub(crate) mod copying;
pub(crate) mod devices;
pub(crate) mod guard;
pub(crate) mod helper;
pub(crate) mod lines;
pub(crate) mod log;
pub(crate) mod orphans;
pub(crate) mod process;
pub(crate) mod processors;
pub(crate) mod program;
pub(crate) mod redaction;
pub(crate) mod restarts;
pub(crate) mod slot;
pub(crate) mod user;
pub(crate) mod variables;

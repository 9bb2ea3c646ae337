//! Processes of a user's script: starting them, what they say, and what follows when one ends.
//!
//! ```text
//!   pure:   restarts (what follows an end)  lines (output as lines)  variables (which may be set)
//!   edge:   log (a bounded file)   process (a process group)   slot (one process after the other)
//! ```

pub(crate) mod lines;
pub(crate) mod log;
pub(crate) mod process;
pub(crate) mod restarts;
pub(crate) mod slot;
pub(crate) mod variables;

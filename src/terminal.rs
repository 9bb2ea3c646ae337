//! The user's terminal: who writes to it, and in which words.

pub(crate) mod follow;
pub(crate) mod progress;
pub(crate) mod report;
pub(crate) mod screen;

//! The user's terminal, and the words on it.

pub(crate) mod bar;
pub(crate) mod follow;
pub(crate) mod progress;
pub(crate) mod report;
pub(crate) mod screen;

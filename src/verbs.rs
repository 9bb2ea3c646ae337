//! The verbs of `ebb`, one file each. A verb gets its parsed arguments and the
//! [`App`](crate::app::App).

pub(crate) mod cancel;
pub(crate) mod certs;
pub(crate) mod checkpoint;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod data;
pub(crate) mod evaluate;
pub(crate) mod fetch;
pub(crate) mod health;
pub(crate) mod jobs;
mod measure;
pub(crate) mod pause;
pub(crate) mod predict;
pub(crate) mod resume;
pub(crate) mod run;
pub(crate) mod scale;
pub(crate) mod status;
pub(crate) mod submit;
pub(crate) mod watch;

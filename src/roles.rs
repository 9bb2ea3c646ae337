//! The start of a role: settings, address, keys and metrics, then the role's own crate.

mod devices;
pub(crate) mod master;
pub(crate) mod numerics;
pub(crate) mod ps;
pub(crate) mod worker;

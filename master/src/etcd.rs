//! etcd as a master needs it: one leader of several masters, and a journal that only the leader can
//! write.
//!
//! ```text
//!   PREFIX leader          URL of the master that leads; ends with its lease
//!   PREFIX journal/KEY     the journal, see `journal/keys.rs` and `pieces`
//!   PREFIX staged/N        a batch of several transactions, while it is being written, see `store`
//! ```
//!
//! Every write is a transaction that compares the revision which made the leader's key: a master
//! that lost the lead cannot write, whatever it believes.

mod client;
mod election;
mod pieces;
mod store;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use self::client::Client;
pub(crate) use self::election::{Election, Leadership};
pub(crate) use self::store::EtcdStore;

/// What of etcd's API a master speaks, generated from `etcd/rpc.proto`.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    dead_code,
    clippy::all,
    reason = "generated; the .proto file is the documentation"
)]
pub(crate) mod pb {
    tonic::include_proto!("etcdserverpb");
}

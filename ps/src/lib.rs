//! The parameter server: holds partitions of any number of jobs and applies the optimizer to them.

pub mod aggregator;
pub mod ledger;
pub mod optim;

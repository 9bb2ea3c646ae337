//! Kernels for memory of the host, as functions on slices.
//!
//! A kernel is written once, over [vectors of any width](lanes), and runs with the widest that the
//! [machine](dispatch) has. Its scalar twin is the same function on single floats. Each kernel makes
//! one pass over memory.

pub(crate) mod adadelta;
pub(crate) mod adagrad;
pub(crate) mod adam;
pub mod cast;
pub(crate) mod dispatch;
pub(crate) mod ftrl;
pub(crate) mod lamb;
mod lanes;
pub(crate) mod mean;
pub(crate) mod momentum;
pub(crate) mod rmsprop;
pub(crate) mod sgd;
pub mod state;
pub mod sum;

//! The master: hands out data and knows who is alive.
#![allow(dead_code, reason = "the service that uses the pure core comes next")]

mod clock;
mod dispatcher;
mod events;
mod lease;
mod membership;
mod tasks;

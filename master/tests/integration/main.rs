//! A master over real tonic on 127.0.0.1, with scripted workers and a ps that only keeps accounts.

mod bounded;
mod control;
mod ending;
mod fake_ps;
mod fleet;
mod forwarded;
mod harness;
mod indexes;
mod jobs;
mod places;
mod sessions;
mod skips;
mod stores;
mod unreadable;

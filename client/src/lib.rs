//! What talks to a master: submit a job, follow it, fetch its results, or run all of it in this
//! process.
//!
//! The program `ebb`, a Python module and a gateway stand on this crate. It prints nothing, reads
//! no environment and parses no command line: it returns values, typed [`Event`]s and typed
//! [`Error`]s, and tells what it does by itself, such as waiting for a master, as a [`Notice`].
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use client::{Client, Dialer, Followed, Submission, results};
//!
//! # async fn example() -> client::Result<()> {
//! let patience = Duration::from_secs(30);
//! let client = Client::new(&Dialer::nearest(), "http://127.0.0.1:4700", patience)?;
//! let submission = Submission::read("digits.toml".as_ref(), &[])?;
//! let job = client.submit(submission).await?.name;
//! let mut follow = client.follow(&job);
//! let status = loop {
//!     match follow.next().await? {
//!         Followed::Event(event) => println!("{}: {:?}", event.sequence, event.kind),
//!         Followed::Ended(status) => break status,
//!     }
//! };
//! results::Folder::prepare("out".as_ref())?.fetch(&client, &status).await?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Local`] is a master, ps and workers inside this process; [`Local::client`] reaches them.

pub mod bundle;
pub mod checkpoint;
mod download;
mod error;
mod event;
#[cfg(test)]
mod fake;
mod follow;
mod jobs;
mod local;
pub mod logs;
mod notice;
pub mod pipe;
mod ready;
pub mod report;
pub mod results;
mod script;
mod shards;
mod submission;

/// Lets `fake.rs` name this crate as the program's tests do, which compile that file too.
#[cfg(test)]
extern crate self as client;

pub use net::channel::Dialer;
pub use net::security;
pub use proto::pb::event::Kind;
pub use proto::pb::{JobPurpose, JobState, JobStatus};

pub use self::error::{Error, Result};
pub use self::event::Event;
pub use self::follow::{Follow, Followed};
pub use self::jobs::{Client, failure};
pub use self::local::{Local, Options, PsMemory};
pub use self::logs::Logs;
pub use self::notice::{Notice, Notices};
pub use self::ready::{check_data, check_predictions, replace_patterns};
pub use self::script::{ScriptSubmission, is_script};
pub use self::shards::Shards;
pub use self::submission::{Start, Submission, absolute};

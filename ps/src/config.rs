//! What a ps can be told: who it is, where the master is, and every limit it has.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Options of one ps process. Where it listens is its caller's business.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Name of this ps: what a placement calls it, and what it keeps over restarts; 1 to 128 bytes.
    /// Default: `ps`.
    pub name: String,
    /// URL of the master, or of several, separated by commas: of those one leads. Default:
    /// `http://127.0.0.1:4700`.
    pub master: String,
    /// URL where workers and the master reach this ps; it is sent to them. Default:
    /// `http://127.0.0.1:4701`.
    pub url: String,
    /// Threads that one update or sum may use, at least 1. Default: one for each core. The trained
    /// bits do not depend on it. Lower it when workers compute on the same machine.
    pub threads: usize,
    /// Bytes of pushes that may be on their way in at once, over all jobs, with the sums that wait
    /// for others; more are told to come back later, but for what the oldest step lacks first, so
    /// that it ends. Default 8 GiB. Lower it on a machine with less memory, raise it when workers
    /// report that this ps is full.
    pub push_bytes_max: u64,
    /// How long the chunks of one push may take to arrive, and the weights of one pull to be read.
    /// Default 60 s. Raise it for slow networks, and for backward passes that take longer: a push
    /// begins with their first gradient.
    #[serde(with = "proto::duration")]
    pub push_timeout: Duration,
    /// Versions of one partition that are older than those it keeps and are still being read; with
    /// more, pulls of another version are told to come back later. Default 16. Each costs the
    /// partition's size.
    pub pulled_versions_max: usize,
    /// Bytes of weights of the largest partition it takes. Default 4 GiB. Memory is several times
    /// that: two to three versions, the optimizer's slots, and sums in progress.
    pub partition_bytes_max: u64,
    /// Bytes of a CUDA device that partitions may take, their sums included. Default: what is free
    /// when the ps starts, less a small part for copies. Lower it when other processes need the
    /// device's memory. Without a device it has no meaning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_bytes_max: Option<u64>,
    /// Steps of one partition that may be in progress in arrival order; in canonical order the
    /// job's delay bounds them. Default 1024. Each costs at least one sum of the partition's size.
    pub steps_in_progress_max: usize,
    /// Jobs at once. Default 64.
    pub jobs_max: usize,
    /// How long a checkpoint store that fails is tried again before the checkpoint is given up, by
    /// waits that double from 0.2 s. Default 13 s.
    #[serde(with = "proto::duration")]
    pub store_patience: Duration,
    /// How long a ps that was told to leave may wait until its jobs are saved. Default 25 s, a
    /// little less than Kubernetes gives. Raise it for large models on slow stores.
    #[serde(with = "proto::duration")]
    pub drain: Duration,
    /// Work on at most this many bytes is done where it comes up, in well under a millisecond; more
    /// of it on a thread that may block. Default 1 MiB. A simulation, which stays in one thread,
    /// has no limit.
    #[serde(skip)]
    pub inline_bytes_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "ps".to_owned(),
            master: "http://127.0.0.1:4700".to_owned(),
            url: "http://127.0.0.1:4701".to_owned(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            push_bytes_max: 8 << 30,
            push_timeout: Duration::from_secs(60),
            pulled_versions_max: 16,
            partition_bytes_max: 4 << 30,
            device_bytes_max: None,
            steps_in_progress_max: 1024,
            jobs_max: 64,
            store_patience: store::PATIENCE,
            drain: Duration::from_secs(25),
            inline_bytes_max: 1 << 20,
        }
    }
}

impl Options {
    /// Checks every setting and the relations between them.
    ///
    /// # Errors
    /// [`Error::Options`] with every violation, not just the first.
    pub fn validate(&self) -> Result<()> {
        let mut wrong = Vec::new();
        let mut check = |ok: bool, message: String| {
            if !ok {
                wrong.push(message);
            }
        };
        let name = self.name.len();
        check((1..=128).contains(&name), format!("name: {name} bytes; expected 1 to 128"));
        let mut addresses = vec![("url", self.url.as_str())];
        addresses.extend(net::failover::urls(&self.master).map(|url| ("master", url)));
        check(addresses.len() > 1, "master: empty; expected http://HOST:PORT[,..]".to_owned());
        addresses.reverse();
        for (key, url) in addresses {
            check(
                ["http://", "https://"]
                    .iter()
                    .any(|scheme| url.strip_prefix(scheme).is_some_and(|host| !host.is_empty())),
                format!("{key}: `{url}` is no URL; expected http://HOST:PORT or https://HOST:PORT"),
            );
        }
        check((1..=1024).contains(&self.threads), format!("threads: {}; expected 1 to 1024", self.threads));
        check(self.partition_bytes_max > 0, "partition_bytes_max: 0 would refuse every job".to_owned());
        check(
            self.push_bytes_max >= self.partition_bytes_max,
            format!(
                "push_bytes_max = {} is below partition_bytes_max = {}; one push brings a whole partition",
                self.push_bytes_max, self.partition_bytes_max
            ),
        );
        check(!self.push_timeout.is_zero(), "push_timeout: 0 would refuse every push".to_owned());
        check(self.steps_in_progress_max > 0, "steps_in_progress_max: 0 would refuse every push".to_owned());
        check(self.pulled_versions_max > 0, "pulled_versions_max: 0 would refuse every pull".to_owned());
        check(self.jobs_max > 0, "jobs_max: 0 would refuse every job".to_owned());
        let (patience, max) = (self.store_patience, store::PATIENCE_MAX);
        check(patience <= max, format!("store_patience = {patience:?}: at most {max:?}"));
        if wrong.is_empty() { Ok(()) } else { Err(Error::Options(wrong)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Options::default().validate().unwrap();
    }

    #[test]
    fn all_violations_are_reported_at_once() {
        let options = Options {
            name: String::new(),
            master: "here".to_owned(),
            url: "http://".to_owned(),
            threads: 0,
            push_bytes_max: 10,
            partition_bytes_max: 20,
            jobs_max: 0,
            ..Options::default()
        };
        let Err(Error::Options(wrong)) = options.validate() else { panic!("accepted") };
        let keys: Vec<_> = wrong.iter().filter_map(|line| line.split([':', ' ']).next()).collect();
        assert_eq!(keys, ["name", "master", "url", "threads", "push_bytes_max", "jobs_max"]);
    }

    #[test]
    fn options_survive_their_file_form_and_refuse_unknown_keys() {
        let json = serde_json::to_string(&Options::default()).unwrap();
        assert_eq!(serde_json::from_str::<Options>(&json).unwrap(), Options::default());
        assert!(
            serde_json::from_str::<Options>(r#"{"thread": 3}"#).unwrap_err().to_string().contains("`thread`")
        );
    }
}

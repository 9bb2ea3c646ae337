//! What a master can be told.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use store::PATIENCE_MAX;
use store::Stores;
use store::location::Allowed;

use crate::error::{Error, Result};

/// Options of one master process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Folder for the files of jobs; made when it is not there. One master at a time may use it.
    /// Default: `ebb-master`.
    pub data_dir: PathBuf,
    /// Keep a journal in the data folder, so that the jobs go on when this master is started again.
    /// Default: on. Off where the jobs end with this process anyway.
    pub journal: bool,
    /// How often workers and ps send a heartbeat. Default 1 s. Shorter makes progress finer and
    /// lost answers cheaper; longer suits thousands of processes.
    #[serde(with = "proto::duration")]
    pub heartbeat: Duration,
    /// Silence after which a process counts as gone; at least two heartbeats. Default 5 s. A
    /// process that dies is noticed at once, by its connection: this is for machines and networks
    /// that vanish. Raise it where they pause for longer.
    #[serde(with = "proto::duration")]
    pub death: Duration,
    /// How long a running job waits for a ps that lost its connection before another one takes its
    /// place and trains again what it held. Default 30 s. Raise it where machines come back after
    /// longer.
    #[serde(with = "proto::duration")]
    pub ps_grace: Duration,
    /// Longest silence of a stream that brings files, a submission or an export. Default 15 s.
    /// Raise it for clients on networks that pause for longer.
    #[serde(with = "proto::duration")]
    pub stream_silence: Duration,
    /// Time that processes of a script have after the end of its last job, for example to save a
    /// model. Then they are ended. Default 1 h.
    #[serde(with = "proto::duration")]
    pub script_linger: Duration,
    /// How long a checkpoint store that fails is tried again before the checkpoint is given up, by
    /// waits that double from 0.2 s. Default 13 s.
    #[serde(with = "proto::duration")]
    pub store_patience: Duration,
    /// Places, paths or URLs, below which jobs may have their checkpoints. Default: none, which is
    /// any place that the master and the ps can write.
    pub checkpoints: Vec<String>,
    /// Jobs kept in memory. Beyond, the oldest that has ended is forgotten (its files stay); when
    /// none has, submissions are refused. Default 1000.
    pub jobs_max: usize,
    /// Processes registered at once. Default 4096.
    pub members_max: usize,
    /// Bytes of all files of one submission or one export together. Default 16 GiB.
    pub artifact_bytes_max: u64,
    /// Bytes of all files that are on their way in at once, over all submissions and exports, until
    /// a job has them. Default 64 GiB. Raise it where many large models are submitted at once, and
    /// the data folder has room for them.
    pub incoming_bytes_max: u64,
    /// Let a program take part in a job of its name that has ended, too: it gets the job's end.
    /// Default: off, so that the same program started again trains again. On where the master lives
    /// as long as one run of a program.
    pub rejoin: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("ebb-master"),
            journal: true,
            heartbeat: Duration::from_secs(1),
            death: Duration::from_secs(5),
            ps_grace: Duration::from_secs(30),
            stream_silence: Duration::from_secs(15),
            script_linger: Duration::from_secs(3600),
            store_patience: store::PATIENCE,
            checkpoints: Vec::new(),
            jobs_max: 1000,
            members_max: 4096,
            artifact_bytes_max: 16 << 30,
            incoming_bytes_max: 64 << 30,
            rejoin: false,
        }
    }
}

/// What one of several masters is told besides: of them one leads, the others stand by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ElectionOptions {
    /// URLs of etcd's members, separated by commas. It keeps the journal and says who leads.
    pub etcd: String,
    /// What all keys in etcd begin with. Default `ebbflow/`. Masters with the same one are the same
    /// master; another cluster in the same etcd needs another one.
    pub prefix: String,
    /// How long a leader that died is waited for before another master leads. In whole seconds.
    /// Default 5 s. Shorter makes takeovers faster; a leader that stands still, or that etcd does
    /// not answer, for three quarters of it steps down.
    pub ttl: Duration,
    /// URL where the fleet and users reach this master; those who ask one that stands by are told
    /// it.
    pub url: String,
}

impl ElectionOptions {
    /// Returns every relation that does not hold.
    ///
    /// # Errors
    /// One message for each.
    pub fn validate(&self) -> Result<(), Vec<String>> {
        let mut wrong = Vec::new();
        let mut check = |ok: bool, message: String| {
            if !ok {
                wrong.push(message);
            }
        };
        let Self { etcd, prefix, ttl, url } = self;
        check(
            net::failover::urls(etcd).next().is_some(),
            "etcd: empty; expected http://HOST:PORT[,..]".to_owned(),
        );
        check(
            !prefix.is_empty() && prefix.chars().all(|letter| letter.is_ascii_graphic()),
            format!("prefix: expected visible ASCII, found `{}`", prefix.escape_debug()),
        );
        check(
            (Duration::from_secs(2)..=Duration::from_secs(600)).contains(ttl) && ttl.subsec_nanos() == 0,
            format!("ttl = {ttl:?}: from 2s to 10min, in whole seconds"),
        );
        check(
            url.starts_with("http://") || url.starts_with("https://"),
            format!("url: `{url}` is no URL; expected http://HOST:PORT or https://HOST:PORT"),
        );
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }
}

impl Options {
    /// Returns every relation that does not hold.
    ///
    /// # Errors
    /// One message for each.
    pub fn validate(&self) -> Result<(), Vec<String>> {
        let mut wrong = Vec::new();
        let mut check = |ok: bool, message: String| {
            if !ok {
                wrong.push(message);
            }
        };
        let Self { heartbeat, death, stream_silence, store_patience, .. } = *self;
        check(!self.data_dir.as_os_str().is_empty(), "data_dir: empty; name a folder".to_owned());
        check(
            (Duration::from_millis(10)..=Duration::from_secs(600)).contains(&heartbeat),
            format!("heartbeat = {heartbeat:?}: from 10ms to 10min"),
        );
        check(
            death >= 2 * heartbeat,
            format!("death = {death:?} is below two heartbeats of {heartbeat:?}; one lost would be fatal"),
        );
        check(
            (Duration::from_secs(1)..=Duration::from_secs(30)).contains(&stream_silence),
            format!("stream_silence = {stream_silence:?}: from 1s to 30s"),
        );
        check(
            store_patience <= PATIENCE_MAX,
            format!("store_patience = {store_patience:?}: at most {PATIENCE_MAX:?}"),
        );
        check(self.jobs_max > 0, "jobs_max: 0 would take no job; set 1 or more".to_owned());
        check(self.members_max > 0, "members_max: 0 would take no process; set 2 or more".to_owned());
        check(self.artifact_bytes_max > 0, "artifact_bytes_max: 0 would take no model; set more".to_owned());
        let (one, all) = (self.artifact_bytes_max, self.incoming_bytes_max);
        check(
            one <= all,
            format!(
                "incoming_bytes_max = {all} is below artifact_bytes_max = {one}; it would take no such file"
            ),
        );
        for error in Allowed::of(&self.checkpoints).err().unwrap_or_default() {
            check(false, format!("checkpoints: {error}"));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// Returns the stores that jobs may use, with these options.
    ///
    /// # Errors
    /// The places are none; [`validate`](Self::validate) says so too.
    pub(crate) fn limit(&self, stores: Stores) -> Result<Stores> {
        let all = |errors: Vec<proto::checkpoint::Error>| errors.iter().map(ToString::to_string).collect();
        let allowed = Allowed::of(&self.checkpoints).map_err(|errors| Error::Options(all(errors)))?;
        Ok(stores.within(allowed).patient_for(self.store_patience))
    }

    /// Returns how long a lease holds whose worker never named it in a heartbeat: the answer was
    /// lost on its way. A worker that still counts as alive keeps it, however rare its heartbeats
    /// are meanwhile.
    pub(crate) fn claim(&self) -> Duration {
        self.death.max(3 * self.heartbeat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_violations_are_reported_at_once() {
        assert_eq!(Options::default().validate(), Ok(()));
        let options = Options { heartbeat: Duration::from_secs(3), jobs_max: 0, ..Options::default() };
        let wrong = options.validate().unwrap_err();
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong[0].contains("death = 5s is below two heartbeats of 3s"), "{wrong:?}");
        let options = Options {
            stream_silence: Duration::from_secs(60),
            incoming_bytes_max: 1,
            checkpoints: vec!["/fine".into(), "runs".into(), "s3://".into()],
            ..Options::default()
        };
        let wrong = options.validate().unwrap_err();
        assert_eq!(wrong.len(), 4, "{wrong:?}");
        assert!(wrong[2].contains("checkpoints: checkpoint store `runs`"), "{wrong:?}");
    }

    #[test]
    fn a_worker_that_counts_as_alive_keeps_leases_that_it_has_not_named() {
        let claim = |heartbeat, death| {
            let [heartbeat, death] = [heartbeat, death].map(Duration::from_millis);
            Options { heartbeat, death, ..Options::default() }.claim().as_millis()
        };
        assert_eq!([claim(100, 5000), claim(1000, 5000), claim(2000, 5000)], [5000, 5000, 6000]);
    }

    #[test]
    fn an_election_needs_etcd_whole_seconds_and_a_url() {
        let good = ElectionOptions {
            etcd: "http://127.0.0.1:2379".into(),
            prefix: "ebbflow/".into(),
            ttl: Duration::from_secs(5),
            url: "http://m:1".into(),
        };
        assert_eq!(good.validate(), Ok(()));
        let ttl = Duration::from_millis(2500);
        let bad = ElectionOptions { etcd: " ,".into(), prefix: "a\0".into(), ttl, url: "m".into() };
        let wrong = bad.validate().unwrap_err();
        assert_eq!(wrong.len(), 4, "{wrong:?}");
        assert!(wrong[2].contains("ttl = 2.5s"), "{wrong:?}");
    }

    #[test]
    fn options_survive_json() {
        let json = serde_json::to_string(&Options::default()).expect("serialisable");
        assert_eq!(serde_json::from_str::<Options>(&json).expect("readable"), Options::default());
        assert!(serde_json::from_str::<Options>(r#"{"heartbeats": 1}"#).is_err());
    }
}

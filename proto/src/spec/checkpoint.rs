//! Times and place of a job's checkpoints.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::ids::Version;
use crate::plan::Plan;

/// Times and place of checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [checkpoint]")]
pub struct CheckpointSpec {
    /// Place of the checkpoints: a path (relative to the job file), `file://`, `s3://`, `gs://`,
    /// `az://` or, in one process, `memory://`. Every ps and the master must reach it.
    pub url: String,
    /// Steps between checkpoints: each version that is a multiple is saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Age of the last checkpoint, in seconds, at which the next one is saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<u64>,
    /// Epochs between checkpoints, each saved at the end of its epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<u64>,
    /// Number of complete checkpoints to keep. Default 3.
    #[serde(default = "three")]
    pub keep: u32,
    /// Most bytes per second that each ps writes. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
}

/// Beginnings of the URLs of places for checkpoints.
pub const SCHEMES: [&str; 5] = ["file:///", "s3://", "gs://", "az://", "memory://"];

impl CheckpointSpec {
    /// Returns whether `every_steps` or `every_epochs` saves a version. Version 0 is never saved:
    /// it is made from the seed. The answer is arithmetic on the plan, so every partition knows it
    /// without a message.
    pub fn saves(&self, plan: &Plan, version: Version) -> bool {
        let divides =
            |every: Option<u64>, number: u64| every.is_some_and(|every| number.is_multiple_of(every));
        let epochs = version.get() / plan.steps_per_epoch();
        version > Version(0)
            && (divides(self.every_steps, version.get())
                || plan.ends_epoch(version) && divides(self.every_epochs, epochs))
    }

    /// Returns the newest version up to this one that is [saved](Self::saves), or version 0 if none
    /// is.
    pub fn newest(&self, plan: &Plan, version: Version) -> Version {
        let floor = |number: u64, every: Option<u64>| every.map_or(0, |every| number - number % every);
        let steps = floor(version.get(), self.every_steps);
        let epochs = floor(version.get() / plan.steps_per_epoch(), self.every_epochs);
        Version(steps.max(epochs * plan.steps_per_epoch()))
    }

    /// Makes a path absolute. It starts from the job file's folder.
    pub(super) fn settle(&mut self, folder: &Path) {
        if !self.url.contains("://") && !self.url.is_empty() {
            self.url = folder.join(&self.url).to_string_lossy().into_owned();
        }
    }

    pub(super) fn validate(&self, check: &mut impl FnMut(bool, String)) {
        let Self { url, every_steps, every_seconds, every_epochs, keep, bandwidth } = self;
        let known = SCHEMES.iter().any(|scheme| url.starts_with(scheme));
        check(
            known || !url.is_empty() && !url.contains("://"),
            format!(
                "checkpoint.url: `{url}` is neither a path nor a URL that begins with {}",
                SCHEMES.join(", ")
            ),
        );
        let every =
            [("every_steps", every_steps), ("every_seconds", every_seconds), ("every_epochs", every_epochs)];
        check(
            every.iter().any(|(_, every)| every.is_some()),
            "checkpoint: give at least one of `every_steps`, `every_seconds`, `every_epochs`".to_owned(),
        );
        for (key, every) in every {
            check(*every != Some(0), format!("checkpoint.{key}: 0 is no distance; set 1 or more"));
        }
        check(
            *keep > 0,
            "checkpoint.keep: 0 would keep none; set 1 or more, or remove the section".to_owned(),
        );
        check(
            bandwidth.is_none_or(|bandwidth| bandwidth >= 1 << 10),
            "checkpoint.bandwidth: at least 1024 bytes a second".to_owned(),
        );
    }
}

const fn three() -> u32 {
    3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan with five steps in each epoch.
    const PLAN: Plan = Plan { records: 10, micro: 2, microbatches_per_step: 1, epochs: 6 };

    fn spec(text: &str) -> CheckpointSpec {
        toml::from_str(&format!("url = \"checkpoints\"\n{text}")).unwrap()
    }

    fn violations(spec: &CheckpointSpec) -> Vec<String> {
        let mut wrong = Vec::new();
        spec.validate(&mut |ok, message| wrong.extend((!ok).then_some(message)));
        wrong
    }

    fn saved(spec: &CheckpointSpec) -> Vec<u64> {
        (0..=PLAN.steps()).filter(|&version| spec.saves(&PLAN, Version(version))).collect()
    }

    #[test]
    fn which_versions_are_saved_is_arithmetic_on_the_plan() {
        assert_eq!(saved(&spec("every_steps = 12")), [12, 24]);
        assert_eq!(saved(&spec("every_epochs = 2")), [10, 20, 30]);
        assert_eq!(saved(&spec("every_epochs = 3\nevery_steps = 20")), [15, 20, 30]);
        assert_eq!(saved(&spec("every_seconds = 1")), [0; 0], "the master asks for those");
        for text in [
            "every_steps = 12",
            "every_epochs = 2",
            "every_epochs = 3\nevery_steps = 20",
            "every_seconds = 1",
        ] {
            let spec = spec(text);
            for version in 0..=PLAN.steps() {
                let newest = saved(&spec).into_iter().rfind(|saved| *saved <= version).unwrap_or(0);
                assert_eq!(spec.newest(&PLAN, Version(version)), Version(newest), "{text} at {version}");
            }
        }
    }

    #[test]
    fn a_path_starts_from_the_job_file_and_a_url_stays() {
        for (url, expected) in
            [("to/here", "/jobs/to/here"), ("/to/here", "/to/here"), ("s3://b/c", "s3://b/c")]
        {
            let mut spec = CheckpointSpec { url: url.to_owned(), ..spec("every_steps = 1") };
            spec.settle(Path::new("/jobs"));
            assert_eq!((spec.url.as_str(), violations(&spec)), (expected, vec![]));
        }
    }

    #[test]
    fn every_violation_is_named() {
        let wrong = CheckpointSpec { url: "ftp://host/x".to_owned(), ..spec("keep = 0\nbandwidth = 3") };
        let messages = violations(&wrong);
        for (message, part) in messages.iter().zip(["ftp://host/x", "at least one of", "keep", "bandwidth"]) {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(messages.len(), 4);
        assert!(violations(&spec("every_epochs = 0"))[0].contains("every_epochs: 0"));
        assert_eq!(
            violations(&CheckpointSpec { url: "file://x".to_owned(), ..spec("every_steps = 1") }).len(),
            1
        );
    }
}

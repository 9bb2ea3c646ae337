//! The manifest of a checkpoint: what was saved, which files hold it, and whether a job can
//! continue from it.
//!
//! ```text
//! {"format":1,"crc32c":"0a1b2c3d","checkpoint":{
//!   "job": "digits",
//!   ...
//! }}
//! ```
//!
//! The checksum covers the text after `"checkpoint":`, without the last brace.

use serde::{Deserialize, Serialize};

use super::trained_on::TrainedOn;
use super::{AppliedSteps, Error, Result};
use crate::ids::{Era, PartitionId, Version};
use crate::numerics::Since;
use crate::optimizer::OptimizerKind;
use crate::plan::Plan;
use crate::selection::Selection;
use crate::spec::{Consistency, JobSpec, Order};
use crate::tensor::TensorSpec;

/// Newest format. Each manifest is written in the oldest format that has all of its fields, so that
/// older programs can read it. Readers refuse a manifest in any other format.
pub const FORMAT: u64 = 6;

/// Oldest format.
const PLAIN: u64 = 1;

/// First format with `script`.
const WITH_SCRIPT: u64 = 2;

/// First format with `numerics` and `trained_on`.
const WITH_ORIGIN: u64 = 3;

/// First format with `samples_skipped`.
const WITH_SKIPPED: u64 = 4;

/// First format with `selection`.
const WITH_SELECTION: u64 = 5;

/// First format with `overflows`.
const WITH_OVERFLOWS: u64 = 6;

/// Most partitions of a checkpoint, and of a job.
const FILES_MAX: usize = 1024;

/// Manifest of a complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Name of the job.
    pub job: String,
    /// Run of the job: its training from the first step, over every crash and resumption. Another
    /// training under the same job name has another run.
    pub run: String,
    /// [`digest`] of the specification, for people. A job may continue with other settings, as far
    /// as [`check`](Self::check) allows.
    pub digest: String,
    /// Steps that each partition had applied.
    pub version: Version,
    /// Oldest version whose weights are saved. A job with a delay computes its next steps from
    /// older versions.
    pub oldest: Version,
    /// Era of the job: the number of its rewinds before this checkpoint.
    pub era: Era,
    /// Order in which updates were applied.
    #[serde(with = "WrittenOrder")]
    pub order: Order,
    /// Plan of the job's microbatches.
    pub plan: Plan,
    /// Tensors of the model, in the model's order.
    pub tensors: Vec<TensorSpec>,
    /// Update rule of the optimizer.
    pub optimizer: OptimizerKind,
    /// Slots of the optimizer.
    pub slots: Vec<String>,
    /// Data files, one for each partition, in the order of the partitions.
    pub files: Vec<File>,
    /// TorchScript module to which the weights belong, if the job has one. It lies in the job's
    /// folder, and all versions share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub script: Option<Script>,
    /// Numerics classes that computed the weights, in the order of their first versions. Empty for
    /// a job that accepts workers of every class.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numerics: Vec<Since>,
    /// Seed, order and records of the training. `None` in a checkpoint of an older program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_on: Option<TrainedOn>,
    /// Best version of the job when the checkpoint was completed, if the job selects one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<Selection>,
    /// Time of completion, in seconds since 1970.
    pub created_unix_secs: u64,
}

/// Written form of an [`Order`]. A job file has no setting of this name.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Order", rename_all = "snake_case")]
enum WrittenOrder {
    Canonical,
    Arrival,
}

/// A job's TorchScript module as it was submitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the module in lower-case hex.
    pub sha256: String,
}

impl Script {
    /// Returns the module's name in the job's folder. Each content has its own name, so runs with
    /// different modules do not collide.
    pub fn file_name(&self) -> String {
        format!("script-{}.pt", &self.sha256)
    }
}

/// Data file of one partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// File name in the manifest's folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Checksum of the file's header, which has the checksums of the values.
    pub crc32c: u32,
    /// Applied steps of the partition.
    pub applied: AppliedSteps,
}

/// Requirements of a job that continues from a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Needs<'a> {
    /// Tensors of the job, in the model's order.
    pub tensors: &'a [TensorSpec],
    /// Plan of the job.
    pub plan: &'a Plan,
    /// Specification of the job.
    pub spec: &'a JobSpec,
    /// Version from which the job continues.
    pub version: Version,
}

impl Manifest {
    /// Encodes the manifest as a file's text.
    pub fn encode(&self) -> String {
        let body = serde_json::to_string_pretty(self).expect("a manifest has no keys that JSON lacks");
        format!("{}{body}{END}", begin(self.format(), crc32c::crc32c(body.as_bytes())))
    }

    /// Returns the oldest format that has all fields of this manifest.
    fn format(&self) -> u64 {
        let skips = self.files.iter().any(|file| file.applied.samples_skipped > 0);
        let overflows = self.files.iter().any(|file| file.applied.overflows > 0);
        match (self.numerics.is_empty() && self.trained_on.is_none(), &self.script) {
            _ if overflows => WITH_OVERFLOWS,
            _ if self.selection.is_some() => WITH_SELECTION,
            _ if skips => WITH_SKIPPED,
            (false, _) => WITH_ORIGIN,
            (true, Some(_)) => WITH_SCRIPT,
            (true, None) => PLAIN,
        }
    }

    /// Reads a manifest that [`encode`](Self::encode) wrote. `file` names it in errors.
    ///
    /// # Errors
    /// [`Error::Future`] for a format that this program does not know, otherwise [`Error::Damaged`]
    /// with what is wrong.
    pub fn decode(file: &str, bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Format {
            format: u64,
        }
        let wrong = |what: String| Error::Damaged { file: file.to_owned(), what };
        let json = |error: serde_json::Error| wrong(error.to_string());
        let Format { format } = serde_json::from_slice(bytes).map_err(json)?;
        if format > FORMAT {
            return Err(Error::Future { file: file.to_owned(), found: format, known: FORMAT });
        }
        let begin_bytes = begin(format, 0).len();
        let body = bytes.get(begin_bytes..).and_then(|rest| rest.strip_suffix(END.as_bytes()));
        let body = body.ok_or_else(|| wrong("it is no manifest".to_owned()))?;
        let expected = begin(format, crc32c::crc32c(body));
        if bytes[..begin_bytes] != *expected.as_bytes() {
            let found = String::from_utf8_lossy(&bytes[..begin_bytes]);
            return Err(wrong(format!("it begins with {found}, its content needs {expected}")));
        }
        let manifest: Self = serde_json::from_slice(body).map_err(json)?;
        // The checksum does not cover the format.
        let needed = manifest.format();
        if format != needed {
            return Err(wrong(format!("it has format {format}, its content needs {needed}")));
        }
        manifest.validate().map_err(|what| wrong(what.to_owned()))?;
        Ok(manifest)
    }

    /// Checks that the fields do not contradict each other. This program writes only valid
    /// manifests.
    fn validate(&self) -> Result<(), &'static str> {
        let Plan { records, micro, microbatches_per_step, epochs } = self.plan;
        let plan = records > 0 && micro > 0 && microbatches_per_step > 0 && epochs > 0;
        // No product of the numbering overflows with this limit.
        let plan = plan && u128::from(records) * u128::from(epochs) < 1 << 62;
        if !plan || self.version > self.plan.final_version() || self.oldest > self.version {
            return Err("plan and version contradict each other");
        }
        if !(1..=FILES_MAX).contains(&self.files.len()) {
            return Err("expected 1 to 1024 files");
        }
        let hex = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if self.script.as_ref().is_some_and(|script| !hex(&script.sha256)) {
            return Err("its script has no SHA-256");
        }
        for file in &self.files {
            if crate::convert::artifact_name(&file.name).is_err() {
                return Err("a file's name leads out of the folder");
            }
            if !file.applied.is_valid(self.version, self.plan.steps()) {
                return Err("a file's applied steps are not as many as the version says");
            }
            if self.order == Order::Canonical && !file.applied.above.is_empty() {
                return Err("a file's applied steps are not in canonical order");
            }
        }
        Ok(())
    }

    /// Checks that a job can continue from this checkpoint with the same bits as without the
    /// interruption.
    ///
    /// # Errors
    /// [`Error::Differs`] with the first difference.
    pub fn check(&self, file: &str, needs: &Needs<'_>) -> Result<()> {
        let Needs { tensors, plan, spec, version } = *needs;
        let same = |what, expected: String, found: String| {
            let file = file.to_owned();
            if expected == found { Ok(()) } else { Err(Error::Differs { file, what, expected, found }) }
        };
        let numbers = |plan: &Plan| {
            format!("{} records, micro {}, M {}", plan.records, plan.micro, plan.microbatches_per_step)
        };
        same("version", version.to_string(), self.version.to_string())?;
        let shown = |tensor: Option<&TensorSpec>| {
            tensor.map_or_else(
                || "none".to_owned(),
                |tensor| format!("{:?} `{}` {:?}", tensor.role, tensor.name, tensor.shape),
            )
        };
        for index in 0..tensors.len().max(self.tensors.len()) {
            same("tensor", shown(tensors.get(index)), shown(self.tensors.get(index)))?;
        }
        same("plan", numbers(plan), numbers(&self.plan))?;
        let last = plan.final_version();
        if self.version > last {
            same("version", format!("at most {last}"), self.version.to_string())?;
        }
        same("optimizer", spec.optimizer.kind.to_string(), self.optimizer.to_string())?;
        let slots = spec.optimizer.validate().map(|rule| rule.slot_names()).unwrap_or_default();
        same("slots of the optimizer", slots.join(", "), self.slots.join(", "))?;
        let Consistency { order, delay } = spec.consistency.resolve();
        same("order", format!("{order:?}"), format!("{:?}", self.order))?;
        let oldest = oldest(order, delay, version);
        if self.oldest > oldest {
            same("delay: oldest version of the weights", oldest.to_string(), self.oldest.to_string())?;
        }
        Ok(())
    }

    /// Returns whether the applied steps are whole epochs: every record was applied equally often.
    pub fn ends_epoch(&self) -> bool {
        self.plan.ends_epoch(self.version) && self.files.iter().all(|file| file.applied.above.is_empty())
    }

    /// Returns the applied steps of number `partition` of `partitions` after a restore from this
    /// checkpoint.
    ///
    /// In canonical order all partitions have applied the same steps. In arrival order each
    /// partition has applied its own. A restore into another number of partitions then needs equal
    /// ledgers.
    ///
    /// # Errors
    /// [`Error::LedgersDiffer`] when the ledgers differ and the number of partitions does too.
    pub fn applied(&self, file: &str, partition: PartitionId, partitions: u32) -> Result<AppliedSteps> {
        let first = &self.files[0].applied;
        if self.files.iter().all(|file| file.applied == *first) {
            return Ok(first.clone());
        }
        match self.files.get(partition.index()) {
            Some(file) if self.files.len() == partitions as usize => Ok(file.applied.clone()),
            _ => Err(Error::LedgersDiffer {
                file: file.to_owned(),
                saved: self.files.len(),
                wanted: partitions as usize,
            }),
        }
    }
}

/// Returns the oldest version from whose weights the steps after `version` are computed.
pub fn oldest(order: Order, delay: Option<u32>, version: Version) -> Version {
    match order {
        Order::Canonical => Version(version.get().saturating_sub(u64::from(delay.unwrap_or(0)))),
        Order::Arrival => version,
    }
}

/// Returns the SHA-256 of the settings that decide a job's trained bits. It leaves out the name,
/// the fleet, the limits, the numerics policy and the place of files.
pub fn digest(spec: &JobSpec) -> String {
    let mut spec = spec.clone();
    spec.name = String::new();
    spec.fleet = crate::spec::FleetSpec::default();
    spec.limits = crate::spec::LimitsSpec::default();
    spec.checkpoint = None;
    spec.evaluation = crate::spec::EvaluationSpec::default();
    spec.early_stopping = None;
    spec.data.validation_sets.clear();
    spec.numerics = crate::spec::NumericsSpec::default();
    spec.data.base = None;
    crate::artifact::sha256_hex(spec.to_json().as_bytes())
}

const END: &str = "}\n";

fn begin(format: u64, crc32c: u32) -> String {
    format!("{{\"format\":{format},\"crc32c\":\"{crc32c:08x}\",\"checkpoint\":")
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::trained_on::tests::{file as data_file, trained_on};
    use super::*;
    use crate::ids::Step;
    use crate::selection::Criterion;

    const SPEC: &str = r#"{
        "name": "digits", "epochs": 4, "model": { "builtin": "linear" },
        "data": { "format": "idx", "train": { "features": ["x"], "labels": ["y"] } },
        "batch": { "micro": 2 }, "optimizer": { "kind": "adam", "learning_rate": 0.1 },
        "consistency": { "mode": "pipelined", "delay": 2 }
    }"#;

    fn applied(watermark: u64, above: &[u64]) -> AppliedSteps {
        let above = above.iter().copied().map(Step).collect();
        AppliedSteps { watermark: Step(watermark), above, samples_skipped: 0, overflows: 0 }
    }

    pub(in crate::checkpoint) fn manifest(order: Order, ledgers: &[AppliedSteps]) -> Manifest {
        let spec = JobSpec::from_json(SPEC).unwrap();
        let file = |(index, applied): (usize, &AppliedSteps)| File {
            name: super::super::file_name(PartitionId(index as u32), ledgers.len() as u32, 77),
            bytes: 1000,
            crc32c: 77,
            applied: applied.clone(),
        };
        Manifest {
            job: spec.name.clone(),
            run: "0123456789abcdef".to_owned(),
            digest: digest(&spec),
            version: ledgers[0].version(),
            oldest: Version(ledgers[0].version().get().saturating_sub(2)),
            era: Era(1),
            order,
            plan: spec.plan(20),
            tensors: vec![TensorSpec::parameter("weight", [3, 2]), TensorSpec::counter("n", [])],
            optimizer: OptimizerKind::Adam,
            slots: vec!["exp_avg".to_owned(), "exp_avg_sq".to_owned()],
            files: ledgers.iter().enumerate().map(file).collect(),
            script: None,
            numerics: Vec::new(),
            trained_on: Some(trained_on(vec![data_file("x", 7)])),
            selection: None,
            created_unix_secs: 1_700_000_000,
        }
    }

    fn manifests() -> impl Strategy<Value = Manifest> {
        (proptest::collection::vec(proptest::collection::btree_set(0u64..40, 7), 1..4)).prop_map(|ledgers| {
            let ledger = |mut steps: BTreeSet<u64>| {
                let watermark = (0..).find(|step| !steps.remove(step)).unwrap();
                applied(watermark, &steps.into_iter().collect::<Vec<_>>())
            };
            manifest(Order::Arrival, &ledgers.into_iter().map(ledger).collect::<Vec<_>>())
        })
    }

    proptest! {
        #[test]
        fn a_manifest_is_read_as_it_was_written(manifest in manifests()) {
            prop_assert_eq!(Manifest::decode("m", manifest.encode().as_bytes()).unwrap(), manifest);
        }

        #[test]
        fn every_flipped_byte_is_found(manifest in manifests(), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut bytes = manifest.encode().into_bytes();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let error = Manifest::decode("m", &bytes).unwrap_err();
            prop_assert!(matches!(error, Error::Damaged { .. } | Error::Future { .. }), "{}", error);
        }

        #[test]
        fn every_truncation_is_found(manifest in manifests(), at in any::<prop::sample::Index>()) {
            let bytes = manifest.encode().into_bytes();
            prop_assert!(Manifest::decode("m", &bytes[..at.index(bytes.len())]).is_err());
        }

        #[test]
        fn any_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Manifest::decode("m", &bytes).is_err());
        }
    }

    #[test]
    fn a_later_format_is_named_whatever_else_it_has() {
        let error = Manifest::decode("m", br#"{"format":7,"rows":[1]}"#).unwrap_err();
        assert_eq!(error, Error::Future { file: "m".to_owned(), found: 7, known: 6 });
    }

    #[test]
    fn a_manifest_has_the_oldest_format_that_has_all_of_it() {
        let mut manifest = manifest(Order::Canonical, &[applied(7, &[])]);
        assert!(manifest.encode().starts_with("{\"format\":3,"), "{}", manifest.encode());
        manifest.trained_on = None;
        assert!(manifest.encode().starts_with("{\"format\":1,") && !manifest.encode().contains("script"));
        let sha256 = crate::artifact::sha256_hex(b"module");
        manifest.script = Some(Script { bytes: 6, sha256 });
        let text = manifest.encode();
        assert!(text.starts_with("{\"format\":2,"), "{text}");
        assert_eq!(Manifest::decode("m", text.as_bytes()).unwrap(), manifest);
        let numerics = crate::numerics::Numerics::unknown();
        manifest.numerics = vec![Since { version: Version(0), numerics }];
        let text = manifest.encode();
        assert!(text.starts_with("{\"format\":3,"), "{text}");
        assert_eq!(Manifest::decode("m", text.as_bytes()).unwrap(), manifest);
        manifest.files[0].applied.samples_skipped = 2;
        let text = manifest.encode();
        assert!(text.starts_with("{\"format\":4,"), "{text}");
        assert_eq!(Manifest::decode("m", text.as_bytes()).unwrap(), manifest);
        let criterion = Criterion { metric: "auc".to_owned(), larger: true, min_delta: 0.1 };
        manifest.selection = Some(Selection::first(criterion, Version(3), f64::NAN));
        let text = manifest.encode();
        assert!(text.starts_with("{\"format\":5,"), "{text}");
        assert_eq!(Manifest::decode("m", text.as_bytes()).unwrap(), manifest);
        manifest.files[0].applied.overflows = 3;
        let text = manifest.encode();
        assert!(text.starts_with("{\"format\":6,"), "{text}");
        assert_eq!(Manifest::decode("m", text.as_bytes()).unwrap(), manifest);
        manifest.script = Some(Script { bytes: 6, sha256: "../../x".to_owned() });
        let error = Manifest::decode("m", manifest.encode().as_bytes()).unwrap_err().to_string();
        assert!(error.contains("no SHA-256"), "{error}");
    }

    #[test]
    fn a_format_that_the_content_does_not_need_is_damage() {
        let manifest = manifest(Order::Canonical, &[applied(7, &[])]);
        let text = manifest.encode();
        for format in (0..=FORMAT).filter(|&format| format != WITH_ORIGIN) {
            let other = text.replacen("{\"format\":3,", &format!("{{\"format\":{format},"), 1);
            let error = Manifest::decode("m", other.as_bytes()).unwrap_err();
            assert!(matches!(error, Error::Damaged { .. }), "{error}");
            assert!(error.to_string().contains(&format!("it has format {format}, its content needs 3")));
        }
    }

    #[test]
    fn a_manifest_that_nobody_wrote_is_refused_even_with_its_checksum() {
        let good = manifest(Order::Canonical, &[applied(7, &[])]);
        let refused = |change: fn(&mut Manifest)| {
            let mut other = good.clone();
            change(&mut other);
            Manifest::decode("m", other.encode().as_bytes()).unwrap_err().to_string()
        };
        assert!(refused(|m| m.files[0].name = "../x".to_owned()).contains("out of the folder"));
        assert!(refused(|m| m.files.clear()).contains("1 to 1024 files"));
        assert!(refused(|m| m.version = Version(8)).contains("not as many as the version"));
        assert!(refused(|m| m.files[0].applied = applied(6, &[8])).contains("canonical order"));
        assert!(refused(|m| m.plan.micro = 0).contains("plan"));
        assert!(refused(|m| m.plan.records = u64::MAX).contains("plan"));
    }

    #[test]
    fn another_job_is_told_what_differs() {
        let manifest = manifest(Order::Canonical, &[applied(7, &[])]);
        let spec = JobSpec::from_json(SPEC).unwrap();
        let (tensors, plan) = (manifest.tensors.clone(), spec.plan(20));
        let check = |tensors: &[TensorSpec], plan: &Plan, spec: &JobSpec, version| {
            let needs = Needs { tensors, plan, spec, version: Version(version) };
            manifest.check("m", &needs).map_err(|error| error.to_string())
        };
        assert_eq!(check(&tensors, &plan, &spec, 7), Ok(()));
        assert_eq!(check(&tensors, &Plan { epochs: 9, ..plan }, &spec, 7), Ok(()), "it may train longer");
        let with = |from: &str, to: &str| JobSpec::from_json(&SPEC.replace(from, to)).unwrap();
        let other = [TensorSpec::parameter("weight", [2, 3]), tensors[1].clone()];
        for (checked, part) in [
            (check(&tensors, &plan, &spec, 6), "version: expected 6, found 7"),
            (
                check(&other, &plan, &spec, 7),
                "expected Parameter `weight` [2, 3], found Parameter `weight` [3, 2]",
            ),
            (check(&tensors[..1], &plan, &spec, 7), "expected none, found Counter `n` []"),
            (check(&tensors, &Plan { micro: 5, ..plan }, &spec, 7), "plan: expected 20 records, micro 5"),
            (check(&tensors, &plan, &with("adam", "adagrad"), 7), "optimizer: expected adagrad, found adam"),
            (
                check(&tensors, &plan, &with("\"delay\": 2", "\"delay\": 3"), 7),
                "oldest version of the weights: expected 4",
            ),
            (
                check(&tensors, &plan, &with("pipelined", "bounded"), 7),
                "order: expected Arrival, found Canonical",
            ),
        ] {
            assert!(checked.clone().unwrap_err().contains(part), "{checked:?}");
        }
        let pipelined_to_sync = with("\"pipelined\", \"delay\": 2", "\"sync\"");
        assert_eq!(check(&tensors, &plan, &pipelined_to_sync, 7), Ok(()), "it has all that sync needs");
    }

    #[test]
    fn in_arrival_order_another_number_of_partitions_needs_equal_ledgers() {
        let same = manifest(Order::Arrival, &[applied(5, &[7]), applied(5, &[7])]);
        assert_eq!(same.applied("m", PartitionId(2), 3), Ok(applied(5, &[7])));
        let own = manifest(Order::Arrival, &[applied(5, &[7]), applied(6, &[])]);
        assert_eq!(own.applied("m", PartitionId(1), 2), Ok(applied(6, &[])));
        assert!(own.applied("m", PartitionId(1), 3).unwrap_err().to_string().contains("fleet.ps = 2"));
    }

    #[test]
    fn the_digest_is_of_what_decides_the_bits() {
        let spec = JobSpec::from_json(SPEC).unwrap();
        let fleet =
            JobSpec::from_json(&SPEC.replace("\"batch\"", "\"fleet\": { \"ps\": 3 }, \"batch\"")).unwrap();
        let rate = JobSpec::from_json(&SPEC.replace("0.1", "0.2")).unwrap();
        let sets =
            "\"validation_sets\": { \"dev\": { \"features\": [\"x\"], \"labels\": [\"y\"] } }, \"format\"";
        let measured =
            "\"evaluation\": { \"every_steps\": 3 }, \"early_stopping\": { \"metric\": \"loss\" }, \"batch\"";
        let measured = SPEC.replace("\"batch\"", measured).replace("\"format\"", sets);
        assert_eq!(digest(&spec), digest(&fleet));
        assert_eq!(digest(&spec), digest(&JobSpec::from_json(&measured).unwrap()));
        assert_ne!(digest(&spec), digest(&rate));
    }
}

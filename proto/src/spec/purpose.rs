//! What a job is for: to train, or only to evaluate or predict with weights that there are.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::checkpoint::SCHEMES;
use super::{
    ConsistencySpec, DataSet, EvaluationSpec, JobSpec, Loss, MissingRule, MissingSpec, OnError, Transform,
};
use crate::error::Result;
use crate::predictions::PredictionFormat;

/// What a job is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Train a model.
    #[default]
    Train,
    /// Evaluate the weights of `model.initial` on the validation records, those of each set by
    /// itself.
    Evaluate,
    /// Write what the model with the weights of `model.initial` says of each record.
    Predict,
}

impl Purpose {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether the job computes gradients.
    pub const fn trains(self) -> bool {
        matches!(self, Self::Train)
    }
}

/// Records to predict, and the place of the predictions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the settings of [predict]")]
pub struct PredictSpec {
    /// Data set whose records are predicted. Default: `validation`.
    #[serde(default = "validation")]
    pub on: DataSet,
    /// File of the predictions: a path (relative to the job file), `file://`, `s3://`, `gs://`,
    /// `az://` or, in one process, `memory://`. Every worker must reach it. Its ending says the
    /// format: `.jsonl`, `.npy` or `.parquet`.
    pub url: String,
    /// Largest size in bytes of all parts that are joined into one file. Larger ones stay as
    /// numbered files. Default: 1 GiB.
    #[serde(default = "gib")]
    pub join_bytes_max: u64,
}

const fn validation() -> DataSet {
    DataSet::Validation
}

const fn gib() -> u64 {
    1 << 30
}

/// Ending of the name of the folder with the parts, after the name of the file.
const PARTS: &str = ".parts";

impl PredictSpec {
    /// Creates the section with the usual limit. `url` names the file.
    pub const fn new(on: DataSet, url: String) -> Self {
        Self { on, url, join_bytes_max: gib() }
    }

    /// Returns the folder of the file as a path or URL, and the file's name.
    ///
    /// ```
    /// use proto::spec::{DataSet, PredictSpec};
    ///
    /// let at = |url: &str| PredictSpec::new(DataSet::Validation, url.to_owned());
    /// assert_eq!(at("/a/b.npy").place(), ("/a".to_owned(), "b.npy"));
    /// assert_eq!(at("/b.npy").place(), ("/".to_owned(), "b.npy"));
    /// assert_eq!(at("s3://bucket/b.npy").place(), ("s3://bucket".to_owned(), "b.npy"));
    /// assert_eq!(at("memory://b.npy").place(), ("memory://".to_owned(), "b.npy"));
    /// ```
    pub fn place(&self) -> (String, &str) {
        let (folder, file) = self.url.rsplit_once('/').unwrap_or((".", self.url.as_str()));
        let is_root = folder.is_empty() || folder.ends_with('/');
        (if is_root { format!("{folder}/") } else { folder.to_owned() }, file)
    }

    /// Returns the name of the folder of the parts, beside the file.
    pub fn parts_folder(&self) -> String {
        format!("{}{PARTS}", self.place().1)
    }

    /// Returns the format of the file. `None`: its ending is none of the known ones.
    pub fn format(&self) -> Option<PredictionFormat> {
        PredictionFormat::of_name(self.place().1)
    }

    /// Makes a path absolute. It starts from the job file's folder.
    pub(super) fn settle(&mut self, folder: &Path) {
        if !self.url.contains("://") && !self.url.is_empty() {
            self.url = folder.join(&self.url).to_string_lossy().into_owned();
        }
    }
}

impl JobSpec {
    /// Returns the data set that a job without training goes over. `None`: the job trains.
    pub fn measured_set(&self) -> Option<DataSet> {
        match self.purpose {
            Purpose::Train => None,
            Purpose::Evaluate => Some(DataSet::Validation),
            Purpose::Predict => Some(self.predict.as_ref().map_or(DataSet::Validation, |predict| predict.on)),
        }
    }

    /// Returns whether the files of a data set must have labels. Those that the job predicts need
    /// none. Labels that they have are not read with their records.
    pub fn needs_labels(&self, set: DataSet) -> bool {
        let files = |set| self.data.files_of(set);
        self.purpose != Purpose::Predict || self.measured_set().and_then(files) != files(set)
    }

    /// Returns this job with another purpose than training, and the weights `initial`. What belongs
    /// to training alone is left out. Training records are transformed like validation records. A
    /// job that predicts skips no record, because predictions have each one.
    ///
    /// # Errors
    /// The result contradicts itself: every violation at once.
    pub fn measuring(
        mut self,
        purpose: Purpose,
        initial: String,
        predict: Option<PredictSpec>,
    ) -> Result<Self> {
        self.purpose = purpose;
        self.model.initial = Some(initial);
        self.predict = predict;
        self.checkpoint = None;
        self.evaluation = match purpose {
            Purpose::Evaluate => self.evaluation.measuring(),
            Purpose::Train | Purpose::Predict => EvaluationSpec::default(),
        };
        self.early_stopping = None;
        self.consistency = ConsistencySpec::default();
        self.data.mixup = None;
        if purpose == Purpose::Predict {
            // A file of predictions has the records of one set.
            self.data.validation_sets.clear();
            self.data.on_error = OnError::Fail;
            self.data.max_bad = None;
            for missing in self.data.missing.values_mut() {
                if *missing == MissingSpec::Rule(MissingRule::Skip) {
                    *missing = MissingSpec::Rule(MissingRule::Fail);
                }
            }
        }
        if self.measured_set() == Some(DataSet::Train) {
            for (column, transforms) in std::mem::take(&mut self.data.validation_transforms) {
                match transforms.is_empty() {
                    true => self.data.transforms.remove(&column),
                    false => self.data.transforms.insert(column, transforms),
                };
            }
        }
        self.validate()?;
        Ok(self)
    }

    pub(super) fn validate_purpose(&self, check: &mut impl FnMut(bool, String)) {
        let validates = self.data.validates();
        let purpose = self.purpose;
        check(
            purpose == Purpose::Predict || self.predict.is_none(),
            "predict: only purpose = \"predict\" has this section; remove it, or use `ebb predict`"
                .to_owned(),
        );
        if purpose.trains() {
            return;
        }
        check(
            self.model.initial.is_some(),
            "model.initial: a job that does not train needs the weights to compute with; give a file or a checkpoint"
                .to_owned(),
        );
        check(
            self.checkpoint.is_none(),
            "checkpoint: a job that does not train saves none; remove the section".to_owned(),
        );
        check(
            self.measured_set() != Some(DataSet::Validation) || validates,
            "data.validation: the job has no validation records; give e.g. --set \
             'data.validation={ files = [\"test.csv\"] }'"
                .to_owned(),
        );
        if purpose == Purpose::Predict {
            self.validate_predictions(check);
        }
    }

    fn validate_predictions(&self, check: &mut impl FnMut(bool, String)) {
        check(
            self.model.loss != Loss::Module,
            "model.loss: a script that computes its loss needs labels for its outputs, so nothing can be predicted; let \
             forward(features) return the outputs, and name their loss, e.g. loss = \"cross_entropy\""
                .to_owned(),
        );
        let Some(predict) = &self.predict else {
            check(false, "predict: purpose = \"predict\" needs this section with `url`".to_owned());
            return;
        };
        let url = &predict.url;
        let known = SCHEMES.iter().any(|scheme| url.starts_with(scheme));
        check(
            known || !url.is_empty() && !url.contains("://"),
            format!(
                "predict.url: `{url}` is neither a path nor a URL that begins with {}",
                SCHEMES.join(", ")
            ),
        );
        let endings = PredictionFormat::ALL.map(|format| format!(".{format}")).join(", ");
        check(
            predict.format().is_some(),
            format!("predict.url: `{url}` must end in one of {endings}, which says the format"),
        );
        check(
            predict.format() != Some(PredictionFormat::Npy) || self.data.validation_fraction.is_none(),
            "predict.url: a .npy file has no record numbers, and data.validation_fraction draws records from everywhere; \
             use .jsonl or .parquet"
                .to_owned(),
        );
        check(
            !self.data.may_skip(),
            "data.on_error: predictions have each record, so none can be skipped; bad records must be mended or given a \
             value (data.missing)"
                .to_owned(),
        );
        check(
            self.data.validation_sets.is_empty(),
            "data.validation_sets: a job that predicts has none; it predicts `data.validation` or `data.train`".to_owned(),
        );
        if predict.on == DataSet::Train {
            for (column, transforms) in &self.data.transforms {
                let random = transforms.iter().find(|transform| transform.is_random());
                check(
                    random.is_none(),
                    format!(
                        "data.transforms.{column}: `{}` is random, and a prediction must not be; say in \
                         data.validation_transforms.{column} what happens instead",
                        random.map_or("", Transform::name)
                    ),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{parse, parse_unchecked};

    const JOB: &str = r#"
name = "digits"
epochs = 10
[model]
builtin = "mlp"
[data]
format = "csv"
train = { files = ["a.csv"] }
validation = { files = ["b.csv"] }
[batch]
micro = 32
[optimizer]
kind = "adam"
learning_rate = 1e-3
[consistency]
mode = "async"
[checkpoint]
url = "checkpoints"
every_epochs = 1
"#;

    fn job(text: &str) -> JobSpec {
        parse(text, Path::new("jobs/digits.toml"), &[]).unwrap()
    }

    fn predict(spec: JobSpec, on: DataSet, url: &str) -> Result<JobSpec> {
        let predict = PredictSpec::new(on, url.to_owned());
        spec.measuring(Purpose::Predict, "w".to_owned(), Some(predict))
    }

    #[test]
    fn a_job_trains_unless_it_says_otherwise_and_then_the_wire_form_is_as_before() {
        let spec = job(JOB);
        assert!(spec.purpose.trains() && spec.measured_set().is_none());
        let json = spec.to_json();
        assert!(!json.contains("purpose") && !json.contains("predict"), "{json}");
    }

    #[test]
    fn what_belongs_to_training_is_left_out() {
        let spec = job(JOB).measuring(Purpose::Evaluate, "w".to_owned(), None).unwrap();
        assert_eq!((spec.checkpoint.as_ref(), spec.consistency), (None, ConsistencySpec::default()));
        assert_eq!(spec.measured_set(), Some(DataSet::Validation));
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
        let spec = predict(job(JOB), DataSet::Train, "/out/p.npy").unwrap();
        assert_eq!(spec.measured_set(), Some(DataSet::Train));
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
    }

    #[test]
    fn a_path_in_a_job_file_starts_from_its_folder() {
        let text = JOB.replace("epochs = 10", "epochs = 10\npurpose = \"predict\"");
        let text = text.replace("builtin = \"mlp\"", "builtin = \"mlp\"\ninitial = \"w\"");
        let (text, _) = text.split_once("[checkpoint]").unwrap();
        let spec = job(&format!("{text}[predict]\nurl = \"to/p.jsonl\"\n"));
        let predict = spec.predict.unwrap();
        assert!(predict.url.starts_with('/') && predict.url.ends_with("jobs/to/p.jsonl"), "{}", predict.url);
        assert_eq!((predict.on, predict.join_bytes_max), (DataSet::Validation, 1 << 30));
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_advice() {
        let refused = |result: Result<JobSpec>| result.unwrap_err().to_string();
        let without = job(&JOB.replace("validation = { files = [\"b.csv\"] }", ""));
        let message = refused(without.clone().measuring(Purpose::Evaluate, "w".to_owned(), None));
        assert!(message.contains("data.validation: the job has no validation records"), "{message}");
        assert!(predict(without, DataSet::Train, "/p.npy").is_ok());

        let message = refused(predict(job(JOB), DataSet::Train, "/p.csv"));
        assert!(message.contains("`/p.csv` must end in one of .jsonl, .npy, .parquet"), "{message}");
        assert!(refused(predict(job(JOB), DataSet::Train, "ftp://h/p.npy")).contains("ftp://h/p.npy"));
        assert!(refused(job(JOB).measuring(Purpose::Predict, "w".to_owned(), None)).contains("`url`"));

        let module = JOB.replace("builtin = \"mlp\"", "script = \"m.pt\"\nloss = \"module\"");
        let message = refused(predict(job(&module), DataSet::Train, "/p.npy"));
        assert!(message.contains("let forward(features) return the outputs"), "{message}");

        let fraction = JOB.replace("validation = { files = [\"b.csv\"] }", "validation_fraction = 0.5");
        assert!(refused(predict(job(&fraction), DataSet::Validation, "/p.npy")).contains("record numbers"));
        assert!(predict(job(&fraction), DataSet::Validation, "/p.jsonl").is_ok());

        let spec = job(JOB);
        let predict = Some(PredictSpec::new(DataSet::Train, "/p.npy".to_owned()));
        let message = refused(JobSpec { predict, ..spec }.validate().map(|()| job(JOB)));
        assert!(message.contains("only purpose = \"predict\""), "{message}");
        let message =
            refused(JobSpec { purpose: Purpose::Evaluate, ..job(JOB) }.validate().map(|()| job(JOB)));
        assert!(message.contains("model.initial") && message.contains("checkpoint: a job that"), "{message}");
    }

    #[test]
    fn a_job_that_predicts_skips_nothing_and_one_that_evaluates_may() {
        let skipping = "on_error = \"skip\"\nmax_bad = 0.5\nmissing = { a = \"skip\", b = 0 }";
        let skipping = job(&JOB.replace("format = \"csv\"", &format!("format = \"csv\"\n{skipping}")));
        let spec = predict(skipping.clone(), DataSet::Validation, "/p.jsonl").unwrap();
        assert!(!spec.data.may_skip() && spec.data.max_bad.is_none());
        assert_eq!(spec.data.missing["a"], MissingSpec::Rule(MissingRule::Fail));
        assert_eq!(spec.data.missing["b"], skipping.data.missing["b"]);
        let spec = skipping.clone().measuring(Purpose::Evaluate, "w".to_owned(), None).unwrap();
        assert_eq!(spec.data, skipping.data);

        let mut by_hand = predict(skipping, DataSet::Validation, "/p.jsonl").unwrap();
        by_hand.data.on_error = OnError::Skip;
        let message = by_hand.validate().unwrap_err().to_string();
        assert!(message.contains("data.on_error: predictions have each record"), "{message}");
    }

    #[test]
    fn only_files_that_are_predicted_need_no_labels() {
        let needs = |spec: &JobSpec| [DataSet::Train, DataSet::Validation].map(|set| spec.needs_labels(set));
        let spec = job(JOB);
        assert_eq!(needs(&spec), [true, true]);
        assert_eq!(needs(&predict(spec.clone(), DataSet::Validation, "/p.npy").unwrap()), [true, false]);
        assert_eq!(needs(&predict(spec.clone(), DataSet::Train, "/p.npy").unwrap()), [false, true]);
        assert_eq!(needs(&spec.measuring(Purpose::Evaluate, "w".to_owned(), None).unwrap()), [true, true]);
        let fraction = job(&JOB.replace("validation = { files = [\"b.csv\"] }", "validation_fraction = 0.5"));
        assert_eq!(needs(&predict(fraction, DataSet::Validation, "/p.jsonl").unwrap()), [false, false]);

        let lists = "format = \"npy\"\ntrain = { x = [\"x.npy\"], labels = [\"y.npy\"] }\n\
                     validation = { x = [\"new.npy\"] }";
        let begin = JOB.find("format = ").unwrap();
        let end = JOB.find("[batch]").unwrap();
        let text = format!("{}{lists}\n{}", &JOB[..begin], &JOB[end..]);
        let message = parse(&text, Path::new("j.toml"), &[]).unwrap_err().to_string();
        assert!(message.contains("data.validation: no list of files for the label `labels`"), "{message}");
        let unchecked = parse_unchecked(&text, Path::new("j.toml"), &[]).unwrap();
        assert!(predict(unchecked.clone(), DataSet::Validation, "/p.npy").is_ok());
        assert!(predict(unchecked, DataSet::Train, "/p.npy").is_err());
    }

    #[test]
    fn training_records_are_transformed_like_validation_records() {
        let transforms = "transforms = { image = [{ op = \"decode\" }, { op = \"horizontal_flip\" }] }\n\
                          validation_transforms = { image = [{ op = \"decode\" }] }";
        let given = |text: &str| JOB.replace("format = \"csv\"", &format!("format = \"csv\"\n{text}"));
        let Ok(spec) = parse(&given(transforms), Path::new("j.toml"), &[]) else {
            panic!("{:?}", parse(&given(transforms), Path::new("j.toml"), &[]));
        };
        let spec = predict(spec, DataSet::Train, "/p.jsonl").unwrap();
        assert_eq!(spec.data.transforms["image"].len(), 1);
        assert!(spec.data.validation_transforms.is_empty());
    }
}

//! Checks beyond the types of a specification: ranges, and parts that contradict each other.

use std::time::Duration;

use super::mixup::{ALPHA_MAX, ALPHA_MIN, MixupSpec};
use super::transform::CLASSES_MAX;
use super::{
    Autocast, BLOCK_MAX, DataSet, DataSpec, DeviceKind, FEATURES, FILES, FilesSpec, Format,
    INDEX_RECORDS_MAX, InputSpec, InputsSpec, JobSpec, LABELS, LimitsSpec, Loss, Mode, Normalize, Order,
    PROGRAM, Shuffle, Transform, WORKERS_MAX, WorkersSpec, data_url, index_records, validation,
};
use crate::error::{Error, Result};
use crate::hint;

/// Longest duration of a limit.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl JobSpec {
    /// Checks ranges, and parts that may contradict each other.
    ///
    /// # Errors
    /// [`Error::Invalid`] with every violation.
    pub fn validate(&self) -> Result<()> {
        let mut wrong = Vec::new();
        let mut check = |ok: bool, message: String| {
            if !ok {
                wrong.push(message);
            }
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        check(
            (1..=64).contains(&self.name.len()) && self.name.chars().all(plain),
            format!("name: `{}` is not 1 to 64 letters, digits, `-`, `_` or `.`", self.name),
        );
        check(
            self.name.is_empty() || self.name.chars().any(|c| c != '.'),
            format!(
                "name: `{}` is no name of a folder; results and checkpoints lie in one of this name",
                self.name
            ),
        );
        check(self.epochs > 0, "epochs: 0 would train nothing; set 1 or more".to_owned());
        check(
            self.model.script.is_some() != self.model.builtin.is_some(),
            "model: give either `script` (a TorchScript file) or `builtin` (a network's name), not both or neither".to_owned(),
        );
        check(
            self.model.script.is_none() || self.model.options.is_empty(),
            "model.options: a script has none; they belong to a builtin network".to_owned(),
        );
        check(
            self.model.loss != Loss::Module || self.model.script.is_some() || self.is_driven(),
            "model.loss: \"module\" needs a script that returns its loss".to_owned(),
        );
        check(
            self.data.format != Format::Index
                || (self.model.loss == Loss::Module && self.model.builtin.is_some()),
            "data.format: \"index\" has numbers of records alone, for a program that drives its model itself; name \
             the format of the files"
                .to_owned(),
        );
        check(
            self.model.builtin.as_deref() != Some(PROGRAM) || self.model.loss == Loss::Module,
            format!(
                "model.builtin: `{PROGRAM}` is a model that a program drives and whose loss it computes; name another network"
            ),
        );
        check(
            !self.is_driven() || self.purpose.trains(),
            "purpose: without the program that drives its model, nobody can evaluate or predict records; measure it in \
             the loop with job.evaluate"
                .to_owned(),
        );
        check(
            self.data.validation_sets.is_empty() || !self.is_driven(),
            "data.validation_sets: a program that drives its model measures it on one set; remove them"
                .to_owned(),
        );
        for metric in &self.model.metrics {
            if let Some((reason, better)) = metric.misfit(self.model.loss) {
                check(false, format!("model.metrics: \"{metric}\" {reason}, use \"{better}\""));
            }
        }
        let smoothing = self.model.label_smoothing;
        check(
            (0.0..=1.0).contains(&smoothing),
            format!("model.label_smoothing = {smoothing}: a share from 0 to 1"),
        );
        check(
            smoothing == 0.0 || self.model.loss == Loss::CrossEntropy,
            "model.label_smoothing: only loss = \"cross_entropy\" has it; remove it, or change model.loss"
                .to_owned(),
        );
        for (setting, is_set) in [("autocast", self.model.autocast.is_some()), ("tf32", self.model.tf32)] {
            check(
                !is_set || !self.is_driven(),
                format!(
                    "model.{setting}: a program that drives its model decides how it computes; remove it, and set it in \
                     the loop"
                ),
            );
        }
        self.validate_mixup(&mut check);
        self.validate_purpose(&mut check);
        self.data.validate(|set| self.needs_labels(set), &mut check);
        self.validate_evaluation(&mut check);
        self.validate_early_stopping(&mut check);
        let (micro, effective) = (self.batch.micro, self.batch.effective.unwrap_or(self.batch.micro));
        let microbatches = effective.div_ceil(micro.max(1));
        check(micro > 0, "batch.micro: 0 records make no gradient; set 1 or more".to_owned());
        check(
            effective >= micro,
            format!(
                "batch.effective = {effective} is below batch.micro = {micro}; an update needs at least one microbatch"
            ),
        );
        check(
            micro == 0 || microbatches <= 65_536,
            format!("batch: effective / micro = {microbatches} microbatches per step, at most 65536"),
        );
        for message in self.optimizer.validate().err().map(|invalid| invalid.violations).unwrap_or_default() {
            check(false, message);
        }
        let (mode, delay) = (self.consistency.mode, self.consistency.delay);
        let takes_delay = matches!(mode, Mode::Pipelined | Mode::Bounded);
        check(
            delay.is_none() || takes_delay,
            "consistency.delay: only `pipelined` and `bounded` have one; change mode or remove it".to_owned(),
        );
        check(
            mode != Mode::Pipelined || delay != Some(0),
            "consistency.delay: `pipelined` needs 1 or more; without delay it is mode = \"sync\"".to_owned(),
        );
        check(delay.is_none_or(|delay| delay <= 64), "consistency.delay: at most 64".to_owned());
        let WorkersSpec { min, max } = self.fleet.workers;
        check(
            (1..=max).contains(&min) && max <= WORKERS_MAX,
            format!("fleet.workers: min = {min}, max = {max}; needs 1 <= min <= max <= {WORKERS_MAX}"),
        );
        check((1..=1024).contains(&self.fleet.ps), format!("fleet.ps = {}: from 1 to 1024", self.fleet.ps));
        check(
            self.fleet.device_memory.is_none() || self.fleet.device == Some(DeviceKind::Cuda),
            "fleet.device_memory: only workers on CUDA devices have one; set fleet.device = \"cuda\" or remove it"
                .to_owned(),
        );
        let scales =
            (self.model.autocast == Some(Autocast::F16)).then(|| "model.autocast = \"f16\"".to_owned());
        let norms = self.optimizer.needs_norms().map(|setting| format!("optimizer: {setting}"));
        if let Some(setting) = norms.or(scales) {
            check(
                self.fleet.ps == 1 || self.consistency.resolve().order == Order::Canonical,
                format!(
                    "{setting} needs the norm of each step over the whole model, and with consistency.mode = \
                     \"bounded\" or \"async\" each of the fleet.ps = {} ps applies steps in an order of its own; set fleet.ps \
                     to 1, or the mode to \"sync\" or \"pipelined\"",
                    self.fleet.ps
                ),
            );
        }
        if let Some(checkpoint) = &self.checkpoint {
            checkpoint.validate(&mut check);
        }
        let LimitsSpec { lease, stall, attempts_max, deaths_max, pull_timeout, pull_attempts_max } =
            self.limits;
        check(
            (Duration::from_millis(100)..=DAY).contains(&lease),
            "limits.lease: from 100ms to 24h".to_owned(),
        );
        check(
            (Duration::from_millis(100)..=DAY).contains(&stall),
            "limits.stall: from 100ms to 24h".to_owned(),
        );
        check(
            (Duration::from_millis(100)..=DAY).contains(&pull_timeout),
            "limits.pull_timeout: from 100ms to 24h".to_owned(),
        );
        check(
            attempts_max > 0 && deaths_max > 0 && (1..=10_000).contains(&pull_attempts_max),
            "limits: attempts_max, deaths_max and pull_attempts_max must be 1 or more, pull_attempts_max at most 10000".to_owned(),
        );
        if wrong.is_empty() { Ok(()) } else { Err(Error::Invalid(wrong)) }
    }

    fn validate_mixup(&self, check: &mut impl FnMut(bool, String)) {
        let Some(MixupSpec { alpha, classes }) = self.data.mixup else { return };
        check(
            (ALPHA_MIN..=ALPHA_MAX).contains(&alpha),
            format!("data.mixup.alpha = {alpha}: from {ALPHA_MIN} to {ALPHA_MAX}"),
        );
        check(
            (2..=CLASSES_MAX).contains(&classes),
            format!("data.mixup.classes = {classes}: from 2 to {CLASSES_MAX}"),
        );
        check(
            self.model.loss == Loss::CrossEntropy,
            "data.mixup: it makes probabilities of labels, which only loss = \"cross_entropy\" takes; remove it, or \
             change model.loss"
                .to_owned(),
        );
    }
}

impl DataSpec {
    fn validate(&self, needs_labels: impl Fn(DataSet) -> bool, check: &mut impl FnMut(bool, String)) {
        self.train.validate("data.train", self.format, check);
        for (name, files) in self.validation_files() {
            files.validate(&validation::section(name), self.format, check);
        }
        self.validate_sets(check);
        check(
            self.validation.is_none() || self.validation_fraction.is_none(),
            "data: give either `validation` (files) or `validation_fraction`, not both".to_owned(),
        );
        if let Some(fraction) = self.validation_fraction {
            check(
                fraction > 0.0 && fraction < 1.0,
                format!("data.validation_fraction = {fraction}: must be between 0 and 1"),
            );
        }
        let sets = self.validation_files().map(|(name, files)| (DataSet::Validation, name, files));
        for (set, name, files) in std::iter::once((DataSet::Train, "", &self.train)).chain(sets) {
            if !self.format.has_one_column() || !needs_labels(set) {
                continue;
            }
            let key = if set == DataSet::Train { "data.train".to_owned() } else { validation::section(name) };
            let label = self.label.as_deref().unwrap_or(LABELS);
            let known = files.lists.keys().map(String::as_str);
            let hint = hint::nearest(label, known.clone()).map(|key| format!("; did you mean `{key}`?"));
            check(
                files.lists.contains_key(label),
                format!(
                    "{key}: no list of files for the label `{label}`, only for `{}`{}",
                    known.collect::<Vec<_>>().join("`, `"),
                    hint.unwrap_or_default()
                ),
            );
        }
        let named = self.named_inputs();
        if let Some(inputs) = &named {
            let arguments = inputs.arguments();
            check(!arguments.is_empty(), "data.inputs: needs at least one column".to_owned());
            check(
                arguments.iter().all(|(_, input)| !input.columns().is_empty()),
                "data.inputs: each argument needs at least one column".to_owned(),
            );
            check(
                self.shape.is_none(),
                "data.shape: it belongs to `features`; with data.inputs or tokens, shapes are those of the columns"
                    .to_owned(),
            );
            check(
                self.normalize == Normalize::default(),
                "data.normalize: it belongs to `features`; with data.inputs or tokens, columns keep their values"
                    .to_owned(),
            );
        }
        for column in self.dtypes.keys() {
            let arguments = named.iter().flat_map(InputsSpec::arguments).collect::<Vec<_>>();
            let is_input =
                |(_, input): &(&str, InputSpec)| matches!(input, InputSpec::One(name) if name == column);
            check(
                arguments.iter().any(is_input),
                format!(
                    "data.dtypes.{column}: `{column}` is no column that data.inputs gives to an argument by itself"
                ),
            );
        }
        let windows = self.shuffle == Shuffle::Window;
        for (key, is_given) in [("window", self.window.is_some()), ("interleave", self.interleave.is_some())]
        {
            check(
                windows || !is_given,
                format!("data.{key}: only shuffle = \"window\" has it; remove it, or set data.shuffle"),
            );
        }
        check(self.window != Some(0), "data.window: 0 records make no window; set 1 or more".to_owned());
        check(
            self.interleave.is_none_or(|lanes| (1..=1024).contains(&lanes)),
            "data.interleave: from 1 to 1024".to_owned(),
        );
        check(
            !windows || self.validation_fraction.is_none(),
            "data.validation_fraction: it draws records from everywhere, and shuffle = \"window\" reads files in sequence; \
             give validation files, or use shuffle = \"records\""
                .to_owned(),
        );
        check(
            self.tokens.is_some() == (self.format == Format::Tokens),
            "data.tokens: format = \"tokens\" needs it, and no other format has it; give e.g. tokens = { dtype = \"u16\", \
             block = 1024 }"
                .to_owned(),
        );
        if let Some(tokens) = &self.tokens {
            let block = tokens.block;
            check(
                (1..=BLOCK_MAX).contains(&block),
                format!("data.tokens.block = {block}: from 1 to {BLOCK_MAX}"),
            );
            check(
                tokens.stride != Some(0),
                "data.tokens.stride: 0 repeats one record; set 1 or more".to_owned(),
            );
        }
        self.validate_transforms(check);
        self.validate_bad(check);
        for (column, &length) in &self.lengths {
            check(
                length > 0,
                format!("data.lengths.{column}: a record of no elements has no values; set 1 or more"),
            );
        }
        let Normalize { scale, mean, std } = self.normalize;
        check(
            [scale, mean, std].iter().all(|v| v.is_finite()) && scale != 0.0 && std != 0.0,
            format!(
                "data.normalize: scale = {scale}, mean = {mean}, std = {std}; must be finite, scale and std not 0"
            ),
        );
        check(
            self.shape.as_ref().is_none_or(|shape| !shape.is_empty() && !shape.contains(&0)),
            "data.shape: needs at least one dimension and none of size 0".to_owned(),
        );
    }
}

impl DataSpec {
    fn validate_transforms(&self, check: &mut impl FnMut(bool, String)) {
        let validates = self.validates();
        for (section, columns) in
            [("transforms", &self.transforms), ("validation_transforms", &self.validation_transforms)]
        {
            for (column, transforms) in columns {
                let key = format!("data.{section}.{column}");
                check(
                    !transforms.is_empty() || section == "validation_transforms",
                    format!("{key}: an empty list changes nothing; remove it"),
                );
                for transform in transforms {
                    transform.validate(&key, check);
                }
            }
        }
        check(
            validates || self.validation_transforms.is_empty(),
            "data.validation_transforms: the job has no validation records; give `validation`, or remove it"
                .to_owned(),
        );
        for (column, transforms) in &self.transforms {
            let random = transforms.iter().find(|transform| transform.is_random());
            check(
                !validates || random.is_none() || self.validation_transforms.contains_key(column),
                format!(
                    "data.transforms.{column}: `{}` is random, and validation would measure something else each time; say \
                     in data.validation_transforms.{column} what it does instead",
                    random.map_or("", Transform::name)
                ),
            );
        }
        for (column, transforms) in &self.validation_transforms {
            let random = transforms.iter().find(|transform| transform.is_random());
            check(
                random.is_none(),
                format!(
                    "data.validation_transforms.{column}: `{}` is random; validation measures the same records each time",
                    random.map_or("", Transform::name)
                ),
            );
        }
    }
}

impl FilesSpec {
    fn validate(&self, key: &str, format: Format, check: &mut impl FnMut(bool, String)) {
        check(!self.is_empty(), format!("{key}: needs at least one file"));
        let counts: Vec<_> =
            self.lists.iter().map(|(key, files)| format!("{} of `{key}`", files.len())).collect();
        check(
            self.lists.values().all(|files| files.len() == self.len()),
            format!("{key}: {} files; each needs its partner in every list", counts.join(", ")),
        );
        if format.has_one_column() {
            check(
                !self.lists.contains_key(FILES),
                format!(
                    "{key}.files: a file of this format has one column; name a list of files after each column"
                ),
            );
        } else {
            let is_list = |key: &String| key == FILES || key == FEATURES;
            let others: Vec<_> = self.lists.keys().filter(|key| !is_list(key)).map(String::as_str).collect();
            check(
                others.is_empty() && self.lists.len() <= 1,
                format!(
                    "{key}: files of this format have all columns, the label too; give one list, `files`, and remove `{}`",
                    if others.is_empty() { FEATURES.to_owned() } else { others.join("`, `") }
                ),
            );
        }
        if let Some((begin, end)) = self.records {
            check(begin < end, format!("{key}.records = [{begin}, {end}]: the range is empty"));
        }
        for file in self.lists.values().flatten() {
            let (checked, shown) = (data_url::check(file), data_url::shown(file));
            check(checked.is_ok(), format!("{key}: `{shown}`: {}", checked.err().unwrap_or_default()));
            check(
                format != Format::Images || !(data_url::is_remote(file) && file.starts_with("http")),
                format!(
                    "{key}: `{shown}`: a web server does not list the images of a folder; read them from s3://, gs:// or \
                     az://, or write them as tar archives"
                ),
            );
            check(
                format != Format::Index || index_records(file).is_some(),
                format!(
                    "{key}: `{shown}`: expected a number of records from 1 to {INDEX_RECORDS_MAX}; format = \"index\" has \
                     no files"
                ),
            );
        }
    }
}

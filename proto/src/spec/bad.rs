//! What a job does with records that lack a value, or have one that nobody can decode.

use serde::{Deserialize, Serialize};

use super::{DataSpec, MissingRule, MissingSpec, OnError};

/// Share of the records of a set that may be skipped, unless the job sets another one.
pub const MAX_BAD: f64 = 0.001;

/// Most records of a set that a job skips, whatever its share. Master and workers keep their
/// numbers, and the journal writes them as a whole.
pub const SKIPPED_MAX: u64 = 65_536;

/// Value in place of one that is missing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, true, false, or a text")]
pub enum FillSpec {
    /// A flag, for a column of type `bool`. In other columns of numbers it is 0 or 1.
    Flag(bool),
    /// A number. Each element of a record gets it; a list gets one element.
    Number(f64),
    /// A text, for a column of texts or bytes.
    Text(String),
}

impl MissingSpec {
    /// Returns the value that takes the place of a missing one. `None`: there is none.
    pub fn fill(&self) -> Option<FillSpec> {
        match self {
            Self::Rule(_) => None,
            Self::Flag(flag) => Some(FillSpec::Flag(*flag)),
            Self::Number(number) => Some(FillSpec::Number(*number)),
            Self::Table { value } => Some(value.clone()),
        }
    }
}

impl OnError {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl DataSpec {
    /// Returns whether the job may skip records.
    pub fn may_skip(&self) -> bool {
        let skips = |missing: &MissingSpec| *missing == MissingSpec::Rule(MissingRule::Skip);
        self.on_error == OnError::Skip || self.missing.values().any(skips)
    }

    /// Returns how many of a set's `records` the job may skip: `max_bad` of them, rounded down, and
    /// at most [`SKIPPED_MAX`].
    pub fn skipped_max(&self, records: u64) -> u64 {
        if !self.may_skip() {
            return 0;
        }
        let share = self.max_bad.unwrap_or(MAX_BAD);
        // 0.29 of 100 records are 29, and not 28.999999999999996.
        let most = (share * records as f64 + 1e-6).floor();
        (most as u64).min(records).min(SKIPPED_MAX)
    }

    /// Checks the settings for bad and missing values.
    pub(super) fn validate_bad(&self, check: &mut impl FnMut(bool, String)) {
        let share = self.max_bad.unwrap_or(MAX_BAD);
        check(
            (0.0..=1.0).contains(&share),
            format!("data.max_bad = {share}: a share of the records, from 0 to 1"),
        );
        check(
            self.max_bad.is_none() || self.may_skip(),
            "data.max_bad: the job skips nothing; set data.on_error = \"skip\", or remove it".to_owned(),
        );
        for (column, missing) in &self.missing {
            let is_finite =
                |fill: &FillSpec| !matches!(fill, FillSpec::Number(number) if !number.is_finite());
            check(
                missing.fill().as_ref().is_none_or(is_finite),
                format!("data.missing.{column}: the value must be finite"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(extra: &str) -> DataSpec {
        let text = format!("format = \"csv\"\ntrain = {{ files = [\"a.csv\"] }}\n{extra}");
        toml::from_str(&text).unwrap()
    }

    fn wrong(spec: &DataSpec) -> Vec<String> {
        let mut wrong = Vec::new();
        spec.validate_bad(&mut |ok, message| {
            if !ok {
                wrong.push(message);
            }
        });
        wrong
    }

    #[test]
    fn what_is_missing_has_a_rule_or_a_value() {
        let spec = spec(
            r#"missing = { age = "fail", income = 0, new = true, city = { value = "Oslo" }, sex = "skip" }"#,
        );
        let fill = |column: &str| spec.missing[column].fill();
        assert_eq!((fill("age"), fill("sex")), (None, None));
        assert_eq!(fill("income"), Some(FillSpec::Number(0.0)));
        assert_eq!(fill("new"), Some(FillSpec::Flag(true)));
        assert_eq!(fill("city"), Some(FillSpec::Text("Oslo".to_owned())));
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<DataSpec>(&json).unwrap(), spec, "{json}");
        for bad in ["missing = { age = \"drop\" }", "missing = { age = [1] }"] {
            let text = format!("format = \"csv\"\ntrain = {{ files = [\"a.csv\"] }}\n{bad}");
            let error = toml::from_str::<DataSpec>(&text).unwrap_err().to_string();
            assert!(error.contains("\"fail\", \"skip\", a number"), "{error}");
        }
    }

    #[test]
    fn a_share_of_the_records_may_be_skipped() {
        assert_eq!(spec("").skipped_max(1 << 40), 0);
        let skips = |share: &str| spec(&format!("on_error = \"skip\"\n{share}"));
        assert_eq!(skips("").skipped_max(2999), 2);
        assert_eq!(skips("max_bad = 0.29").skipped_max(100), 29);
        assert_eq!(skips("max_bad = 1.0").skipped_max(100), 100);
        assert_eq!(skips("max_bad = 1.0").skipped_max(1 << 40), SKIPPED_MAX);
        assert_eq!(skips("max_bad = 0.0").skipped_max(100), 0);
        assert_eq!(spec("missing = { a = \"skip\" }\nmax_bad = 0.5").skipped_max(10), 5);
    }

    #[test]
    fn settings_that_contradict_each_other_are_named() {
        assert!(wrong(&spec("on_error = \"skip\"\nmax_bad = 1.0")).is_empty());
        assert!(wrong(&spec("max_bad = 0.1"))[0].contains("the job skips nothing"));
        assert!(wrong(&spec("on_error = \"skip\"\nmax_bad = 1.5"))[0].contains("from 0 to 1"));
        assert!(
            wrong(&spec("missing = { a = nan }"))[0].contains("data.missing.a: the value must be finite")
        );
    }
}

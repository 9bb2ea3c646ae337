//! The name under which a master keeps what a worker found in a file, for later jobs.

use std::collections::BTreeMap;

use serde_json::json;

use super::{DataSet, FilesSpec, Format, JobSpec, Shuffle};
use crate::artifact;

impl JobSpec {
    /// Returns the key of each of a data set's own files: a SHA-256 of all that the index of the
    /// file depends on, except for its content. Equal keys of any two jobs mean that the same index
    /// is wanted. Empty: the set has no files of its own, or their index costs nothing.
    pub fn index_keys(&self, set: DataSet) -> Vec<String> {
        let Some(files) = self.data.files(set).filter(|_| self.data.format != Format::Index) else {
            return Vec::new();
        };
        let mut data = self.data.clone();
        // Other files, and the order of the records, change nothing.
        data.train = FilesSpec { records: None, lists: BTreeMap::new() };
        data.validation = None;
        data.validation_sets = BTreeMap::new();
        (data.shuffle, data.window, data.interleave) = (Shuffle::default(), None, None);
        let settings = json!({
            "data": data,
            "set": set,
            "labelled": self.needs_labels(set),
            "purpose": self.purpose,
            "loss": self.model.loss,
            // The first training folder numbers the classes of images.
            "classes": (self.data.format == Format::Images).then(|| self.data.train.name(0)),
        });
        let settings = settings.to_string();
        let key = |file| {
            let group = json!(files.group(file).collect::<BTreeMap<_, _>>());
            artifact::sha256_hex(format!("{settings}{group}").as_bytes())
        };
        (0..files.len()).map(key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(data: &str, more: &str) -> JobSpec {
        JobSpec::from_json(&format!(
            r#"{{
                "name": "x", "epochs": 4, "model": {{ "builtin": "linear", "loss": "mse" }}, "batch": {{ "micro": 2 }},
                "optimizer": {{ "kind": "adam", "learning_rate": 0.1 }}, "data": {{ {data} }}{more}
            }}"#
        ))
        .unwrap()
    }

    const CSV: &str = r#""format": "csv", "train": { "files": ["a.csv", "b.csv"] }"#;

    #[test]
    fn jobs_that_want_the_same_of_a_file_have_the_same_key() {
        let one = spec(CSV, "");
        let key = one.index_keys(DataSet::Train)[0].clone();
        assert_eq!(key.len(), 64);
        let longer =
            spec(&CSV.replace(", \"b.csv\"", "").replace("]", "], \"records\": [0, 9]"), ", \"seed\": 7");
        assert_eq!(longer.index_keys(DataSet::Train)[0], key);
        let shuffled = spec(&format!("{CSV}, \"shuffle\": \"window\", \"window\": 5"), "");
        assert_eq!(shuffled.index_keys(DataSet::Train)[0], key);
        assert_eq!(spec(&CSV.replace("a.csv\", \"b", "b.csv\", \"a"), "").index_keys(DataSet::Train)[1], key);
    }

    #[test]
    fn another_file_or_another_reading_of_it_has_another_key() {
        let key = |data: &str, file: usize| spec(data, "").index_keys(DataSet::Train)[file].clone();
        let one = key(CSV, 0);
        assert_ne!(one, key(CSV, 1));
        assert_eq!(spec(CSV, "").index_keys(DataSet::Train).len(), 2);
        assert!(spec(CSV, "").index_keys(DataSet::Validation).is_empty());
        for more in [
            r#""header": false"#,
            r#""label": "y""#,
            r#""inputs": ["x"]"#,
            r#""missing": { "x": "skip" }"#,
            r#""transforms": { "x": [{ "op": "log" }] }, "inputs": ["x"]"#,
        ] {
            assert_ne!(one, key(&format!("{CSV}, {more}"), 0), "{more}");
        }
        let validated = spec(&format!("{CSV}, \"validation\": {{ \"files\": [\"a.csv\"] }}"), "");
        assert_ne!(one, validated.index_keys(DataSet::Validation)[0]);
        assert_eq!(one, validated.index_keys(DataSet::Train)[0]);
        let images = |first: &str| {
            format!(
                r#""format": "images", "train": {{ "files": ["{first}", "b"] }}, "inputs": ["image"], "label": "class""#
            )
        };
        assert_ne!(key(&images("a"), 1), key(&images("c"), 1), "other classes");
    }
}

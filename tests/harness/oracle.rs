//! The job of the counting oracle. Each weight of its model ends as the number of times that its
//! record was applied, so that a lost record and a repeated one are both seen. The network is in
//! `tests/simulation/model.rs`, the program in `examples/oracle.rs`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::{model, summary};

/// Records of the data: 128 microbatches of 8, and 32 steps in each epoch.
const RECORDS: u64 = 1024;

/// A job file with its data. They exist as long as this value.
pub struct Oracle {
    folder: TempDir,
    epochs: u64,
}

impl Oracle {
    /// Creates a job of so many epochs. Each microbatch takes `millis` on any machine, or no longer
    /// than it must.
    pub fn new(epochs: u64, millis: Option<u64>) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let data: String = (0..RECORDS).map(|record| format!("{record},0\n")).collect();
        fs::write(folder.path().join("data.csv"), data).expect("the data can be written");
        let model = match millis {
            Some(millis) => format!(
                "builtin = \"paced\", options = {{ of = \"oracle\", millis = {millis}, records = {RECORDS} }}"
            ),
            None => format!("builtin = \"oracle\", options = {{ records = {RECORDS} }}"),
        };
        let text = format!(
            r#"
name = "oracle"
epochs = {epochs}
model = {{ {model}, loss = "mse" }}
data = {{ format = "csv", header = false, train = {{ features = ["data.csv"] }} }}
batch = {{ micro = 8, effective = 32 }}
optimizer = {{ kind = "sgd", learning_rate = 4.0 }}
"#
        );
        let oracle = Self { folder, epochs };
        fs::write(oracle.job(), text).expect("the job file can be written");
        oracle
    }

    /// Returns the path of the job file.
    pub fn job(&self) -> PathBuf {
        self.folder.path().join("job.toml")
    }

    /// Checks that every record counts once in each epoch, in the model and in the job's own
    /// summary. `what` names the run.
    pub fn check(&self, out: &Path, what: &str) {
        let counts = counts(&model(out));
        let once = BTreeMap::from([(self.epochs, RECORDS)]);
        assert_eq!(counts, once, "{what}: counts and how many records have them");
        assert_eq!(summary(out)["samples_applied"], RECORDS * self.epochs, "{what}");
    }
}

/// Returns for each count how many records have it.
fn counts(model: &[u8]) -> BTreeMap<u64, u64> {
    let tensors = safetensors::SafeTensors::deserialize(model).expect("a safetensors file");
    let mut counts = BTreeMap::new();
    for raw in tensors.tensor("counts").expect("the oracle's tensor").data().as_chunks::<4>().0 {
        let count = f32::from_le_bytes(*raw);
        assert!((count - count.round()).abs() < 1e-3, "{count} is no count");
        *counts.entry(count.round() as u64).or_default() += 1;
    }
    counts
}

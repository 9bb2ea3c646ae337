//! Rows from the folder that Criterion leaves: `GROUP/[FUNCTION/][VALUE/]new/{benchmark,estimates,sample}.json`.

use super::{read, rows::Row};
use anyhow::{Context, Result};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// What moves most: the limit of the optimizers' rows of the same size.
const LIMIT: &str = "memcpy/";

pub(super) fn rows(home: &Path) -> Result<Vec<Row>> {
    let mut measured = Vec::new();
    for folder in results(home)? {
        measured.push(Measured::read(&folder)?);
    }
    measured.sort_by(|one, other| one.id.cmp(&other.id));
    Ok(measured.iter().map(|one| one.row(&measured)).collect())
}

/// Folders that have a result.
fn results(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("list `{}`", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.ends_with("new") && path.join("benchmark.json").exists() {
                found.push(path);
            } else if path.is_dir() {
                folders.push(path);
            }
        }
    }
    Ok(found)
}

/// One function of a bench.
struct Measured {
    id: String,
    /// Of each sample, for one call.
    nanos: Vec<f64>,
    /// That a call moves.
    bytes: Option<f64>,
}

impl Measured {
    fn read(folder: &Path) -> Result<Self> {
        let parse = |name: &str| -> Result<Value> {
            let path = folder.join(name);
            serde_json::from_str(&read(&path)?).with_context(|| format!("`{}` is no JSON", path.display()))
        };
        let (benchmark, sample) = (parse("benchmark.json")?, parse("sample.json")?);
        let numbers = |key: &str| -> Vec<f64> {
            sample[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
        };
        Ok(Self {
            id: benchmark["full_id"].as_str().unwrap_or_default().to_owned(),
            nanos: numbers("times").iter().zip(numbers("iters")).map(|(time, calls)| time / calls).collect(),
            bytes: benchmark["throughput"]["Bytes"].as_f64(),
        })
    }

    fn row(&self, all: &[Self]) -> Row {
        let Some(rates) = self.rates() else {
            return Row::new(&self.id, "us", self.nanos.iter().map(|nanos| nanos / 1e3).collect(), None);
        };
        let size = self.id.rsplit_once('/').map(|(_, size)| size);
        let limit = size.and_then(|size| all.iter().find(|one| one.id == format!("{LIMIT}{size}")));
        let limit = limit.and_then(Self::rates).as_deref().and_then(super::rows::median);
        Row::new(&self.id, "GiB/s", rates, limit)
    }

    fn rates(&self) -> Option<Vec<f64>> {
        let bytes = self.bytes?;
        Some(self.nanos.iter().map(|nanos| bytes / f64::from(1 << 30) / (nanos / 1e9)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optimizers_are_held_against_memcpy_of_their_size() {
        let home = tempfile::tempdir().unwrap();
        let result = |folder: &str, id: &str, nanos: f64, bytes: Option<u64>| {
            let folder = home.path().join(folder).join("new");
            fs::create_dir_all(&folder).unwrap();
            let throughput = bytes.map(|bytes| serde_json::json!({ "Bytes": bytes }));
            let benchmark = serde_json::json!({ "full_id": id, "throughput": throughput });
            let sample = serde_json::json!({ "iters": [2.0, 4.0], "times": [2.0 * nanos, 4.0 * nanos] });
            fs::write(folder.join("benchmark.json"), benchmark.to_string()).unwrap();
            fs::write(folder.join("sample.json"), sample.to_string()).unwrap();
        };
        result("adam/chunk=1MiB", "adam/chunk=1MiB", 1e9, Some(1 << 30));
        result("memcpy/chunk=1MiB", "memcpy/chunk=1MiB", 0.5e9, Some(1 << 30));
        result("pull/partition=1MiB", "pull/partition=1MiB", 3e3, None);
        let rows = rows(home.path()).unwrap();
        let seen: Vec<_> = rows.iter().map(|row| (&*row.name, row.value, &*row.unit, row.ratio)).collect();
        let expected = [
            ("adam/chunk=1MiB", Some(1.0), "GiB/s", Some(0.5)),
            ("memcpy/chunk=1MiB", Some(2.0), "GiB/s", Some(1.0)),
            ("pull/partition=1MiB", Some(3.0), "us", None),
        ];
        assert_eq!(seen, expected);
    }
}

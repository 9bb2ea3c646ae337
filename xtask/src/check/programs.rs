//! Test programs: what cargo builds, and what each of them needs to run well beside others.

use crate::workspace;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::Stdio,
};

/// A program with tests or benches, as cargo built it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// `chaos` of the root package, `ps/integration` of another one; a library's tests are `ps/lib`.
    pub(crate) label: String,
    pub(crate) is_bench: bool,
    pub(crate) path: PathBuf,
    /// Where cargo would run it.
    pub(crate) folder: PathBuf,
}

impl Program {
    /// What cargo did not build: a command in its place.
    pub(crate) fn nowhere(label: &str) -> Self {
        let (label, folder) = (label.to_owned(), workspace::root().to_owned());
        Self { label, is_bench: false, path: PathBuf::new(), folder }
    }
}

/// Which half of the workspace is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    /// Everything, with libtorch.
    Whole,
    /// Without libtorch. With the object stores, so that all crates that never see libtorch are compiled once for both halves.
    WithoutTorch,
}

impl Half {
    /// What cargo is told to choose it.
    pub(crate) const fn flags(self) -> &'static str {
        match self {
            Self::Whole => "--workspace",
            Self::WithoutTorch => "--workspace --no-default-features --features cloud",
        }
    }
}

/// Builds what `args` of `cargo test` choose, and answers the programs.
///
/// # Errors
/// It does not build.
pub(crate) fn build(args: &str) -> Result<Vec<Program>> {
    let mut command = workspace::cargo();
    command.arg("test").args(args.split_whitespace()).args(["--no-run", "--message-format"]);
    command.arg("json-render-diagnostics").current_dir(workspace::root()).stdout(Stdio::piped());
    let mut child = command.spawn().context("run cargo")?;
    let stdout = BufReader::new(child.stdout.take().context("its output is piped")?);
    let mut programs = Vec::new();
    for line in stdout.lines() {
        let line = line.context("read cargo's output")?;
        // Tests may print to a build's output too; what is no JSON is not cargo's.
        if let Ok(message) = serde_json::from_str(&line) {
            programs.extend(program(&message));
        }
    }
    if !child.wait().context("wait for cargo")?.success() {
        bail!("it does not build");
    }
    Ok(programs)
}

/// The program that a message of cargo is about, if it is about one with tests.
fn program(message: &Value) -> Option<Program> {
    let (target, path) = (&message["target"], message["executable"].as_str()?);
    let kind = target["kind"][0].as_str()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let name = match kind {
        "lib" => "lib",
        _ => target["name"].as_str()?,
    };
    let package = folder.strip_prefix(workspace::root()).ok()?.display().to_string();
    let label = match (package.as_str(), kind) {
        ("", "lib") => "ebbflow/lib".to_owned(),
        ("", "bin") => format!("ebbflow/{name}"),
        ("", "example") => format!("examples/{name}"),
        ("", "bench") => format!("benches/{name}"),
        ("", _) => name.to_owned(),
        (package, _) => format!("{package}/{name}"),
    };
    Some(Program { label, is_bench: kind == "bench", path: path.into(), folder: folder.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn artifact(folder: &str, kind: &str, name: &str, test: bool) -> Value {
        json!({
            "reason": "compiler-artifact",
            "manifest_path": workspace::root().join(folder).join("Cargo.toml"),
            "target": { "kind": [kind], "name": name },
            "profile": { "test": test },
            "executable": "/target/program",
        })
    }

    #[test]
    fn programs_with_tests_are_found_and_named() {
        let label = |message| program(&message).map(|program| program.label);
        assert_eq!(label(artifact("", "test", "chaos", true)).as_deref(), Some("chaos"));
        assert_eq!(label(artifact("ps", "test", "integration", true)).as_deref(), Some("ps/integration"));
        assert_eq!(label(artifact("ps", "lib", "ps", true)).as_deref(), Some("ps/lib"));
        assert_eq!(label(artifact("", "lib", "ebbflow", true)).as_deref(), Some("ebbflow/lib"));
        assert_eq!(label(artifact("", "bin", "ebb", false)), None);
        assert!(program(&artifact("ps", "bench", "adam", true)).unwrap().is_bench);
        assert_eq!(label(json!({ "reason": "build-finished", "success": true })), None);
    }
}

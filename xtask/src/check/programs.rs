//! Test programs: what cargo builds, and which of their tests run.

use crate::workspace;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// What tells cargo to build everything, with libtorch.
pub(crate) const WHOLE: &str = "--workspace";

/// What tells cargo to build without libtorch. With the object stores, so that all crates that
/// never see libtorch are compiled once for both halves.
pub(crate) const WITHOUT_TORCH: &str = "--workspace --no-default-features --features cloud,cuda";

/// The test program of the root package that runs in parts: cargo links it once, and each of its
/// modules runs as a process of its own.
const IN_PARTS: &str = "system";

/// A program with tests or benches, as cargo built it, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// `simulation` of the root package, `ps/integration` of another one; a library's tests are
    /// `ps/lib`. A part has the name of its module: `chaos`.
    pub(crate) label: String,
    pub(crate) is_bench: bool,
    pub(crate) path: PathBuf,
    /// Folder in which cargo would run it.
    pub(crate) folder: PathBuf,
    /// Its first arguments, before those that choose tests.
    pub(crate) first: Vec<OsString>,
    /// The full names of a part's tests. Empty: it is a whole program.
    pub(crate) tests: Vec<String>,
}

impl Program {
    /// Returns the arguments that choose its tests with `text` in their names. `None`: a part
    /// without such a test.
    pub(crate) fn args(&self, text: &str) -> Option<Vec<OsString>> {
        if self.tests.is_empty() {
            let text = (!text.is_empty()).then(|| text.into());
            return Some(self.first.iter().cloned().chain(text).collect());
        }
        // By their full names: libtest would find a module's name inside the names of other tests
        // too.
        let is_named = |test: &&String| test.split_once("::").is_some_and(|(_, name)| name.contains(text));
        let chosen: Vec<OsString> = self.tests.iter().filter(is_named).map(OsString::from).collect();
        (!chosen.is_empty()).then(|| [vec!["--exact".into()], chosen].concat())
    }

    /// Returns the program without the tests of `other`. `None`: nothing is left of it. A whole
    /// program is left as it is, or not.
    pub(crate) fn without(mut self, other: &Self) -> Option<Self> {
        self.tests.retain(|test| !other.tests.contains(test));
        (!self.tests.is_empty()).then_some(self)
    }

    /// Splits the test program [`IN_PARTS`] into one program for each module.
    fn parts(self) -> Result<Vec<Self>> {
        if self.label != IN_PARTS {
            return Ok(vec![self]);
        }
        let mut list = Command::new(&self.path);
        list.args(["--list", "--format", "terse"]).current_dir(&self.folder).stderr(Stdio::inherit());
        let listed = list.output().with_context(|| format!("run {list:?}"))?;
        ensure!(listed.status.success(), "{list:?}: {}", listed.status);
        let modules = modules(&String::from_utf8_lossy(&listed.stdout))?;
        Ok(modules.into_iter().map(|(label, tests)| Self { label, tests, ..self.clone() }).collect())
    }
}

/// The full names of tests by their outermost module, from what a test program prints with `--list
/// --format terse`.
fn modules(listed: &str) -> Result<BTreeMap<String, Vec<String>>> {
    let mut modules = BTreeMap::<_, Vec<_>>::new();
    for line in listed.lines() {
        let test = line.strip_suffix(": test").and_then(|test| Some((test.split_once("::")?.0, test)));
        let (module, test) =
            test.with_context(|| format!("expected `MODULE::NAME: test`, found `{line}`"))?;
        modules.entry(module.to_owned()).or_default().push(test.to_owned());
    }
    ensure!(!modules.is_empty(), "the test program `{IN_PARTS}` lists no tests");
    Ok(modules)
}

/// Builds what `words` of `cargo test` choose, and answers the programs and parts of programs.
///
/// # Errors
/// It does not build.
pub(crate) fn build(words: &str) -> Result<Vec<Program>> {
    let mut command = workspace::cargo();
    command.arg("test").args(words.split_whitespace());
    command.args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let output =
        command.current_dir(workspace::root()).stderr(Stdio::inherit()).output().context("run cargo")?;
    ensure!(output.status.success(), "it does not build");
    let said = String::from_utf8_lossy(&output.stdout);
    // What is no JSON is not cargo's.
    let messages = said.lines().filter_map(|line| serde_json::from_str(line).ok());
    let parts = messages.filter_map(|message| program(&message)).map(Program::parts);
    Ok(parts.collect::<Result<Vec<_>>>()?.concat())
}

/// Returns the program that a message of cargo is about, if it is about one with tests.
fn program(message: &Value) -> Option<Program> {
    let (target, path) = (&message["target"], message["executable"].as_str()?);
    let kind = target["kind"][0].as_str()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let package = folder.strip_prefix(workspace::root()).ok()?.display().to_string();
    // The library of the Python package is one for Python, too.
    let kind = if ["cdylib", "rlib"].contains(&kind) { "lib" } else { kind };
    let name = if kind == "lib" { kind } else { target["name"].as_str()? };
    let label = match (package.as_str(), kind) {
        ("", "lib" | "bin") => format!("ebbflow/{name}"),
        ("", "example") => format!("examples/{name}"),
        ("", "bench") => format!("benches/{name}"),
        ("", _) => name.to_owned(),
        (package, _) => format!("{package}/{name}"),
    };
    let (is_bench, path, folder) = (kind == "bench", path.into(), folder.to_owned());
    Some(Program { label, is_bench, path, folder, first: Vec::new(), tests: Vec::new() })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::json;
    use std::ffi::OsStr;

    pub(crate) fn labelled(label: &str, tests: &[&str]) -> Program {
        let tests = tests.iter().map(|&test| test.to_owned()).collect();
        let (label, folder) = (label.to_owned(), workspace::root().to_owned());
        let (first, path) = (Vec::new(), "program".into());
        Program { label, is_bench: false, path, folder, first, tests }
    }

    #[test]
    fn programs_with_tests_are_found_and_named() {
        let built = |folder: &str, kind: &str, name: &str, test: bool| {
            program(&json!({
                "reason": "compiler-artifact",
                "manifest_path": workspace::root().join(folder).join("Cargo.toml"),
                "target": { "kind": [kind], "name": name },
                "profile": { "test": test },
                "executable": "/target/program",
            }))
        };
        for (folder, kind, name, label) in [
            ("", "test", "simulation", "simulation"),
            ("", "test", "system", IN_PARTS),
            ("ps", "test", "integration", "ps/integration"),
            ("ps", "lib", "ps", "ps/lib"),
            ("python", "cdylib", "_native", "python/lib"),
            ("", "lib", "ebbflow", "ebbflow/lib"),
        ] {
            assert_eq!(built(folder, kind, name, true).unwrap().label, label);
        }
        assert!(built("ps", "bench", "adam", true).unwrap().is_bench);
        assert_eq!(built("", "bin", "ebb", false), None);
        assert_eq!(program(&json!({ "reason": "build-finished", "success": true })), None);
    }

    #[test]
    fn each_test_is_in_the_part_of_its_outermost_module() {
        let modules = modules("chaos::kills: test\nharness::chaos::waits: test\nchaos::inner::stops: test\n");
        let expected = [
            ("chaos", vec!["chaos::kills", "chaos::inner::stops"]),
            ("harness", vec!["harness::chaos::waits"]),
        ];
        assert_eq!(format!("{:?}", modules.unwrap()), format!("{:?}", BTreeMap::from(expected)));
        for lost in ["", "kills: test\n", "chaos::kills: benchmark\n", "chaos::kills: test\n\n1 test\n"] {
            assert!(super::modules(lost).is_err(), "{lost:?}");
        }
    }

    #[test]
    fn a_part_keeps_the_tests_that_run_nowhere_else() {
        let both = labelled("chaos", &["chaos::kills", "chaos::stops"]);
        let left = both.clone().without(&labelled("chaos", &["chaos::kills"]));
        assert_eq!(left, Some(labelled("chaos", &["chaos::stops"])));
        assert_eq!(both.clone().without(&both), None);
        let whole = labelled("simulation", &[]);
        assert_eq!(whole.clone().without(&whole), None);
    }

    #[test]
    fn a_part_runs_its_own_tests_by_their_full_names() {
        let args = |program: &Program, text| program.args(text).map(|args| args.join(OsStr::new(" ")));
        let part = labelled("chaos", &["chaos::kills", "chaos::stops"]);
        assert_eq!(args(&part, ""), Some("--exact chaos::kills chaos::stops".into()));
        assert_eq!(args(&part, "stop"), Some("--exact chaos::stops".into()));
        assert_eq!(args(&part, "chaos"), None, "without a name, libtest would run everything");
        let whole = labelled("ps/lib", &[]);
        assert_eq!(args(&whole, ""), Some("".into()));
        assert_eq!(args(&whole, "stop"), Some("stop".into()));
        let python = Program { first: vec!["-m".into(), "pytest".into()], ..whole };
        assert_eq!(args(&python, ""), Some("-m pytest".into()));
    }
}

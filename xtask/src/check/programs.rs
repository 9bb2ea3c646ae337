//! Test programs: what cargo builds, and what each of them needs to run well beside others.

use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The test program of the root package that runs in parts: cargo links it once, and each of its modules runs as a process of its own.
const IN_PARTS: &str = "system";

/// A program with tests or benches, as cargo built it, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// `simulation` of the root package, `ps/integration` of another one; a library's tests are `ps/lib`. A part has the name of its
    /// module: `chaos`.
    pub(crate) label: String,
    pub(crate) is_bench: bool,
    pub(crate) path: PathBuf,
    /// Where cargo would run it.
    pub(crate) folder: PathBuf,
    /// The full names of a part's tests. Empty: it is a whole program.
    pub(crate) tests: Vec<String>,
}

impl Program {
    /// What cargo did not build: a command in its place.
    pub(crate) fn nowhere(label: &str) -> Self {
        let (label, folder) = (label.to_owned(), workspace::root().to_owned());
        Self { label, is_bench: false, path: PathBuf::new(), folder, tests: Vec::new() }
    }

    /// The arguments that choose its tests with `text` in their names. `None`: a part without such a test.
    pub(crate) fn args(&self, text: &str) -> Option<Vec<OsString>> {
        if self.tests.is_empty() {
            return Some((!text.is_empty()).then(|| text.into()).into_iter().collect());
        }
        // By their full names: libtest would find a module's name inside the names of other tests too.
        let is_named = |test: &&String| test.split_once("::").is_some_and(|(_, name)| name.contains(text));
        let chosen: Vec<OsString> = self.tests.iter().filter(is_named).map(OsString::from).collect();
        (!chosen.is_empty()).then(|| [vec!["--exact".into()], chosen].concat())
    }

    /// The same without `tests`, which run elsewhere; `None`: all of it does. A whole program does, or does not.
    pub(crate) fn without(mut self, tests: &[String]) -> Option<Self> {
        self.tests.retain(|test| !tests.contains(test));
        (!self.tests.is_empty()).then_some(self)
    }

    /// One program for each module of the test program [`IN_PARTS`]; another program as it is.
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

/// The full names of tests by their outermost module, from what a test program prints with `--list --format terse`.
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

/// Builds what `args` of `cargo test` choose, and answers the programs and parts of programs.
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
    let parts = programs.into_iter().map(Program::parts).collect::<Result<Vec<_>>>()?;
    Ok(parts.concat())
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
    let (is_bench, path, folder) = (kind == "bench", path.into(), folder.to_owned());
    Some(Program { label, is_bench, path, folder, tests: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::ffi::OsStr;

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
        assert_eq!(label(artifact("", "test", "simulation", true)).as_deref(), Some("simulation"));
        assert_eq!(label(artifact("", "test", "system", true)).as_deref(), Some(IN_PARTS));
        assert_eq!(label(artifact("ps", "test", "integration", true)).as_deref(), Some("ps/integration"));
        assert_eq!(label(artifact("ps", "lib", "ps", true)).as_deref(), Some("ps/lib"));
        assert_eq!(label(artifact("", "lib", "ebbflow", true)).as_deref(), Some("ebbflow/lib"));
        assert_eq!(label(artifact("", "bin", "ebb", false)), None);
        assert!(program(&artifact("ps", "bench", "adam", true)).unwrap().is_bench);
        assert_eq!(label(json!({ "reason": "build-finished", "success": true })), None);
    }

    #[test]
    fn each_test_is_in_the_part_of_its_outermost_module() {
        let listed =
            "chaos::kills: test\nharness::chaos::waits: test\nchaos::inner::stops: test\ntidy::words: test\n";
        let modules = modules(listed).unwrap();
        let parts: Vec<_> =
            modules.iter().map(|(module, tests)| (module.as_str(), tests.join(" "))).collect();
        let expected = [
            ("chaos", "chaos::kills chaos::inner::stops".to_owned()),
            ("harness", "harness::chaos::waits".to_owned()),
            ("tidy", "tidy::words".to_owned()),
        ];
        assert_eq!(parts, expected);
    }

    #[test]
    fn a_list_that_would_lose_tests_is_refused() {
        for listed in ["", "kills: test\n", "chaos::kills: benchmark\n", "chaos::kills: test\n\n1 test\n"] {
            assert!(modules(listed).is_err(), "{listed:?}");
        }
    }

    #[test]
    fn a_part_keeps_the_tests_that_run_nowhere_else() {
        let part = |tests: &[&str]| {
            let tests = tests.iter().map(|&test| test.to_owned()).collect();
            Program { tests, ..Program::nowhere("chaos") }
        };
        let both = part(&["chaos::kills", "chaos::stops"]);
        assert_eq!(both.clone().without(&part(&["chaos::kills"]).tests), Some(part(&["chaos::stops"])));
        assert_eq!(both.clone().without(&both.tests), None);
        assert_eq!(Program::nowhere("simulation").without(&[]), None);
    }

    #[test]
    fn a_part_runs_its_own_tests_by_their_full_names() {
        let args = |program: &Program, text| program.args(text).map(|args| args.join(OsStr::new(" ")));
        let tests = ["chaos::kills", "chaos::stops"].map(str::to_owned).to_vec();
        let part = Program { tests, ..Program::nowhere("chaos") };
        assert_eq!(args(&part, ""), Some("--exact chaos::kills chaos::stops".into()));
        assert_eq!(args(&part, "stop"), Some("--exact chaos::stops".into()));
        assert_eq!(args(&part, "chaos"), None, "without a name, libtest would run everything");
        let whole = Program::nowhere("ps/lib");
        assert_eq!(args(&whole, ""), Some("".into()));
        assert_eq!(args(&whole, "stop"), Some("stop".into()));
    }
}

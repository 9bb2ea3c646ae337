//! `cargo xtask mutants`: breaks the program on purpose, in one place after the other, and shows
//! whether the test that is there for it says so. A promise whose breach no test notices is not
//! tested.

mod list;

use crate::{
    check::{
        self, CUDA,
        programs::{self, Program, WITHOUT_TORCH},
        runner::{self, Done},
    },
    workspace,
};
use anyhow::{Context, Result, bail, ensure};
use list::MUTANTS;
use std::{collections::BTreeSet, ffi::OsString, fs, path::PathBuf, time::Duration};

/// Break the program on purpose, in one place after the other; prints which breach a test notices.
///
/// First every test that is used runs once on the program as it is, and must pass. Then each breach
/// is compiled and its test must fail. The places are in `xtask/src/mutants/list.rs`. An hour or
/// more on 2 cores.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only those whose description, file or test contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
}

/// One breach: `find`, which stands once in `file`, becomes `replace`, and the test must fail.
struct Mutant {
    what: &'static str,
    file: &'static str,
    find: &'static str,
    replace: &'static str,
    test: Test,
}

/// What must notice a breach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Test {
    /// Unit tests of a crate, by its folder, whose names contain this.
    Lib(&'static str, &'static str),
    /// Tests of the program `integration` of a crate, likewise.
    Integration(&'static str, &'static str),
    /// Tests of the kernels for CUDA devices, by their program, likewise.
    Cuda(&'static str, &'static str),
    /// Tests of a module of `tests/system/`, likewise.
    Module(&'static str, &'static str),
    /// The first so many seeds of the simulation.
    Seeds(u64),
}

/// Time after which a hanging test is ended, which is a failure.
const LIMIT: Duration = Duration::from_secs(15 * 60);

pub(crate) fn run(args: &Args) -> Result<()> {
    let of = |mutant: &&Mutant| {
        let Mutant { what, file, test, .. } = mutant;
        what.contains(&args.only) || file.contains(&args.only) || test.names().contains(&args.only)
    };
    let chosen: Vec<_> = MUTANTS.iter().filter(of).collect();
    ensure!(!chosen.is_empty(), "no breach has `{}` in its description, file or test", args.only);
    for mutant in &chosen {
        mutant.broken()?;
        mutant.refuse_changed_file()?;
    }
    let environment = check::environment(false, false)?;
    let tests: BTreeSet<Test> = chosen.iter().map(|mutant| mutant.test).collect();
    for test in tests {
        let done = test.run(&environment)?.context("the program as it is does not compile")?;
        if let Some(failure) = done.failure {
            bail!("{}: fails on the program as it is, so it shows nothing: {failure}", test.names());
        }
        ensure!(done.tests > 0, "{}: no test of this name ran", test.names());
    }
    let mut survived = 0;
    for mutant in chosen {
        let begin = check::now();
        let noticed = mutant.try_out(&environment)?;
        survived += u32::from(noticed.is_none());
        let took = check::seconds(begin.elapsed());
        match noticed {
            Some(by) => println!("killed    {}: {by} ({took})", mutant.what),
            None => println!("survived  {} ({took})", mutant.what),
        }
    }
    if survived > 0 {
        bail!("{survived} survived: their promises need a test");
    }
    Ok(())
}

impl Mutant {
    fn path(&self) -> PathBuf {
        workspace::root().join(self.file)
    }

    /// Returns the file as it is, and broken.
    fn broken(&self) -> Result<(String, String)> {
        let Self { what, file, find, replace, .. } = self;
        let text = fs::read_to_string(self.path()).with_context(|| format!("{what}: read `{file}`"))?;
        match text.matches(find).count() {
            1 => Ok((text.clone(), text.replacen(find, replace, 1))),
            count => bail!(
                "{what}: expected once in {file}, found {count} times: `{}`; mend the entry in xtask/src/mutants/list.rs",
                find.trim()
            ),
        }
    }

    /// Refuses a file with uncommitted changes: if this program is killed before it restores the
    /// file, `git checkout` has to be able to do so.
    fn refuse_changed_file(&self) -> Result<()> {
        let mut git = std::process::Command::new("git");
        let diff = git.args(["diff", "--quiet", "HEAD", "--", self.file]).current_dir(workspace::root());
        if !diff.status().context("git diff")?.success() {
            bail!("{} has changes; commit them first, because mutants write to it", self.file);
        }
        Ok(())
    }

    /// Returns what noticed it, if anything did.
    fn try_out(&self, environment: &[(String, OsString)]) -> Result<Option<String>> {
        let (text, broken) = self.broken()?;
        let _put_back = PutBack { path: self.path(), text };
        fs::write(self.path(), broken).with_context(|| format!("write `{}`", self.file))?;
        let done = self.test.run(environment)?;
        let done = done.with_context(|| format!("{}: does not compile, so it shows nothing", self.what))?;
        let said =
            |failure| first_failure(&fs::read(runner::log(LABEL)).unwrap_or_default()).unwrap_or(failure);
        Ok(done.failure.map(said))
    }
}

/// The label of what runs.
const LABEL: &str = "mutant";

impl Test {
    /// Returns the program and the tests in it.
    fn names(self) -> String {
        match self {
            Self::Lib(krate, tests) => format!("{krate}/lib {tests}"),
            Self::Cuda(name, tests) => format!("kernels/{name} {tests}"),
            Self::Integration(krate, tests) => format!("{krate}/integration {tests}"),
            Self::Module(name, tests) => format!("{name} {tests}"),
            Self::Seeds(count) => format!("simulation, {count} seeds"),
        }
    }

    /// Builds it and runs it; `None`: it does not compile.
    fn run(self, environment: &[(String, OsString)]) -> Result<Option<Done>> {
        let (target, label, tests) = match self {
            Self::Lib(krate, tests) => ("--lib", format!("{krate}/lib"), tests),
            Self::Integration(krate, tests) => ("--test integration", format!("{krate}/integration"), tests),
            Self::Cuda(name, tests) => ("", format!("kernels/{name}"), tests),
            Self::Module(name, tests) => ("--test system", name.to_owned(), tests),
            Self::Seeds(_) => ("--test simulation", "simulation".to_owned(), "seeds_keep_both_promises"),
        };
        let words = if matches!(self, Self::Cuda(..)) {
            CUDA.to_owned()
        } else {
            format!("{WITHOUT_TORCH} {target}")
        };
        let Ok(built) = programs::build(&words) else { return Ok(None) };
        let program = built.into_iter().find(|program| program.label == label);
        let program = program.with_context(|| format!("there is no test program `{label}`"))?;
        let program = Program { label: LABEL.to_owned(), ..program };
        let task = check::task("mutants", &program, tests, environment);
        let mut task = task.with_context(|| format!("`{label}` has no test `{tests}`"))?;
        task.limit = LIMIT;
        if let Self::Seeds(count) = self {
            task.command.env("EBB_SIM_SEED", "0").env("EBB_SIM_SEEDS", count.to_string());
        }
        Ok(runner::run(vec![task], 1)?.pop())
    }
}

/// Puts a file back when it is dropped.
struct PutBack {
    path: PathBuf,
    text: String,
}

impl Drop for PutBack {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.path, &self.text) {
            eprintln!("error: {} stays broken ({error}); `git checkout` it", self.path.display());
        }
    }
}

/// Returns the seed or the test that failed first, by what the tests printed.
fn first_failure(said: &[u8]) -> Option<String> {
    let said = String::from_utf8_lossy(said);
    let seed = said.lines().find(|line| line.starts_with("seed ") && line.contains(" failed"));
    let test = || said.lines().find_map(|line| line.strip_prefix("---- ")?.strip_suffix(" stdout ----"));
    Some(seed.or_else(test)?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_that_is_broken_is_still_there() {
        for mutant in MUTANTS {
            let (text, broken) = mutant.broken().unwrap_or_else(|error| panic!("{error:#}"));
            assert_ne!(text, broken, "{}", mutant.what);
        }
    }

    #[test]
    fn what_noticed_a_breach_is_named() {
        let said = "running 1 test\n---- a::b stdout ----\nseed 7 failed:\nboom\n";
        assert_eq!(first_failure(said.as_bytes()).as_deref(), Some("seed 7 failed:"));
        assert_eq!(first_failure(b"---- a::b stdout ----\nboom").as_deref(), Some("a::b"));
        assert_eq!(first_failure(b"killed"), None);
    }
}

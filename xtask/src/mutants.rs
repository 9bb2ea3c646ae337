//! `cargo xtask mutants`: breaks the program on purpose, in one place after the other, and shows whether the test that is there for it
//! says so. A promise whose breach no test notices is not tested.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use anyhow::{Context, Result, bail};

use crate::workspace;

/// Break the program on purpose, in one place after the other; prints which breach a test notices. The places are in
/// `xtask/src/mutants.rs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only those whose description contains this
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
enum Test {
    /// `cargo test` with these arguments.
    Cargo(&'static [&'static str]),
    /// The first so many seeds of the simulation.
    Seeds(u64),
}

const MUTANTS: &[Mutant] = &[
    Mutant {
        what: "a ps drops a job whose end is not durable",
        file: "master/src/books.rs",
        find: ".filter(|job| !job.is_over()).map(|job| &job.id)",
        replace: ".filter(|job| !job.is_ended()).map(|job| &job.id)",
        test: Test::Cargo(&["-p", "ebbflow-master", "--test", "integration", "ending"]),
    },
    Mutant {
        what: "a ps obeys a close of an earlier master",
        file: "ps/src/handle.rs",
        find: "sender.starts < here.starts",
        replace: "sender.starts > here.starts",
        test: Test::Cargo(&["-p", "ebbflow-ps", "--test", "integration", "life"]),
    },
    Mutant {
        what: "a secret that the master did not give is good",
        file: "master/src/secrets.rs",
        find: "if !self.secret(shown.incarnation).is(&shown.secret) {",
        replace: "if false {",
        test: Test::Cargo(&["-p", "ebbflow-master", "--lib", "secrets"]),
    },
    Mutant {
        what: "any ps reports of any partition",
        file: "master/src/job/partitions.rs",
        find: "Some(home) if home.incarnation == ps => Holder::Sender",
        replace: "Some(_) => Holder::Sender",
        test: Test::Cargo(&["-p", "ebbflow-master", "--test", "integration", "sessions"]),
    },
    Mutant {
        what: "a manifest is written without a look at its files",
        file: "master/src/checkpoints.rs",
        find: "try_join_all((0..manifest.files.len()).map(seen)).await?;",
        replace: "try_join_all((0..0).map(seen)).await?;",
        test: Test::Cargo(&["-p", "ebbflow-master", "--test", "integration", "stores"]),
    },
    Mutant {
        what: "the master's clock goes on while the master does not",
        file: "master/src/clock.rs",
        find: "self.lost += since.saturating_sub(LATE_MAX);",
        replace: "self.lost += Duration::ZERO;",
        test: Test::Cargo(&["-p", "ebbflow-master", "--lib", "clock"]),
    },
    Mutant {
        what: "a repeated push is merged again",
        file: "ps/src/aggregator.rs",
        find: "if covers(nodes, at.node) {",
        replace: "if false && covers(nodes, at.node) {",
        test: Test::Seeds(100),
    },
    Mutant {
        what: "a push of another era is taken up",
        file: "ps/src/model.rs",
        find: "Life::Open if sender < here => Err",
        replace: "Life::Open if sender < here && place.job.get() == u64::MAX => Err",
        test: Test::Seeds(100),
    },
    Mutant {
        what: "the report of a lease that ended is taken",
        file: "master/src/dispatcher.rs",
        find: "let good = run.holders.iter().any(|grant| (grant.lease, grant.worker) == (lease, worker));",
        replace: "let good = true;",
        test: Test::Cargo(&["-p", "ebbflow-master", "--lib", "dispatcher"]),
    },
    Mutant {
        what: "a run is copied again and again",
        file: "master/src/dispatcher/pace.rs",
        find: "let [holder] = run.holders.as_slice() else { return self.another_copy(now, worker, run) };",
        replace: "let holder = run.holders.first()?;",
        test: Test::Cargo(&["-p", "ebbflow-master", "--lib", "dispatcher"]),
    },
    Mutant {
        what: "a restarted master tells the loss of a step again",
        file: "master/src/job/recovery.rs",
        find: "        training.losses.skip_to(told);\n",
        replace: "",
        test: Test::Cargo(&["-p", "ebbflow-master", "--lib", "job::tests::restarts"]),
    },
    Mutant {
        what: "the events of a job grow without end",
        file: "master/src/events.rs",
        find: "if self.events.len() > EVENTS_MAX {",
        replace: "if self.events.len() > usize::MAX - 1 {",
        test: Test::Cargo(&["-p", "ebbflow-master", "--lib", "events"]),
    },
    Mutant {
        what: "ps hear of what the journal does not have yet",
        file: "master/src/server.rs",
        find: "            shared.journal.durable(written).await;\n",
        replace: "            let _ = written;\n",
        test: Test::Seeds(300),
    },
    Mutant {
        what: "partitions are opened before the journal has their places",
        file: "master/src/service/fleet.rs",
        find: "        self.shared.durable().await;\n        if let Some((place, name)) = probe {",
        replace: "        if let Some((place, name)) = probe {",
        test: Test::Seeds(300),
    },
    Mutant {
        what: "a user hears of what the journal does not have yet",
        file: "master/src/service/jobs.rs",
        find: "            self.shared.durable().await;\n            if events.is_empty()",
        replace: "            if events.is_empty()",
        test: Test::Seeds(300),
    },
    Mutant {
        what: "a checkpoint is published before every partition is saved",
        file: "master/src/job/checkpoints.rs",
        find: "!reported.failed && reported.files.len() == partitions;",
        replace: "!reported.failed && (1..=partitions).contains(&reported.files.len());",
        test: Test::Seeds(100),
    },
    Mutant {
        what: "a ps that is away for a moment is given up",
        file: "master/src/job/partitions.rs",
        find: "if now.saturating_sub(missing.since) >= grace {",
        replace: "if now.saturating_sub(missing.since) >= grace / 100 {",
        test: Test::Seeds(100),
    },
    Mutant {
        what: "a job that had ended begins again when the master does",
        file: "master/src/job/record.rs",
        find: "        if let Some(status) = record.ended {",
        replace: "        if let Some(status) = record.ended.filter(|_| false) {",
        test: Test::Seeds(100),
    },
    Mutant {
        what: "a member of the fleet speaks for another",
        file: "master/src/books.rs",
        find: "        self.key.check(shown, incarnation)\n",
        replace: "        let _ = shown;\n        Ok(())\n",
        test: Test::Seeds(100),
    },
    Mutant {
        what: "a token is compared until the first wrong byte",
        file: "proto/src/security/tokens.rs",
        find: "token.sha256.ct_eq(&shown)",
        replace: "subtle::Choice::from(u8::from(token.sha256 == shown))",
        test: Test::Cargo(&["-p", "ebbflow", "--test", "tidy", "secrets"]),
    },
];

pub(crate) fn run(args: &Args) -> Result<()> {
    let chosen: Vec<_> = MUTANTS.iter().filter(|mutant| mutant.what.contains(&args.only)).collect();
    for mutant in &chosen {
        mutant.broken()?;
        mutant.refuse_changed_file()?;
    }
    let mut survived = 0;
    for mutant in chosen {
        let noticed = mutant.try_out()?;
        survived += u32::from(noticed.is_none());
        match noticed {
            Some(by) => println!("killed    {}: {by}", mutant.what),
            None => println!("survived  {}", mutant.what),
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

    /// The file as it is, and broken.
    fn broken(&self) -> Result<(String, String)> {
        let Self { what, file, find, replace, .. } = self;
        let text = fs::read_to_string(self.path()).with_context(|| format!("{what}: read `{file}`"))?;
        match text.matches(find).count() {
            1 => Ok((text.clone(), text.replacen(find, replace, 1))),
            count => bail!(
                "{what}: expected once in {file}, found {count} times: `{}`; mend the entry in xtask/src/mutants.rs",
                find.trim()
            ),
        }
    }

    /// The file is put back in the end; when this program is killed before, `git checkout` must be able to do it.
    fn refuse_changed_file(&self) -> Result<()> {
        let mut git = std::process::Command::new("git");
        let diff = git.args(["diff", "--quiet", "HEAD", "--", self.file]).current_dir(workspace::root());
        if !diff.status().context("git diff")?.success() {
            bail!("{} has changes; commit them first, because mutants write to it", self.file);
        }
        Ok(())
    }

    /// What noticed it, if anything did.
    fn try_out(&self) -> Result<Option<String>> {
        let (text, broken) = self.broken()?;
        let put_back = PutBack { path: self.path(), text };
        fs::write(self.path(), broken).with_context(|| format!("write `{}`", self.file))?;
        let built = self.cargo(true)?;
        if !built.status.success() {
            let said = String::from_utf8_lossy(&built.stderr);
            bail!("{}: does not compile, so it shows nothing:\n{said}", self.what);
        }
        let tested = self.cargo(false)?;
        drop(put_back);
        Ok((!tested.status.success()).then(|| first_failure(&String::from_utf8_lossy(&tested.stdout))))
    }

    /// Builds the test, or runs it.
    fn cargo(&self, only_build: bool) -> Result<Output> {
        let mut cargo = workspace::cargo();
        cargo.args(["test", "--no-default-features"]).current_dir(workspace::root());
        if only_build {
            cargo.arg("--no-run");
        }
        match self.test {
            Test::Cargo(args) => cargo.args(args),
            Test::Seeds(count) => cargo
                .args(["-p", "ebbflow", "--test", "simulation", "seeds_keep_both_promises"])
                .envs([("EBB_SIM_SEED", "0".to_owned()), ("EBB_SIM_SEEDS", count.to_string())]),
        };
        cargo.output().context("cargo test")
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

/// The seed or the test that failed first, by what the tests printed.
fn first_failure(said: &str) -> String {
    let seed = said.lines().find(|line| line.starts_with("seed ") && line.contains(" failed"));
    let test = || said.lines().find_map(|line| line.strip_prefix("---- ")?.strip_suffix(" stdout ----"));
    seed.or_else(test).unwrap_or("the run").to_owned()
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
        assert_eq!(first_failure(said), "seed 7 failed:");
        assert_eq!(first_failure("---- a::b stdout ----\nboom"), "a::b");
        assert_eq!(first_failure("killed"), "the run");
    }
}

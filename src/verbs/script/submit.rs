//! `ebb submit SCRIPT.py`: sends a script and the files of its folder to a master, whose agents run
//! it.

use anyhow::{Result, bail};
use client::ScriptSubmission;
use client::bundle::Bundle;
use proto::pb;

use crate::app::App;
use crate::{args, config};

/// Files of a bundle that are listed one by one.
const LISTED_MAX: usize = 20;

/// Refuses what only a script has, for a job file.
///
/// # Errors
/// It names the first such argument.
pub(in crate::verbs) fn refuse_for_job(args: &args::Submit) -> Result<()> {
    let given = [
        ("--workers", args.workers.is_some(), "; set fleet.workers in the job file, or use `ebb scale`"),
        ("--name", args.name.is_some(), "; set name in the job file"),
        ("--env", !args.variables.is_empty(), ""),
        ("--secret", !args.secrets.is_empty(), ""),
        ("arguments after `--`", !args.arguments.is_empty(), ""),
    ];
    match given.into_iter().find(|(_, is_given, _)| *is_given) {
        Some((what, _, instead)) => {
            bail!("{what}: only for a Python script, whose name ends in .py{instead}")
        }
        None => Ok(()),
    }
}

/// Refuses what only a job file has, for a script.
fn refuse_for_script(args: &args::Submit) -> Result<()> {
    let given = [
        ("--set", !args.file.overrides.is_empty(), "set it in the script, in ebbflow.join"),
        ("--resume", args.resume.resume, "give ebbflow.join a place for checkpoints"),
        ("--resume-anyway", args.resume.resume_anyway, "give ebbflow.join a place for checkpoints"),
    ];
    match given.into_iter().find(|(_, is_given, _)| *is_given) {
        Some((flag, _, instead)) => bail!("{flag}: not for a Python script; {instead}"),
        None => Ok(()),
    }
}

/// # Errors
/// An argument is not for scripts, a file cannot travel, the folder of `--out` cannot be written,
/// or the master does not answer or refuses the script.
pub(in crate::verbs) async fn run(args: args::Submit, app: &App) -> Result<bool> {
    refuse_for_script(&args)?;
    let submission = ScriptSubmission::read(&args.file.job, wish(&args), config::secret)?;
    app.screen.line(&listed(&submission.bundle));
    let out = crate::verbs::results(args.out.as_deref(), &args.upload, false, app).await?;
    let client = app.client(&args.reach)?;
    let reply = client.submit_script(submission).await?;
    crate::verbs::submit::on_its_way(client, &reply, out, args, app).await
}

/// Returns the description of a script, as far as its user gives it.
fn wish(args: &args::Submit) -> pb::Script {
    let variable =
        |(name, value): &(String, String)| pb::Variable { name: name.clone(), value: value.clone() };
    pb::Script {
        name: args.name.clone().unwrap_or_default(),
        entry: String::new(),
        arguments: args.arguments.clone(),
        variables: args.variables.iter().map(variable).collect(),
        processes: args.workers.unwrap_or(1),
        secrets: args.secrets.clone(),
    }
}

/// Returns the number of the files that travel, and the first of them, for a user who looks for
/// what should not be among them.
fn listed(bundle: &Bundle) -> String {
    let bytes: u64 = bundle.files.iter().map(|(_, bytes)| bytes).sum();
    let names: Vec<_> = bundle.files.iter().take(LISTED_MAX).map(|(path, _)| path.escape_debug()).collect();
    let names: String = names.into_iter().map(|name| format!("\n    {name}")).collect();
    let more = bundle.files.len().saturating_sub(LISTED_MAX);
    let more = if more > 0 { format!("\n    and {more} more") } else { String::new() };
    format!("these files travel with the script ({}, {bytes} bytes):{names}{more}", bundle.files.len())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use client::pipe::Network;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::fake::app;

    fn args(line: &str) -> args::Submit {
        let line = ["ebb", "submit"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(line).unwrap().command {
            Command::Submit(submit) => submit,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_of_the_other_kind_are_refused_by_name() {
        for (line, name) in [
            ("a.py --set a=1", "--set"),
            ("a.py --resume", "--resume"),
            ("a.py --resume-anyway", "--resume-anyway"),
        ] {
            let said = refuse_for_script(&args(line)).unwrap_err().to_string();
            assert!(said.starts_with(&format!("{name}: not for")), "{said}");
        }
        refuse_for_script(&args("a.py --workers 3 --env A=1 --follow --out o -- --set 1")).unwrap();
        for (line, name) in [
            ("a.toml --workers 2", "--workers"),
            ("a.toml --name n", "--name"),
            ("a.toml --env A=1", "--env"),
            ("a.toml --secret A", "--secret"),
            ("a.toml -- x", "arguments after `--`"),
        ] {
            let said = refuse_for_job(&args(line)).unwrap_err().to_string();
            assert!(said.starts_with(name) && said.contains(".py"), "{said}");
        }
        refuse_for_job(&args("a.toml --resume")).unwrap();
    }

    #[test]
    fn a_script_is_described_by_its_options_and_its_arguments() {
        let script = wish(&args("my_train.py --workers 4 --env A=x=y --secret KEY -- --lr 0.1"));
        assert_eq!((script.processes, script.arguments), (4, vec!["--lr".to_owned(), "0.1".to_owned()]));
        assert_eq!(script.variables[0].value, "x=y");
        assert_eq!((script.name.as_str(), script.secrets), ("", vec!["KEY".to_owned()]));
        let script = wish(&args("a.py --name b"));
        assert_eq!((script.name.as_str(), script.processes), ("b", 1));
    }

    #[test]
    fn the_first_files_are_listed_and_the_others_are_counted() {
        let bundle = |count: usize| {
            let files = (0..count).map(|index| (format!("{index:02}"), 3)).collect();
            listed(&Bundle { bytes: bytes::Bytes::new(), files })
        };
        let said = bundle(LISTED_MAX);
        assert!(said.starts_with("these files travel with the script (20, 60 bytes):\n    00\n"), "{said}");
        assert!(said.ends_with("\n    19"), "{said}");
        let said = bundle(LISTED_MAX + 2);
        assert!(said.contains("(22, 66 bytes)") && said.ends_with("\n    19\n    and 2 more"), "{said}");
    }

    #[tokio::test]
    async fn files_are_read_and_listed_before_a_master_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("train.py");
        let line = format!("{} --master-timeout 0s", script.display());
        let network = Network::new();
        let said = run(args(&line), &app(&network)).await.unwrap_err().to_string();
        assert!(said.contains("train.py: cannot be read"), "{said}");
        std::fs::write(&script, "").unwrap();
        let secret = format!("{line} --secret NO_SUCH_VARIABLE_HERE");
        let said = run(args(&secret), &app(&network)).await.unwrap_err().to_string();
        assert!(said.contains("secret NO_SUCH_VARIABLE_HERE: the environment has no such"), "{said}");
        let app = app(&network);
        let said = run(args(&line), &app).await.unwrap_err().to_string();
        assert!(said.contains("no answer from the master"), "{said}");
        assert!(
            app.said().contains("these files travel with the script (1, 0 bytes):\n    train.py"),
            "{}",
            app.said()
        );
    }
}

//! `ebb cancel`: stops a job.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// The job is not known, or the master does not answer.
pub(crate) async fn run(args: args::Cancel, app: &App) -> Result<()> {
    let client = app.client(&args.one.reach)?;
    let mut status = client.status(&args.one.job).await?;
    let had_ended = status.state().is_end();
    if !had_ended {
        status = client.cancel(&status.name, args.force).await?;
    }
    if args.one.json {
        return app.screen.print(&client::report::json(&status).to_string());
    }
    let state = report::state_with_reason(status.state(), &status.reason);
    let fetch = app.command("fetch", &status.name, &args.one.reach);
    app.screen.print(&match (had_ended, args.force) {
        (true, _) => format!("{} had ended already, {state}; its results: {fetch} --out DIR", status.name),
        (false, false) => format!("{} {state}; its results once it ended: {fetch} --out DIR", status.name),
        (false, true) => format!("{} {state}", status.name),
    })
}

#[cfg(test)]
mod tests {
    use client::JobState;

    use super::*;
    use crate::fake::{Fake, one_job};

    #[tokio::test]
    async fn cancelling_says_where_the_results_are_unless_forced() {
        let fake = Fake::new();
        for force in [false, true] {
            fake.script().status.state = JobState::Running.into();
            let app = fake.app();
            let args = args::Cancel { one: one_job("3", false), force };
            run(args, &app).await.unwrap();
            assert!(app.facts().contains("line-3 cancelled: a user stopped it"), "{}", app.facts());
            assert_eq!(app.facts().contains("fetch line-3"), !force);
        }
        assert_eq!(fake.script().cancelled, [false, true]);
    }

    #[tokio::test]
    async fn cancelling_a_job_that_ended_says_so_and_changes_nothing() {
        let fake = Fake::new();
        for force in [false, true] {
            let app = fake.app();
            run(args::Cancel { one: one_job("line", false), force }, &app).await.unwrap();
            let expected = "line-3 had ended already, succeeded: all steps applied";
            assert!(app.facts().starts_with(expected), "{}", app.facts());
        }
        assert!(fake.script().cancelled.is_empty());
    }
}

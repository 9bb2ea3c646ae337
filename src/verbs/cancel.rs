//! `ebb cancel`: stops a job.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// No such job, or the master does not answer.
pub(crate) async fn run(args: args::Cancel, app: &App) -> Result<()> {
    let client = app.client(&args.reach)?;
    let mut status = client.status(&args.job).await?;
    let had_ended = report::is_end(status.state);
    if !had_ended {
        status = client.cancel(&status.name, args.force).await?;
    }
    if args.json {
        return app.screen.print(&report::json(&status).to_string());
    }
    let state = report::state_with_reason(status.state, &status.reason);
    let fetch = app.command("fetch", &status.name, &args.reach);
    app.screen.print(&match (had_ended, args.force) {
        (true, _) => format!("{} had ended already, {state}; its results: {fetch} --out DIR", status.name),
        (false, false) => format!("{} {state}; its results once it ended: {fetch} --out DIR", status.name),
        (false, true) => format!("{} {state}", status.name),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::pb;

    use super::*;
    use crate::fake::{Fake, reach};

    #[tokio::test]
    async fn cancelling_says_where_the_results_are_unless_forced() {
        let (fake, reach) = (Fake::new(), reach(Duration::from_secs(5)));
        for force in [false, true] {
            fake.script().status.state = pb::JobState::Running.into();
            let app = fake.app();
            let args = args::Cancel { job: "3".to_owned(), reach: reach.clone(), force, json: false };
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
            let reach = reach(Duration::from_secs(5));
            run(args::Cancel { job: "line".to_owned(), reach, force, json: false }, &app).await.unwrap();
            let expected = "line-3 had ended already, succeeded: all steps applied";
            assert!(app.facts().starts_with(expected), "{}", app.facts());
        }
        assert!(fake.script().cancelled.is_empty());
    }
}

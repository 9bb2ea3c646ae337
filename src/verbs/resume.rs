//! `ebb resume`: lets a job go on that is paused, or whose numerics class is gone.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// The job is not known, is ending or has ended, no worker is of the class, or the master does not
/// answer.
pub(crate) async fn run(args: args::Resume, app: &App) -> Result<()> {
    let status = app.client(&args.one.reach)?.resume(&args.one.job, args.numerics.as_deref()).await?;
    if args.one.json {
        return app.screen.print(&client::report::json(&status).to_string());
    }
    let state = report::state_with_reason(status.state(), &status.reason);
    app.screen.print(&format!("{} {state}", status.name))
}

#[cfg(test)]
mod tests {
    use client::JobState;

    use super::*;
    use crate::fake::{Fake, one_job};

    fn args(job: &str, json: bool) -> args::Resume {
        args::Resume { one: one_job(job, json), numerics: None }
    }

    #[tokio::test]
    async fn resuming_says_how_the_job_is_then_paused_or_not_before() {
        let fake = Fake::running();
        for paused in [true, false] {
            if paused {
                fake.script().status.state = JobState::Paused.into();
            }
            let app = fake.app();
            run(args("3", false), &app).await.unwrap();
            assert_eq!(app.facts(), "line-3 running: workers train");
        }
        let app = fake.app();
        run(args("line", true), &app).await.unwrap();
        assert!(app.facts().contains(r#""status":"running""#), "{}", app.facts());
    }

    #[tokio::test]
    async fn a_job_that_ended_or_is_unknown_is_an_error() {
        let fake = Fake::new();
        let error = run(args("line", false), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("line-3 cannot be resumed any more, it is succeeded"), "{error}");
        let error = run(args("square", false), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("no job `square`"), "{error}");
    }
}

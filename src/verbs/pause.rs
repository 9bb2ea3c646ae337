//! `ebb pause`: holds a job until `ebb resume`.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// The job is not known, is ending or has ended, or the master does not answer.
pub(crate) async fn run(args: args::OneJob, app: &App) -> Result<()> {
    let status = app.client(&args.reach)?.pause(&args.job).await?;
    if args.json {
        return app.screen.print(&client::report::json(&status).to_string());
    }
    let state = report::state_with_reason(status.state(), &status.reason);
    let resume = app.command("resume", &status.name, &args.reach);
    app.screen.print(&format!("{} {state}; it goes on with: {resume}", status.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, one_job};

    #[tokio::test]
    async fn pausing_says_how_the_job_goes_on() {
        let fake = Fake::running();
        for _ in 0..2 {
            let app = fake.app();
            run(one_job("3", false), &app).await.unwrap();
            let expected = format!("it goes on with: {} resume line-3", app.program());
            assert_eq!(app.facts(), format!("line-3 paused: a user paused it; {expected}"));
        }
        let app = fake.app();
        run(one_job("line", true), &app).await.unwrap();
        assert!(app.facts().contains(r#""status":"paused""#), "{}", app.facts());
    }

    #[tokio::test]
    async fn a_job_that_ended_or_is_unknown_is_an_error() {
        let fake = Fake::new();
        let error = run(one_job("line", false), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("line-3 cannot be paused any more, it is succeeded"), "{error}");
        let error = run(one_job("square", false), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("no job `square`"), "{error}");
    }
}

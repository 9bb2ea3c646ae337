//! `ebb scale`: sets how many workers take part in a job.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// The job is not known, is ending or has ended, or the master does not answer.
pub(crate) async fn run(args: args::Scale, app: &App) -> Result<()> {
    let status = app.client(&args.one.reach)?.scale(&args.one.job, args.workers).await?;
    if args.one.json {
        return app.screen.print(&client::report::json(&status).to_string());
    }
    app.screen.print(&format!("{}: {}", status.name, report::workers_wanted(&status)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, one_job};

    fn args(job: &str, workers: u32, json: bool) -> args::Scale {
        args::Scale { one: one_job(job, json), workers }
    }

    #[tokio::test]
    async fn scaling_says_who_takes_part_and_who_stands_by() {
        let fake = Fake::running();
        let app = fake.app();
        run(args("3", 2, false), &app).await.unwrap();
        assert_eq!(app.facts(), "line-3: 2 workers (+1 standing by), wants 1 to 2");
        let app = fake.app();
        run(args("line", 8, true), &app).await.unwrap();
        assert!(
            app.facts().contains(r#""workers":3,"workers_standby":0,"workers_min":1,"workers_max":8"#),
            "{}",
            app.facts()
        );
    }

    #[tokio::test]
    async fn scaling_a_job_that_ended_or_is_unknown_is_an_error() {
        let fake = Fake::new();
        let error = run(args("line", 2, false), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("line-3 cannot be scaled any more, it is succeeded"), "{error}");
        let error = run(args("square", 2, false), &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("no job `square`"), "{error}");
    }
}

//! `ebb status`: one job in numbers.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// No such job, or the master does not answer.
pub(crate) async fn run(args: args::OneJob, app: &App) -> Result<()> {
    let status = app.client(&args.reach)?.status(&args.job).await?;
    app.screen.print(&if args.json { report::json(&status).to_string() } else { report::status(&status) })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fake::{Fake, reach};

    #[tokio::test]
    async fn one_job_and_the_list_show_the_same_facts() {
        let app = Fake::new().app();
        let reach = reach(Duration::from_secs(5));
        run(args::OneJob { job: "line".to_owned(), reach: reach.clone(), json: true }, &app).await.unwrap();
        crate::verbs::jobs::run(args::Jobs { reach, json: true }, &app).await.unwrap();
        let facts = app.facts();
        let (one, list) = facts.split_once('\n').unwrap();
        assert_eq!(one, list);
        assert!(one.contains(r#""job":"line-3","id":3,"status":"succeeded""#), "{one}");
    }
}

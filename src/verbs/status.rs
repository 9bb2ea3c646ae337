//! `ebb status`: one job in numbers.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// The job is not known, or the master does not answer.
pub(crate) async fn run(args: args::OneJob, app: &App) -> Result<()> {
    let status = app.client(&args.reach)?.status(&args.job).await?;
    app.screen.print(&if args.json {
        client::report::json(&status).to_string()
    } else {
        report::status(&status)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, one_job};

    #[tokio::test]
    async fn one_job_and_the_list_show_the_same_facts() {
        let app = Fake::new().app();
        let one = one_job("line", true);
        run(one.clone(), &app).await.unwrap();
        crate::verbs::jobs::run(args::Jobs { reach: one.reach, json: true }, &app).await.unwrap();
        let facts = app.facts();
        let (one, list) = facts.split_once('\n').unwrap();
        assert_eq!(one, list);
        assert!(one.contains(r#""job":"line-3","id":3,"status":"succeeded""#), "{one}");
    }
}

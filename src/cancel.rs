//! `ebb cancel`: stops a job.

use anyhow::Result;

use crate::App;
use crate::args;
use crate::report;

/// # Errors
/// No such job, or the master does not answer.
pub(crate) async fn run(args: args::Cancel, app: &App) -> Result<()> {
    let status = app.client(&args.reach)?.cancel(&args.job, args.force).await?;
    if args.json {
        return app.screen.print(&report::json(&status).to_string());
    }
    let mut text = format!("{} {}", status.name, report::state_with_reason(status.state, &status.reason));
    if !args.force {
        let fetch = app.command("fetch", &status.name, &args.reach);
        text.push_str(&format!("; its results once it ended: {fetch} --out DIR"));
    }
    app.screen.print(&text)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fake::{Fake, reach};

    #[tokio::test]
    async fn cancelling_says_where_the_results_are_unless_forced() {
        let (fake, reach) = (Fake::new(), reach(Duration::from_secs(5)));
        for force in [false, true] {
            let app = fake.app();
            let args = args::Cancel { job: "3".to_owned(), reach: reach.clone(), force, json: false };
            run(args, &app).await.unwrap();
            assert!(app.facts().contains("line-3 cancelled: a user stopped it"), "{}", app.facts());
            assert_eq!(app.facts().contains("fetch line-3"), !force);
        }
        assert_eq!(fake.script().cancelled, [false, true]);
    }
}

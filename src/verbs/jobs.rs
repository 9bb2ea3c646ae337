//! `ebb jobs`: all jobs of a master.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::terminal::report;

/// # Errors
/// The master does not answer.
pub(crate) async fn run(args: args::Jobs, app: &App) -> Result<()> {
    let jobs = app.client(&args.reach)?.list().await?;
    if args.json {
        let lines: Vec<_> = jobs.iter().map(|job| client::report::json(job).to_string()).collect();
        return if lines.is_empty() { Ok(()) } else { app.screen.print(&lines.join("\n")) };
    }
    if jobs.is_empty() {
        app.screen.line(&format!("no jobs; send one with: {} submit JOB.toml", app.program()));
        return Ok(());
    }
    app.screen.print(&report::table(&jobs))
}

//! `ebb watch`: follows a job, from its first event, until it ends.

use anyhow::Result;

use crate::app::App;
use crate::args;
use crate::out::metrics;
use crate::terminal::follow::Follow;
use crate::terminal::progress::Progress;
use crate::terminal::report;

/// # Errors
/// No such job, the master does not answer, or nobody reads our output any more.
pub(crate) async fn run(args: args::Watch, app: &App) -> Result<bool> {
    let client = app.client(&args.reach)?;
    let job = client.status(&args.job).await?.name;
    let stop = app.stop.token().child_token();
    let mut progress = (!args.json).then(|| Progress::new(app.screen.clone()));
    let mut printed = Ok(());
    let show = |event: &proto::pb::Event| match &mut progress {
        Some(progress) => progress.event(event),
        None => {
            if let (Some(line), Ok(())) = (metrics::full_line(event), &printed) {
                printed = app.screen.print(&line);
                if printed.is_err() {
                    stop.cancel();
                }
            }
        }
    };
    let followed = Follow::new(client, &job, None, show)?.run(&stop).await?;
    drop(progress);
    printed?;
    match followed {
        None => Ok(false),
        Some(status) if args.json => Ok(report::is_success(status.state)),
        Some(status) => app.show_result(&status, Ok(None), &app.results_elsewhere(&job, &args.reach), false),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fake::{Fake, reach};

    #[tokio::test]
    async fn watching_as_json_prints_every_event_and_nothing_else() {
        let app = Fake::new().app();
        let args = args::Watch { job: "line".to_owned(), reach: reach(Duration::from_secs(5)), json: true };
        assert!(run(args, &app).await.unwrap());
        let events: Vec<serde_json::Value> =
            app.facts().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let kinds: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["state", "train", "train", "eval", "state"]);
        assert_eq!(events[4]["sequence"], 20);
    }

    #[tokio::test]
    async fn watching_shows_progress_and_the_result() {
        let app = Fake::new().app();
        let args = args::Watch { job: "line".to_owned(), reach: reach(Duration::from_secs(5)), json: false };
        assert!(run(args, &app).await.unwrap());
        assert!(app.said().contains("epoch 1 done, validation"), "{}", app.said());
        assert!(app.facts().contains("line-3 succeeded"), "{}", app.facts());
    }
}

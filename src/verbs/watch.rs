//! `ebb watch`: follows a job, from its first event, until it ends.

use anyhow::Result;
use client::Event;
use client::results::metrics;

use crate::app::App;
use crate::args;
use crate::terminal::follow::Follow;
use crate::terminal::progress::Progress;

/// # Errors
/// The job is not known, the master does not answer, or the reader of the output left.
pub(crate) async fn run(args: args::OneJob, app: &App) -> Result<bool> {
    let client = app.client(&args.reach)?;
    let job = client.status(&args.job).await?.name;
    let stop = app.stop.token().child_token();
    let mut progress = (!args.json).then(|| Progress::new(app.screen.clone()));
    let mut printed = Ok(());
    let show = |event: &Event| match &mut progress {
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
    let followed = Follow::new(client, &job, None, app.screen.clone(), show)?.run(&stop).await?;
    drop(progress);
    printed?;
    match followed {
        None => Ok(false),
        Some(status) if args.json => Ok(status.state().is_success()),
        Some(status) => app.show_result(&status, Ok(None), &app.results_elsewhere(&job, &args.reach), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, one_job};

    #[tokio::test]
    async fn watching_as_json_prints_every_event_and_nothing_else() {
        let app = Fake::new().app();
        assert!(run(one_job("line", true), &app).await.unwrap());
        let events: Vec<serde_json::Value> =
            app.facts().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let kinds: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["state", "train", "train", "eval", "state"]);
        assert_eq!(events[4]["sequence"], 20);
    }

    #[tokio::test]
    async fn watching_shows_progress_and_the_result() {
        let app = Fake::new().app();
        assert!(run(one_job("line", false), &app).await.unwrap());
        assert!(app.said().contains("epoch 1 done, validation"), "{}", app.said());
        assert!(app.facts().contains("line-3 succeeded"), "{}", app.facts());
    }
}

//! `ebb logs`: prints what the processes of a submitted script said.

use std::io::IsTerminal as _;

use anyhow::{Context as _, Result};
use client::failure;
use proto::pb::LogsReply;
use proto::script::escaped;

use crate::app::App;
use crate::args;

/// # Errors
/// The job is not known or is of no script, the master does not answer, or the reader of the output
/// left.
pub(crate) async fn run(args: args::Logs, app: &App) -> Result<()> {
    let client = app.client(&args.reach)?;
    let mut replies = client.logs(&args.job, args.worker, args.follow).await?;
    let (is_terminal, names) = (std::io::stdout().is_terminal(), args.worker.is_none());
    loop {
        let reply = tokio::select! {
            biased;
            () = app.stop.token().cancelled() => return Ok(()),
            reply = replies.message() => reply.map_err(failure),
        };
        match reply.with_context(|| format!("the logs of {}", args.job))? {
            Some(reply) => app.screen.print(&shown(&reply, is_terminal, names))?,
            None => return Ok(()),
        }
    }
}

/// Returns the lines of a reply, with the name of the process before each if `names`. On a terminal
/// control characters are escaped.
fn shown(reply: &LogsReply, is_terminal: bool, names: bool) -> String {
    let LogsReply { worker, missed, lines } = reply;
    let missing = (*missed > 0).then(|| format!("-- {missed} earlier lines are no longer kept --"));
    let lines = missing.as_ref().into_iter().chain(lines).map(|line| {
        let line = if is_terminal { escaped(line) } else { line.clone() };
        if names { format!("{worker} | {line}") } else { line }
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_characters() {
        let lines = vec!["\u{1b}[2Jone".to_owned(), "two\tthree".to_owned()];
        let mut reply = LogsReply { worker: "train-7-0".to_owned(), missed: 0, lines };
        assert_eq!(shown(&reply, true, false), "\\u{1b}[2Jone\ntwo three");
        assert_eq!(shown(&reply, false, false), "\u{1b}[2Jone\ntwo\tthree");
        reply.missed = 3;
        let said = shown(&reply, true, true);
        assert!(
            said.starts_with("train-7-0 | -- 3 earlier lines are no longer kept --\ntrain-7-0 | "),
            "{said}"
        );
    }
}

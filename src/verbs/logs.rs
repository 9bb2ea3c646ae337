//! `ebb logs`: prints what the processes of a submitted script said.

use std::io::IsTerminal as _;

use anyhow::{Context as _, Result};
use proto::script::escaped;

use crate::app::App;
use crate::args;

/// # Errors
/// The job is not known or is of no script, the master does not answer, or the reader of the output
/// left.
pub(crate) async fn run(args: args::Logs, app: &App) -> Result<()> {
    let client = app.client(&args.reach)?;
    let mut logs = client.logs(&args.job, args.worker, args.follow).await?;
    let is_terminal = std::io::stdout().is_terminal();
    loop {
        let lines = tokio::select! {
            biased;
            () = app.stop.token().cancelled() => return Ok(()),
            lines = logs.next() => lines,
        };
        match lines.with_context(|| format!("the logs of {}", args.job))? {
            Some(lines) => app.screen.print(&shown(&lines, is_terminal))?,
            None => return Ok(()),
        }
    }
}

/// Returns lines as one text. On a terminal control characters are escaped.
fn shown(lines: &[String], is_terminal: bool) -> String {
    match is_terminal {
        true => lines.iter().map(|line| escaped(line)).collect::<Vec<_>>().join("\n"),
        false => lines.join("\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_characters() {
        let lines = ["\u{1b}[2Jone".to_owned(), "two\tthree".to_owned()];
        assert_eq!(shown(&lines, true), "\\u{1b}[2Jone\ntwo three");
        assert_eq!(shown(&lines, false), "\u{1b}[2Jone\ntwo\tthree");
    }
}

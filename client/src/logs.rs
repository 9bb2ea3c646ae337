//! What the processes of a script said, as lines for a user.

use proto::pb::LogsReply;
use tonic::Streaming;

use crate::{Error, Result, failure};

/// Lines of the processes of a script, oldest first.
#[derive(Debug)]
pub struct Logs {
    replies: Streaming<LogsReply>,
    /// Whether each line begins with the name of its process.
    names: bool,
}

impl Logs {
    pub(crate) fn new(replies: Streaming<LogsReply>, names: bool) -> Self {
        Self { replies, names }
    }

    /// Waits for the next lines. `None`: there are no more. Lines may have control characters.
    ///
    /// # Errors
    /// The master does not answer any more.
    pub async fn next(&mut self) -> Result<Option<Vec<String>>> {
        let reply = self.replies.message().await.map_err(|status| Error::Failed(failure(status)))?;
        Ok(reply.map(|reply| lines(reply, self.names)))
    }
}

/// Returns the lines of a reply, with the name of the process before each if `names`.
fn lines(reply: LogsReply, names: bool) -> Vec<String> {
    let LogsReply { worker, missed, lines } = reply;
    let missing = (missed > 0).then(|| format!("-- {missed} earlier lines are no longer kept --"));
    let named = |line: String| if names { format!("{worker} | {line}") } else { line };
    missing.into_iter().chain(lines).map(named).collect()
}

/// Returns the number of a process of which `text` is the number, or a name that ends with it.
///
/// ```
/// use client::logs::process;
///
/// assert_eq!((process("3"), process("train-7-0")), (Some(3), Some(0)));
/// assert_eq!((process("-1"), process("train")), (None, None));
/// ```
pub fn process(text: &str) -> Option<u32> {
    let number = match text.rsplit_once('-') {
        Some((name, number)) if !name.is_empty() => number,
        _ => text,
    };
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_no_longer_kept_are_counted_before_the_others() {
        let (worker, said) = ("train-7-0".to_owned(), vec!["one".to_owned(), "two\t".to_owned()]);
        let mut reply = LogsReply { worker, missed: 0, lines: said.clone() };
        assert_eq!(lines(reply.clone(), false), said);
        reply.missed = 3;
        assert_eq!(
            lines(reply, true),
            ["train-7-0 | -- 3 earlier lines are no longer kept --", "train-7-0 | one", "train-7-0 | two\t"]
        );
    }
}

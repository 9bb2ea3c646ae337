//! The stream between an agent and the master. Each message has the whole state, so that a stream
//! that breaks loses nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Error;
use proto::pb;
use proto::retry::Retry;
use proto::status::{Failure, Kind};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::{Agent, Key};

/// Time between two heartbeats until the master says another one.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Shortest time between two messages that only bring lines.
const LINES_EVERY: Duration = Duration::from_millis(200);

/// Tells the master what is `reported`, and takes its orders. Returns when the master refuses this
/// agent.
pub(super) async fn attend(
    agent: &Agent,
    order: &watch::Sender<BTreeSet<Key>>,
    reported: watch::Receiver<Vec<pb::ProcessReport>>,
) -> Error {
    let tell =
        |_, failure: &Failure| tracing::warn!(reason = %failure, "the master's orders for scripts are away");
    let stream = || stream(agent, order, reported.clone());
    match net::retry::repeat(Retry::unlimited(), agent.id, tell, stream).await {
        Ok(never) => match never {},
        Err(refused) => refused.into(),
    }
}

/// Attends until the stream breaks.
async fn stream(
    agent: &Agent,
    order: &watch::Sender<BTreeSet<Key>>,
    mut reported: watch::Receiver<Vec<pb::ProcessReport>>,
) -> Result<std::convert::Infallible, Failure> {
    let (mut lines, mut sent) = (agent.tails.watch(), BTreeMap::new());
    let mut request = |reported: &mut watch::Receiver<Vec<pb::ProcessReport>>| {
        let reports = reported.borrow_and_update().clone();
        let held = reports.iter().map(|report| (report.script, report.process)).collect();
        let lines = agent.tails.unsent(&mut sent);
        agent.tails.keep(&held, &mut sent);
        pb::AttendRequest {
            agent: agent.id,
            name: agent.options.name.clone(),
            program_version: proto::PROGRAM_VERSION.to_owned(),
            processes: agent.options.processes,
            reports,
            lines,
        }
    };
    let broken = || Failure::new(Kind::Unavailable, "the master closed the stream");
    let (send, requested) = mpsc::channel(4);
    send.try_send(request(&mut reported)).map_err(|_| broken())?;
    let requests = futures::stream::unfold(requested, |mut requested| async move {
        let request = requested.recv().await?;
        Some((request, requested))
    });
    let replies = agent.client.clone().attend(requests).await;
    let mut replies = replies.map_err(Failure::from)?.into_inner();
    let (mut heartbeat, mut last, mut is_full) = (HEARTBEAT, Instant::now(), true);
    loop {
        let due = last + if is_full { LINES_EVERY.min(heartbeat) } else { heartbeat };
        tokio::select! {
            biased;
            reply = replies.message() => {
                let reply = reply.map_err(Failure::from)?.ok_or_else(broken)?;
                heartbeat = Duration::from_millis(reply.heartbeat_ms.max(10).into());
                let ordered: BTreeSet<_> =
                    reply.processes.iter().map(|order| (order.script, order.process)).collect();
                order.send_if_modified(|before| *before != ordered && { *before = ordered; true });
                continue;
            }
            Ok(()) = reported.changed() => {}
            Ok(()) = lines.changed(), if !is_full => {
                is_full = true;
                continue;
            }
            () = tokio::time::sleep_until(due) => {}
        }
        lines.mark_unchanged();
        let request = request(&mut reported);
        // There may be more than one message holds.
        is_full = !request.lines.is_empty();
        last = Instant::now();
        send.send(request).await.map_err(|_| broken())?;
    }
}

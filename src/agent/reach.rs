//! What the processes of a script may reach by way of their agent: the masters, and the ps of their
//! own jobs.

use std::collections::BTreeSet;
use std::time::Duration;

use net::channel::{Dialer, Purpose};
use net::failover::{self, Failover};
use net::relay::Relay;
use proto::ids::JobId;
use proto::pb;
use proto::pb::scripts_client::ScriptsClient;
use tokio::sync::Mutex;

/// Longest wait for the master's answer. The process tries again.
const ANSWER: Duration = Duration::from_secs(10);

/// Pause after a URL that is refused, so that a process cannot flood the master through its agent.
const PAUSE: Duration = Duration::from_millis(500);

/// What one process of a script may reach.
#[derive(Debug)]
pub(super) struct Reach {
    script: JobId,
    dialer: Dialer,
    masters: Failover,
    listed: BTreeSet<String>,
    client: ScriptsClient<Failover>,
    /// The ps of its jobs, as the master said last.
    ps: Mutex<BTreeSet<String>>,
}

impl Reach {
    /// Creates the reach of a process of `script`. `urls` lists the masters.
    pub(super) fn new(
        script: u64,
        dialer: Dialer,
        masters: Failover,
        urls: &str,
        client: ScriptsClient<Failover>,
    ) -> Self {
        let listed = failover::urls(urls).map(plain).collect();
        Self { script: JobId(script), dialer, masters, listed, client, ps: Mutex::default() }
    }

    /// Forwards the calls of a process until it has ended.
    pub(super) async fn forward(&self, relay: Relay) {
        if let Err(error) = relay.run(&self.dialer, self.script, async |url| self.purpose(url).await).await {
            tracing::warn!(script = %self.script, %error, "calls of a process are no longer forwarded");
        }
    }

    /// Returns for what a process may connect to `url`; `None`: it may not.
    async fn purpose(&self, url: &str) -> Option<Purpose> {
        let url = plain(url);
        // A leader need not be in the list.
        if self.listed.contains(&url) || plain(&self.masters.url()) == url {
            return Some(Purpose::Control);
        }
        let mut ps = self.ps.lock().await;
        if !ps.contains(&url) {
            // A partition may have moved.
            *ps = self.ask().await;
        }
        if ps.contains(&url) {
            return Some(Purpose::Bulk);
        }
        let about = url.escape_debug().to_string();
        tracing::warn!(script = %self.script, url = about, "refused: a process asks for what is not of its jobs");
        tokio::time::sleep(PAUSE).await;
        None
    }

    /// Returns the ps of the script's jobs; none without an answer.
    async fn ask(&self) -> BTreeSet<String> {
        let mut client = self.client.clone();
        let asking = client.stage(pb::StageRequest { script: self.script.get() });
        match tokio::time::timeout(ANSWER, asking).await {
            Ok(Ok(reply)) => reply.into_inner().ps.iter().map(|url| plain(url)).collect(),
            Ok(Err(_)) | Err(_) => BTreeSet::new(),
        }
    }
}

/// Returns a URL as processes send it.
fn plain(url: &str) -> String {
    url.trim_end_matches('/').to_owned()
}

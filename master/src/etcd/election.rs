//! Election of the leader: the master whose key is in etcd leads while its lease there lives.
//!
//! The leader counts its lease from before the request for it, and stops a quarter of the lease
//! early. So it stops by its own clock before etcd elects another master, unless the two clocks
//! differ by a quarter.

use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use proto::retry::{Pause, Retry};
use proto::status::Failure;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::{Client, revision};
use super::pb;
use super::pb::request_op::Request;
use super::pb::response_op::Response;

/// The key of the leader.
pub(super) const LEADER: &str = "leader";

/// How often a lease is renewed in its time.
const RENEWALS: u32 = 6;

/// Between two attempts to reach an etcd that does not answer.
const RETRY: Retry =
    Retry { first: Duration::from_millis(50), longest: Duration::from_secs(1), attempts_max: u32::MAX };

/// One master's part in the election.
#[derive(Clone, Debug)]
pub(crate) struct Election {
    client: Client,
    /// Where others reach this master.
    url: String,
    ttl: Duration,
}

impl Election {
    pub(crate) const fn new(client: Client, url: String, ttl: Duration) -> Self {
        Self { client, url, ttl }
    }

    /// Waits until this master leads. Tells `leader` who does meanwhile.
    pub(crate) async fn campaign(&self, leader: &watch::Sender<Option<String>>) -> Leadership {
        let attempt = || async {
            match self.stand(leader).await {
                Ok(Some(leadership)) => Ok(leadership),
                // Another master leads, or led.
                Ok(None) => Err(None),
                Err(failure) => Err(Some(failure)),
            }
        };
        let judge = |failures, failure: Option<Failure>| {
            let Some(failure) = failure else { return Ok(Pause::None) };
            leader.send_replace(None);
            if failures == 0 {
                tracing::warn!(reason = %failure, "etcd unreachable; trying again, nobody is elected meanwhile");
            }
            Ok::<_, Infallible>(Pause::Growing)
        };
        let Ok(leadership) = RETRY.run(seed_of(&self.url), tokio::time::sleep, judge, attempt).await;
        leadership
    }

    /// Takes the lead if no master has it, else waits for one change.
    async fn stand(&self, leader: &watch::Sender<Option<String>>) -> Result<Option<Leadership>, Failure> {
        let (found, at) = self.client.get(LEADER).await?;
        if let Some(found) = found {
            let url = String::from_utf8_lossy(&found.value).into_owned();
            if leader.send_replace(Some(url.clone())).as_deref() != Some(&url) {
                tracing::info!(leader = url, "standing by");
            }
            // Looks again now and then: a watch may end without a word.
            let removed = tokio::time::timeout(self.ttl, self.client.removed(LEADER, at)).await;
            return removed.unwrap_or(Ok(())).map(|()| None);
        }
        leader.send_replace(None);
        let asked = Instant::now();
        let (lease, ttl) = self.client.grant(self.ttl).await?;
        let put = pb::PutRequest {
            key: self.client.key(LEADER).into_bytes(),
            value: self.url.clone().into_bytes(),
            lease,
        };
        let put = pb::RequestOp { request: Some(Request::RequestPut(put)) };
        let taken = self.client.transaction(LEADER, 0, vec![put]).await;
        match taken {
            Ok(reply) if reply.succeeded => {
                let made = revision(reply.header.as_ref());
                let client = self.client.clone();
                let until = Mutex::new(certain_until(asked, ttl));
                let lost = CancellationToken::new();
                return Ok(Some(Leadership { client, lease, made, ttl, until, lost }));
            }
            Ok(reply) => {
                if let Some(Response::ResponseRange(range)) =
                    reply.responses.into_iter().find_map(|op| op.response)
                {
                    let url = range.kvs.first().map(|kv| String::from_utf8_lossy(&kv.value).into_owned());
                    leader.send_replace(url);
                }
            }
            Err(failure) => {
                // Whether the key was put is not known; without its lease it is not there.
                let _ = self.client.revoke(lease).await;
                return Err(failure);
            }
        }
        let _ = self.client.revoke(lease).await;
        Ok(None)
    }
}

/// The lead, from an election to the end of its lease.
#[derive(Debug)]
pub(crate) struct Leadership {
    client: Client,
    lease: i64,
    /// The revision that made the leader's key: no other leader has the same.
    made: i64,
    ttl: Duration,
    until: Mutex<Instant>,
    lost: CancellationToken,
}

impl Leadership {
    /// Returns what every write compares.
    pub(super) const fn made(&self) -> i64 {
        self.made
    }

    /// Returns whether no other master can lead at `now`.
    pub(crate) fn is_certain(&self, now: Instant) -> bool {
        !self.lost.is_cancelled() && now < self.until()
    }

    /// Ends with the lead.
    pub(crate) const fn lost(&self) -> &CancellationToken {
        &self.lost
    }

    /// Ends the lead and logs the reason of the first call.
    pub(crate) fn lose(&self, reason: &str) {
        if !self.lost.is_cancelled() {
            tracing::warn!(reason, "this master no longer leads; it stops answering and stands by");
            self.lost.cancel();
        }
    }

    /// Renews the lease until it is lost.
    pub(crate) async fn keep(&self) {
        let mut failures = 0;
        while !self.lost.is_cancelled() {
            let wait = match failures {
                0 => self.ttl / RENEWALS,
                _ => RETRY.wait(failures, self.lease.unsigned_abs()).min(self.ttl / RENEWALS),
            };
            let until = self.until();
            let renewing = async {
                tokio::time::sleep(wait).await;
                let asked = Instant::now();
                (asked, self.client.keep_alive(self.lease).await)
            };
            match tokio::time::timeout_at(until, renewing).await {
                Ok((asked, Ok(Some(ttl)))) => {
                    if failures > 0 {
                        tracing::info!("etcd answers again");
                    }
                    failures = 0;
                    let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
                    *until = certain_until(asked, ttl).max(*until);
                }
                Ok((_, Ok(None))) => self.lose("its lease in etcd has ended"),
                Ok((_, Err(failure))) => {
                    if failures == 0 {
                        tracing::warn!(reason = %failure, "etcd does not renew the lead; trying again while it lasts");
                    }
                    failures += 1;
                }
                // Another renewal may have come in a moment before.
                Err(_) if Instant::now() < self.until() => {}
                Err(_) => self.lose("etcd did not renew its lease in time, or this process stood still"),
            }
        }
    }

    /// Ends its lease in etcd as time would, without a word to this leader.
    #[cfg(test)]
    pub(super) async fn expire(&self) {
        self.client.revoke(self.lease).await.expect("etcd answers");
    }

    /// Gives the lead away, so that nobody has to wait for the lease to end.
    pub(crate) async fn resign(&self) {
        self.lost.cancel();
        if let Err(failure) = self.client.revoke(self.lease).await {
            tracing::warn!(reason = %failure, "the lead was not given back; it ends with its lease");
        }
    }

    pub(super) fn until(&self) -> Instant {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the end of a lease that was requested at `asked`, minus a quarter of its length.
fn certain_until(asked: Instant, ttl: Duration) -> Instant {
    asked + ttl - ttl / 4
}

/// Returns a seed that differs between masters, so that they do not retry in step.
fn seed_of(url: &str) -> u64 {
    url.bytes().fold(0, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_counted_from_before_it_was_asked_for_and_ends_a_quarter_early() {
        let asked = Instant::now();
        assert_eq!(certain_until(asked, Duration::from_secs(8)), asked + Duration::from_secs(6));
    }
}

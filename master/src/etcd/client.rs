//! Calls to etcd, each with a deadline; a member that does not answer is left for the next one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use net::channel::{Dialer, Purpose};
use net::failover::Failover;
use proto::status::{Failure, Kind};
use tonic::{Response, Status};

use super::pb;
use super::pb::kv_client::KvClient;
use super::pb::lease_client::LeaseClient;
use super::pb::request_op::Request;
use super::pb::watch_client::WatchClient;

/// Bytes of one answer at most: above [`KEYS`] of the longest pieces.
const ANSWER_BYTES_MAX: usize = 160 << 20;

/// Keys that are read at once.
const KEYS: i64 = 256;

/// The members of one etcd. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    members: Failover,
    /// Longest wait for one answer.
    patience: Duration,
    /// Prefix of all keys.
    prefix: Arc<str>,
}

impl Client {
    /// Creates a client of the etcd with `members`, URLs separated by commas.
    ///
    /// # Errors
    /// One of them is no URL.
    pub(crate) fn new(
        dialer: &Dialer,
        members: &str,
        prefix: &str,
        patience: Duration,
    ) -> Result<Self, Failure> {
        let members = Failover::new(dialer, members, Purpose::Control)?;
        Ok(Self { members, patience, prefix: prefix.into() })
    }

    /// Returns the whole name of a key of ours.
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Returns the newest value of one key, and the store's revision.
    pub(crate) async fn get(&self, name: &str) -> Result<(Option<pb::KeyValue>, i64), Failure> {
        let request = pb::RangeRequest { key: self.key(name).into_bytes(), ..Default::default() };
        let reply = self.range(request).await?;
        Ok((reply.kvs.into_iter().next(), revision(reply.header.as_ref())))
    }

    /// Returns all keys that begin with `name`, without that, as they are at one moment.
    pub(crate) async fn list(&self, name: &str) -> Result<BTreeMap<String, Vec<u8>>, Failure> {
        let begin = self.key(name);
        let end = end_of(&begin);
        self.read(name, begin.into_bytes(), end, |_| false).await
    }

    /// Returns the keys from `begin` to `end`, without what `name` stands for, as they are at one
    /// moment: all of them, or the first ones, as soon as they are `enough`.
    pub(crate) async fn read(
        &self,
        name: &str,
        begin: Vec<u8>,
        end: Vec<u8>,
        enough: impl Fn(&BTreeMap<String, Vec<u8>>) -> bool,
    ) -> Result<BTreeMap<String, Vec<u8>>, Failure> {
        let prefix = self.key(name);
        let (mut next, mut at) = (begin, 0);
        let mut found = BTreeMap::new();
        loop {
            let request = pb::RangeRequest { key: next, range_end: end.clone(), limit: KEYS, revision: at };
            let reply = self.range(request).await?;
            at = if at == 0 { revision(reply.header.as_ref()) } else { at };
            next = reply.kvs.last().map(|last| [&last.key[..], &[0]].concat()).unwrap_or_default();
            for pb::KeyValue { key, value, .. } in reply.kvs {
                let key = String::from_utf8_lossy(&key).into_owned();
                found.insert(key.strip_prefix(&prefix).unwrap_or(&key).to_owned(), value);
            }
            if !reply.more || next.is_empty() || enough(&found) {
                return Ok(found);
            }
        }
    }

    async fn range(&self, request: pb::RangeRequest) -> Result<pb::RangeResponse, Failure> {
        let mut kv = KvClient::new(self.members.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        self.call("read", async move { kv.range(request).await }).await
    }

    /// Does `success` if the key `fence` was made by the revision `made` (0: if it is not there),
    /// else reads `fence`.
    pub(crate) async fn transaction(
        &self,
        fence: &str,
        made: i64,
        success: Vec<pb::RequestOp>,
    ) -> Result<pb::TxnResponse, Failure> {
        let key = self.key(fence).into_bytes();
        let read = pb::RangeRequest { key: key.clone(), ..Default::default() };
        let compare = pb::Compare {
            result: pb::compare::CompareResult::Equal.into(),
            target: pb::compare::CompareTarget::Create.into(),
            key,
            target_union: Some(pb::compare::TargetUnion::CreateRevision(made)),
        };
        let request = pb::TxnRequest {
            compare: vec![compare],
            success,
            failure: vec![pb::RequestOp { request: Some(Request::RequestRange(read)) }],
        };
        let mut kv = KvClient::new(self.members.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        self.call("write", async move { kv.txn(request).await }).await
    }

    /// Returns a new lease of about `ttl`: its id, and how long it really has.
    pub(crate) async fn grant(&self, ttl: Duration) -> Result<(i64, Duration), Failure> {
        let request = pb::LeaseGrantRequest { ttl: i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX) };
        let mut lease = LeaseClient::new(self.members.clone());
        let reply = self.call("grant a lease", async move { lease.lease_grant(request).await }).await?;
        Ok((reply.id, seconds(reply.ttl)))
    }

    /// Starts a lease's time again: how long it has from then on; `None` when it has ended.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<Option<Duration>, Failure> {
        let mut lease = LeaseClient::new(self.members.clone());
        let asking = async move {
            let request = tokio_stream::once(pb::LeaseKeepAliveRequest { id });
            let answer = lease.lease_keep_alive(request).await?.into_inner().message().await?;
            answer.map(Response::new).ok_or_else(|| Status::unavailable("the stream ended without an answer"))
        };
        let answer = self.call("keep a lease", asking).await?;
        Ok((answer.ttl > 0).then(|| seconds(answer.ttl)))
    }

    /// Ends a lease.
    pub(crate) async fn revoke(&self, id: i64) -> Result<(), Failure> {
        let mut lease = LeaseClient::new(self.members.clone());
        let request = pb::LeaseRevokeRequest { id };
        self.call("end a lease", async move { lease.lease_revoke(request).await }).await.map(drop)
    }

    /// Waits until a key is removed after `revision`, for as long as the stream of changes lasts.
    pub(crate) async fn removed(&self, name: &str, revision: i64) -> Result<(), Failure> {
        let create =
            pb::WatchCreateRequest { key: self.key(name).into_bytes(), start_revision: revision + 1 };
        let create = pb::watch_request::RequestUnion::CreateRequest(create);
        let mut watch = WatchClient::new(self.members.clone());
        // The stream of requests stays open: its end would end the watch.
        let requests = futures::stream::StreamExt::chain(
            tokio_stream::once(pb::WatchRequest { request_union: Some(create) }),
            futures::stream::pending(),
        );
        let mut changes = self.call("watch", async move { watch.watch(requests).await }).await?;
        let deleted = i32::from(pb::event::EventType::Delete);
        loop {
            match changes.message().await.map_err(Failure::from)? {
                Some(change) if change.events.iter().any(|event| event.r#type == deleted) => return Ok(()),
                Some(change) if !change.canceled => {}
                _ => return Err(Failure::new(Kind::Unavailable, "etcd ended the watch")),
            }
        }
    }

    async fn call<T>(
        &self,
        what: &str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        let asked = self.members.url();
        let said =
            |failure: Failure| Failure { message: format!("etcd at {asked}, {what}: {failure}"), ..failure };
        match tokio::time::timeout(self.patience, call).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(said(status.into())),
            Err(_) => {
                self.members.leave(&asked);
                Err(said(Failure::new(Kind::Unavailable, format!("no answer within {:?}", self.patience))))
            }
        }
    }
}

/// Returns the store's revision at an answer.
pub(super) fn revision(header: Option<&pb::ResponseHeader>) -> i64 {
    header.map_or(0, |header| header.revision)
}

/// Returns the first key after all that begin with `prefix`, which is not empty and does not end in
/// the greatest byte.
pub(super) fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}

fn seconds(count: i64) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or(0))
}

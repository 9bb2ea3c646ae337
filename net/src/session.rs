//! Membership of a worker or ps in the fleet: register, send heartbeats, register again when the
//! master forgot the process.
//!
//! The heartbeat stream stays open as long as the process lives. When it breaks, the master knows
//! at once. The session then retries with back-off until its owner drops it. It gets a new
//! incarnation if the master no longer knows the old one.

mod secret;

use std::future::ready;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use proto::ids::IncarnationId;
use proto::pb;
use proto::pb::fleet_client::FleetClient;
use proto::retry::Retry;
use proto::status::{Failure, Kind};
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;

pub use self::secret::{KEY, Secret, Shown};
use crate::failover::Failover;
use crate::retry;

/// Longest wait for a master's first answers, if there is another master.
const ANSWER: Duration = Duration::from_secs(5);

/// Consecutive heartbeats without an answer after which the session asks another master, if there
/// is one. A single master needs no limit: its connection breaks when it is gone.
const UNANSWERED_MAX: u32 = 5;

/// State of this process in the fleet. It is cheap to clone, and all clones are the same session.
#[derive(Clone, Debug)]
pub struct Session {
    masters: Failover,
    registered: watch::Receiver<Option<Registered>>,
    replies: watch::Receiver<pb::HeartbeatReply>,
    outgoing: Arc<Outgoing>,
}

/// The current incarnation, as the master registered it.
#[derive(Clone, Copy, Debug)]
pub struct Registered {
    /// Incarnation that the master gave to this process start.
    pub incarnation: IncarnationId,
    /// Number that names the master's journal.
    pub master: u64,
    /// Number of starts of a master with that journal. The answer of a later start replaces that of
    /// an earlier one.
    pub starts: u64,
    /// Secret that proves that calls come from this process.
    pub secret: Secret,
}

impl Registered {
    const fn shown(&self) -> Shown {
        Shown { incarnation: self.incarnation, secret: self.secret }
    }
}

#[derive(Debug, Default)]
struct Outgoing {
    /// Content of the next heartbeat. The incarnation is filled in when it is sent.
    next: Mutex<pb::HeartbeatRequest>,
    /// Signal to send the heartbeat now.
    now: Notify,
}

impl Session {
    /// Starts the session. The returned future drives it, and ends only with an error that retries
    /// cannot mend (another program version, a refused name). Drop the future to leave the fleet.
    pub fn start(
        masters: Failover,
        register: pb::RegisterRequest,
    ) -> (Self, impl Future<Output = Failure> + Send) {
        let (registered_tx, registered) = watch::channel(None);
        let (replies_tx, replies) = watch::channel(pb::HeartbeatReply::default());
        let outgoing = Arc::new(Outgoing::default());
        let session = Self { masters: masters.clone(), registered, replies, outgoing: outgoing.clone() };
        let driver = async move {
            let (mut was_member, mut is_refused) = (false, false);
            loop {
                let ended = live(&masters, &register, &registered_tx, &replies_tx, &outgoing).await;
                was_member |= registered_tx.send_replace(None).is_some();
                // A pause protects a master that takes registrations and drops heartbeats.
                let mut pause = Retry::default().first;
                match ended {
                    // The process or the master is replacing its keys. The job needs what this
                    // process holds, so it waits until it is let in again.
                    Err(failure) if was_member && failure.kind == Kind::Unauthenticated => {
                        if !std::mem::replace(&mut is_refused, true) {
                            tracing::warn!(reason = %failure, "the master does not let this process in; trying again");
                        }
                        pause = Retry::default().longest;
                    }
                    Err(failure) if !failure.is_retryable() && failure.kind != Kind::Fenced => {
                        return failure;
                    }
                    _ => is_refused = false,
                }
                tokio::time::sleep(pause).await;
            }
        };
        (session, driver)
    }

    /// Waits for the current incarnation and returns it.
    pub async fn registered(&self) -> Registered {
        let mut registered = self.registered.clone();
        // The value is copied out at once: a borrow held across an await would pin the caller's
        // future to one thread.
        let current = registered.wait_for(Option::is_some).await.map(|current| *current);
        match current {
            Ok(current) => current.unwrap_or_else(|| unreachable!("just waited for it")),
            // The driver is gone, and this process is about to end.
            Err(_) => std::future::pending().await,
        }
    }

    /// Returns a client of the master that calls as the current incarnation. Without an
    /// incarnation, calls fail as unavailable.
    pub fn fleet(&self) -> FleetClient<AsMember> {
        let (masters, registered) = (self.masters.clone(), self.registered.clone());
        FleetClient::new(AsMember { masters, registered })
    }

    /// Returns a receiver of the current incarnation, which is `None` while the master does not
    /// know this process.
    pub fn incarnations(&self) -> watch::Receiver<Option<Registered>> {
        self.registered.clone()
    }

    /// Returns a receiver of the master's newest answer to a heartbeat.
    pub fn replies(&self) -> watch::Receiver<pb::HeartbeatReply> {
        self.replies.clone()
    }

    /// Changes the content of heartbeats. If `edit` returns true, a heartbeat is sent at once.
    pub fn report(&self, edit: impl FnOnce(&mut pb::HeartbeatRequest) -> bool) {
        if edit(&mut self.outgoing.next.lock().unwrap_or_else(PoisonError::into_inner)) {
            self.outgoing.now.notify_one();
        }
    }
}

/// A channel to the master whose calls show the session of this process.
#[derive(Clone, Debug)]
pub struct AsMember {
    masters: Failover,
    registered: watch::Receiver<Option<Registered>>,
}

impl tower::Service<Request<Body>> for AsMember {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        tower::Service::poll_ready(&mut self.masters, cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Some(registered) = *self.registered.borrow() else {
            let message = "this process is not registered with the master now; try again";
            return Box::pin(ready(Ok(Status::from(Failure::new(Kind::Unavailable, message)).into_http())));
        };
        registered.shown().show(request.headers_mut());
        tower::Service::call(&mut self.masters, request)
    }
}

/// Runs one incarnation, from registration to the end of its heartbeat stream.
async fn live(
    masters: &Failover,
    register: &pb::RegisterRequest,
    registered: &watch::Sender<Option<Registered>>,
    replies: &watch::Sender<pb::HeartbeatReply>,
    outgoing: &Outgoing,
) -> Result<(), Failure> {
    let seed =
        register.name.bytes().fold(0u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let visible = |attempt: u32, failure: &Failure| {
        // Logged when the state changes, not at each attempt.
        if attempt == 1 {
            tracing::warn!(reason = %failure, "master unreachable; trying again");
        }
    };
    let mut fleet = FleetClient::new(masters.clone());
    let client = fleet.clone();
    let reply = retry::repeat(Retry::unlimited(), seed, visible, || {
        let mut fleet = client.clone();
        let registering =
            async move { Ok(fleet.register(register.clone()).await.map_err(Failure::from)?.into_inner()) };
        answered(masters, registering)
    })
    .await?;
    let incarnation = IncarnationId(reply.incarnation);
    let secret = Secret::from_bytes(&reply.secret).ok_or_else(|| {
        let found = reply.secret.len();
        Failure::new(Kind::Malformed, format!("RegisterReply.secret: expected 16 bytes, found {found}"))
    })?;
    let member = Registered { incarnation, master: reply.master, starts: reply.starts, secret };
    let period = Duration::from_millis(u64::from(reply.heartbeat_ms.max(10)));
    let beat = || {
        let mut request = outgoing.next.lock().unwrap_or_else(PoisonError::into_inner).clone();
        request.incarnation = reply.incarnation;
        request
    };
    let (requests, receiver) = mpsc::channel(4);
    // The first heartbeat travels with the call, so that the master can answer it.
    let _ = requests.try_send(beat());
    let mut opening = tonic::Request::new(ReceiverStream::new(receiver));
    member.shown().show(opening.metadata_mut().as_mut());
    let opening = async { Ok(fleet.heartbeat(opening).await.map_err(Failure::from)?.into_inner()) };
    let mut answers = answered(masters, opening).await?;
    let master = masters.url();
    let mut unanswered = 0;
    registered.send_replace(Some(member));
    tracing::info!(%incarnation, "registered with the master");
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            answer = answers.message() => match answer.map_err(Failure::from)? {
                Some(answer) => {
                    unanswered = 0;
                    replies.send_replace(answer);
                }
                None => return Err(Failure::new(Kind::Unavailable, "the master closed the heartbeat stream")),
            },
            _ = ticks.tick() => {
                if unanswered == UNANSWERED_MAX && masters.has_others() {
                    return Err(silent(masters, &master));
                }
                unanswered += 1;
                drop(requests.try_send(beat()));
            }
            () = outgoing.now.notified() => drop(requests.try_send(beat())),
        }
    }
}

/// Waits for an answer. If there is another master to ask, the wait has a limit.
async fn answered<T>(
    masters: &Failover,
    answer: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    if !masters.has_others() {
        return answer.await;
    }
    let asked = masters.url();
    tokio::time::timeout(ANSWER, answer).await.unwrap_or_else(|_| Err(silent(masters, &asked)))
}

/// Leaves a master that takes calls and does not answer, because it is stopped or cut off. The next
/// calls go to another one.
fn silent(masters: &Failover, url: &str) -> Failure {
    masters.leave(url);
    Failure::new(Kind::Unavailable, format!("the master at {url} does not answer"))
}

//! One service at several URLs: a channel stays with a server that answers, and moves to another
//! when it does not.
//!
//! One of several masters leads. The others stand by and say so, with the leader's URL if they know
//! it, and the channel follows. It repeats no call: the caller repeats a failed call (see
//! [`retry`](crate::retry)), which then goes to the current URL. Calls that wait at a URL when the
//! channel leaves it end as unavailable.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use http::{HeaderMap, Request, Response};
use proto::status::{Failure, Kind};
use tokio::sync::watch;
use tonic::body::Body;
use tonic::metadata::MetadataValue;
use tonic::transport::Error;
use tonic::{Code, Status};
use tower::ServiceExt as _;

use crate::channel::{Channel, Dialer, Purpose};

/// Metadata of a status with the leader's URL.
const LEADER_KEY: &str = "ebb-leader";

/// Returns the answer of a master that stands by to every call.
pub fn standing_by(leader: Option<&str>) -> Status {
    let message = match leader {
        Some(leader) => format!("this master stands by; the leader is {leader}"),
        None => "this master stands by, and there is no leader now".to_owned(),
    };
    let mut status = Status::from(Failure::new(Kind::StandingBy, message));
    if let Some(leader) = leader.and_then(|leader| MetadataValue::try_from(leader).ok()) {
        status.metadata_mut().insert(LEADER_KEY, leader);
    }
    status
}

/// A channel to one of several URLs. It is cheap to clone, and all clones are at the same URL.
#[derive(Clone, Debug)]
pub struct Failover {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dialer: Dialer,
    purpose: Purpose,
    route: watch::Sender<Route>,
    channels: Mutex<BTreeMap<String, Channel>>,
}

impl Failover {
    /// Creates a channel to `urls`, separated by commas. It connects at its first use.
    ///
    /// # Errors
    /// A URL is not of the form `http://host:port`, or there is none.
    pub fn new(dialer: &Dialer, urls: &str, purpose: Purpose) -> Result<Self, Failure> {
        let listed: Vec<String> = self::urls(urls).map(str::to_owned).collect();
        let channel = |url: &String| Ok((url.clone(), dialer.channel(url, purpose)?));
        let channels = listed.iter().map(channel).collect::<Result<BTreeMap<_, _>, Failure>>()?;
        let first = listed.first().cloned().ok_or_else(|| {
            Failure::new(Kind::Malformed, format!("`{urls}` has no URL; expected http://HOST:PORT[,..]"))
        })?;
        let route = watch::Sender::new(Route { listed, at: 0, url: first });
        let shared = Shared { dialer: dialer.clone(), purpose, route, channels: Mutex::new(channels) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns whether the list has another URL.
    pub fn has_others(&self) -> bool {
        self.shared.route.borrow().listed.len() > 1
    }

    /// Returns the URL of calls that begin now.
    pub fn url(&self) -> String {
        self.shared.route.borrow().url.clone()
    }

    /// Moves to the next URL if calls still go to `silent`, a server that takes calls and does not
    /// answer.
    pub fn leave(&self, silent: &str) {
        self.shared.route.send_if_modified(|route| route.leave(silent));
    }

    fn channel(&self, url: &str) -> Result<Channel, Failure> {
        let mut channels = self.shared.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(url) {
            return Ok(channel.clone());
        }
        let channel = self.shared.dialer.channel(url, self.shared.purpose)?;
        channels.insert(url.to_owned(), channel.clone());
        Ok(channel)
    }

    async fn send(self, request: Request<Body>) -> Result<Response<Body>, Error> {
        let url = self.url();
        let channel = match self.channel(&url) {
            Ok(channel) => channel,
            Err(failure) => {
                self.leave(&url);
                return Ok(Status::from(failure).into_http());
            }
        };
        let mut route = self.shared.route.subscribe();
        let answer = tokio::select! {
            biased;
            answer = channel.oneshot(request) => answer,
            _ = route.wait_for(|route| route.url != url) => {
                let message = format!("{url} did not answer, and others of its service were found to");
                return Ok(Status::from(Failure::new(Kind::Unavailable, message)).into_http());
            }
        };
        match &answer {
            Ok(response) => {
                match Sign::of(response.headers()) {
                    Sign::Serves => {}
                    Sign::Away => self.leave(&url),
                    Sign::Leader(leader) => {
                        // A leader's URL that is malformed is ignored.
                        let known = self.channel(&leader).is_ok();
                        self.shared.route.send_if_modified(|route| match known {
                            true => route.follow(&url, &leader),
                            false => route.leave(&url),
                        });
                    }
                }
            }
            Err(_) => self.leave(&url),
        }
        answer
    }
}

impl tower::Service<Request<Body>> for Failover {
    type Response = Response<Body>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.clone().send(request))
    }
}

/// Returns the URLs in a list with commas.
pub fn urls(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|url| !url.is_empty())
}

/// Information in the head of an answer about the server that sent it.
#[derive(Debug, PartialEq, Eq)]
enum Sign {
    /// The server does what it is asked, or refuses for a reason of its own.
    Serves,
    /// The server cannot serve, and does not know which one can.
    Away,
    /// Another server leads, at this URL.
    Leader(String),
}

impl Sign {
    fn of(headers: &HeaderMap) -> Self {
        let status = Status::from_header_map(headers).filter(|status| status.code() == Code::Unavailable);
        let Some(status) = status else { return Self::Serves };
        let leader = status.metadata().get(LEADER_KEY).and_then(|url| url.to_str().ok()).map(str::to_owned);
        match (proto::status::kind_named(&status), leader) {
            (Some(Kind::StandingBy), Some(leader)) => Self::Leader(leader),
            (Some(Kind::StandingBy) | None, _) => Self::Away,
            (Some(_), _) => Self::Serves,
        }
    }
}

/// Decides to which URL calls go. Pure.
#[derive(Debug)]
struct Route {
    listed: Vec<String>,
    /// Index of the last URL of the list to which calls went.
    at: usize,
    /// URL of the calls. A leader named by another server need not be in the list.
    url: String,
}

impl Route {
    /// Moves to the next URL of the list because `asked` failed. Returns false if calls go
    /// elsewhere already.
    fn leave(&mut self, asked: &str) -> bool {
        if self.url != asked {
            return false;
        }
        self.at = (self.at + 1) % self.listed.len();
        self.url.clone_from(&self.listed[self.at]);
        self.url != asked
    }

    /// Moves to the leader that `asked` named. Returns false if calls go elsewhere already.
    fn follow(&mut self, asked: &str, leader: &str) -> bool {
        if asked == leader {
            return self.leave(asked);
        }
        if self.url != asked {
            return false;
        }
        self.at = self.listed.iter().position(|url| url == leader).unwrap_or(self.at);
        leader.clone_into(&mut self.url);
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn route(listed: &[&str]) -> Route {
        let listed: Vec<String> = listed.iter().copied().map(str::to_owned).collect();
        Route { url: listed[0].clone(), at: 0, listed }
    }

    // A channel needs a runtime, even before it connects.
    #[tokio::test]
    async fn a_list_of_urls_may_have_spaces_and_must_have_urls() {
        assert_eq!(urls("http://a:1, http://b:2,").collect::<Vec<_>>(), ["http://a:1", "http://b:2"]);
        for (list, expected) in [("", "no URL"), (",", "no URL"), ("http://a:1,ftp://b", "ftp://b")] {
            let failure = Failover::new(&Dialer::tcp(), list, Purpose::Control).unwrap_err();
            assert!(failure.message.contains(expected), "{failure}");
        }
    }

    #[test]
    fn who_stands_by_says_who_leads() {
        let sign = |status: Status| Sign::of(status.into_http::<Body>().headers());
        assert_eq!(sign(standing_by(Some("http://b:1"))), Sign::Leader("http://b:1".to_owned()));
        assert_eq!(sign(standing_by(None)), Sign::Away);
        assert_eq!(sign(Status::unavailable("no etcd leader")), Sign::Away);
        // A ps that is not ready yet is no reason to leave the master that says so.
        assert_eq!(sign(Failure::new(Kind::NotYet, "soon").into()), Sign::Serves);
        assert_eq!(sign(Failure::new(Kind::Malformed, "no").into()), Sign::Serves);
    }

    #[test]
    fn a_leader_is_followed_and_left_when_it_is_gone() {
        let mut route = route(&["a", "b"]);
        assert!(route.leave("a") && route.url == "b");
        assert!(!route.leave("a"), "somebody else noticed it first");
        assert!(route.follow("b", "c") && route.url == "c");
        assert!(route.leave("c") && route.url == "a");
        // A server that stands by and names itself answers from before it lost the lead.
        assert!(route.follow("a", "a") && route.url == "b");
    }

    #[test]
    fn one_url_is_never_left() {
        let mut route = route(&["a"]);
        assert!(!route.leave("a") && route.url == "a");
    }

    proptest! {
        /// The next leader of the list is found, whatever the others answer while none leads.
        #[test]
        fn every_listed_url_is_tried(count in 1usize..6, hints in proptest::collection::vec(0usize..6, 0..20)) {
            let listed: Vec<String> = (0..count).map(|index| index.to_string()).collect();
            let mut route = Route { url: listed[0].clone(), at: 0, listed };
            for hint in hints {
                let asked = route.url.clone();
                route.follow(&asked, &hint.to_string());
            }
            let mut tried = std::collections::BTreeSet::new();
            for _ in 0..=count {
                let asked = route.url.clone();
                tried.insert(asked.clone());
                route.leave(&asked);
            }
            prop_assert!((0..count).all(|index| tried.contains(&index.to_string())));
        }
    }
}

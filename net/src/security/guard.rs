//! The check before every service: who calls, and whether the caller may make that call.
//!
//! A connection knows its door ([`Guest`]), and the door knows the tokens. A connection that came
//! through no door (a pipe inside this process, a simulated network) may make every call. An
//! accepted call carries its [`Caller`].

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, Request, Response};
use proto::pb::ProcessRole;
use proto::status::{Failure, Kind, kind_named};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};

use super::table::{self, Whose};
use super::tokens::Token;
use super::visit::Guest;

impl Guest {
    /// Returns the caller, if it may make this call.
    fn admit(&self, call: &str, headers: &HeaderMap) -> Result<Caller, Failure> {
        let caller = |token| Caller { token, guest: self.clone() };
        let Some(visit) = self.visit() else { return Ok(caller(None)) };
        let loaded = visit.keys().loaded();
        let Some(tokens) = &loaded.tokens else {
            visit.prove();
            return Ok(caller(None));
        };
        let token = match headers.get(AUTHORIZATION).map(HeaderValue::as_bytes) {
            None => None,
            Some(header) => {
                let shown = header.strip_prefix(b"Bearer ").or_else(|| header.strip_prefix(b"bearer "));
                let found = shown.and_then(|shown| tokens.find(shown));
                Some(found.ok_or_else(|| {
                    let message =
                        "this server does not know the token; it was replaced, or is of another cluster";
                    self.refuse("unknown token", "", "", Failure::new(Kind::Unauthenticated, message))
                })?)
            }
        };
        table::decide(call, token.as_ref().map(|token| token.role)).map_err(|failure| {
            // Text that a stranger chooses must not become part of the remembered key.
            let about = table::whose(call).map_or("", |_| call);
            match (&token, failure.kind) {
                (None, _) => self.refuse("no token", about, "", failure),
                (Some(token), Kind::Incompatible) => self.refuse("no such call", "", &token.name, failure),
                (Some(token), _) => {
                    let about = format!("{about} by `{}` ({})", token.name, token.role);
                    self.refuse("not for this role", &about, "", failure)
                }
            }
        })?;
        // A call that everybody may make proves nothing.
        if table::whose(call) != Some(Whose::Anybodys) {
            visit.prove();
        }
        Ok(caller(token))
    }

    fn refuse(&self, why: &'static str, about: &str, details: &str, failure: Failure) -> Failure {
        if let Some(visit) = self.visit() {
            visit.refuse(why, about, details);
        }
        failure
    }

    /// Logs messages that tonic refuses before a service sees them. Services log their own
    /// refusals.
    fn look_at(&self, call: &str, answer: &Response<Body>) {
        let status = Status::from_header_map(answer.headers());
        if let Some(status) =
            status.filter(|status| status.code() == Code::OutOfRange && kind_named(status).is_none())
            && let Some(visit) = self.visit()
        {
            visit.refuse("a message that is too large", call, status.message());
        }
    }
}

/// Sender of a call: the bearer of a token, or a caller that needs none.
#[derive(Clone, Debug)]
pub struct Caller {
    token: Option<Arc<Token>>,
    guest: Guest,
}

impl Caller {
    /// Returns the caller of a request. A request that did not pass [`Guard`] has a caller that
    /// needs no token.
    pub fn of<T>(request: &tonic::Request<T>) -> Self {
        let unasked = || Self { token: None, guest: Guest::of_the_house() };
        request.extensions().get().cloned().unwrap_or_else(unasked)
    }

    /// Returns the token, if the server asks for tokens.
    pub fn token(&self) -> Option<&Token> {
        self.token.as_deref()
    }

    /// Logs once that a handler refuses something to this caller, even if it comes back often.
    /// `why` is a short fixed text, `details` are logged with it.
    pub fn refuse(&self, why: &'static str, details: &str) {
        let about = self.token().map_or(String::new(), |token| format!("`{}` ({})", token.name, token.role));
        match self.guest.visit() {
            Some(visit) => visit.refuse(why, &about, details),
            None => tracing::warn!(about, details, "refused: {why}"),
        }
    }

    /// Checks that the caller may join the fleet in the role `process`.
    ///
    /// # Errors
    /// The token has another role.
    pub fn may_join_as(&self, process: ProcessRole) -> Result<(), Failure> {
        let Some(role) = self.token().map(|token| token.role).filter(|role| !role.may_join_as(process))
        else {
            return Ok(());
        };
        let process = match process {
            ProcessRole::Ps => "a ps",
            ProcessRole::Worker => "a worker",
            ProcessRole::Unspecified => "nothing in particular",
        };
        let message = format!("a token of the role `{role}` may not join as {process}");
        self.refuse("to join as another role", &message);
        Err(Failure::new(Kind::Denied, message))
    }

    /// Checks that the caller may have a job or a worker of this kind. `is_driven`: a program
    /// drives it with a loop of its own.
    ///
    /// # Errors
    /// The token is for programs alone, and this is none.
    pub fn may_take_part(&self, is_driven: bool) -> Result<(), Failure> {
        match self.token().map(|token| token.role) {
            Some(role) if role.is_for_programs() && !is_driven => {
                let message = format!(
                    "a token of the role `{role}` is for ebbflow.join alone; submit other jobs and start other workers \
                     with tokens of the roles `submit` and `worker`"
                );
                self.refuse("not a program with a loop of its own", &message);
                Err(Failure::new(Kind::Denied, message))
            }
            _ => Ok(()),
        }
    }
}

/// Layer that puts a guard before the services of a server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Guard;

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner }
    }
}

/// A service behind a guard.
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    inner: S,
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Some(guest) = request.extensions().get::<Guest>().cloned() else {
            // A server that takes connections in another way has no guard. It refuses all calls.
            let failure = Failure::new(Kind::Internal, "a connection that came through no door");
            return Box::pin(ready(Ok(Status::from(failure).into_http())));
        };
        match guest.admit(request.uri().path(), request.headers()) {
            Ok(caller) => {
                // Handlers and their logs have no use for the secret.
                request.headers_mut().remove(AUTHORIZATION);
                request.extensions_mut().insert(caller);
                let call = table::name(request.uri().path());
                let answer = self.inner.call(request);
                Box::pin(async move { answer.await.inspect(|answer| guest.look_at(call, answer)) })
            }
            Err(failure) => Box::pin(ready(Ok(Status::from(failure).into_http()))),
        }
    }
}

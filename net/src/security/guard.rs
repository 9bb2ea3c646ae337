//! The check before every service: who calls, and whether the caller may make that call.
//!
//! A connection knows its door ([`Guest`]), and the door knows the tokens. A connection that came
//! through no door (a pipe inside this process, a simulated network) may make every call. An
//! accepted call carries its [`Caller`].
//!
//! An agent forwards calls of a script's processes. It names the script in the header [`SCRIPT`],
//! which takes rights away: such a call does what a program with a loop of its own does, for jobs
//! of this script alone.

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use proto::ids::JobId;
use proto::pb::ProcessRole;
use proto::status::{Failure, Kind, kind_named};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};

use super::table::{self, TokenRole, Whose};
use super::tokens::Token;
use super::visit::Guest;

/// Header with the number of the script for whose process an agent makes a call.
pub(crate) const SCRIPT: HeaderName = HeaderName::from_static("ebb-script");

impl Guest {
    /// Returns the caller, if it may make this call.
    fn admit(&self, call: &str, headers: &HeaderMap) -> Result<Caller, Failure> {
        let script = headers.get(SCRIPT).map(script).transpose()?;
        let caller = |token| Caller { token, guest: self.clone(), script };
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
        let role = token.as_ref().map(|token| effective(token.role, script));
        table::decide(call, role).map_err(|failure| {
            // Text that a stranger chooses must not become part of the remembered key.
            let about = table::whose(call).map_or("", |_| call);
            match (&token, failure.kind) {
                // Every program asks, and none needs it.
                (Some(_), _) if call == table::ATTACH && role == Some(TokenRole::Script) => failure,
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
    /// The script for whose process an agent makes the call.
    script: Option<JobId>,
}

impl Caller {
    /// Returns the caller of a request. A request that did not pass [`Guard`] has a caller that
    /// needs no token.
    pub fn of<T>(request: &tonic::Request<T>) -> Self {
        let unasked = || Self { token: None, guest: Guest::of_the_house(), script: None };
        request.extensions().get().cloned().unwrap_or_else(unasked)
    }

    /// Returns the caller of a request that did not go through tonic's codec.
    pub fn of_http<T>(request: &Request<T>) -> Option<&Self> {
        request.extensions().get()
    }

    /// Returns the script for whose process an agent makes the call. Such a call reaches jobs of
    /// this script alone.
    pub const fn script(&self) -> Option<JobId> {
        self.script
    }

    /// Returns the role in which the caller acts, if the server asks for tokens.
    pub fn role(&self) -> Option<TokenRole> {
        self.token().map(|token| effective(token.role, self.script))
    }

    /// Checks that a call which names the script `named` is not a forwarded one of another script.
    ///
    /// # Errors
    /// It is.
    pub fn may_name(&self, named: Option<JobId>) -> Result<(), Failure> {
        let Some(script) = self.script.filter(|script| Some(*script) != named) else { return Ok(()) };
        let named = named.map_or_else(|| "none".to_owned(), |named| named.to_string());
        let message =
            format!("a process of script {script} takes part in its jobs alone, and this call names {named}");
        self.refuse("a process that goes beyond its script", &message);
        Err(Failure::new(Kind::Denied, message))
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
        let may = |role: &TokenRole| role.may_join_as(process);
        let is_forwarded = self.script.is_some() && process != ProcessRole::Worker;
        let role = match self.role() {
            Some(role) if !may(&role) => role,
            None if is_forwarded => TokenRole::Script,
            _ => return Ok(()),
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

    /// Checks that the caller may send scripts, whose code agents run.
    ///
    /// # Errors
    /// The token has no such right.
    pub fn may_send_scripts(&self) -> Result<(), Failure> {
        let Some(token) = self.token().filter(|token| !token.scripts) else { return Ok(()) };
        let message = format!(
            "the token of `{}` may not send scripts, whose code runs on workers; an operator allows it with `scripts = \
             true` in the list of tokens",
            token.name
        );
        self.refuse("a script of somebody who may send none", &message);
        Err(Failure::new(Kind::Denied, message))
    }

    /// Checks that the caller may have a job or a worker of this kind. `is_driven`: a program
    /// drives it with a loop of its own.
    ///
    /// # Errors
    /// The token is for programs alone, and this is none.
    pub fn may_take_part(&self, is_driven: bool) -> Result<(), Failure> {
        match self.role().or(self.script.map(|_| TokenRole::Script)) {
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

/// Returns the role in which a bearer acts. A worker that forwards a call for a script acts as a
/// program.
fn effective(role: TokenRole, script: Option<JobId>) -> TokenRole {
    match (role, script) {
        (TokenRole::Worker, Some(_)) => TokenRole::Script,
        (role, _) => role,
    }
}

/// Reads the number of a script.
fn script(value: &HeaderValue) -> Result<JobId, Failure> {
    let number = value.to_str().ok().and_then(|text| text.parse().ok()).filter(|number| *number > 0);
    let wrong = || Failure::new(Kind::Malformed, "ebb-script: expected the number of a script");
    number.map(JobId).ok_or_else(wrong)
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

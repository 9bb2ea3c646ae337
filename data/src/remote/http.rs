//! A file on a web server, read in parts (RFC 9110, section 14) if the server gives parts.
//!
//! No request carries credentials, so no redirect can. A redirect leads only to URLs and addresses
//! that this process may read.

use std::error::Error as StdError;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::LazyLock;

use bytes::Bytes;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, HeaderName, IF_MATCH, IF_UNMODIFIED_SINCE,
    LAST_MODIFIED, RANGE,
};
use reqwest::redirect::{Attempt, Policy};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use url::Url;

use super::State;
use super::allowed;
use super::bridge::{Failure, LIMITS, Limits};

/// Redirects at most.
const REDIRECTS_MAX: usize = 5;

/// A client for all files, which keeps connections open.
static CLIENT: LazyLock<Result<Client, String>> = LazyLock::new(|| client(&LIMITS));

fn client(limits: &Limits) -> Result<Client, String> {
    store::cloud::install_cryptography();
    let builder = Client::builder()
        .user_agent(concat!("ebbflow/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(limits.connect)
        .read_timeout(limits.idle)
        .referer(false)
        .redirect(Policy::custom(follow))
        .dns_resolver(Guarded);
    builder.build().map_err(|error| format!("no HTTP client: {}", with_sources(&error)))
}

/// A name, an address or a redirect that this process does not follow.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Refused {}

/// Resolves names, and refuses those that lead to addresses that are not read.
struct Guarded;

impl Resolve for Guarded {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(resolve(name.as_str().to_owned()))
    }
}

async fn resolve(host: String) -> Result<Addrs, Box<dyn StdError + Send + Sync>> {
    let found: Vec<SocketAddr> = tokio::net::lookup_host((host.as_str(), 0)).await?.collect();
    // `allowed` has decided about this name already.
    let loopback = allowed::is_localhost(&host);
    for address in &found {
        let ip = address.ip();
        if let Some(why) = allowed::refusal(ip, loopback) {
            return Err(Refused(format!("the name `{host}` leads to {ip}, {why}; it is not read")).into());
        }
    }
    Ok(Box::new(found.into_iter()))
}

/// Follows a redirect to a URL that this process may read.
fn follow(attempt: Attempt<'_>) -> reqwest::redirect::Action {
    let (url, before) = (attempt.url(), attempt.previous());
    // A query may be a signature, so the path is enough for an error.
    let place = format!("{}://{}{}", url.scheme(), url.authority(), url.path());
    let was_secure = before.last().is_some_and(|url| url.scheme() == "https");
    let refused = if before.len() > REDIRECTS_MAX {
        Some(format!("more than {REDIRECTS_MAX} redirects"))
    } else if !["http", "https"].contains(&url.scheme()) {
        Some(format!("a redirect to a URL of the scheme `{}`; it is not followed", url.scheme()))
    } else if !url.username().is_empty() || url.password().is_some() {
        Some("a redirect to a URL with a user name; it is not followed".to_owned())
    } else if was_secure && url.scheme() != "https" {
        Some(format!("a redirect from https to `{place}`; it is not followed"))
    } else {
        allowed::check(url).err().map(|why| format!("a redirect to `{place}`: {why}"))
    };
    match refused {
        Some(why) => attempt.error(Refused(why)),
        None => attempt.follow(),
    }
}

/// A file on a web server.
#[derive(Debug)]
pub(super) struct Http {
    client: Client,
    url: Url,
}

impl Http {
    /// Returns the file at a URL. It does not call the server.
    ///
    /// # Errors
    /// There is no HTTP client.
    pub(super) fn new(url: Url, limits: &Limits) -> Result<Self, String> {
        // Only tests have limits of their own.
        let client = if limits.idle == LIMITS.idle { CLIENT.clone()? } else { client(limits)? };
        Ok(Self { client, url })
    }

    fn request(&self) -> RequestBuilder {
        // Parts of a file that the server compresses on the way would be parts of something else.
        self.client.get(self.url.clone()).header(ACCEPT_ENCODING, "identity")
    }

    /// Asks for the first byte, because that also says whether the server gives parts.
    ///
    /// # Errors
    /// There is no such file, or the server does not give it.
    pub(super) async fn look(&self) -> Result<State, Failure> {
        let response = self.request().header(RANGE, "bytes=0-0").send().await.map_err(broken)?;
        let unknown = || Failure::Other("the server does not say how long the file is".to_owned());
        let (bytes, has_ranges) = match response.status() {
            StatusCode::PARTIAL_CONTENT => (part(response.headers()).ok_or_else(unknown)?.1, true),
            StatusCode::RANGE_NOT_SATISFIABLE if total(response.headers()) == Some(0) => (0, true),
            // The rest of the answer is not read.
            StatusCode::OK => match response.content_length() {
                Some(0) => (0, true),
                bytes => (bytes.ok_or_else(unknown)?, false),
            },
            status => return Err(refused(status)),
        };
        let text = |name| text(response.headers(), &name);
        Ok(State { bytes, tag: text(ETAG), modified: text(LAST_MODIFIED), has_ranges })
    }

    /// Reads a part of the file if it is still in `state`.
    ///
    /// # Errors
    /// The file has changed, or the server does not give all bytes.
    pub(super) async fn get(&self, range: Range<u64>, state: &State) -> Result<Bytes, Failure> {
        let wanted = format!("bytes={}-{}", range.start, range.end - 1);
        let response =
            conditional(self.request(), state).header(RANGE, wanted).send().await.map_err(broken)?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {}
            StatusCode::OK => {
                let what = "the server answered with the whole file instead of a part (it ignores `Range`)";
                return Err(Failure::Other(what.to_owned()));
            }
            status => return Err(refused(status)),
        }
        let Some((found, bytes)) = part(response.headers()) else {
            return Err(Failure::Other("the answer does not say which part of the file it has".to_owned()));
        };
        unchanged(response.headers(), bytes, state)?;
        if found != range {
            return Err(Failure::Other(format!(
                "the server answered with the bytes {found:?}, not {range:?}"
            )));
        }
        body(response, range.end - range.start).await
    }

    /// Reads the whole file if it is still in `state`.
    ///
    /// # Errors
    /// The file has changed, or the server does not give all bytes.
    pub(super) async fn whole(&self, state: &State) -> Result<Bytes, Failure> {
        let response = conditional(self.request(), state).send().await.map_err(broken)?;
        if response.status() != StatusCode::OK {
            return Err(refused(response.status()));
        }
        unchanged(response.headers(), response.content_length().unwrap_or(state.bytes), state)?;
        body(response, state.bytes).await
    }
}

/// Adds the condition that the file is still in `state`.
fn conditional(request: RequestBuilder, state: &State) -> RequestBuilder {
    match (state.strong_tag(), &state.modified) {
        (Some(tag), _) => request.header(IF_MATCH, tag),
        (None, Some(modified)) => request.header(IF_UNMODIFIED_SINCE, modified),
        (None, None) => request,
    }
}

/// Compares what an answer says about the file with `state`. Not all servers know conditions.
fn unchanged(headers: &HeaderMap, bytes: u64, state: &State) -> Result<(), Failure> {
    let (tag, modified) = (text(headers, &ETAG), text(headers, &LAST_MODIFIED));
    let now = State { bytes, tag, modified, has_ranges: state.has_ranges };
    state.change(&now).map_or(Ok(()), |what| Err(Failure::Changed(what)))
}

/// Reads the body of an answer, which has `bytes`.
async fn body(mut response: Response, bytes: u64) -> Result<Bytes, Failure> {
    let mut body = Vec::with_capacity(bytes as usize);
    while let Some(chunk) = response.chunk().await.map_err(broken)? {
        if body.len() as u64 + chunk.len() as u64 > bytes {
            return Err(Failure::Other(format!(
                "the answer has more than the {bytes} bytes that it should have"
            )));
        }
        body.extend_from_slice(&chunk);
    }
    if body.len() as u64 != bytes {
        return Err(Failure::Passing(format!("the answer ended after {} of {bytes} bytes", body.len())));
    }
    Ok(body.into())
}

/// Reads the header `Content-Range: bytes 0-9/100`: the part, and the bytes of the whole file.
fn part(headers: &HeaderMap) -> Option<(Range<u64>, u64)> {
    let value = text(headers, &CONTENT_RANGE)?;
    let (part, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = part.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse::<u64>().ok()?);
    Some((first..last.checked_add(1)?, total.trim().parse().ok()?))
}

/// Reads the bytes of the whole file from the header `Content-Range: bytes */100`.
fn total(headers: &HeaderMap) -> Option<u64> {
    text(headers, &CONTENT_RANGE)?.strip_prefix("bytes */")?.trim().parse().ok()
}

fn text(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

/// Returns the failure of a status that is no success.
fn refused(status: StatusCode) -> Failure {
    let what = status.to_string();
    match status.as_u16() {
        404 | 410 => Failure::Missing(what),
        401 | 403 | 407 => Failure::Denied(what),
        412 | 416 => Failure::Changed(format!("the server answers {what}")),
        408 | 425 | 429 | 500.. => Failure::Passing(format!("it answers {what}")),
        _ => Failure::Other(format!("the server answers {what}")),
    }
}

/// Returns the failure of a request without an answer.
fn broken(error: reqwest::Error) -> Failure {
    let error = error.without_url();
    let mut source: Option<&(dyn StdError + 'static)> = Some(&error);
    while let Some(cause) = source {
        if let Some(Refused(why)) = cause.downcast_ref::<Refused>() {
            return Failure::Other(why.clone());
        }
        source = cause.source();
    }
    let text = with_sources(&error);
    // A certificate does not become valid within a minute.
    if text.contains("certificate") {
        return Failure::Other(format!(
            "{text}; if the server has an authority of your own, name its certificate in SSL_CERT_FILE"
        ));
    }
    if error.is_redirect() || error.is_builder() {
        return Failure::Other(text);
    }
    Failure::Passing(text)
}

/// Writes an error with its sources, because the text of a request's error lacks the cause.
pub(super) fn with_sources(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_that_an_answer_has_is_read_from_its_header() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, value.parse().unwrap());
            (part(&headers), total(&headers))
        };
        assert_eq!(read("bytes 0-9/100"), (Some((0..10, 100)), None));
        assert_eq!(read("bytes */0"), (None, Some(0)));
        for value in ["bytes 0-9/*", "bytes 0-/9", "lines 0-9/100", "bytes 0-18446744073709551615/9"] {
            assert_eq!(read(value), (None, None), "{value}");
        }
    }

    #[tokio::test]
    async fn a_name_that_leads_to_this_machine_is_not_resolved() {
        let resolve = async |name: &str| {
            let found = Guarded.resolve(name.parse().unwrap()).await;
            found.map(Iterator::count).map_err(|error| error.to_string())
        };
        // A number is a name here: `allowed` has not looked at it.
        for name in ["127.0.0.1", "0.0.0.0", "169.254.169.254"] {
            assert!(resolve(name).await.unwrap_err().contains("it is not read"), "{name}");
        }
        assert!(resolve("localhost").await.is_ok_and(|found| found > 0));
        assert_eq!(resolve("10.0.0.1").await, Ok(1));
    }
}

//! Files on other machines: web servers and the object stores of clouds.
//!
//! A file is read in pieces of [`PIECE_BYTES`], which lie in the cache of the process. Parts of
//! which the reader keeps its own form, such as blocks of arrays, lie there in that form alone.
//! Every read is conditional: it fails if the file is no longer the one that was opened. Requests
//! run on threads of their own, and the threads that make batches wait for them.
//!
//! | file | what |
//! | --- | --- |
//! | `allowed.rs` | URLs and addresses that this process may read |
//! | `bridge.rs` | the threads of requests; retries |
//! | `http.rs` | a file on a web server |
//! | `cloud.rs` | a file in an object store |
//! | `without.rs` | what takes their place in a program without the feature `cloud` |

mod allowed;
#[cfg(feature = "cloud")]
mod bridge;
#[cfg(feature = "cloud")]
mod cloud;
#[cfg(feature = "cloud")]
mod http;
#[cfg(all(test, feature = "cloud"))]
mod tests;
#[cfg(not(feature = "cloud"))]
mod without;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use proto::spec::data_url;

pub use self::allowed::{allow_urls, every_url, wrong_prefixes};
#[cfg(feature = "cloud")]
pub(crate) use self::with::{Folder, Remote, list};
#[cfg(not(feature = "cloud"))]
pub(crate) use self::without::{Folder, Remote, list};

/// Bytes that are fetched at once, and kept in the cache.
pub(crate) const PIECE_BYTES: u64 = 2 << 20;

/// Bytes of the head of a file, which is kept while the file is open.
#[cfg(feature = "cloud")]
pub(crate) const HEAD_BYTES: u64 = 1024;

/// Default time during which a request that fails for a while is repeated.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Longest time of repetitions that a process may set.
pub const PATIENCE_MAX: Duration = Duration::from_secs(600);

/// Reads a time of repetitions, such as `30s`.
///
/// # Errors
/// The text is no duration, or one above [`PATIENCE_MAX`].
pub fn parse_patience(text: &str) -> Result<Duration, String> {
    let patience = proto::duration::parse(text)?;
    match patience <= PATIENCE_MAX {
        true => Ok(patience),
        false => Err(format!("`{text}`: at most {PATIENCE_MAX:?}")),
    }
}

/// Time of repetitions in this process.
static PATIENT_FOR: RwLock<Duration> = RwLock::new(PATIENCE);

/// Sets for how long this process repeats a request that fails for a while, at most
/// [`PATIENCE_MAX`]. A few attempts are made in any case. A file that is open keeps its time.
/// Without a call it is [`PATIENCE`].
pub fn be_patient_for(patience: Duration) {
    *PATIENT_FOR.write().unwrap_or_else(PoisonError::into_inner) = patience;
}

/// Returns for how long this process repeats a request.
pub fn patience() -> Duration {
    *PATIENT_FOR.read().unwrap_or_else(PoisonError::into_inner)
}

/// Settings of object stores.
static SETTINGS: RwLock<BTreeMap<String, String>> = RwLock::new(BTreeMap::new());

/// Sets the credentials, regions and endpoints with which this process reads object stores, under
/// their usual names, such as `AWS_REGION`. Without a call there are none.
pub fn use_store_settings(settings: BTreeMap<String, String>) {
    *SETTINGS.write().unwrap_or_else(PoisonError::into_inner) = settings;
}

/// Returns the URL that a path of a data file is. `None`: the file is local.
pub(crate) fn url(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| data_url::is_remote(text))
}

/// A file that a listing of a folder names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    /// Path below the folder.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// ETag. Empty: the store gives none.
    pub(crate) tag: String,
}

/// State of a file on another machine. Files of equal states have equal content.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cloud"), allow(dead_code, reason = "no file has one"))]
pub(crate) struct State {
    pub(crate) bytes: u64,
    /// ETag, as the server gives it.
    pub(crate) tag: Option<String>,
    /// Time of the last modification, as the server gives it.
    pub(crate) modified: Option<String>,
    /// Whether the server answers with parts of the file.
    pub(crate) has_ranges: bool,
}

impl State {
    /// Returns the text that tells this content from another one of the same size. Empty: the
    /// server says nothing of that kind.
    pub(crate) fn version(&self) -> String {
        self.tag.clone().or_else(|| self.modified.clone()).unwrap_or_default()
    }
}

#[cfg(feature = "cloud")]
impl State {
    /// Returns how `now` differs. `None`: the content is the same.
    fn change(&self, now: &Self) -> Option<String> {
        if self.bytes != now.bytes {
            return Some(format!("it has {} bytes, it had {}", now.bytes, self.bytes));
        }
        let differ = |name: &str, then: &Option<String>, now: &Option<String>| match (then, now) {
            (Some(then), Some(now)) => {
                Some((then != now).then(|| format!("its {name} is {now}, it was {then}")))
            }
            _ => None,
        };
        // A store that writes the same bytes again gives them the same tag and another time.
        let by_tag = differ("ETag", &self.tag, &now.tag);
        by_tag.or_else(|| differ("Last-Modified", &self.modified, &now.modified)).flatten()
    }

    /// Returns the tag for a condition. A weak one never matches.
    fn strong_tag(&self) -> Option<&str> {
        self.tag.as_deref().filter(|tag| !tag.starts_with("W/"))
    }
}

#[cfg(feature = "cloud")]
mod with {
    use std::collections::VecDeque;
    use std::ops::Range;
    use std::path::{Path, PathBuf};
    use std::sync::{Arc, mpsc};

    use bytes::Bytes;
    use once_cell::sync::OnceCell;
    use proto::spec::data_url;
    use url::Url;

    use super::bridge::{self, Failure, Limits};
    use super::cloud::Cloud;
    use super::http::Http;
    use super::{HEAD_BYTES, Listed, PIECE_BYTES, State, allowed};
    use crate::cache;
    use crate::error::{Error, Result, malformed};
    use crate::observer::Observer;
    use crate::room;

    /// Pieces of one read that are under way at most.
    const PIECES_AHEAD: usize = 32;

    /// A file on another machine, as it was when it was opened.
    #[derive(Debug)]
    pub(crate) struct Remote {
        /// Number in this process.
        id: u64,
        url: String,
        source: Arc<Source>,
        state: Arc<State>,
        limits: Limits,
        head: OnceCell<Bytes>,
    }

    #[derive(Debug)]
    enum Source {
        Http(Http),
        Cloud(Cloud),
    }

    impl Source {
        fn of(url: &str, limits: &Limits) -> Result<Self> {
            let refused = |reason: String| refused(url, reason);
            let parsed = checked(url)?;
            Ok(match parsed.scheme() {
                "http" | "https" => Self::Http(Http::new(parsed, limits).map_err(refused)?),
                _ => Self::Cloud(Cloud::open(&parsed).map_err(refused)?),
            })
        }

        async fn look(&self) -> Result<State, Failure> {
            match self {
                Self::Http(source) => source.look().await,
                Self::Cloud(source) => source.look().await,
            }
        }

        async fn get(&self, range: Range<u64>, state: &State) -> Result<Bytes, Failure> {
            match self {
                Self::Http(source) => source.get(range, state).await,
                Self::Cloud(source) => source.get(range, state).await,
            }
        }
    }

    /// Returns a URL that this process may read.
    ///
    /// # Errors
    /// It is not whole, or not allowed.
    fn checked(url: &str) -> Result<Url> {
        let refused = |reason: String| refused(url, reason);
        data_url::check(url).map_err(refused)?;
        if data_url::is_pattern(url) {
            let reason = "a pattern, which `ebb run` and `ebb submit` replace by the files that fit it";
            return Err(refused(reason.to_owned()));
        }
        allowed_url(url)
    }

    /// Returns a URL, or the beginning of URLs, that this process may read.
    ///
    /// # Errors
    /// It is not allowed.
    fn allowed_url(url: &str) -> Result<Url> {
        let parsed = Url::parse(url).map_err(|error| refused(url, format!("no URL: {error}")))?;
        allowed::check(&parsed).map_err(|reason| refused(url, reason))?;
        Ok(parsed)
    }

    fn refused(url: &str, reason: String) -> Error {
        Error::Remote { url: data_url::shown(url), reason }
    }

    impl PartialEq for Remote {
        fn eq(&self, other: &Self) -> bool {
            (&self.url, &self.state) == (&other.url, &other.state)
        }
    }

    impl Remote {
        /// Looks at a file. It reads nothing of it. The call blocks.
        ///
        /// # Errors
        /// The URL is not allowed, there is no such file, the server refuses it, or does not answer
        /// for the time of all retries.
        pub(crate) fn open(url: &str) -> Result<Self> {
            Self::open_within(url, Limits::of_process())
        }

        /// Looks at a file with other limits.
        ///
        /// # Errors
        /// Those of [`open`](Self::open).
        pub(super) fn open_within(url: &str, limits: Limits) -> Result<Self> {
            let source = Arc::new(Source::of(url, &limits)?);
            let looking = source.clone();
            let looked = bridge::wait(async move { limits.patiently(|| looking.look()).await });
            let state = looked.map_err(|failure| error(url, failure))?;
            let id = cache::next_file();
            Ok(Self {
                id,
                url: url.to_owned(),
                source,
                state: Arc::new(state),
                limits,
                head: OnceCell::new(),
            })
        }

        /// Returns the state in which the file was opened.
        pub(crate) fn state(&self) -> &State {
            &self.state
        }

        /// Reads a part of the file, which must have that many bytes. The call blocks.
        ///
        /// # Errors
        /// The part does not fit into `data_memory`, or the file has changed since it was opened,
        /// or cannot be read.
        pub(crate) fn read(&self, range: Range<u64>) -> Result<Bytes> {
            if range.is_empty() {
                return Ok(Bytes::new());
            }
            let wanted = range.end - range.start;
            room::check_part(Path::new(&self.url), wanted)?;
            let (first, last) = (range.start / PIECE_BYTES, (range.end - 1) / PIECE_BYTES);
            if first == last {
                let piece = cache::piece(self.id, first, || {
                    self.fetch_piece(first).recv().map_err(|failure| error(&self.url, failure))
                })?;
                let begin = (range.start - first * PIECE_BYTES) as usize;
                return Ok(piece.slice(begin..begin + (range.end - range.start) as usize));
            }
            let begin = |number| cache::known_piece(self.id, number).ok_or_else(|| self.fetch_piece(number));
            let mut bytes = Vec::with_capacity(wanted as usize);
            ahead(first..=last, PIECES_AHEAD, begin, |number, piece| {
                let piece = match piece {
                    Ok(piece) => piece,
                    Err(fetching) => {
                        let piece = fetching.recv().map_err(|failure| error(&self.url, failure))?;
                        cache::keep_piece(self.id, number, piece.clone());
                        piece
                    }
                };
                let begin = range.start.saturating_sub(number * PIECE_BYTES);
                let end = (range.end - number * PIECE_BYTES).min(piece.len() as u64);
                bytes.extend_from_slice(&piece[begin as usize..end as usize]);
                Ok(())
            })?;
            Ok(bytes.into())
        }

        /// Reads a part of the file that the caller keeps. Pieces that are in memory serve it.
        /// Others are not kept, so the part is not in memory twice. The call blocks.
        ///
        /// # Errors
        /// Those of [`read`](Self::read).
        pub(crate) fn read_to_keep(&self, range: Range<u64>) -> Result<Bytes> {
            if range.is_empty() {
                return Ok(Bytes::new());
            }
            if range.end <= HEAD_BYTES && cache::known_piece(self.id, 0).is_none() {
                return self.head().map(|head| head.slice(range.start as usize..range.end as usize));
            }
            let wanted = range.end - range.start;
            room::check_part(Path::new(&self.url), wanted)?;
            let begin = |number| {
                let first = number * PIECE_BYTES;
                let part = range.start.max(first)..range.end.min(first + PIECE_BYTES);
                let known = cache::known_piece(self.id, number);
                known
                    .map(|piece| piece.slice((part.start - first) as usize..(part.end - first) as usize))
                    .ok_or_else(|| self.fetch(part))
            };
            let mut bytes = Vec::with_capacity(wanted as usize);
            let pieces = range.start / PIECE_BYTES..=(range.end - 1) / PIECE_BYTES;
            ahead(pieces, PIECES_AHEAD, begin, |_, part| {
                let part = match part {
                    Ok(known) => known,
                    Err(fetching) => fetching.recv().map_err(|failure| error(&self.url, failure))?,
                };
                bytes.extend_from_slice(&part);
                Ok(())
            })?;
            Ok(bytes.into())
        }

        /// Reads the whole file in one request, for a server that gives no parts. The call blocks.
        ///
        /// # Errors
        /// The file has more than `bytes_max`, has changed since it was opened, or cannot be read.
        pub(crate) fn whole(&self, bytes_max: u64) -> Result<Bytes> {
            let bytes = self.state.bytes;
            if bytes > bytes_max {
                let reason = format!(
                    "the server gives no parts of a file (it ignores `Range`), and the file of {bytes} bytes is larger \
                     than the {bytes_max} bytes of data_memory; use a server that gives parts, or copy the file"
                );
                return Err(Error::Remote { url: self.url.clone(), reason });
            }
            let (source, state, limits) = (self.source.clone(), self.state.clone(), self.limits);
            let reading = async move {
                let Source::Http(source) = &*source else {
                    return source.get(0..state.bytes, &state).await;
                };
                let limits = limits.for_bytes(bytes);
                limits.patiently(|| limits.in_time(source.whole(&state))).await
            };
            bridge::wait(reading).map_err(|failure| error(&self.url, failure))
        }

        /// Forgets the pieces that were read.
        pub(crate) fn forget(&self) {
            cache::forget_pieces(self.id);
        }

        /// Returns the first bytes of the file, which say its compression and its format. They are
        /// fetched once.
        fn head(&self) -> Result<&Bytes> {
            self.head.get_or_try_init(|| {
                let fetching = self.fetch(0..HEAD_BYTES.min(self.state.bytes));
                fetching.recv().map_err(|failure| error(&self.url, failure))
            })
        }

        /// Begins to fetch a piece.
        fn fetch_piece(&self, number: u64) -> bridge::Waiting<Result<Bytes, Failure>> {
            let begin = number * PIECE_BYTES;
            self.fetch(begin..(begin + PIECE_BYTES).min(self.state.bytes))
        }

        /// Begins to fetch a part.
        fn fetch(&self, range: Range<u64>) -> bridge::Waiting<Result<Bytes, Failure>> {
            let (source, state, limits) = (self.source.clone(), self.state.clone(), self.limits);
            bridge::start(async move {
                limits.patiently(|| limits.in_time(source.get(range.clone(), &state))).await
            })
        }
    }

    impl Drop for Remote {
        fn drop(&mut self) {
            cache::forget_pieces(self.id);
        }
    }

    /// Begins work for each number, and ends it in this order. At most `most` works are begun and
    /// not ended.
    ///
    /// # Errors
    /// The first one of `end`. No further work begins then.
    pub(super) fn ahead<T>(
        numbers: impl IntoIterator<Item = u64>,
        most: usize,
        begin: impl Fn(u64) -> T,
        mut end: impl FnMut(u64, T) -> Result<()>,
    ) -> Result<()> {
        let mut numbers = numbers.into_iter();
        let numbered = |number| (number, begin(number));
        let mut begun: VecDeque<_> = numbers.by_ref().take(most).map(numbered).collect();
        while let Some((number, work)) = begun.pop_front() {
            end(number, work)?;
            begun.extend(numbers.next().map(numbered));
        }
        Ok(())
    }

    /// Returns the names of the files directly below a folder of an object store, or with
    /// `wants_folders` those of its folders. The call blocks.
    ///
    /// # Errors
    /// The URL is not allowed, or the store does not list it.
    pub(crate) fn list(folder: &str, wants_folders: bool) -> Result<Vec<String>> {
        let source = Cloud::open(&allowed_url(folder)?).map_err(|reason| refused(folder, reason))?;
        let listing = move |source: Arc<Cloud>| async move {
            match wants_folders {
                true => source.folders().await,
                false => source.list().await,
            }
        };
        let (source, limits) = (Arc::new(source), Limits::of_process());
        let listed = bridge::wait(async move { limits.patiently(|| listing(source.clone())).await });
        listed.map_err(|failure| error(folder, failure))
    }

    /// A folder of an object store, of which whole files are read.
    #[derive(Debug)]
    pub(crate) struct Folder {
        url: String,
        source: Arc<Cloud>,
    }

    impl Folder {
        /// Opens the store of a folder. It makes no request.
        ///
        /// # Errors
        /// The URL is not allowed, or is one of a web server.
        pub(crate) fn open(url: &str) -> Result<Self> {
            let parsed = checked(url)?;
            if parsed.scheme().starts_with("http") {
                let reason = "a web server does not list the files of a folder; read the folder from s3://, gs:// or az://, \
                              or write it as tar archives";
                return Err(refused(url, reason.to_owned()));
            }
            let source = Cloud::open(&parsed).map_err(|reason| refused(url, reason))?;
            Ok(Self { url: url.trim_end_matches('/').to_owned(), source: Arc::new(source) })
        }

        /// Returns the names of the folders directly in this folder. The call blocks.
        ///
        /// # Errors
        /// The store does not list them.
        pub(crate) fn subfolders(&self) -> Result<Vec<String>> {
            list(&self.url, true)
        }

        /// Returns all files below the folder that `wanted` has, in any order, with one request for
        /// each page of the listing. Reports the progress to `observer`. The call blocks.
        ///
        /// # Errors
        /// The store does not list them.
        pub(crate) fn files(&self, wanted: fn(&str) -> bool, observer: &dyn Observer) -> Result<Vec<Listed>> {
            let (source, (observed, progress)) = (self.source.clone(), mpsc::channel());
            let listing = bridge::start(async move {
                let observe = || {
                    // The reader of this progress waits for the end of the request.
                    let _ = observed.send(());
                };
                Limits::of_process().patiently(|| source.files(wanted, observe)).await
            });
            progress.iter().for_each(|()| observer.advance());
            listing.recv().map_err(|failure| error(&self.url, failure))
        }

        /// Reads a whole file of the folder in one request. It must be as the listing said. The
        /// call blocks.
        ///
        /// # Errors
        /// The file does not fit into `data_memory`, or has changed since it was listed, or cannot
        /// be read.
        pub(crate) fn read(&self, name: &str, bytes: u64, tag: &str) -> Result<Bytes> {
            if bytes == 0 {
                return Ok(Bytes::new());
            }
            let url = format!("{}/{name}", self.url);
            room::check_part(Path::new(&url), bytes)?;
            let tag = (!tag.is_empty()).then(|| tag.to_owned());
            let state = State { bytes, tag, modified: None, has_ranges: true };
            let file = self.source.below(name).map_err(|failure| error(&url, failure))?;
            let limits = Limits::of_process().for_bytes(bytes);
            let reading =
                async move { limits.patiently(|| limits.in_time(file.get(0..bytes, &state))).await };
            bridge::wait(reading).map_err(|failure| error(&url, failure))
        }
    }

    /// Returns the error of a file, with what to check.
    fn error(url: &str, failure: Failure) -> Error {
        let is_web = url.starts_with("http");
        let (what, check) = match failure {
            Failure::Changed(what) => {
                return malformed(
                    &PathBuf::from(url),
                    format!(
                        "the file has changed since this worker opened it, so its records may be others: {what}; \
                         restore it, or submit the job anew"
                    ),
                );
            }
            Failure::Missing(what) => (
                format!("no such file ({what})"),
                if is_web { "check the URL" } else { "check the bucket, the key and the region" },
            ),
            Failure::Denied(what) if is_web => (
                format!("the server refuses it ({what})"),
                "http and https URLs are read without credentials: let the server give it to this machine, or read it from \
                 s3://, gs:// or az://",
            ),
            Failure::Denied(what) => (
                format!("access denied ({what})"),
                "check the credentials in this worker's environment, what they may read, the region, and the name",
            ),
            Failure::Passing(what) => (
                format!("the server stays away: {what}"),
                if is_web {
                    "check that the server is up, and that this machine reaches it, or set a longer data_patience \
                     (--data-patience)"
                } else {
                    "check the credentials, the region, the endpoint and the network of this machine, or set a longer \
                     data_patience (--data-patience)"
                },
            ),
            Failure::Other(what) if is_web => (what, "check the URL and the server"),
            Failure::Other(what) => (what, "check the credentials, the region and the name"),
        };
        Error::Remote { url: url.to_owned(), reason: format!("{what}; {check}") }
    }
}

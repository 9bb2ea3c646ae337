//! The keys of one process, with the current content of their files.
//!
//! The process looks at the files once a second, and reads them again when one has changed. A
//! signal would need a sender that knows all processes on every machine, and mounted secrets
//! (Kubernetes) change without any sender. Files that cannot be read, or do not fit together
//! because only one of two is replaced yet, change nothing: the old keys stay in use, and the next
//! change is looked at again.
//!
//! New connections and new calls use the new keys. Open connections stay open.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use http::HeaderValue;

use super::Options;
use super::error::Error;
use super::tls::{self, Files, Tls};
use super::tokens::{self, Tokens};
use crate::channel::connection::Io;

/// Time between two looks at the files.
const LOOK: Duration = Duration::from_secs(1);

/// Longest file with keys, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Keys of a process. They are cheap to clone, and all clones are the same. Those of
/// [`Keys::default`] neither encrypt nor check anything.
#[derive(Clone, Default)]
pub struct Keys(Option<Arc<Shared>>);

struct Shared {
    options: Options,
    /// The token of [`Keys::with_token`].
    given: Option<HeaderValue>,
    loaded: RwLock<Arc<Loaded>>,
    seen: Mutex<Vec<Stamp>>,
}

/// Content of the files.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(super) tls: Option<Tls>,
    /// Header `Bearer ..` for the calls of this process.
    pub(crate) token: Option<HeaderValue>,
    /// Tokens that this process accepts.
    pub(super) tokens: Option<Tokens>,
}

/// Data of a file that show that it has changed, without reading it. `None` while there is no file.
type Stamp = Option<(i64, i64, u64, u64)>;

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Keys").field(&self.0.as_ref().map(|shared| &shared.options)).finish()
    }
}

impl Keys {
    /// Reads the files of `options`.
    ///
    /// # Errors
    /// A file is missing or malformed, or the files do not belong together.
    pub fn load(options: Options) -> Result<Self, Error> {
        if options == Options::default() {
            return Ok(Self::default());
        }
        Self::of(options, None)
    }

    /// Reads the files of `options`, and shows `token` instead of one from a file.
    ///
    /// # Errors
    /// The token is no token, or the errors of [`load`](Self::load).
    pub fn with_token(options: Options, token: &str) -> Result<Self, Error> {
        let token = tokens::from_file(token).map_err(|reason| Error::Token { reason })?;
        Self::of(Options { token: None, ..options }, Some(bearer(token)))
    }

    fn of(options: Options, given: Option<HeaderValue>) -> Result<Self, Error> {
        options.validate()?;
        // Taken before the files are read: what changes meanwhile is read again.
        let seen = Mutex::new(stamps(&options));
        let loaded = RwLock::new(Arc::new(read(&options, given.as_ref())?));
        Ok(Self(Some(Arc::new(Shared { options, given, loaded, seen }))))
    }

    /// Returns whether connections are encrypted.
    pub fn encrypts(&self) -> bool {
        self.options().is_some_and(|options| options.ca.is_some())
    }

    /// Returns the scheme of this process's URLs: `https` or `http`.
    pub fn scheme(&self) -> &'static str {
        if self.encrypts() { "https" } else { "http" }
    }

    /// Returns whether calls need a token.
    pub fn asks_for_tokens(&self) -> bool {
        self.options().is_some_and(|options| options.tokens.is_some())
    }

    /// Returns whether a token may be shown over a connection that others can read.
    pub(crate) fn is_insecure(&self) -> bool {
        self.options().is_some_and(|options| options.insecure)
    }

    /// Secures a connection to `host` with the current keys, which may differ from those of the
    /// last connection.
    ///
    /// # Errors
    /// The network fails, or one end refuses the other's certificate.
    pub(crate) async fn secure(&self, host: &str, io: Box<dyn Io>) -> io::Result<Box<dyn Io>> {
        match &self.loaded().tls {
            Some(tls) => tls::connect(tls.client.clone(), host, io).await,
            None => Ok(io),
        }
    }

    /// Returns the content that was read last.
    pub(crate) fn loaded(&self) -> Arc<Loaded> {
        self.0.as_ref().map_or_else(Arc::default, |shared| {
            shared.loaded.read().unwrap_or_else(PoisonError::into_inner).clone()
        })
    }

    /// Follows changes of the files, for as long as it is polled.
    pub async fn follow(&self) {
        let Some(shared) = &self.0 else { return std::future::pending().await };
        loop {
            tokio::time::sleep(LOOK).await;
            let shared = shared.clone();
            // A folder on another machine may be slow.
            let _ = tokio::task::spawn_blocking(move || shared.look()).await;
        }
    }

    fn options(&self) -> Option<&Options> {
        self.0.as_ref().map(|shared| &shared.options)
    }
}

impl Shared {
    /// Reads the files again if one has changed since the last look.
    fn look(&self) {
        let stamps = stamps(&self.options);
        let before = {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *seen, stamps.clone())
        };
        if before == stamps {
            return;
        }
        let changed = paths(&self.options).into_iter().zip(before.iter().zip(&stamps));
        let changed: Vec<_> = changed
            .filter(|(_, (before, now))| before != now)
            .map(|((_, path), _)| path.display().to_string())
            .collect();
        let changed = changed.join(", ");
        match read(&self.options, self.given.as_ref()) {
            Ok(loaded) => {
                *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(loaded);
                tracing::info!(changed, "keys read again");
            }
            Err(error) => {
                tracing::warn!(changed, %error, "keys cannot be read; those that were read before stay");
            }
        }
    }
}

/// Returns the files of `options`, each with its flag.
fn paths(options: &Options) -> Vec<(&'static str, &PathBuf)> {
    let Options { ca, cert, key, token, tokens, insecure: _ } = options;
    let all = [
        ("--tls-ca", ca),
        ("--tls-cert", cert),
        ("--tls-key", key),
        ("--token-file", token),
        ("--tokens", tokens),
    ];
    all.into_iter().filter_map(|(flag, path)| Some((flag, path.as_ref()?))).collect()
}

fn stamps(options: &Options) -> Vec<Stamp> {
    let stamp = |path: &Path| {
        let about = fs::metadata(path).ok()?;
        Some((about.mtime(), about.mtime_nsec(), about.len(), about.ino()))
    };
    paths(options).into_iter().map(|(_, path)| stamp(path)).collect()
}

/// Returns the header of calls with a token.
fn bearer(token: &str) -> HeaderValue {
    let mut header = HeaderValue::try_from(format!("Bearer {token}")).expect("visible letters make a header");
    header.set_sensitive(true);
    header
}

fn read(options: &Options, given: Option<&HeaderValue>) -> Result<Loaded, Error> {
    let secret = |what, path: &Path| {
        let bytes = bytes(what, path)?;
        let open = fs::metadata(path).is_ok_and(|about| about.permissions().mode() & 0o007 != 0);
        if open {
            tracing::warn!(path = %path.display(), "{what}: everybody on this machine may read it; chmod 600");
        }
        Ok::<_, Error>(bytes)
    };
    let tls = match (&options.ca, &options.cert, &options.key) {
        (Some(ca), Some(cert), Some(key)) => {
            let read = (bytes("--tls-ca", ca)?, bytes("--tls-cert", cert)?, secret("--tls-key", key)?);
            let own = Some([(cert.as_path(), read.1.as_slice()), (key.as_path(), read.2.as_slice())]);
            Some(Tls::of(Files { ca: (ca, &read.0), own })?)
        }
        (Some(ca), ..) => Some(Tls::of(Files { ca: (ca, &bytes("--tls-ca", ca)?), own: None })?),
        _ => None,
    };
    let token = match &options.token {
        Some(path) => {
            let text = text("--token-file", path, secret("--token-file", path)?)?;
            let token = tokens::from_file(&text).map_err(|reason| Error::Content {
                what: "--token-file",
                path: path.clone(),
                reason,
            })?;
            Some(bearer(token))
        }
        None => given.cloned(),
    };
    let tokens = match &options.tokens {
        Some(path) => {
            let text = text("--tokens", path, bytes("--tokens", path)?)?;
            let parsed = Tokens::parse(&text);
            Some(parsed.map_err(|reason| Error::Content { what: "--tokens", path: path.clone(), reason })?)
        }
        None => None,
    };
    Ok(Loaded { tls, token, tokens })
}

fn bytes(what: &'static str, path: &Path) -> Result<Vec<u8>, Error> {
    let unreadable = |source| Error::File { what, path: path.to_owned(), source };
    let about = fs::metadata(path).map_err(unreadable)?;
    if about.len() > FILE_BYTES_MAX {
        let message = format!("{} bytes, at most {FILE_BYTES_MAX} are read", about.len());
        return Err(unreadable(io::Error::other(message)));
    }
    fs::read(path).map_err(unreadable)
}

fn text(what: &'static str, path: &Path, bytes: Vec<u8>) -> Result<String, Error> {
    let wrong = |_| Error::Content { what, path: path.to_owned(), reason: "not text".to_owned() };
    String::from_utf8(bytes).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::security::TokenRole;

    fn list(token: &str) -> String {
        tokens::entry("anna", TokenRole::Submit, token, None, None, false)
    }

    fn knows(keys: &Keys, token: &str) -> bool {
        keys.loaded().tokens.as_ref().is_some_and(|tokens| tokens.find(token.as_bytes()).is_some())
    }

    #[test]
    fn a_file_that_changes_is_read_again_and_a_bad_one_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.toml");
        fs::write(&path, list("the first token")).unwrap();
        let keys = Keys::load(Options { tokens: Some(path.clone()), ..Options::default() }).unwrap();
        let look = || keys.0.as_ref().unwrap().look();
        look();
        assert!(knows(&keys, "the first token") && !knows(&keys, "another"));
        fs::write(&path, "not a list").unwrap();
        look();
        assert!(knows(&keys, "the first token"));
        fs::remove_file(&path).unwrap();
        look();
        assert!(knows(&keys, "the first token"));
        fs::write(&path, list("another")).unwrap();
        look();
        assert!(!knows(&keys, "the first token") && knows(&keys, "another"));
    }

    #[test]
    fn a_file_that_is_missing_or_wrong_is_named_with_its_flag() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("it");
        let load = |options: Options| Keys::load(options).unwrap_err().to_string();
        let of = |token: bool| Options {
            token: token.then(|| path.clone()),
            ca: (!token).then(|| path.clone()),
            ..Options::default()
        };
        assert!(load(of(true)).starts_with("--token-file"), "{}", load(of(true)));
        fs::write(&path, "x").unwrap();
        for (error, parts) in [
            (load(of(true)), ["--token-file", "expected a token"]),
            (load(of(false)), ["--tls-ca", "found none"]),
        ] {
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn a_given_token_stays_when_files_are_read_again_and_a_bad_one_is_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.toml");
        fs::write(&path, list("the first token")).unwrap();
        let options = Options { tokens: Some(path.clone()), ..Options::default() };
        let token = "a-token-of-32-letters-or-so-0123";
        let keys = Keys::with_token(options, token).unwrap();
        // Another length, because the clock of a file system may not tell two writes apart.
        fs::write(&path, list("another") + "\n").unwrap();
        keys.0.as_ref().unwrap().look();
        assert!(knows(&keys, "another"));
        assert_eq!(keys.loaded().token.as_ref().unwrap().to_str().unwrap(), format!("Bearer {token}"));
        let error = Keys::with_token(Options::default(), "short").unwrap_err().to_string();
        assert!(error.starts_with("token: 5 bytes; expected a token"), "{error}");
    }

    #[test]
    fn keys_of_nothing_open_and_close_nothing() {
        let keys = Keys::load(Options::default()).unwrap();
        assert!(!keys.encrypts() && !keys.asks_for_tokens() && keys.scheme() == "http");
        assert!(keys.loaded().token.is_none());
    }
}

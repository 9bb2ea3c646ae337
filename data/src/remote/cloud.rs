//! A file in an object store of a cloud.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt};
use url::Url;

use super::bridge::Failure;
use super::http::with_sources;
use super::{Listed, SETTINGS, State};

/// Files of a listing between two calls of its observer.
const FILES_OBSERVED: usize = 1000;

/// A file, or a folder, in an object store.
#[derive(Debug)]
pub(super) struct Cloud {
    store: Arc<dyn ObjectStore>,
    path: Path,
}

impl Cloud {
    /// Opens the store of a URL. It does not call the store.
    ///
    /// # Errors
    /// The settings of the store do not suffice.
    pub(super) fn open(url: &Url) -> Result<Self, String> {
        let settings = SETTINGS.read().unwrap_or_else(PoisonError::into_inner).clone();
        let opened = store::cloud::open(url, &settings);
        let (store, path) =
            opened.map_err(|error| format!("{}; check the settings", with_sources(&error)))?;
        Ok(Self { store, path })
    }

    /// Asks for the size and the tag.
    ///
    /// # Errors
    /// There is no such file, or the store does not give it.
    pub(super) async fn look(&self) -> Result<State, Failure> {
        Ok(state(&self.store.head(&self.path).await.map_err(|error| failure(&error))?))
    }

    /// Reads a part of the file if it is still in `state`.
    ///
    /// # Errors
    /// The file has changed, or the store does not give all bytes.
    pub(super) async fn get(&self, range: Range<u64>, state_then: &State) -> Result<Bytes, Failure> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: state_then.strong_tag().map(str::to_owned),
            ..GetOptions::default()
        };
        let got = self.store.get_opts(&self.path, options).await.map_err(|error| failure(&error))?;
        if let Some(what) = state_then.change(&state(&got.meta)) {
            return Err(Failure::Changed(what));
        }
        let bytes = got.bytes().await.map_err(|error| failure(&error))?;
        if bytes.len() as u64 != range.end - range.start {
            let wanted = range.end - range.start;
            return Err(Failure::Passing(format!(
                "the answer ended after {} of {wanted} bytes",
                bytes.len()
            )));
        }
        Ok(bytes)
    }

    /// Returns the names of the files directly in this folder.
    ///
    /// # Errors
    /// The store does not list it.
    pub(super) async fn list(&self) -> Result<Vec<String>, Failure> {
        let folder = (!self.path.as_ref().is_empty()).then_some(&self.path);
        let listed = self.store.list_with_delimiter(folder).await.map_err(|error| failure(&error))?;
        let names = listed.objects.iter().filter_map(|object| object.location.filename());
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns the names of the folders directly in this folder.
    ///
    /// # Errors
    /// The store does not list it, or has a key that is no path.
    pub(super) async fn folders(&self) -> Result<Vec<String>, Failure> {
        let folder = (!self.path.as_ref().is_empty()).then_some(&self.path);
        let listed = self.store.list_with_delimiter(folder).await.map_err(|error| failure(&error))?;
        let names = listed.common_prefixes.iter().filter_map(Path::filename);
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns all files below this folder that `wanted` has, in any order. It calls `observe` once
    /// in a while.
    ///
    /// # Errors
    /// The store does not list it, or has a key that is no path.
    pub(super) async fn files(
        &self,
        wanted: fn(&str) -> bool,
        observe: impl Fn(),
    ) -> Result<Vec<Listed>, Failure> {
        let folder = (!self.path.as_ref().is_empty()).then_some(&self.path);
        let (mut entries, prefix): (_, &str) = (self.store.list(folder), self.path.as_ref());
        let (mut files, mut seen) = (Vec::new(), 0usize);
        while let Some(meta) = entries.try_next().await.map_err(|error| failure(&error))? {
            seen += 1;
            if seen.is_multiple_of(FILES_OBSERVED) {
                observe();
            }
            let key: &str = meta.location.as_ref();
            // The folder itself may be an object without content.
            let below = key.strip_prefix(prefix).map(|rest| rest.trim_start_matches('/'));
            if let Some(name) = below.filter(|name| wanted(name)) {
                let tag = meta.e_tag.as_deref().map(quoted).unwrap_or_default();
                files.push(Listed { name: name.to_owned(), bytes: meta.size, tag });
            }
        }
        Ok(files)
    }

    /// Returns the file of this name below this folder.
    ///
    /// # Errors
    /// The name is no path.
    pub(super) fn below(&self, name: &str) -> Result<Self, Failure> {
        let folder: &str = self.path.as_ref();
        let key = match folder {
            "" => name.to_owned(),
            folder => format!("{folder}/{name}"),
        };
        let path = Path::parse(key).map_err(|error| Failure::Other(error.to_string()))?;
        Ok(Self { store: self.store.clone(), path })
    }
}

fn state(meta: &ObjectMeta) -> State {
    let modified = Some(meta.last_modified.to_rfc3339());
    State { bytes: meta.size, tag: meta.e_tag.as_deref().map(quoted), modified, has_ranges: true }
}

/// Returns an ETag as headers have it. Azure leaves its quotation marks out in a listing.
fn quoted(tag: &str) -> String {
    match tag.ends_with('"') {
        true => tag.to_owned(),
        false => format!("\"{tag}\""),
    }
}

fn failure(error: &object_store::Error) -> Failure {
    use object_store::Error;
    let text = with_sources(error);
    match error {
        Error::NotFound { .. } => Failure::Missing(text),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Failure::Denied(text),
        Error::Precondition { .. } | Error::NotModified { .. } => {
            Failure::Changed("its ETag is another".to_owned())
        }
        Error::Generic { .. } if is_for_good(&text) => Failure::Other(text),
        Error::Generic { .. } => Failure::Passing(text),
        _ => Failure::Other(text),
    }
}

/// Returns whether a repetition of a request ends in the same way. The crate's error has the answer
/// of the server as text only.
fn is_for_good(text: &str) -> bool {
    let status = text.split("status code: ").nth(1).and_then(|rest| rest.get(..3)?.parse::<u16>().ok());
    let is_client_error =
        status.is_some_and(|status| (400..500).contains(&status) && ![408, 429].contains(&status));
    is_client_error || text.contains("redirect") || text.contains("certificate")
}

#[cfg(test)]
mod tests {
    use object_store::PutPayload;
    use object_store::memory::InMemory;

    use super::*;

    async fn written(store: &Arc<dyn ObjectStore>, name: &str, bytes: &[u8]) -> Cloud {
        let path = Path::from(name);
        store.put(&path, PutPayload::from(bytes.to_vec())).await.unwrap();
        Cloud { store: store.clone(), path }
    }

    #[tokio::test]
    async fn a_part_is_read_from_the_file_that_was_opened_only() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let file = written(&store, "a/x", b"0123456789").await;
        let then = file.look().await.unwrap();
        assert_eq!((then.bytes, file.get(2..5, &then).await.unwrap()), (10, Bytes::from_static(b"234")));
        written(&store, "a/x", b"9876543210").await;
        let failure = file.get(2..5, &then).await.unwrap_err();
        assert!(matches!(failure, Failure::Changed(_)), "{failure:?}");
        let missing = Cloud { store, path: Path::from("a/y") };
        assert!(matches!(missing.look().await, Err(Failure::Missing(_))));
    }

    #[tokio::test]
    async fn a_folder_lists_the_files_directly_in_it() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        for name in ["a/x", "a/y", "a/b/z", "c"] {
            written(&store, name, b"1").await;
        }
        let list = async |path: &str| {
            let mut names = Cloud { store: store.clone(), path: Path::from(path) }.list().await.unwrap();
            names.sort();
            names
        };
        assert_eq!(
            (list("a").await, list("").await),
            (vec!["x".to_owned(), "y".to_owned()], vec!["c".to_owned()])
        );
    }

    #[tokio::test]
    async fn files_below_a_folder_are_listed_with_what_a_part_of_them_is_read_by() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        for name in ["a", "ab/c/1", "a/b/1 é%#?*.x", "a/b/c/2", "a/3", "c/d/4"] {
            written(&store, name, name.as_bytes()).await;
        }
        let folder = Cloud { store: store.clone(), path: Path::from("a") };
        let mut files = folder.files(|name| name.contains('/'), || ()).await.unwrap();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        // `written` encodes what is no part of a key everywhere.
        let names: Vec<_> = files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["b/1 %C3%A9%25%23%3F%2A.x", "b/c/2"]);
        assert_eq!((folder.folders().await.unwrap(), files[1].bytes), (vec!["b".to_owned()], 7));
        let state =
            State { tag: Some(files[1].tag.clone()), ..folder.below("b/c/2").unwrap().look().await.unwrap() };
        let file = folder.below("b/c/2").unwrap();
        assert_eq!(file.get(0..7, &state).await.unwrap(), Bytes::from_static(b"a/b/c/2"));
        written(&store, "a/b/c/2", b"another").await;
        assert!(matches!(file.get(0..7, &state).await, Err(Failure::Changed(_))));
        assert!(matches!(folder.below("b//c"), Err(Failure::Other(_))));
        let mut all = Cloud { store, path: Path::from("") }.folders().await.unwrap();
        all.sort();
        assert_eq!(all, ["a", "ab", "c"]);
    }

    #[test]
    fn a_tag_has_the_quotation_marks_of_a_header() {
        assert_eq!(
            (quoted("\"1\""), quoted("0x8D"), quoted("W/\"1\"")),
            ("\"1\"".into(), "\"0x8D\"".into(), "W/\"1\"".into())
        );
    }

    #[test]
    fn answers_that_stay_the_same_are_not_asked_for_again() {
        for (text, expected) in [
            ("Error performing GET in 1ms - Server returned non-2xx status code: 400 Bad Request: ", true),
            ("Server returned non-2xx status code: 503 Service Unavailable: ", false),
            ("Server returned non-2xx status code: 429 Too Many Requests: ", false),
            (
                "Received redirect without LOCATION, this normally indicates an incorrectly configured region",
                true,
            ),
            ("HTTP error: error sending request: connection refused", false),
        ] {
            assert_eq!(is_for_good(text), expected, "{text}");
        }
    }
}

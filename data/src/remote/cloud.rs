//! A file in an object store of a cloud.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt};
use url::Url;

use super::bridge::Failure;
use super::http::with_sources;
use super::{SETTINGS, State};

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
}

fn state(meta: &ObjectMeta) -> State {
    let modified = Some(meta.last_modified.to_rfc3339());
    State { bytes: meta.size, tag: meta.e_tag.clone(), modified, has_ranges: true }
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

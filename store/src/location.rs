//! Locations of checkpoints, in one spelling for each place, and the places that a master allows.
//! Pure.
//!
//! Always true here: two spellings of the same folder are equal. No folder is below another because
//! of a prefix of its name, `..`, or an encoded `/`. [`Stores`](crate::Stores) opens the path of
//! the location.

use std::fmt;

use object_store::ObjectStoreScheme;
use object_store::path::Path;
use url::Url;

use proto::checkpoint::{Error, Result};
use proto::spec::CHECKPOINT_SCHEMES;

/// A folder on a local disk, in an object store, or in the memory of this process.
///
/// ```
/// use store::location::Location;
///
/// let of = |url: &str| Location::of(url).unwrap();
/// assert_eq!(of("/data/my%20runs"), of("file:///data/my%2520runs/"));
/// assert!(of("/data").holds(&of("file:///data/a/../b")));
/// assert!(!of("/data").holds(&of("/database")));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Scheme, and bucket or container as written: `file`, `s3://bucket`.
    store: String,
    path: Path,
}

impl Location {
    /// Returns the folder that a URL or an absolute path names.
    ///
    /// # Errors
    /// [`Error::Url`].
    pub fn of(url: &str) -> Result<Self> {
        let wrong = |reason: String| Error::Url { url: url.to_owned(), reason };
        let Some((scheme, rest)) = url.split_once("://") else {
            let path = Path::from_absolute_path(url).map_err(|error| wrong(error.to_string()))?;
            return Ok(Self { store: "file".to_owned(), path });
        };
        if !CHECKPOINT_SCHEMES.iter().any(|known| url.starts_with(known)) {
            let known = CHECKPOINT_SCHEMES.join(", ");
            return Err(wrong(format!("expected an absolute path, or a URL that begins with {known}")));
        }
        if scheme == "memory" {
            return Ok(Self { store: scheme.to_owned(), path: Path::from(rest) });
        }
        let parsed = Url::parse(url).map_err(|error| wrong(error.to_string()))?;
        let (_, path) = ObjectStoreScheme::parse(&parsed).map_err(|error| wrong(error.to_string()))?;
        let store = parsed.host_str().map_or_else(|| scheme.to_owned(), |host| format!("{scheme}://{host}"));
        Ok(Self { store, path })
    }

    /// Returns whether `other` is this folder or lies below it. Whole names are compared.
    pub fn holds(&self, other: &Self) -> bool {
        self.store == other.store && other.path.prefix_match(&self.path).is_some()
    }

    /// Returns the path in the store.
    pub(crate) const fn path(&self) -> &Path {
        &self.path
    }
}

/// Places that jobs may name. An empty list allows every place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed(Vec<(String, Location)>);

impl Allowed {
    /// Allows these folders and everything below them. Each is an absolute path or a URL.
    ///
    /// # Errors
    /// An error for each malformed place.
    pub fn of(places: &[String]) -> Result<Self, Vec<Error>> {
        let (mut found, mut wrong) = (Vec::new(), Vec::new());
        for place in places {
            match Location::of(place) {
                Ok(location) => found.push((place.clone(), location)),
                Err(error) => wrong.push(error),
            }
        }
        if wrong.is_empty() { Ok(Self(found)) } else { Err(wrong) }
    }

    /// Checks that a job may name `url`, which leads to `location`.
    ///
    /// # Errors
    /// [`Error::NotAllowed`].
    pub(crate) fn check(&self, url: &str, location: &Location) -> Result<()> {
        if self.0.is_empty() || self.0.iter().any(|(_, allowed)| allowed.holds(location)) {
            return Ok(());
        }
        Err(Error::NotAllowed { url: url.to_owned(), allowed: self.to_string() })
    }
}

/// Writes the places as the user gave them.
impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places: Vec<_> = self.0.iter().map(|(place, _)| format!("`{place}`")).collect();
        f.write_str(&places.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn allowed(places: &[&str]) -> Allowed {
        Allowed::of(&places.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap()
    }

    fn allows(allowed: &Allowed, url: &str) -> bool {
        Location::of(url).is_ok_and(|location| allowed.check(url, &location).is_ok())
    }

    #[test]
    fn only_what_lies_below_an_allowed_place_is_allowed() {
        let allowed = allowed(&["/a/b", "s3://Bucket/runs/x y", "memory://m"]);
        for url in [
            "/a/b",
            "/a/b/",
            "/a/b/c/d",
            "/a/./b/c",
            "file:///a/b",
            "file:///a/b/",
            "file:///a/%62/c",
            "file:///a/c/../b",
            "s3://Bucket/runs/x%20y",
            "s3://Bucket/runs/x y/z",
            "s3://Bucket/runs%2Fx%20y/z",
            "memory://m/n",
        ] {
            assert!(allows(&allowed, url), "{url}");
        }
        for url in [
            "/",
            "/a",
            "/a/bc",
            "/A/b",
            "/a/b/../c",
            "/a/b/../../etc",
            "a/b",
            "file:///",
            "file:///a/b/..",
            "file:///a/b/../c",
            "file:///a/b/%2e%2e/c",
            "file:///a/b/..%2fc",
            "file:///a/bc",
            "file:///a%2Fbc",
            "s3://bucket/runs/x y",
            "s3://Bucket/runs/x",
            "s3://Bucket/runs/x%2520y",
            "s3://Bucket",
            "gs://Bucket/runs/x y",
            "memory://mm",
            "memory://",
        ] {
            assert!(!allows(&allowed, url), "{url}");
        }
        let error = allowed.check("/etc", &Location::of("/etc").unwrap()).unwrap_err().to_string();
        for part in ["`/etc`", "`/a/b`", "`s3://Bucket/runs/x y`", "--checkpoints"] {
            assert!(error.contains(part), "{part} missing in {error}");
        }
    }

    #[test]
    fn without_a_place_every_place_is_allowed_and_what_is_none_is_refused() {
        assert!(allows(&Allowed::default(), "/anywhere") && allows(&Allowed::default(), "s3://b/c"));
        let wrong = Allowed::of(&["runs".into(), "/fine".into(), "ftp://host/x".into()]).unwrap_err();
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(allows(&allowed(&["/"]), "/anything") && !allows(&allowed(&["/"]), "s3://b/anything"));
    }

    /// Names of folders that resemble each other, or something else.
    const NAMES: [&str; 12] = ["a", "ab", "b", "A", "x y", "ü", "%41", "%2e%2e", "%2F", "...", "a?b", "a#b"];

    fn names(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<&'static str>> {
        proptest::collection::vec(proptest::sample::select(&NAMES[..]), count)
    }

    /// Returns the path of a URL. `all` encodes every byte of the names, otherwise only those that
    /// must be.
    fn encoded(names: &[&str], all: bool) -> String {
        let byte = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' if !all => char::from(byte).to_string(),
            byte => format!("%{byte:02x}"),
        };
        names.iter().map(|name| format!("/{}", name.bytes().map(byte).collect::<String>())).collect()
    }

    proptest! {
        #[test]
        fn a_place_holds_another_if_its_names_begin_it(one in names(1..4), other in names(1..5), all: bool) {
            let expected = other.starts_with(&one);
            let path = |names: &[&str]| format!("/{}", names.join("/"));
            let (holder, held) = (Location::of(&path(&one)).unwrap(), Location::of(&path(&other)).unwrap());
            prop_assert_eq!(holder.holds(&held), expected);
            let url = Location::of(&format!("file://{}", encoded(&other, all))).unwrap();
            prop_assert_eq!(&url, &held, "a path and its URL are one place");
            let [one, other] = [&one, &other].map(|names| format!("s3://bucket{}", encoded(names, all)));
            let (holder, held) = (Location::of(&one).unwrap(), Location::of(&other).unwrap());
            prop_assert_eq!(holder.holds(&held), expected);
            prop_assert!(!holder.holds(&url) && !url.holds(&holder), "another store");
        }

        #[test]
        fn a_path_that_climbs_is_no_place_and_a_url_is_where_it_arrives(
            below in names(0..4), climbs in 0usize..6, then in names(0..3)
        ) {
            let root = ["a", "b"];
            let up = "/..".repeat(climbs);
            let path = |names: &[&str]| names.iter().map(|name| format!("/{name}")).collect::<String>();
            let climbing = format!("{}{}{up}{}", path(&root), path(&below), path(&then));
            if climbs > 0 {
                prop_assert!(Location::of(&climbing).is_err(), "{}", climbing);
            }
            let url = format!("file:///a/b{}{up}{}", encoded(&below, false), encoded(&then, false));
            let mut arrives: Vec<_> = root.iter().chain(&below).copied().collect();
            arrives.truncate(arrives.len().saturating_sub(climbs));
            arrives.extend(&then);
            let expected = arrives.starts_with(&root);
            prop_assert_eq!(allows(&allowed(&["/a/b"]), &url), expected, "{}", url);
        }
    }
}

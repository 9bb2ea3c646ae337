//! Names of data files that are URLs or patterns. Pure text: no URL is opened here.
//!
//! The text of a job is shown to everybody who may read it, so a URL must not hold a secret.

use std::borrow::Cow;

/// Beginnings of the URLs of data files.
pub const DATA_SCHEMES: [&str; 6] = ["file://", "s3://", "gs://", "az://", "http://", "https://"];

/// Words in the name of a query's parameter that holds a secret.
const SECRET_WORDS: [&str; 10] = [
    "signature",
    "credential",
    "token",
    "secret",
    "password",
    "auth",
    "accesskey",
    "access_key",
    "apikey",
    "api_key",
];

/// Whole names of such parameters.
const SECRET_NAMES: [&str; 3] = ["sig", "key", "pwd"];

/// Splits a URL into its scheme and what follows `://`. `None`: the name is a path.
pub fn split(name: &str) -> Option<(&str, &str)> {
    name.split_once("://")
}

/// Returns whether a name is a URL of another machine. A `file://` URL is a local path.
pub fn is_remote(name: &str) -> bool {
    DATA_SCHEMES.iter().any(|scheme| *scheme != "file://" && name.starts_with(scheme))
}

/// Returns the local path that a name stands for. `None`: it is a URL of another machine.
pub fn local(name: &str) -> Option<Cow<'_, str>> {
    match split(name) {
        None => Some(Cow::Borrowed(name)),
        Some(("file", path)) => Some(decoded(path)),
        Some(_) => None,
    }
}

/// Returns whether the last part of a name is a pattern, such as `part-*.parquet`. Names on web
/// servers are none, because such servers do not list files.
pub fn is_pattern(name: &str) -> bool {
    !split(name).is_some_and(|(scheme, _)| scheme.starts_with("http")) && last_part(name).1.contains('*')
}

/// Splits a name into its folder, with the `/`, and the last part.
pub fn last_part(name: &str) -> (&str, &str) {
    name.split_at(name.rfind('/').map_or(0, |at| at + 1))
}

/// Returns whether a file's name fits a pattern. `*` stands for any text, also for none. As in a
/// shell, a name that begins with a dot fits only a pattern that does so too.
///
/// ```
/// use proto::spec::data_url::fits;
///
/// assert!(fits("part-*.csv", "part-01.csv") && fits("*", "a"));
/// assert!(!fits("part-*.csv", "part-01.csv.gz") && !fits("*", ".hidden"));
/// ```
pub fn fits(pattern: &str, name: &str) -> bool {
    if name.starts_with('.') && !pattern.starts_with('.') {
        return false;
    }
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// Replaces `%41` by `A`, for all bytes.
pub fn decoded(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return Cow::Borrowed(text);
    }
    let digit = |byte: Option<&u8>| byte.and_then(|&byte| char::from(byte).to_digit(16));
    let raw = text.as_bytes();
    let (mut bytes, mut at) = (Vec::with_capacity(raw.len()), 0);
    while at < raw.len() {
        match (raw[at], digit(raw.get(at + 1)), digit(raw.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((16 * high + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                bytes.push(byte);
                at += 1;
            }
        }
    }
    Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
}

/// Writes a file's name so that it can stand in a URL, and is no pattern. [`decoded`] is the
/// inverse.
pub fn encoded(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()+,;=:@".contains(&byte);
    let byte = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    name.bytes().map(byte).collect()
}

/// Returns a URL without what may be secret: user, password, query and fragment.
pub fn shown(name: &str) -> String {
    let Some((scheme, rest)) = split(name) else { return name.to_owned() };
    let end = rest.find(['?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest[..end].split_at(rest[..end].find(['/', '\\']).unwrap_or(end));
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{scheme}://{host}{path}{}", if end < rest.len() { "?.." } else { "" })
}

/// Checks the name of a data file: a path, or a URL that is whole and holds no secret.
///
/// # Errors
/// What is wrong, without the name, which may hold a secret.
pub fn check(name: &str) -> Result<(), String> {
    let Some((scheme, rest)) = split(name) else {
        return Ok(());
    };
    let wrong = |reason: &str| Err(reason.to_owned());
    if !DATA_SCHEMES.iter().any(|known| name.starts_with(known)) {
        let known = DATA_SCHEMES.join(", ");
        return wrong(&format!("expected a path, or a URL that begins with {known}"));
    }
    if name.contains(|letter: char| letter.is_control() || letter == '\\') {
        return wrong("a URL has no control characters and no `\\`");
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, rest) = rest.split_at(end);
    if authority.contains('@') {
        return wrong(
            "it has a user name or a password, which everybody would see who may read the job; remove it, and give the \
             credentials to the workers",
        );
    }
    let (whole, fragment) =
        rest.split_once('#').map_or((rest, None), |(rest, fragment)| (rest, Some(fragment)));
    let (path, query) = whole.split_once('?').map_or((whole, None), |(path, query)| (path, Some(query)));
    if let Some(query) = query
        && let Some(secret) = query.split(['&', ';']).find_map(secret)
    {
        return wrong(&format!(
            "its query has `{secret}`, which everybody would see who may read the job; remove it, and give the credentials \
             to the workers, or let them read s3://, gs:// or az://"
        ));
    }
    let is_web = scheme.starts_with("http");
    if fragment.is_some() || (query.is_some() && !is_web) {
        return wrong("`?` and `#` do not belong to the name of a file; write %3F and %23");
    }
    match scheme {
        "file" if !authority.is_empty() || path.len() < 2 => {
            return wrong("expected file:///PATH, with three `/`");
        }
        "file" => {}
        _ if authority.is_empty() => return wrong("it names no host and no bucket"),
        "s3" | "gs" | "az" if path.len() < 2 => return wrong("it names no object in the bucket"),
        _ => {}
    }
    let low = path.to_ascii_lowercase();
    if ["%2f", "%5c", "%00"].iter().any(|encoded| low.contains(encoded)) {
        return wrong("its path has an encoded `/`, `\\` or zero; write the path plainly");
    }
    if low.split('/').any(|part| [".", ".."].contains(&&*decoded(part))) {
        return wrong("its path has `.` or `..`; write where it leads");
    }
    let (folder, last) = last_part(path);
    if folder.contains('*') || authority.contains('*') {
        return wrong("`*` stands in the last part of a name only; for the character itself write %2A");
    }
    if is_web && last.contains('*') {
        return wrong(
            "web servers do not list files; name each file. For the character `*` itself write %2A",
        );
    }
    Ok(())
}

/// Returns the name of a query's parameter if its value may be a secret.
fn secret(parameter: &str) -> Option<String> {
    let name = decoded(parameter.split('=').next().unwrap_or_default()).to_ascii_lowercase();
    let plain = name.replace('-', "_");
    let is_secret =
        SECRET_NAMES.contains(&plain.as_str()) || SECRET_WORDS.iter().any(|word| plain.contains(word));
    is_secret.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_whole_urls_are_names_of_data_files() {
        for name in [
            "a.csv",
            "/data/part-*.csv",
            "file:///data/a%20b.csv",
            "s3://bucket/a/part-*.parquet",
            "gs://bucket/a b",
            "az://container/x",
            "http://host:8000/a.npy",
            "https://host/a.npy?download=true",
            "https://[::1]:80/a",
        ] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        for (name, reason) in [
            ("ftp://host/x", "begins with file://, s3://"),
            ("s3://bucket", "names no object"),
            ("s3://bucket/", "names no object"),
            ("s3:///key", "no host and no bucket"),
            ("file://host/x", "file:///PATH"),
            ("s3://bucket/a?b", "write %3F"),
            ("https://host/a#b", "write %3F"),
            ("https://host/a/../b", "write where it leads"),
            ("https://host/a/%2E%2e/b", "write where it leads"),
            ("https://host/a%2fb", "an encoded `/`"),
            ("http:\\\\host/x://", "expected a path"),
            ("http://ho\\st/x", "control characters"),
            ("s3://bucket/*/a", "in the last part"),
            ("https://host/*.csv", "web servers do not list files"),
        ] {
            let said = check(name).unwrap_err();
            assert!(said.contains(reason), "{name}: {said}");
        }
    }

    #[test]
    fn urls_with_secrets_are_refused_without_showing_them() {
        for name in [
            "https://anna:hush@host/x",
            "https://hush@host/x",
            "s3://hush:hush@bucket/x",
            "https://host/x?X-Amz-Credential=c&X-Amz-Signature=hush",
            "https://host/x?sv=1&sig=hush",
            "https://host/x?a=1&%73ig=hush",
            "https://host/x?Expires=1&Signature=hush&Key-Pair-Id=k",
            "https://host/x?access_token=hush",
            "https://host/x?api-key=hush",
            "https://host/x?a=1;token=hush",
        ] {
            let said = check(name).unwrap_err();
            assert!(said.contains("everybody would see") && !said.contains("hush"), "{name}: {said}");
            assert!(!shown(name).contains("hush") && shown(name).contains("/x"), "{}", shown(name));
        }
    }

    #[test]
    fn a_pattern_fits_as_in_a_shell() {
        for (pattern, name, expected) in [
            ("a*", "a", true),
            ("a*", "ab", true),
            ("*a", "ba", true),
            ("a*a", "a", false),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXcYb", false),
            ("*.csv", "x.csv.gz", false),
            ("a", "ab", false),
            ("**", "ab", true),
            (".*", ".a", true),
            ("*", ".a", false),
            ("é*", "éa", true),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn names_in_urls_are_encoded_and_decoded() {
        for name in ["a.csv", "a b%*?#.csv", "ü"] {
            assert_eq!(decoded(&encoded(name)), name);
        }
        assert_eq!(encoded("a b*"), "a%20b%2A");
        assert_eq!((&*decoded("100%"), &*decoded("%4")), ("100%", "%4"));
        assert_eq!(local("file:///a%20b").as_deref(), Some("/a b"));
        assert_eq!((local("a%20b").as_deref(), local("s3://a/b")), (Some("a%20b"), None));
    }
}

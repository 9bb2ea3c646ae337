//! URLs and addresses that this process may read.
//!
//! Whoever submits a job names the URLs, and the worker reads them with its own rights. So the
//! operator can list the URLs (`data_urls`), and some addresses are never read: those at which
//! clouds give their machines' credentials to every caller.

#[cfg(feature = "cloud")]
use std::net::IpAddr;
use std::sync::{PoisonError, RwLock};

use proto::spec::data_url::{DATA_SCHEMES, decoded};
use url::Url;

static ALLOWED: RwLock<Allowed> = RwLock::new(Allowed { prefixes: Vec::new(), loopback: true });

/// URLs that this process may read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Allowed {
    /// Beginnings of URLs. Empty: every URL.
    prefixes: Vec<Prefix>,
    /// Whether web servers of this machine count as any others.
    loopback: bool,
}

/// Beginning of URLs. It ends between two parts of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Prefix {
    text: String,
    scheme: String,
    /// Host, or bucket, and port. `None`: all of the scheme.
    host: Option<(String, Option<u16>)>,
    /// Parts of the path.
    path: Vec<String>,
}

/// Restricts the URLs that this process reads to those that begin with one of `prefixes`, such as
/// `s3://bucket/data`. Web servers of this machine must be listed. An empty list allows all others.
/// Without a call every URL is allowed.
///
/// # Errors
/// A message for each prefix that is none. Nothing has changed then.
pub fn allow_urls(prefixes: &[String]) -> Result<(), Vec<String>> {
    let wrong = wrong_prefixes(prefixes);
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let prefixes: Vec<_> = prefixes.iter().filter_map(|text| Prefix::of(text).ok()).collect();
    let allowed = Allowed { loopback: !prefixes.is_empty(), prefixes };
    *ALLOWED.write().unwrap_or_else(PoisonError::into_inner) = allowed;
    Ok(())
}

/// Returns a message for each of `prefixes` that is no beginning of URLs.
pub fn wrong_prefixes(prefixes: &[String]) -> Vec<String> {
    prefixes
        .iter()
        .filter_map(|text| Some(format!("data_urls: `{text}`: {}", Prefix::of(text).err()?)))
        .collect()
}

/// Returns the list for [`allow_urls`] that allows every URL, also those of this machine.
pub fn every_url() -> Vec<String> {
    DATA_SCHEMES.iter().filter(|scheme| **scheme != "file://").map(|&scheme| scheme.to_owned()).collect()
}

impl Prefix {
    fn of(text: &str) -> Result<Self, String> {
        let every = every_url();
        let Some(scheme) = every.iter().find(|scheme| text.starts_with(scheme.as_str())) else {
            return Err(format!("expected the beginning of a URL: {}", every.join(", ")));
        };
        let name = scheme.trim_end_matches("://").to_owned();
        if text.len() == scheme.len() {
            return Ok(Self { text: text.to_owned(), scheme: name, host: None, path: Vec::new() });
        }
        if let Some(letter) = text.chars().find(|letter| "@?#*\\".contains(*letter)) {
            return Err(format!("`{letter}` does not belong there; give scheme, host or bucket, and path"));
        }
        let url = Url::parse(text).map_err(|error| format!("no URL: {error}"))?;
        let path = parts(&url);
        Ok(Self { text: text.to_owned(), scheme: name, host: Some(host(&url)), path })
    }

    #[cfg(feature = "cloud")]
    fn holds(&self, url: &Url) -> bool {
        self.scheme == url.scheme()
            && self.host.as_ref().is_none_or(|own| *own == host(url))
            && (self.path.is_empty() || self.is_above(&parts(url)))
    }

    /// Returns whether a path lies below this one. A server may take an encoded `/` in a part for
    /// one between parts, so that `..%2F` would lead out of it.
    #[cfg(feature = "cloud")]
    fn is_above(&self, path: &[String]) -> bool {
        let is_plain =
            |part: &String| !matches!(part.as_str(), "." | "..") && !part.contains(['/', '\\', '\0']);
        path.starts_with(&self.path) && path.iter().all(is_plain)
    }
}

fn host(url: &Url) -> (String, Option<u16>) {
    (url.host_str().unwrap_or_default().to_owned(), url.port_or_known_default())
}

/// Returns the parts of a path, without the empty one behind a last `/`.
fn parts(url: &Url) -> Vec<String> {
    let path = url.path().trim_start_matches('/');
    let path = path.strip_suffix('/').unwrap_or(path);
    if path.is_empty() {
        Vec::new()
    } else {
        path.split('/').map(|part| decoded(part).into_owned()).collect()
    }
}

#[cfg(feature = "cloud")]
impl Allowed {
    fn check(&self, url: &Url) -> Result<(), String> {
        if !self.prefixes.is_empty() && !self.prefixes.iter().any(|prefix| prefix.holds(url)) {
            let known: Vec<_> = self.prefixes.iter().map(|prefix| format!("`{}`", prefix.text)).collect();
            return Err(format!(
                "this worker does not read it: its operator allows URLs that begin with {} (data_urls)",
                known.join(", ")
            ));
        }
        if !url.scheme().starts_with("http") {
            return Ok(());
        }
        let refused = match url.host() {
            Some(url::Host::Ipv4(address)) => refusal(address.into(), self.loopback),
            Some(url::Host::Ipv6(address)) => refusal(address.into(), self.loopback),
            Some(url::Host::Domain(name)) if is_localhost(name) && !self.loopback => Some(OF_THIS_MACHINE),
            _ => None,
        };
        match refused {
            None => Ok(()),
            Some(OF_THIS_MACHINE) => Err(format!(
                "its host is {OF_THIS_MACHINE}, which a worker reads only if its operator lists the URL in data_urls"
            )),
            Some(why) => Err(format!("its host is {why}, which is never read")),
        }
    }
}

/// Checks that this process may read a URL.
///
/// # Errors
/// Why not.
#[cfg(feature = "cloud")]
pub(super) fn check(url: &Url) -> Result<(), String> {
    ALLOWED.read().unwrap_or_else(PoisonError::into_inner).check(url)
}

/// Returns whether a name stands for this machine in every network.
#[cfg(feature = "cloud")]
pub(super) fn is_localhost(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name == "localhost" || name.ends_with(".localhost")
}

#[cfg(feature = "cloud")]
const OF_THIS_MACHINE: &str = "an address of this machine";

#[cfg(feature = "cloud")]
const OF_THE_LINK: &str = "a link-local address, where clouds keep the credentials of their machines";

#[cfg(feature = "cloud")]
const OF_THE_CLOUD: &str = "an address at which a cloud gives its machines their settings and credentials";

#[cfg(feature = "cloud")]
const TRANSLATED: &str = "an address that a network may lead to any IPv4 address";

/// Returns what kind of address is not read. `loopback` allows the addresses of this machine.
#[cfg(feature = "cloud")]
pub(super) fn refusal(address: IpAddr, loopback: bool) -> Option<&'static str> {
    // Some networks lead the addresses 64:ff9b::/96 to the IPv4 address in their last 32 bits.
    let address = match address.to_canonical() {
        IpAddr::V6(six) => match six.segments() {
            [0x64, 0xff9b, 0, 0, 0, 0, ..] => {
                let [.., a, b, c, d] = six.octets();
                IpAddr::from([a, b, c, d])
            }
            _ => IpAddr::V6(six),
        },
        four @ IpAddr::V4(_) => four,
    };
    // These services of clouds have no link-local address.
    let never = match address {
        IpAddr::V4(four) => match four.octets() {
            [169, 254, ..] => Some(OF_THE_LINK),
            // Alibaba Cloud, Oracle Cloud, Azure.
            [100, 100, 100, 200] | [192, 0, 0, 192] | [168, 63, 129, 16] => Some(OF_THE_CLOUD),
            _ => None,
        },
        IpAddr::V6(six) => match six.segments() {
            _ if six.is_unicast_link_local() => Some(OF_THE_LINK),
            // Amazon's cloud, Google Cloud.
            [0xfd00, 0xec2, ..] | [0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254] => Some(OF_THE_CLOUD),
            // The place of the IPv4 address in it is a matter of the network (RFC 8215).
            [0x64, 0xff9b, 1, ..] => Some(TRANSLATED),
            _ => None,
        },
    };
    if never.is_some() {
        return never;
    }
    // Connections to the unspecified address go to this machine.
    (!loopback && (address.is_loopback() || address.is_unspecified())).then_some(OF_THIS_MACHINE)
}

#[cfg(all(test, feature = "cloud"))]
mod tests {
    use super::*;

    fn allowed(prefixes: &[&str]) -> Allowed {
        let prefixes: Vec<_> = prefixes.iter().map(|text| Prefix::of(text).expect("a prefix")).collect();
        Allowed { loopback: !prefixes.is_empty(), prefixes }
    }

    fn check(allowed: &Allowed, url: &str) -> Result<(), String> {
        allowed.check(&Url::parse(url).expect("a URL"))
    }

    #[test]
    fn only_urls_below_a_listed_one_are_read() {
        let list = allowed(&["s3://Bucket/data", "https://host/a/", "http://127.0.0.1:8000", "gs://"]);
        for url in [
            "s3://Bucket/data/x",
            "s3://Bucket/data/%78/y",
            "https://HOST/a/b",
            "https://host:443/a/b",
            "http://127.0.0.1:8000/x",
            "gs://any/x",
            "gs://any/a%2Fb",
        ] {
            assert_eq!(check(&list, url), Ok(()), "{url}");
        }
        for url in [
            "s3://bucket/data/x",
            "s3://Bucket/database/x",
            "s3://Bucket/data/../other/x",
            "s3://Bucket/data/%2e%2e/other/x",
            "https://host/ab",
            "https://host/a/..%2Fb",
            "https://host/a/x/%2e%2e%2f%2e%2e%2fb",
            "https://host/a/..%5Cb",
            "https://host/a/x%00",
            "https://host:444/a/b",
            "https://host.evil/a/b",
            "http://host/a/b",
            "http://127.0.0.1:8001/x",
            "http://localhost:8000/x",
            "az://any/x",
        ] {
            let said = check(&list, url).unwrap_err();
            assert!(said.contains("`s3://Bucket/data`") && said.contains("data_urls"), "{url}: {said}");
        }
    }

    #[test]
    fn addresses_with_credentials_are_never_read_and_those_of_this_machine_if_they_are_listed() {
        let (any, list) = (allowed(&[]), allowed(&["http://"]));
        for host in [
            "169.254.169.254",
            "2852039166",
            "0xa9fea9fe",
            "[fe80::1]",
            "[::ffff:169.254.169.254]",
            "[64:ff9b::a9fe:a9fe]",
            "[fd00:ec2::254]",
            "[fd00:ec2::23]",
            "[fd20:ce::254]",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "[::ffff:168.63.129.16]",
            "[64:ff9b::6464:64c8]",
            "[64:ff9b:1::a9fe:a9fe]",
            "[64:ff9b:1:ffff::1]",
        ] {
            for allowed in [&any, &list] {
                let said = check(allowed, &format!("http://{host}/latest")).unwrap_err();
                assert!(said.contains("never read"), "{host}: {said}");
            }
        }
        for host in
            ["127.0.0.1", "127.1.2.3", "[::1]", "0.0.0.0", "[::]", "localhost", "a.localhost", "localhost."]
        {
            let url = format!("http://{host}:80/x");
            let said = check(&any, &url).unwrap_err();
            assert!(said.contains("lists the URL in data_urls"), "{host}: {said}");
            assert_eq!(check(&list, &url), Ok(()), "{host}");
        }
        for url in [
            "http://10.0.0.1/x",
            "http://100.100.100.201/x",
            "http://[fd00:ec3::254]/x",
            "http://[64:ff9b:2::1]/x",
            "https://example.org/x",
            "s3://169.254.169.254/x",
        ] {
            assert_eq!(check(&any, url), Ok(()), "{url}");
        }
    }

    #[test]
    fn what_is_no_beginning_of_urls_is_refused() {
        let wrong = ["ftp://host", "/data", "https://a@host/", "s3://b/*", "https://host/?a", "file:///data"];
        let wrong = wrong_prefixes(&wrong.map(str::to_owned));
        assert_eq!(wrong.len(), 6, "{wrong:#?}");
        assert_eq!(wrong_prefixes(&every_url()), [""; 0]);
    }
}

//! Authentication and authorization: the same means in every role.
//!
//! There are two checks, each with its own key. A *certificate* says that a process belongs to this
//! cluster: with [`Options::ca`] each connection is TLS 1.3, and each end shows a certificate of
//! the cluster's authority. A *token* says what its bearer may do: every call carries one, a server
//! compares it with its list ([`tokens`]) and consults one [`table`]. Connections come in through a
//! [`door`], which limits their number and the time that each may take to prove itself.
//!
//! [`Keys`] has certificates and tokens with the current content of their files. A file that
//! changes is read again.

pub mod door;
mod error;
pub(crate) mod guard;
mod keys;
mod refusals;
pub mod table;
pub(crate) mod tls;
pub mod tokens;
mod visit;

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use self::error::Error;
pub use self::guard::{Caller, Guard};
pub use self::keys::Keys;
pub use self::table::TokenRole;
pub use self::visit::Guest;

/// Files with the keys of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Trusted certificates (PEM): those of the cluster's authority, or of two while one replaces
    /// the other. Default: none, and connections are not encrypted.
    pub ca: Option<PathBuf>,
    /// This process's certificate and the intermediate ones up to the authority (PEM). Needed with
    /// `ca`.
    pub cert: Option<PathBuf>,
    /// Private key of `cert` (PEM). Needed with `cert`.
    pub key: Option<PathBuf>,
    /// Token that this process shows when it calls others. Default: none.
    pub token: Option<PathBuf>,
    /// Tokens that a server accepts. Default: no list, and the server accepts every call.
    pub tokens: Option<PathBuf>,
    /// Whether the process may be reached from other machines, and show a token to them, without
    /// certificates or without a list of tokens. Default: off.
    pub insecure: bool,
}

impl Options {
    /// Checks that the files belong together.
    ///
    /// # Errors
    /// [`Error::Options`] with every violation.
    pub fn validate(&self) -> Result<(), Error> {
        let mut wrong = Vec::new();
        if self.cert.is_some() != self.key.is_some() {
            wrong.push("a certificate and its key belong together: give both --tls-cert and --tls-key");
        }
        if self.ca.is_none() && self.cert.is_some() {
            wrong.push(
                "--tls-cert without --tls-ca: say with --tls-ca which authority the other end must be of",
            );
        }
        if self.tokens.is_some() && self.ca.is_some() && self.cert.is_none() {
            wrong.push("a server with --tls-ca needs --tls-cert and --tls-key too");
        }
        let wrong: Vec<String> = wrong.into_iter().map(str::to_owned).collect();
        if wrong.is_empty() { Ok(()) } else { Err(Error::Options(wrong)) }
    }

    /// Checks that a server may listen on `address`. Beyond this machine it needs certificates and
    /// tokens, unless the user insists.
    ///
    /// # Errors
    /// [`Error::Open`] with what is missing.
    pub fn may_listen(&self, address: IpAddr) -> Result<(), Error> {
        if self.insecure || address.to_canonical().is_loopback() {
            return Ok(());
        }
        let missing = match (self.cert.is_some(), self.tokens.is_some()) {
            (true, true) => return Ok(()),
            (true, false) => "a list of tokens",
            (false, true) => "certificates",
            (false, false) => "certificates and a list of tokens",
        };
        Err(Error::Open { address, missing })
    }

    /// Checks that a process may show its health or its metrics on `address`, to every client.
    /// Without certificates no other machine reaches any service of a process. With certificates,
    /// the user chose the address on purpose.
    ///
    /// # Errors
    /// [`Error::Shown`].
    pub fn may_show(&self, address: IpAddr) -> Result<(), Error> {
        let may = self.insecure || self.cert.is_some() || address.to_canonical().is_loopback();
        if may { Ok(()) } else { Err(Error::Shown { address }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(ca: bool, cert: bool, key: bool, tokens: bool) -> Options {
        let some = |there: bool| there.then(|| PathBuf::from("file"));
        Options { ca: some(ca), cert: some(cert), key: some(key), tokens: some(tokens), ..Options::default() }
    }

    #[test]
    fn files_that_belong_together_are_missed() {
        for (ca, cert, key, tokens, expected) in [
            (false, false, false, false, None),
            (true, true, true, true, None),
            (true, false, false, false, None),
            (true, true, false, false, Some("--tls-key")),
            (true, false, true, false, Some("--tls-cert")),
            (false, true, true, false, Some("--tls-ca")),
            (true, false, false, true, Some("a server")),
        ] {
            let found = options(ca, cert, key, tokens).validate().map_err(|error| error.to_string());
            match expected {
                None => assert_eq!(found, Ok(())),
                Some(part) => assert!(found.clone().unwrap_err().contains(part), "{found:?}"),
            }
        }
    }

    #[test]
    fn a_server_without_both_locks_is_for_its_own_machine() {
        let may = |options: &Options, address: &str| options.may_listen(address.parse().unwrap());
        let bare = Options::default();
        for address in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert!(may(&bare, address).is_ok(), "{address}");
        }
        for address in ["0.0.0.0", "10.0.0.1", "::", "2001:db8::1"] {
            let error = may(&bare, address).unwrap_err().to_string();
            for part in [address, "ebb certs init", "--insecure", "certificates and a list of tokens"] {
                assert!(error.contains(part), "{part} missing in {error}");
            }
            assert!(may(&options(true, true, true, false), address).is_err());
            assert!(may(&options(false, false, false, true), address).is_err());
            assert!(may(&options(true, true, true, true), address).is_ok());
            assert!(may(&Options { insecure: true, ..Options::default() }, address).is_ok());
        }
    }

    #[test]
    fn numbers_and_health_stay_on_the_machine_of_a_process_without_certificates() {
        let may = |options: &Options, address: &str| options.may_show(address.parse().unwrap());
        assert!(may(&Options::default(), "127.0.0.1").is_ok());
        let error = may(&options(false, false, false, true), "0.0.0.0").unwrap_err().to_string();
        assert!(error.contains("0.0.0.0") && error.contains("--insecure"), "{error}");
        assert!(may(&options(true, true, true, false), "0.0.0.0").is_ok());
        assert!(may(&Options { insecure: true, ..Options::default() }, "0.0.0.0").is_ok());
    }
}

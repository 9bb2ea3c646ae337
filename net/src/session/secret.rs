//! The session secret: 128 bits that bind a call to the process that registered. The master tells
//! them to that process alone.
//!
//! Every Fleet call but Register carries it as metadata:
//!
//! ```text
//! ebb-session: 1099511627777-00112233445566778899aabbccddeeff
//! ```

use std::fmt;

use http::{HeaderMap, HeaderValue};
use subtle::ConstantTimeEq as _;

use proto::ids::IncarnationId;

/// Metadata key with the proof of the caller's incarnation.
pub const KEY: &str = "ebb-session";

/// Secret of one incarnation. It is compared in constant time and never printed.
#[derive(Clone, Copy)]
pub struct Secret([u8; 16]);

impl Secret {
    /// Returns the secret of these bytes from [`RegisterReply.secret`](proto::pb::RegisterReply).
    /// `None` unless there are 16.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Returns the bytes, to be sent to the process that registered.
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Compares two secrets in constant time.
    pub fn is(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Incarnation as which a call is made, with its proof.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// Incarnation of the caller.
    pub incarnation: IncarnationId,
    /// Secret that the process got when it registered.
    pub secret: Secret,
}

impl Shown {
    /// Reads the incarnation and secret that a call shows. `None`: the call shows none, or they are
    /// malformed.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let (incarnation, secret) = headers.get(KEY)?.to_str().ok()?.split_once('-')?;
        let incarnation = IncarnationId(incarnation.parse().ok()?);
        let number = u128::from_str_radix(secret, 16).ok().filter(|_| secret.len() == 32)?;
        Some(Self { incarnation, secret: Secret(number.to_be_bytes()) })
    }

    /// Adds the incarnation and its secret to a call.
    pub fn show(&self, headers: &mut HeaderMap) {
        let text = format!("{}-{:032x}", self.incarnation, u128::from_be_bytes(self.secret.0));
        let mut value = HeaderValue::try_from(text).expect("digits and a hyphen");
        value.set_sensitive(true);
        headers.insert(KEY, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_read_again() {
        let secret = Secret::from_bytes(&[0xa5; 16]).expect("16 bytes");
        let mut headers = HeaderMap::new();
        Shown { incarnation: IncarnationId(1 << 40), secret }.show(&mut headers);
        assert!(headers[KEY].is_sensitive());
        let shown = Shown::of(&headers).expect("it is shown");
        assert_eq!(shown.incarnation, IncarnationId(1 << 40));
        assert!(shown.secret.is(&secret) && !shown.secret.is(&Secret([0; 16])));
        assert_eq!(
            format!("{shown:?}"),
            "Shown { incarnation: IncarnationId(1099511627776), secret: Secret(..) }"
        );
    }

    #[test]
    fn anything_else_is_nothing() {
        assert!(Secret::from_bytes(&[0; 15]).is_none() && Secret::from_bytes(&[]).is_none());
        for text in [
            "",
            "7",
            "7-",
            "-00112233445566778899aabbccddeeff",
            "7-00112233",
            "x-00112233445566778899aabbccddeeff",
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(KEY, HeaderValue::from_static(text));
            assert!(Shown::of(&headers).is_none(), "{text}");
        }
        assert!(Shown::of(&HeaderMap::new()).is_none());
    }
}

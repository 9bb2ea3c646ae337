//! What binds a call to the process that registered: 128 bits that the master tells that process alone.
//!
//! ```text
//!   ebb-session: 1099511627777-00112233445566778899aabbccddeeff      metadata of every Fleet call but Register
//! ```

use std::fmt;

use http::{HeaderMap, HeaderValue};
use subtle::ConstantTimeEq as _;

use proto::ids::IncarnationId;

/// Metadata of a call that proves who makes it.
pub const KEY: &str = "ebb-session";

/// The secret of one incarnation. It is compared in constant time and never printed.
#[derive(Clone, Copy)]
pub struct Secret([u8; 16]);

impl Secret {
    /// The secret of these bytes, as [`RegisterReply.secret`](proto::pb::RegisterReply) has them; `None` unless there are 16.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Its bytes, to be sent to the process that registered.
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Whether `other` is the same; takes as long whatever it is.
    pub fn is(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The incarnation that a call is made as, with the proof.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The incarnation.
    pub incarnation: IncarnationId,
    /// What its process was told when it registered.
    pub secret: Secret,
}

impl Shown {
    /// What a call shows; `None` when it shows nothing, or something else than this.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let (incarnation, secret) = headers.get(KEY)?.to_str().ok()?.split_once('-')?;
        let incarnation = IncarnationId(incarnation.parse().ok()?);
        let number = u128::from_str_radix(secret, 16).ok().filter(|_| secret.len() == 32)?;
        Some(Self { incarnation, secret: Secret(number.to_be_bytes()) })
    }

    /// Shows it with a call.
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

//! The type in which a model computes the operations that lose little by it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// 16-bit type of PyTorch's autocast: matrix products and convolutions compute in it, and
/// operations that need more bits, such as losses, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Autocast {
    /// bfloat16: the range of f32, 8 significant bits.
    Bf16,
    /// IEEE half precision: 11 significant bits, numbers from 2^-24 to 65504. Its gradients need a
    /// [`LossScale`](crate::loss_scale::LossScale).
    F16,
}

impl fmt::Display for Autocast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl From<Autocast> for String {
    fn from(autocast: Autocast) -> Self {
        autocast.to_string()
    }
}

impl TryFrom<String> for Autocast {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        match name.as_str() {
            "bf16" => Ok(Self::Bf16),
            "f16" => Ok(Self::F16),
            _ => Err(format!("unknown variant `{name}`, expected `bf16` or `f16`")),
        }
    }
}

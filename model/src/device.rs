//! Devices that compute gradients: `cpu`, `cuda:N`, or `auto`.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Device that the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first CUDA device if there is one, otherwise the CPU.
    #[default]
    Auto,
    /// Exactly this device.
    Fixed(Device),
}

/// A device that computes gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The host's processor.
    #[default]
    Cpu,
    /// CUDA device of this index.
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(device) => device.fmt(f),
        }
    }
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Fixed(Device::Cpu)),
            "cuda" => Ok(Self::Fixed(Device::Cuda(0))),
            _ => match text.strip_prefix("cuda:").and_then(|index| index.parse().ok()) {
                Some(index) => Ok(Self::Fixed(Device::Cuda(index))),
                None => Err(Error::UnknownDevice(text.to_owned())),
            },
        }
    }
}

impl Choice {
    /// Returns the device to use. `cuda_devices` is the number of CUDA devices that the process
    /// sees.
    ///
    /// # Errors
    /// The CUDA device does not exist.
    pub fn resolve(self, cuda_devices: usize) -> Result<Device> {
        match self {
            Self::Auto if cuda_devices > 0 => Ok(Device::Cuda(0)),
            Self::Auto => Ok(Device::Cpu),
            Self::Fixed(Device::Cuda(index)) if index >= cuda_devices => {
                Err(Error::NoSuchDevice { index, found: cuda_devices })
            }
            Self::Fixed(device) => Ok(device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_written() {
        for text in ["auto", "cpu", "cuda:3"] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        assert!("gpu".parse::<Choice>().unwrap_err().to_string().contains("cuda:N"));
    }

    #[test]
    fn a_device_that_is_not_there_is_refused_and_auto_falls_back() {
        assert_eq!(Choice::Auto.resolve(0).unwrap(), Device::Cpu);
        assert_eq!(Choice::Auto.resolve(2).unwrap(), Device::Cuda(0));
        assert!(Choice::Fixed(Device::Cuda(1)).resolve(1).unwrap_err().to_string().contains("cuda:1"));
    }
}

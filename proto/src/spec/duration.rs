//! Durations in job files: `"30s"`, `"500ms"`, `"2m"`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de};

pub(super) fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*value))
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| {
        de::Error::custom(format!("`{text}` is no duration ({error}); write e.g. \"30s\" or \"500ms\""))
    })
}

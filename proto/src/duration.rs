//! Durations as people write them in files and on command lines: `"500ms"`, `"30s"`, `"2m"`. Serde
//! fields use them with `#[serde(with = "proto::duration")]`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de};

/// Reads a duration.
///
/// # Errors
/// The text is no duration. The error has an example of one.
pub fn parse(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("`{text}` is no duration ({error}); write e.g. \"30s\" or \"500ms\""))
}

/// Writes a duration as text.
///
/// # Errors
/// Errors of the serializer.
pub fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*value))
}

/// Reads a duration from text.
///
/// # Errors
/// The value is no text, or the text is no duration.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}

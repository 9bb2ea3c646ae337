//! Numbers of bytes as people write them in files and on command lines: `4096`, `"64MiB"`, `"1GB"`.
//! Optional serde fields use them with `#[serde(with = "crate::size")]`.

use serde::{Deserialize, Deserializer, Serializer, de};

/// Units with their bytes, smallest first.
static UNITS: [(&str, u64); 9] = [
    ("", 1),
    ("B", 1),
    ("kB", 1000),
    ("KiB", 1 << 10),
    ("MB", 1000 * 1000),
    ("MiB", 1 << 20),
    ("GB", 1000 * 1000 * 1000),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Reads a number of bytes, at least 1.
///
/// # Errors
/// The text is none. The error has examples.
pub fn parse(text: &str) -> Result<u64, String> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let factor = UNITS.into_iter().find(|(name, _)| *name == unit.trim()).map(|(_, factor)| factor);
    let bytes = factor.and_then(|factor| number.parse::<u64>().ok()?.checked_mul(factor));
    let wrong = "expected a number of bytes of at least 1, such as 4096, 64MiB or 1GB; units are kB, MB, GB, KiB, MiB, GiB, \
                 TiB";
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| wrong.to_owned())
}

/// Writes a number of bytes for people, with one decimal: `79.6 GiB`.
pub fn text(bytes: u64) -> String {
    let binary = [("TiB", 1_u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match binary.into_iter().find(|(_, factor)| bytes >= *factor) {
        Some((unit, factor)) => format!("{:.1} {unit}", bytes as f64 / factor as f64),
        None => format!("{bytes} B"),
    }
}

/// Writes a number of bytes in the largest unit of which it is a multiple.
///
/// # Errors
/// Errors of the serializer.
pub fn serialize<S: Serializer>(value: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    let Some(bytes) = *value else { return serializer.serialize_none() };
    let fits = |(_, factor): &&(&str, u64)| bytes % factor == 0;
    let (unit, factor) = UNITS.iter().rev().find(fits).unwrap_or(&UNITS[0]);
    serializer.collect_str(&format_args!("{}{unit}", bytes / factor))
}

/// Reads a number of bytes from a text or a number.
///
/// # Errors
/// The value is neither, or the text is no number of bytes.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a number of bytes, such as 4096 or \"64MiB\"")]
    enum Written {
        Number(u64),
        Text(String),
    }

    let written = Option::<Written>::deserialize(deserializer)?;
    let text = match written {
        None => return Ok(None),
        Some(Written::Number(number)) => number.to_string(),
        Some(Written::Text(text)) => text,
    };
    parse(&text).map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Setting {
        #[serde(default, with = "crate::size", skip_serializing_if = "Option::is_none")]
        memory: Option<u64>,
    }

    fn read(value: serde_json::Value) -> Result<Option<u64>, String> {
        let setting = serde_json::from_value::<Setting>(value).map_err(|error| error.to_string());
        setting.map(|setting| setting.memory)
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(read(json!({ "memory": "16GiB" })), Ok(Some(16 << 30)));
        assert_eq!(read(json!({ "memory": "3 kB" })), Ok(Some(3000)));
        assert_eq!(read(json!({ "memory": 4096 })), Ok(Some(4096)));
        assert_eq!(read(json!({})), Ok(None));
        for wrong in [json!("0"), json!(0), json!("16 gigs"), json!("-1"), json!("99999999999GiB")] {
            let said = read(json!({ "memory": wrong })).unwrap_err();
            assert!(said.contains("64MiB"), "{said}");
        }
    }

    #[test]
    fn sizes_are_told_with_one_decimal() {
        let told = [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (85_520_809_984, "79.6 GiB")];
        assert!(
            told.into_iter().all(|(bytes, said)| text(bytes) == said),
            "{:?}",
            told.map(|(of, _)| text(of))
        );
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(bytes in 1u64..u64::MAX, shift in 0u32..50) {
            let setting = Setting { memory: Some(((bytes >> shift) << shift).max(1)) };
            let text = serde_json::to_string(&setting).unwrap();
            prop_assert_eq!(serde_json::from_str::<Setting>(&text).unwrap(), setting);
        }
    }
}

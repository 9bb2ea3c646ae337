//! Secrets of a script: values that travel beside its description, and that nobody prints.

use std::fmt;

use crate::error::{Error, Result};
use crate::pb;
use crate::script::variable_refusal;

/// Most secrets of a script.
pub const SECRETS_MAX: usize = 64;

/// Shortest line in bytes that is redacted. A shorter one would be found in many harmless lines.
pub const REDACTED_BYTES_MIN: usize = 8;

/// Longest line of a secret in bytes.
pub const LINE_BYTES_MAX: usize = 4096;

/// Largest size of all values of a script in bytes.
const VALUES_BYTES_MAX: usize = 64 << 10;

impl fmt::Debug for pb::Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Returns the lines of a value that are redacted.
///
/// ```
/// assert_eq!(proto::secret::lines("-----BEGIN\r\nshort\n").collect::<Vec<_>>(), ["-----BEGIN"]);
/// ```
pub fn lines(value: &str) -> impl Iterator<Item = &str> {
    value.lines().filter(|line| line.len() >= REDACTED_BYTES_MIN)
}

/// Checks the names of a script's secrets.
///
/// # Errors
/// A name may not be set, comes twice, or is a variable too.
pub(crate) fn check_names(names: &[String], variables: &[pb::Variable]) -> Result<()> {
    if names.len() > SECRETS_MAX {
        return Err(wrong(&format!("at most {SECRETS_MAX} secrets"), names.len()));
    }
    for (index, name) in names.iter().enumerate() {
        let is_variable = variables.iter().any(|variable| variable.name == *name);
        if let Some(reason) = variable_refusal(name) {
            return Err(wrong(reason, name.escape_debug()));
        } else if name.contains(',') || is_variable || names[..index].contains(name) {
            return Err(wrong("each name once, without `,`, and none of a variable", name.escape_debug()));
        }
    }
    Ok(())
}

/// Checks that `secrets` are the values of these names, in their order. The errors have no value.
///
/// # Errors
/// One is missing or too much, or cannot be redacted.
pub fn check(names: &[String], secrets: &[pb::Secret]) -> Result<()> {
    if !names.iter().eq(secrets.iter().map(|secret| &secret.name)) {
        return Err(wrong("the values of the secrets that the description names", "other names"));
    }
    for pb::Secret { name, value } in secrets {
        let longest = value.lines().map(str::len).max().unwrap_or_default();
        if value.contains('\0') || longest > LINE_BYTES_MAX {
            let expected = format!("`{name}` without byte 0 and with at most {LINE_BYTES_MAX} bytes a line");
            return Err(wrong(&expected, format!("{longest} bytes")));
        }
        if lines(value).next().is_none() {
            let expected =
                format!("`{name}` with a line of at least {REDACTED_BYTES_MIN} bytes, to redact it");
            return Err(wrong(&expected, format!("{longest} bytes")));
        }
    }
    let bytes: usize = secrets.iter().map(|secret| secret.value.len()).sum();
    match bytes <= VALUES_BYTES_MAX {
        true => Ok(()),
        false => Err(wrong(&format!("at most {VALUES_BYTES_MAX} bytes together"), bytes)),
    }
}

fn wrong(expected: &str, found: impl fmt::Display) -> Error {
    Error::Field {
        message: "Script",
        field: "secrets",
        expected: expected.to_owned(),
        found: format!("`{found}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, value: &str) -> pb::Secret {
        pb::Secret { name: name.to_owned(), value: value.to_owned() }
    }

    #[test]
    fn no_error_and_no_form_for_people_has_a_value() {
        let value = "hunter2-and-more";
        let reply = pb::BundleReply {
            part: Some(pb::bundle_reply::Part::Secrets(pb::Secrets { secrets: vec![secret("KEY", value)] })),
            ..Default::default()
        };
        let shown = format!("{reply:?}");
        assert!(shown.contains("KEY") && !shown.contains(value), "{shown}");
        let names = ["KEY".to_owned()];
        check(&names, &[secret("KEY", value)]).unwrap();
        check(&names, &[secret("KEY", "-----BEGIN\nxx\n")]).unwrap();
        let long = "hunter2-".repeat(1000);
        let many = "hunter2-\n".repeat(10_000);
        for (secrets, said) in [
            (vec![], "other names"),
            (vec![secret("OTHER", value)], "other names"),
            (vec![secret("KEY", value); 2], "other names"),
            (vec![secret("KEY", "hunter2")], "at least 8 bytes"),
            (vec![secret("KEY", "hunter2-\0")], "without byte 0"),
            (vec![secret("KEY", &long)], "at most 4096 bytes a line"),
            (vec![secret("KEY", &many)], "at most 65536 bytes"),
        ] {
            let error = check(&names, &secrets).unwrap_err().to_string();
            assert!(error.contains(said) && !error.contains("hunter2"), "{said} in {error}");
        }
    }

    #[test]
    fn a_name_is_set_once() {
        let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let variable = pb::Variable { name: "A".into(), value: String::new() };
        check_names(&names(&["KEY", "TOKEN"]), std::slice::from_ref(&variable)).unwrap();
        for wrong in [&["KEY", "KEY"][..], &["A"], &["EBB_X"], &["PATH"], &[""], &["a=b"], &["a,b"]] {
            check_names(&names(wrong), std::slice::from_ref(&variable)).unwrap_err();
        }
        let many: Vec<_> = (0..=SECRETS_MAX).map(|number| format!("N{number}")).collect();
        check_names(&many, &[]).unwrap_err();
    }
}

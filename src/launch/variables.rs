//! Variables of the environment that a user sets for a script, and which ones may not be set. Pure.

/// Parses `NAME=VALUE`.
///
/// # Errors
/// It has no name, or sets a variable that the run needs itself.
pub(crate) fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty() && !name.contains('\0'))
        .ok_or_else(|| "expected NAME=VALUE, e.g. CUBLAS_WORKSPACE_CONFIG=:4096:8".to_owned())?;
    match refusal(name) {
        Some(reason) => Err(format!("{name} cannot be set for a script: {reason}")),
        None => Ok((name.to_owned(), value.to_owned())),
    }
}

/// Returns why a variable may not be set; `None`: it may.
fn refusal(name: &str) -> Option<&'static str> {
    let begins = |begin: &str| name.starts_with(begin);
    if begins("EBB_") || begins("EBBFLOW_") {
        Some("this run has a cluster of its own, which the processes find by these variables")
    } else if begins("LD_") {
        Some("it changes which code the interpreter loads; set it for the whole program instead")
    } else if begins("PYTHON") {
        Some("it changes the interpreter; choose one with --python")
    } else if name == "PATH" {
        Some("it changes which programs are found; choose the interpreter with --python")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_has_a_name_and_any_value() {
        let of = |name: &str, value: &str| Ok((name.to_owned(), value.to_owned()));
        assert_eq!(variable("A=1"), of("A", "1"));
        assert_eq!(variable("A="), of("A", ""));
        assert_eq!(variable("A=b=c"), of("A", "b=c"));
        assert_eq!(variable("PATHS=x"), of("PATHS", "x"));
        for wrong in ["", "A", "=1", "\0=1"] {
            assert!(variable(wrong).unwrap_err().contains("expected NAME=VALUE"), "{wrong:?}");
        }
    }

    #[test]
    fn what_the_run_needs_itself_is_refused_with_the_reason() {
        for (text, reason) in [
            ("EBB_MASTER=x", "a cluster of its own"),
            ("EBBFLOW_MASTER=x", "a cluster of its own"),
            ("LD_PRELOAD=x", "which code"),
            ("PYTHONPATH=x", "--python"),
            ("PATH=x", "--python"),
        ] {
            let said = variable(text).unwrap_err();
            let name = text.split('=').next().unwrap();
            assert!(said.starts_with(name) && said.contains(reason), "{said}");
        }
    }
}

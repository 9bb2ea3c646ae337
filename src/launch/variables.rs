//! Variables of the environment that a user sets for a script, and which ones may not be set. Pure.

use proto::script::variable_refusal;

/// Variables with the number of threads of libraries below PyTorch and NumPy. More threads than one
/// in each process would compete for the processors.
const THREADS: [&str; 3] = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"];

/// The variable that fixes the memory with which cuBLAS computes, and its value. Without it free
/// memory chooses an algorithm, and its bits (NVIDIA: cuBLAS, "Results reproducibility").
const CUBLAS: (&str, &str) = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8");

/// Returns the variables that processes of a script have unless somebody sets others. `is_set`: the
/// environment of this process has a variable.
pub(crate) fn usual(is_set: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    // Lines appear when the script prints them.
    let lines = std::iter::once(("PYTHONUNBUFFERED".to_owned(), "1".to_owned()));
    let fixed = THREADS.map(|name| (name, "1")).into_iter().chain([CUBLAS]);
    let fixed = fixed.filter(|(name, _)| !is_set(name));
    lines.chain(fixed.map(|(name, value)| (name.to_owned(), value.to_owned()))).collect()
}

/// Parses `NAME=VALUE`.
///
/// # Errors
/// It has no name, or sets a variable that the run needs itself.
pub(crate) fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty() && !name.contains('\0'))
        .ok_or_else(|| "expected NAME=VALUE, e.g. CUBLAS_WORKSPACE_CONFIG=:4096:8".to_owned())?;
    match variable_refusal(name) {
        Some(reason) => Err(format!("{name} cannot be set for a script: {reason}")),
        None => Ok((name.to_owned(), value.to_owned())),
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
            ("EBB_MASTER=x", "where the cluster"),
            ("EBBFLOW_MASTER=x", "where the cluster"),
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

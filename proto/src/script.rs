//! What both ends check of a script that travels to a cluster: its description, the names of files
//! in its bundle, and the variables that it may set.

use crate::error::{Error, Result};
use crate::pb;

/// Name of the file with a script's bundle.
pub const BUNDLE: &str = "bundle";

/// Largest size of a bundle in bytes.
pub const BUNDLE_BYTES_MAX: u64 = 256 << 20;

/// Most processes of a script.
pub const PROCESSES_MAX: u32 = 1024;

/// Most processes of an agent.
pub const AGENT_PROCESSES_MAX: u32 = 256;

/// Largest size of a description in bytes.
const DESCRIPTION_BYTES_MAX: usize = 64 << 10;

/// Longest path of a file in a bundle, in bytes.
const PATH_BYTES_MAX: usize = 1024;

/// Most parts of a path of a file in a bundle.
const PATH_PARTS_MAX: usize = 32;

/// Bytes of lines that an agent keeps of each process.
pub const TAIL_BYTES_MAX: usize = 256 << 10;

/// Bytes of lines in one message of an agent, or one reply of the master.
pub const LINES_BYTES_MAX: usize = 128 << 10;

/// Longest line of a process in bytes. A longer one comes in parts.
pub const LINE_BYTES_MAX: usize = 8 << 10;

/// Lines that are told of a process that has left.
pub const LINES_TOLD: usize = 50;

/// Longest line that is told, in bytes.
pub const LINE_BYTES_TOLD: usize = 1024;

/// Checks a description.
///
/// # Errors
/// The first field that is wrong.
pub fn check(script: &pb::Script) -> Result<()> {
    let pb::Script { name, entry, arguments, variables, processes, secrets } = script;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let is_name = (1..=64).contains(&name.len()) && name.chars().all(plain);
    if !is_name || name.chars().all(|c| c == '.') {
        let expected = "1 to 64 letters, digits, `-`, `_` or `.`";
        return Err(field("name", expected, name.escape_debug()));
    }
    if let Some(reason) = path_refusal(entry) {
        return Err(field("entry", "the path of a file in the bundle", format!("one {reason}")));
    }
    if !(1..=PROCESSES_MAX).contains(processes) {
        return Err(field("processes", &format!("1 to {PROCESSES_MAX}"), processes));
    }
    let of_variables = variables.iter().flat_map(|variable| [&variable.name, &variable.value]);
    let texts = arguments.iter().chain(of_variables);
    if texts.clone().any(|text| text.contains('\0')) {
        return Err(field("arguments, variables", "no byte 0", "one"));
    }
    let bytes: usize = texts.map(|text| text.len() + 16).sum();
    if bytes > DESCRIPTION_BYTES_MAX {
        let expected = format!("at most {DESCRIPTION_BYTES_MAX} bytes together");
        return Err(field("arguments, variables", &expected, bytes));
    }
    crate::secret::check_names(secrets, variables)?;
    for pb::Variable { name, .. } in variables {
        if let Some(reason) = variable_refusal(name) {
            return Err(field("variables", reason, name.escape_debug()));
        }
    }
    Ok(())
}

fn field(field: &'static str, expected: &str, found: impl std::fmt::Display) -> Error {
    Error::Field { message: "Script", field, expected: expected.to_owned(), found: format!("`{found}`") }
}

/// Returns why a script may not set a variable of its environment; `None`: it may.
pub fn variable_refusal(name: &str) -> Option<&'static str> {
    let begins = |begin: &str| name.starts_with(begin);
    if name.is_empty() || name.contains(['=', '\0']) {
        Some("a name without `=`")
    } else if begins("EBB") {
        Some("these variables say where the cluster of the script is")
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

/// Returns why a path cannot be that of a file in a bundle; `None`: it can. A path has plain parts
/// with `/` between them, and stays below the bundle's folder.
///
/// ```
/// use proto::script::path_refusal;
///
/// assert_eq!(path_refusal("models/net.py"), None);
/// assert_eq!(path_refusal("../net.py"), Some("has a part `.` or `..`"));
/// ```
pub fn path_refusal(path: &str) -> Option<&'static str> {
    if path.is_empty() || path.len() > PATH_BYTES_MAX {
        return Some("is empty or longer than 1024 bytes");
    }
    if path.starts_with('/') {
        return Some("is absolute");
    }
    if path.contains('\\') || path.chars().any(char::is_control) {
        return Some("has a backslash or a control character");
    }
    let parts: Vec<_> = path.split('/').collect();
    if parts.len() > PATH_PARTS_MAX {
        return Some("has more than 32 parts");
    }
    if parts.iter().any(|part| [".", ".."].contains(part)) {
        return Some("has a part `.` or `..`");
    }
    if parts.iter().any(|part| part.is_empty() || part.len() > 255) {
        return Some("has a part that is empty or longer than 255 bytes");
    }
    None
}

/// Returns a line as it is told to others: without control characters, at most
/// [`LINE_BYTES_TOLD`] bytes.
///
/// ```
/// assert_eq!(proto::script::told("a\u{1b}[2Jb\tc"), "a\\u{1b}[2Jb c");
/// ```
pub fn told(line: &str) -> String {
    let mut told = String::new();
    for letter in line.chars() {
        escape(letter, &mut told);
        if told.len() > LINE_BYTES_TOLD {
            let end = (0..=LINE_BYTES_TOLD - 2).rev().find(|&end| told.is_char_boundary(end));
            told.truncate(end.unwrap_or(0));
            told.push_str("..");
            break;
        }
    }
    told
}

/// Returns a line for a terminal: without control characters, which may move the cursor or hide
/// other lines.
///
/// ```
/// assert_eq!(proto::script::escaped("50%\u{8}\u{8}\u{8}60%"), "50%\\u{8}\\u{8}\\u{8}60%");
/// ```
pub fn escaped(line: &str) -> String {
    let mut escaped = String::with_capacity(line.len());
    line.chars().for_each(|letter| escape(letter, &mut escaped));
    escaped
}

fn escape(letter: char, text: &mut String) {
    match letter {
        '\t' => text.push(' '),
        letter if letter.is_control() => text.extend(letter.escape_default()),
        letter => text.push(letter),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn script() -> pb::Script {
        let variable = pb::Variable { name: "A".into(), value: "1".into() };
        let (name, entry) = ("train".to_owned(), "src/train.py".to_owned());
        let (arguments, variables, secrets) = (vec!["--lr".into()], vec![variable], vec!["KEY".into()]);
        pb::Script { name, entry, arguments, variables, processes: 4, secrets }
    }

    #[test]
    fn a_description_is_refused_by_its_wrong_field() {
        check(&script()).unwrap();
        let variable = |name: &str| pb::Variable { name: name.to_owned(), value: String::new() };
        for (wrong, said) in [
            (pb::Script { name: "a/b".into(), ..script() }, "Script.name"),
            (pb::Script { name: "..".into(), ..script() }, "Script.name"),
            (pb::Script { entry: "../a.py".into(), ..script() }, "Script.entry"),
            (pb::Script { processes: 0, ..script() }, "Script.processes"),
            (pb::Script { processes: PROCESSES_MAX + 1, ..script() }, "Script.processes"),
            (pb::Script { arguments: vec!["a\0".into()], ..script() }, "no byte 0"),
            (pb::Script { arguments: vec!["a".repeat(DESCRIPTION_BYTES_MAX)], ..script() }, "at most 65536"),
            (pb::Script { variables: vec![variable("LD_PRELOAD")], ..script() }, "LD_PRELOAD"),
            (pb::Script { variables: vec![variable("EBBFLOW_MASTER")], ..script() }, "EBBFLOW_MASTER"),
            (pb::Script { variables: vec![variable("PYTHONPATH")], ..script() }, "PYTHONPATH"),
            (pb::Script { variables: vec![variable("PATH")], ..script() }, "PATH"),
            (pb::Script { variables: vec![variable("A=B")], ..script() }, "without `=`"),
            (pb::Script { secrets: vec!["A".into()], ..script() }, "Script.secrets"),
        ] {
            let error = check(&wrong).unwrap_err().to_string();
            assert!(error.contains(said), "{said} in {error}");
        }
    }

    #[test]
    fn a_path_stays_below_its_folder() {
        for good in ["a", "a/b.py", ".config/x", "a b/\u{e9}", "..a/b.."] {
            assert_eq!(path_refusal(good), None, "{good}");
        }
        let (deep, long) = ("a/".repeat(40) + "b", "x".repeat(256));
        let wrong = ["", "/etc/passwd", "..", "a/../b", "a/..", "./a", "a//b", "a/", "a\\b", "a\0", "a\nb"];
        for wrong in wrong.into_iter().chain([deep.as_str(), &long]) {
            assert!(path_refusal(wrong).is_some(), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn no_path_that_is_taken_leaves_its_folder(path in "[a./\\\\ ]{0,12}") {
            use std::path::{Component, Path};
            let plain = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
            prop_assert!(path_refusal(&path).is_some() || plain(Path::new(&path)), "{}", path);
        }

        #[test]
        fn a_told_line_is_short_and_moves_no_cursor(line in ".{0,2000}") {
            let told = told(&line);
            prop_assert!(told.len() <= LINE_BYTES_TOLD && !told.chars().any(char::is_control));
        }
    }
}

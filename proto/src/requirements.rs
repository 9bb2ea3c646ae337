//! The file `requirements.txt` of a script: which lines it may have. Pure.
//!
//! A line names a distribution, its extras, its versions, a marker and hashes. All else is refused:
//! options, URLs and paths would let the file choose where code comes from, and the operator of the
//! agents chooses that.

use std::fmt;

/// Path of the file in a bundle.
pub const FILE: &str = "requirements.txt";

/// Largest size of the file in bytes.
pub const BYTES_MAX: usize = 64 << 10;

/// Most lines of the file.
pub const LINES_MAX: usize = 2000;

/// Operators of versions. Longer ones come before those that they begin with.
const OPERATORS: [&str; 8] = ["===", "==", ">=", "<=", "!=", "~=", ">", "<"];

/// Hash functions of `--hash=`, with the number of hexadecimal digits.
const HASHES: [(&str, usize); 3] = [("sha256", 64), ("sha384", 96), ("sha512", 128)];

/// Requirements that were checked. Their text is theirs alone: it has no comments, no continued
/// lines and no other form of what the user wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requirements(Vec<String>);

impl Requirements {
    /// Reads a file.
    ///
    /// ```
    /// use proto::requirements::Requirements;
    ///
    /// let found = Requirements::parse(b"numpy >= 1.26  # arrays\n").unwrap();
    /// assert_eq!(found.to_string(), "numpy >= 1.26\n");
    /// let refused = Requirements::parse(b"numpy\n-r more.txt\n").unwrap_err();
    /// assert!(refused.starts_with("line 2: `-r`: options are refused"));
    /// ```
    ///
    /// # Errors
    /// The first line that is refused, its number, and what to do.
    pub fn parse(content: &[u8]) -> Result<Self, String> {
        if content.len() > BYTES_MAX {
            return Err(format!("{} bytes, more than {BYTES_MAX}; name fewer requirements", content.len()));
        }
        let text = std::str::from_utf8(content).map_err(|_| "it is no UTF-8; save it as such".to_owned())?;
        let count = text.lines().count();
        if count > LINES_MAX {
            return Err(format!("{count} lines, more than {LINES_MAX}; name fewer requirements"));
        }
        let mut found = Vec::new();
        let (mut begun, mut first) = (String::new(), None);
        for (number, line) in (1..).zip(text.lines()) {
            let at = *first.get_or_insert(number);
            let control = line.chars().find(|&letter| letter != '\t' && letter.is_control());
            if let Some(letter) = control {
                let letter = letter.escape_default();
                return Err(format!("line {number}: the control character {letter}; remove it"));
            }
            let line = without_comment(line);
            let continued = line.strip_suffix('\\');
            begun.push_str(continued.unwrap_or(line));
            if continued.is_some() {
                begun.push(' ');
                continue;
            }
            first = None;
            found
                .extend(requirement(&std::mem::take(&mut begun)).map_err(|why| format!("line {at}: {why}"))?);
        }
        if let Some(at) = first {
            return Err(format!("line {at}: it ends with `\\`, and no line follows; remove the `\\`"));
        }
        Ok(Self(found))
    }

    /// Returns whether nothing is required.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The requirements as a file that pip reads.
impl fmt::Display for Requirements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// Returns a line up to its comment, which begins at a `#` after a space or at the begin.
fn without_comment(line: &str) -> &str {
    let is_begin = |&(at, _): &(usize, &str)| line[..at].chars().next_back().is_none_or(char::is_whitespace);
    let end = line.match_indices('#').find(is_begin).map_or(line.len(), |(at, _)| at);
    line[..end].trim()
}

/// Reads one requirement; `None`: the line is empty.
fn requirement(line: &str) -> Result<Option<String>, String> {
    // pip takes the first word with `-` for the begin of options, also in a marker.
    let words: Vec<_> = line.split_whitespace().collect();
    let options = words.iter().position(|word| word.starts_with('-')).unwrap_or(words.len());
    let (words, options) = words.split_at(options);
    if let Some(option) = options.iter().find(|option| words.is_empty() || !is_hash(option)) {
        return Err(option_refusal(option));
    }
    if words.is_empty() {
        return Ok(None);
    }
    let text = words.join(" ");
    check(&text)?;
    Ok(Some(
        [&text].into_iter().map(String::as_str).chain(options.iter().copied()).collect::<Vec<_>>().join(" "),
    ))
}

fn option_refusal(option: &str) -> String {
    let name = option.split('=').next().unwrap_or(option).escape_debug();
    if name.to_string() == "--hash" {
        let expected = "write --hash=sha256: with 64 hexadecimal digits behind a requirement";
        return format!("`{name}`: {expected}; sha384 and sha512 have 96 and 128");
    }
    format!(
        "`{name}`: options are refused, except --hash behind a requirement; remove it: the operator of the workers \
         chooses the index"
    )
}

/// Returns whether a word is `--hash=FUNCTION:DIGITS`.
fn is_hash(word: &str) -> bool {
    let Some((name, digits)) = word.strip_prefix("--hash=").and_then(|hash| hash.split_once(':')) else {
        return false;
    };
    let length = HASHES.iter().find(|(function, _)| *function == name).map(|&(_, length)| length);
    length == Some(digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
}

/// Checks `NAME[EXTRAS] VERSIONS ; MARKER`.
fn check(text: &str) -> Result<(), String> {
    let shown = text.escape_debug();
    let expected = "expected `NAME`, `NAME[EXTRA]>=VERSION` or `NAME==VERSION ; MARKER`";
    let wrong = |what: &str| Err(format!("`{shown}`: {what}; {expected}"));
    let (required, marker) = text.split_once(';').map_or((text, None), |(text, marker)| (text, Some(marker)));
    let is_path = required.contains(['/', '\\']) || required.starts_with(['.', '~']);
    if is_path || required.contains(['@', ':']) || is_file(required) {
        return Err(format!(
            "`{shown}`: URLs and paths are refused; name a distribution that the index of the workers has"
        ));
    }
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let (name, rest) = split(required, is_name);
    if !is_plain(name) {
        return wrong("it begins with no name");
    }
    let rest = rest.trim_start();
    let versions = match rest.strip_prefix('[').map(|rest| rest.split_once(']')) {
        None => rest,
        Some(Some((extras, rest))) if extras.split(',').map(str::trim).all(is_plain) => rest.trim_start(),
        Some(_) => return wrong("its extras are no names between `[` and `]`"),
    };
    if !versions.is_empty() && !versions.split(',').map(str::trim).all(is_version) {
        return wrong("its versions are none");
    }
    let is_marker = |letter: char| letter.is_ascii_alphanumeric() || " _.'\"<>=!~()+*,-".contains(letter);
    match marker {
        Some(marker) if marker.trim().is_empty() || !marker.chars().all(is_marker) => {
            wrong("what follows `;` is no marker")
        }
        _ => Ok(()),
    }
}

/// Returns the letters at the begin that are `is_part`, and the rest.
fn split(text: &str, is_part: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|letter| !is_part(letter)).unwrap_or(text.len()))
}

/// Returns whether a text is the name of a distribution or of an extra.
fn is_plain(name: &str) -> bool {
    let is_end = |letter: Option<char>| letter.is_some_and(|letter| letter.is_ascii_alphanumeric());
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    is_end(name.chars().next()) && is_end(name.chars().next_back()) && name.chars().all(is_part)
}

/// Returns whether a text is one of the names that pip takes for a file.
fn is_file(text: &str) -> bool {
    let text = text.trim_end().to_ascii_lowercase();
    let endings = [".whl", ".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".tbz", ".txz", ".tlz"];
    !text.contains(['=', '<', '>', '!']) && endings.iter().any(|ending| text.ends_with(ending))
}

/// Returns whether a text is an operator with a version.
fn is_version(text: &str) -> bool {
    let version = OPERATORS.iter().find_map(|operator| text.strip_prefix(operator)).map(str::trim_start);
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || ".*+!_-".contains(letter);
    version.is_some_and(|version| !version.is_empty() && version.chars().all(is_part))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<String, String> {
        Requirements::parse(text.as_bytes()).map(|found| found.to_string())
    }

    #[test]
    fn requirements_are_kept_without_comments_and_on_one_line_each() {
        let hash = format!("--hash=sha256:{}", "0a".repeat(32));
        let text = format!(
            "# all of it\r\nnumpy\n\n  torch >= 2.4, <3  # with CUDA\nray[tune,default]~=2.30\nA.b_c-d==1.0+cu12\n\
             x!=1.*;python_version<'3.12' and extra == \"a-b\"\nhashed==1 \\\n    {hash} \\\n    {hash}\nlast===1#2\n"
        );
        // `#` without a space before it begins no comment, and is no version.
        let refused = parse(&text).unwrap_err();
        assert!(refused.starts_with("line 11: `last===1#2`: its versions"), "{refused}");
        let found = parse(&text.replace("#2\n", "")).unwrap();
        let expected = format!(
            "numpy\ntorch >= 2.4, <3\nray[tune,default]~=2.30\nA.b_c-d==1.0+cu12\n\
             x!=1.*;python_version<'3.12' and extra == \"a-b\"\nhashed==1 {hash} {hash}\nlast===1\n"
        );
        assert_eq!(found, expected);
        assert!(Requirements::parse(b"\n# nothing\n").unwrap().is_empty());
    }

    #[test]
    fn options_are_refused_by_name_and_line() {
        for (line, name) in [
            ("--index-url https://host/simple", "--index-url"),
            ("--extra-index-url=https://host", "--extra-index-url"),
            ("-i https://host", "-i"),
            ("--find-links .", "--find-links"),
            ("-f .", "-f"),
            ("-e .", "-e"),
            ("-r more.txt", "-r"),
            ("-c limits.txt", "-c"),
            ("--trusted-host host", "--trusted-host"),
            ("--pre", "--pre"),
            ("--no-binary :all:", "--no-binary"),
            ("numpy --config-settings=a=b", "--config-settings"),
            ("numpy -e .", "-e"),
            ("numpy ; python_version > '3' --index-url=https://host", "--index-url"),
            ("numpy ; platform_version == 'a -r more.txt'", "-r"),
            ("num\\\npy --pre", "--pre"),
        ] {
            let said = parse(&format!("fine\n\n{line}\n")).unwrap_err();
            assert!(said.starts_with(&format!("line 3: `{name}`: options are refused")), "{line}: {said}");
        }
        for line in ["--hash=sha256:00", "numpy --hash=md5:00", "numpy --hash sha256:00", "numpy --hash=00"] {
            let said = parse(line).unwrap_err();
            assert!(said.starts_with("line 1: `--hash`: write"), "{line}: {said}");
        }
    }

    #[test]
    fn urls_and_paths_are_refused() {
        for line in [
            "numpy @ https://host/numpy.whl",
            "numpy@file:///tmp/x",
            "https://host/x.whl",
            "git+https://host/x",
            "git+ssh://git@host/x",
            "./x.whl",
            "../folder",
            "/tmp/x",
            ".",
            "~/x",
            "folder/x",
            "x\\y",
            "numpy-1.0-py3-none-any.whl",
            "x.tar.gz",
            "x.ZIP",
            "file:x",
        ] {
            let said = parse(&format!("\n{line}")).unwrap_err();
            assert!(said.starts_with("line 2: `") && said.contains("URLs and paths are refused"), "{said}");
        }
    }

    #[test]
    fn what_is_no_requirement_is_refused() {
        for (line, reason) in [
            ("-", "options are refused"),
            ("=1", "no name"),
            ("_a", "no name"),
            ("a-", "no name"),
            ("\u{e9}", "no name"),
            ("a b", "versions"),
            ("a==", "versions"),
            ("a=1", "versions"),
            ("a>1,", "versions"),
            ("a (>1)", "versions"),
            ("a==${HOME}", "versions"),
            ("a[", "extras"),
            ("a[]", "extras"),
            ("a[b", "extras"),
            ("a[../b]", "URLs and paths"),
            ("a;", "marker"),
            ("a; os_name == '$HOME'", "marker"),
            ("a; os_name == '\u{e9}'", "marker"),
            ("a\u{1b}[2J", "control character \\u{1b}"),
            ("# a\u{0}", "control character \\u{0}"),
            ("a\rb", "control character \\r"),
            ("a \\", "no line follows"),
        ] {
            let said = parse(line).unwrap_err();
            assert!(said.starts_with("line 1: ") && said.contains(reason), "{line:?}: {said}");
        }
        assert!(Requirements::parse(b"\xff").unwrap_err().contains("no UTF-8"));
        assert!(parse(&"# long\n".repeat(LINES_MAX + 1)).unwrap_err().contains("lines, more than"));
        assert!(parse(&"#".repeat(BYTES_MAX + 1)).unwrap_err().contains("bytes, more than"));
        assert_eq!(parse(&"#".repeat(BYTES_MAX)).unwrap(), "");
    }

    /// A line that is taken.
    fn good() -> impl Strategy<Value = String> {
        "[a-zA-Z][a-z0-9]{0,6}(\\[[a-z]{1,3}\\])?( ?(==|>=|<|~=) ?[0-9](\\.[0-9])?)?( ; os_name == 'x')?(  # .{0,5})?"
            .prop_filter("no control characters", |line| !line.chars().any(char::is_control))
    }

    proptest! {
        #[test]
        fn what_is_taken_is_read_as_the_same_and_has_nothing_that_pip_takes_for_more(
            text in "[-a=>;@:/.#\\\\$ \t\n\\[\\],'h]{0,40}",
        ) {
            if let Ok(taken) = parse(&text) {
                prop_assert_eq!(parse(&taken), Ok(taken.clone()));
                prop_assert!(!taken.contains(['@', '$', '\\', '#', '\r']), "{}", taken);
                for line in taken.lines() {
                    prop_assert!(line.starts_with(|letter: char| letter.is_ascii_alphanumeric()), "{}", line);
                    let mut words = line.split_whitespace();
                    prop_assert!(words.all(|word| !word.starts_with('-') || is_hash(word)), "{}", line);
                    let required = line.split(';').next().unwrap_or_default();
                    prop_assert!(!required.contains(['/', ':']), "{}", line);
                }
            }
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(taken) = Requirements::parse(&bytes) {
                prop_assert_eq!(Requirements::parse(taken.to_string().as_bytes()), Ok(taken));
            }
        }

        #[test]
        fn an_option_is_found_wherever_it_is(
            before in proptest::collection::vec(good(), 0..5),
            after in proptest::collection::vec(good(), 0..5),
            option in "-[a-z]|--[a-z]{2,8}(=[a-z:/.]{0,8})?",
            behind in proptest::option::of(good().prop_map(|line| line.split(" #").next().unwrap_or("").to_owned())),
        ) {
            let line = behind.map_or_else(|| option.clone(), |name| format!("{name} {option}"));
            let fine = [&before[..], &after[..]].concat().join("\n");
            prop_assert!(parse(&fine).is_ok(), "{:?}", parse(&fine));
            let lines = [&before[..], &[line], &after[..]].concat().join("\n");
            let said = parse(&lines).unwrap_err();
            prop_assert!(said.starts_with(&format!("line {}: `-", before.len() + 1)), "{}", said);
        }
    }
}

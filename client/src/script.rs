//! A script on its way to the agents of a cluster: its description, the values of its secrets, and
//! the files of its folder.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use proto::pb;
use proto::script::BUNDLE_BYTES_MAX;

use crate::bundle::Bundle;
use crate::{Error, Result};

/// Ending of the name of a script.
const ENDING: &str = ".py";

/// Returns whether this is a script and no job file.
pub fn is_script(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "py")
}

/// A script that is ready to be sent.
#[derive(Clone, Debug)]
pub struct ScriptSubmission {
    /// The description.
    pub script: pb::Script,
    /// The values of the secrets, in the order of the description.
    pub secrets: Vec<pb::Secret>,
    /// The files of the folder of the script.
    pub bundle: Bundle,
}

impl ScriptSubmission {
    /// Reads the script at `path` and the files of its folder. `wish` has what the user asks for:
    /// its entry is not read, and an empty name stands for the name of the file. `value_of` returns
    /// the value of a secret, if there is one.
    ///
    /// # Errors
    /// The script cannot be read or cannot travel, a field of `wish` is wrong, or a secret has no
    /// value that can be redacted.
    pub fn read(path: &Path, wish: pb::Script, value_of: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let wrong = |reason: &str| Error::Bundle { path: path.to_owned(), reason: reason.to_owned() };
        if !is_script(path) {
            return Err(wrong(&format!("is no Python script; its name must end in {ENDING}")));
        }
        let unread = |error: std::io::Error| wrong(&format!("cannot be read: {error}"));
        let bytes = File::open(path).and_then(|file| file.metadata()).map_err(unread)?.len();
        // The advice for other large files, to name them in .gitignore, would not help here.
        if bytes > BUNDLE_BYTES_MAX {
            return Err(wrong(&format!(
                "has {bytes} bytes, more than the {BUNDLE_BYTES_MAX} of a bundle; keep data out of the script, and \
                 let it read them from a place that all machines reach"
            )));
        }
        let script = described(path, wish)?;
        let secret = |name: &String| match value_of(name) {
            Some(value) => match value.into_string() {
                Ok(value) => Ok(pb::Secret { name: name.clone(), value }),
                // The value is a secret in this form too.
                Err(_) => Err(Error::SecretNotText { name: name.clone() }),
            },
            None => Err(Error::NoSecret { name: name.clone() }),
        };
        let secrets = script.secrets.iter().map(secret).collect::<Result<Vec<_>>>()?;
        proto::secret::check(&script.secrets, &secrets)?;
        let bundle = Bundle::pack(&folder(path))?;
        if bundle.files.iter().all(|(file, _)| *file != script.entry) {
            return Err(wrong(".gitignore names the script itself, so it would not travel"));
        }
        Ok(Self { script, secrets, bundle })
    }
}

/// Returns the whole description of the script at `path`.
fn described(path: &Path, wish: pb::Script) -> Result<pb::Script> {
    let entry = path.file_name().and_then(|name| name.to_str());
    let entry = entry
        .ok_or_else(|| Error::Bundle { path: path.to_owned(), reason: "its name is no UTF-8".to_owned() })?;
    let stem = entry.strip_suffix(ENDING).unwrap_or(entry);
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name = match wish.name.is_empty() {
        true => stem.chars().map(plain).take(64).collect(),
        false => wish.name.clone(),
    };
    let script = pb::Script { name, entry: entry.to_owned(), ..wish };
    proto::script::check(&script)?;
    Ok(script)
}

/// Returns the folder whose files travel: that of the script.
fn folder(script: &Path) -> PathBuf {
    match script.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    fn wish() -> pb::Script {
        pb::Script { processes: 1, ..Default::default() }
    }

    fn refusal(path: &Path, wish: pb::Script) -> String {
        ScriptSubmission::read(path, wish, |_| None).unwrap_err().to_string()
    }

    #[test]
    fn a_script_has_the_name_of_its_file_unless_the_user_gives_one() {
        let script = described(Path::new("src/my_train.py"), wish()).unwrap();
        assert_eq!((script.name.as_str(), script.entry.as_str()), ("my_train", "my_train.py"));
        assert_eq!(described(Path::new("a+b.py"), wish()).unwrap().name, "a-b");
        let named = |name: &str| described(Path::new("a.py"), pb::Script { name: name.into(), ..wish() });
        assert_eq!(named("b").unwrap().name, "b");
        assert!(named("a/b").unwrap_err().to_string().contains("Script.name"));
        assert_eq!((folder(Path::new("a.py")), folder(Path::new("b/a.py"))), (".".into(), "b".into()));
    }

    #[test]
    fn what_cannot_travel_is_refused_in_the_order_in_which_a_user_repairs_it() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("train.py");
        assert!(refusal(&dir.path().join("job.toml"), wish()).contains("job.toml: is no Python script"));
        assert!(refusal(&script, wish()).contains("train.py: cannot be read"));
        File::create(&script).unwrap().set_len(2 << 30).unwrap();
        let large = refusal(&script, wish());
        assert!(large.contains("train.py: has 2147483648 bytes, more than the 268435456"), "{large}");
        assert!(!large.contains(".gitignore"), "{large}");
        fs::write(&script, "").unwrap();
        assert!(refusal(&script, pb::Script::default()).contains("Script.processes"));
        let secret = || pb::Script { secrets: vec!["KEY".to_owned()], ..wish() };
        let missing = refusal(&script, secret());
        assert!(missing.starts_with("secret KEY: the environment has no such variable; set it"), "{missing}");
        assert!(!missing.contains("UTF-8"), "{missing}");
        let with = |value: &[u8]| {
            let value = OsString::from_vec(value.to_vec());
            ScriptSubmission::read(&script, secret(), |_| Some(value.clone()))
        };
        let no_text = with(b"long enough \xff").unwrap_err();
        assert!(matches!(&no_text, Error::SecretNotText { name } if name == "KEY"), "{no_text:?}");
        assert!(no_text.to_string().contains("no UTF-8, and secrets travel as text; encode it"), "{no_text}");
        assert!(!format!("{no_text:?} {no_text}").contains("long enough"), "{no_text:?}");
        assert!(with(b"short").unwrap_err().to_string().contains("to redact it"));
        let read = with(b"long enough").unwrap();
        assert_eq!((read.secrets[0].value.as_str(), read.bundle.files.len()), ("long enough", 1));
        fs::write(dir.path().join(".gitignore"), "*.py").unwrap();
        assert!(refusal(&script, wish()).contains(".gitignore names the script itself"));
    }
}

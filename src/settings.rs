//! The settings of a role, and where each comes from: flag over environment over file over default.
//!
//! [`roles`] has one table for each role. From it come the role's flags, its environment variables,
//! the keys of its file, and the output of `ebb config show`.

pub(crate) mod roles;
pub(crate) mod scripts;

use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Command};
use model::device::Choice;
use proto::size;
use serde::de::DeserializeOwned;
use toml::Value;

use crate::config::Environment;

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Any text: a name, an address, a URL.
    Text,
    /// Several texts: a flag that may be repeated, a variable with commas, or a list in a file.
    Texts,
    /// A file or folder.
    Path,
    /// A time such as `500ms`, `30s`, `2m`.
    Duration,
    /// A number of bytes.
    Bytes,
    /// A number.
    Count,
    /// `true` or `false`. The flag alone is `true`.
    Switch,
    /// The devices of a worker, or the device of a ps.
    Device,
}

impl Kind {
    /// Returns the unit of a value, for people.
    const fn unit(self) -> &'static str {
        match self {
            Self::Text | Self::Device => "text",
            Self::Texts => "texts",
            Self::Path => "path",
            Self::Duration => "duration",
            Self::Bytes => "bytes",
            Self::Count => "count",
            Self::Switch => "switch",
        }
    }

    /// Parses the text of a flag or variable.
    fn parse(self, text: &str) -> Result<Value, String> {
        let value = match self {
            Self::Bytes => Value::String(text.trim().replace('_', "")),
            Self::Count => {
                let number = text.trim().replace('_', "").parse().map(Value::Integer);
                number.map_err(|_| format!("`{text}` is no number; write e.g. 1024"))?
            }
            Self::Switch => match text.trim().to_ascii_lowercase().as_str() {
                "1" | "true" | "yes" => Value::Boolean(true),
                "0" | "false" | "no" => Value::Boolean(false),
                _ => return Err(format!("`{text}` is neither true nor false")),
            },
            Self::Texts => {
                let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
                Value::Array(parts.map(|part| Value::String(part.to_owned())).collect())
            }
            Self::Text | Self::Path | Self::Duration | Self::Device => Value::String(text.to_owned()),
        };
        self.read(&value)
    }

    /// Returns a value as the options have it, if it is of this kind.
    fn read(self, value: &Value) -> Result<Value, String> {
        let same = || value.clone();
        match (self, value) {
            (Self::Text | Self::Path, Value::String(_)) | (Self::Switch, Value::Boolean(_)) => Ok(same()),
            (Self::Bytes | Self::Count, Value::Integer(0..)) => Ok(same()),
            (Self::Bytes, Value::String(text)) if text == "0" => Ok(Value::Integer(0)),
            (Self::Bytes, Value::String(text)) => {
                let bytes = size::parse(text).map_err(|why| format!("`{text}`: {why}"))?;
                i64::try_from(bytes).map(Value::Integer).map_err(|_| format!("`{text}` is too large"))
            }
            (Self::Texts, Value::Array(texts)) if texts.iter().all(Value::is_str) => Ok(same()),
            (Self::Duration, Value::String(text)) => proto::duration::parse(text).map(|_| same()),
            (Self::Device, Value::String(text)) => {
                text.parse::<Choice>().map(|_| same()).map_err(|error| error.to_string())
            }
            _ => Err(format!(
                "expected {}, found {value}",
                match self {
                    Self::Text | Self::Path | Self::Device => "a text in quotes",
                    Self::Texts => "a list of texts in quotes",
                    Self::Duration => "a duration in quotes, e.g. \"30s\"",
                    Self::Bytes => "a number of bytes, e.g. 1024 or \"64MiB\"",
                    Self::Count => "a number, at least 0",
                    Self::Switch => "true or false",
                }
            )),
        }
    }
}

/// One setting of a role.
#[derive(Debug)]
pub(crate) struct Setting {
    /// The name in files. With `-` for `_` it is the flag.
    pub(crate) key: &'static str,
    pub(crate) kind: Kind,
    /// The placeholder of the value in `--help`.
    pub(crate) value_name: &'static str,
    pub(crate) heading: &'static str,
    pub(crate) help: &'static str,
    pub(crate) of: Of,
    /// The environment variable, if its name is not made of role and key.
    pub(crate) variable: Option<&'static str>,
}

/// The owner of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// The role's options, which have the default.
    Options,
    /// The process, with the default as a user would write it.
    Process(Option<&'static str>),
}

impl Setting {
    fn flag(&self) -> String {
        self.key.replace('_', "-")
    }

    /// Returns the default as a user would write it. `defaults` are those of the role's options.
    fn default(&self, defaults: &toml::Table) -> Option<String> {
        match self.of {
            Of::Options => defaults.get(self.key).map(written).filter(|default| !default.is_empty()),
            Of::Process(default) => default.map(str::to_owned),
        }
    }
}

/// A role that has settings.
pub(crate) trait Role: Clone + fmt::Debug + Send + Sync + 'static {
    /// The name of the role in commands.
    const NAME: &'static str;

    /// Returns all settings of the role.
    fn settings() -> Vec<Setting>;

    /// Returns the defaults of the role's options.
    fn defaults() -> toml::Table;

    /// Returns every violated relation between settings, in words.
    fn violations(settings: &Settings) -> Vec<String>;
}

fn variable(role: &str, setting: &Setting) -> String {
    let made = || format!("EBB_{}_{}", role, setting.key).to_uppercase();
    setting.variable.map_or_else(made, str::to_owned)
}

/// A role's part of the command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags<R> {
    /// The file of `--config`.
    file: Option<PathBuf>,
    given: toml::Table,
    role: PhantomData<R>,
}

/// The id and flag of the role's file.
const FILE: &str = "config";

impl<R: Role> clap::Args for Flags<R> {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new(FILE)
            .long(FILE)
            .value_name("FILE")
            .value_parser(clap::value_parser!(PathBuf))
            .help("File with settings (TOML). Flags and environment variables override it");
        let defaults = R::defaults();
        R::settings().into_iter().fold(command.arg(file), |command, setting| {
            let default = setting.default(&defaults).map(|default| format!(" [default: {default}]"));
            let default = default.unwrap_or_default();
            let help = format!("{} [env: {}]{default}", setting.help, variable(R::NAME, &setting));
            let kind = setting.kind;
            let arg = Arg::new(setting.key).long(setting.flag()).help(help).help_heading(setting.heading);
            let arg = match kind {
                Kind::Switch => return command.arg(arg.action(ArgAction::SetTrue)),
                Kind::Texts => arg.action(ArgAction::Append),
                _ => arg,
            };
            let parser = ValueParser::new(move |text: &str| kind.parse(text));
            command.arg(arg.value_name(setting.value_name).value_parser(parser))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<R: Role> clap::FromArgMatches for Flags<R> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let value = |setting: &Setting| match setting.kind {
            Kind::Switch => matches.get_flag(setting.key).then_some(Value::Boolean(true)),
            Kind::Texts => {
                let all = matches.get_many::<Value>(setting.key)?.filter_map(Value::as_array).flatten();
                Some(Value::Array(all.cloned().collect()))
            }
            _ => matches.get_one::<Value>(setting.key).cloned(),
        };
        let settings = R::settings().into_iter();
        let given = settings.filter_map(|setting| Some((setting.key.to_owned(), value(&setting)?)));
        Ok(Self { file: matches.get_one(FILE).cloned(), given: given.collect(), role: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    File(PathBuf),
    Environment(String),
    Flag(String),
}

impl Origin {
    /// Returns the name of the kind of source.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File(_) => "file",
            Self::Environment(_) => "environment",
            Self::Flag(_) => "flag",
        }
    }

    /// Returns the file, variable or flag.
    pub(crate) fn place(&self) -> Option<String> {
        match self {
            Self::Default => None,
            Self::File(path) => Some(path.display().to_string()),
            Self::Environment(name) | Self::Flag(name) => Some(name.clone()),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place() {
            Some(place) => write!(f, "{} {place}", self.name()),
            None => f.write_str(self.name()),
        }
    }
}

/// One setting with its value.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) setting: Setting,
    /// `None` for a setting without default that nobody set.
    pub(crate) value: Option<Value>,
    pub(crate) origin: Origin,
}

impl Row {
    pub(crate) const fn unit(&self) -> &'static str {
        self.setting.kind.unit()
    }

    /// Returns the value as a user would write it.
    pub(crate) fn shown(&self) -> Option<String> {
        self.value.as_ref().map(written)
    }
}

/// All settings of one process of a role.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) role: &'static str,
    pub(crate) rows: Vec<Row>,
}

impl Settings {
    /// Joins the command line, the environment and the file.
    ///
    /// # Errors
    /// The file cannot be read; or every unknown key, wrong value and contradiction at once.
    pub(crate) fn of<R: Role>(flags: &Flags<R>, environment: &Environment) -> Result<Self> {
        let mut wrong = Vec::new();
        let settings = R::settings();
        let file = flags.file.as_deref().map(read).transpose()?.unwrap_or_default();
        let path = flags.file.clone().unwrap_or_default();
        for key in file.keys().filter(|key| settings.iter().all(|setting| setting.key != **key)) {
            let near = proto::hint::nearest(key, settings.iter().map(|setting| setting.key));
            let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            wrong.push(format!("{}: a {} has no setting `{key}`{hint}", path.display(), R::NAME));
        }
        let defaults = R::defaults();
        let mut rows = Vec::new();
        for setting in settings {
            let variable = variable(R::NAME, &setting);
            let mut found = match setting.of {
                Of::Options => defaults.get(setting.key).cloned(),
                Of::Process(default) => default.map(|text| Value::String(text.to_owned())),
            };
            let mut origin = Origin::Default;
            let mut take = |value: Result<Value, String>, from: Origin| match value {
                Ok(value) => (found, origin) = (Some(value), from),
                Err(why) => wrong.push(format!("{from}: {}: {why}", setting.key)),
            };
            if let Some(value) = file.get(setting.key) {
                take(setting.kind.read(value), Origin::File(path.clone()));
            }
            if let Some(text) = environment.variable(&variable) {
                take(setting.kind.parse(text), Origin::Environment(variable));
            }
            if let Some(value) = flags.given.get(setting.key) {
                take(Ok(value.clone()), Origin::Flag(format!("--{}", setting.flag())));
            }
            rows.push(Row { setting, value: found, origin });
        }
        let settings = Self { role: R::NAME, rows };
        wrong.extend(R::violations(&settings));
        if !wrong.is_empty() {
            let lines: String = wrong.iter().map(|line| format!("\n  - {line}")).collect();
            bail!("the settings of this {} are wrong:{lines}", R::NAME);
        }
        Ok(settings)
    }

    fn row(&self, key: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.setting.key == key)
    }

    /// Returns the text of a setting, if it has one.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.row(key)?.value.as_ref()?.as_str()
    }

    /// Returns the path of a setting, if it has one.
    pub(crate) fn path(&self, key: &str) -> Option<PathBuf> {
        self.text(key).map(PathBuf::from)
    }

    /// Returns the number of a setting, if it has one.
    pub(crate) fn count(&self, key: &str) -> Option<u64> {
        self.row(key)?.value.as_ref()?.as_integer()?.try_into().ok()
    }

    /// Returns the number of bytes of a setting, if it has one.
    pub(crate) fn bytes(&self, key: &str) -> Option<u64> {
        let value = self.row(key)?.value.as_ref()?;
        Kind::Bytes.read(value).ok()?.as_integer()?.try_into().ok()
    }

    /// Returns the duration of a setting, if it has one.
    pub(crate) fn duration(&self, key: &str) -> Option<std::time::Duration> {
        proto::duration::parse(self.text(key)?).ok()
    }

    /// True for a switch that is on.
    pub(crate) fn switch(&self, key: &str) -> bool {
        self.row(key).and_then(|row| row.value.as_ref()?.as_bool()).unwrap_or_default()
    }

    /// True for a setting that somebody set.
    pub(crate) fn is_given(&self, key: &str) -> bool {
        self.row(key).is_some_and(|row| row.origin != Origin::Default)
    }

    /// Returns the role's options. Fields that are no setting have their defaults.
    ///
    /// # Errors
    /// A value does not fit its field, e.g. because a number is too large.
    pub(crate) fn options<T: DeserializeOwned>(&self) -> Result<T, String> {
        let of_options = self.rows.iter().filter(|row| row.setting.of == Of::Options);
        let table: toml::Table =
            of_options.filter_map(|row| Some((row.setting.key.to_owned(), row.value.clone()?))).collect();
        table.try_into().map_err(|error: toml::de::Error| error.message().to_owned())
    }
}

fn read(path: &Path) -> Result<toml::Table> {
    let text = std::fs::read_to_string(path).with_context(|| format!("--config {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("--config {}", path.display()))
}

/// Returns the value as a user would write it: without the quotes of TOML.
fn written(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(written).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::roles::{Master, Ps, Worker};
    use super::*;

    #[derive(Debug, Parser)]
    struct Line<R: Role> {
        #[command(flatten)]
        flags: Flags<R>,
    }

    fn settings<R: Role>(line: &str, file: &str, variables: &[(&str, &str)]) -> Result<Settings, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("role.toml");
        std::fs::write(&path, file).unwrap();
        let line = ["ebb", "--config", path.to_str().unwrap()].into_iter().chain(line.split_whitespace());
        let flags = Line::<R>::try_parse_from(line).map_err(|error| error.to_string())?.flags;
        Settings::of(&flags, &Environment::with(variables)).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn a_flag_wins_over_the_environment_over_the_file_over_the_default() {
        let file = "death = '20s'\njobs_max = 7\nheartbeat = '3s'\n";
        let variables = [("EBB_MASTER_DEATH", "30s"), ("EBB_MASTER_JOBS_MAX", "8")];
        let settings = settings::<Master>("--death 40s", file, &variables).unwrap();
        let found = |key: &str| {
            let row = settings.row(key).unwrap();
            (row.shown().unwrap(), row.origin.name())
        };
        assert_eq!(found("death"), ("40s".to_owned(), "flag"));
        assert_eq!(found("jobs_max"), ("8".to_owned(), "environment"));
        assert_eq!(found("heartbeat"), ("3s".to_owned(), "file"));
        assert_eq!(found("ps_grace"), ("30s".to_owned(), "default"));
        let options: master::Options = settings.options().unwrap();
        assert_eq!((options.jobs_max, options.death.as_secs(), options.ps_grace.as_secs()), (8, 40, 30));
    }

    #[test]
    fn a_setting_with_several_values_is_a_repeated_flag_a_list_or_texts_with_commas() {
        let places = |line: &str, file: &str, variables: &[(&str, &str)]| {
            let settings = settings::<Master>(line, file, variables).unwrap();
            settings.options::<master::Options>().unwrap().checkpoints
        };
        assert_eq!(places("", "", &[]), [""; 0]);
        assert_eq!(places("", "checkpoints = ['/a', 's3://b/c']", &[]), ["/a", "s3://b/c"]);
        let variable = ("EBB_MASTER_CHECKPOINTS", "/a, /b,");
        assert_eq!(places("", "checkpoints = ['/c']", &[variable]), ["/a", "/b"]);
        assert_eq!(places("--checkpoints /d --checkpoints /e", "", &[variable]), ["/d", "/e"]);
        let said = settings::<Master>("--checkpoints runs", "", &[]).unwrap_err();
        assert!(said.contains("checkpoints: checkpoint store `runs`"), "{said}");
        let said = settings::<Master>("", "checkpoints = '/a'", &[]).unwrap_err();
        assert!(said.contains("expected a list of texts in quotes"), "{said}");
    }

    #[test]
    fn bounds_of_requirements_need_an_index() {
        let allowed =
            |line: &str| settings::<Worker>(line, "", &[]).map(|found| scripts::requirements(&found));
        assert!(allowed("").unwrap().is_none());
        let found = allowed("--script-requirements https://h/s").unwrap().unwrap();
        assert_eq!((found.index.as_str(), found.time.as_secs(), found.disk), ("https://h/s", 600, 4 << 30));
        let line = "--script-requirements https://h --script-requirements-time 1s --script-requirements-disk";
        assert_eq!(allowed(&format!("{line} 5MB")).unwrap().unwrap().disk, 5_000_000);
        let nothing = format!("{line} 0");
        for (line, reason) in [
            ("--script-requirements-time 1s", "only with --script-requirements"),
            ("--script-requirements-disk 1", "only with --script-requirements"),
            ("--script-requirements http://h", "script_requirements: https://"),
            (nothing.as_str(), "script_requirements_disk: more than zero"),
            ("--script-requirements https://h --script-requirements-time 0s", "_time: more than zero"),
        ] {
            assert!(allowed(line).unwrap_err().contains(reason), "{line}");
        }
    }

    #[test]
    fn bytes_are_a_number_or_a_text_with_a_unit() {
        let memory = |line: &str, file: &str, variables: &[(&str, &str)]| {
            settings::<Worker>(line, file, variables)?.options::<worker::Options>().map(|of| of.data_memory)
        };
        assert_eq!(memory("", "data_memory = 1_000", &[]), Ok(1000));
        assert_eq!(memory("", "data_memory = '64MiB'", &[]), Ok(64 << 20));
        assert_eq!(memory("", "", &[("EBB_WORKER_DATA_MEMORY", "2 kB")]), Ok(2000));
        assert_eq!(memory("--data-memory 1_024KiB", "", &[]), Ok(1 << 20));
        for wrong in ["8 floppies", "-1", "99999999TiB"] {
            let said = memory("", &format!("data_memory = '{wrong}'"), &[]).unwrap_err();
            assert!(said.contains("data_memory") && said.contains(wrong), "{said}");
        }
    }

    #[test]
    fn everything_that_is_wrong_is_said_at_once() {
        let file = "deth = '20s'\njobs_max = 'many'\npush_timeout = 3\n";
        let said = settings::<Ps>("", file, &[("EBB_PS_DRAIN", "soon")]).unwrap_err();
        for part in [
            "a ps has no setting `deth`",
            "jobs_max: expected a number, at least 0, found \"many\"",
            "push_timeout: expected a duration in quotes",
            "environment EBB_PS_DRAIN: drain: `soon` is no duration",
        ] {
            assert!(said.contains(part), "{part} missing in {said}");
        }
        let said = settings::<Ps>("", "push_timout = '3s'", &[]).unwrap_err();
        assert!(said.contains("did you mean `push_timeout`?"), "{said}");
        let said = settings::<Worker>("--prefetch 0 --threads 0", "device = 'tpu'", &[]).unwrap_err();
        for part in ["prefetch", "threads", "tpu"] {
            assert!(said.contains(part), "{part} missing in {said}");
        }
        for devices in ["all", "cuda:0,1"] {
            let said = settings::<Worker>("", &format!("exchange_device = '{devices}'"), &[]).unwrap_err();
            assert!(said.contains(&format!("exchange_device: one device, found `{devices}`")), "{said}");
        }
        let said = settings::<Master>("--leader-ttl 9s --heartbeat 4s", "", &[]).unwrap_err();
        for part in ["leader_ttl: is of use only with --etcd", "death = 5s is below two heartbeats of 4s"] {
            assert!(said.contains(part), "{part} missing in {said}");
        }
        assert!(settings::<Ps>("--drain soon", "", &[]).unwrap_err().contains("is no duration"));
    }

    #[test]
    fn the_reference_has_every_setting_with_its_variable_and_default() {
        fn check<R: Role>(reference: &str) {
            let (defaults, name) = (R::defaults(), R::NAME);
            let part = reference.split(&format!("\n## `ebb {name}`\n")).nth(1).unwrap();
            let part = part.split("\n## ").next().unwrap();
            let keys = reference.split("\n## Keys\n").nth(1).unwrap();
            for setting in R::settings() {
                let part = if setting.heading == roles::SECURITY { keys } else { part };
                let line = part.lines().find(|line| line.starts_with(&format!("| `{}` |", setting.key)));
                let line = line.unwrap_or_else(|| panic!("docs/settings.md, {name}: no `{}`", setting.key));
                assert!(line.contains(setting.kind.unit()), "{line}: {}", setting.kind.unit());
                let default = setting.default(&defaults);
                // What depends on the machine is described.
                let of_machine = ["threads", "scratch", "data_threads", "data_memory"].contains(&setting.key);
                if let Some(default) = default.filter(|_| !of_machine) {
                    assert!(line.contains(&format!("`{default}`")), "{line}: default {default}");
                }
                if let Some(variable) = setting.variable {
                    assert!(line.contains(variable), "{line}: {variable}");
                }
            }
        }
        let reference = include_str!("../docs/settings.md");
        check::<Master>(reference);
        check::<Ps>(reference);
        check::<Worker>(reference);
    }
}

//! Licences, bans and sources of all dependencies, by `deny.toml`, so that the check needs no
//! program that a fresh machine lacks.
//!
//! `deny.toml` is the file of cargo-deny, which also knows advisories. The lists in it are checked
//! here in the same way. Another setting than those of [`FIXED`] is an error and not overlooked.

use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// What is in `deny.toml` beside its lists and advisories, which change by themselves and need the
/// network.
const FIXED: &str = r#"
graph = { all-features = true }
licenses = { private = { ignore = true } }
bans = { multiple-versions = "allow", wildcards = "deny", allow-wildcard-paths = true }
sources = { unknown-registry = "deny", unknown-git = "deny" }
"#;

/// crates.io, as cargo names it.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The lists of `deny.toml`.
struct Deny {
    targets: Vec<String>,
    /// Licences.
    allow: BTreeSet<String>,
    exceptions: Vec<Rule>,
    banned: Vec<Rule>,
    features: Vec<Rule>,
}

/// What is so for one crate: the licences that it may have besides, or features that it must not
/// have.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(rename = "crate")]
    name: String,
    #[serde(default)]
    allow: BTreeSet<String>,
    #[serde(default)]
    deny: BTreeSet<String>,
    #[serde(default)]
    reason: String,
}

/// Checks everything that is built for any of the targets with all features.
///
/// # Errors
/// All that breaks a rule of `deny.toml`; or cargo does not say what there is.
pub(super) fn check() -> Result<()> {
    let path = workspace::root().join("deny.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read `{}`", path.display()))?;
    let deny = Deny::parse(&text)?;
    let mut command = workspace::cargo();
    command.args(["metadata", "--format-version", "1", "--locked", "--all-features"]);
    for target in &deny.targets {
        command.args(["--filter-platform", target]);
    }
    let output = command.current_dir(workspace::root()).output().context("run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let (count, wrong) = deny.breaches(&serde_json::from_slice(&output.stdout)?);
    ensure!(wrong.is_empty(), "deny.toml forbids:\n  {}", wrong.join("\n  "));
    ensure!(count > 100, "cargo metadata names only {count} packages");
    eprintln!("{count} packages keep the rules of deny.toml");
    Ok(())
}

impl Deny {
    fn parse(text: &str) -> Result<Self> {
        let mut rest: toml::Table = text.parse().context("deny.toml")?;
        let deny = Self {
            targets: taken(&mut rest, "graph", "targets")?,
            allow: taken(&mut rest, "licenses", "allow")?,
            exceptions: taken(&mut rest, "licenses", "exceptions")?,
            banned: taken(&mut rest, "bans", "deny")?,
            features: taken(&mut rest, "bans", "features")?,
        };
        rest.remove("advisories");
        ensure!(rest == FIXED.parse()?, "deny.toml: beside its lists expected{FIXED}found\n{rest}");
        Ok(deny)
    }

    /// Returns how many packages there are, and what is wrong with them.
    fn breaches(&self, metadata: &Value) -> (usize, Vec<String>) {
        let nodes = list(&metadata["resolve"]["nodes"]);
        let features: BTreeMap<_, _> = nodes.map(|node| (text(&node["id"]), &node["features"])).collect();
        let mut wrong = Vec::new();
        for package in list(&metadata["packages"]) {
            let Some(features) = features.get(text(&package["id"])) else { continue };
            let name = text(&package["name"]);
            let mut say = |why: String| wrong.push(format!("{name} {}: {why}", text(&package["version"])));
            match package["source"].as_str() {
                // One of ours.
                None => {
                    let any = |one: &&Value| one["req"] == "*" && one["path"].is_null();
                    let wildcards = list(&package["dependencies"]).filter(any);
                    wildcards.for_each(|one| say(format!("`{}` may have any version", text(&one["name"]))));
                    if package["publish"].as_array().is_some_and(Vec::is_empty) {
                        continue;
                    }
                }
                Some(CRATES_IO) => {}
                Some(other) => say(format!("its source `{other}` is not crates.io")),
            }
            let excepted = self.exceptions.iter().filter(|rule| rule.name == name);
            let excepted: Vec<_> = excepted.flat_map(|rule| &rule.allow).collect();
            let allowed = |id: &str| self.allow.contains(id) || excepted.iter().any(|allow| *allow == id);
            let license = text(&package["license"]);
            match satisfied(license, &allowed) {
                Ok(true) => {}
                Ok(false) => say(format!("its licence `{license}` is not in licenses.allow")),
                Err(error) => say(format!("its licence `{license}` is not understood: {error:#}")),
            }
            for ban in self.banned.iter().filter(|ban| ban.name == name) {
                say(format!("is banned: {}", ban.reason));
            }
            for ban in self.features.iter().filter(|ban| ban.name == name) {
                let on = list(features).map(text).filter(|feature| ban.deny.contains(*feature));
                on.for_each(|on| say(format!("its feature `{on}` is banned: {}", ban.reason)));
            }
        }
        (features.len(), wrong)
    }
}

/// Removes a list from a section and returns it; empty if there is none.
fn taken<T: DeserializeOwned>(table: &mut toml::Table, section: &str, list: &str) -> Result<T> {
    let section = table.get_mut(section).and_then(toml::Value::as_table_mut);
    let list = section.and_then(|section| section.remove(list));
    list.unwrap_or_else(|| toml::Value::Array(Vec::new()))
        .try_into()
        .context("deny.toml: xtask knows no such setting")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns whether a licence expression (SPDX, or with the `/` of old) can be met with licences
/// that are allowed.
fn satisfied(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    let met = any_of(&mut rest, allowed)?;
    ensure!(rest.is_empty(), "`{}` is left over", rest.join(" "));
    Ok(met)
}

/// Evaluates an expression in which `AND` binds more than `OR`.
fn any_of(words: &mut &[&str], allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let (mut any, mut all) = (false, true);
    loop {
        let (met, rest) = match *words {
            ["(", rest @ ..] => {
                *words = rest;
                let met = any_of(words, allowed)?;
                let [")", rest @ ..] = *words else { bail!("a bracket is not closed") };
                (met, rest)
            }
            // An exception gives more rights, it takes none.
            [id, "WITH", exception, rest @ ..] => {
                (allowed(id) || allowed(&format!("{id} WITH {exception}")), rest)
            }
            [id, rest @ ..] if !["AND", "OR", "WITH", ")"].contains(id) => (allowed(id), rest),
            _ => bail!("expected a licence, found `{}`", words.join(" ")),
        };
        all &= met;
        *words = match rest {
            ["AND", rest @ ..] => rest,
            ["OR", rest @ ..] => {
                any |= std::mem::replace(&mut all, true);
                rest
            }
            _ => {
                *words = rest;
                return Ok(any || all);
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_licence_expression_is_met_by_what_is_allowed() {
        let allowed = |id: &str| ["MIT", "Apache-2.0", "ISC"].contains(&id);
        for (expression, met) in [
            ("MIT", true),
            ("GPL-3.0-only", false),
            ("GPL-3.0-only OR MIT", true),
            ("MIT/GPL-2.0", true),
            ("Apache-2.0 AND ISC", true),
            ("Apache-2.0 AND OpenSSL", false),
            ("(MIT OR GPL-2.0) AND ISC", true),
            ("GPL-2.0 OR MIT AND OpenSSL", false),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("GPL-2.0 WITH Classpath-exception-2.0 OR (ISC AND (MIT OR X))", true),
        ] {
            assert_eq!(satisfied(expression, &allowed).unwrap(), met, "{expression}");
        }
        for broken in ["", "MIT OR", "(MIT", "MIT MIT", "AND MIT"] {
            assert!(satisfied(broken, &allowed).is_err(), "{broken}");
        }
    }

    fn metadata() -> Value {
        let package = |name: &str, license: &str| json!({ "id": name, "name": name, "version": "1.0.0", "source": CRATES_IO, "license": license });
        let dependencies = json!([{ "name": "sys", "req": "^1", "path": null }, { "name": "proto", "req": "*", "path": "/here" }]);
        let ours = json!({ "id": "ours", "name": "ours", "source": null, "publish": [], "dependencies": dependencies });
        let node = |id: &str, features: &[&str]| json!({ "id": id, "features": features });
        json!({
            "packages": [ours, package("sys", "MIT OR GPL-3.0"), package("public", "CC0-1.0"), package("unused", "GPL-3.0")],
            "resolve": { "nodes": [node("ours", &[]), node("sys", &["std"]), node("public", &[])] },
        })
    }

    #[test]
    fn every_rule_is_kept_or_its_breach_is_named() {
        let lists = r#"
            licenses.allow = ["MIT"]
            licenses.exceptions = [{ crate = "public", allow = ["CC0-1.0"] }]
            bans.deny = [{ crate = "openssl-sys", reason = "rustls is enough" }]
            bans.features = [{ crate = "sys", deny = ["download"], reason = "we have it" }]
        "#;
        let mut whole: toml::Table = FIXED.parse().unwrap();
        for (section, lists) in lists.parse::<toml::Table>().unwrap() {
            whole[&section].as_table_mut().unwrap().extend(lists.as_table().unwrap().clone());
        }
        let deny = Deny::parse(&whole.to_string()).unwrap();
        assert!(deny.breaches(&metadata()).1.is_empty());
        for (pointer, value, part) in [
            ("/packages/1/license", json!("CC0-1.0"), "sys 1.0.0: its licence `CC0-1.0`"),
            ("/packages/1/license", Value::Null, "is not understood"),
            ("/packages/1/source", json!("git+https://x"), "is not crates.io"),
            ("/packages/1/name", json!("openssl-sys"), "is banned: rustls is enough"),
            ("/resolve/nodes/1/features", json!(["download"]), "`download` is banned"),
            ("/packages/0/dependencies/0/req", json!("*"), "`sys` may have any version"),
        ] {
            let mut metadata = metadata();
            *metadata.pointer_mut(pointer).unwrap() = value;
            let wrong = deny.breaches(&metadata).1;
            assert!(wrong.len() == 1 && wrong[0].contains(part), "{part}: {wrong:?}");
        }
        for other in ["graph = { exclude = [] }", "licenses = { confidence-threshold = 1 }"] {
            assert!(Deny::parse(other).is_err(), "{other}");
        }
    }
}

//! Licences, bans and sources of all dependencies, by `deny.toml`, so that the check needs no program that a fresh machine lacks.
//!
//! `deny.toml` is the file of cargo-deny, which also knows advisories; what is used of it is checked here in the same way. A setting
//! that this does not know is an error and not overlooked.

use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Deny {
    graph: Graph,
    licenses: Licenses,
    bans: Bans,
    /// Nothing but crates.io, which is all that this can check.
    #[serde(rename = "sources")]
    _sources: Sources,
    /// Only for cargo-deny: they change by themselves, and need the network.
    #[serde(rename = "advisories")]
    _advisories: toml::Table,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Graph {
    targets: Vec<String>,
    all_features: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Licenses {
    allow: BTreeSet<String>,
    #[serde(default)]
    exceptions: Vec<Exception>,
    private: Private,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    #[serde(rename = "crate")]
    name: String,
    allow: BTreeSet<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Private {
    ignore: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Bans {
    multiple_versions: Allowed,
    wildcards: Denied,
    allow_wildcard_paths: bool,
    #[serde(default)]
    deny: Vec<Ban>,
    #[serde(default)]
    features: Vec<BannedFeatures>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    reason: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BannedFeatures {
    #[serde(rename = "crate")]
    name: String,
    deny: BTreeSet<String>,
    reason: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sources {
    #[serde(rename = "unknown-registry")]
    _unknown_registry: Denied,
    #[serde(rename = "unknown-git")]
    _unknown_git: Denied,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Allowed {
    Allow,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Denied {
    Deny,
}

/// crates.io, as cargo names it.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Checks everything that is built for any of the targets with all features.
///
/// # Errors
/// All that breaks a rule of `deny.toml`; or cargo does not say what there is.
pub(super) fn check() -> Result<usize> {
    let path = workspace::root().join("deny.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read `{}`", path.display()))?;
    let deny: Deny = toml::from_str(&text).context("deny.toml: xtask knows no such setting")?;
    let mut command = workspace::cargo();
    command.args(["metadata", "--format-version", "1", "--locked"]).current_dir(workspace::root());
    ensure!(deny.graph.all_features, "deny.toml: graph.all-features = false is not known to xtask");
    command.arg("--all-features");
    for target in &deny.graph.targets {
        command.args(["--filter-platform", target]);
    }
    let output = command.output().context("run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let metadata = serde_json::from_slice(&output.stdout).context("cargo metadata is JSON")?;
    let (count, wrong) = deny.breaches(&metadata)?;
    ensure!(wrong.is_empty(), "deny.toml forbids:\n  {}", wrong.join("\n  "));
    Ok(count)
}

impl Deny {
    /// How many packages there are, and what is wrong with them.
    fn breaches(&self, metadata: &Value) -> Result<(usize, Vec<String>)> {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let packages = list(&metadata["packages"]);
        ensure!(!packages.is_empty(), "cargo metadata has no packages");
        let mut features = BTreeMap::new();
        for node in list(&metadata["resolve"]["nodes"]) {
            features.insert(text(&node["id"]), list(&node["features"]));
        }
        let mut wrong = Vec::new();
        for package in packages.iter().filter(|package| features.contains_key(&text(&package["id"]))) {
            let (name, id) = (text(&package["name"]), text(&package["id"]));
            let what = format!("{name} {}", text(&package["version"]));
            match package["source"].as_str() {
                // One of ours.
                None => {
                    wrong.extend(self.wildcards(&what, &list(&package["dependencies"])));
                    if self.licenses.private.ignore
                        && package["publish"].as_array().is_some_and(Vec::is_empty)
                    {
                        continue;
                    }
                }
                Some(CRATES_IO) => {}
                Some(other) => wrong.push(format!("{what}: its source `{other}` is not crates.io")),
            }
            wrong.extend(self.license(&what, &name, package["license"].as_str()));
            if let Some(ban) = self.bans.deny.iter().find(|ban| ban.name == name) {
                wrong.push(format!("{what} is banned: {}", ban.reason));
            }
            for ban in self.bans.features.iter().filter(|ban| ban.name == name) {
                let on = features[&id].iter().map(text).find(|feature| ban.deny.contains(feature));
                wrong.extend(on.map(|on| format!("{what}: its feature `{on}` is banned: {}", ban.reason)));
            }
        }
        Ok((features.len(), wrong))
    }

    fn license(&self, what: &str, name: &str, license: Option<&str>) -> Option<String> {
        let Some(license) = license else {
            return Some(format!("{what}: names no licence in its Cargo.toml"));
        };
        let excepted = self.licenses.exceptions.iter().filter(|exception| exception.name == name);
        let excepted: BTreeSet<&String> = excepted.flat_map(|exception| &exception.allow).collect();
        let allowed = |id: &str| self.licenses.allow.contains(id) || excepted.contains(&id.to_owned());
        match satisfied(license, &allowed) {
            Ok(true) => None,
            Ok(false) => Some(format!("{what}: its licence `{license}` is not in licenses.allow")),
            Err(error) => Some(format!("{what}: its licence `{license}` is not understood: {error:#}")),
        }
    }

    /// Dependencies of a package of ours with any version.
    fn wildcards(&self, what: &str, dependencies: &[Value]) -> Vec<String> {
        let (Denied::Deny, Allowed::Allow) = (&self.bans.wildcards, &self.bans.multiple_versions);
        let any = dependencies.iter().filter(|dependency| dependency["req"] == "*");
        let any = any.filter(|dependency| !self.bans.allow_wildcard_paths || dependency["path"].is_null());
        any.map(|dependency| format!("{what}: `{}` may have any version", text(&dependency["name"])))
            .collect()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Whether a licence expression (SPDX, or with the `/` of old) can be met with licences that are allowed.
fn satisfied(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    let met = any_of(&mut rest, allowed)?;
    ensure!(rest.is_empty(), "`{}` is left over", rest.join(" "));
    Ok(met)
}

fn any_of(words: &mut &[&str], allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let mut met = all_of(words, allowed)?;
    while let ["OR", rest @ ..] = *words {
        *words = rest;
        met |= all_of(words, allowed)?;
    }
    Ok(met)
}

fn all_of(words: &mut &[&str], allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let mut met = one(words, allowed)?;
    while let ["AND", rest @ ..] = *words {
        *words = rest;
        met &= one(words, allowed)?;
    }
    Ok(met)
}

fn one(words: &mut &[&str], allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let met = any_of(words, allowed)?;
            let [")", rest @ ..] = *words else { bail!("a bracket is not closed") };
            *words = rest;
            Ok(met)
        }
        // An exception gives more rights, it takes none.
        [id, "WITH", exception, rest @ ..] => {
            *words = rest;
            Ok(allowed(id) || allowed(&format!("{id} WITH {exception}")))
        }
        [id, rest @ ..] if !["AND", "OR", "WITH", ")"].contains(id) => {
            *words = rest;
            Ok(allowed(id))
        }
        _ => bail!("expected a licence, found `{}`", words.join(" ")),
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

    fn deny() -> Deny {
        toml::from_str(
            r#"
graph = { targets = ["x"], all-features = true }
advisories = {}
[licenses]
allow = ["MIT"]
exceptions = [{ crate = "public", allow = ["CC0-1.0"] }]
private = { ignore = true }
[bans]
multiple-versions = "allow"
wildcards = "deny"
allow-wildcard-paths = true
deny = [{ crate = "openssl-sys", reason = "rustls is enough" }]
features = [{ crate = "sys", deny = ["download"], reason = "we have it" }]
[sources]
unknown-registry = "deny"
unknown-git = "deny"
"#,
        )
        .unwrap()
    }

    fn metadata(edit: impl Fn(&mut Value)) -> Value {
        let package = |name: &str, license: &str| json!({ "id": name, "name": name, "version": "1.0.0", "source": CRATES_IO, "license": license });
        let dependencies = json!([
            { "name": "sys", "req": "^1", "path": null },
            { "name": "proto", "req": "*", "path": "/here" },
        ]);
        let ours = json!({
            "id": "ours", "name": "ours", "version": "0.1.0", "source": null, "publish": [], "dependencies": dependencies
        });
        let node = |id: &str, features: &[&str]| json!({ "id": id, "features": features });
        let mut metadata = json!({
            "packages": [ours, package("sys", "MIT OR GPL-3.0"), package("public", "CC0-1.0"), package("unused", "GPL-3.0")],
            "resolve": { "nodes": [node("ours", &[]), node("sys", &["std"]), node("public", &[])] },
        });
        edit(&mut metadata);
        metadata
    }

    #[test]
    fn every_rule_is_kept_or_its_breach_is_named() {
        let wrong = |edit: &dyn Fn(&mut Value)| deny().breaches(&metadata(edit)).unwrap().1;
        assert_eq!(wrong(&|_| ()), [""; 0]);
        let named = |edit: &dyn Fn(&mut Value), part: &str| {
            let wrong = wrong(edit);
            assert!(wrong.len() == 1 && wrong[0].contains(part), "{part}: {wrong:?}");
        };
        named(&|all| all["packages"][1]["license"] = "CC0-1.0".into(), "sys 1.0.0: its licence `CC0-1.0`");
        named(&|all| all["packages"][1]["license"] = Value::Null, "names no licence");
        named(&|all| all["packages"][1]["source"] = "git+https://x".into(), "is not crates.io");
        named(&|all| all["packages"][1]["name"] = "openssl-sys".into(), "is banned: rustls is enough");
        named(&|all| all["resolve"]["nodes"][1]["features"] = json!(["download"]), "`download` is banned");
        named(&|all| all["packages"][0]["dependencies"][0]["req"] = "*".into(), "`sys` may have any version");
    }

    #[test]
    fn the_dependencies_of_this_workspace_keep_the_rules() {
        assert!(check().unwrap() > 100);
    }
}

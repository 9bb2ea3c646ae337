//! Style that a machine can check: file headers, comments, the dependency arrow, words, and
//! documents that must follow the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all files of the repository with one of these endings.
fn files(endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("a folder's entry").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // Links (libtorch) are not followed. Hidden folders and build results do not belong to
            // the repository.
            if path.is_symlink() || name == "target" || name == ".git" {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    assert!(found.len() > 5, "only {} files end in {endings:?}: the walk is broken", found.len());
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

#[test]
fn every_source_file_says_first_why_it_exists() {
    let bare: Vec<_> = files(&[".rs"])
        .into_iter()
        .filter(|path| !read(path).starts_with("//! "))
        .map(|path| relative(&path))
        .collect();
    assert!(bare.is_empty(), "begin with a `//!` line: {bare:?}");
}

#[test]
fn every_file_beside_this_one_is_compiled() {
    let folder = root().join("tests/system");
    let main = read(&folder.join("main.rs"));
    let names = fs::read_dir(&folder).expect("its own folder").map(|entry| entry.expect("an entry").path());
    let names = names.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()));
    let lost: Vec<_> =
        names.filter(|name| name != "main" && !main.contains(&format!("\nmod {name};"))).collect();
    assert!(lost.is_empty(), "tests/system/main.rs has no `mod` line of {lost:?}: their tests never run");
}

/// The crates, lowest first: each sees only those of lower rows, so roles do not know each other.
const LAYERS: [&[&str]; 7] = [
    &["proto"],
    &["net", "store", "kernels"],
    &["data"],
    &["model"],
    &["master", "ps", "worker"],
    &["client"],
    &["python"],
];

#[test]
fn crates_see_only_lower_ones_and_only_the_model_sees_libtorch() {
    for (layer, members) in LAYERS.iter().enumerate() {
        for member in *members {
            let forbidden: Vec<_> = LAYERS[layer..].concat();
            let manifest: toml::Table =
                read(&root().join(member).join("Cargo.toml")).parse().expect("a manifest");
            for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
                let Some(section) = manifest.get(section).and_then(toml::Value::as_table) else { continue };
                for name in &forbidden {
                    let package = format!("ebbflow-{name}");
                    assert!(!section.contains_key(*name), "{member} depends on {name}");
                    assert!(!section.contains_key(&package), "{member} depends on {package}");
                }
                assert!(*member == "model" || !section.contains_key("tch"), "{member} depends on tch");
            }
        }
    }
}

#[test]
fn every_crate_has_its_layer() {
    let manifest: toml::Table = read(&root().join("Cargo.toml")).parse().expect("a manifest");
    let members = manifest["workspace"]["members"].as_array().expect("a list");
    let members: BTreeSet<_> = members.iter().filter_map(toml::Value::as_str).collect();
    let layers: BTreeSet<_> = LAYERS.concat().into_iter().chain(["xtask"]).collect();
    assert_eq!(members, layers);
}

#[test]
fn nothing_is_left_undone_or_points_at_one_machine() {
    // In two parts, so that this file passes its own test.
    let words = [
        ["TO", "DO"],
        ["FIX", "ME"],
        ["XX", "X:"],
        ["/ro", "ot/"],
        ["/wo", "rk/"],
        ["black", "list"],
        ["white", "list"],
    ];
    let words = words.map(|parts| parts.concat());
    let mut found = Vec::new();
    for path in files(&[".rs", ".md", ".proto", ".toml", ".py", ".cpp", ".txt"]) {
        let text = read(&path);
        for (number, line) in text.lines().enumerate() {
            found.extend(
                words
                    .iter()
                    .filter(|word| line.contains(*word))
                    .map(|word| format!("{}:{}: {word}", relative(&path), number + 1)),
            );
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn secrets_are_compared_in_constant_time() {
    let tokens = read(&root().join("net/src/security/tokens.rs"));
    let (_, find) = tokens.split_once("pub fn find(").expect("tokens are looked up there");
    let (find, _) = find.split_once("\n    }").expect("the end of a function");
    assert!(
        find.contains("ct_eq") && !find.contains("=="),
        "another comparison tells where it ended:\n{find}"
    );
}

#[test]
fn only_config_reads_the_environment() {
    let readers: Vec<_> = files(&[".rs"])
        .iter()
        .map(|path| (relative(path), read(path)))
        .filter(|(name, _)| name.starts_with("src/") || name.starts_with("client/src/"))
        .filter(|(name, _)| name != "src/config.rs")
        .filter(|(_, text)| text.contains("env::var"))
        .map(|(name, _)| name)
        .collect();
    assert!(readers.is_empty(), "move it to src/config.rs: {readers:?}");
}

#[test]
fn files_and_folders_of_the_program_see_each_other_one_way() {
    let source = root().join("src");
    let mut sees: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in files(&[".rs"]).iter().filter(|path| path.starts_with(&source)) {
        let below = path.strip_prefix(&source).unwrap_or(path).display().to_string();
        let module = below.split(['/', '.']).next().unwrap_or_default().to_owned();
        let text = read(path);
        let shipped = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        let names = shipped.split("crate::").skip(1);
        let names = names.filter_map(|rest| rest.split(|c: char| !c.is_ascii_lowercase() && c != '_').next());
        let others = names.filter(|name| *name != module).map(str::to_owned);
        sees.entry(module.clone()).or_default().extend(others);
    }
    // `lib` sees all of them, and tests see `fake`.
    sees.retain(|module, _| !["lib", "main", "fake"].contains(&module.as_str()));
    assert!(sees["verbs"].contains("app"), "{sees:?}: the search is broken");
    while let Some(lowest) = sees.iter().find(|(_, seen)| !seen.iter().any(|name| sees.contains_key(name))) {
        let lowest = lowest.0.clone();
        sees.remove(&lowest);
    }
    assert!(sees.is_empty(), "these see each other in a circle: {sees:#?}");
}

/// The commands in a document's indented blocks: lines that start with four spaces and one of ours.
fn commands(document: &str) -> Vec<Vec<String>> {
    let text = read(&root().join(document));
    let lines = text.lines().filter_map(|line| line.strip_prefix("    "));
    let words = lines.map(|line| {
        // An explanation follows after several spaces, or after `#`.
        let line = line.trim().split("   ").next().unwrap_or_default().split(" #").next().unwrap_or_default();
        line.split_whitespace()
            .skip_while(|word| word.contains('=') && !word.starts_with('-'))
            .map(str::to_owned)
            .collect()
    });
    words
        .filter(|words: &Vec<String>| matches!(words.first().map(String::as_str), Some("ebb" | "cargo")))
        .collect()
}

#[test]
fn commands_in_documents_exist_with_their_flags_and_files() {
    let mut seen = 0;
    for document in ["README.md", "CONTRIBUTING.md", "deploy/README.md", "docs/security.md"] {
        for words in commands(document) {
            for file in words.iter().filter(|word| word.starts_with("examples/")) {
                assert!(root().join(file).exists(), "{document}: no {file}");
            }
            let [program, verb, flags @ ..] = &words[..] else { panic!("{document}: {words:?}") };
            if program == "cargo" {
                let chore = words.get(2).cloned().unwrap_or_default();
                let source = read(&root().join("xtask/src/main.rs")).to_lowercase();
                assert!(
                    verb != "xtask" || source.contains(&format!("{chore}(")),
                    "{document}: no chore {chore}"
                );
                continue;
            }
            // `ebb certs init --dir DIR`: its flags are those of `ebb certs init`.
            let below = flags
                .first()
                .filter(|word| ["certs", "checkpoint"].contains(&verb.as_str()) && !word.starts_with('-'));
            let asks = [Some(verb), below].into_iter().flatten();
            let help = Command::new(crate::harness::ebb_path())
                .args(asks)
                .arg("--help")
                .output()
                .expect("ebb starts");
            assert!(help.status.success(), "{document}: no verb `{verb}`");
            let help = String::from_utf8_lossy(&help.stdout).into_owned();
            for flag in flags.iter().filter(|word| word.starts_with("--")) {
                let flag = flag.split_once('=').map_or(flag.as_str(), |(flag, _)| flag);
                assert!(help.contains(flag), "{document}: `ebb {verb}` has no {flag}");
            }
            seen += 1;
        }
    }
    assert!(seen > 10, "only {seen} commands of ours: the search is broken");
}

#[test]
fn links_between_documents_lead_somewhere() {
    for path in files(&[".md"]) {
        let text = read(&path);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.starts_with("http") || target.starts_with('#') {
                continue;
            }
            let file = target.split('#').next().unwrap_or_default();
            let place = path.parent().unwrap_or(root()).join(file);
            assert!(place.exists(), "{}: no {target}", relative(&path));
        }
    }
}

#[test]
fn the_job_file_reference_names_every_setting_and_every_choice() {
    let reference = read(&root().join("docs/job.md"));
    let mut missing = Vec::new();
    let mut count = 0;
    for file in [
        "proto/src/spec.rs",
        "proto/src/spec/autocast.rs",
        "proto/src/spec/checkpoint.rs",
        "proto/src/spec/purpose.rs",
        "proto/src/optimizer.rs",
        "proto/src/optimizer/groups.rs",
        "proto/src/optimizer/schedule.rs",
    ] {
        for name in names(&read(&root().join(file))) {
            count += 1;
            // The folder of the job file is filled in, never written by a user. Lists of files have
            // the names of columns.
            if !["base", "lists"].contains(&name.as_str())
                && !reference.contains(&format!("`{name}`"))
                && !reference.contains(&format!("[{name}]"))
            {
                missing.push(format!("{file}: {name}"));
            }
        }
    }
    assert!(count > 60, "only {count} names: the search is broken");
    assert!(missing.is_empty(), "docs/job.md lacks {missing:#?}");
}

/// Returns the names of fields and variants of all types that a job file is read into, as a job
/// file writes them.
fn names(source: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut derives = false;
    let mut inside = false;
    for line in source.lines() {
        if line.starts_with("#[derive(") {
            derives = line.contains("Deserialize");
        } else if line.starts_with("pub struct") || line.starts_with("pub enum") {
            inside = derives;
        } else if line == "}" {
            (inside, derives) = (false, false);
        } else if inside {
            let field = line.strip_prefix("    pub ").and_then(|rest| rest.split(':').next());
            let variant = line.strip_prefix("    ").and_then(|rest| rest.strip_suffix(','));
            let variant = variant.filter(|name| name.chars().all(char::is_alphanumeric)).map(snake_case);
            names.extend(field.map(str::to_owned).or(variant));
        }
    }
    names
}

/// Converts a variant to its serde name: `BceWithLogits` -> `bce_with_logits`, `AdamW` -> `adamw`.
fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for (index, letter) in name.char_indices() {
        if letter.is_uppercase() && index > 0 && name != "AdamW" {
            text.push('_');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

/// Returns the words between backticks in a document that look like a file or folder of the
/// repository, with `{a,b}` spelled out.
fn paths_named(text: &str) -> Vec<String> {
    let roots = [
        "proto/",
        "net/",
        "store/",
        "kernels/",
        "data/",
        "model/",
        "ps/",
        "master/",
        "worker/",
        "client/",
        "python/",
        "xtask/",
        "src/",
        "tests/",
        "benches/",
        "examples/",
        "deploy/",
        "docs/",
    ];
    let of_ours = |word: &&str| roots.iter().any(|root| word.starts_with(root));
    // `NAME` is a placeholder for a name that the reader chooses.
    let of_names = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let plain = |word: &String| !word.contains("NAME") && word.chars().all(of_names);
    let words = text.split('`').skip(1).step_by(2).filter(of_ours);
    words.flat_map(spelled_out).filter(plain).collect()
}

/// Spells out `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn spelled_out(word: &str) -> Vec<String> {
    let parts = word.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)));
    let Some((before, (names, after))) = parts else { return vec![word.to_owned()] };
    names.split(',').map(|name| format!("{before}{}{after}", name.trim())).collect()
}

#[test]
fn every_path_that_a_document_names_exists() {
    assert_eq!(
        paths_named("`ps/src/{a,b}.rs` and `cargo run`, `src/c.rs`"),
        ["ps/src/a.rs", "ps/src/b.rs", "src/c.rs"]
    );
    let mut lost = Vec::new();
    for document in files(&[".md"]) {
        let named = paths_named(&read(&document));
        let gone = named.into_iter().filter(|path| !root().join(path).exists());
        lost.extend(gone.map(|path| format!("{}: {path}", relative(&document))));
    }
    assert!(lost.is_empty(), "{lost:#?}");
}

/// First words of doc comments that cannot be read without the item before.
const LEANING_OPENINGS: [&str; 11] =
    ["Of", "That", "Who", "Whoever", "The same", "As", "Also", "Likewise", "From", "For", "By"];

/// Returns the comment marker with which a line begins, or an empty text.
fn comment_marker(line: &str) -> &'static str {
    ["///", "//!", "//"].into_iter().find(|marker| line.trim_start().starts_with(marker)).unwrap_or("")
}

/// Returns the opening of a doc comment's first line that leans on the item before.
fn leaning_opening(line: &str) -> Option<&'static str> {
    let text = line.trim_start().trim_start_matches(['/', '!']).trim_start();
    let begins_with = |opening: &&str| {
        text.strip_prefix(*opening).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
    };
    LEANING_OPENINGS.into_iter().find(begins_with)
}

#[test]
fn comments_stand_alone_in_lines_of_100_columns_at_most() {
    assert_eq!(leaning_opening("    /// The same, for writing."), Some("The same"));
    assert_eq!(leaning_opening("/// Asks the master for work."), None);
    let mut found = Vec::new();
    for path in files(&[".rs"]) {
        let name = relative(&path);
        let mut marker_before = "";
        for (number, line) in read(&path).lines().enumerate() {
            let (place, marker) = (format!("{name}:{}", number + 1), comment_marker(line));
            let columns = line.chars().count();
            if !marker.is_empty() && columns > 100 {
                found.push(format!("{place}: {columns} columns"));
            }
            let begins_doc = marker.len() == 3 && marker != marker_before;
            if let Some(opening) = leaning_opening(line).filter(|_| begins_doc) {
                found.push(format!("{place}: begins with `{opening}`"));
            }
            marker_before = marker;
        }
    }
    assert!(found.is_empty(), "{} comments to mend: {found:#?}", found.len());
}

#[test]
fn prose_has_lines_of_100_columns_at_most() {
    let mut long = Vec::new();
    for document in files(&[".md"]) {
        let mut in_code = false;
        for (number, line) in read(&document).lines().enumerate() {
            in_code ^= line.starts_with("```");
            // Tables, figures, code, and lines that cannot be broken.
            let is_other = in_code || ["|", "![", "    "].iter().any(|begin| line.starts_with(begin));
            let is_prose = !is_other && line.contains(' ');
            if is_prose && line.chars().count() > 100 {
                long.push(format!("{}:{}", relative(&document), number + 1));
            }
        }
    }
    assert!(long.is_empty(), "{long:#?}");
}

/// Nouns of public types that mean what a programmer expects. A verb in the past tense is the
/// result of the verb.
const PLAIN_NOUNS: &str = "
    accepted address allowed argument attribute batch channel check choice chosen client clock consistency constant content
    context conversion converted count dataset device disk entry error evaluation failed failure file
    folder follow
    followed format found gradient guarded held incoming indexed inspected io kept kind limit listed listener
    local location
    loss measured member mode normalize numbers observer optimizer passing pool pulled purpose pushed refused
    registered reply report reported result retry returned row rule saved script secret section set shown shuffle side size spec start
    sum summary timer on until update upload use value weight whose word written";

/// The last word of a type's name, in lower case.
fn noun(name: &str) -> String {
    let start = name.rfind(|letter: char| letter.is_ascii_uppercase()).unwrap_or(0);
    name[start..].to_lowercase()
}

/// A noun as the lists have it: without the ending of its plural.
fn singular(noun: &str) -> String {
    match noun {
        noun if noun.ends_with("ies") => format!("{}y", &noun[..noun.len() - 3]),
        noun if noun.ends_with("ss") || noun.ends_with("us") => noun.to_owned(),
        noun => noun.trim_end_matches('s').to_owned(),
    }
}

#[test]
fn the_noun_of_every_public_type_is_in_the_glossary_or_plain() {
    assert_eq!((noun("TensorRole"), singular("replies")), ("role".to_owned(), "reply".to_owned()));
    let glossary = read(&root().join("docs/glossary.md"));
    let rows = glossary.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let split = |text: &str| {
        let words = text.split(|letter: char| !letter.is_ascii_alphabetic());
        words.filter(|word| !word.is_empty()).map(|word| singular(&word.to_lowercase())).collect::<Vec<_>>()
    };
    let known: BTreeSet<_> = rows.flat_map(split).chain(split(PLAIN_NOUNS)).collect();
    let (mut missing, mut types) = (BTreeSet::new(), 0);
    for path in files(&[".rs"]) {
        let file = relative(&path);
        if !file.contains("src/") || file.starts_with("xtask/") {
            continue;
        }
        for line in read(&path).lines() {
            let kinds = ["struct", "enum", "trait", "type"];
            let Some(rest) = kinds.iter().find_map(|kind| line.strip_prefix(&format!("pub {kind} "))) else {
                continue;
            };
            let name: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
            types += 1;
            if !known.contains(&singular(&noun(&name))) {
                missing.insert(format!("{name} in {file}"));
            }
        }
    }
    assert!(types > 150, "found only {types} public types");
    assert!(missing.is_empty(), "words that docs/glossary.md does not have: {missing:#?}");
}

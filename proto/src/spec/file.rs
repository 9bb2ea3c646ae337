//! Reads `JOB.toml` and `--set` overrides into a checked [`JobSpec`].

use std::path::Path;

use super::JobSpec;
use crate::error::{Error, Result};
use crate::hint;

/// Reads a job file's text. `path` names it in errors, and relative data paths start from its
/// folder. `overrides` are `key.path=value` pairs, applied after the file; a value is TOML, or a
/// bare string.
///
/// # Errors
/// - [`Error::JobFile`] with line and column: a syntax error, a wrong type, or an unknown key with
///   the nearest known one.
/// - [`Error::Invalid`] with every contradiction.
pub fn parse(text: &str, path: &Path, overrides: &[String]) -> Result<JobSpec> {
    let spec = parse_unchecked(text, path, overrides)?;
    spec.validate()?;
    Ok(spec)
}

/// Reads a job file's text like [`parse`], and leaves contradictions in it. It is for a caller that
/// makes another job of it, see [`JobSpec::measuring`].
///
/// # Errors
/// [`Error::JobFile`] as in [`parse`].
pub fn parse_unchecked(text: &str, path: &Path, overrides: &[String]) -> Result<JobSpec> {
    let in_file =
        |error: &toml::de::Error| Error::JobFile(describe(&path.display().to_string(), text, error));
    let mut table: toml::Table = toml::from_str(text).map_err(|error| in_file(&error))?;
    if overrides.is_empty() {
        // Deserializes from the text, so that errors have a line.
        return Ok(settle(toml::from_str(text).map_err(|error| in_file(&error))?, path));
    }
    for pair in overrides {
        set(&mut table, pair)?;
    }
    let text = toml::to_string(&table).expect("a table that was parsed can be written");
    let name = format!("{} with --set {}", path.display(), overrides.join(" --set "));
    let spec = toml::from_str(&text).map_err(|error| Error::JobFile(describe(&name, &text, &error)))?;
    Ok(settle(spec, path))
}

/// Makes paths absolute. They start from the folder of the job file.
fn settle(mut spec: JobSpec, path: &Path) -> JobSpec {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    if let Some(checkpoint) = &mut spec.checkpoint {
        checkpoint.settle(&folder);
    }
    if let Some(predict) = &mut spec.predict {
        predict.settle(&folder);
    }
    for transform in spec.data.every_transform() {
        transform.settle(&folder);
    }
    spec.data.base = Some(folder);
    spec
}

fn set(table: &mut toml::Table, pair: &str) -> Result<()> {
    let wrong = |what: String| Error::JobFile(format!("--set {pair}: {what}"));
    let (key, value) = pair
        .split_once('=')
        .ok_or_else(|| wrong("expected KEY=VALUE, e.g. optimizer.learning_rate=0.01".into()))?;
    let value = value.trim();
    let parsed = toml::from_str::<toml::Table>(&format!("value = {value}")).ok();
    let value = parsed.and_then(|mut table| table.remove("value")).unwrap_or_else(|| value.into());
    let mut at = table;
    let mut keys = key.trim().split('.').peekable();
    while let Some(part) = keys.next() {
        if keys.peek().is_none() {
            at.insert(part.to_owned(), value);
            return Ok(());
        }
        at = at
            .entry(part)
            .or_insert_with(|| toml::Table::new().into())
            .as_table_mut()
            .ok_or_else(|| wrong(format!("`{part}` is a value, not a section")))?;
    }
    Ok(())
}

/// Returns serde's message with file, line and column. For an unknown key it adds the nearest known
/// one.
fn describe(name: &str, text: &str, error: &toml::de::Error) -> String {
    let place = error.span().map(|span| {
        let before = &text[..span.start.min(text.len())];
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
        format!(", line {line}, column {column}")
    });
    format!("{name}{}: {}", place.unwrap_or_default(), hinted(error.message().trim()))
}

/// Returns serde's message about a specification that came as JSON, for its user.
pub(super) fn in_json(error: &serde_json::Error) -> Error {
    let message = error.to_string();
    // The position in the JSON is of no use, because no user wrote that text.
    let message = message.split(" at line ").next().unwrap_or_default();
    Error::JobFile(format!("job specification: {}", hinted(message)))
}

/// Returns serde's message. For an unknown key it adds the known key that the user may have meant.
fn hinted(message: &str) -> String {
    // A list stands in place of a table: serde counts its elements.
    let counted = message.rfind(" with ").filter(|_| message.starts_with("invalid length"));
    let message = match counted {
        Some(at) if message.ends_with(" elements") || message.ends_with(" element") => {
            let expected = message[..at].split_once("expected ").map_or("a table", |(_, expected)| expected);
            format!("expected {expected}, as a table with their names, found a list")
        }
        _ => message.to_owned(),
    };
    let hint = meant(&message).map(|key| format!("; did you mean {key}?")).unwrap_or_default();
    message + &hint
}

/// Returns the key that `x` may stand for in serde's "unknown field `x`, expected one of `a`, `b`".
fn meant(message: &str) -> Option<String> {
    let field = message.starts_with("unknown field");
    if !field && !message.starts_with("unknown variant") {
        return None;
    }
    let mut words = message.split('`').skip(1).step_by(2);
    let unknown = words.next()?;
    let known: Vec<_> = words.collect();
    match field {
        true => hint::job_key(unknown, &known),
        false => hint::nearest(unknown, known).map(|word| format!("`{word}`")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::metrics::Metric;
    use crate::spec::{Autocast, DeviceKind, FleetSpec, MixupSpec, Mode, Order, PROGRAM, Purpose, Transform};
    use crate::wire::WireType;

    const JOB: &str = r#"
name = "digits"
epochs = 10
seed = 7
[model]
builtin = "mlp"
[data]
format = "idx"
train = { features = ["images.gz"], labels = ["labels.gz"] }
validation_fraction = 0.2
[batch]
micro = 32
effective = 128
[optimizer]
kind = "adam"
learning_rate = 1e-3
"#;

    fn read(text: &str) -> Result<JobSpec> {
        parse(text, Path::new("jobs/digits.toml"), &[])
    }

    #[test]
    fn a_fleet_may_ask_for_a_kind_of_device_and_its_memory() {
        let fleet = |lines: &str| format!("{JOB}[fleet]\n{lines}\n");
        let read = |lines: &str| read(&fleet(lines)).unwrap().fleet;
        let of = read("device = \"cuda\"\ndevice_memory = \"16GiB\"");
        assert_eq!((of.device, of.device_memory), (Some(DeviceKind::Cuda), Some(16 << 30)));
        let of = read("device = \"cpu\"");
        assert_eq!((of.device, of.device_memory), (Some(DeviceKind::Cpu), None));
        assert_eq!(read("ps = 1"), FleetSpec::default());
        for (lines, said) in [
            ("device = \"gpu\"", "`cuda`"),
            ("device = \"cuda\"\ndevice_memory = \"16 gigs\"", "64MiB"),
            ("device_memory = \"16GiB\"", "fleet.device_memory"),
            ("device = \"cpu\"\ndevice_memory = \"16GiB\"", "fleet.device = \"cuda\""),
        ] {
            let error = error(&fleet(lines));
            assert!(error.contains(said), "{error}");
        }
        // Jobs that ask for nothing are written as before.
        assert!(!serde_json::to_string(&FleetSpec::default()).unwrap().contains("device"));
    }

    fn error(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn a_short_job_has_every_default() {
        let spec = read(JOB).unwrap();
        assert_eq!(spec.batch.microbatches_per_step(), 4);
        assert_eq!(spec.consistency.mode, Mode::Sync);
        assert_eq!(spec.limits.lease, Duration::from_secs(30));
        assert!(spec.data.locate("images.gz", None).ends_with("jobs/images.gz"));
        assert_eq!(spec.data.locate("/d/images.gz", Some(Path::new("/mnt"))), Path::new("/mnt/d/images.gz"));
    }

    #[test]
    fn the_wire_form_is_the_same_job() {
        let spec = read(JOB).unwrap();
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
    }

    #[test]
    fn a_program_may_drive_a_model_on_records_of_files() {
        let job = JOB.replace("builtin = \"mlp\"", "builtin = \"python\"\nloss = \"module\"");
        assert!(read(&job).unwrap().is_driven() && !read(JOB).unwrap().is_driven());
        let message = error(&job.replace("\"module\"", "\"mse\""));
        assert!(message.contains("`python` is a model that a program drives"), "{message}");
        let sets = "[data.validation_sets.test]\nfeatures = [\"a\"]\nlabels = [\"b\"]\n";
        let message = error(&format!("{}{sets}", job.replace("validation_fraction = 0.2\n", "")));
        assert!(message.contains("a program that drives its model measures it on one set"), "{message}");
    }

    #[test]
    fn only_relative_paths_of_data_start_from_a_folder() {
        let settled = |text: &str| {
            let mut spec: JobSpec = toml::from_str(text).unwrap();
            spec.settle_data(Path::new("/here"));
            spec.data
        };
        assert_eq!(settled(JOB).locate("images.gz", None), Path::new("/here/images.gz"));
        let elsewhere = JOB.replace("images.gz", "/d/images.gz").replace("labels.gz", "s3://b/labels.gz");
        let tokens = "label = \"y\"\n[data.transforms]\nx = [{ op = \"tokenize\", file = \"t.json\" }]";
        let data = settled(&elsewhere.replace("validation_fraction = 0.2", tokens));
        assert_eq!(data.base, None);
        assert!(
            matches!(&data.transforms["x"][0], Transform::Tokenize { file, .. } if file == "/here/t.json"),
            "{data:?}"
        );
    }

    #[test]
    fn two_jobs_differ_in_settings_with_names() {
        let (one, mut other) = (read(JOB).unwrap(), read(JOB).unwrap());
        assert_eq!(one.differences(&other), [""; 0]);
        other.batch.micro = 16;
        other.data.validation_fraction = None;
        let found = one.differences(&other);
        assert_eq!(found, ["batch.micro: 32, not 16", "data.validation_fraction: 0.2, not absent"]);
    }

    #[test]
    fn a_syntax_error_has_line_and_column() {
        let message = error(&JOB.replace("epochs = 10", "epochs = = 10"));
        assert!(message.contains("jobs/digits.toml, line 3, column"), "{message}");
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let message = error(&JOB.replace("effective =", "efective ="));
        assert!(message.contains("line 13") && message.contains("did you mean `effective`?"), "{message}");
        let message = error(&JOB.replace("kind = \"adam\"", "kind = \"adm\""));
        assert!(message.contains("did you mean `adam`?"), "{message}");
    }

    #[test]
    fn a_step_has_at_most_65536_microbatches_the_last_smaller_one_included() {
        let job =
            |effective| read(&JOB.replace("micro = 32", "micro = 2").replace("128", &format!("{effective}")));
        assert_eq!(job(131_072).unwrap().batch.microbatches_per_step(), 65_536);
        let message = job(131_073).unwrap_err().to_string();
        assert!(message.contains("65537 microbatches per step, at most 65536"), "{message}");
    }

    #[test]
    fn other_frameworks_names_lead_to_ours() {
        for (from, to, hint) in [
            ("learning_rate = 1e-3", "lr = 0.1", "did you mean `learning_rate`?"),
            ("learning_rate = 1e-3", "learning_rate = 0.1\nwd = 0.1", "did you mean `weight_decay`?"),
            ("micro = 32", "micro = 32\nbatch_size = 64", "did you mean `effective`?"),
            ("epochs = 10", "num_epochs = 10", "did you mean `epochs`?"),
            ("epochs = 10", "epochs = 10\nlr = 0.1", "did you mean `learning_rate` in [optimizer]?"),
            ("micro = 32", "micro = 32\nnum_epochs = 3", "did you mean `epochs`, at the top of the file?"),
        ] {
            let message = error(&JOB.replace(from, to));
            assert!(message.contains(hint), "{hint} missing in {message}");
        }
        let message = parse(JOB, Path::new("digits.toml"), &["optimizer.lr=0.1".to_owned()]).unwrap_err();
        assert!(message.to_string().contains("did you mean `learning_rate`?"), "{message}");
    }

    #[test]
    fn a_submitted_specification_is_spoken_of_as_a_job_file() {
        let json: serde_json::Value = serde_json::from_str(&read(JOB).unwrap().to_json()).unwrap();
        let error = |json: &serde_json::Value| JobSpec::from_json(&json.to_string()).unwrap_err().to_string();
        let said = error(&serde_json::json!([1, 2]));
        assert!(!said.contains("struct") && said.contains("the settings of a job"), "{said}");
        let said = error(&serde_json::json!([]));
        assert_eq!(
            said,
            "job specification: expected the settings of a job, as a table with their names, found a list"
        );
        for key in ["model", "data", "batch", "optimizer", "consistency", "fleet", "limits", "exchange"] {
            for wrong in [serde_json::json!(3), serde_json::json!([]), serde_json::json!("x")] {
                let mut other = json.clone();
                other[key] = wrong;
                // An empty list counts as a section whose settings all have defaults.
                let Err(said) = JobSpec::from_json(&other.to_string()) else { continue };
                let said = said.to_string();
                assert!(!said.contains("struct") && !said.contains("Spec"), "{key}: {said}");
            }
        }
        let mut other = json.clone();
        other["optimizer"]["lr"] = 3.into();
        assert!(error(&other).contains("did you mean `learning_rate`?"), "{}", error(&other));
    }

    #[test]
    fn a_wrong_type_has_its_line() {
        let message = error(&JOB.replace("micro = 32", "micro = \"many\""));
        assert!(message.contains("line 12") && message.contains("many"), "{message}");
    }

    #[test]
    fn contradictions_are_reported_all_at_once() {
        let text = JOB.replace("effective = 128", "effective = 8").replace("epochs = 10", "epochs = 0")
            + "[consistency]\nmode = \"sync\"\ndelay = 2\n";
        let message = error(&text);
        for part in ["epochs: 0", "batch.effective = 8", "consistency.delay"] {
            assert!(message.contains(part), "{part} missing in {message}");
        }
    }

    #[test]
    fn settings_of_one_format_are_refused_in_others() {
        let tokens = |extra: &str| {
            let data = "format = \"tokens\"\ntrain = { files = [\"t.bin\"] }\n";
            let (before, rest) = JOB.split_once("format = ").unwrap();
            let (_, after) = rest.split_once("[\"labels.gz\"] }\n").unwrap();
            read(&format!("{before}{data}{extra}\n{after}"))
        };
        let spec = tokens("tokens = { dtype = \"u16\", block = 8 }").unwrap().data;
        assert_eq!((spec.tokens.unwrap().stride(), spec.named_inputs().unwrap().arguments().len()), (8, 1));
        for (extra, expected) in [
            ("", "data.tokens: format = \"tokens\" needs it"),
            ("tokens = { dtype = \"u16\", block = 0 }", "data.tokens.block = 0: from 1 to 16777216"),
            (
                "tokens = { dtype = \"u32\", block = 9, stride = 0 }",
                "data.tokens.stride: 0 repeats one record",
            ),
            ("tokens = { dtype = \"i8\", block = 9 }", "unknown variant `i8`, expected `u16` or `u32`"),
            ("tokens = { dtype = \"u16\", block = 8 }\nshape = [8]", "data.shape: it belongs to `features`"),
            (
                "tokens = { dtype = \"u16\", block = 8 }\nlengths = { x = 0 }",
                "data.lengths.x: a record of no elements",
            ),
        ] {
            let message = tokens(extra).unwrap_err().to_string();
            assert!(message.contains(expected), "{expected} missing in {message}");
        }
        let message = error(&JOB.replace("format = ", "tokens = { dtype = \"u16\", block = 8 }\nformat = "));
        assert!(message.contains("no other format has it"), "{message}");
    }

    #[test]
    fn the_type_of_exchange_is_f32_unless_it_is_said() {
        let exchange = |text: &str| read(&format!("{JOB}{text}")).unwrap().exchange.dtype;
        assert_eq!(exchange(""), WireType::F32);
        assert_eq!(exchange("[exchange]\ndtype = \"bf16\"\n"), WireType::Bf16);
        // Journals have this older name of the section.
        assert_eq!(exchange("[wire]\nvalue = \"f32\"\n"), WireType::F32);
        let message = error(&format!("{JOB}[exchange]\ndtype = \"bf61\"\n"));
        for part in ["line 18", "unknown variant `bf61`", "`f32`", "did you mean `bf16`?"] {
            assert!(message.contains(part), "{part} missing in {message}");
        }
        let message = error(&format!("{JOB}[exchange]\ntype = \"bf16\"\n"));
        assert!(message.contains("did you mean `dtype`?"), "{message}");
    }

    #[test]
    fn a_model_computes_in_f32_unless_it_is_said() {
        let with = |settings: &str| {
            read(&JOB.replace("builtin = \"mlp\"", &format!("builtin = \"mlp\"\n{settings}")))
        };
        let plain = with("").unwrap();
        assert_eq!((plain.model.autocast, plain.model.tf32), (None, false));
        let json = plain.to_json();
        assert!(!json.contains("autocast") && !json.contains("tf32"), "{json}");
        let spec = with("autocast = \"bf16\"\ntf32 = true").unwrap();
        assert_eq!((spec.model.autocast, spec.model.tf32), (Some(Autocast::Bf16), true));
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
        let measuring = spec.measuring(Purpose::Evaluate, "w".to_owned(), None).unwrap();
        assert_eq!((measuring.model.autocast, measuring.model.tf32), (Some(Autocast::Bf16), true));

        let refused = |settings: &str| with(settings).unwrap_err().to_string();
        let half = with("autocast = \"f16\"").unwrap();
        assert_eq!((half.model.autocast, half.to_json().contains("\"f16\"")), (Some(Autocast::F16), true));
        let message = refused("autocast = \"f16\"\n[consistency]\nmode = \"async\"\n[fleet]\nps = 2");
        assert!(message.contains("model.autocast = \"f16\" needs the norm of each step"), "{message}");
        let message = refused("autocast = \"bf61\"");
        assert!(message.contains("unknown variant `bf61`"), "{message}");
        assert!(message.contains("did you mean `bf16`?"), "{message}");
        let driven = |setting: &str| {
            let program = format!("builtin = \"{PROGRAM}\"\nloss = \"module\"\n{setting}");
            read(&JOB.replace("builtin = \"mlp\"", &program)).unwrap_err().to_string()
        };
        for setting in ["autocast = \"bf16\"", "tf32 = true"] {
            let (message, name) = (driven(setting), setting.split(' ').next().unwrap());
            assert!(message.contains(&format!("model.{name}: a program that drives")), "{message}");
        }
    }

    #[test]
    fn metrics_fit_the_loss_or_are_refused_with_better_ones() {
        let with = |loss: &str, metrics: &str| {
            read(&JOB.replace(
                "builtin = \"mlp\"",
                &format!("builtin = \"mlp\"\nloss = \"{loss}\"\nmetrics = {metrics}"),
            ))
        };
        let spec =
            with("cross_entropy", r#"["accuracy", "top5", "log_loss", "f1", "confusion_matrix"]"#).unwrap();
        assert_eq!(spec.model.metrics[1], Metric::TopK(5));
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
        assert!(with("mse", r#"["mae", "mse", "rmse"]"#).is_ok());
        assert!(with("bce_with_logits", r#"["accuracy", "log_loss", "auc", "f1", "mae"]"#).is_ok());
        for (loss, metrics, expected) in [
            (
                "cross_entropy",
                r#"["mae"]"#,
                r#""mae" compares values; this loss has class labels, use "accuracy""#,
            ),
            ("mse", r#"["top5"]"#, r#""top5" needs classes; this loss compares values, use "mae""#),
            (
                "cross_entropy",
                r#"["auc"]"#,
                r#""auc" needs binary labels; this loss has class labels, use "f1""#,
            ),
            ("bce_with_logits", r#"["confusion_matrix"]"#, r#"this loss has binary labels, use "f1""#),
            ("cross_entropy", r#"["acuracy"]"#, "did you mean `accuracy`?"),
            ("cross_entropy", r#"["top_k"]"#, "metric `top_k`: expected `top` and a number from 1 to 1000"),
            ("cross_entropy", r#"["top0"]"#, "such as `top5`"),
            ("cross_entropy", "[5]", "invalid type: integer `5`"),
        ] {
            let message = with(loss, metrics).unwrap_err().to_string();
            assert!(message.contains(expected), "{expected} missing in {message}");
        }
        let message = with("mse", r#"["accuracy", "auc"]"#).unwrap_err().to_string();
        assert!(message.contains("\"accuracy\" needs") && message.contains("\"auc\" needs"), "{message}");
    }

    #[test]
    fn labels_are_smoothed_and_mixed_for_cross_entropy_alone() {
        let mixed = |mixup: &str, model: &str| {
            let text = JOB.replace("validation_fraction", &format!("mixup = {mixup}\nvalidation_fraction"));
            read(&text.replace("builtin = \"mlp\"", &format!("builtin = \"mlp\"\n{model}")))
        };
        let spec = mixed("{ classes = 10 }", "label_smoothing = 0.1").unwrap();
        assert_eq!(
            (spec.data.mixup, spec.model.label_smoothing),
            (Some(MixupSpec { alpha: 1.0, classes: 10 }), 0.1)
        );
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
        let plain = read(JOB).unwrap().to_json();
        assert!(!plain.contains("mixup") && !plain.contains("smoothing"), "{plain}");
        let measuring = spec.measuring(Purpose::Evaluate, "w".to_owned(), None).unwrap();
        assert_eq!((measuring.data.mixup, measuring.model.label_smoothing), (None, 0.1));
        for (mixup, model, expected) in [
            ("{ alpha = 0, classes = 2 }", "", "data.mixup.alpha = 0: from 0.001 to 1000000"),
            ("{ alpha = nan, classes = 2 }", "", "data.mixup.alpha = NaN"),
            ("{ classes = 1 }", "", "data.mixup.classes = 1: from 2 to 1048576"),
            ("{ alpha = 1 }", "", "missing field `classes`"),
            ("{ classes = 2, alhpa = 1 }", "", "did you mean `alpha`?"),
            ("{ classes = 2 }", "loss = \"mse\"", "data.mixup: it makes probabilities of labels"),
            ("{ classes = 2 }", "label_smoothing = 1.5", "model.label_smoothing = 1.5: a share from 0 to 1"),
            ("{ classes = 2 }", "label_smoothing = nan", "model.label_smoothing = NaN"),
            (
                "{ classes = 2 }",
                "loss = \"nll\"\nlabel_smoothing = 0.1",
                "only loss = \"cross_entropy\" has it",
            ),
        ] {
            let message = mixed(mixup, model).unwrap_err().to_string();
            assert!(message.contains(expected), "{expected} missing in {message}");
        }
    }

    #[test]
    fn the_file_of_a_tokenizer_lies_beside_the_job_file() {
        let given = |file: &str, more: &str| {
            let list =
                format!("transforms = {{ text = [{{ op = \"tokenize\", file = \"{file}\"{more} }}] }}");
            read(&JOB.replace("validation_fraction", &format!("{list}\nvalidation_fraction")))
        };
        let file = |spec: &JobSpec| match &spec.data.transforms["text"][0] {
            Transform::Tokenize { file, add_special_tokens, sha256 } => {
                (file.clone(), *add_special_tokens, sha256.clone())
            }
            other => panic!("{other:?}"),
        };
        let spec = given("t/tokenizer.json", "").unwrap();
        let (path, special, sha256) = file(&spec);
        assert!(path.starts_with('/') && path.ends_with("jobs/t/tokenizer.json"), "{path}");
        assert_eq!((special, sha256), (true, None));
        assert!(spec.data.tokenizers().is_empty() && !spec.to_json().contains("special"));
        let hash = "0a".repeat(32);
        let more = format!(", add_special_tokens = false, sha256 = \"{hash}\"");
        let spec = given("/t.json", &more).unwrap();
        assert_eq!(file(&spec), ("/t.json".to_owned(), false, Some(hash.clone())));
        assert!(spec.data.tokenizers().iter().eq([&hash]));
        assert_eq!(JobSpec::from_json(&spec.to_json()).unwrap(), spec);
        for (path, more, expected) in [
            ("", "", "data.transforms.text, tokenize: file = \"\"; the path of a tokenizer.json"),
            ("s3://b/t.json", "", "file = \"s3://b/t.json\"; the path"),
            ("t.json", ", sha256 = \"0A\"", "sha256: 64 digits of lower-case hex"),
            ("t.json", ", special = true", "unknown field `special`"),
        ] {
            let message = given(path, more).unwrap_err().to_string();
            assert!(message.contains(expected), "{expected} missing in {message}");
        }
    }

    #[test]
    fn overrides_win_and_bad_ones_are_named() {
        let set = |pair: &str| parse(JOB, Path::new("digits.toml"), &[pair.to_owned()]);
        assert_eq!(set("batch.micro=16").unwrap().batch.micro, 16);
        assert_eq!(set("consistency.mode=pipelined").unwrap().consistency.resolve().order, Order::Canonical);
        assert_eq!(set("exchange.dtype=f16").unwrap().exchange.dtype, WireType::F16);
        assert_eq!(set("fleet.workers.max=3").unwrap().fleet.workers.max, 3);
        assert!(set("batch.mikro=16").unwrap_err().to_string().contains("did you mean `micro`?"));
        assert!(set("nonsense").unwrap_err().to_string().contains("--set nonsense"));
    }
}

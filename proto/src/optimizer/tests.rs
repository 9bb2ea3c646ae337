//! Tests of the `[optimizer]` table: valid settings, and the errors of invalid ones.

use super::*;

fn parse(text: &str) -> OptimizerSpec {
    toml::from_str(text).expect("a readable table")
}

fn violations(text: &str) -> Vec<String> {
    parse(text).validate().expect_err("an invalid table").violations
}

#[test]
fn defaults_are_those_of_pytorch() {
    let rule = |kind| OptimizerSpec::new(kind, 0.1).validate().expect("valid");
    assert_eq!(rule(OptimizerKind::Sgd), Rule::Sgd { weight_decay: 0.0 });
    assert_eq!(
        rule(OptimizerKind::Nesterov),
        Rule::Momentum { momentum: 0.9, dampening: 0.0, nesterov: true, weight_decay: 0.0 }
    );
    assert_eq!(
        rule(OptimizerKind::Adam),
        Rule::Adam {
            betas: [0.9, 0.999],
            eps: 1e-8,
            eps_root: 0.0,
            eps_before_correction: false,
            weight_decay: 0.0,
            decoupled: false,
            amsgrad: false
        }
    );
    assert_eq!(
        rule(OptimizerKind::AdamW),
        Rule::Adam {
            betas: [0.9, 0.999],
            eps: 1e-8,
            eps_root: 0.0,
            eps_before_correction: false,
            weight_decay: 0.01,
            decoupled: true,
            amsgrad: false
        }
    );
    assert_eq!(
        rule(OptimizerKind::Amsgradw),
        Rule::Adam {
            betas: [0.9, 0.999],
            eps: 1e-8,
            eps_root: 0.0,
            eps_before_correction: false,
            weight_decay: 0.01,
            decoupled: true,
            amsgrad: true
        }
    );
    assert_eq!(
        rule(OptimizerKind::Adagrad),
        Rule::Adagrad { lr_decay: 0.0, eps: 1e-10, weight_decay: 0.0, initial_accumulator_value: 0.0 }
    );
    assert_eq!(
        rule(OptimizerKind::Rmsprop),
        Rule::Rmsprop {
            alpha: 0.99,
            eps: 1e-8,
            eps_root: 0.0,
            weight_decay: 0.0,
            momentum: 0.0,
            centered: false
        }
    );
    assert_eq!(rule(OptimizerKind::Adadelta), Rule::Adadelta { rho: 0.9, eps: 1e-6, weight_decay: 0.0 });
}

#[test]
fn all_violations_are_reported_at_once() {
    let found = violations(
        "kind = 'sgd'\nlearning_rate = -1\neps = 1e-8\nweight_decay = nan\n\
         schedule = { kind = 'step', factor = 2 }",
    );
    assert_eq!(
        found,
        [
            "optimizer.eps: not a setting of kind `sgd` (which has weight_decay, clip_norm); remove it or choose a kind \
             that has it: adam, adamw, amsgrad, amsgradw, adagrad, rmsprop, adadelta, lamb",
            "optimizer.learning_rate = -1, expected a number above 0 that fits an f32",
            "optimizer.weight_decay = NaN, expected a finite number, at least 0",
            "optimizer.schedule.every_steps: missing, kind `step` needs it",
            "optimizer.schedule.factor = 2, expected a number in (0, 1]",
        ]
    );
}

#[test]
fn each_setting_has_its_range() {
    for (table, setting) in [
        ("kind = 'sgd'\nlearning_rate = 0", "learning_rate"),
        ("kind = 'sgd'\nlearning_rate = nan", "learning_rate"),
        ("kind = 'sgd'\nlearning_rate = 1e39", "learning_rate"),
        ("kind = 'sgd'\nlearning_rate = 1e-46", "learning_rate"),
        ("kind = 'momentum'\nlearning_rate = 1\nmomentum = 0", "momentum"),
        ("kind = 'nesterov'\nlearning_rate = 1\nmomentum = 1.0", "momentum"),
        ("kind = 'nesterov'\nlearning_rate = 1\ndampening = 0.0", "dampening"),
        ("kind = 'momentum'\nlearning_rate = 1\ndampening = 1", "dampening"),
        ("kind = 'adam'\nlearning_rate = 1\nbetas = [1.0, 0.9]", "betas[0]"),
        ("kind = 'adam'\nlearning_rate = 1\nbetas = [0.9, -0.1]", "betas[1]"),
        ("kind = 'adam'\nlearning_rate = 1\neps = 0", "eps"),
        ("kind = 'adamw'\nlearning_rate = 1\nweight_decay = -0.1", "weight_decay"),
        ("kind = 'adamw'\nlearning_rate = 1\neps_root = -1e-9", "eps_root"),
        ("kind = 'rmsprop'\nlearning_rate = 1\neps_root = inf", "eps_root"),
        ("kind = 'adadelta'\nlearning_rate = 1\neps_root = 0", "eps_root"),
        ("kind = 'rmsprop'\nlearning_rate = 1\neps_before_correction = true", "eps_before_correction"),
        ("kind = 'lamb'\nlearning_rate = 1\neps_before_correction = false", "eps_before_correction"),
        ("kind = 'adagrad'\nlearning_rate = 1\neps = 1e-46", "eps"),
        ("kind = 'adagrad'\nlearning_rate = 1\nlr_decay = inf", "lr_decay"),
        ("kind = 'adagrad'\nlearning_rate = 1\ninitial_accumulator_value = -1", "initial_accumulator_value"),
        ("kind = 'rmsprop'\nlearning_rate = 1\nalpha = 1", "alpha"),
        ("kind = 'rmsprop'\nlearning_rate = 1\nmomentum = 0", "momentum"),
        ("kind = 'rmsprop'\nlearning_rate = 1\nrho = 0.9", "rho"),
        ("kind = 'adam'\nlearning_rate = 1\ncentered = false", "centered"),
        ("kind = 'adadelta'\nlearning_rate = 1\nrho = -0.1", "rho"),
        ("kind = 'adadelta'\nlearning_rate = 1\nalpha = 0.9", "alpha"),
        ("kind = 'ftrl'\nlearning_rate = 1\nbeta = 0", "beta"),
        ("kind = 'ftrl'\nlearning_rate = 1\nl1 = -1", "l1"),
        ("kind = 'ftrl'\nlearning_rate = 1\nl2 = inf", "l2"),
        ("kind = 'ftrl'\nlearning_rate = 1\nweight_decay = 0.1", "weight_decay"),
        ("kind = 'adagrad'\nlearning_rate = 1\nl2 = 0.1", "l2"),
        ("kind = 'adam'\nlearning_rate = 1\nclip_norm = 0", "clip_norm"),
        ("kind = 'lamb'\nlearning_rate = 1\nclip_norm = 1", "clip_norm"),
        ("kind = 'lamb'\nlearning_rate = 1\nbetas = [0.9, 1.0]", "betas[1]"),
    ] {
        let found = violations(table);
        assert_eq!(found.len(), 1, "{table}: {found:?}");
        assert!(found[0].starts_with(&format!("optimizer.{setting}")), "{table}: {found:?}");
    }
}

#[test]
fn an_unknown_key_is_an_error_that_lists_the_known_ones() {
    let error = toml::from_str::<OptimizerSpec>("kind = 'sgd'\nlearning_rate = 1\nmomentun = 0.9")
        .expect_err("a misspelt key")
        .to_string();
    assert!(error.contains("unknown field `momentun`") && error.contains("`momentum`"), "{error}");
    assert!(toml::from_str::<OptimizerSpec>("kind = 'sgdm'\nlearning_rate = 1").is_err());
    assert!(toml::from_str::<Schedule>("kind = 'cosine'\nwarmup = 3").is_err());
}

#[test]
fn the_table_survives_json_and_toml() {
    let spec = parse(
        "kind = 'adamw'\nlearning_rate = 3e-4\nbetas = [0.9, 0.95]\neps = 1e-6\nweight_decay = 0.1\n\
         schedule = { kind = 'cosine', warmup_steps = 100, total_steps = 5000, minimum_factor = 0.1 }",
    );
    let json = serde_json::to_string(&spec).expect("serialisable");
    assert_eq!(serde_json::from_str::<OptimizerSpec>(&json).expect("readable"), spec);
    assert!(!json.contains("null") && !json.contains("momentum"), "{json}");
    assert_eq!(parse(&toml::to_string(&spec).expect("serialisable")), spec);
}

#[test]
fn a_table_without_the_place_of_eps_is_written_without_it_and_means_that_of_pytorch() {
    for kind in ["adam", "adamw", "amsgrad", "amsgradw", "rmsprop"] {
        let table = format!(r#"{{"kind":"{kind}","learning_rate":0.1,"schedule":{{"kind":"constant"}}}}"#);
        let spec: OptimizerSpec = serde_json::from_str(&table).expect("a readable table");
        assert!(!serde_json::to_string(&spec).expect("serialisable").contains("\"eps"));
        let adam_too = kind != "rmsprop";
        let said = OptimizerSpec {
            eps_root: Some(0.0),
            eps_before_correction: adam_too.then_some(false),
            ..spec.clone()
        };
        assert_eq!(spec.validate().expect("valid"), said.validate().expect("valid"));
    }
}

#[test]
fn every_kind_prints_the_name_it_is_read_by() {
    for kind in OptimizerKind::ALL {
        assert_eq!(serde_json::to_value(kind).expect("serialisable"), kind.to_string());
    }
}

#[test]
fn a_slot_has_one_name_and_only_rules_that_use_it_have_it() {
    let names = |table: &str| parse(table).validate().expect("valid").slot_names();
    assert_eq!(names("kind = 'sgd'\nlearning_rate = 1"), [""; 0]);
    assert_eq!(names("kind = 'amsgrad'\nlearning_rate = 1"), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]);
    assert_eq!(names("kind = 'rmsprop'\nlearning_rate = 1"), ["square_avg"]);
    assert_eq!(
        names("kind = 'rmsprop'\nlearning_rate = 1\ncentered = true\nmomentum = 0.5"),
        ["square_avg", "momentum_buffer", "grad_avg"]
    );
    assert_eq!(names("kind = 'ftrl'\nlearning_rate = 1"), ["z", "n"]);
}

//! Guesses which name a user meant: a known name with a similar spelling, or our name for a setting
//! of another framework.

/// Names in other frameworks, each with the section of the job file and our name there. An empty
/// section is the top of the file. If two sections have an entry, the section whose keys are
/// expected wins.
const OTHER_NAMES: &[(&str, &str, &str)] = &[
    ("num_epochs", "", "epochs"),
    ("n_epochs", "", "epochs"),
    ("nb_epochs", "", "epochs"),
    ("max_epochs", "", "epochs"),
    ("num_train_epochs", "", "epochs"),
    ("epoch", "", "epochs"),
    ("random_seed", "", "seed"),
    ("manual_seed", "", "seed"),
    ("random_state", "", "seed"),
    ("optim", "", "optimizer"),
    ("dataset", "", "data"),
    ("network", "", "model"),
    ("net", "", "model"),
    ("lr", "optimizer", "learning_rate"),
    ("learningrate", "optimizer", "learning_rate"),
    ("base_lr", "optimizer", "learning_rate"),
    ("init_lr", "optimizer", "learning_rate"),
    ("initial_lr", "optimizer", "learning_rate"),
    ("step_size", "optimizer", "learning_rate"),
    ("wd", "optimizer", "weight_decay"),
    ("decay", "optimizer", "weight_decay"),
    ("beta1", "optimizer", "betas"),
    ("beta2", "optimizer", "betas"),
    ("epsilon", "optimizer", "eps"),
    ("nesterov", "optimizer", "kind"),
    ("amsgrad", "optimizer", "kind"),
    ("type", "optimizer", "kind"),
    ("name", "optimizer", "kind"),
    ("optimizer", "optimizer", "kind"),
    ("max_norm", "optimizer", "clip_norm"),
    ("max_grad_norm", "optimizer", "clip_norm"),
    ("grad_clip", "optimizer", "clip_norm"),
    ("grad_norm", "optimizer", "clip_norm"),
    ("clip_grad", "optimizer", "clip_norm"),
    ("clip_grad_norm", "optimizer", "clip_norm"),
    ("gradient_clip_val", "optimizer", "clip_norm"),
    ("gradient_clip_norm", "optimizer", "clip_norm"),
    ("clipnorm", "optimizer", "clip_norm"),
    ("param_groups", "optimizer", "groups"),
    ("params", "optimizer.groups", "tensors"),
    ("parameters", "optimizer.groups", "tensors"),
    ("names", "optimizer.groups", "tensors"),
    ("scheduler", "optimizer", "schedule"),
    ("lr_scheduler", "optimizer", "schedule"),
    ("lr_schedule", "optimizer", "schedule"),
    ("gamma", "optimizer.schedule", "factor"),
    ("step_size", "optimizer.schedule", "every_steps"),
    ("t_max", "optimizer.schedule", "total_steps"),
    ("num_training_steps", "optimizer.schedule", "total_steps"),
    ("eta_min", "optimizer.schedule", "minimum_factor"),
    ("warmup", "optimizer.schedule", "warmup_steps"),
    ("num_warmup_steps", "optimizer.schedule", "warmup_steps"),
    ("warmup_steps", "optimizer.schedule", "warmup_steps"),
    ("batch_size", "batch", "effective"),
    ("batchsize", "batch", "effective"),
    ("bs", "batch", "effective"),
    ("global_batch_size", "batch", "effective"),
    ("train_batch_size", "batch", "effective"),
    ("size", "batch", "effective"),
    ("gradient_accumulation_steps", "batch", "effective"),
    ("accumulate_grad_batches", "batch", "effective"),
    ("micro_batch_size", "batch", "micro"),
    ("microbatch_size", "batch", "micro"),
    ("per_device_batch_size", "batch", "micro"),
    ("per_device_train_batch_size", "batch", "micro"),
    ("train_micro_batch_size_per_gpu", "batch", "micro"),
    ("num_workers", "fleet", "workers"),
    ("n_workers", "fleet", "workers"),
    ("world_size", "fleet", "workers"),
    ("num_ps", "fleet", "ps"),
    ("criterion", "model", "loss"),
    ("loss_fn", "model", "loss"),
    ("objective", "model", "loss"),
    ("metric", "model", "metrics"),
    ("pretrained", "model", "initial"),
    ("weights", "model", "initial"),
    ("arch", "model", "builtin"),
    ("architecture", "model", "builtin"),
    ("torchscript", "model", "script"),
    ("module", "model", "script"),
    ("hidden", "model", "options"),
    ("val", "data", "validation"),
    ("valid", "data", "validation"),
    ("test", "data", "validation"),
    ("val_split", "data", "validation_fraction"),
    ("validation_split", "data", "validation_fraction"),
    ("test_size", "data", "validation_fraction"),
    ("staleness", "consistency", "delay"),
    ("save_steps", "checkpoint", "every_steps"),
    ("save_every", "checkpoint", "every_steps"),
    ("save_total_limit", "checkpoint", "keep"),
    ("max_to_keep", "checkpoint", "keep"),
    ("path", "checkpoint", "url"),
    ("dir", "checkpoint", "url"),
    ("folder", "checkpoint", "url"),
    ("output_dir", "checkpoint", "url"),
    ("save_dir", "checkpoint", "url"),
];

/// Returns the word closest to `unknown`, if at most half of the letters differ.
///
/// ```
/// assert_eq!(proto::hint::nearest("deth", ["death", "heartbeat"]), Some("death"));
/// assert_eq!(proto::hint::nearest("colour", ["death", "heartbeat"]), None);
/// ```
pub fn nearest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    closest(unknown, known)
        .filter(|(distance, _)| *distance <= unknown.len().div_ceil(2))
        .map(|(_, word)| word)
}

/// Returns the word with the fewest different letters, and their number.
fn closest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<(usize, &'a str)> {
    known.into_iter().map(|word| (strsim::damerau_levenshtein(unknown, word), word)).min()
}

/// Returns our name, for people, for an unknown key of the job file. `expected` are the keys
/// allowed at its place.
pub(crate) fn job_key(unknown: &str, expected: &[&str]) -> Option<String> {
    let other = unknown.to_lowercase().replace('-', "_");
    let ours = || OTHER_NAMES.iter().filter(|(name, ..)| *name == other);
    if let Some((.., name)) = ours().find(|(.., name)| expected.contains(name)) {
        return Some(format!("`{name}`"));
    }
    // A slip of one letter in four is likelier than the name of another section.
    let slip =
        closest(unknown, expected.iter().copied()).filter(|(distance, _)| 4 * distance <= unknown.len());
    match ours().next().filter(|_| slip.is_none()) {
        Some((_, "", name)) => Some(format!("`{name}`, at the top of the file")),
        Some((_, section, name)) => Some(format!("`{name}` in [{section}]")),
        None => nearest(unknown, expected.iter().copied()).map(|name| format!("`{name}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_usual_names_lead_to_ours() {
        let optimizer = ["kind", "learning_rate", "weight_decay", "l1", "eps"];
        assert_eq!(job_key("lr", &optimizer).unwrap(), "`learning_rate`");
        assert_eq!(job_key("wd", &optimizer).unwrap(), "`weight_decay`");
        assert_eq!(job_key("step_size", &["kind", "every_steps"]).unwrap(), "`every_steps`");
        assert_eq!(job_key("lr", &["name", "epochs"]).unwrap(), "`learning_rate` in [optimizer]");
        assert_eq!(
            job_key("num_epochs", &["micro", "effective"]).unwrap(),
            "`epochs`, at the top of the file"
        );
        assert_eq!(job_key("batch_size", &["micro", "effective"]).unwrap(), "`effective`");
        assert_eq!(job_key("efective", &["micro", "effective"]).unwrap(), "`effective`");
        assert_eq!(job_key("type", &["dtype", "value"]).unwrap(), "`dtype`");
        assert_eq!(job_key("colour", &["micro"]), None);
    }
}

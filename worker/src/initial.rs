//! Warm start: weights of another training replace those of the model where name, shape and type
//! are equal. A job that only evaluates or predicts needs all of them.

use proto::artifact::INITIAL;
use proto::tensor::{DType, TensorRole, TensorSpec, Values};
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

/// Most tensors of one kind that a report names.
const NAMED_MAX: usize = 8;

/// What fits of a file, and what does not.
#[derive(Debug)]
pub(crate) struct Taken {
    fit: usize,
    /// Number of the model's tensors.
    of: usize,
    /// Tensors that begin from the seed, each with the reason.
    from_seed: Vec<String>,
    /// Tensors of the file that the model does not have.
    unused: Vec<String>,
}

impl Taken {
    /// Returns a report for people on what fits and what does not.
    pub(crate) fn report(&self) -> String {
        let mut report = format!("warm start: {} of {} tensors are from model.initial", self.fit, self.of);
        for (what, names) in
            [("begun from the seed", &self.from_seed), ("in the file and not used", &self.unused)]
        {
            if !names.is_empty() {
                report = format!("{report}; {what}: {}", list(names));
            }
        }
        report
    }

    /// Returns a report for people if the file has more than the model, otherwise an empty one.
    ///
    /// # Errors
    /// A tensor of the model is not in the file, so that its values would come from the seed.
    pub(crate) fn whole(&self) -> Result<String> {
        if !self.from_seed.is_empty() {
            return Err(wrong(format!(
                "{} of the model's {} tensors do not fit: {}; give the weights of this very network, or the job file and \
                 the data that it was trained with",
                self.from_seed.len(),
                self.of,
                list(&self.from_seed)
            )));
        }
        Ok(if self.unused.is_empty() { String::new() } else { self.report() })
    }
}

fn wrong(reason: String) -> Error {
    Error::Task { what: format!("model.initial `{INITIAL}`"), reason }
}

/// Replaces `values` (in the order of `tensors`) by tensors of a safetensors file that fit.
///
/// # Errors
/// The file is malformed, or nothing in it fits.
pub(crate) fn take(file: &[u8], tensors: &[TensorSpec], values: &mut [Values]) -> Result<Taken> {
    let file = SafeTensors::deserialize(file).map_err(|error| wrong(error.to_string()))?;
    let (mut fit, mut from_seed) = (0, Vec::new());
    // A loss scale is no part of the model.
    let is_models = |tensor: &&TensorSpec| tensor.role != TensorRole::LossScale;
    for (tensor, values) in tensors.iter().zip(values).filter(|(tensor, _)| is_models(tensor)) {
        let Ok(found) = file.tensor(&tensor.name) else {
            from_seed.push(format!("`{}` (not in the file)", tensor.name));
            continue;
        };
        let dtype = match tensor.dtype() {
            DType::F32 => Dtype::F32,
            DType::I64 => Dtype::I64,
        };
        if (found.dtype(), found.shape()) == (dtype, &tensor.shape[..]) {
            values.write_bytes(0, found.data());
            fit += 1;
        } else {
            let (name, shape) = (&tensor.name, &tensor.shape);
            from_seed.push(format!(
                "`{name}` ({dtype:?} {shape:?} in the model, {:?} {:?} in the file)",
                found.dtype(),
                found.shape()
            ));
        }
    }
    let is_used = |name: &&str| tensors.iter().any(|tensor| tensor.name == **name);
    let mut unused: Vec<_> = file.names().into_iter().filter(|name| !is_used(name)).collect();
    unused.sort_unstable();
    let unused: Vec<_> = unused.into_iter().map(|name| format!("`{name}`")).collect();
    if fit == 0 {
        return Err(wrong(format!(
            "none of the model's tensors fits: {}; it has {}",
            list(&from_seed),
            list(&unused)
        )));
    }
    Ok(Taken { fit, of: tensors.iter().filter(is_models).count(), from_seed, unused })
}

/// Lists the first few names.
fn list(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMED_MAX);
    let shown = names[..names.len() - more].join(", ");
    match (more, shown.is_empty()) {
        (0, true) => "none".to_owned(),
        (0, false) => shown,
        (more, _) => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::parameter("a", [2]),
            TensorSpec::parameter("b", [2]),
            TensorSpec::counter("n", []),
            TensorSpec::parameter("new", [1]),
        ]
    }

    #[test]
    fn what_fits_is_taken_and_what_does_not_is_named() {
        let old = [
            TensorSpec::parameter("a", [2]),
            TensorSpec::parameter("b", [3]),
            TensorSpec::counter("n", []),
            TensorSpec::parameter("old", [1]),
        ];
        let values = [
            Values::F32(vec![1.0, 2.0]),
            Values::F32(vec![3.0; 3]),
            Values::I64(vec![7]),
            Values::F32(vec![4.0]),
        ];
        let file = model::export::safetensors(&old, &values, &[]).expect("a file");
        let mut values: Vec<_> = tensors().iter().map(TensorSpec::zeros).collect();
        let taken = take(&file, &tensors(), &mut values).expect("some fit");
        assert_eq!(values[0], Values::F32(vec![1.0, 2.0]));
        assert_eq!((values[1].as_f32(), &values[2]), (Some(&[0.0, 0.0][..]), &Values::I64(vec![7])));
        assert_eq!(
            taken.report(),
            "warm start: 2 of 4 tensors are from model.initial; begun from the seed: `b` (F32 [2] in the model, F32 [3] in the \
             file), `new` (not in the file); in the file and not used: `old`"
        );
    }

    #[test]
    fn a_job_that_does_not_train_needs_every_tensor() {
        let values = [Values::F32(vec![1.0, 2.0]), Values::F32(vec![3.0; 2])];
        let of = |names: [&str; 2]| {
            let tensors = names.map(|name| TensorSpec::parameter(name, [2]));
            model::export::safetensors(&tensors, &values, &[]).expect("a file")
        };
        let model = [TensorSpec::parameter("a", [2]), TensorSpec::parameter("b", [2])];
        let mut own: Vec<_> = model.iter().map(TensorSpec::zeros).collect();
        let whole = take(&of(["a", "b"]), &model, &mut own).expect("all fit").whole();
        assert_eq!(whole.expect("all fit"), "");
        let error =
            take(&of(["a", "c"]), &model, &mut own).expect("one fits").whole().unwrap_err().to_string();
        assert!(error.contains("1 of the model's 2 tensors do not fit: `b` (not in the file)"), "{error}");
        let more = take(&of(["a", "b"]), &model[..1], &mut own[..1]).expect("it fits").whole();
        assert!(more.expect("it has more").ends_with("in the file and not used: `b`"));
    }

    #[test]
    fn a_file_of_something_else_is_an_error() {
        let other = [TensorSpec::parameter("z", [2])];
        let file = model::export::safetensors(&other, &[Values::F32(vec![1.0, 2.0])], &[]).expect("a file");
        let mut values: Vec<_> = tensors().iter().map(TensorSpec::zeros).collect();
        let error = take(&file, &tensors(), &mut values).unwrap_err().to_string();
        assert!(
            error.contains("none of the model's tensors fits") && error.contains("it has `z`"),
            "{error}"
        );
        assert!(take(b"no file", &tensors(), &mut values).is_err());
    }
}

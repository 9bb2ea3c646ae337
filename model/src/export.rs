//! `model.safetensors`: a model's tensors as one file that PyTorch reads.
//!
//! The bytes are a pure function of the tensors: sorted (by type, then name), no metadata, no time.
//! So two runs have equal files exactly when they have equal tensors.

use std::borrow::Cow;
use std::collections::BTreeMap;

use proto::tensor::{DType, TensorRole, TensorSpec, Values};
pub use safetensors::Dtype;
use safetensors::View;

use crate::error::{Error, Result};

/// A tensor of a `state_dict` that training never changes: a mask, a frozen weight. It stays in the
/// model's file, never travels, and may be of any type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constant {
    /// PyTorch `state_dict` name.
    pub name: String,
    /// Sizes of the dimensions, row-major.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: Dtype,
    /// Raw little-endian elements.
    pub bytes: Vec<u8>,
}

/// Writes the file: `values` of the trained `tensors`, in their order, and the model's constants.
/// Registers and loss scales are left out: they are the state of a loop or of the training, and not
/// of the model.
///
/// ```
/// use proto::tensor::{TensorSpec, Values};
/// let (tensor, values) = (TensorSpec::parameter("weight", [2]), Values::F32(vec![1.0, 2.0]));
/// let file = model::export::safetensors(&[tensor], &[values], &[]).unwrap();
/// assert!(file.ends_with(&[1.0f32.to_le_bytes(), 2.0f32.to_le_bytes()].concat()));
/// ```
///
/// # Errors
/// Values that do not fit their tensors, or two tensors with one name.
pub fn safetensors(tensors: &[TensorSpec], values: &[Values], constants: &[Constant]) -> Result<Vec<u8>> {
    if tensors.len() != values.len() {
        return Err(wrong(format!("{} tensors, {} lists of values", tensors.len(), values.len())));
    }
    let is_models = |role| !matches!(role, TensorRole::Register | TensorRole::LossScale);
    let model = tensors.iter().zip(values).filter(|(tensor, _)| is_models(tensor.role));
    let trained = model.map(|(tensor, values)| {
        let dtype = match values.dtype() {
            DType::F32 => Dtype::F32,
            DType::I64 => Dtype::I64,
        };
        (&tensor.name, Slice { dtype, shape: &tensor.shape, bytes: values.bytes() })
    });
    let kept = constants.iter().map(|constant| {
        let Constant { name, shape, dtype, bytes } = constant;
        (name, Slice { dtype: *dtype, shape, bytes })
    });
    let mut slices = BTreeMap::new();
    for (name, slice) in trained.chain(kept) {
        let (expected, found) = (slice.expected_bits(), slice.bytes.len() * 8);
        if expected != found {
            let shape = slice.shape;
            return Err(wrong(format!(
                "tensor `{name}` of shape {shape:?}: {found} bits, expected {expected}"
            )));
        }
        if slices.insert(name, slice).is_some() {
            return Err(wrong(format!("two tensors are named `{name}`")));
        }
    }
    safetensors::serialize(slices, None).map_err(|error| wrong(error.to_string()))
}

struct Slice<'a> {
    dtype: Dtype,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl Slice<'_> {
    fn expected_bits(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize()
    }
}

impl View for Slice<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes.into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn wrong(reason: String) -> Error {
    Error::Engine { what: "write model.safetensors".to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    fn model() -> (Vec<TensorSpec>, Vec<Values>, Vec<Constant>) {
        let tensors = vec![
            TensorSpec::parameter("fc.weight", [2, 1]),
            TensorSpec::counter("bn.num_batches_tracked", []),
            TensorSpec::state("bn.running_mean", [1]),
        ];
        let values = vec![Values::F32(vec![1.0, -2.5]), Values::I64(vec![7]), Values::F32(vec![0.1])];
        let mask =
            Constant { name: "mask".to_owned(), shape: vec![3], dtype: Dtype::BOOL, bytes: vec![1, 0, 1] };
        (tensors, values, vec![mask])
    }

    #[test]
    fn what_is_written_reads_back_under_its_names() {
        let (tensors, values, constants) = model();
        let file = safetensors(&tensors, &values, &constants).unwrap();
        let read = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(read.len(), 4);
        for (tensor, values) in tensors.iter().zip(&values) {
            let view = read.tensor(&tensor.name).unwrap();
            assert_eq!((view.shape(), view.data()), (&*tensor.shape, values.bytes()));
        }
        assert_eq!(read.tensor("bn.num_batches_tracked").unwrap().dtype(), Dtype::I64);
        assert_eq!(read.tensor("mask").unwrap().data(), [1, 0, 1]);
    }

    #[test]
    fn bytes_depend_on_the_tensors_alone_and_not_on_their_order() {
        let (mut tensors, mut values, constants) = model();
        let file = safetensors(&tensors, &values, &constants).unwrap();
        let header = u64::from_le_bytes(*file.first_chunk().unwrap());
        let header = std::str::from_utf8(&file[8..8 + header as usize]).unwrap();
        let expected = r#"{"bn.num_batches_tracked":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"bn.running_mean":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},"fc.weight":{"dtype":"F32","shape":[2,1],"data_offsets":[12,20]},"mask":{"dtype":"BOOL","shape":[3],"data_offsets":[20,23]}}"#;
        assert_eq!(header.trim_end(), expected);
        tensors.reverse();
        values.reverse();
        assert_eq!(safetensors(&tensors, &values, &constants).unwrap(), file);
    }

    #[test]
    fn a_register_is_no_part_of_the_file() {
        let (mut tensors, mut values, constants) = model();
        let file = safetensors(&tensors, &values, &constants).unwrap();
        tensors.push(TensorSpec::register("job.state", [2]));
        values.push(Values::I64(vec![1, 2]));
        assert_eq!(safetensors(&tensors, &values, &constants).unwrap(), file);
    }

    #[test]
    fn values_that_do_not_fit_are_refused() {
        let (tensors, mut values, mut constants) = model();
        constants[0].name = "fc.weight".to_owned();
        let error = safetensors(&tensors, &values, &constants).unwrap_err().to_string();
        assert!(error.contains("two tensors are named `fc.weight`"), "{error}");
        values[0] = Values::F32(vec![1.0]);
        let error = safetensors(&tensors, &values, &[]).unwrap_err().to_string();
        assert!(error.contains("`fc.weight` of shape [2, 1]: 32 bits, expected 64"), "{error}");
        assert!(safetensors(&tensors, &values[1..], &[]).is_err());
    }
}

//! Merges the gradient of one microbatch with the nodes to the left of it, tensor by tensor.
//!
//! A tensor is merged as soon as it is made. Tensors do not depend on each other, so their order
//! changes no bit. A sum that is pushed at once is told to its maker; any other one is kept.

use std::sync::Arc;

use kernels::values;
use proto::tensor::{TensorSpec, Values};
use proto::tree::Node;
use proto::wire::WireType;

use crate::error::{Error, Result};
use crate::exchange::SumMaker;

/// A node of the tree, its number of records, and the values of each tensor.
pub(crate) type Reduced = (Node, u64, Vec<Values>);

/// A microbatch whose gradients are being made, and the nodes that are merged with them.
pub(crate) struct Merging {
    tensors: Arc<[TensorSpec]>,
    wire: WireType,
    /// The node of the sum, and its number of records.
    sum: (Node, u64),
    /// Values of the nodes to the left, the nearest first. A tensor that was merged has none.
    lefts: Vec<Vec<Option<Values>>>,
    /// Tells a sum that is pushed.
    maker: Option<SumMaker>,
    /// The sum of each tensor that was made, if nobody is told.
    made: Vec<Option<Values>>,
    /// Tensors that lack gradients.
    missing: Vec<bool>,
    /// Gradients came that belong to no tensor.
    is_wrong: bool,
}

impl Merging {
    pub(crate) fn new(
        tensors: Arc<[TensorSpec]>,
        wire: WireType,
        sum: (Node, u64),
        lefts: Vec<Vec<Option<Values>>>,
        maker: Option<SumMaker>,
    ) -> Self {
        let made = tensors.iter().map(|_| None).collect();
        let missing = vec![true; tensors.len()];
        Self { tensors, wire, sum, lefts, maker, made, missing, is_wrong: false }
    }

    /// Takes the gradient of a tensor, once for each.
    pub(crate) fn take(&mut self, tensor: usize, mut values: Values) {
        let fits = |spec: &&TensorSpec| values.dtype() == spec.dtype() && values.len() == spec.len();
        let spec = self.tensors.get(tensor).filter(fits);
        let Some(role) = spec.filter(|_| std::mem::take(&mut self.missing[tensor])).map(|spec| spec.role)
        else {
            self.is_wrong = true;
            return;
        };
        values::round(self.wire.of(role), &mut values);
        for left in &mut self.lefts {
            let mut sum = left[tensor].take().expect("it is merged once");
            values::merge(role, self.wire, &mut sum, &values);
            values = sum;
        }
        match &self.maker {
            Some(maker) => maker.tell(tensor, values),
            None => self.made[tensor] = Some(values),
        }
    }

    /// Ends the sum once the gradients count. Returns it unless its maker was told.
    ///
    /// # Errors
    /// The gradients did not fit the job's tensors.
    pub(crate) fn finish(self) -> Result<Option<Reduced>> {
        if self.is_wrong || self.missing.contains(&true) {
            return Err(Error::Task {
                what: "gradients".to_owned(),
                reason: "their number, types or lengths differ from the model's tensors; the model must return one for each, in order"
                    .to_owned(),
            });
        }
        if let Some(maker) = self.maker {
            maker.finish();
            return Ok(None);
        }
        let (node, samples) = self.sum;
        Ok(Some((node, samples, self.made.into_iter().flatten().collect())))
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;
    use crate::exchange::ComingSum;

    fn merging(maker: Option<SumMaker>) -> Merging {
        let tensors = [TensorSpec::parameter("w", [2]), TensorSpec::counter("n", [1])].into();
        let left = vec![Some(Values::F32(vec![0.5, 1.0])), Some(Values::I64(vec![3]))];
        Merging::new(tensors, WireType::F32, (Node::new(0, 2), 7), vec![left], maker)
    }

    fn gradients() -> [(usize, Values); 2] {
        [(1, Values::I64(vec![2])), (0, Values::F32(vec![1.0, -0.5]))]
    }

    #[test]
    fn tensors_are_merged_in_any_order_and_told_at_once() {
        let (maker, sum) = ComingSum::new();
        let (mut told, mut kept) = (merging(Some(maker)), merging(None));
        for (tensor, values) in gradients() {
            kept.take(tensor, values.clone());
            told.take(tensor, values);
            assert!(sum.begun().now_or_never().is_some() && !sum.is_whole());
        }
        let (node, samples, values) = kept.finish().unwrap().unwrap();
        assert_eq!((node, samples), (Node::new(0, 2), 7));
        assert_eq!(values, [Values::F32(vec![1.5, 0.5]), Values::I64(vec![3])]);
        assert!(told.finish().unwrap().is_none());
        let made = sum.made().now_or_never().unwrap().unwrap();
        assert!(made.iter().map(|made| &made.host()[..]).eq(values.iter().map(Values::bytes)));
    }

    #[test]
    fn gradients_of_another_model_are_refused_and_the_sum_never_becomes_whole() {
        let refused = |gradients: Vec<(usize, Values)>| {
            let (maker, sum) = ComingSum::new();
            let mut merging = merging(Some(maker));
            gradients.into_iter().for_each(|(tensor, values)| merging.take(tensor, values));
            let said = merging.finish().map(drop).unwrap_err().to_string();
            assert!(said.contains("gradients"), "{said}");
            assert!(sum.made().now_or_never().expect("the maker is gone").is_none());
        };
        let [counter, floats] = gradients();
        refused(vec![floats.clone()]);
        refused(vec![floats.clone(), counter.clone(), counter.clone()]);
        refused(vec![floats.clone(), counter.clone(), (2, Values::I64(vec![1]))]);
        refused(vec![counter.clone(), (0, Values::F32(vec![1.0]))]);
        refused(vec![floats, (1, Values::F32(vec![1.0]))]);
    }
}

//! The layout of a model: tensor -> chunks -> partition -> ps.
//!
//! Dense tensors are cut into chunks of 1 MiB. Chunks are spread over the partitions by size, so
//! that one huge tensor is balanced too. The layout is a pure function of (tensors, number of
//! partitions): every process computes it, and it is never sent. It does not influence the trained
//! bits, because updates are elementwise.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::ids::{ChunkId, PartitionId};
use crate::tensor::TensorSpec;
use crate::wire::WireType;

/// Elements of a full chunk: 1 MiB of f32 (2 MiB of i64; counters are scalars in practice).
pub const CHUNK_LEN: usize = 262_144;

/// Most elements of one tensor.
pub const TENSOR_LEN_MAX: usize = 1 << 40;

/// Most chunks of one model: 16 TiB.
pub const CHUNKS_MAX: usize = 1 << 24;

/// A slice of a dense tensor: unit of versions and of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSpec {
    /// Index of the chunk's tensor in the model's order.
    pub tensor: usize,
    /// First element of the chunk within its tensor.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Partition that holds the chunk.
    pub partition: PartitionId,
}

/// The whole model cut into chunks, and the partition of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    tensors: Vec<TensorSpec>,
    chunks: Vec<ChunkSpec>,
    partitions: Vec<Vec<ChunkId>>,
}

impl Layout {
    /// Cuts `tensors` into chunks and spreads them over `partitions`. The largest chunk goes first,
    /// each to the partition with the fewest bytes so far (ties to the lower number). So the
    /// heaviest partition holds at most one chunk more than the lightest.
    ///
    /// # Errors
    /// No tensors, no partitions, a repeated or empty name, or a tensor that is empty or too large.
    pub fn new(tensors: Vec<TensorSpec>, partitions: u32) -> Result<Self> {
        Self::check(&tensors, partitions)?;
        let mut chunks = Vec::new();
        for (tensor, spec) in tensors.iter().enumerate() {
            let len = spec.len();
            chunks.extend((0..len).step_by(CHUNK_LEN).map(|offset| ChunkSpec {
                tensor,
                offset,
                len: CHUNK_LEN.min(len - offset),
                partition: PartitionId(0),
            }));
        }
        let bytes = |chunk: &ChunkSpec| chunk.len * tensors[chunk.tensor].dtype().size();
        let mut by_size: Vec<usize> = (0..chunks.len()).collect();
        by_size.sort_by_key(|&id| (std::cmp::Reverse(bytes(&chunks[id])), id));
        let mut load = vec![0usize; partitions as usize];
        for id in by_size {
            let lightest = (0..load.len()).min_by_key(|&p| (load[p], p)).expect("at least one partition");
            load[lightest] += bytes(&chunks[id]);
            chunks[id].partition = PartitionId(lightest as u32);
        }
        let mut members = vec![Vec::new(); partitions as usize];
        for (id, chunk) in chunks.iter().enumerate() {
            members[chunk.partition.index()].push(ChunkId(id as u32));
        }
        Ok(Self { tensors, chunks, partitions: members })
    }

    /// Checks that these tensors and partitions have a layout. The check visits each tensor once
    /// and no chunk, because a model may have millions of chunks.
    ///
    /// # Errors
    /// No tensors, no partitions, a repeated or empty name, or a tensor that is empty or too large.
    pub fn check(tensors: &[TensorSpec], partitions: u32) -> Result<()> {
        check(tensors, partitions)
    }

    /// Returns the tensors in the model's order.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Returns all chunks. A [`ChunkId`] is an index into this slice.
    pub fn chunks(&self) -> &[ChunkSpec] {
        &self.chunks
    }

    /// Returns one chunk.
    ///
    /// # Panics
    /// If the layout has no such chunk.
    pub fn chunk(&self, id: ChunkId) -> ChunkSpec {
        self.chunks[id.index()]
    }

    /// Returns the tensor of a chunk.
    pub fn tensor_of(&self, id: ChunkId) -> &TensorSpec {
        &self.tensors[self.chunk(id).tensor]
    }

    /// Returns the bytes of a chunk's values.
    pub fn chunk_bytes(&self, id: ChunkId) -> usize {
        self.chunk(id).len * self.tensor_of(id).dtype().size()
    }

    /// Returns the bytes of a chunk's values when values of parameters have the type `wire`.
    pub fn chunk_bytes_in(&self, id: ChunkId, wire: WireType) -> usize {
        let tensor = self.tensor_of(id);
        let wire = wire.of(tensor.role);
        if wire.rounds() { self.chunk(id).len * wire.size() } else { self.chunk_bytes(id) }
    }

    /// Returns the number of partitions.
    pub const fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// Returns the chunks of one partition in increasing order. A partition of a tiny model may be
    /// empty.
    pub fn members(&self, partition: PartitionId) -> &[ChunkId] {
        &self.partitions[partition.index()]
    }

    /// Returns the bytes of one partition's weights.
    pub fn partition_bytes(&self, partition: PartitionId) -> usize {
        self.partition_bytes_in(partition, WireType::F32)
    }

    /// Returns the bytes of one partition's weights when values of parameters have the type `wire`.
    pub fn partition_bytes_in(&self, partition: PartitionId, wire: WireType) -> usize {
        self.members(partition).iter().map(|&id| self.chunk_bytes_in(id, wire)).sum()
    }
}

fn check(tensors: &[TensorSpec], partitions: u32) -> Result<()> {
    if partitions == 0 {
        return Err(Error::NoPartitions);
    }
    if tensors.is_empty() {
        return Err(Error::NoTensors);
    }
    let (mut seen, mut chunks) = (BTreeMap::new(), 0);
    for (index, tensor) in tensors.iter().enumerate() {
        let bad = |expected| Error::Tensor {
            name: tensor.name.clone(),
            index,
            shape: tensor.shape.clone(),
            expected,
        };
        if tensor.name.is_empty() || tensor.name.len() > 512 {
            return Err(bad("a name of 1 to 512 bytes"));
        }
        let len = tensor.shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        if !len.is_some_and(|len| (1..=TENSOR_LEN_MAX).contains(&len)) {
            return Err(bad("1 to 2^40 elements"));
        }
        chunks += len.map_or(0, |len| len.div_ceil(CHUNK_LEN));
        if chunks > CHUNKS_MAX {
            return Err(bad("at most 2^24 chunks of 1 MiB up to here"));
        }
        if seen.insert(&tensor.name, index).is_some() {
            return Err(bad("a name that no other tensor has"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn models() -> impl Strategy<Value = Vec<TensorSpec>> {
        let tensor = (0..3u8, prop_oneof![1usize..2000, Just(CHUNK_LEN), CHUNK_LEN + 1..4 * CHUNK_LEN]);
        proptest::collection::vec(tensor, 1..12).prop_map(|list| {
            let make = |(index, (role, len)): (usize, (u8, usize))| match role {
                0 => TensorSpec::parameter(format!("t{index}"), [len]),
                1 => TensorSpec::state(format!("t{index}"), [len]),
                _ => TensorSpec::counter(format!("t{index}"), []),
            };
            list.into_iter().enumerate().map(make).collect()
        })
    }

    proptest! {
        #[test]
        fn every_element_is_in_one_chunk_and_every_chunk_in_one_partition(tensors in models(), partitions in 1u32..9) {
            let layout = Layout::new(tensors.clone(), partitions).unwrap();
            let mut next = vec![0usize; tensors.len()];
            for chunk in layout.chunks() {
                prop_assert_eq!(chunk.offset, next[chunk.tensor]);
                prop_assert!(chunk.len <= CHUNK_LEN);
                next[chunk.tensor] += chunk.len;
            }
            prop_assert_eq!(next, tensors.iter().map(TensorSpec::len).collect::<Vec<_>>());
            let mut owners = vec![0; layout.chunks().len()];
            for partition in (0..partitions).map(PartitionId) {
                for &id in layout.members(partition) {
                    owners[id.index()] += 1;
                    prop_assert_eq!(layout.chunk(id).partition, partition);
                }
            }
            prop_assert!(owners.iter().all(|&count| count == 1));
        }

        #[test]
        fn partitions_differ_by_at_most_one_chunk(tensors in models(), partitions in 1u32..9) {
            let layout = Layout::new(tensors, partitions).unwrap();
            let bytes: Vec<usize> = (0..partitions).map(|p| layout.partition_bytes(PartitionId(p))).collect();
            let largest = (0..layout.chunks().len()).map(|id| layout.chunk_bytes(ChunkId(id as u32))).max().unwrap();
            prop_assert!(bytes.iter().max().unwrap() - bytes.iter().min().unwrap() <= largest, "{bytes:?}");
        }
    }

    #[test]
    fn the_largest_model_is_checked_without_a_look_at_its_chunks() {
        let tensors = |count: usize| {
            let tensor = |index| TensorSpec::parameter(format!("t{index}"), [TENSOR_LEN_MAX]);
            (0..count).map(tensor).collect::<Vec<_>>()
        };
        let most = CHUNKS_MAX / (TENSOR_LEN_MAX / CHUNK_LEN);
        assert!(Layout::check(&tensors(most), 1024).is_ok());
        assert!(Layout::check(&tensors(most + 1), 1024).unwrap_err().to_string().contains("2^24 chunks"));
        assert!(Layout::check(&tensors(1), 0).is_err());
    }

    #[test]
    fn models_that_cannot_be_placed_are_refused_by_name() {
        let twice = vec![TensorSpec::parameter("w", [2]), TensorSpec::parameter("w", [3])];
        assert!(Layout::new(twice, 1).unwrap_err().to_string().contains("`w`"));
        let empty = vec![TensorSpec::parameter("w", [2, 0])];
        assert!(Layout::new(empty, 1).unwrap_err().to_string().contains("[2, 0]"));
        assert!(Layout::new(Vec::new(), 1).is_err());
        assert!(Layout::new(vec![TensorSpec::parameter("w", [1])], 0).is_err());
    }
}

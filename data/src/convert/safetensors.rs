//! Shards of safetensors: a tensor for each column.
//!
//! The header says where each tensor lies, so that values can be written to their places while
//! records are read, and nothing is collected in memory.

use proto::column::ElementType;
use serde_json::{Map, json};

use super::sink::{Shard, Sink};
use super::whole::Whole;
use crate::column::Column;
use crate::error::Result;

/// A shard of safetensors.
pub(super) struct Safetensors {
    file: Whole,
    /// Place of the next value of each column.
    places: Vec<u64>,
}

impl Safetensors {
    pub(super) fn open(shard: &Shard<'_>) -> Result<Self> {
        let specs: Vec<_> = shard.columns.iter().map(|column| &column.stored).collect();
        // Larger types first, so that all values are aligned.
        let mut order: Vec<usize> = (0..specs.len()).collect();
        order.sort_by_key(|&at| (std::cmp::Reverse(specs[at].dtype.size()), &specs[at].name));
        let (mut header, mut places, mut end) = (Map::new(), vec![0; specs.len()], 0);
        for at in order {
            let spec = specs[at];
            let shape = [&[shard.records as usize][..], &spec.shape].concat();
            let width: usize = spec.shape.iter().product();
            let begin = end;
            end += shard.records * (width * spec.dtype.size()) as u64;
            places[at] = begin;
            let tensor = json!({ "dtype": name(spec.dtype), "shape": shape, "data_offsets": [begin, end] });
            header.insert(spec.name.clone(), tensor);
        }
        let mut text = serde_json::Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let begin = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
        places.iter_mut().for_each(|place| *place += begin.len() as u64);
        let file = shard.file()?;
        file.write_at(&begin, 0)?;
        Ok(Self { file, places })
    }
}

impl Sink for Safetensors {
    fn add(&mut self, columns: &[Column]) -> Result<()> {
        for (place, column) in self.places.iter_mut().zip(columns) {
            self.file.write_at(column.bytes(), *place)?;
            *place += column.bytes().len() as u64;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Vec<Whole>> {
        Ok(vec![self.file])
    }
}

const fn name(dtype: ElementType) -> &'static str {
    match dtype {
        ElementType::Bool => "BOOL",
        ElementType::U8 => "U8",
        ElementType::I8 => "I8",
        ElementType::I16 => "I16",
        ElementType::I32 => "I32",
        ElementType::I64 => "I64",
        ElementType::F16 => "F16",
        ElementType::BF16 => "BF16",
        ElementType::F32 => "F32",
        ElementType::F64 => "F64",
    }
}

//! The copy of a pulled chunk into the tensor that it belongs to, on the host or on a device.
//!
//! Always true here: what crosses between the host and a device crosses once, and values that are
//! on a device already do not leave it.

use std::fmt;

use kernels::cpu::cast;
use kernels::values;
use proto::parameters::GivenValues;
use proto::placement::ChunkSpec;
use proto::status::{Failure, Kind};
use proto::tensor::Values;
use proto::wire::WireType;

/// Copies a chunk to its place in a tensor. It came in the type `wire`, and is rounded to the type
/// `round`.
///
/// # Errors
/// A device failed.
pub(super) fn place(
    tensor: &mut Values,
    place: ChunkSpec,
    (wire, came): (WireType, GivenValues<'_>),
    round: WireType,
) -> Result<(), Failure> {
    let begin = place.offset * tensor.dtype().size();
    if let Values::Device(_) = tensor {
        let to = values::on_device_mut(tensor).ok_or_else(|| failed("the weights are in use"))?;
        match came {
            GivenValues::Host(bytes) => to.place_as(begin, (wire, bytes), round),
            GivenValues::Device(memory, bytes) => {
                let from = values::storage(memory).ok_or_else(|| failed("values of an unknown device"))?;
                let placed = begin..begin + bytes.len();
                to.place_part(begin, from, bytes);
                to.round_part(round, placed);
            }
        }
        return Ok(());
    }
    let fetched;
    let (wire, bytes) = match came {
        GivenValues::Host(bytes) => (wire, bytes),
        GivenValues::Device(memory, bytes) => {
            fetched = memory.read(round, bytes).map_err(failed)?;
            (round, fetched.as_slice())
        }
    };
    match tensor.as_f32_mut().filter(|_| round.rounds()) {
        Some(floats) => {
            let floats = &mut floats[place.offset..place.offset + place.len];
            match wire.rounds() {
                true => cast::decode(wire, bytes, floats),
                false => cast::round_to(round, bytes, floats),
            }
        }
        None => tensor.write_bytes(place.offset, bytes),
    }
    Ok(())
}

fn failed(reason: impl fmt::Display) -> Failure {
    Failure::new(Kind::Unavailable, reason)
}

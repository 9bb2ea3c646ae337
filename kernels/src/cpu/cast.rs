//! Conversions between f32 and the 16-bit wire types, and sums that are rounded to them.
//!
//! Always true here: a value becomes the nearest value of the type, of two equally near ones the
//! even one, as `torch.Tensor.to` does; what is not a number stays so; what is too large becomes an
//! infinity (f16: from 65520 on). The conversions are operations on integers and exact additions,
//! of which the compiler makes vectors: every machine gives the same bits.
#![expect(unsafe_code, reason = "functions compiled for other instruction sets")]

use proto::tensor::{Chunk, Values};
use proto::wire::WireType;

use super::sum;

/// Runs a generic pass with the conversions of a 16-bit type.
macro_rules! narrow {
    ($wire:expr, pass::$pass:ident($($argument:expr),*)) => {
        match $wire {
            WireType::F32 => unreachable!("f32 is not converted"),
            WireType::Bf16 => widest(|| pass::$pass::<Bf16>($($argument),*)),
            WireType::F16 => widest(|| pass::$pass::<F16>($($argument),*)),
        }
    };
}

/// Rounds values in place.
///
/// ```
/// use kernels::cpu::cast;
/// use proto::wire::WireType;
///
/// let mut values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0];
/// cast::round(WireType::Bf16, &mut values);
/// assert_eq!(values, [1.0, 1.0 + 4.0 / 256.0]);
/// ```
pub fn round(wire: WireType, values: &mut [f32]) {
    if wire.rounds() {
        narrow!(wire, pass::round(values));
    }
}

/// Writes the rounded values of `from` (little-endian f32 at any alignment) to `to`.
///
/// # Panics
/// If the lengths differ.
pub fn round_to(wire: WireType, from: &[u8], to: &mut [f32]) {
    assert_eq!(from.len(), size_of_val(to), "values for another number of values");
    if wire.rounds() {
        narrow!(wire, pass::round_to(from, to));
    } else {
        bytemuck::cast_slice_mut(to).copy_from_slice(from);
    }
}

/// `left = round(left + right)`: a node of the reduction tree below the root. `right` is
/// little-endian f32 at any alignment.
///
/// # Panics
/// If the lengths differ.
pub fn add_assign(wire: WireType, left: &mut [f32], right: &[u8]) {
    assert_eq!(size_of_val(left), right.len(), "sum of different lengths");
    if wire.rounds() {
        narrow!(wire, pass::add_assign(left, right));
    } else {
        sum::add_assign(left, right);
    }
}

/// `sum = round(left + right)`, which are little-endian f32 at any alignment; for a type that
/// rounds.
///
/// # Panics
/// If the lengths differ, or for f32.
pub fn add(wire: WireType, left: &[u8], right: &[u8], sum: &mut [f32]) {
    assert_eq!((left.len(), right.len()), (size_of_val(sum), size_of_val(sum)), "sum of different lengths");
    narrow!(wire, pass::add(left, right, sum));
}

/// `left = round(left + right)`, elementwise on two tensors or chunks; for counters the maximum.
///
/// # Panics
/// If types or lengths differ.
pub fn merge(wire: WireType, left: &mut Values, right: &Values) {
    match (left.as_f32_mut(), right.as_f32()) {
        (Some(left), Some(right)) if wire.rounds() => add_assign(wire, left, bytemuck::cast_slice(right)),
        _ => left.merge(right),
    }
}

/// Little-endian f32 at any alignment in the type `wire`, rounded where that is not done yet:
/// `wire.size()` bytes a value.
pub fn encode(wire: WireType, values: &[u8]) -> Vec<u8> {
    if !wire.rounds() {
        return values.to_vec();
    }
    let mut encoded = vec![0; values.len() / 4 * wire.size()];
    narrow!(wire, pass::encode(values, &mut encoded));
    encoded
}

/// Returns a chunk as it travels in `wire`: the values of a parameter are encoded, all others stay
/// as they are.
pub fn encode_chunk(wire: WireType, chunk: Chunk) -> Chunk {
    let wire = wire.of(chunk.role);
    if !wire.rounds() {
        return chunk;
    }
    Chunk { values: encode(wire, chunk.values.host()).into(), ..chunk }
}

/// Writes the values of the type `wire` in `encoded` to `to`, as f32.
///
/// # Panics
/// If there are not `to.len()` of them.
pub fn decode(wire: WireType, encoded: &[u8], to: &mut [f32]) {
    assert_eq!(encoded.len(), to.len() * wire.size(), "values for another number of values");
    if wire.rounds() {
        narrow!(wire, pass::decode(encoded, to));
    } else {
        bytemuck::cast_slice_mut(to).copy_from_slice(encoded);
    }
}

/// A 16-bit float and its conversions, from and to the bits of an f32. No branches: both outcomes
/// are computed and one is taken.
trait Narrow {
    fn narrow(bits: u32) -> u16;
    fn widen(half: u16) -> u32;
}

/// The upper half of an f32.
struct Bf16;

impl Narrow for Bf16 {
    #[inline(always)]
    fn narrow(bits: u32) -> u16 {
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // The bits that are cut off may be all that makes it no number.
        let quiet = bits >> 16 | 0x40;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        (if is_nan { quiet } else { rounded }) as u16
    }

    #[inline(always)]
    fn widen(half: u16) -> u32 {
        let bits = u32::from(half) << 16;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        bits | u32::from(is_nan) << 22
    }
}

/// 1 bit of sign, 5 of exponent, 10 of fraction.
struct F16;

/// Exponents of f16 and f32 differ by so much, in the bits of an f32.
const REBIAS: u32 = (127 - 15) << 23;

impl Narrow for F16 {
    #[inline(always)]
    fn narrow(bits: u32) -> u16 {
        let (sign, size) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
        // Rounds on its 13 bits that do not fit; a carry into the exponent is right.
        let normal = size.wrapping_sub(REBIAS).wrapping_add(0xfff + (size >> 13 & 1)) >> 13;
        // Below 2^-14 the last bit of an f16 is 2^-24, which is the last bit of an f32 at 1/2: an
        // addition rounds there.
        let tiny = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let quiet = 0x7e00 | size >> 13 & 0x3ff;
        let number = if size < (127 - 14) << 23 { tiny } else { normal };
        let large = if size > 0x7f80_0000 { quiet } else { 0x7c00 };
        (sign | if size >= (127 + 16) << 23 { large } else { number }) as u16
    }

    #[inline(always)]
    fn widen(half: u16) -> u32 {
        let (sign, size) = (u32::from(half & 0x8000) << 16, u32::from(half & 0x7fff) << 13);
        let normal = size.wrapping_add(REBIAS);
        // The fraction counts in units of 2^-24.
        let tiny = f32::from_bits(size | (127 - 14) << 23) - f32::from_bits((127 - 14) << 23);
        let is_nan = size > 0x1f << 23;
        let large = normal.wrapping_add(REBIAS) | u32::from(is_nan) << 22;
        let number = if size < 1 << 23 { tiny.to_bits() } else { normal };
        sign | if size >= 0x1f << 23 { large } else { number }
    }
}

/// Runs `pass` by wider vectors than every machine of its kind has, where there are some. 8 lanes:
/// wider ones do not help what waits for memory.
#[inline(always)]
fn widest(pass: impl FnOnce()) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the machine has been asked.
        return unsafe { avx2(pass) };
    }
    pass();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2(pass: impl FnOnce()) {
    pass();
}

/// The passes over memory, for one 16-bit type each.
mod pass {
    use super::Narrow;

    #[inline(always)]
    fn rounded<N: Narrow>(value: f32) -> f32 {
        f32::from_bits(N::widen(N::narrow(value.to_bits())))
    }

    #[inline(always)]
    pub(super) fn round<N: Narrow>(values: &mut [f32]) {
        values.iter_mut().for_each(|value| *value = rounded::<N>(*value));
    }

    #[inline(always)]
    pub(super) fn round_to<N: Narrow>(from: &[u8], to: &mut [f32]) {
        for (from, to) in from.as_chunks().0.iter().zip(to) {
            *to = rounded::<N>(f32::from_le_bytes(*from));
        }
    }

    #[inline(always)]
    pub(super) fn add_assign<N: Narrow>(left: &mut [f32], right: &[u8]) {
        for (left, right) in left.iter_mut().zip(right.as_chunks().0) {
            *left = rounded::<N>(*left + f32::from_le_bytes(*right));
        }
    }

    #[inline(always)]
    pub(super) fn add<N: Narrow>(left: &[u8], right: &[u8], sum: &mut [f32]) {
        for ((left, right), sum) in left.as_chunks().0.iter().zip(right.as_chunks().0).zip(sum) {
            *sum = rounded::<N>(f32::from_le_bytes(*left) + f32::from_le_bytes(*right));
        }
    }

    #[inline(always)]
    pub(super) fn encode<N: Narrow>(values: &[u8], encoded: &mut [u8]) {
        for (value, half) in values.as_chunks().0.iter().zip(encoded.as_chunks_mut().0) {
            *half = N::narrow(u32::from_le_bytes(*value)).to_le_bytes();
        }
    }

    #[inline(always)]
    pub(super) fn decode<N: Narrow>(encoded: &[u8], to: &mut [f32]) {
        for (half, value) in encoded.as_chunks().0.iter().zip(to) {
            *value = f32::from_bits(N::widen(u16::from_le_bytes(*half)));
        }
    }
}

#[cfg(test)]
mod tests;

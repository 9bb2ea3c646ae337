//! Tests of the conversions against the `half` crate and PyTorch, and of the tree with nodes summed
//! by workers and ps.

use half::{bf16, f16};
use proptest::prelude::*;
use proto::tensor::Values;
use proto::tree::Node;
use proto::wire::WireType;

use crate::cpu::cast;

const TYPES: [WireType; 2] = [WireType::Bf16, WireType::F16];

/// Any f32, and often one where rounding is decided: near the middle between two values of a 16-bit
/// type, tiny, huge or no number.
fn value() -> impl Strategy<Value = f32> {
    let near = |unit: u32| {
        (any::<u32>(), 0u32..5)
            .prop_map(move |(bits, off)| (bits / unit * unit).wrapping_add(unit / 2 - 2 + off))
    };
    // Sizes from 2^-26 to 2^-13, and from 2^15 on.
    let signed = |size: std::ops::Range<u32>| {
        (any::<bool>(), size).prop_map(|(sign, bits)| u32::from(sign) << 31 | bits)
    };
    let (tiny, large) = (signed(101 << 23..114 << 23), signed(142 << 23..1 << 31));
    prop_oneof![any::<u32>(), near(1 << 16), near(1 << 13), tiny, large].prop_map(f32::from_bits)
}

fn bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn half_of(wire: WireType, value: f32) -> u16 {
    if wire == WireType::Bf16 { bf16::from_f32(value).to_bits() } else { f16::from_f32(value).to_bits() }
}

fn float_of(wire: WireType, half: u16) -> f32 {
    if wire == WireType::Bf16 { bf16::from_bits(half).to_f32() } else { f16::from_bits(half).to_f32() }
}

fn rounded(wire: WireType, values: &[f32]) -> Vec<f32> {
    let mut rounded = values.to_vec();
    cast::round(wire, &mut rounded);
    rounded
}

#[test]
fn all_patterns_are_widened_as_the_half_crate_does() {
    let encoded: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for wire in TYPES {
        let mut values = vec![0.0; 1 << 16];
        cast::decode(wire, &encoded, &mut values);
        let expected: Vec<f32> = (0..=u16::MAX).map(|half| float_of(wire, half)).collect();
        assert!(bits(&values) == bits(&expected), "{wire}");
        assert!(bits(&rounded(wire, &values)) == bits(&values), "{wire}: they are rounded already");
        let quiet = |half: u16| half_of(wire, float_of(wire, half));
        let again: Vec<u8> = (0..=u16::MAX).map(quiet).flat_map(u16::to_le_bytes).collect();
        assert!(cast::encode(wire, bytes(&values)) == again, "{wire}: and encoded without loss");
    }
}

proptest! {
    #[test]
    fn values_are_rounded_as_the_half_crate_does_at_any_length_and_alignment(
        values in proptest::collection::vec(value(), 0..70),
        shift in 0usize..4,
    ) {
        let mut raw = vec![0; shift];
        raw.extend_from_slice(bytes(&values));
        for wire in TYPES {
            let halves: Vec<u16> = values.iter().map(|&value| half_of(wire, value)).collect();
            let expected: Vec<f32> = halves.iter().map(|&half| float_of(wire, half)).collect();
            let encoded: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
            prop_assert_eq!(cast::encode(wire, &raw[shift..]), encoded.clone());
            prop_assert_eq!(bits(&rounded(wire, &values)), bits(&expected));
            prop_assert_eq!(bits(&rounded(wire, &expected)), bits(&expected), "rounding again changes nothing");
            prop_assert_eq!(cast::encode(wire, bytes(&expected)), encoded.clone(), "what is rounded travels without loss");
            let mut to = vec![7.0; values.len()];
            cast::round_to(wire, &raw[shift..], &mut to);
            prop_assert_eq!(bits(&to), bits(&expected));
            let mut received = vec![0; shift];
            received.extend_from_slice(&encoded);
            cast::decode(wire, &received[shift..], &mut to);
            prop_assert_eq!(bits(&to), bits(&expected));
        }
    }

    #[test]
    fn sums_are_those_of_f32_rounded(values in proptest::collection::vec((-1e5f32..1e5, -1e5f32..1e5), 0..70)) {
        let (left, right): (Vec<f32>, Vec<f32>) = values.into_iter().unzip();
        for wire in [WireType::F32, WireType::Bf16, WireType::F16] {
            let plain: Vec<f32> = left.iter().zip(&right).map(|(left, right)| left + right).collect();
            let expected = bits(&rounded(wire, &plain));
            let mut sum = left.clone();
            cast::add_assign(wire, &mut sum, bytes(&right));
            prop_assert_eq!(bits(&sum), expected.clone());
            if wire.rounds() {
                cast::add(wire, bytes(&left), bytes(&right), &mut sum);
                prop_assert_eq!(bits(&sum), expected);
            }
        }
    }

    /// Each node below the root is summed either by a worker, which has rounded values in memory,
    /// or by the ps, to which both halves travelled encoded.
    #[test]
    fn the_tree_has_the_same_bits_whoever_sums_its_nodes(of in 1u32..40, who in any::<u64>(), seed in any::<u32>()) {
        for wire in TYPES {
            let all = [0, u64::MAX, who].map(|who| reduce(wire, Node::root(of), of, who, seed));
            prop_assert_eq!(bits(&all[0]), bits(&all[1]));
            prop_assert_eq!(bits(&all[0]), bits(&all[2]));
        }
    }
}

fn reduce(wire: WireType, node: Node, of: u32, who: u64, seed: u32) -> Vec<f32> {
    let Some((left, right)) = node.children() else {
        let bits =
            |at: u32| (seed ^ node.begin.wrapping_mul(2_654_435_761)).wrapping_add(at.wrapping_mul(40_503));
        return rounded(wire, &[0, 1, 2].map(|at| (bits(at) % 20_011) as f32 * 0.37 - 3000.0));
    };
    let [mut left, right] = [left, right].map(|half| reduce(wire, half, of, who, seed));
    if node == Node::root(of) {
        return left.iter().zip(&right).map(|(left, right)| left + right).collect();
    }
    if (who >> ((node.begin * 7 + node.end) % 64)) & 1 == 0 {
        let mut sum = Values::F32(left);
        cast::merge(wire, &mut sum, &Values::F32(right));
        return sum.as_f32().unwrap().to_vec();
    }
    let [one, other] = [&left, &right].map(|values| cast::encode(wire, bytes(values)));
    let mut arrived = right.clone();
    cast::decode(wire, &one, &mut left);
    cast::decode(wire, &other, &mut arrived);
    let mut sum = vec![0.0; left.len()];
    cast::add(wire, bytes(&left), bytes(&arrived), &mut sum);
    sum
}

#[test]
fn values_are_rounded_as_pytorch_does() {
    let rows: Vec<(u32, Option<u16>, Option<u16>)> =
        serde_json::from_str(include_str!("../../../../tests/golden/wire.json")).unwrap();
    assert!(rows.len() > 500);
    for (bits, bf16, f16) in rows {
        let value = f32::from_bits(bits);
        for (wire, torch) in TYPES.into_iter().zip([bf16, f16]) {
            let ours = cast::encode(wire, &value.to_le_bytes());
            let ours = u16::from_le_bytes([ours[0], ours[1]]);
            match torch {
                Some(torch) => {
                    assert_eq!(ours, torch, "{value:e} ({bits:#x}) in {wire}: torch has {torch:#x}");
                }
                None => assert!(float_of(wire, ours).is_nan(), "{bits:#x} in {wire}: torch has no number"),
            }
        }
    }
}

#[test]
fn what_is_too_large_is_infinite_and_no_number_stays_none() {
    let values = [65519.0, 65520.0, -1e9, f32::NAN, f32::INFINITY, 3.4e38];
    let f16 = rounded(WireType::F16, &values);
    assert_eq!(f16[..3], [65504.0, f32::INFINITY, f32::NEG_INFINITY]);
    let bf16 = rounded(WireType::Bf16, &values);
    assert_eq!(bf16[1..3], [65536.0, -998_244_352.0]);
    for values in [f16, bf16] {
        assert!(values[3].is_nan() && values[4] == f32::INFINITY && values[5] == f32::INFINITY, "{values:?}");
    }
}

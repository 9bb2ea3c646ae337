//! Bits of the kernels for devices, compiled for the host, against those of the kernels in `cpu/`.
#![expect(unsafe_code, reason = "kernels work on addresses that no type guards")]

use proptest::collection::vec;
use proptest::prelude::*;
use proto::wire::WireType;

use super::host::Host;
use super::launch::{self, Address, Cast, Operands, Pass, SLOTS_MAX, SUMS_MAX, Sizes, Slope, Table, Tables};
use crate::cpu::{self, cast, dense, levels, state, sum};
use crate::optimizer::tests::{bits, optimizers};
use crate::optimizer::{Norms, Update};
use crate::slot::Slot;

/// Any bits, and often zeros, subnormals, infinities, what is no number, and ties of roundings.
fn value() -> impl Strategy<Value = f32> {
    let special = prop::sample::select(vec![
        0.0,
        -0.0,
        1e-42,
        -1e-45,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffc1_2345),
    ]);
    // Halfway between two values of a 16-bit type.
    let tie = (any::<u32>(), any::<bool>()).prop_map(|(bits, is_bf16)| {
        f32::from_bits(if is_bf16 { bits & !0xffff | 0x8000 } else { bits & !0x1fff | 0x1000 })
    });
    let small_tie = (-2048..2048_i16).prop_map(|at| (f32::from(at) + 0.5) / 2048.0);
    prop_oneof![
        3 => any::<u32>().prop_map(f32::from_bits),
        4 => -10.0f32..10.0,
        1 => special,
        1 => tie,
        1 => small_tie,
    ]
}

/// Values whose sums are numbers. Among many that are not, no element could be seen to be missing.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![9 => -10.0f32..10.0, 1 => prop::sample::select(vec![0.0, -0.0, 1e-42, 1e-30, -300.0])]
}

/// Columns of one length, around whole blocks, tiles and groups of reads, and far from them.
fn columns_of(
    value: impl Strategy<Value = f32> + Clone,
    count: usize,
) -> impl Strategy<Value = Vec<Vec<f32>>> {
    let length =
        prop_oneof![8 => 0..70_usize, 2 => 222..275_usize, 2 => 500..1200_usize, 1 => 2040..2060_usize];
    length.prop_flat_map(move |length| vec(vec(value.clone(), length), count))
}

/// Columns of any values.
fn columns(count: usize) -> impl Strategy<Value = Vec<Vec<f32>>> {
    columns_of(value().boxed(), count)
}

/// One chunk's operands.
#[derive(Clone, Debug)]
struct Chunk {
    weights: Vec<f32>,
    left: Vec<f32>,
    /// None: `left` is the whole gradient.
    right: Option<Vec<f32>>,
    slots: Vec<Vec<f32>>,
}

impl Chunk {
    fn of(columns: Vec<Vec<f32>>, has_right: bool) -> Self {
        let mut columns = columns.into_iter();
        let mut next = || columns.next().expect("a column");
        let (weights, left, right) = (next(), next(), next());
        Self { weights, left, right: has_right.then_some(right), slots: columns.collect() }
    }

    /// Returns operands that read the chunk and write nothing.
    fn operands(&self) -> Operands {
        let slot =
            |number: usize| self.slots.get(number).map_or(Address::NOWHERE, |slot| Host::address(slot));
        Operands {
            weights: Host::address(&self.weights),
            left: Host::address(&self.left),
            right: self.right.as_deref().map_or(Address::NOWHERE, Host::address),
            from: std::array::from_fn(slot),
            ..Operands::of(self.weights.len())
        }
    }

    /// Returns the next weights and slots as bits, by the kernels of the host.
    fn on_host(&self, update: &Update, slots: usize) -> Vec<Vec<u32>> {
        let mut slots = self.slots[..slots].to_vec();
        let mut next = vec![f32::NAN; self.weights.len()];
        let left = bytemuck::cast_slice(&self.left);
        let given = slots.iter_mut().map(|slot| Slot::InPlace(slot.as_mut_slice())).collect();
        match &self.right {
            None => cpu::apply_bytes(update, &self.weights, left, given, &mut next),
            Some(right) => {
                let halves = (left, bytemuck::cast_slice(right));
                cpu::apply_halves(update, &self.weights, halves, given, &mut next);
            }
        }
        [vec![next], slots].concat().iter().map(|values| bits(values)).collect()
    }

    /// Returns the gradient as one sum.
    fn gradient(&self) -> Vec<f32> {
        let mut sum = self.left.clone();
        self.right.iter().for_each(|right| sum::add_assign(&mut sum, bytemuck::cast_slice(right)));
        sum
    }
}

/// Memory that a kernel for devices works on for one chunk.
struct Memory {
    here: Vec<Vec<f32>>,
    there: Vec<Vec<f32>>,
    /// The first values belong to nobody.
    next: Vec<f32>,
}

/// Returns the next weights and slots of each chunk as bits, by one launch of a kernel for devices.
/// Slots move, or stay. The next weights lie `shift` values off alignment.
fn on_device(
    device: Host,
    chunks: &[(Chunk, Update)],
    slots: usize,
    moves: bool,
    shift: usize,
) -> Vec<Vec<Vec<u32>>> {
    let mut memory = Vec::new();
    let mut passes = Vec::new();
    for (chunk, update) in chunks {
        let mut here = chunk.slots[..slots].to_vec();
        let mut there = vec![vec![f32::NAN; chunk.weights.len()]; slots];
        let mut next = vec![f32::NAN; shift + chunk.weights.len()];
        let mut operands = Operands { next: Host::address_mut(&mut next[shift..]), ..chunk.operands() };
        for (number, (here, there)) in here.iter_mut().zip(&mut there).enumerate() {
            (operands.from[number], operands.to[number]) = if moves {
                (Host::address(here), Host::address_mut(there))
            } else {
                (Host::address_mut(here), Host::address_mut(here))
            };
        }
        passes.push(Pass::new(update, operands));
        memory.push(Memory { here, there, next });
    }
    let table = Table::new(&passes, Host::address(&passes));
    // SAFETY: all columns of a chunk have one length, and those that are written are its own.
    unsafe { launch::apply(&device, &chunks[0].1, &table) }.expect("a kernel");
    let after = chunks.iter().zip(memory).map(|((chunk, _), Memory { here, there, next })| {
        if moves {
            let read = |slots: &[Vec<f32>]| slots.iter().map(|slot| bits(slot)).collect::<Vec<_>>();
            assert_eq!(read(&here), read(&chunk.slots[..slots]), "what is held does not change");
        }
        let after = if moves { there } else { here };
        std::iter::once(&next[shift..]).chain(after.iter().map(Vec::as_slice)).map(bits).collect()
    });
    after.collect()
}

/// Chunks of several lengths.
fn chunks(value: impl Strategy<Value = f32> + Clone) -> impl Strategy<Value = Vec<Chunk>> {
    let chunk = (columns_of(value, 3 + SLOTS_MAX), any::<bool>());
    vec(chunk.prop_map(|(columns, has_right)| Chunk::of(columns, has_right)), 1..4)
}

/// Returns the f64 bits of squares. All NaNs are one.
fn square_bits(squares: crate::Squares) -> [u64; 2] {
    squares.0.map(|sum| if sum.is_nan() { f64::NAN } else { sum }.to_bits())
}

const WIRES: [WireType; 3] = [WireType::F32, WireType::Bf16, WireType::F16];

proptest! {
    #[test]
    fn every_rule_has_the_bits_of_its_twin(
        chunks in chunks(value().boxed()), moves in any::<bool>(), shift in 0..5_usize,
        step in 0..50_u64, scale in 0.001_f32..=1.0, clip in 0.1_f32..=1.0, blocks_max in 1..4_u32,
    ) {
        for optimizer in optimizers() {
            // Chunks of one launch have scalars of their own.
            let update = |number: u64| {
                let prepared = optimizer.prepare(step + number, scale / (number + 1) as f32);
                let mut update = Update { norms: Norms::Complete, ..prepared };
                if prepared.needs_norms() {
                    update.mean.clip = clip;
                }
                update
            };
            let chunks: Vec<_> = chunks.iter().cloned().zip((0..).map(update)).collect();
            let (_, slots, _) = chunks[0].1.rule.kernel();
            prop_assert_eq!(slots, optimizer.slots());
            let expected: Vec<_> = chunks.iter().map(|(chunk, update)| chunk.on_host(update, slots)).collect();
            let found = on_device(Host::new(blocks_max), &chunks, slots, moves, shift);
            prop_assert_eq!(found, expected, "{:?}", optimizer);
        }
    }

    #[test]
    fn norms_have_the_bits_of_their_twins(
        mut chunks in prop_oneof![chunks(value().boxed()), chunks(number().boxed())],
        step in 0..50_u64, scale in 0.001_f32..=1.0, blocks_max in 1..4_u32,
    ) {
        // Slots hold squares, whose root is a number.
        chunks.iter_mut().flat_map(|chunk| &mut chunk.slots).flatten().for_each(|slot| *slot = slot.abs());
        let optimizers = optimizers().into_iter();
        for optimizer in optimizers.filter(|optimizer| optimizer.prepare(0, 1.0).needs_norms()) {
            let updates = (0..).map(|number| optimizer.prepare(step + number, scale / (number + 1) as f32));
            let (mut expected, mut passes) = (Vec::new(), Vec::new());
            for (chunk, update) in chunks.iter().zip(updates) {
                let slots: Vec<&[f32]> = chunk.slots.iter().take(2).map(Vec::as_slice).collect();
                let gradient = chunk.gradient();
                let squares = cpu::measure(&update, &chunk.weights, bytemuck::cast_slice(&gradient), &slots);
                expected.push(square_bits(squares));
                passes.push(Pass::new(&update, chunk.operands()));
            }
            let mut sums = vec![[0.0; SUMS_MAX]; chunks.len()];
            let (update, to) = (optimizer.prepare(step, scale), Host::address_mut(&mut sums));
            let table = Table::new(&passes, Host::address(&passes));
            // SAFETY: all columns of a chunk have one length, and there is room for the sums.
            unsafe { launch::measure(&Host::new(blocks_max), &update, &table, to) }.expect("a kernel");
            let found: Vec<_> = sums.iter().map(|sums| square_bits(cpu::squares_of(&update, sums))).collect();
            prop_assert_eq!(found, expected, "{:?}", optimizer);
        }
    }

    #[test]
    fn sums_have_the_bits_of_their_twins_wherever_they_go(
        columns in columns(2), in_place in any::<bool>(), blocks_max in 1..4_u32,
    ) {
        let [left, right] = &columns[..] else { unreachable!("two columns") };
        for wire in WIRES {
            let mut expected = left.clone();
            cast::add_assign(wire, &mut expected, bytemuck::cast_slice(right));
            let mut to = if in_place { left.clone() } else { vec![f32::NAN; left.len()] };
            let address = Host::address_mut(&mut to);
            let operands = [if in_place { address } else { Host::address(left) }, Host::address(right)];
            let length = left.len() as u64;
            // SAFETY: all have one length.
            unsafe { launch::sum(&Host::new(blocks_max), wire, operands, address, length) }.expect("a kernel");
            prop_assert_eq!(bits(&to), bits(&expected), "{}", wire);
        }
        let mut expected = vec![f32::NAN; left.len()];
        sum::add(bytemuck::cast_slice(left), bytemuck::cast_slice(right), &mut expected);
        let mut plain = left.clone();
        sum::add_assign(&mut plain, bytemuck::cast_slice(right));
        prop_assert_eq!(bits(&plain), bits(&expected));
    }

    /// Every bit counts here, those of a NaN too: conversions are operations on integers.
    #[test]
    fn casts_have_all_bits_of_their_twins(columns in columns(1), blocks_max in 1..4_u32) {
        let (device, values) = (Host::new(blocks_max), &columns[0]);
        let length = values.len() as u64;
        for wire in WIRES.into_iter().filter(|wire| wire.rounds()) {
            let encoded = cast::encode(wire, bytemuck::cast_slice(values));
            let halves: Vec<u16> = encoded.as_chunks().0.iter().map(|half| u16::from_le_bytes(*half)).collect();
            let mut found = vec![0_u16; values.len()];
            let to = Host::address_mut(&mut found);
            // SAFETY: all have one length.
            unsafe { launch::cast(&device, Cast::Encode, wire, Host::address(values), to, length) }.expect("a kernel");
            prop_assert_eq!(&found, &halves, "{}", wire);

            let mut decoded = vec![f32::NAN; values.len()];
            cast::decode(wire, &encoded, &mut decoded);
            for (cast, from) in [(Cast::Decode, Host::address(&halves)), (Cast::Round, Host::address(values))] {
                let mut found = vec![f32::NAN; values.len()];
                let to = Host::address_mut(&mut found);
                // SAFETY: all have one length.
                unsafe { launch::cast(&device, cast, wire, from, to, length) }.expect("a kernel");
                let raw = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(raw(&found), raw(&decoded), "{:?} {}", cast, wire);
            }
        }
    }

    #[test]
    fn state_has_the_bits_of_its_twin(
        columns in columns(1), count in 1..=1_u64 << 24, counters in vec(any::<[i64; 2]>(), 0..70),
    ) {
        let (device, values) = (Host::new(2), &columns[0]);
        let (mut expected, mut next) = (vec![f32::NAN; values.len()], vec![f32::NAN; values.len()]);
        state::mean(bytemuck::cast_slice(values), count, &mut expected);
        let (to, length) = (Host::address_mut(&mut next), values.len() as u64);
        // SAFETY: all have one length.
        unsafe { launch::mean(&device, Host::address(values), count as f32, to, length) }.expect("a kernel");
        prop_assert_eq!(bits(&next), bits(&expected));

        let (mut merged, right): (Vec<i64>, Vec<i64>) = counters.iter().map(|[left, right]| (*left, *right)).unzip();
        let mut expected = merged.clone();
        state::max(&mut expected, bytemuck::cast_slice(&right));
        let (to, length) = (Host::address_mut(&mut merged), right.len() as u64);
        // SAFETY: all have one length.
        unsafe { launch::largest(&device, [to, Host::address(&right)], to, length) }.expect("a kernel");
        prop_assert_eq!(merged, expected);
    }
}

proptest! {
    /// Every bit counts here, those of a NaN too: nothing is computed.
    #[test]
    fn floats_of_bytes_have_all_bits_of_their_twins(
        tables in (1..5_usize).prop_flat_map(|count| vec(value(), count * levels::LEVELS)),
        bytes in vec(any::<u8>(), 0..600), run in prop_oneof![1..9_usize, 20..300_usize],
        shifts in [0..5_usize, 0..5_usize], blocks_max in 1..4_u32,
    ) {
        let mut expected = vec![f32::NAN; bytes.len()];
        levels::look_up(&tables, run, &bytes, &mut expected);
        // Values in front belong to nobody.
        let [from, to] = shifts;
        let shifted = [vec![7; from], bytes].concat();
        let mut found = vec![f32::NAN; to + expected.len()];
        let count = (tables.len() / levels::LEVELS) as u32;
        let tables = Tables { address: Host::address(&tables), count, run: run as u64 };
        let (bytes, length) = (Host::address(&shifted[from..]), expected.len() as u64);
        let address = Host::address_mut(&mut found[to..]);
        // SAFETY: there are a float for each byte, and so many tables.
        unsafe { launch::look_up(&Host::new(blocks_max), bytes, tables, address, length) }.expect("a kernel");
        let raw = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(raw(&found[to..]), raw(&expected));
        prop_assert_eq!(raw(&found[..to]), raw(&vec![f32::NAN; to]));
    }
}

/// The matrices of a dense layer.
#[derive(Clone, Debug)]
struct Matrices {
    inputs: usize,
    outputs: usize,
    x: Vec<f32>,
    w: Vec<f32>,
    b: Vec<f32>,
    dy: Vec<f32>,
}

/// Matrices of ordinary values, or of any values. A NaN swallows what it meets, so most have none.
fn matrices() -> impl Strategy<Value = Matrices> {
    let sizes = (0..6_usize, prop_oneof![1..34_usize, 60..70_usize], 1..20_usize, any::<bool>());
    sizes.prop_flat_map(|(records, inputs, outputs, any)| {
        let values = move |length| match any {
            true => vec(value(), length).boxed(),
            false => vec(-10.0f32..10.0, length).boxed(),
        };
        let all =
            (values(records * inputs), values(outputs * inputs), values(outputs), values(records * outputs));
        all.prop_map(move |(x, w, b, dy)| Matrices { inputs, outputs, x, w, b, dy })
    })
}

proptest! {
    #[test]
    fn products_of_a_dense_layer_have_the_bits_of_their_twins(
        matrices in matrices(), blocks_max in 1..4_u32,
    ) {
        let (device, Matrices { inputs, outputs, x, w, b, dy }) = (Host::new(blocks_max), matrices);
        let records = dy.len() / outputs;
        let sizes = Sizes { records: records as u64, inputs: inputs as u64, outputs: outputs as u64 };
        let made = |length| vec![f32::NAN; length];

        let mut y = made(records * outputs);
        let (from, to) = ([&x, &w, &b].map(|values| Host::address(values)), Host::address_mut(&mut y));
        // SAFETY: the matrices have these sizes.
        unsafe { launch::forward(&device, from, to, sizes) }.expect("a kernel");
        prop_assert_eq!(bits(&y), bits(&dense::forward(&x, &w, &b)));

        let (mut dw, mut db) = (made(outputs * inputs), made(outputs));
        let to = [Host::address_mut(&mut dw), Host::address_mut(&mut db)];
        // SAFETY: the matrices have these sizes.
        unsafe { launch::weight_gradient(&device, [&dy, &x].map(|values| Host::address(values)), to, sizes) }
            .expect("a kernel");
        let expected = dense::weight_gradient(&dy, &x, outputs, inputs);
        prop_assert_eq!((bits(&dw), bits(&db)), (bits(&expected.0), bits(&expected.1)));

        let mut dx = made(records * inputs);
        let to = Host::address_mut(&mut dx);
        // SAFETY: the matrices have these sizes.
        unsafe { launch::input_gradient(&device, [&dy, &w].map(|values| Host::address(values)), to, sizes) }
            .expect("a kernel");
        prop_assert_eq!(bits(&dx), bits(&dense::input_gradient(&dy, &w, outputs, inputs)));
    }

    #[test]
    fn activations_and_factors_have_the_bits_of_their_twins(
        columns in columns(2), factor in value(), blocks_max in 1..4_u32,
    ) {
        let [gradient, answers] = &columns[..] else { unreachable!("two columns") };
        let (device, length) = (Host::new(blocks_max), gradient.len() as u64);
        let (mut found, mut expected) = (answers.clone(), answers.clone());
        // SAFETY: there are so many values.
        unsafe { launch::relu(&device, Host::address_mut(&mut found), length) }.expect("a kernel");
        dense::relu(&mut expected);
        prop_assert_eq!(bits(&found), bits(&expected));

        for (slope, twin) in [
            (Slope::Relu, dense::relu_slope as fn(&mut [f32], &[f32])),
            (Slope::Tanh, dense::tanh_slope),
        ] {
            let (mut found, mut expected) = (gradient.clone(), gradient.clone());
            let to = Host::address_mut(&mut found);
            // SAFETY: both have so many values.
            unsafe { launch::slope(&device, slope, to, Host::address(answers), length) }.expect("a kernel");
            twin(&mut expected, answers);
            prop_assert_eq!(bits(&found), bits(&expected), "{:?}", slope);
        }

        let mut found = gradient.clone();
        // SAFETY: there are so many values.
        unsafe { launch::scale(&device, Host::address_mut(&mut found), factor, length) }.expect("a kernel");
        let expected: Vec<f32> = gradient.iter().map(|value| value * factor).collect();
        prop_assert_eq!(bits(&found), bits(&expected));
    }
}

#[test]
fn all_16_bit_patterns_are_widened_as_on_the_host() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    for wire in [WireType::Bf16, WireType::F16] {
        let (mut expected, mut found) = (vec![0.0_f32; halves.len()], vec![0.0_f32; halves.len()]);
        cast::decode(wire, bytemuck::cast_slice(&halves), &mut expected);
        let to = Host::address_mut(&mut found);
        let length = halves.len() as u64;
        // SAFETY: both have one length.
        unsafe { launch::cast(&Host::new(7), Cast::Decode, wire, Host::address(&halves), to, length) }
            .expect("a kernel");
        assert!(bytemuck::cast_slice::<_, u8>(&found) == bytemuck::cast_slice::<_, u8>(&expected), "{wire}");
    }
}

#[test]
fn a_fill_writes_every_element_and_no_other() {
    for length in [0, 1, 255, 256, 257, 1000] {
        let mut values = vec![1.0_f32; length + 1];
        let to = Host::address_mut(&mut values);
        // SAFETY: there are more values than that.
        unsafe { launch::fill(&Host::new(2), -2.5, to, length as u64) }.expect("a kernel");
        assert!(values[..length].iter().all(|value| *value == -2.5) && values[length] == 1.0, "{length}");
    }
}

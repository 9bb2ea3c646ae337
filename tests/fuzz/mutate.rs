//! Damaged bytes: a good input with random changes.

use proto::random::Keyed;

/// Numbers that decoders often do not expect.
const NUMBERS: [u64; 16] = [
    0,
    1,
    2,
    7,
    8,
    16,
    64,
    127,
    128,
    255,
    256,
    i16::MAX as u64,
    u16::MAX as u64,
    i32::MAX as u64,
    u32::MAX as u64,
    u64::MAX,
];

/// Longest input in bytes.
const BYTES_MAX: usize = 64 << 10;

/// Returns one of `inputs` with some changes. Parts of the others may come in.
pub(crate) fn mutated(inputs: &[Vec<u8>], random: &mut Keyed) -> Vec<u8> {
    let mut bytes = inputs[below(inputs.len(), random)].clone();
    // Mostly few changes: bytes that are damaged everywhere are refused at once.
    let changes = 1 << below(4, random);
    for _ in 0..below(changes, random) + 1 {
        change(&mut bytes, inputs, random);
    }
    bytes.truncate(BYTES_MAX);
    bytes
}

fn change(bytes: &mut Vec<u8>, inputs: &[Vec<u8>], random: &mut Keyed) {
    let at = below(bytes.len(), random);
    let (begin, end) = part(bytes.len(), random);
    match below(10, random) {
        0 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << below(8, random)),
        1 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = random.next_u64() as u8),
        2 | 3 => {
            let width = [1, 2, 4, 8][below(4, random)];
            let number =
                NUMBERS[below(NUMBERS.len(), random)].wrapping_add(random.next_u64() % 3).wrapping_sub(1);
            let mut raw = number.to_le_bytes();
            let raw = &mut raw[..width];
            if random.next_u64() & 1 == 0 {
                raw.reverse();
            }
            bytes.iter_mut().skip(at).zip(raw).for_each(|(byte, new)| *byte = *new);
        }
        4 => bytes.truncate(at),
        5 => drop(bytes.drain(begin..end)),
        6 => {
            let copy = bytes[begin..end].to_vec();
            bytes.splice(at..at, copy);
        }
        7 => {
            let new: Vec<u8> = (0..below(9, random)).map(|_| random.next_u64() as u8).collect();
            bytes.splice(at..at, new);
        }
        8 => {
            let other = &inputs[below(inputs.len(), random)];
            let (from, to) = part(other.len(), random);
            bytes.splice(begin..end, other[from..to].iter().copied());
        }
        // A number in decimal digits, as texts have it.
        _ => {
            let digit = bytes.iter().skip(at).position(u8::is_ascii_digit);
            if let Some(digit) = digit {
                let number = NUMBERS[below(NUMBERS.len(), random)].to_string();
                bytes.splice(at + digit..=at + digit, number.into_bytes());
            }
        }
    }
}

/// Returns begin and end of a part of at most 64 bytes, or of any length.
fn part(length: usize, random: &mut Keyed) -> (usize, usize) {
    let begin = below(length, random);
    let most = if random.next_u64() & 3 == 0 { length - begin } else { (length - begin).min(64) };
    (begin, begin + below(most + 1, random))
}

/// Returns a number below `count`, or 0.
fn below(count: usize, random: &mut Keyed) -> usize {
    if count == 0 { 0 } else { (random.next_u64() % count as u64) as usize }
}

#[test]
fn changes_depend_on_the_seed_alone_and_differ() {
    let inputs = [b"one input 17".to_vec(), vec![7; 500], Vec::new()];
    let of_seed = |seed| mutated(&inputs, &mut Keyed::new(seed, "test", 0));
    assert_eq!(of_seed(5), of_seed(5));
    let mut all: Vec<_> = (0..1000).map(of_seed).collect();
    assert!(all.iter().all(|bytes| bytes.len() <= BYTES_MAX));
    all.sort();
    all.dedup();
    assert!(all.len() > 500, "only {} of 1000 differ", all.len());
}

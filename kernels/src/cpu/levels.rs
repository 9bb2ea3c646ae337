//! Floats in place of bytes, looked up in tables.

/// Number of floats in a table: one for each byte.
pub const LEVELS: usize = 256;

/// Writes the float of each byte. The first `run` bytes have the first table of `tables`, those
/// behind them the next one, and the first table follows the last one.
///
/// # Panics
/// If `run` is 0, there is no whole table, or `out` has another length than `bytes`.
pub fn look_up(tables: &[f32], run: usize, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len(), "floats of other bytes");
    let (tables, rest) = tables.as_chunks::<LEVELS>();
    assert!(!tables.is_empty() && rest.is_empty(), "tables of {} floats", tables.len() * LEVELS + rest.len());
    let runs = bytes.chunks(run).zip(out.chunks_mut(run));
    for (table, (bytes, out)) in tables.iter().cycle().zip(runs) {
        for (byte, out) in bytes.iter().zip(out) {
            *out = table[usize::from(*byte)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_take_turns_with_the_tables() {
        let tables: Vec<f32> = (0..2 * LEVELS).map(|at| at as f32).collect();
        let mut out = [0.0; 7];
        look_up(&tables, 2, &[0, 1, 2, 3, 4, 5, 6], &mut out);
        assert_eq!(out, [0.0, 1.0, 258.0, 259.0, 4.0, 5.0, 262.0]);
        look_up(&tables[..LEVELS], 1, &[7, 255], &mut out[..2]);
        assert_eq!(out[..2], [7.0, 255.0]);
    }
}

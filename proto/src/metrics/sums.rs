//! Sums of a program's own metrics: lists of numbers that add up over records, by name.
//!
//! A program turns the sums of all records into the value of its metric:
//!
//! ```text
//! precision: [right, predicted] of each batch: [3, 4] + [1, 4] -> [4, 8] -> 0.5
//! ```
//!
//! Sums of fractions depend on their order, so they are added in the order of the data shards.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// Most numbers of all sums of an evaluation together: 512 KiB.
pub const SUMS_MAX: usize = 1 << 16;

/// Most sums of an evaluation.
const NAMES_MAX: usize = 256;

/// Most bytes of a name.
const NAME_BYTES_MAX: usize = 128;

/// The sums of an evaluation by name.
pub type Sums = BTreeMap<String, Sum>;

/// Numbers that add up over records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sum {
    /// The numbers.
    pub values: Vec<f64>,
    /// Whether they are a sum and its count, whose quotient is the value of the metric.
    pub is_mean: bool,
}

impl Sum {
    /// Returns the value of a metric that is a mean. `None`: only the program knows the value.
    pub fn mean(&self) -> Option<f64> {
        match self.values[..] {
            [sum, count] if self.is_mean => Some(sum / count),
            _ => None,
        }
    }

    fn describe(&self) -> String {
        let mean = if self.is_mean { " of a mean" } else { "" };
        format!("{} numbers{mean}", self.values.len())
    }
}

/// Checks names and sizes of the sums of a data shard.
///
/// # Errors
/// A name or a size is out of range.
pub fn check(sums: &Sums) -> Result<()> {
    if sums.len() > NAMES_MAX {
        return Err(wrong(format!("at most {NAMES_MAX} sums"), sums.len().to_string()));
    }
    let numbers: usize = sums.values().map(|sum| sum.values.len()).sum();
    if numbers > SUMS_MAX {
        let sizes = sums.iter().map(|(name, sum)| format!("`{name}` {}", sum.values.len()));
        let found = format!("{numbers}: {}", sizes.collect::<Vec<_>>().join(", "));
        return Err(wrong(format!("at most {SUMS_MAX} numbers"), found));
    }
    for (name, sum) in sums {
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name == "loss" {
            let expected = format!("names of 1 to {NAME_BYTES_MAX} bytes, other than `loss`");
            return Err(wrong(expected, format!("`{name}`")));
        }
        if sum.is_mean && sum.values.len() != 2 {
            return Err(wrong(format!("2 numbers for the mean `{name}`"), sum.values.len().to_string()));
        }
    }
    Ok(())
}

/// Checks that sums of two parts of an evaluation have the same names and sizes. A part without
/// records has none.
///
/// # Errors
/// They differ.
pub(super) fn check_together(known: &Sums, found: &Sums) -> Result<()> {
    if known.is_empty() || found.is_empty() {
        return Ok(());
    }
    let same = |((name, sum), (other_name, other)): ((&String, &Sum), (&String, &Sum))| {
        name == other_name && (sum.values.len(), sum.is_mean) == (other.values.len(), other.is_mean)
    };
    if known.len() == found.len() && known.iter().zip(found).all(same) {
        return Ok(());
    }
    let list = |sums: &Sums| {
        sums.iter()
            .map(|(name, sum)| format!("`{name}` of {}", sum.describe()))
            .collect::<Vec<_>>()
            .join(", ")
    };
    Err(wrong(format!("{}, as in other processes of the job", list(known)), list(found)))
}

/// Adds the sums of the records that come next.
///
/// # Errors
/// Names or sizes differ.
pub(super) fn merge(into: &mut Sums, next: Sums) -> Result<()> {
    check_together(into, &next)?;
    if into.is_empty() {
        *into = next;
        return Ok(());
    }
    for (sum, next) in into.values_mut().zip(next.into_values()) {
        sum.values.iter_mut().zip(next.values).for_each(|(sum, next)| *sum += next);
    }
    Ok(())
}

fn wrong(expected: String, found: String) -> Error {
    Error::Field { message: "Evaluated", field: "sums", expected, found }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(of: &[(&str, &[f64], bool)]) -> Sums {
        let sum = |&(name, values, is_mean): &(&str, &[f64], bool)| {
            (name.to_owned(), Sum { values: values.to_vec(), is_mean })
        };
        of.iter().map(sum).collect()
    }

    #[test]
    fn sums_add_up_by_name_and_a_mean_has_a_value() {
        let mut whole = Sums::new();
        for next in [[1.0, 4.0], [2.0, 4.0]] {
            merge(&mut whole, sums(&[("mine", &next, true), ("states", &[next[0], 0.5, 7.0], false)]))
                .unwrap();
        }
        merge(&mut whole, Sums::new()).unwrap();
        assert_eq!(whole, sums(&[("mine", &[3.0, 8.0], true), ("states", &[3.0, 1.0, 14.0], false)]));
        assert_eq!((whole["mine"].mean(), whole["states"].mean()), (Some(0.375), None));
    }

    #[test]
    fn sums_of_different_metrics_do_not_add_up() {
        let known = sums(&[("mine", &[1.0, 2.0], false)]);
        for other in [
            sums(&[("other", &[1.0, 2.0], false)]),
            sums(&[("mine", &[1.0], false)]),
            sums(&[("mine", &[1.0, 2.0], true)]),
            sums(&[("mine", &[1.0, 2.0], false), ("other", &[], false)]),
        ] {
            let error = merge(&mut known.clone(), other).unwrap_err().to_string();
            assert!(error.contains("expected `mine` of 2 numbers, as in other processes"), "{error}");
        }
    }

    #[test]
    fn names_and_sizes_have_a_range() {
        let long = "x".repeat(129);
        let many = vec![0.0; SUMS_MAX];
        check(&sums(&[("a", &many, false)])).unwrap();
        for (wrong, expected) in [
            (sums(&[("", &[1.0], false)]), "names of 1 to 128 bytes"),
            (sums(&[("loss", &[1.0], false)]), "other than `loss`"),
            (sums(&[(&long, &[1.0], false)]), "names of 1 to 128 bytes"),
            (sums(&[("a", &[1.0], true)]), "2 numbers for the mean `a`, found 1"),
            (
                sums(&[("a", &many, false), ("b", &[1.0], false)]),
                "at most 65536 numbers, found 65537: `a` 65536, `b` 1",
            ),
            ((0..257).map(|at| (at.to_string(), Sum::default())).collect(), "at most 256 sums, found 257"),
        ] {
            let error = check(&wrong).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}

//! A program of this workspace finds libtorch by itself and links its CPU half only, so it also starts where there is
//! no CUDA. What CUDA hosts add is loaded at run time.
#![cfg(feature = "torch")]

use std::fs;
use tch::{Kind, Tensor};

/// Files mapped into this process whose name starts with `prefix`.
fn mapped(prefix: &str) -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").expect("read /proc/self/maps");
    let mut paths: Vec<_> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(prefix)))
        .map(str::to_owned)
        .collect();
    paths.dedup();
    paths
}

#[test]
fn a_program_starts_with_the_cpu_half_of_libtorch_only() {
    let sum = (Tensor::from_slice(&[1.5f32, 2.5]) + 1.0).sum(Kind::Float);
    assert_eq!(sum.double_value(&[]), 6.0);
    assert_eq!(mapped("libtorch_cpu.so").len(), 1, "one libtorch, not two");
    assert_eq!(mapped("libtorch_cuda.so"), Vec::<String>::new());
}

//! A program of this workspace finds libtorch by itself. It links the CPU half only, so it also
//! starts without CUDA. On CUDA hosts the other half is loaded at run time.
#![cfg(feature = "torch")]

use std::fs;
use tch::{Kind, Tensor};

/// Returns the files mapped into this process whose names start with `prefix`.
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

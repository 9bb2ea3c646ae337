//! What NVRTC makes of the kernels, without a device.
#![expect(unsafe_code, reason = "asks whether there is a library")]

use std::collections::BTreeSet;

use super::*;
use crate::cuda::host::library;
use crate::cuda::launch::KERNELS;

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../../../tests/harness/skip.rs"]
mod skip;

/// Returns whether there is an NVRTC. A test without one says that it is skipped.
fn has_nvrtc() -> bool {
    library::load_nvrtc();
    // SAFETY: opens and closes the library, which runs nothing of ours.
    let found = unsafe { sys::is_culib_present() };
    if !found {
        skip::skipped(skip::Lacks::Package, "no NVRTC: no kernel was compiled for a device");
    }
    found
}

#[test]
fn ptx_has_no_operation_that_would_change_a_bit() {
    if !has_nvrtc() {
        return;
    }
    let targets = targets().unwrap();
    assert!(targets.contains(&90), "{targets:?}");
    for target in [75, 80, 90, 100, 120].into_iter().filter(|target| targets.contains(target)) {
        let ptx = compile(&format!("compute_{target}")).unwrap();
        let words = ptx.split(|c: char| c.is_whitespace() || ";,()[]{}".contains(c));
        for word in words {
            let parts: Vec<_> = word.split('.').collect();
            // With the pairs of newer devices, such as `f32x2`.
            let is_float =
                parts.last().is_some_and(|part| part.starts_with("f32") || part.starts_with("f64"));
            let fused = ["fma", "mad"].contains(&parts[0]) && is_float;
            let loose = parts.contains(&"approx") || parts.contains(&"ftz") || parts.contains(&"full");
            // Without a rounding mode the driver may fuse two operations.
            let computes = ["add", "sub", "mul", "div", "sqrt"].contains(&parts[0]) && is_float;
            assert!(!fused && !loose && (!computes || parts.contains(&"rn")), "{word} for {target}");
        }
        let entries = ptx.split(".entry ").skip(1).filter_map(|rest| rest.split('(').next());
        let entries: BTreeSet<_> = entries.collect();
        assert_eq!(entries, KERNELS.into_iter().collect(), "{target}");
        for operation in ["div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "add.rn.f64"] {
            assert!(ptx.contains(operation), "no {operation} for {target}: this test reads nothing");
        }
    }
}

#[test]
fn a_device_without_a_target_is_named_and_a_refusal_says_why() {
    if !has_nvrtc() {
        return;
    }
    let oldest = targets().unwrap().into_iter().min().unwrap();
    assert_eq!(ptx(10, None), Err(Error::Unsupported { capability: 10, oldest }));
    // A device that is newer than NVRTC runs what is compiled for an older one.
    assert!(architecture(9999).is_ok());
    let refused = compile("compute_1").unwrap_err().to_string();
    assert!(refused.starts_with("NVRTC does not compile the kernels for compute_1: "), "{refused}");
}

//! What NVRTC makes of the kernels, without a device.
#![expect(unsafe_code, reason = "asks whether there is a library")]

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};

use cudarc::nvrtc::result;

use super::*;
use crate::cuda::host::library;
use crate::cuda::launch::KERNELS;
use crate::optimizer::tests::optimizers;

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

/// Returns what NVRTC says while it compiles: nothing, unless there are warnings or errors.
fn said(source: &str, target: i32) -> String {
    let source = CString::new(source).unwrap();
    let program = result::create_program(&source, None).unwrap();
    // SAFETY: the program and its source live until the program is destroyed, once, below.
    unsafe {
        let _ = result::compile_program(program, &options(&format!("compute_{target}")));
        let log = result::get_program_log(program).unwrap();
        let log = CStr::from_ptr(log.as_ptr()).to_string_lossy().trim().to_owned();
        result::destroy_program(program).unwrap();
        log
    }
}

/// The compute capabilities for which tests compile: 7.5 to 12.0. NVRTC 13 knows them all.
const TARGETS: [i32; 5] = [75, 80, 90, 100, 120];

#[test]
fn nvrtc_compiles_every_kernel_without_a_warning() {
    if !has_nvrtc() {
        return;
    }
    let known = targets().unwrap();
    for target in TARGETS {
        assert!(
            known.contains(&target),
            "this NVRTC has no target {target}; use the one of xtask/src/needs.rs"
        );
        assert_eq!(said(SOURCE, target), "", "{target}");
    }
    let unused = "extern \"C\" __global__ void one() { int unused; }";
    assert!(said(unused, 90).contains("warning"), "NVRTC warns of nothing, so this test reads nothing");
}

#[test]
fn ptx_has_no_operation_that_would_change_a_bit() {
    if !has_nvrtc() {
        return;
    }
    for target in TARGETS {
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

/// Memory is the limit of an update. A thread that moves single values leaves some of it unused.
#[test]
fn every_rule_reads_and_writes_four_values_at_once() {
    if !has_nvrtc() {
        return;
    }
    for target in TARGETS {
        let ptx = compile(&format!("compute_{target}")).unwrap();
        for optimizer in optimizers() {
            let (kernel, slots, _) = optimizer.prepare(0, 1.0).rule.kernel();
            let text = ptx.split(".entry ").find(|text| text.starts_with(&format!("{kernel}("))).unwrap();
            let wide = |operation: &str| {
                let is_wide = |word: &&str| word.starts_with(operation) && word.contains(".v4.");
                text.split_whitespace().filter(is_wide).count()
            };
            assert!(wide("ld.") >= slots + 3, "{kernel} for {target} reads {} groups of four", wide("ld."));
            assert!(wide("st.") > slots, "{kernel} for {target} writes {} groups of four", wide("st."));
        }
        let text = ptx.split(".entry ").find(|text| text.starts_with("look_up(")).unwrap();
        let has = |operation: &str| text.contains(operation);
        // Four bytes are one word, too.
        let is_wide = (has("ld.global.v4.u8") || has("ld.global.u32")) && has("st.global.v4.f32");
        assert!(is_wide, "look_up for {target} moves single values");
    }
}

#[test]
fn a_device_without_a_target_is_named_and_a_refusal_says_why() {
    if !has_nvrtc() {
        return;
    }
    let oldest = targets().unwrap().into_iter().min().unwrap();
    assert_eq!(load(10, None, Ok), Err(Error::Unsupported { capability: 10, oldest }));
    // A device that is newer than NVRTC runs what is compiled for an older one.
    assert!(architecture(9999).is_ok());
    let refused = compile("compute_1").unwrap_err().to_string();
    assert!(refused.starts_with("NVRTC does not compile the kernels for compute_1: "), "{refused}");
}

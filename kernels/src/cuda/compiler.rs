//! NVRTC: from the text of the kernels to PTX, which the driver turns into code of its device.
//!
//! Always true here: the options forbid everything that would change a bit. A test reads the PTX.
#![expect(unsafe_code, reason = "asks NVRTC's own functions")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts, sys};

use super::{SOURCE, cache};
use crate::error::Error;

/// IEEE arithmetic: no fused multiply-add, division and square root rounded to nearest, and
/// subnormals kept.
pub(crate) const OPTIONS: [&str; 4] = ["--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"];

/// Returns the kernels as PTX for a compute capability, such as 90 for 9.0. They come from the
/// cache if there is one.
///
/// # Errors
/// There is no NVRTC, it has no target for the device, or it refuses the kernels. An entry of the
/// cache that cannot be used is no error: the kernels are compiled again.
pub(crate) fn ptx(capability: i32, cache: Option<&Path>) -> Result<String, Error> {
    let architecture = architecture(capability)?;
    let key = cache::Key::of(SOURCE, &options(&architecture));
    if let Some(ptx) = cache.and_then(|folder| cache::read(folder, &key)) {
        return Ok(ptx);
    }
    let ptx = compile(&architecture)?;
    if let Some(folder) = cache {
        // The next process compiles again.
        let _ = cache::write(folder, &key, &ptx);
    }
    Ok(ptx)
}

/// Looks for NVRTC.
///
/// # Errors
/// There is none.
pub(crate) fn find() -> Result<(), Error> {
    // SAFETY: opens and closes the library, which runs nothing of ours.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(Error::NoCompiler) }
}

/// Returns the newest target of NVRTC that the device runs.
fn architecture(capability: i32) -> Result<String, Error> {
    find()?;
    let targets = targets()?;
    let oldest = targets.iter().copied().min().unwrap_or(0);
    let newest = targets.into_iter().filter(|target| *target <= capability).max();
    newest.map_or(Err(Error::Unsupported { capability, oldest }), |newest| Ok(format!("compute_{newest}")))
}

/// Returns the compute capabilities that NVRTC compiles for.
fn targets() -> Result<Vec<i32>, Error> {
    let failed = |reason: String| Error::NotCompiled { architecture: "any device".to_owned(), reason };
    let asked = catch_unwind(AssertUnwindSafe(|| {
        let mut count = 0;
        // SAFETY: NVRTC writes one number.
        unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result()?;
        let mut targets = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: NVRTC writes as many numbers as it has just said.
        unsafe { sys::nvrtcGetSupportedArchs(targets.as_mut_ptr()) }.result()?;
        Ok::<_, cudarc::nvrtc::result::NvrtcError>(targets)
    }));
    match asked {
        Ok(targets) => targets.map_err(|error| failed(format!("{error:?}"))),
        Err(_) => Err(failed("it lacks a function of CUDA 11.2".to_owned())),
    }
}

/// Returns all options for a target.
fn options(architecture: &str) -> Vec<String> {
    let target = format!("--gpu-architecture={architecture}");
    OPTIONS.into_iter().map(str::to_owned).chain([target]).collect()
}

/// Compiles the kernels.
///
/// # Errors
/// NVRTC refuses them, with what it says.
pub(crate) fn compile(architecture: &str) -> Result<String, Error> {
    let options = CompileOptions { options: options(architecture), ..CompileOptions::default() };
    let failed = |reason| Error::NotCompiled { architecture: architecture.to_owned(), reason };
    match compile_ptx_with_opts(SOURCE, options) {
        Ok(ptx) => Ok(ptx.to_src()),
        Err(CompileError::CompileError { log, .. }) => Err(failed(log.to_string_lossy().trim().to_owned())),
        Err(error) => Err(failed(format!("{error:?}"))),
    }
}

#[cfg(test)]
mod tests;

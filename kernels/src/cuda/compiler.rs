//! NVRTC: from the text of the kernels to PTX, which the driver turns into code of its device.
//!
//! Always true here: the options forbid everything that would change a bit. A test reads the PTX.
#![expect(unsafe_code, reason = "asks NVRTC's own functions")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts, sys};

use super::{SOURCE, cache};
use crate::error::Error;

/// IEEE arithmetic: no fused multiply-add, division and square root rounded to nearest, and
/// subnormals kept.
pub(crate) const OPTIONS: [&str; 4] = ["--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"];

/// Loads the kernels for a compute capability, such as 90 for 9.0, by `load`, which gets them as
/// PTX. They come from the cache if there is one, and go there once they are loaded.
///
/// The cache knows the version of NVRTC. A machine without NVRTC loads what any version made for
/// this capability.
///
/// # Errors
/// Those of `load`. There is no NVRTC and the cache has nothing, or NVRTC has no target for the
/// device or refuses the kernels. An entry of the cache that cannot be used is no error: the
/// kernels are compiled again.
pub(crate) fn load<M>(
    capability: i32,
    cache: Option<&Path>,
    mut load: impl FnMut(String) -> Result<M, Error>,
) -> Result<M, Error> {
    // Of the device's own target. An older NVRTC may take an older one.
    let key = cache::Key::of(SOURCE, &options(&format!("compute_{capability}")));
    if let Err(missing) = find() {
        let mut found = Err(missing);
        for ptx in cache.map_or_else(Vec::new, |folder| cache::read_all(folder, &key)) {
            found = load(ptx);
            if found.is_ok() {
                break;
            }
        }
        return found;
    }
    let version = version()?;
    if let Some(ptx) = cache.and_then(|folder| cache::read(folder, &key, version)) {
        return load(ptx);
    }
    let ptx = compile(&architecture(capability)?)?;
    let loaded = load(ptx.clone())?;
    if let Some(folder) = cache {
        // The next process compiles again.
        let _ = cache::write(folder, &key, version, &ptx);
    }
    Ok(loaded)
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
    let targets = targets()?;
    let oldest = targets.iter().copied().min().unwrap_or(0);
    let newest = targets.into_iter().filter(|target| *target <= capability).max();
    newest.map_or(Err(Error::Unsupported { capability, oldest }), |newest| Ok(format!("compute_{newest}")))
}

/// Returns the version of NVRTC.
fn version() -> Result<cache::Version, Error> {
    asked(|| {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: NVRTC writes two numbers.
        unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result()?;
        Ok(cache::Version(major, minor))
    })
}

/// Returns the compute capabilities that NVRTC compiles for.
fn targets() -> Result<Vec<i32>, Error> {
    asked(|| {
        let mut count = 0;
        // SAFETY: NVRTC writes one number.
        unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result()?;
        let mut targets = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: NVRTC writes as many numbers as it has just said.
        unsafe { sys::nvrtcGetSupportedArchs(targets.as_mut_ptr()) }.result()?;
        Ok(targets)
    })
}

/// Asks NVRTC for what it is. cudarc panics when it calls a function that NVRTC lacks.
fn asked<T>(ask: impl FnOnce() -> Result<T, NvrtcError>) -> Result<T, Error> {
    let failed = |reason: String| Error::NotCompiled { architecture: "any device".to_owned(), reason };
    match catch_unwind(AssertUnwindSafe(ask)) {
        Ok(answer) => answer.map_err(|error| failed(format!("{error:?}"))),
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

//! Makes programs that use libtorch find it, at link time and, without any environment variable, at
//! start.
//!
//! Binaries, tests, examples and benches get an rpath to the real folder. Doctests take no link
//! arguments from a build script, but cargo puts link-search folders that lie inside the target
//! directory on the library path of everything it runs, doctests included; so the folder is also
//! linked into `OUT_DIR`. The root package, the worker, the client and the Python package read
//! `DEP_LIBTORCH_LIB` (Cargo's `links` mechanism) and repeat the rpath for their own programs. The
//! C++ shim of the libtorch engine is compiled here too. Nothing happens without the feature
//! `torch`.
#![expect(clippy::disallowed_methods, reason = "cargo talks to build scripts through the environment")]

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_TORCH").is_some()
        && let Err(error) = libtorch()
    {
        println!("cargo::error={error}");
    }
}

fn libtorch() -> Result<(), String> {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    let root = env::var_os("LIBTORCH").map(PathBuf::from).unwrap_or_default();
    let lib = find_lib(&root).map_err(|error| {
        format!(
            "libtorch: no `lib/libtorch_cpu.so` in LIBTORCH=`{}` ({error}); \
             run `cargo xtask libtorch`, or build without it: `--no-default-features`",
            root.display()
        )
    })?;
    println!("cargo::rerun-if-changed={}", root.join("lib/libtorch_cpu.so").display());
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo::metadata=LIB={}", lib.display());

    let out_dir = env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run this through cargo")?;
    let inside_target = Path::new(&out_dir).join("libtorch");
    link(&lib, &inside_target).map_err(|error| format!("link `{}`: {error}", inside_target.display()))?;
    println!("cargo::rustc-link-search=native={}", inside_target.display());
    #[cfg(feature = "torch")]
    shim(&root);
    Ok(())
}

/// Compiles the C++ shim for functions that `tch` lacks, with the settings of the wheel that
/// libtorch comes from.
#[cfg(feature = "torch")]
fn shim(root: &Path) {
    const SOURCE: &str = "src/engines/torch/shim.cpp";
    println!("cargo::rerun-if-changed={SOURCE}");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").define("_GLIBCXX_USE_CXX11_ABI", "1").file(SOURCE);
    for include in ["include", "include/torch/csrc/api/include"] {
        // System headers: their warnings are not ours.
        build.flag("-isystem").flag(root.join(include));
    }
    build.compile("ebb_shim");
}

/// Returns the real folder of the libraries. The rpath must stay valid when `.libtorch` points
/// elsewhere.
fn find_lib(root: &Path) -> io::Result<PathBuf> {
    let lib = root.join("lib").canonicalize()?;
    fs::metadata(lib.join("libtorch_cpu.so"))?;
    Ok(lib)
}

fn link(original: &Path, link: &Path) -> io::Result<()> {
    match fs::remove_file(link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => std::os::unix::fs::symlink(original, link),
    }
}

//! Gives the test programs of the Python package the rpath to libtorch that `model/build.rs` found.
//! Without the feature `torch` there is none.
#![expect(clippy::disallowed_methods, reason = "cargo talks to build scripts through the environment")]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(lib) = std::env::var("DEP_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    }
}

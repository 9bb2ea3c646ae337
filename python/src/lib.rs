//! The module `ebbflow._native` of the Python package: what Python code reaches of Ebbflow.
//!
//! It has no protocol of its own. It stands on the crate `client` and on the program `ebb`, and
//! gives Python strings, bytes and JSON. `python/ebbflow/` makes Python objects of them.
//!
//! Everything that needs Python is behind the feature `extension`, which maturin asks for.

#[cfg(any(feature = "extension", test))]
mod failure;

#[cfg(feature = "extension")]
mod extension;

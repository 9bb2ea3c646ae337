//! Compiles the schema with protox, so that no system `protoc` is needed.

#[expect(
    clippy::disallowed_methods,
    reason = "cargo tells build scripts where to write through the environment"
)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["types", "parameters", "fleet", "jobs", "scripts", "journal"]
        .map(|name| format!("ebbflow/v1/{name}.proto"));
    for file in &files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(&files, ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure()
        // Payloads stay slices of the receive buffer: no copy when decoding.
        .bytes(".ebbflow.v1")
        .btree_map(".ebbflow.v1")
        // Nobody prints it: see `secret.rs`.
        .skip_debug([".ebbflow.v1.Secret"])
        .compile_fds(descriptors)?;
    Ok(())
}

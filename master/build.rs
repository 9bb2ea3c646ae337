//! Compiles what a master speaks of etcd's API with protox, so that no system `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=etcd/rpc.proto");
    let descriptors = protox::compile(["etcd/rpc.proto"], ["."])?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;
    Ok(())
}

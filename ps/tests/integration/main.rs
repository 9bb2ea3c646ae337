//! A ps as its users see it: inside the process through `proto::parameters`, and on a socket
//! through gRPC.

mod bits;
mod checkpoint;
mod faulty;
mod harness;
mod life;
mod limits;
mod norms;
mod order;
mod refusals;
mod served;
mod session;
mod wire;

/// Returns the device of the next ps that a test starts.
fn device() -> ps::Device {
    ps::Device::default()
}

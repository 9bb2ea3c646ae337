//! Gradients and weights between a worker and a ps that share CUDA device 0, beside copies within
//! the device and across the bus.
//!
//! Each line is a name, a value and a unit, with tabs between them. `cargo xtask gpu` puts them
//! into its report. Without a device it says why, and that is no failure. With the argument
//! `--bench`, which cargo gives, it measures 1 GiB; otherwise it shows that it works.
//!
//! - *Pull*: from the ps's weights into the worker's tensors. *Push*: from the worker's tensors
//!   until the ps has acknowledged, without an optimizer.
//! - *Within the device*: the worker computes there, and the two processes pass memory of the
//!   device by CUDA IPC. The peer is a copy of the same bytes within the device.
//! - *Across the bus*: the worker computes on the host, and the two processes pass shared memory.
//!   The peer is a copy between the device and page-locked memory.
//!
//! Peer and call take turns, so that each ratio compares adjacent measurements.
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

mod exchange;
mod served;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use exchange::{Case, Exchange};
use kernels::device::Devices;
use kernels::{Device, Operand};
use net::channel::Dialer;
use net::memory::Memory;
use proto::tensor::DType;
use proto::wire::WireType;
use served::Served;
use tokio::runtime::Runtime;
use worker::exchange::Connector;

/// Allocator of `ebb`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    ebbflow::allocator::keep_free_memory(u64::MAX);
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("serve") {
        let bytes = arguments.next().and_then(|bytes| bytes.parse().ok()).expect("a number of bytes");
        return case(bytes).serve(Device::cuda(0, None).expect("the other process has opened it"));
    }
    let devices = Devices::default();
    let device = match devices.cuda(0) {
        Ok(device) => device,
        Err(reason) => {
            println!("no device is measured: {reason}");
            return ExitCode::SUCCESS;
        }
    };
    let measures = std::env::args().any(|argument| argument == "--bench");
    let (bytes, rounds) = if measures { (1 << 30, 9) } else { (1 << 20, 1) };
    let (runtime, memory) = (runtime(), || Memory::new().expect("Linux has shared memory"));
    let zeros = || device.zeros(DType::F32, bytes / 4).expect("the device has room for a copy");
    let (from, mut there, mut here) = (zeros(), zeros(), device.staging(DType::F32, bytes / 4));

    let ps = Served::start(["serve", &bytes.to_string()]);
    let connector = Connector::device_memory(Dialer::nearest(), memory(), 0, devices, Arc::default());
    let mut within = Exchange::new(case(bytes), &connector, &ps.url(), &runtime).on(device.clone());
    let rows = measure(&mut within, &runtime, rounds, || {
        there.write(Operand::Stored(&from));
        device.settle().expect("the device works");
    });
    print("within the device", "a copy there", bytes, 0.8, rows);
    drop((within, ps));

    let ps = Served::start(["serve", &bytes.to_string()]);
    let connector = Connector::shared_memory(Dialer::nearest(), memory(), Arc::default());
    let mut across = Exchange::new(case(bytes), &connector, &ps.url(), &runtime);
    let rows = measure(&mut across, &runtime, rounds, || here.receive(&from).expect("the device works"));
    print("across the bus", "a copy to page-locked memory", bytes, 0.9, rows);
    ExitCode::SUCCESS
}

/// Returns an exchange without an optimizer, of so many bytes.
const fn case(bytes: usize) -> Case {
    Case { optimizer: "sgd", tensors: 1, wire: WireType::F32, bytes }
}

/// Returns a runtime like that of `ebb worker`.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Returns the seconds of pulls, of pushes, and of the copies beside each of them.
fn measure(
    exchange: &mut Exchange,
    runtime: &Runtime,
    rounds: usize,
    mut copy: impl FnMut(),
) -> [Vec<[f64; 2]>; 2] {
    let mut copied = || {
        let begin = Instant::now();
        copy();
        begin.elapsed().as_secs_f64()
    };
    let [mut pulls, mut pushes] = [Vec::new(), Vec::new()];
    for round in 0..=rounds {
        let (pull, beside) = (exchange.pull(runtime), copied());
        let (push, beside_push) = (exchange.push(runtime), copied());
        // The first round warms up.
        if round > 0 {
            pulls.push([pull, beside]);
            pushes.push([push, beside_push]);
        }
    }
    [pulls, pushes]
}

fn print(way: &str, peer: &str, bytes: usize, target: f64, rows: [Vec<[f64; 2]>; 2]) {
    let gib = |seconds: f64| bytes as f64 / seconds / f64::from(1_u32 << 30);
    for (call, rows) in ["pull", "push"].iter().zip(rows) {
        let median = |of: &dyn Fn(&[f64; 2]) -> f64| {
            let mut values: Vec<_> = rows.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let name = format!("{call} of {} MiB {way}", bytes >> 20);
        println!("{name}\t{:.1}\tGiB/s", median(&|[call, _]| gib(*call)));
        println!("{name}: {peer}\t{:.1}\tGiB/s", median(&|[_, copy]| gib(*copy)));
        println!("{name}, of {peer} (target {target})\t{:.3}\tratio", median(&|[call, copy]| copy / call));
    }
}

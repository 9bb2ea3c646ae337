//! A ps and a worker of one process, whose gradients and weights lie on a device.

use std::sync::Arc;

use kernels::{Device, values};
use proto::ids::{PartitionId, Step, Version};
use proto::parameters::{GivenValues, Parameters, Pull, Push, Want};
use proto::placement::CHUNK_LEN;
use proto::status::Failure;
use proto::tensor::{Chunk, ChunkValues, DType, TensorRole, TensorSpec};
use proto::tree::Node;
use proto::wire::WireType;
use ps::Ps;
use store::Stores;

use crate::harness::{Job, Shape, options};

const PARTITION: PartitionId = PartitionId(0);

/// Values before and behind those of a chunk in the memory that it is a part of.
const AROUND: usize = 3;

fn job(wire: WireType) -> Job {
    let tensors = vec![
        TensorSpec::parameter("weight", [CHUNK_LEN + 33]),
        TensorSpec::state("mean", [7]),
        TensorSpec::counter("batches", []),
    ];
    Job::new(Shape { tensors, records: 16, epochs: 1, wire, ..Shape::default() })
}

/// Returns a chunk whose floats lie on a device, inside of more memory.
fn lying_on(device: &Device, chunk: &Chunk) -> Chunk {
    if chunk.role.dtype() == DType::I64 {
        return chunk.clone();
    }
    let (begin, bytes) = (AROUND * DType::F32.size(), chunk.values.host());
    let mut storage = device.zeros(DType::F32, bytes.len() / DType::F32.size() + 2 * AROUND).expect("memory");
    storage.fill(f32::NAN);
    storage.place(begin, bytes);
    let values = ChunkValues::Device { memory: Arc::new(storage), bytes: begin..begin + bytes.len() };
    Chunk { values, ..chunk.clone() }
}

fn on(device: &Device, push: &Push) -> Push {
    let chunks = push.chunks.iter().map(|chunk| lying_on(device, chunk)).collect();
    Push { chunks, ..*push }
}

/// Pulls a version as a worker does whose weights lie on `device`. Returns its chunks on the host,
/// and how many of them lay on a device.
async fn pulled(ps: &Ps, device: &Device, pull: Pull) -> (Vec<Chunk>, usize) {
    let (mut chunks, mut there) = (Vec::new(), 0);
    let mut take = |id, wire: WireType, came: GivenValues<'_>| {
        assert_eq!(wire, WireType::F32);
        let bytes = came.len();
        let values = match came {
            GivenValues::Host(values) => values.to_vec(),
            GivenValues::Device(memory, part) => {
                there += 1;
                let mut storage = device.zeros(DType::F32, bytes / DType::F32.size()).expect("memory");
                let from = values::storage(memory).expect("storage");
                storage.place_part(0, from, part);
                storage.bytes().into_owned()
            }
        };
        chunks.push((id, values));
        Ok::<_, Failure>(())
    };
    ps.pull_into(Pull { on_device: true, ..pull }, &mut take).await.expect("a version");
    let chunk = |(id, values): (_, Vec<u8>)| Chunk { id, role: TensorRole::Parameter, values: values.into() };
    (chunks.into_iter().map(chunk).collect(), there)
}

#[tokio::test]
async fn gradients_and_weights_on_a_device_give_the_bits_of_the_host() {
    let Some(shared) = crate::cuda() else { return };
    // Streams of another opening do not wait for those of the first.
    let other = Device::cuda(0, None).expect("memory");
    for wire in [WireType::F32, WireType::Bf16] {
        for of_ps in [Device::default(), shared.clone()] {
            for of_worker in [&shared, &other] {
                let job = job(wire);
                let ps = Ps::on(of_ps.clone(), options(), Stores::default(), None).expect("memory");
                assert_eq!(ps.open(job.opening(PARTITION)).expect("a valid opening"), None);
                ps.push(job.push_initial(PARTITION)).await.expect("version 0");
                let steps = job.plan.steps();
                for step in (0..steps).map(Step) {
                    for leaf in [3, 0, 1, 2] {
                        let push = job.push(PARTITION, step, Node::leaf(leaf));
                        ps.push(on(of_worker, &push)).await.expect("a leaf");
                    }
                }
                let reference = job.reference(Version(steps));
                let pull = job.pull(PARTITION, Want::Exact(Version(steps)));
                let (chunks, there) = pulled(&ps, of_worker, pull).await;
                let expected = job.chunks(PARTITION, &reference[steps as usize]);
                assert_eq!(there, if of_ps.is_host() { 0 } else { expected.len() });
                for (found, expected) in chunks.iter().zip(&expected) {
                    assert!(found.values.host() == expected.values.host(), "chunk {}", found.id);
                }
            }
        }
    }
}

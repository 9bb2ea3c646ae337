//! Messages of other processes: decoded, converted, and checked as their receivers do it.

use bytes::Bytes;
use prost::Message;
use proto::convert::{ChunkCheck, check_node, check_push_wire, required, tensors, wire_type};
use proto::error::Result;
use proto::ids::{Epoch, PartitionId, Step};
use proto::metrics::Evaluation;
use proto::numerics::Numerics;
use proto::parameters::{Address, Pull, Pushed, Restore, Target};
use proto::pb;
use proto::pb::push_request::Part;
use proto::placement::Layout;
use proto::plan::Plan;
use proto::spec::JobSpec;
use proto::tensor::TensorSpec;
use proto::wire::WireType;

/// Decodes a message, and converts it to what it says.
fn converted<M: Message + Default, T: TryFrom<M>>(bytes: &[u8]) -> bool {
    M::decode(bytes).is_ok_and(|message| T::try_from(message).is_ok())
}

pub(crate) fn evaluated(bytes: &[u8]) -> bool {
    converted::<pb::Evaluated, Evaluation>(bytes)
}

pub(crate) fn numerics(bytes: &[u8]) -> bool {
    converted::<pb::Numerics, Numerics>(bytes)
}

pub(crate) fn pull(bytes: &[u8]) -> bool {
    converted::<pb::PullRequest, Pull>(bytes)
}

pub(crate) fn pushed(bytes: &[u8]) -> bool {
    converted::<pb::PushReply, Pushed>(bytes)
}

/// Decodes how a master opens a partition.
pub(crate) fn open(bytes: &[u8]) -> bool {
    let checked = |request: pb::OpenRequest| -> Result<()> {
        let plan: Plan = required("OpenRequest", "plan", request.plan)?.try_into()?;
        JobSpec::from_json(&request.spec_json)?;
        request.restore.map(Restore::try_from).transpose()?;
        Layout::check(&tensors(request.tensors)?, request.partitions)?;
        // The numbering of a plan that was taken holds at both ends.
        let last = Step(plan.steps() - 1);
        assert_eq!(plan.samples_before(last) + plan.samples_of(last), plan.records * plan.epochs);
        assert_eq!(plan.version_after(Epoch(plan.epochs - 1)), plan.final_version());
        Ok(())
    };
    pb::OpenRequest::decode(bytes).is_ok_and(|request| checked(request).is_ok())
}

/// Decodes a push. Its header is checked against a plan, and its chunks against a layout.
pub(crate) fn push(bytes: &[u8]) -> bool {
    let checked = |messages: Vec<pb::PushRequest>| -> Result<()> {
        let mut parts = messages.into_iter().map(|message| message.part);
        let Part::Header(header) = required("PushRequest", "part", parts.next().flatten())? else {
            return required("PushRequest", "header", None);
        };
        let wire = wire_type("PushHeader", header.wire)?;
        let (_, target) = <(Address, Target)>::try_from(header)?;
        check_push_wire(target, wire, WireType::Bf16)?;
        if let Target::Node { node, samples } = target {
            check_node(&plan(), node, samples, false)?;
        }
        let layout = layout();
        let mut check = ChunkCheck::new("push to", &layout, PartitionId(0));
        for part in parts {
            let Part::Chunks(message) = required("PushRequest", "part", part)? else {
                return required("PushRequest", "chunks", None);
            };
            for chunk in message.chunks {
                check.accept(chunk, wire)?;
            }
        }
        check.finish()
    };
    let messages = net::bulk::messages::<pb::PushRequest>(Bytes::copy_from_slice(bytes));
    messages.is_ok_and(|messages| checked(messages).is_ok())
}

/// Returns the plan of the job that [`push`] belongs to.
pub(crate) fn plan() -> Plan {
    Plan { records: 100, micro: 8, microbatches_per_step: 4, epochs: 2 }
}

/// Returns the layout of the model that [`push`] belongs to.
pub(crate) fn layout() -> Layout {
    let tensors = vec![TensorSpec::parameter("weight", [30]), TensorSpec::counter("count", [])];
    Layout::new(tensors, 1).expect("a layout")
}

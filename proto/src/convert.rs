//! The door: every message from outside is checked here, once, before anything acts on it.
//!
//! Whole streams too: [`ChunkCheck`] walks a partition's layout beside a stream of chunks, so that a push or a pull with
//! a wrong shape, a missing or a foreign chunk is refused before its first value is used.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use crate::channel::PAYLOAD_BYTES;
use crate::error::{Error, Result};
use crate::ids::{ChunkId, Era, JobId, PartitionId, Step, Version};
use crate::parameters::{Address, Outcome, Pull, Pushed, Restore, Target, Want};
use crate::pb;
use crate::placement::Layout;
use crate::plan::Plan;
use crate::spec::WORKERS_MAX;
use crate::tensor::{Chunk, DType, Role, TensorSpec};
use crate::tree::{Node, StepNode};

fn field(message: &'static str, field: &'static str, expected: &str, found: impl fmt::Display) -> Error {
    Error::Field { message, field, expected: expected.to_owned(), found: format!("{found}") }
}

/// A field that must be there.
///
/// # Errors
/// It is not.
pub fn required<T>(message: &'static str, name: &'static str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| field(message, name, "a value", "none"))
}

impl TryFrom<pb::TensorSpec> for TensorSpec {
    type Error = Error;

    fn try_from(spec: pb::TensorSpec) -> Result<Self> {
        let role = match spec.role() {
            pb::Role::Parameter => Role::Parameter,
            pb::Role::State => Role::State,
            pb::Role::Counter => Role::Counter,
            pb::Role::Unspecified => {
                return Err(field("TensorSpec", "role", "parameter, state or counter", spec.role));
            }
        };
        let dtype = match spec.dtype() {
            pb::DType::F32 => Some(DType::F32),
            pb::DType::I64 => Some(DType::I64),
            pb::DType::Unspecified => None,
        };
        if dtype != Some(role.dtype()) {
            return Err(field(
                "TensorSpec",
                "dtype",
                &format!("{:?} for a {role:?}", role.dtype()),
                spec.dtype,
            ));
        }
        let shape = spec.shape.iter().map(|&size| usize::try_from(size)).collect::<Result<Vec<_>, _>>();
        let shape = shape.map_err(|_| {
            field("TensorSpec", "shape", "sizes that fit memory", format!("{:?}", spec.shape))
        })?;
        Ok(Self { name: spec.name, shape, role })
    }
}

impl From<&TensorSpec> for pb::TensorSpec {
    fn from(spec: &TensorSpec) -> Self {
        let role = match spec.role {
            Role::Parameter => pb::Role::Parameter,
            Role::State => pb::Role::State,
            Role::Counter => pb::Role::Counter,
        };
        let dtype = match spec.dtype() {
            DType::F32 => pb::DType::F32,
            DType::I64 => pb::DType::I64,
        };
        let shape = spec.shape.iter().map(|&size| size as u64).collect();
        Self { name: spec.name.clone(), shape, dtype: dtype.into(), role: role.into() }
    }
}

/// A list of tensors from the wire.
///
/// # Errors
/// The first that is malformed.
pub fn tensors(list: Vec<pb::TensorSpec>) -> Result<Vec<TensorSpec>> {
    list.into_iter().map(TensorSpec::try_from).collect()
}

impl TryFrom<pb::Restore> for Restore {
    type Error = Error;

    fn try_from(restore: pb::Restore) -> Result<Self> {
        let pb::Restore { url, version } = restore;
        if url.is_empty() {
            return Err(field("Restore", "url", "a folder", "nothing"));
        }
        if version == 0 {
            return Err(field("Restore", "version", "1 or more", version));
        }
        Ok(Self { url, version: Version(version) })
    }
}

impl TryFrom<pb::Plan> for Plan {
    type Error = Error;

    fn try_from(plan: pb::Plan) -> Result<Self> {
        let positive =
            |name, value: u64| if value > 0 { Ok(()) } else { Err(field("Plan", name, "1 or more", value)) };
        positive("records", plan.records)?;
        positive("micro", plan.micro.into())?;
        positive("microbatches_per_step", plan.microbatches_per_step.into())?;
        positive("epochs", plan.epochs)?;
        // So that no product of the numbering overflows.
        let wide = u128::from(plan.records) * u128::from(plan.epochs);
        if wide >= 1 << 62 {
            return Err(field("Plan", "records x epochs", "below 2^62", wide));
        }
        Ok(Self {
            records: plan.records,
            micro: plan.micro,
            microbatches_per_step: plan.microbatches_per_step,
            epochs: plan.epochs,
        })
    }
}

impl From<Plan> for pb::Plan {
    fn from(plan: Plan) -> Self {
        Self {
            records: plan.records,
            micro: plan.micro,
            microbatches_per_step: plan.microbatches_per_step,
            epochs: plan.epochs,
        }
    }
}

/// Whether a push's node is one that the job's plan has, with the samples the plan says.
///
/// # Errors
/// Step, M, range or samples that are not the plan's.
pub fn check_node(plan: &Plan, node: StepNode, samples: u64) -> Result<()> {
    if node.step.get() >= plan.steps() {
        return Err(field("Node", "step", &format!("below {} by the job's plan", plan.steps()), node.step));
    }
    let of = plan.of(node.step);
    if node.of != of {
        return Err(field("Node", "of", &format!("{of} by the job's plan for step {}", node.step), node.of));
    }
    if !node.node.is_in(of) {
        return Err(field("Node", "range", &format!("a node of the reduction tree over {of}"), node.node));
    }
    let expected = plan.samples_below(node.step, node.node);
    if samples != expected {
        return Err(field("Node", "samples", &format!("{expected} by the job's plan"), samples));
    }
    Ok(())
}

impl TryFrom<pb::Node> for Target {
    type Error = Error;

    fn try_from(node: pb::Node) -> Result<Self> {
        if node.begin >= node.end || node.end > node.of {
            return Err(field(
                "Node",
                "range",
                &format!("begin < end <= {}", node.of),
                format!("[{}, {})", node.begin, node.end),
            ));
        }
        let range = Node::new(node.begin, node.end);
        Ok(Self::Node {
            node: StepNode { step: Step(node.step), node: range, of: node.of },
            samples: node.samples,
        })
    }
}

impl TryFrom<pb::PushHeader> for (Address, Target) {
    type Error = Error;

    fn try_from(header: pb::PushHeader) -> Result<Self> {
        let address = Address {
            job: JobId(header.job),
            partition: PartitionId(header.partition),
            era: Era(header.era),
        };
        let target = match required("PushHeader", "target", header.target)? {
            pb::push_header::Target::Initial(pb::Initial {}) => Target::Initial,
            pb::push_header::Target::Node(node) => Target::try_from(node)?,
        };
        Ok((address, target))
    }
}

impl From<(Address, Target)> for pb::PushHeader {
    fn from((address, target): (Address, Target)) -> Self {
        let target = match target {
            Target::Initial => pb::push_header::Target::Initial(pb::Initial {}),
            Target::Node { node, samples } => pb::push_header::Target::Node(pb::Node {
                step: node.step.get(),
                begin: node.node.begin,
                end: node.node.end,
                of: node.of,
                samples,
            }),
        };
        Self {
            job: address.job.get(),
            era: address.era.get(),
            partition: address.partition.get(),
            target: Some(target),
            attachment: Bytes::new(),
        }
    }
}

impl TryFrom<pb::PullRequest> for Pull {
    type Error = Error;

    fn try_from(pull: pb::PullRequest) -> Result<Self> {
        let want = match required("PullRequest", "want", pull.want)? {
            pb::pull_request::Want::Exact(version) => Want::Exact(Version(version)),
            pb::pull_request::Want::AtLeast(version) => Want::AtLeast(Version(version)),
        };
        let address =
            Address { job: JobId(pull.job), partition: PartitionId(pull.partition), era: Era(pull.era) };
        Ok(Self { address, want, wait: Duration::from_millis(pull.wait_ms.into()) })
    }
}

impl From<Pull> for pb::PullRequest {
    fn from(pull: Pull) -> Self {
        let want = match pull.want {
            Want::Exact(version) => pb::pull_request::Want::Exact(version.get()),
            Want::AtLeast(version) => pb::pull_request::Want::AtLeast(version.get()),
        };
        Self {
            job: pull.address.job.get(),
            era: pull.address.era.get(),
            partition: pull.address.partition.get(),
            want: Some(want),
            wait_ms: u32::try_from(pull.wait.as_millis()).unwrap_or(u32::MAX),
            attachment: Bytes::new(),
        }
    }
}

impl TryFrom<pb::PushReply> for Pushed {
    type Error = Error;

    fn try_from(reply: pb::PushReply) -> Result<Self> {
        let outcome = match reply.outcome() {
            pb::PushOutcome::Merged => Outcome::Merged,
            pb::PushOutcome::Completed => Outcome::Completed,
            pb::PushOutcome::Duplicate => Outcome::Duplicate,
            pb::PushOutcome::Unspecified => {
                return Err(field("PushReply", "outcome", "merged, completed or duplicate", reply.outcome));
            }
        };
        Ok(Self { outcome, version: Version(reply.version) })
    }
}

impl From<Pushed> for pb::PushReply {
    fn from(pushed: Pushed) -> Self {
        let outcome = match pushed.outcome {
            Outcome::Merged => pb::PushOutcome::Merged,
            Outcome::Completed => pb::PushOutcome::Completed,
            Outcome::Duplicate => pb::PushOutcome::Duplicate,
        };
        Self { outcome: outcome.into(), version: pushed.version.get() }
    }
}

impl pb::JobState {
    /// Its name for people: in logs, events and summaries.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unspecified => "unknown",
            Self::Pending => "pending",
            Self::Indexing => "indexing",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Exporting => "exporting",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Checks an artifact's name, so that it cannot leave its folder.
///
/// # Errors
/// Anything but 1 to 128 bytes without `/`, `\`, NUL, and not `.` or `..`.
pub fn artifact_name(name: &str) -> Result<()> {
    let plain = !name.contains(['/', '\\', '\0']) && name != "." && name != "..";
    if plain && (1..=128).contains(&name.len()) {
        return Ok(());
    }
    Err(field(
        "Artifact",
        "name",
        "a plain file name of 1 to 128 bytes",
        format!("`{}`", name.escape_debug()),
    ))
}

/// How many workers shall take part in a job.
///
/// # Errors
/// 0, or above [`WORKERS_MAX`].
pub fn workers(request: &pb::ScaleRequest) -> Result<u32> {
    let workers = request.workers;
    if (1..=WORKERS_MAX).contains(&workers) {
        return Ok(workers);
    }
    let expected = format!("1 to {WORKERS_MAX}; to train with nobody for a while, pause the job");
    Err(field("ScaleRequest", "workers", &expected, workers))
}

/// Walks a partition's layout beside a stream of its chunks.
#[derive(Debug)]
pub struct ChunkCheck<'a> {
    what: &'static str,
    layout: &'a Layout,
    partition: PartitionId,
    next: usize,
}

impl<'a> ChunkCheck<'a> {
    /// For a stream of all chunks of `partition`; `what` is "push to" or "pull from", for errors.
    pub const fn new(what: &'static str, layout: &'a Layout, partition: PartitionId) -> Self {
        Self { what, layout, partition, next: 0 }
    }

    /// Checks the next chunk of the stream.
    ///
    /// # Errors
    /// Another chunk belongs here, or this one has the wrong size.
    pub fn accept(&mut self, chunk: pb::Chunk) -> Result<Chunk> {
        let chunk = Chunk { id: ChunkId(chunk.id), values: chunk.values };
        self.check(chunk.id, &chunk.values)?;
        Ok(chunk)
    }

    /// The same for a chunk that came without a wire.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn check(&mut self, chunk: ChunkId, values: &[u8]) -> Result<()> {
        let expected = self.layout.members(self.partition).get(self.next).copied();
        if expected != Some(chunk) {
            return Err(self.wrong(expected, chunk.to_string()));
        }
        let expected_bytes = self.layout.chunk_bytes(chunk);
        if values.len() != expected_bytes {
            return Err(Error::ChunkBytes {
                what: self.what,
                partition: self.partition.get(),
                chunk: chunk.get(),
                tensor: self.layout.tensor_of(chunk).name.clone(),
                expected_bytes,
                found_bytes: values.len(),
            });
        }
        self.next += 1;
        Ok(())
    }

    /// Checks that the stream ended where the partition ends.
    ///
    /// # Errors
    /// Chunks are missing.
    pub fn finish(self) -> Result<()> {
        match self.layout.members(self.partition).get(self.next).copied() {
            None => Ok(()),
            missing => Err(self.wrong(missing, "the end".to_owned())),
        }
    }

    fn wrong(&self, expected: Option<ChunkId>, found: String) -> Error {
        let expected = expected.map_or_else(|| "the end".to_owned(), |id| id.to_string());
        Error::WrongChunk { what: self.what, partition: self.partition.get(), expected, found }
    }
}

/// Gathers chunks into messages of up to [`PAYLOAD_BYTES`] (a larger single chunk is a message of its own).
pub fn pack(chunks: impl IntoIterator<Item = Chunk>) -> impl Iterator<Item = pb::Chunks> {
    pack_as(chunks, |chunk| pb::Chunk { id: chunk.id.get(), values: chunk.values, region: None })
}

/// The same with chunks that are sent as `encode` says, which is asked when their message is made.
pub fn pack_as(
    chunks: impl IntoIterator<Item = Chunk>,
    mut encode: impl FnMut(Chunk) -> pb::Chunk,
) -> impl Iterator<Item = pb::Chunks> {
    let mut chunks = chunks.into_iter().peekable();
    std::iter::from_fn(move || {
        let first = chunks.next()?;
        let mut bytes = first.values.len();
        let mut message = vec![first];
        while let Some(next) = chunks.next_if(|next| bytes + next.values.len() <= PAYLOAD_BYTES) {
            bytes += next.values.len();
            message.push(next);
        }
        Some(pb::Chunks { chunks: message.into_iter().map(&mut encode).collect() })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::placement::CHUNK_LEN;

    fn layout() -> Layout {
        let tensors = vec![
            TensorSpec::parameter("weight", [CHUNK_LEN + 10]),
            TensorSpec::parameter("bias", [3]),
            TensorSpec::counter("count", []),
        ];
        Layout::new(tensors, 1).unwrap()
    }

    fn chunks(layout: &Layout) -> Vec<Chunk> {
        let members = layout.members(PartitionId(0)).iter();
        members.map(|&id| Chunk { id, values: Bytes::from(vec![7; layout.chunk_bytes(id)]) }).collect()
    }

    fn walk(layout: &Layout, messages: impl Iterator<Item = pb::Chunks>) -> Result<Vec<Chunk>> {
        let mut check = ChunkCheck::new("push to", layout, PartitionId(0));
        let out = messages
            .flat_map(|message| message.chunks)
            .map(|chunk| check.accept(chunk))
            .collect::<Result<_>>();
        out.and_then(|chunks| check.finish().map(|()| chunks))
    }

    #[test]
    fn packed_chunks_pass_the_check_whole() {
        let layout = layout();
        let messages: Vec<_> = pack(chunks(&layout)).collect();
        assert_eq!(messages.iter().map(|message| message.chunks.len()).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(walk(&layout, messages.into_iter()).unwrap().len(), 4);
    }

    #[test]
    fn missing_foreign_repeated_and_misshapen_chunks_are_refused() {
        let layout = layout();
        let refuse = |edit: &dyn Fn(&mut Vec<Chunk>)| {
            let mut list = chunks(&layout);
            edit(&mut list);
            walk(&layout, pack(list)).unwrap_err().to_string()
        };
        assert!(refuse(&|list| drop(list.pop())).contains("chunk the end where chunk 3"));
        assert!(refuse(&|list| list[1].id = ChunkId(9)).contains("chunk 9 where chunk 1"));
        assert!(refuse(&|list| list.push(list[0].clone())).contains("chunk 0 where chunk the end"));
        let short = refuse(&|list| list[2].values = Bytes::from_static(&[0; 8]));
        assert!(short.contains("`bias` has 8 bytes, the layout says 12"), "{short}");
    }

    #[test]
    fn nodes_that_the_plan_lacks_are_refused() {
        let plan = Plan { records: 10, micro: 3, microbatches_per_step: 2, epochs: 1 };
        let node = |step, begin, end, of| StepNode { step: Step(step), node: Node::new(begin, end), of };
        assert!(check_node(&plan, node(1, 0, 2, 2), 4).is_ok());
        for (node, samples, name) in [
            (node(2, 0, 2, 2), 4, "Node.step"),
            (node(0, 0, 2, 3), 6, "Node.of"),
            (node(0, 1, 3, 2), 6, "Node.range"),
            (node(1, 0, 2, 2), 6, "Node.samples"),
        ] {
            let message = check_node(&plan, node, samples).unwrap_err().to_string();
            assert!(message.contains(name), "{message}");
        }
    }

    #[test]
    fn artifact_names_cannot_leave_their_folder() {
        assert!(artifact_name("model.pt").is_ok());
        for name in ["", ".", "..", "a/b", "..\\x", "/etc/passwd", "a\0b", &"x".repeat(129)] {
            assert!(artifact_name(name).is_err(), "{name}");
        }
    }

    proptest! {
        #[test]
        fn tensors_survive_the_wire(shape in proptest::collection::vec(1usize..50, 0..4), role in 0..3) {
            let role = [Role::Parameter, Role::State, Role::Counter][role as usize];
            let spec = TensorSpec { name: "layer.weight".to_owned(), shape, role };
            prop_assert_eq!(TensorSpec::try_from(pb::TensorSpec::from(&spec)).unwrap(), spec);
        }

        #[test]
        fn push_headers_survive_the_wire(job in any::<u64>(), step in any::<u64>(), begin in 0u32..9, len in 1u32..9) {
            let node = StepNode { step: Step(step), node: Node::new(begin, begin + len), of: begin + len + 1 };
            let address = Address { job: JobId(job), partition: PartitionId(3), era: Era(2) };
            let both = (address, Target::Node { node, samples: 77 });
            prop_assert_eq!(<(Address, Target)>::try_from(pb::PushHeader::from(both)).unwrap(), both);
        }

        #[test]
        fn no_plan_from_the_wire_overflows(records in any::<u64>(), micro in any::<u32>(), m in any::<u32>(), epochs in any::<u64>()) {
            let wire = pb::Plan { records, micro, microbatches_per_step: m, epochs };
            if let Ok(plan) = Plan::try_from(wire) {
                let last = plan.microbatch(crate::ids::MicrobatchId(plan.microbatches() - 1));
                prop_assert_eq!(last.step.produces(), plan.final_version());
            }
        }
    }
}

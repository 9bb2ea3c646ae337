//! Validating decoders: every message from outside is checked here, once, before anything acts on
//! it.
//!
//! Streams are checked too. [`ChunkCheck`] walks a partition's layout beside a stream of chunks. It
//! refuses a push or a pull with a wrong shape, or with a missing or foreign chunk, before the
//! first value of that chunk is used.

mod evaluation;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

pub use self::evaluation::{evaluated, metric_sums};
use crate::column::ColumnSpec;
use crate::error::{Error, Result};
use crate::ids::{ChunkId, Era, JobId, PartitionId, Step, Version};
use crate::parameters::{Address, Outcome, Pull, Pushed, Restore, Target, Want};
use crate::pb;
use crate::placement::Layout;
use crate::plan::Plan;
use crate::spec::{Purpose, WORKERS_MAX};
use crate::tensor::{Chunk, DType, TensorRole, TensorSpec};
use crate::tree::{Node, StepNode};
use crate::wire::WireType;

fn field(message: &'static str, field: &'static str, expected: &str, found: impl fmt::Display) -> Error {
    Error::Field { message, field, expected: expected.to_owned(), found: format!("{found}") }
}

/// Returns the value of a field that must be present.
///
/// # Errors
/// The field is absent.
pub fn required<T>(message: &'static str, name: &'static str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| field(message, name, "a value", "none"))
}

impl TryFrom<pb::TensorSpec> for TensorSpec {
    type Error = Error;

    fn try_from(spec: pb::TensorSpec) -> Result<Self> {
        let role = match spec.role() {
            pb::TensorRole::Parameter => TensorRole::Parameter,
            pb::TensorRole::State => TensorRole::State,
            pb::TensorRole::Counter => TensorRole::Counter,
            pb::TensorRole::Register => TensorRole::Register,
            pb::TensorRole::LossScale => TensorRole::LossScale,
            pb::TensorRole::Unspecified => {
                return Err(field(
                    "TensorSpec",
                    "role",
                    "parameter, state, counter, register or loss scale",
                    spec.role,
                ));
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
            TensorRole::Parameter => pb::TensorRole::Parameter,
            TensorRole::State => pb::TensorRole::State,
            TensorRole::Counter => pb::TensorRole::Counter,
            TensorRole::Register => pb::TensorRole::Register,
            TensorRole::LossScale => pb::TensorRole::LossScale,
        };
        let dtype = match spec.dtype() {
            DType::F32 => pb::DType::F32,
            DType::I64 => pb::DType::I64,
        };
        let shape = spec.shape.iter().map(|&size| size as u64).collect();
        Self { name: spec.name.clone(), shape, dtype: dtype.into(), role: role.into() }
    }
}

/// Decodes a list of tensors.
///
/// # Errors
/// The first malformed tensor.
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
        // No product of the numbering overflows with this limit.
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

/// Checks that the job's plan has the node of a push, with as many samples, or with at most as many
/// in a job that `skips` bad records.
///
/// # Errors
/// A step, M, range or number of samples that contradicts the plan.
pub fn check_node(plan: &Plan, node: StepNode, samples: u64, skips: bool) -> Result<()> {
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
    let planned = plan.samples_below(node.step, node.node);
    if samples == planned || (skips && samples < planned) {
        return Ok(());
    }
    let most = if skips { "at most " } else { "" };
    Err(field("Node", "samples", &format!("{most}{planned} by the job's plan"), samples))
}

/// Decodes a field `wire`: the type in which values of parameters travel.
///
/// # Errors
/// A type that this version does not know.
pub fn wire_type(message: &'static str, value: i32) -> Result<WireType> {
    match pb::WireType::try_from(value) {
        Ok(pb::WireType::F32) => Ok(WireType::F32),
        Ok(pb::WireType::Bf16) => Ok(WireType::Bf16),
        Ok(pb::WireType::F16) => Ok(WireType::F16),
        Err(_) => Err(field(message, "wire", "0 (f32), 1 (bf16) or 2 (f16)", value)),
    }
}

impl From<WireType> for pb::WireType {
    fn from(wire: WireType) -> Self {
        match wire {
            WireType::F32 => Self::F32,
            WireType::Bf16 => Self::Bf16,
            WireType::F16 => Self::F16,
        }
    }
}

/// Checks that values of a job with the wire type `job` may travel as `wire`: in that type, or as
/// f32.
///
/// # Errors
/// `wire` is another 16-bit type.
pub fn check_wire(message: &'static str, wire: WireType, job: WireType) -> Result<()> {
    if !wire.rounds() || wire == job {
        return Ok(());
    }
    let also = if job.rounds() { format!(" or {job}") } else { String::new() };
    Err(field(message, "wire", &format!("f32{also} by the job's exchange.dtype"), wire))
}

/// Checks that a push with this target may travel as `wire` in a job with the wire type `job`.
///
/// # Errors
/// Another 16-bit type than the job's, version 0 in other than f32, or a sum that only the ps may
/// make ([`worker_sums`](WireType::worker_sums)).
pub fn check_push_wire(target: Target, wire: WireType, job: WireType) -> Result<()> {
    check_wire("PushHeader", wire, job)?;
    match target {
        Target::Initial if wire.rounds() => {
            Err(field("PushHeader", "wire", "f32 for version 0, which is kept whole", wire))
        }
        Target::Node { node, .. } if !job.worker_sums(node.node, node.of) => {
            let expected = format!(
                "its two halves: with exchange.dtype = \"{job}\" the ps makes the sum of a whole step"
            );
            Err(field("Node", "range", &expected, node.node))
        }
        _ => Ok(()),
    }
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
            wire: pb::WireType::F32.into(),
            on_device: false,
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
        let wire = wire_type("PullRequest", pull.wire)?;
        Ok(Self { address, want, wait: Duration::from_millis(pull.wait_ms.into()), wire, on_device: false })
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
            wire: pb::WireType::from(pull.wire).into(),
            part: None,
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

impl pb::JobPurpose {
    /// Returns the purpose as users see it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Evaluate => "evaluate",
            Self::Predict => "predict",
        }
    }
}

impl From<Purpose> for pb::JobPurpose {
    fn from(purpose: Purpose) -> Self {
        match purpose {
            Purpose::Train => Self::Train,
            Purpose::Evaluate => Self::Evaluate,
            Purpose::Predict => Self::Predict,
        }
    }
}

impl pb::JobState {
    /// Returns the state's name for people, in logs, events and summaries.
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
            Self::Unreadable => "unreadable",
        }
    }

    /// Whether a job in this state changes no more.
    pub const fn is_end(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }

    /// Whether a job in this state ended well.
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Succeeded)
    }
}

impl pb::Why {
    /// Its name, in `--json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unspecified => "unknown",
            Self::NotAsked => "not_asked",
            Self::Drains => "drains",
            Self::WorksElsewhere => "works_elsewhere",
            Self::StandsBy => "stands_by",
            Self::OtherClass => "other_class",
            Self::NoClass => "no_class",
            Self::Paused => "paused",
            Self::JobWaits => "job_waits",
            Self::Indexing => "indexing",
            Self::Initializing => "initializing",
            Self::Surveying => "surveying",
            Self::Ending => "ending",
            Self::NothingLeft => "nothing_left",
            Self::Closing => "closing",
            Self::HoldsEnough => "holds_enough",
            Self::TooFarAhead => "too_far_ahead",
            Self::TooSlow => "too_slow",
            Self::Hangs => "hangs",
            Self::NotSeen => "not_seen",
            Self::Measuring => "measuring",
            Self::OtherProgram => "other_program",
            Self::OtherDevice => "other_device",
        }
    }
}

impl pb::Phase {
    /// Returns the phase's name in `--json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unspecified => "unknown",
            Self::Queued => "queued",
            Self::Opening => "opening",
            Self::Reading => "reading",
            Self::Compiling => "compiling",
            Self::Pulling => "pulling",
            Self::Computing => "computing",
            Self::Pushing => "pushing",
            Self::Retrying => "retrying",
            Self::WaitingForRoom => "waiting_for_room",
        }
    }

    /// Returns for people what a worker does in this phase. The name of a file or ps, or records,
    /// may follow.
    pub const fn doing(self) -> &'static str {
        match self {
            Self::Unspecified => "silent about its work",
            Self::Queued => "busy with other work",
            Self::Opening => "opening",
            Self::Reading => "reading",
            Self::Compiling => "building the model",
            Self::Pulling => "pulling",
            Self::Computing => "computing",
            Self::Pushing => "pushing",
            Self::Retrying => "trying again to",
            Self::WaitingForRoom => "waiting for room, to",
        }
    }
}

/// Checks an artifact's name, so that it cannot leave its folder.
///
/// # Errors
/// Anything but 1 to 128 bytes without `/`, `\`, NUL; also `.` and `..`.
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

/// Returns how many workers shall take part in a job.
///
/// # Errors
/// 0, or more than [`WORKERS_MAX`].
pub fn workers(request: &pb::ScaleRequest) -> Result<u32> {
    let workers = request.workers;
    if (1..=WORKERS_MAX).contains(&workers) {
        return Ok(workers);
    }
    let expected = format!("1 to {WORKERS_MAX}; to train with nobody for a while, pause the job");
    Err(field("ScaleRequest", "workers", &expected, workers))
}

/// Checks a stream of chunks against a partition's layout. They may come in any order, each once.
#[derive(Debug)]
pub struct ChunkCheck<'a> {
    what: &'static str,
    layout: &'a Layout,
    partition: PartitionId,
    /// Whether each chunk of the partition has come.
    came: Vec<bool>,
    /// Place of the first chunk that has not come.
    next: usize,
    /// Number of chunks that have not come.
    left: usize,
}

impl<'a> ChunkCheck<'a> {
    /// Starts the check of a stream with all chunks of `partition`. Errors begin with `what`: "push
    /// to" or "pull from".
    pub fn new(what: &'static str, layout: &'a Layout, partition: PartitionId) -> Self {
        let left = layout.members(partition).len();
        Self { what, layout, partition, came: vec![false; left], next: 0, left }
    }

    /// Checks the next chunk of the stream and returns it. Values of parameters have the type
    /// `wire`, before and after.
    ///
    /// # Errors
    /// The chunk is of another partition, came before, or has the wrong size.
    pub fn accept(&mut self, chunk: pb::Chunk, wire: WireType) -> Result<Chunk> {
        let (id, values) = (ChunkId(chunk.id), chunk.values);
        self.check(id, wire, values.len())?;
        Ok(Chunk { id, role: self.layout.tensor_of(id).role, values: values.into() })
    }

    /// Checks the id of the next chunk, and the number of bytes of its values. Returns its place
    /// among the chunks of the partition.
    ///
    /// # Errors
    /// The chunk is of another partition, came before, or has the wrong size.
    pub fn check(&mut self, chunk: ChunkId, wire: WireType, bytes: usize) -> Result<usize> {
        let members = self.layout.members(self.partition);
        let place = match members.get(self.next) {
            Some(&next) if next == chunk => Some(self.next),
            _ => members.binary_search(&chunk).ok().filter(|&place| !self.came[place]),
        };
        let Some(place) = place else {
            return Err(self.wrong(members.get(self.next).copied(), chunk.to_string()));
        };
        let expected_bytes = self.layout.chunk_bytes_in(chunk, wire);
        if bytes != expected_bytes {
            let len = self.layout.chunk(chunk).len;
            return Err(Error::ChunkBytes {
                what: self.what,
                partition: self.partition.get(),
                chunk: chunk.get(),
                tensor: self.layout.tensor_of(chunk).name.clone(),
                expected_bytes,
                len,
                bytes_each: expected_bytes.checked_div(len).unwrap_or(0),
                found_bytes: bytes,
            });
        }
        self.came[place] = true;
        self.left -= 1;
        while self.came.get(self.next) == Some(&true) {
            self.next += 1;
        }
        Ok(place)
    }

    /// Returns whether all chunks of the partition have come.
    pub const fn is_whole(&self) -> bool {
        self.left == 0
    }

    /// Checks that all chunks of the partition have come when the stream ends.
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

/// Most payload bytes of one streamed message. Smaller messages waste headers and wake-ups, larger
/// ones defeat streaming.
pub const PAYLOAD_BYTES: usize = 1 << 20;

/// Gathers chunks into messages of up to [`PAYLOAD_BYTES`]. A larger chunk is a message of its own.
pub fn pack(chunks: impl IntoIterator<Item = Chunk>) -> impl Iterator<Item = pb::Chunks> {
    pack_as(chunks, encode)
}

/// A chunk that is sent itself. Its values are encoded already if they travel as a 16-bit type.
pub fn encode(chunk: Chunk) -> pb::Chunk {
    pb::Chunk { id: chunk.id.get(), values: chunk.values.into_host(), region: None }
}

/// Gathers chunks into messages as [`pack`] does. `encode` makes the message of a chunk, when that
/// is due.
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

impl From<&ColumnSpec> for pb::Column {
    fn from(spec: &ColumnSpec) -> Self {
        let ColumnSpec { name, dtype, shape, ragged } = spec;
        let shape = shape.iter().map(|&size| size as u64).collect();
        Self { name: name.clone(), dtype: dtype.name().to_owned(), shape, ragged: *ragged }
    }
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
        let chunk = |&id| Chunk {
            id,
            role: layout.tensor_of(id).role,
            values: vec![7; layout.chunk_bytes(id)].into(),
        };
        members.map(chunk).collect()
    }

    fn walk(layout: &Layout, messages: impl Iterator<Item = pb::Chunks>) -> Result<Vec<Chunk>> {
        let mut check = ChunkCheck::new("push to", layout, PartitionId(0));
        let out = messages
            .flat_map(|message| message.chunks)
            .map(|chunk| check.accept(chunk, WireType::F32))
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
    fn chunks_come_in_any_order_each_once() {
        let layout = layout();
        let mut list = chunks(&layout);
        list.reverse();
        assert_eq!(walk(&layout, pack(list.clone())).unwrap().len(), 4);
        let mut check = ChunkCheck::new("push to", &layout, PartitionId(0));
        for (chunk, place) in [(2, 2), (0, 0), (3, 3)] {
            let bytes = layout.chunk_bytes(ChunkId(chunk));
            assert_eq!(check.check(ChunkId(chunk), WireType::F32, bytes).unwrap(), place);
        }
        assert!(!check.is_whole());
        let bytes = layout.chunk_bytes(ChunkId(2));
        let repeated = check.check(ChunkId(2), WireType::F32, bytes).unwrap_err().to_string();
        assert!(repeated.contains("chunk 2 where chunk 1"), "{repeated}");
        check.check(ChunkId(1), WireType::F32, layout.chunk_bytes(ChunkId(1))).unwrap();
        assert!(check.is_whole());
        list.pop();
        let missing = walk(&layout, pack(list)).unwrap_err().to_string();
        assert!(missing.contains("chunk the end where chunk 0"), "{missing}");
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
        let short = refuse(&|list| list[2].values = vec![0; 8].into());
        assert!(short.contains("`bias` has 8 bytes, the layout says 12 (3 values of 4 bytes)"), "{short}");
    }

    #[test]
    fn narrow_parameters_have_two_bytes_a_value_and_all_others_are_whole() {
        let tensors = vec![
            TensorSpec::parameter("w", [3]),
            TensorSpec::state("mean", [3]),
            TensorSpec::counter("n", []),
        ];
        let layout = Layout::new(tensors, 1).unwrap();
        let refuse = |wire, sizes: [usize; 3]| {
            let mut check = ChunkCheck::new("push to", &layout, PartitionId(0));
            let mut sizes = (0..).map(ChunkId).zip(sizes);
            sizes.find_map(|(id, bytes)| check.check(id, wire, bytes).err()).map(|error| error.to_string())
        };
        assert_eq!(refuse(WireType::Bf16, [6, 12, 8]), None);
        assert_eq!(refuse(WireType::F32, [12, 12, 8]), None);
        for (wire, sizes, part) in [
            (WireType::Bf16, [12, 12, 8], "`w` has 12 bytes, the layout says 6 (3 values of 2 bytes)"),
            (WireType::F16, [5, 12, 8], "`w` has 5 bytes, the layout says 6"),
            (WireType::F16, [6, 6, 8], "`mean` has 6 bytes, the layout says 12"),
            (WireType::F32, [6, 12, 8], "`w` has 6 bytes, the layout says 12 (3 values of 4 bytes)"),
        ] {
            let message = refuse(wire, sizes).expect("it does not fit");
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn types_that_the_job_does_not_exchange_are_refused() {
        let node = |begin, end, of| Target::Node {
            node: StepNode { step: Step(0), node: Node::new(begin, end), of },
            samples: 1,
        };
        let (leaf, root) = (node(0, 1, 2), node(0, 2, 2));
        let check = |target, wire, job| check_push_wire(target, wire, job).map_err(|error| error.to_string());
        for job in [WireType::F32, WireType::Bf16] {
            assert_eq!(check(Target::Initial, WireType::F32, job), Ok(()));
            assert_eq!(check(leaf, job, job), Ok(()));
            assert_eq!(check(leaf, WireType::F32, job), Ok(()), "through shared memory");
            assert_eq!(check(node(0, 1, 1), job, job), Ok(()), "a step of one microbatch");
        }
        assert_eq!(check(root, WireType::F32, WireType::F32), Ok(()));
        for (target, wire, job, part) in [
            (
                leaf,
                WireType::Bf16,
                WireType::F32,
                "PushHeader.wire: expected f32 by the job's exchange.dtype, found bf16",
            ),
            (
                leaf,
                WireType::F16,
                WireType::Bf16,
                "PushHeader.wire: expected f32 or bf16 by the job's exchange.dtype, found f16",
            ),
            (Target::Initial, WireType::Bf16, WireType::Bf16, "PushHeader.wire: expected f32 for version 0"),
            (root, WireType::F32, WireType::Bf16, "Node.range: expected its two halves"),
        ] {
            let message = check(target, wire, job).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
        let message = wire_type("PullRequest", 7).unwrap_err().to_string();
        assert_eq!(message, "PullRequest.wire: expected 0 (f32), 1 (bf16) or 2 (f16), found 7");
    }

    #[test]
    fn nodes_that_the_plan_lacks_are_refused() {
        let plan = Plan { records: 10, micro: 3, microbatches_per_step: 2, epochs: 1 };
        let node = |step, begin, end, of| StepNode { step: Step(step), node: Node::new(begin, end), of };
        let check_node = |plan, node, samples| check_node(plan, node, samples, false);
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
    fn a_node_of_a_job_that_skips_records_may_have_fewer() {
        let plan = Plan { records: 10, micro: 3, microbatches_per_step: 2, epochs: 1 };
        let root = StepNode { step: Step(1), node: Node::new(0, 2), of: 2 };
        for (samples, skips, expected) in [
            (4, false, None),
            (3, false, Some("Node.samples: expected 4 by the job's plan, found 3")),
            (3, true, None),
            (0, true, None),
            (5, true, Some("Node.samples: expected at most 4 by the job's plan, found 5")),
        ] {
            let found = check_node(&plan, root, samples, skips).err().map(|error| error.to_string());
            assert_eq!(found.as_deref(), expected);
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
        fn tensors_survive_the_wire(shape in proptest::collection::vec(1usize..50, 0..4), role in 0..5) {
            let roles = [
                TensorRole::Parameter, TensorRole::State, TensorRole::Counter, TensorRole::Register, TensorRole::LossScale,
            ];
            let role = roles[role as usize];
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

//! A pull whose answer lies in memory of the device (ADR 58): it offers a part of what this worker
//! has exported, the ps copies the version there, and the worker copies it to the host.
//!
//! Always true here: the ps writes to a part only until its answer begins. What it has written is
//! read afterwards, and the part goes back when all of it is on the host.

use std::ops::Range;

use net::bulk::{self, PULL, Replies, Until};
use net::memory::attach::Attachment;
use net::ps_client::PsClient;
use proto::convert::required;
use proto::ids::{ChunkId, Version};
use proto::parameters::{GivenValues, Pull, Take};
use proto::pb;
use proto::pb::pull_reply::Part as Reply;
use proto::status::{Failure, Kind};
use proto::wire::WireType;
use tokio::sync::oneshot;

use super::attached::Placed;
use super::exported::PIECE_BYTES;

/// How a ps answers a pull that offers a part.
pub(super) enum Answer {
    /// The chunks lie in the part.
    Placed { version: Version, chunks: Vec<Lies>, placed: Placed },
    /// The chunks come as without a part, which was not used.
    Elsewhere { header: pb::PullHeader, replies: Replies, until: oneshot::Sender<()> },
}

/// Where a chunk lies in the exported memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lies {
    id: ChunkId,
    bytes: Range<usize>,
}

/// Calls a ps of this host for a pull, in f32. The request ends when the sender is dropped.
pub(super) async fn call_pull(
    ps: &PsClient,
    attachment: &Attachment,
    pull: Pull,
    part: Option<pb::Region>,
) -> Result<(Replies, oneshot::Sender<()>), Failure> {
    let mut request = pb::PullRequest::from(Pull { wire: WireType::F32, ..pull });
    (request.attachment, request.part) = (attachment.name().clone(), part);
    let (until, ended) = oneshot::channel::<()>();
    let ended = Box::pin(async move {
        let _ = ended.await;
        None
    }) as Until;
    let replies = bulk::call_until(ps.channel(), PULL, std::iter::once(request), Some(ended)).await?;
    Ok((replies, until))
}

/// Offers a part for the answer to a pull. When the call breaks, the part is lost.
pub(super) async fn ask(ps: PsClient, mut placed: Placed, pull: Pull) -> Result<Answer, Failure> {
    let part = placed.offer();
    let (mut replies, until) = call_pull(&ps, placed.attachment(), pull, Some(part)).await?;
    let first = replies.message::<pb::PullReply>().await;
    if replies.is_answered() || matches!(first, Ok(Some(_))) {
        placed.answered();
    }
    let Reply::Header(header) = part_of(first?)? else {
        return Err(Failure::new(Kind::Malformed, "the answer to a pull does not begin with a header"));
    };
    if !header.on_device {
        return Ok(Answer::Elsewhere { header, replies, until });
    }
    // The ps keeps nothing for this call.
    drop(until);
    let mut chunks = Vec::new();
    while let Some(reply) = replies.message::<pb::PullReply>().await? {
        let Reply::Chunks(message) = part_of(Some(reply))? else {
            return Err(Failure::new(Kind::Malformed, "the answer to a pull has two headers"));
        };
        for chunk in message.chunks {
            chunks.push(lies(&chunk, part).ok_or_else(|| {
                let message = format!("chunk {} lies at {:?}, outside of {part:?}", chunk.id, chunk.region);
                Failure::new(Kind::Malformed, message)
            })?);
        }
    }
    Ok(Answer::Placed { version: Version(header.version), chunks, placed })
}

/// Hands the chunks to `take`. What crosses to the host at once is at most [`PIECE_BYTES`].
pub(super) async fn read(mut placed: Placed, chunks: &[Lies], take: &mut Take<'_>) -> Result<(), Failure> {
    let mut rest = chunks;
    while let Some((bytes, count)) = next_piece(rest) {
        let (now, later) = rest.split_at(count);
        let (begin, length) = (bytes.start, bytes.len());
        let fetch = move || placed.part().fetch(begin, length).map(|()| placed);
        let fetched = tokio::task::spawn_blocking(fetch).await;
        let fetched = fetched.map_err(|error| Failure::new(Kind::Internal, error))?;
        placed = fetched.map_err(|error| Failure::new(Kind::Unavailable, error))?;
        let values = placed.part().fetched();
        for Lies { id, bytes } in now {
            take(*id, WireType::F32, GivenValues::Host(&values[bytes.start - begin..bytes.end - begin]))?;
        }
        drop(values);
        placed.count(now.iter().map(|chunk| chunk.bytes.len()).sum());
        rest = later;
    }
    Ok(())
}

/// Hands the chunks to `take` where they lie in the part. They are read when this returns.
pub(super) async fn read_there(
    mut placed: Placed,
    chunks: &[Lies],
    take: &mut Take<'_>,
) -> Result<(), Failure> {
    placed.part().with_memory(|memory| {
        let mut each = chunks.iter();
        each.try_for_each(|Lies { id, bytes }| {
            take(*id, WireType::F32, GivenValues::Device(memory, bytes.clone()))
        })
    })?;
    // The part is used again, by a ps whose stream does not wait for the one of this process.
    let settle = move || placed.part().settle().map(|()| placed);
    let settled = tokio::task::spawn_blocking(settle).await;
    let settled = settled.map_err(|error| Failure::new(Kind::Internal, error))?;
    let placed = settled.map_err(|error| Failure::new(Kind::Unavailable, error))?;
    placed.count(chunks.iter().map(|chunk| chunk.bytes.len()).sum());
    Ok(())
}

/// Returns the bytes that cross to the host next, and the number of chunks in them. `None`: there
/// are no more.
fn next_piece(chunks: &[Lies]) -> Option<(Range<usize>, usize)> {
    let begin = chunks.first()?.bytes.start;
    let fits = |chunk: &&Lies| chunk.bytes.start >= begin && chunk.bytes.end - begin <= PIECE_BYTES;
    let fitting = chunks.iter().take_while(fits);
    let (end, count) = fitting.fold((begin, 0), |(end, count), chunk| (end.max(chunk.bytes.end), count + 1));
    Some((begin..end, count))
}

/// Returns where a chunk lies. `None`: nowhere in the part, or it is too long.
fn lies(chunk: &pb::Chunk, part: pb::Region) -> Option<Lies> {
    let region = chunk.region?;
    let begin = region.offset.checked_sub(part.offset)?;
    let is_inside = begin.checked_add(region.bytes).is_some_and(|end| end <= part.bytes);
    let begin = usize::try_from(region.offset).ok()?;
    let length = usize::try_from(region.bytes).ok().filter(|length| is_inside && *length <= PIECE_BYTES)?;
    Some(Lies { id: ChunkId(chunk.id), bytes: begin..begin + length })
}

fn part_of(reply: Option<pb::PullReply>) -> Result<Reply, Failure> {
    let reply = required("Parameters.Pull", "reply", reply)?;
    Ok(required("PullReply", "part", reply.part)?)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn at(id: u32, bytes: Range<usize>) -> Lies {
        Lies { id: ChunkId(id), bytes }
    }

    #[test]
    fn chunks_are_taken_inside_the_part_alone() {
        let part = pb::Region { offset: 1024, bytes: 512 };
        let found = |offset, bytes| {
            let region = Some(pb::Region { offset, bytes });
            lies(&pb::Chunk { id: 7, values: Bytes::new(), region }, part)
        };
        assert_eq!(found(1024, 512), Some(at(7, 1024..1536)));
        assert_eq!(found(1280, 8), Some(at(7, 1280..1288)));
        for (offset, bytes) in [(1023, 1), (1280, 257), (1536, 1), (u64::MAX, 2), (1024, u64::MAX)] {
            assert_eq!(found(offset, bytes), None, "{bytes} bytes from {offset} on");
        }
        assert_eq!(lies(&pb::Chunk { id: 7, values: Bytes::new(), region: None }, part), None);
        let large = pb::Region { offset: 0, bytes: PIECE_BYTES as u64 + 1 };
        let chunk = pb::Chunk { id: 7, values: Bytes::new(), region: Some(large) };
        assert_eq!(lies(&chunk, large), None, "more than crosses at once");
    }

    #[test]
    fn neighbours_cross_to_the_host_together() {
        let half = PIECE_BYTES / 2;
        let chunks = [at(0, 512..520), at(1, 768..512 + half), at(2, 512 + half..512 + PIECE_BYTES)];
        assert_eq!(next_piece(&chunks), Some((512..512 + PIECE_BYTES, 3)), "they fill the piece");
        let chunks = [at(0, 512..520), at(1, 768..769 + PIECE_BYTES - 256)];
        assert_eq!(next_piece(&chunks), Some((512..520, 1)), "one byte too many");
        assert_eq!(next_piece(&[at(0, 512..520), at(1, 0..8)]), Some((512..520, 1)), "out of order");
        assert_eq!(next_piece(&[]), None);
    }
}

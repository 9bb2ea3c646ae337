//! Streams of messages with large payloads, sent and received without copying the payloads.
//!
//! The wire is plain gRPC and protobuf, as generated clients and servers speak it; only the
//! handling in memory differs. tonic's own codec copies every payload twice: into the buffer of an
//! encoded message when sending, and out of the frames when receiving.
//!
//! Here a message is encoded into *pieces*. A piece with a large payload is the very [`Bytes`] of
//! the message, so it is the ps's versioned buffer or the worker's tensor. Messages are decoded
//! from the received frames in place, so that a payload is a slice of the memory into which the
//! socket was read. Only a payload that arrives in several frames is gathered by a copy.
#![expect(unsafe_code, reason = "a buffer that prost can write to needs an unsafe trait")]

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::{FutureExt as _, Stream, StreamExt as _, stream};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body, Frame};
use prost::Message;
use tonic::Status;
use tower::{Service as _, ServiceExt as _};

use crate::channel::{Channel, MESSAGE_BYTES_MAX};
use crate::timeline;

/// Path of a push.
pub const PUSH: &str = "/ebbflow.v1.Parameters/Push";

/// Path of a pull.
pub const PULL: &str = "/ebbflow.v1.Parameters/Pull";

/// Smallest payload in bytes that is sent without a copy. A frame costs about as much as copying
/// this many bytes.
const SHARED_BYTES_MIN: usize = 32 << 10;

/// Most bytes of a piece with small payloads and the fields between payloads. A larger piece would
/// have left the caches before it is sent, and smaller ones cost more frames.
const PIECE_BYTES: usize = 256 << 10;

/// Bytes before each message: a flag (compressed or not) and the length.
const PREFIX_BYTES: usize = 5;

/// Encoded messages: large payloads without a copy, everything between them in memory of its own.
#[derive(Debug, Default)]
struct Pieces {
    done: VecDeque<Bytes>,
    done_bytes: usize,
    tail: BytesMut,
    /// Length of the message that is being encoded.
    message_bytes: usize,
}

impl Pieces {
    fn add(&mut self, message: &impl Message) {
        let bytes = message.encoded_len();
        self.message_bytes = bytes;
        self.tail.put_u8(0);
        self.tail.put_u32(u32::try_from(bytes).expect("messages are small"));
        message.encode(self).expect("it grows as needed");
    }

    fn cut(&mut self) {
        if !self.tail.is_empty() {
            let piece = self.tail.split().freeze();
            self.push(piece);
        }
    }

    fn push(&mut self, piece: Bytes) {
        self.done_bytes += piece.len();
        self.done.push_back(piece);
    }
}

// SAFETY: `chunk_mut` and `advance_mut` forward to `tail`, which keeps the promises of the trait.
unsafe impl BufMut for Pieces {
    fn remaining_mut(&self) -> usize {
        self.tail.remaining_mut()
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.tail.advance_mut(count) }
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        self.tail.chunk_mut()
    }

    fn put<T: Buf>(&mut self, mut source: T) {
        let bytes = source.remaining();
        if bytes < SHARED_BYTES_MIN {
            if self.tail.len() + bytes > PIECE_BYTES {
                self.cut();
            }
            if self.tail.capacity() - self.tail.len() < bytes {
                // Reserves the memory at once, because growth would copy it.
                self.tail.reserve(self.message_bytes.min(PIECE_BYTES));
            }
            self.tail.put(source);
        } else {
            self.cut();
            // For `Bytes`, the type of payloads, this only adds a reference.
            self.push(source.copy_to_bytes(bytes));
        }
    }
}

/// Future that a body awaits after its last message, with the trailers that end the body. Without
/// trailers a response ends without a result of the call.
pub type Until = Pin<Box<dyn Future<Output = Option<HeaderMap>> + Send>>;

/// Returns the trailers of a call with this result.
pub fn trailers(result: Result<(), &Status>) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    match result {
        Ok(()) => drop(trailers.insert("grpc-status", HeaderValue::from_static("0"))),
        Err(status) => drop(status.add_header(&mut trailers)),
    }
    trailers
}

/// Messages that are there as soon as they are asked for.
type Ready<I> = stream::Iter<Succeeding<I>>;

/// The messages of an iterator, none of which fails.
struct Succeeding<I>(I);

impl<I: Iterator> Iterator for Succeeding<I> {
    type Item = Result<I::Item, Status>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(Ok)
    }
}

/// The body of a request or a response: messages that are encoded as they are sent. An error among
/// them resets the call.
struct Outgoing<S> {
    messages: S,
    pieces: Pieces,
    /// Whether the stream of messages has ended.
    ended: bool,
    /// Whether each message is sent before the next one is made.
    prompt: bool,
    /// Whether a piece was returned since other tasks had their turn.
    busy: bool,
    until: Option<Until>,
}

impl<I: Iterator> Outgoing<Ready<I>> {
    fn new(messages: I, prompt: bool, until: Option<Until>) -> Self {
        Self { prompt, until, ..Outgoing::coming(stream::iter(Succeeding(messages))) }
    }
}

impl<S> Outgoing<S> {
    fn coming(messages: S) -> Self {
        Self { messages, pieces: Pieces::default(), ended: false, prompt: false, busy: false, until: None }
    }
}

impl<M: Message, S: Stream<Item = Result<M, Status>> + Unpin> Body for Outgoing<S> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.prompt && std::mem::take(&mut this.busy) {
            // The task that writes to the socket may run in this thread.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        while this.pieces.done.is_empty() && !this.ended {
            let is_behind = match this.messages.poll_next_unpin(cx) {
                Poll::Ready(Some(message)) => {
                    this.pieces.add(&message?);
                    false
                }
                Poll::Ready(None) => {
                    this.ended = true;
                    false
                }
                Poll::Pending => true,
            };
            // A message without a large payload waits for the next one if that is there, so that
            // they travel together.
            if is_behind || this.ended || this.prompt || this.pieces.tail.len() >= SHARED_BYTES_MIN {
                this.pieces.cut();
            }
            if is_behind && this.pieces.done.is_empty() {
                return Poll::Pending;
            }
        }
        if let Some(piece) = this.pieces.done.pop_front() {
            this.busy = true;
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        let Some(until) = &mut this.until else { return Poll::Ready(None) };
        let trailers = std::task::ready!(until.as_mut().poll(cx));
        this.until = None;
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.pieces.done.is_empty() && self.until.is_none()
    }
}

/// The body of a response whose messages are made after it has begun.
enum Later<I> {
    Waiting(Pin<Box<dyn Future<Output = (I, Until)> + Send>>),
    Sending(Outgoing<Ready<I>>),
}

impl<I: Iterator<Item: Message> + Unpin> Body for Later<I> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Self::Waiting(later) = &mut *self {
            let (messages, until) = std::task::ready!(later.as_mut().poll(cx));
            *self = Self::Sending(Outgoing::new(messages, false, Some(until)));
        }
        match &mut *self {
            Self::Waiting(_) => Poll::Pending,
            Self::Sending(outgoing) => Pin::new(outgoing).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Sending(outgoing) if outgoing.is_end_stream())
    }
}

/// Received frames as one buffer.
#[derive(Debug, Default)]
struct Rope {
    frames: VecDeque<Bytes>,
    bytes: usize,
}

impl Rope {
    fn push(&mut self, frame: Bytes) {
        if !frame.is_empty() {
            self.bytes += frame.len();
            self.frames.push_back(frame);
        }
    }
}

impl Buf for Rope {
    fn remaining(&self) -> usize {
        self.bytes
    }

    fn chunk(&self) -> &[u8] {
        self.frames.front().map_or(&[][..], |frame| &frame[..])
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.bytes, "{count} bytes of {} are skipped", self.bytes);
        self.bytes -= count;
        while let Some(first) = self.frames.front_mut().filter(|_| count > 0) {
            if count < first.len() {
                return first.advance(count);
            }
            count -= first.len();
            self.frames.pop_front();
        }
    }

    fn copy_to_bytes(&mut self, count: usize) -> Bytes {
        match self.frames.front_mut() {
            Some(first) if count < first.len() => {
                self.bytes -= count;
                first.split_to(count)
            }
            Some(first) if count == first.len() => {
                self.bytes -= count;
                self.frames.pop_front().expect("looked at just now")
            }
            _ => {
                let mut gathered = BytesMut::with_capacity(count);
                gathered.put(self.take(count));
                gathered.freeze()
            }
        }
    }
}

/// The messages of a request or a response.
#[derive(Debug)]
pub struct Incoming<B> {
    body: B,
    rope: Rope,
    ended: bool,
    /// Whether the body must end with trailers, which have the result of the call.
    response: bool,
    /// Error that the server returned in place of messages.
    refused: Option<Status>,
    answered: bool,
}

/// The replies of a server to a call.
pub type Replies = Incoming<tonic::body::Body>;

impl<B> Incoming<B>
where
    B: Body<Data = Bytes, Error = Status> + Unpin,
{
    /// Reads the messages of a request.
    pub fn request(body: B) -> Self {
        Self { body, rope: Rope::default(), ended: false, response: false, refused: None, answered: false }
    }

    /// Returns whether the server has sent the result of the call, an error included. Without a
    /// result the response has not ended, or the connection broke.
    pub const fn is_answered(&self) -> bool {
        self.answered
    }

    /// Receives the next message; `None` after the last.
    ///
    /// # Errors
    /// The connection broke, the messages are malformed, or the response has an error of the call.
    pub async fn message<M: Message + Default>(&mut self) -> Result<Option<M>, Status> {
        if let Some(status) = self.refused.take() {
            return Err(status);
        }
        let Some(bytes) = self.prefix().await? else { return Ok(None) };
        if !self.fill(bytes).await? {
            return Err(Status::internal(format!(
                "a message of {bytes} bytes ends after {}",
                self.rope.bytes
            )));
        }
        let mut message = Buf::take(&mut self.rope, bytes);
        let decoded = M::decode(&mut message);
        decoded.map(Some).map_err(|error| Status::internal(format!("a message cannot be decoded: {error}")))
    }

    /// Receives the length of the next message.
    async fn prefix(&mut self) -> Result<Option<usize>, Status> {
        if !self.fill(PREFIX_BYTES).await? {
            let rest = self.rope.bytes;
            let ended =
                || Status::internal(format!("a stream of messages ends with {rest} bytes of the next"));
            return if rest == 0 { Ok(None) } else { Err(ended()) };
        }
        let compressed = self.rope.get_u8();
        let bytes = self.rope.get_u32() as usize;
        if compressed != 0 {
            return Err(Status::unimplemented("weights and gradients do not travel compressed"));
        }
        if bytes > MESSAGE_BYTES_MAX {
            let limit = MESSAGE_BYTES_MAX;
            return Err(Status::out_of_range(format!(
                "a message of {bytes} bytes is too large; expected at most {limit}"
            )));
        }
        Ok(Some(bytes))
    }

    /// Receives until the buffer has `bytes`. Returns whether it has.
    async fn fill(&mut self, bytes: usize) -> Result<bool, Status> {
        while self.rope.bytes < bytes && !self.ended {
            match std::future::poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rope.push(data),
                    Err(frame) => {
                        self.ended = true;
                        if let Ok(trailers) = frame.into_trailers() {
                            self.response = false;
                            self.answered = true;
                            succeeded(&trailers)?;
                        }
                    }
                },
                Some(Err(status)) => return Err(status),
                None => {
                    self.ended = true;
                    if std::mem::take(&mut self.response) {
                        return Err(Status::unavailable(
                            "the response ended without saying how the call went",
                        ));
                    }
                }
            }
        }
        Ok(self.rope.bytes >= bytes)
    }
}

fn succeeded(headers: &HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != tonic::Code::Ok => Err(status),
        _ => Ok(()),
    }
}

/// Calls `path` of the server behind `channel` with a stream of messages.
///
/// # Errors
/// There is no connection.
pub async fn call<I>(channel: &Channel, path: &'static str, messages: I) -> Result<Replies, Status>
where
    I: Iterator<Item: Message> + Send + Unpin + 'static,
{
    call_with(channel, path, Outgoing::new(messages, false, None)).await
}

/// Calls `path` with messages that name regions. Each message is sent as soon as it is made. The
/// request ends after `until`, if there is one.
///
/// # Errors
/// There is no connection.
pub async fn call_until<I>(
    channel: &Channel,
    path: &'static str,
    messages: I,
    until: Option<Until>,
) -> Result<Replies, Status>
where
    I: Iterator<Item: Message> + Send + Unpin + 'static,
{
    call_with(channel, path, Outgoing::new(messages, true, until)).await
}

/// Calls `path` with messages that are still being made. Each is sent once it is there. An error
/// among them resets the request. tonic's codec takes some resets for the end of a request, so the
/// messages themselves must say whether they are all.
///
/// # Errors
/// There is no connection.
pub async fn call_coming<M, S>(channel: &Channel, path: &'static str, messages: S) -> Result<Replies, Status>
where
    M: Message,
    S: Stream<Item = Result<M, Status>> + Send + Unpin + 'static,
{
    call_with(channel, path, Outgoing::coming(messages)).await
}

async fn call_with<M, S>(channel: &Channel, path: &'static str, body: Outgoing<S>) -> Result<Replies, Status>
where
    M: Message,
    S: Stream<Item = Result<M, Status>> + Send + Unpin + 'static,
{
    let mut request = Request::post(path)
        .version(http::Version::HTTP_2)
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(tonic::body::Body::new(body))
        .map_err(|error| Status::internal(format!("{path} is no path: {error}")))?;
    timeline::inject(request.headers_mut());
    let mut channel = channel.clone();
    let ready = channel.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let response = ready.call(request).await.map_err(|error| Status::from_error(error.into()))?;
    if response.status() != http::StatusCode::OK {
        return Err(Status::unavailable(format!("the server answers HTTP status {}", response.status())));
    }
    let refused = succeeded(response.headers()).err();
    let answered = response.headers().contains_key("grpc-status");
    let body = response.into_body();
    Ok(Incoming { body, rope: Rope::default(), ended: answered, response: !answered, refused, answered })
}

/// Returns a response: a stream of messages, or an error.
pub fn respond<I>(messages: Result<I, Status>) -> Response<tonic::body::Body>
where
    I: Iterator<Item: Message> + Send + Unpin + 'static,
{
    match messages {
        Ok(messages) => respond_until(messages, Box::pin(std::future::ready(Some(trailers(Ok(())))))),
        Err(status) => status.into_http(),
    }
}

/// Returns a response that ends after `until`, which gives the result of the call.
pub fn respond_until<I>(messages: I, until: Until) -> Response<tonic::body::Body>
where
    I: Iterator<Item: Message> + Send + Unpin + 'static,
{
    respond_with(Outgoing::new(messages, false, Some(until)))
}

/// Returns a response that begins at once, which the caller sees, and whose messages and end are
/// made by `later`.
pub fn respond_later<I>(
    later: impl Future<Output = (I, Until)> + Send + 'static,
) -> Response<tonic::body::Body>
where
    I: Iterator<Item: Message> + Send + Unpin + 'static,
{
    respond_with(Later::Waiting(Box::pin(later)))
}

fn respond_with<B>(body: B) -> Response<tonic::body::Body>
where
    B: Body<Data = Bytes, Error = Status> + Send + 'static,
{
    let mut response = Response::new(tonic::body::Body::new(body));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// A body that is one frame.
struct One(Option<Bytes>);

impl Body for One {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// Decodes the messages of a request that has arrived as a whole. For tests with damaged bytes.
///
/// # Errors
/// The bytes are no messages.
#[doc(hidden)]
pub fn messages<M: Message + Default>(request: Bytes) -> Result<Vec<M>, Status> {
    let mut incoming = Incoming::request(One(Some(request)));
    let mut messages = Vec::new();
    while let Some(message) = incoming.message().now_or_never().expect("all frames are there")? {
        messages.push(message);
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::pb;

    use super::*;

    /// A body of these frames.
    struct Frames(VecDeque<Frame<Bytes>>);

    impl Frames {
        fn of(pieces: impl IntoIterator<Item = Bytes>) -> Self {
            Self(pieces.into_iter().map(Frame::data).collect())
        }
    }

    impl Body for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop_front().map(Ok))
        }
    }

    fn message(payloads: &[usize]) -> pb::Chunks {
        let chunk = |(id, &bytes): (usize, &usize)| pb::Chunk {
            id: id as u32,
            values: Bytes::from_iter((0..bytes).map(|at| (at * 31 + id) as u8)),
            region: None,
        };
        pb::Chunks { chunks: payloads.iter().enumerate().map(chunk).collect() }
    }

    fn sent(messages: Vec<pb::Chunks>) -> Vec<Bytes> {
        let mut body = Outgoing::new(messages.into_iter(), false, None);
        let frame = || std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).now_or_never().flatten();
        std::iter::from_fn(frame).map(|frame| frame.unwrap().into_data().unwrap()).collect()
    }

    fn received(body: Frames) -> Result<Vec<pb::Chunks>, Status> {
        let mut incoming = Incoming::request(body);
        let mut messages = Vec::new();
        while let Some(message) = incoming.message().now_or_never().expect("nothing to wait for")? {
            messages.push(message);
        }
        Ok(messages)
    }

    /// Returns the messages in tonic's encoding.
    fn encoded(messages: &[pb::Chunks]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for message in messages {
            bytes.put_u8(0);
            bytes.put_u32(message.encoded_len() as u32);
            message.encode(&mut bytes).unwrap();
        }
        bytes
    }

    proptest! {
        #[test]
        fn messages_survive_any_cut_into_frames(
            sizes in proptest::collection::vec(proptest::collection::vec(0usize..3 * SHARED_BYTES_MIN, 0..4), 0..4),
            cuts in proptest::collection::vec(1usize..2 * SHARED_BYTES_MIN, 1..9),
        ) {
            let messages: Vec<_> = sizes.iter().map(|sizes| message(sizes)).collect();
            let wire = sent(messages.clone()).concat();
            prop_assert_eq!(&wire, &encoded(&messages));
            let (mut rest, mut frames) = (Bytes::from(wire), Vec::new());
            for cut in cuts.into_iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                frames.push(rest.split_to(cut.min(rest.len())));
            }
            prop_assert_eq!(received(Frames::of(frames)).unwrap(), messages);
        }

        #[test]
        fn any_bytes_are_messages_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = received(Frames::of([Bytes::from(bytes)]));
        }
    }

    #[test]
    fn large_payloads_are_not_copied_on_either_side() {
        let messages = vec![message(&[7, 2 * SHARED_BYTES_MIN, 9]), message(&[SHARED_BYTES_MIN])];
        let payloads = [messages[0].chunks[1].values.as_ptr(), messages[1].chunks[0].values.as_ptr()];
        let pieces = sent(messages);
        assert!(payloads.iter().all(|payload| pieces.iter().any(|piece| piece.as_ptr() == *payload)));
        let again = received(Frames::of(pieces)).unwrap();
        assert_eq!([again[0].chunks[1].values.as_ptr(), again[1].chunks[0].values.as_ptr()], payloads);
    }

    #[test]
    fn a_long_message_of_small_payloads_goes_out_in_pieces_of_memory_that_does_not_grow() {
        let message = message(&[7000; 100]);
        let pieces = sent(vec![message.clone()]);
        assert!(pieces.iter().all(|piece| piece.len() <= PIECE_BYTES), "{:?}", pieces.iter().map(Bytes::len));
        assert!(pieces.len() <= 2 + message.encoded_len() / (PIECE_BYTES - 7000));
        assert_eq!(received(Frames::of(pieces)).unwrap(), [message]);
    }

    #[test]
    fn small_messages_travel_together() {
        assert_eq!(sent(vec![message(&[100, 200]); 20]).len(), 1);
        assert_eq!(sent(Vec::new()).len(), 0);
    }

    #[test]
    fn messages_that_are_still_made_are_sent_as_they_come_and_an_error_breaks_the_body_off() {
        let (make, made) = futures::channel::mpsc::unbounded();
        let mut body = Outgoing::coming(made);
        let mut frame = || std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).now_or_never();
        assert!(frame().is_none());
        for bytes in [3, 2 * SHARED_BYTES_MIN] {
            make.unbounded_send(Ok(message(&[bytes]))).expect("the body waits");
            let mut pieces = Vec::new();
            while let Some(piece) = frame() {
                pieces.push(piece.expect("the body goes on").expect("a piece").into_data().expect("data"));
            }
            assert_eq!(pieces.concat(), encoded(&[message(&[bytes])]));
        }
        make.unbounded_send(Err(Status::internal("not made"))).expect("the body waits");
        assert_eq!(frame().expect("an end").expect("an error").unwrap_err().message(), "not made");
    }

    #[test]
    fn what_is_no_stream_of_messages_is_refused() {
        let refused = |bytes: &[u8]| received(Frames::of([Bytes::copy_from_slice(bytes)])).unwrap_err();
        assert_eq!(refused(&[1, 0, 0, 0, 0]).code(), tonic::Code::Unimplemented);
        assert_eq!(refused(&[0, 255, 0, 0, 0]).code(), tonic::Code::OutOfRange);
        assert_eq!(refused(&[0, 0, 0]).message(), "a stream of messages ends with 3 bytes of the next");
        assert_eq!(refused(&[0, 0, 0, 0, 9, 8]).message(), "a message of 9 bytes ends after 1");
        assert!(refused(&[0, 0, 0, 0, 1, 255]).message().starts_with("a message cannot be decoded"));
    }

    #[test]
    fn a_response_that_has_begun_has_its_messages_and_its_end_later() {
        let (make, made) = tokio::sync::oneshot::channel::<()>();
        let response = respond_later(async move {
            made.await.expect("it is made");
            let until: Until = Box::pin(std::future::ready(Some(trailers(Ok(())))));
            (vec![message(&[3])].into_iter(), until)
        });
        assert!(!response.headers().contains_key("grpc-status"), "it says nothing of its end");
        let mut incoming = Incoming { response: true, ..Incoming::request(response.into_body()) };
        assert!(incoming.message::<pb::Chunks>().now_or_never().is_none(), "nothing is made");
        make.send(()).expect("the body waits");
        let mut next = || incoming.message::<pb::Chunks>().now_or_never().expect("it is made");
        assert_eq!(next().expect("a message"), Some(message(&[3])));
        assert_eq!(next().expect("the end"), None);
    }

    #[test]
    fn a_response_counts_only_when_it_says_so() {
        let outcome = |trailers: Option<&'static str>| {
            let mut frames = Frames::of(sent(vec![message(&[3])]));
            let status = |code| HeaderMap::from_iter([(http::HeaderName::from_static("grpc-status"), code)]);
            let trailers = trailers.map(|code| Frame::trailers(status(HeaderValue::from_static(code))));
            frames.0.extend(trailers);
            let mut response = Incoming { response: true, ..Incoming::request(frames) };
            let first = response.message::<pb::Chunks>().now_or_never().unwrap();
            assert_eq!(first.unwrap(), Some(message(&[3])));
            response.message::<pb::Chunks>().now_or_never().unwrap().map_err(|status| status.code())
        };
        assert_eq!(outcome(Some("0")), Ok(None));
        assert_eq!(outcome(Some("5")), Err(tonic::Code::NotFound));
        assert_eq!(outcome(None), Err(tonic::Code::Unavailable));
    }
}

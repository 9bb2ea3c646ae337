//! The door of a server: it accepts connections, limits their number and the time that each may
//! take to prove itself, and encrypts them.
//!
//! A connection is *proven* by its first accepted call. Until then it costs little and has little
//! time. When too many connections are unproven, the oldest of them is closed. So clients that
//! connect and say nothing, or say it slowly, shut out only each other. Proven connections are
//! never closed for this.
//!
//! All sockets and threads of a server share one door. If the server has certificates, connections
//! over TCP are encrypted. Over a Unix socket the kernel says that the client is a process of this
//! user, so the client decides: a client with certificates encrypts, in order to check the
//! server's. Tokens and limits apply to both.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::Sleep;
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::Keys;
use super::refusals::{Peer, Refusals};
use super::tls;
use super::visit::{Guest, Visit};
use crate::channel::connection::{Accepted, Io, tune};
use crate::channel::nearby::is_of_this_user;

/// Limits of a door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most concurrent connections. A worker has one to the master and one to each ps, a user's
    /// command one to the master. Default 10,000, or less if the system's limit of open files
    /// requires it.
    pub connections_max: usize,
    /// Most concurrent connections that are not proven. Default 512.
    pub unproven_max: usize,
    /// Longest time from the begin of a connection to the end of its handshake. Default 5 s.
    pub handshake: Duration,
    /// Longest time from the begin of a connection until it is proven. Default 10 s.
    pub first_call: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 10_000,
            unproven_max: 512,
            handshake: Duration::from_secs(5),
            first_call: Duration::from_secs(10),
        }
    }
}

/// Most bytes that are read from a client that is turned away.
const GOODBYE_READS: u64 = 64 << 10;

/// Pause after the system has refused a connection, for lack of files or memory.
const BREATH: Duration = Duration::from_millis(50);

/// Message to a client that does not encrypt where it should.
const SPEAK_TLS: &[u8] = b"this server wants TLS: use https:// and --tls-ca, --tls-cert, --tls-key";

/// HTTP/2's error code INADEQUATE_SECURITY.
const INADEQUATE_SECURITY: u32 = 0xc;

/// Accepts connections and enforces their limits. Clones are the same door. [`Door::default`] asks
/// for nothing and has the default limits.
#[derive(Clone, Debug)]
pub struct Door(Arc<Shared>);

/// State that all connections of a door share.
#[derive(Debug)]
struct Shared {
    keys: Keys,
    limits: Limits,
    refusals: Arc<Refusals>,
    room: Arc<Semaphore>,
    /// Unproven connections, oldest first. Some are proven or gone by now.
    unproven: Mutex<VecDeque<Weak<Visit>>>,
}

impl Default for Door {
    fn default() -> Self {
        Self::new(Keys::default(), Limits::default())
    }
}

impl Door {
    /// Creates a door that enforces `keys` and `limits`.
    pub fn new(keys: Keys, limits: Limits) -> Self {
        Self(Arc::new(Shared {
            keys,
            limits,
            refusals: Arc::default(),
            room: Arc::new(Semaphore::new(limits.connections_max)),
            unproven: Mutex::default(),
        }))
    }

    /// Accepts connections to these sockets, and returns those that pass the door.
    pub fn open(
        &self,
        tcp: TcpListener,
        unix: Option<UnixListener>,
    ) -> impl Stream<Item = io::Result<Accepted<Box<dyn Io>>>> + Send + use<> {
        let entrance = Entrance { tcp, unix, handshakes: JoinSet::new(), shared: self.0.clone() };
        futures::stream::unfold(entrance, |mut entrance| async move {
            Some((Ok(entrance.next().await), entrance))
        })
    }
}

/// Sockets of a door, polled by one runtime.
struct Entrance {
    tcp: TcpListener,
    unix: Option<UnixListener>,
    handshakes: JoinSet<Option<Accepted<Box<dyn Io>>>>,
    shared: Arc<Shared>,
}

/// A connection from which nothing was read yet.
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Entrance {
    async fn next(&mut self) -> Accepted<Box<dyn Io>> {
        loop {
            tokio::select! {
                Some(done) = self.handshakes.join_next() => {
                    if let Ok(Some(accepted)) = done {
                        return accepted;
                    }
                }
                accepted = accept(&self.tcp, self.unix.as_ref()) => match accepted {
                    Ok((socket, peer)) => self.receive(socket, peer),
                    Err(error) => {
                        self.shared.refusals.tell("the system takes no more connections", None, "", &error.to_string());
                        tokio::time::sleep(BREATH).await;
                    }
                },
            }
        }
    }

    fn receive(&mut self, socket: Socket, peer: Peer) {
        let Ok(room) = self.shared.room.clone().try_acquire_owned() else {
            let max = self.shared.limits.connections_max;
            let details = format!("{max} are open, the most that this server takes (connections_max)");
            return self.shared.refusals.tell("too many connections", None, "", &details);
        };
        let Shared { keys, limits, refusals, .. } = &*self.shared;
        let visit = Arc::new(Visit::new(keys.clone(), refusals.clone(), peer));
        self.shared.wait(&visit);
        self.handshakes.spawn(shake_hands(socket, visit, *limits, room));
    }
}

/// Accepts the next connection of either socket.
async fn accept(tcp: &TcpListener, unix: Option<&UnixListener>) -> io::Result<(Socket, Peer)> {
    let from_unix = async {
        match unix {
            Some(unix) => unix.accept().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        accepted = tcp.accept() => {
            let (stream, peer) = accepted?;
            tune(&stream);
            Ok((Socket::Tcp(stream), Peer::Address(peer.ip().to_canonical())))
        }
        accepted = from_unix => Ok((Socket::Unix(accepted?.0), Peer::UnixSocket)),
    }
}

impl Shared {
    /// Adds `visit` to the unproven connections, and closes the oldest ones while there are too
    /// many.
    fn wait(&self, visit: &Arc<Visit>) {
        let max = self.limits.unproven_max;
        let mut unproven = self.unproven.lock().unwrap_or_else(PoisonError::into_inner);
        if unproven.len() >= max {
            unproven.retain(|visit| visit.upgrade().is_some_and(|visit| !visit.is_proven()));
        }
        while unproven.len() >= max {
            let Some(oldest) = unproven.pop_front() else { break };
            if let Some(oldest) = oldest.upgrade() {
                oldest.close();
                let details =
                    format!("{max} others wait; the oldest is closed for each that comes (unproven_max)");
                self.refusals.tell("too many connections without a call", None, "", &details);
            }
        }
        unproven.push_back(Arc::downgrade(visit));
    }
}

/// Turns a socket into a connection that may make calls, or returns `None` if it is refused.
async fn shake_hands(
    socket: Socket,
    visit: Arc<Visit>,
    limits: Limits,
    room: OwnedSemaphorePermit,
) -> Option<Accepted<Box<dyn Io>>> {
    // Both times begin now: a slow handshake leaves less time for a call.
    let deadline = tokio::time::sleep(limits.first_call);
    let shaken = tokio::select! {
        biased;
        () = visit.closed() => return None,
        shaken = tokio::time::timeout(limits.handshake, look_at(socket, &visit)) => shaken,
    };
    let io = match shaken {
        Ok(Ok(io)) => io,
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            // A port scan or a load balancer's probe does not deserve a warning.
            tracing::debug!(peer = %visit.peer(), "closed before the handshake");
            return None;
        }
        Ok(Err(error)) => {
            visit.refuse(tls::why(&error), "", &error.to_string());
            return None;
        }
        Err(_) => {
            visit.refuse("no handshake in time", "", &format!("{:?} (handshake)", limits.handshake));
            return None;
        }
    };
    let closed = Box::pin(visit.closed());
    let trial = Some(Trial { deadline: Box::pin(deadline), time: limits.first_call, closed });
    let watched = Watched { io, visit: visit.clone(), trial, _room: room };
    Some(Accepted::at(Box::new(watched), Guest::at(visit)))
}

async fn look_at(socket: Socket, visit: &Visit) -> io::Result<Box<dyn Io>> {
    match socket {
        Socket::Tcp(stream) => encrypt(stream, visit).await,
        Socket::Unix(stream) if is_of_this_user(&stream)? => as_client_likes(stream, visit).await,
        Socket::Unix(_) => {
            let message = "its process is of another user than this server; expected TCP from there";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
        }
    }
}

/// First byte of a TLS handshake. HTTP/2 never begins with it.
const HANDSHAKE: u8 = 22;

/// Encrypts the connection if the client begins with TLS.
async fn as_client_likes(mut stream: UnixStream, visit: &Visit) -> io::Result<Box<dyn Io>> {
    let server = visit.keys().loaded().tls.as_ref().and_then(|tls| tls.server.clone());
    let Some(config) = server else { return Ok(Box::new(stream)) };
    // A Unix socket cannot be peeked without reading.
    let first = [stream.read_u8().await?];
    let (read, write) = stream.into_split();
    let stream = tokio::io::join(io::Cursor::new(first).chain(read), write);
    if first == [HANDSHAKE] { tls::accept(config, stream).await } else { Ok(Box::new(stream)) }
}

async fn encrypt(stream: TcpStream, visit: &Visit) -> io::Result<Box<dyn Io>> {
    if !visit.keys().encrypts() {
        return Ok(Box::new(stream));
    }
    let loaded = visit.keys().loaded();
    let Some(config) = loaded.tls.as_ref().and_then(|tls| tls.server.clone()) else {
        return Err(io::Error::other("this server has no certificate"));
    };
    let mut first = [0];
    // HTTP/2 begins with this byte, TLS never does.
    if stream.peek(&mut first).await? == 1 && first == *b"P" {
        turn_away(stream).await?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it speaks HTTP/2 without TLS"));
    }
    tls::accept(config, stream).await
}

/// Sends an HTTP/2 GOAWAY. A client would take TLS's alert for a broken connection, and retry.
async fn turn_away(mut stream: TcpStream) -> io::Result<()> {
    stream.write_all(&goodbye(INADEQUATE_SECURITY, SPEAK_TLS)).await?;
    stream.shutdown().await?;
    // A socket that is closed with unread bytes discards what it has sent.
    tokio::io::copy(&mut stream.take(GOODBYE_READS), &mut tokio::io::sink()).await.map(drop)
}

/// Returns an empty SETTINGS frame and a GOAWAY frame.
fn goodbye(code: u32, reason: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    let length = u32::try_from(8 + reason.len()).unwrap_or(u32::MAX);
    bytes.extend(&length.to_be_bytes()[1..]);
    bytes.extend([7, 0, 0, 0, 0, 0]);
    // Last stream that was processed: none.
    bytes.extend([0; 4]);
    bytes.extend(code.to_be_bytes());
    bytes.extend(reason);
    bytes
}

/// A connection that is watched until it is proven.
struct Watched {
    io: Box<dyn Io>,
    visit: Arc<Visit>,
    trial: Option<Trial>,
    /// Permit that is given back with the connection.
    _room: OwnedSemaphorePermit,
}

struct Trial {
    deadline: Pin<Box<Sleep>>,
    /// All the time up to the deadline.
    time: Duration,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Watched {
    /// Returns an error once the connection is to be closed. The waiting task is woken for that,
    /// whatever the connection does.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(trial) = &mut self.trial else { return Ok(()) };
        if self.visit.is_proven() {
            self.trial = None;
            return Ok(());
        }
        if trial.closed.as_mut().poll(cx).is_ready() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "closed to make room"));
        }
        if trial.deadline.as_mut().poll(cx).is_ready() {
            let time = trial.time;
            self.visit.refuse("no call in time", "", &format!("{time:?} (first_call)"));
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no call that was let through came in time"));
        }
        Ok(())
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

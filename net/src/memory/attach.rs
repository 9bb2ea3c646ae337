//! Attachment: two processes find each other, read each other's memory, and learn when the other
//! has stopped reading.
//!
//! One process makes an [`Offer`]: it listens once under a random abstract name, and sends the name
//! in a call. The other connects. The kernel tells both who the other is, and each sends the other
//! a descriptor over that connection. From then on the connection carries nothing.
//!
//! Each end stays open while its process has the other's memory mapped, and the kernel closes it
//! when the process dies. So the end of the connection is the only signal that nothing is read any
//! more.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use proto::error::Result;
use proto::pb;
use tokio::net::{UnixListener, UnixStream};

use super::{Memory, Theirs};

/// Length of an offer's name in bytes.
const NAME_BYTES: usize = 16;

/// An offer to one process to attach.
#[derive(Debug)]
pub struct Offer {
    name: [u8; NAME_BYTES],
    listener: UnixListener,
    memory: Memory,
}

impl Offer {
    /// Offers `memory` to a process that learns the name.
    ///
    /// # Errors
    /// The system has no abstract sockets.
    #[cfg(target_os = "linux")]
    pub fn new(memory: &Memory) -> io::Result<Self> {
        let name = super::system::random()?;
        let socket = socket()?;
        socket.bind(&address(&name)?)?;
        socket.listen(4)?;
        Ok(Self { name, listener: UnixListener::from_std(socket.into())?, memory: memory.clone() })
    }

    /// Fails on this system.
    ///
    /// # Errors
    /// This system has no abstract sockets.
    #[cfg(not(target_os = "linux"))]
    pub fn new(_: &Memory) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the offer's name, which a call carries.
    pub fn name(&self) -> Bytes {
        Bytes::copy_from_slice(&self.name)
    }

    /// Waits until a process of this user takes up the offer.
    ///
    /// # Errors
    /// The process sent nothing that can be mapped.
    pub async fn taken(self) -> io::Result<Attachment> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            // The system shows names to every user.
            if crate::channel::nearby::is_of_this_user(&stream)? {
                return Attachment::over(stream, self.name(), &self.memory).await;
            }
        }
    }
}

/// One end of an attachment: two processes that read each other's memory. Clones are the same end.
#[derive(Clone, Debug)]
pub struct Attachment(Arc<End>);

#[derive(Debug)]
struct End {
    name: Bytes,
    theirs: Theirs,
    /// Closed after the mapping is gone: fields are dropped in order.
    stream: UnixStream,
}

impl Attachment {
    /// Takes up the offer `name`, and lets the other process read `memory`.
    ///
    /// # Errors
    /// This host has no such offer, it is another user's, or it sends nothing that can be mapped.
    #[cfg(target_os = "linux")]
    pub async fn take_up(name: Bytes, memory: &Memory) -> io::Result<Self> {
        let socket = socket()?;
        let bytes = <[u8; NAME_BYTES]>::try_from(&*name);
        let bytes = bytes.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        socket.connect(&address(&bytes)?)?;
        let stream = UnixStream::from_std(socket.into())?;
        if !crate::channel::nearby::is_of_this_user(&stream)? {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Self::over(stream, name, memory).await
    }

    /// Fails on this system.
    ///
    /// # Errors
    /// This system has no abstract sockets.
    #[cfg(not(target_os = "linux"))]
    pub async fn take_up(_: Bytes, _: &Memory) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    #[cfg(target_os = "linux")]
    async fn over(stream: UnixStream, name: Bytes, memory: &Memory) -> io::Result<Self> {
        use tokio::io::Interest;

        use super::system;

        stream.async_io(Interest::WRITABLE, || system::send(&stream, &memory.0.readable)).await?;
        let file = stream.async_io(Interest::READABLE, || system::receive(&stream)).await?;
        let theirs = Theirs(system::open(file)?);
        Ok(Self(Arc::new(End { name, theirs, stream })))
    }

    #[cfg(not(target_os = "linux"))]
    async fn over(_: UnixStream, _: Bytes, _: &Memory) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the name of the offer.
    pub fn name(&self) -> &Bytes {
        &self.0.name
    }

    /// Returns the current bytes of a region of the other process's memory.
    ///
    /// # Errors
    /// The region is not inside the memory.
    pub fn read(&self, region: pb::Region) -> Result<&[u8]> {
        self.0.theirs.bytes(region)
    }

    /// Returns a region's bytes, to be kept as long as references to them exist. `guard` is dropped
    /// with the last one, which shows that the region is not read any more.
    ///
    /// # Errors
    /// The region is not inside the memory.
    pub fn share<G: Send + 'static>(&self, region: pb::Region, guard: G) -> Result<Bytes> {
        self.read(region)?;
        Ok(Bytes::from_owner(View { attachment: self.clone(), region, _guard: guard }))
    }

    /// Announces that this process will send no more regions. The other one unmaps the memory when
    /// it does not read any more.
    pub fn leave(&self) {
        // If the shutdown fails, the other end is gone.
        let _ = socket2::SockRef::from(&self.0.stream).shutdown(std::net::Shutdown::Write);
    }

    /// Waits until the other process has left and stopped reading this one's memory, or is gone.
    pub async fn ended(&self) {
        let stream = &self.0.stream;
        loop {
            // The runtime ends, which is not the end that the caller waits for.
            if stream.readable().await.is_err() {
                return std::future::pending().await;
            }
            match stream.try_read(&mut [0]) {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => return,
            }
        }
    }
}

/// Bytes of the other process's memory.
struct View<G> {
    attachment: Attachment,
    region: pb::Region,
    _guard: G,
}

impl<G> AsRef<[u8]> for View<G> {
    fn as_ref(&self) -> &[u8] {
        self.attachment.read(self.region).expect("checked when it was made")
    }
}

#[cfg(target_os = "linux")]
fn socket() -> io::Result<socket2::Socket> {
    socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM.nonblocking(), None)
}

#[cfg(target_os = "linux")]
fn address(name: &[u8; NAME_BYTES]) -> io::Result<socket2::SockAddr> {
    let name = u128::from_be_bytes(*name);
    socket2::SockAddr::unix(format!("\0ebbflow memory {name:032x}"))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    async fn attached(one: &Memory, other: &Memory) -> (Attachment, Attachment) {
        let offer = Offer::new(one).expect("an offer");
        let name = offer.name();
        tokio::try_join!(offer.taken(), Attachment::take_up(name, other)).expect("both attach")
    }

    #[tokio::test]
    async fn each_reads_what_the_other_writes() {
        let memories = [(); 2].map(|()| Memory::with_bytes(1 << 20).unwrap());
        let (one, other) = attached(&memories[0], &memories[1]).await;
        for (memory, reader) in [(&memories[0], &other), (&memories[1], &one)] {
            let mut region = memory.take(5000).unwrap();
            region.fill(3);
            let at = memory.find(&region).unwrap();
            assert_eq!(reader.read(at).unwrap(), &*region);
            region[4999] = 4;
            assert_eq!(reader.read(at).unwrap()[4998..], [3, 4]);
            drop(region);
            assert!(reader.read(at).unwrap().iter().all(|&byte| byte == 0), "given back");
        }
    }

    #[tokio::test]
    async fn what_is_not_inside_is_refused() {
        let memory = Memory::with_bytes(1 << 20).unwrap();
        let (one, _other) = attached(&memory, &memory).await;
        for (offset, bytes) in [(0, 0), (1 << 20, 1), ((1 << 20) - 1, 2), (u64::MAX, 1), (1, u64::MAX)] {
            let error = one.read(pb::Region { offset, bytes }).unwrap_err().to_string();
            assert!(error.contains("region") && error.contains("memory of 1048576"), "{error}");
        }
        one.read(pb::Region { offset: (1 << 20) - 1, bytes: 1 }).unwrap();
    }

    #[tokio::test]
    async fn the_last_reader_ends_it() {
        let memory = Memory::with_bytes(1 << 20).unwrap();
        let (one, other) = attached(&memory, &memory).await;
        let (guard, mut dropped) = oneshot::channel::<()>();
        let view = other.share(pb::Region { offset: 0, bytes: 9 }, guard).unwrap();
        one.leave();
        other.ended().await;
        drop(other);
        assert!(futures::FutureExt::now_or_never(one.ended()).is_none(), "a view is left");
        let again = view.slice(2..5);
        drop(view);
        assert!(dropped.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        drop(again);
        assert!(dropped.try_recv() == Err(oneshot::error::TryRecvError::Closed));
        one.ended().await;
    }

    #[tokio::test]
    async fn an_offer_that_is_gone_cannot_be_taken_up() {
        let memory = Memory::with_bytes(1 << 20).unwrap();
        let name = Offer::new(&memory).unwrap().name();
        for name in [name, Bytes::new(), Bytes::from_static(b"short")] {
            assert!(Attachment::take_up(name, &memory).await.is_err());
        }
    }
}

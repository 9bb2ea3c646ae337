//! Unix sockets beside TCP, for two processes of one host.
//!
//! A server that listens on a TCP address also listens under a name made from it, in the kernel's table of abstract names; a client that
//! is about to dial an address of its own host dials that name first. Nobody has to be told: such a name belongs to a network
//! namespace like the address itself, so whoever holds it holds the address, and it goes when its process does. Where it is not there (another
//! host, another container, a proxy in between, another system than Linux) or belongs to another user, TCP is as good as before.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::UnixStream;

#[cfg(target_os = "linux")]
pub(super) use linux::{connect, listen};

/// Whether `address` is one of this host: then the kernel would send to it from itself. Nothing is sent.
fn is_here(address: SocketAddr) -> bool {
    let any: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let source = || -> io::Result<IpAddr> {
        let probe = std::net::UdpSocket::bind((any, 0))?;
        probe.connect(address)?;
        Ok(probe.local_addr()?.ip())
    };
    source().is_ok_and(|source| source == address.ip())
}

/// Whether the process at the other end is of the user of this one, as the kernel says.
pub(crate) fn is_of_this_user(stream: &UnixStream) -> io::Result<bool> {
    let (this, _) = UnixStream::pair()?;
    Ok(stream.peer_cred()?.uid() == this.peer_cred()?.uid())
}

#[cfg(target_os = "linux")]
mod linux {
    use std::os::unix::net::UnixListener;

    use socket2::{Domain, SockAddr, Socket, Type};

    use super::*;

    /// Bytes that a socket may hold on their way. As large as a full chunk and the next ones, so that neither side waits for the other
    /// within a chunk; the system cuts it to what it allows.
    const BUFFER_BYTES: usize = 4 << 20;

    fn socket() -> io::Result<Socket> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        // Best effort: a smaller one works, slower.
        let _ = socket.set_send_buffer_size(BUFFER_BYTES);
        Ok(socket)
    }

    /// The name that goes with a TCP address.
    fn name(address: SocketAddr) -> io::Result<SockAddr> {
        SockAddr::unix(format!("\0ebbflow {address}"))
    }

    /// Listens beside a TCP listener at `address`. `None`: only TCP then.
    pub(in super::super) fn listen(address: SocketAddr) -> Option<UnixListener> {
        let bound = || {
            let socket = socket()?;
            socket.bind(&name(address)?)?;
            socket.listen(1024)?;
            Ok(socket.into())
        };
        let logged =
            |error: &io::Error| tracing::debug!(%address, %error, "no Unix socket beside this address");
        bound().inspect_err(logged).ok()
    }

    /// Connects to whoever listens at `address`, if that is a process of this host and this user. `None`: use TCP.
    pub(in super::super) fn connect(address: SocketAddr) -> Option<UnixStream> {
        if !is_here(address) {
            return None;
        }
        // A server that listens on all addresses has only one name.
        let all = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
        let all = all.map(|ip| SocketAddr::new(ip, address.port()));
        [address].into_iter().chain(all).find_map(|address| connect_to(address).ok())
    }

    fn connect_to(address: SocketAddr) -> io::Result<UnixStream> {
        let socket = socket()?;
        socket.connect(&name(address)?)?;
        let stream = UnixStream::from_std(socket.into())?;
        // Names are free for all; an address that is in use could not be taken by another user.
        if !is_of_this_user(&stream)? {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(stream)
    }
}

//! Unix sockets beside TCP, for two processes of one host.
//!
//! A server on a TCP address also listens under a name made from that address, in the kernel's
//! table of abstract names. A client that is about to dial an address of its own host dials that
//! name first. No configuration is needed: a name belongs to a network namespace, like the address.
//! So the process that holds the name holds the address, and the name disappears with the process.
//!
//! TCP is used where the name is missing (another host, another container, a proxy in between,
//! another system than Linux) or belongs to another user.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::UnixStream;

#[cfg(target_os = "linux")]
pub(super) use linux::{connect, listen};

/// Returns whether `address` is one of this host, so that the kernel would send to it from itself.
/// Nothing is sent.
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

/// Returns whether the process at the other end belongs to the user of this one. The kernel says
/// so.
pub(crate) fn is_of_this_user(stream: &UnixStream) -> io::Result<bool> {
    let (this, _) = UnixStream::pair()?;
    Ok(stream.peer_cred()?.uid() == this.peer_cred()?.uid())
}

#[cfg(target_os = "linux")]
mod linux {
    use std::os::unix::net::UnixListener;

    use socket2::{Domain, SockAddr, Socket, Type};

    use super::*;

    /// Size of a socket's send buffer in bytes. A full chunk and the next ones fit in, so that
    /// neither side waits for the other within a chunk. The system reduces it to its limit.
    const BUFFER_BYTES: usize = 4 << 20;

    fn socket() -> io::Result<Socket> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        // Errors are ignored: a smaller buffer works, but slower.
        let _ = socket.set_send_buffer_size(BUFFER_BYTES);
        Ok(socket)
    }

    /// Returns the name that belongs to a TCP address.
    fn name(address: SocketAddr) -> io::Result<SockAddr> {
        SockAddr::unix(format!("\0ebbflow {address}"))
    }

    /// Listens beside a TCP listener at `address`. `None`: only TCP is possible.
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

    /// Connects to the process that listens at `address`, if it is of this host and this user.
    /// `None`: use TCP.
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
        // Every user may take a name. An address in use cannot be taken by another user.
        if !is_of_this_user(&stream)? {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(stream)
    }
}

//! An S3 server for tests, and a proxy before it that injects faults.
//!
//! The server is moto, which is independent of Ebbflow. Clients reach it through the [`Proxy`]
//! only.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{Lacks, skipped};

/// Longest wait of a proxy's thread for bytes before it looks for a fault again.
const LOOK: Duration = Duration::from_millis(20);

/// Headers of a signed request. Moto checks that a request is signed, not how. It refuses unsigned
/// requests for most keys.
const SIGNED: &str = "Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, \
                      SignedHeaders=host, Signature=0";

const DENIED: &str =
    "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>";
const BUSY: &str = "<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>";

/// The server, with one bucket.
pub struct S3 {
    child: Child,
    address: SocketAddr,
}

impl S3 {
    pub const BUCKET: &'static str = "bucket";

    /// Starts `EBB_MOTO`, or `moto_server` on the PATH. It returns `None` without either.
    pub fn start() -> Option<Self> {
        let program = std::env::var("EBB_MOTO").unwrap_or_else(|_| "moto_server".to_owned());
        let mut command = Command::new(&program);
        command.args(["-H", "127.0.0.1", "-p", "0"]).stdin(Stdio::null()).stdout(Stdio::null());
        let Ok(mut child) = command.stderr(Stdio::piped()).spawn() else {
            let cure = "pip install 'moto[s3]' flask flask-cors, and set EBB_MOTO";
            skipped(Lacks::Package, &format!("{program} does not start, so nothing was saved on S3; {cure}"));
            return None;
        };
        let said = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let mut lines = said.lines().map_while(Result::ok);
        let address = lines.find_map(|line| line.split_once("http://")?.1.trim().parse().ok());
        let address = address.expect("moto says where it listens");
        // Moto logs each request. A full pipe would stop it.
        std::thread::spawn(move || lines.for_each(drop));
        let server = Self { child, address };
        assert_eq!(server.request("PUT", "", b"").0, 200, "the bucket is made");
        Some(server)
    }

    /// Sends a request for a key of the bucket past the proxy. Returns the status and the body.
    pub fn request(&self, method: &str, key: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(self.address).expect("moto listens");
        let head = format!(
            "{method} /{}/{key} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/octet-stream\r\n{SIGNED}\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            Self::BUCKET,
            self.address,
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).expect("moto reads");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("moto answers");
        let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("an HTTP answer");
        let status = String::from_utf8_lossy(&answer[9..12]).parse().expect("an HTTP status");
        (status, answer.split_off(end + 4))
    }

    /// Returns the keys of the bucket, sorted.
    pub fn keys(&self) -> Vec<String> {
        let (status, listed) = self.request("GET", "?list-type=2", b"");
        assert_eq!(status, 200);
        let listed = String::from_utf8_lossy(&listed).into_owned();
        let keys = listed.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next());
        keys.map(str::to_owned).collect()
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Behaviour of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fault {
    /// Every request is forwarded.
    Nothing,
    /// Every request is answered with 503.
    Busy,
    /// Every request is answered with 403.
    Denied,
    /// Requests are forwarded, and the connection is dropped instead of forwarding an answer.
    Drops,
    /// Connections are closed at once.
    Away,
    /// Nothing is forwarded, and connections stay open.
    Stalls,
}

/// A proxy before a server.
pub struct Proxy {
    pub address: SocketAddr,
    faults: Arc<Faults>,
}

#[derive(Debug, Default)]
struct Faults {
    now: AtomicU8,
    /// The fault that comes once so many bytes were forwarded.
    next: Mutex<Option<(Fault, u64)>>,
    /// Number of connections and messages that met a fault.
    met: AtomicUsize,
    /// Methods and paths of requests without a body.
    requests: Mutex<Vec<String>>,
    /// Bytes of the server's answers that reached clients.
    forwarded: AtomicU64,
}

impl Faults {
    fn are(&self, fault: Fault) -> bool {
        self.now.load(Ordering::SeqCst) == fault as u8
    }

    fn is_one_of(&self, faults: &[Fault]) -> bool {
        faults.iter().any(|fault| self.are(*fault))
    }

    /// Notes the request with which bytes of a client begin, if it is one without a body.
    fn note(&self, bytes: &[u8]) {
        let line = bytes.split(|&byte| byte == b'\r').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line);
        if let Some(request) = line.strip_suffix(" HTTP/1.1")
            && (request.starts_with("GET ") || request.starts_with("HEAD "))
        {
            self.requests.lock().expect("no panic").push(request.to_owned());
        }
    }

    /// Counts bytes of answers that reached a client.
    fn forward(&self, bytes: u64) {
        let forwarded = self.forwarded.fetch_add(bytes, Ordering::SeqCst) + bytes;
        let mut next = self.next.lock().expect("no panic");
        if let Some((fault, _)) = next.take_if(|(_, from)| forwarded >= *from) {
            self.now.store(fault as u8, Ordering::SeqCst);
        }
    }

    fn stand_still(&self) {
        if self.are(Fault::Stalls) {
            self.met.fetch_add(1, Ordering::SeqCst);
        }
        while self.are(Fault::Stalls) {
            std::thread::park_timeout(LOOK);
        }
    }
}

impl Proxy {
    pub fn start(server: &S3) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let (faults, server) = (Arc::new(Faults::default()), server.address);
        let seen = faults.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let faults = seen.clone();
                // Broken connections are the purpose of the proxy.
                std::thread::spawn(move || drop(serve(client, server, &faults)));
            }
        });
        Self { address, faults }
    }

    /// Sets the fault from now on.
    pub fn set(&self, fault: Fault) {
        self.faults.met.store(0, Ordering::SeqCst);
        self.faults.now.store(fault as u8, Ordering::SeqCst);
    }

    /// Sets the fault once so many bytes of answers were forwarded.
    pub fn set_from(&self, fault: Fault, bytes: u64) {
        *self.faults.next.lock().expect("no panic") = Some((fault, bytes));
    }

    /// Returns method and path of each `GET` and `HEAD` that was forwarded, such as `GET
    /// /bucket/KEY`, and forgets them.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.faults.requests.lock().expect("no panic"))
    }

    /// Returns the bytes of the server's answers that were forwarded.
    pub fn forwarded(&self) -> u64 {
        self.faults.forwarded.load(Ordering::SeqCst)
    }

    /// Returns how many connections, or messages that stand still, have met a fault since it was
    /// set.
    pub fn met(&self) -> usize {
        self.faults.met.load(Ordering::SeqCst)
    }
}

fn serve(mut client: TcpStream, server: SocketAddr, faults: &Arc<Faults>) -> std::io::Result<()> {
    if !faults.is_one_of(&[Fault::Nothing, Fault::Stalls]) {
        faults.met.fetch_add(1, Ordering::SeqCst);
    }
    if faults.are(Fault::Away) {
        return Ok(());
    }
    for (fault, status, body) in
        [(Fault::Busy, "503 Slow Down", BUSY), (Fault::Denied, "403 Forbidden", DENIED)]
    {
        if faults.are(fault) {
            read_request(&mut client)?;
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
            return client.write_all(format!("{head}{body}").as_bytes());
        }
    }
    let server = TcpStream::connect(server)?;
    let (answers, back, watched) = (server.try_clone()?, client.try_clone()?, faults.clone());
    let other = std::thread::spawn(move || {
        // A dropped answer may have begun.
        hand_on(answers, back, &watched, &[Fault::Nothing, Fault::Stalls], |bytes| {
            watched.forward(bytes);
        })
    });
    let may = [Fault::Nothing, Fault::Stalls, Fault::Drops];
    let handed = hand_on(client, server, faults, &may, |_| {});
    let _ = other.join();
    handed
}

/// Copies bytes while the fault is one of `may`, and tells `copied` how many. Otherwise it closes
/// both ends.
fn hand_on(
    mut from: TcpStream,
    mut to: TcpStream,
    faults: &Faults,
    may: &[Fault],
    copied: impl Fn(u64),
) -> std::io::Result<()> {
    from.set_read_timeout(Some(LOOK))?;
    let mut buffer = vec![0; 64 << 10];
    let ended = loop {
        match from.read(&mut buffer) {
            Ok(0) => break Ok(()),
            // Bytes that arrive during another fault are dropped.
            Ok(_) if !faults.is_one_of(may) => break Ok(()),
            Ok(count) => {
                faults.stand_still();
                // Answers begin with the version of HTTP.
                faults.note(&buffer[..count]);
                if let Err(error) = to.write_all(&buffer[..count]) {
                    break Err(error);
                }
                copied(count as u64);
            }
            Err(error)
                if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) =>
            {
                if !faults.is_one_of(may) {
                    break Ok(());
                }
            }
            Err(error) => break Err(error),
        }
    };
    for end in [&from, &to] {
        let _ = end.shutdown(Shutdown::Both);
    }
    ended
}

/// Reads one request to its end, so that unread bytes do not reset the connection before its
/// answer.
fn read_request(client: &mut TcpStream) -> std::io::Result<()> {
    let mut reader = BufReader::new(client);
    let mut bytes = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            bytes = value.trim().parse().unwrap_or(0);
        }
    }
    std::io::copy(&mut reader.take(bytes), &mut std::io::sink())?;
    Ok(())
}

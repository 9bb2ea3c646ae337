//! A web server for tests that serves files in parts, well or badly.
//!
//! | path | answer |
//! | --- | --- |
//! | `/NAME` | the file, with an ETag, ranges and conditions |
//! | `/denied/NAME` | 403 |
//! | `/busy/NAME` | 503 to the first two requests |
//! | `/cut/NAME` | the connection breaks within the body of the third request |
//! | `/whole/NAME` | always the whole file |
//! | `/slow/NAME` | the file, a few bytes at a time |
//! | `/held/NAME` | waits for [`Web::go_on`] |
//! | `/changing/NAME` | another ETag from the fourth request on |
//! | `/stalls/NAME` | waits for [`Web::go_on`] when a part behind [`STALLS_FROM`] comes again |

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// First byte of the parts for which `/stalls/NAME` lets a client wait.
pub const STALLS_FROM: usize = 2 << 20;

/// Parts in which `/slow/NAME` sends an answer.
const SLOW_PARTS: usize = 50;

/// The server. It ends with the test's process.
pub struct Web {
    address: SocketAddr,
    /// Number of requests for each path.
    seen: Arc<Mutex<BTreeMap<String, usize>>>,
    gate: Arc<Gate>,
    /// Bytes of files that were sent, for each path.
    sent: Arc<Mutex<BTreeMap<String, usize>>>,
}

/// Whether clients of `/stalls/NAME` and `/held/NAME` have their answer.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
    /// Parts that were asked for, by the number of [`STALLS_FROM`] before them.
    asked: Mutex<BTreeSet<usize>>,
    /// Number of clients that have waited.
    stalled: AtomicUsize,
}

impl Web {
    /// Serves files by their names.
    pub fn start(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let files: BTreeMap<String, Vec<u8>> =
            files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect();
        let (files, seen) = (Arc::new(files), Arc::<Mutex<BTreeMap<String, usize>>>::default());
        let (counts, gate) = (seen.clone(), Arc::<Gate>::default());
        let (doors, sent) = (gate.clone(), Arc::<Mutex<BTreeMap<String, usize>>>::default());
        let bytes = sent.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (files, counts, gate) = (files.clone(), counts.clone(), doors.clone());
                let bytes = bytes.clone();
                // A client that has left is no failure of the server.
                std::thread::spawn(move || drop(serve(client, &files, &counts, &gate, &bytes)));
            }
        });
        Self { address, seen, gate, sent }
    }

    /// Returns the number of clients of `/stalls/NAME` that have waited.
    pub fn stalled(&self) -> usize {
        self.gate.stalled.load(Ordering::SeqCst)
    }

    /// Returns the bytes of a file that clients asked for under this path, whether they took them
    /// or not.
    pub fn sent(&self, path: &str) -> usize {
        self.sent.lock().expect("no panic").get(path).copied().unwrap_or_default()
    }

    /// Lets the clients of `/stalls/NAME` and `/held/NAME` have their answers, from now on.
    pub fn go_on(&self) {
        *self.gate.open.lock().expect("no panic") = true;
        self.gate.opened.notify_all();
    }

    /// Returns the URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }

    /// Returns the number of requests for a path.
    pub fn seen(&self, path: &str) -> usize {
        self.seen.lock().expect("no panic").get(path).copied().unwrap_or_default()
    }
}

fn serve(
    mut client: TcpStream,
    files: &BTreeMap<String, Vec<u8>>,
    seen: &Mutex<BTreeMap<String, usize>>,
    gate: &Gate,
    bytes: &Mutex<BTreeMap<String, usize>>,
) -> std::io::Result<()> {
    let (first, headers) = read(&client);
    let path = first.split(' ').nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
    let before = {
        let mut seen = seen.lock().expect("no panic");
        let count = seen.entry(path.clone()).or_default();
        *count += 1;
        *count - 1
    };
    let (how, name) = path.rsplit_once('/').unwrap_or(("", &path));
    let Some(file) = files.get(name) else { return client.write_all(&answer("404 Not Found", "", b"")) };
    let tag = if how == "changing" && before >= 3 { "\"two\"" } else { "\"one\"" };
    let range = range(&headers, file);
    if how == "stalls"
        && let Some((first, _)) = range
        && first >= STALLS_FROM
        && !gate.asked.lock().expect("no panic").insert(first / STALLS_FROM)
    {
        gate.stalled.fetch_add(1, Ordering::SeqCst);
        let closed = gate.open.lock().expect("no panic");
        drop(gate.opened.wait_while(closed, |open| !*open).expect("no panic"));
    }
    if how == "held" {
        let closed = gate.open.lock().expect("no panic");
        drop(gate.opened.wait_while(closed, |open| !*open).expect("no panic"));
    }
    let asked = range.map_or(file.len(), |(first, last)| last + 1 - first);
    *bytes.lock().expect("no panic").entry(path.clone()).or_default() += asked;
    let whole = match range {
        _ if how == "denied" => answer("403 Forbidden", "", b""),
        _ if how == "busy" && before < 2 => answer("503 Service Unavailable", "", b""),
        _ if headers.get("if-match").is_some_and(|wanted| wanted != tag) => {
            answer("412 Precondition Failed", "", b"")
        }
        Some((first, last)) if how != "whole" => {
            let range = format!("ETag: {tag}\r\nContent-Range: bytes {first}-{last}/{}\r\n", file.len());
            answer("206 Partial Content", &range, &file[first..=last])
        }
        _ => answer("200 OK", &format!("ETag: {tag}\r\n"), file),
    };
    if how == "slow" {
        client.set_nodelay(true)?;
        return whole.chunks(whole.len() / SLOW_PARTS + 1).try_for_each(|part| {
            std::thread::park_timeout(Duration::from_millis(1));
            client.write_all(part)
        });
    }
    let sent = if how == "cut" && before == 2 { whole.len() / 2 } else { whole.len() };
    client.write_all(&whole[..sent])
}

/// Reads a request without a body. Returns its first line, and its headers by their names in lower
/// case.
pub(super) fn read(client: &TcpStream) -> (String, BTreeMap<String, String>) {
    let mut lines = BufReader::new(client).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    let headers = lines.take_while(|line| !line.is_empty()).filter_map(|line| {
        line.split_once(':').map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
    });
    (first, headers.collect())
}

/// Returns the first and the last byte of the part of a file that a request asks for.
pub(super) fn range(headers: &BTreeMap<String, String>, file: &[u8]) -> Option<(usize, usize)> {
    let (first, last) = headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
    Some((first.parse().ok()?, last.parse::<usize>().ok()?.min(file.len() - 1)))
}

/// Returns the bytes of an answer.
pub(super) fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n");
    [head.as_bytes(), body].concat()
}

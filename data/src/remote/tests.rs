//! Files on a web server, over real sockets, with a server that fails in all ways.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::parquet::arrow::ArrowWriter;
use ::parquet::file::properties::WriterProperties;
use arrow_array::{ArrayRef, FixedSizeBinaryArray, Float64Array, Int64Array, RecordBatch};
use proto::column::ColumnSpec;
use proto::ids::Epoch;
use proto::spec::{DataSet, DataSpec, FilesSpec, Format, TokenType, TokensSpec, data_url};

use super::bridge::{self, Failure, LIMITS, Limits};
use super::http::Http;
use super::with::ahead;
use super::{HEAD_BYTES, PATIENCE, PIECE_BYTES, Remote, State, be_patient_for, use_store_settings};
use crate::Dataset;
use crate::column::Column;
use crate::cuts::Cuts;
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::format::Source;
use crate::formats::{self, idx, images, npy, npz, tar, tfrecord};
use crate::object::{Content, Object};
use crate::packed::{Access, always_in_pieces};
use crate::pass::Pass;
use crate::tables;

/// Limits for servers that answer sooner or later.
const SOON: Limits =
    Limits { first_wait: Duration::from_millis(5), total: Duration::from_secs(3600), ..LIMITS };

/// Limits for servers that stay away: the number of attempts alone counts.
const NEVER: Limits =
    Limits { first_wait: Duration::from_millis(5), total: Duration::ZERO, attempts_min: 3, ..LIMITS };

/// Limits for servers that do not go on with an answer.
const STALLED: Limits = Limits { idle: Duration::from_millis(100), ..NEVER };

/// A request, with names of headers in lower case.
#[derive(Clone, Debug)]
struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
}

impl Request {
    fn range(&self) -> Option<(usize, usize)> {
        let (first, last) = self.headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse::<usize>().ok()? + 1))
    }
}

/// What a server does with a request.
#[derive(Clone, Debug)]
enum Answer {
    /// Sends these bytes.
    Whole(Vec<u8>),
    /// Sends these bytes, each part after a short rest.
    Slow(Vec<u8>),
    /// Sends these bytes, and nothing until the client leaves.
    Stall(Vec<u8>),
}

impl Answer {
    fn of(status: &str, headers: &str, body: &[u8]) -> Self {
        let length = body.len();
        let head =
            format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n");
        Self::Whole([head.as_bytes(), body].concat())
    }

    /// Drops all but the first bytes of the body.
    fn cut(self, body_bytes: usize) -> Vec<u8> {
        let (Self::Whole(bytes) | Self::Slow(bytes) | Self::Stall(bytes)) = self;
        let body = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        bytes[..(body + body_bytes).min(bytes.len())].to_vec()
    }
}

/// A web server on a port of its own.
struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Starts a server. `answer` gets each request, and the number of those before.
    fn start(answer: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, answer) = (listener.local_addr().unwrap(), Arc::new(answer));
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let seen = requests.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(std::io::Result::ok) {
                let (seen, answer) = (seen.clone(), answer.clone());
                std::thread::spawn(move || {
                    let Some(request) = read(&client) else { return };
                    let before = {
                        let mut seen = seen.lock().unwrap();
                        seen.push(request.clone());
                        seen.len() - 1
                    };
                    // A client that has left is no failure of the server.
                    let _ = send(client, answer(&request, before));
                });
            }
        });
        Self { address, requests }
    }

    /// Serves one file with an ETag, as a good server does.
    fn of(file: Vec<u8>) -> Self {
        Self::start(move |request, _| good(request, &file, "\"1\""))
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    fn open(&self, limits: Limits) -> Result<Remote> {
        Remote::open_within(&self.url("x"), limits)
    }
}

fn read(client: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(client).lines().map_while(std::io::Result::ok);
    let first = lines.next()?;
    let mut words = first.split(' ').map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let headers = lines.take_while(|line| !line.is_empty()).filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    });
    Some(Request { method, path, headers: headers.collect() })
}

fn send(mut client: TcpStream, answer: Answer) -> std::io::Result<()> {
    match answer {
        Answer::Whole(bytes) => client.write_all(&bytes),
        Answer::Slow(bytes) => bytes.chunks(bytes.len() / 50 + 1).try_for_each(|part| {
            std::thread::park_timeout(Duration::from_millis(1));
            client.write_all(part)
        }),
        Answer::Stall(bytes) => {
            client.write_all(&bytes)?;
            client.read(&mut [0]).map(drop)
        }
    }
}

/// Answers as a server that knows ranges and conditions.
fn good(request: &Request, file: &[u8], tag: &str) -> Answer {
    if request.headers.get("if-match").is_some_and(|wanted| wanted != tag) {
        return Answer::of("412 Precondition Failed", "", b"");
    }
    let tag = format!("ETag: {tag}\r\n");
    let Some((first, end)) = request.range() else { return Answer::of("200 OK", &tag, file) };
    if first >= file.len() {
        let range = format!("Content-Range: bytes */{}\r\n", file.len());
        return Answer::of("416 Range Not Satisfiable", &range, b"");
    }
    let end = end.min(file.len());
    let range = format!("{tag}Content-Range: bytes {first}-{}/{}\r\n", end - 1, file.len());
    Answer::of("206 Partial Content", &range, &file[first..end])
}

/// Returns bytes that look like no others nearby.
fn bytes(count: usize) -> Vec<u8> {
    (0..count as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as u8).collect()
}

fn said(error: &Error) -> String {
    error.to_string()
}

#[test]
fn a_file_is_read_in_pieces_and_each_piece_once() {
    let (piece, file) = (PIECE_BYTES as usize, bytes(2 * PIECE_BYTES as usize + 1000));
    let server = Server::of(file.clone());
    let remote = server.open(SOON).unwrap();
    let read = |begin: usize, end: usize| {
        let read = remote.read(begin as u64..end as u64).unwrap();
        assert!(read == file[begin..end], "{begin}..{end}");
    };
    assert_eq!(remote.state().bytes, file.len() as u64);
    read(2 * piece + 5, 2 * piece + 9);
    read(10, 10);
    let ranges = |server: &Server| server.requests().iter().map(|r| r.range().unwrap()).collect::<Vec<_>>();
    assert_eq!(ranges(&server), [(0, 1), (2 * piece, file.len())]);
    read(piece - 10, piece + 10);
    read(0, file.len());
    let mut all = ranges(&server);
    all.sort_unstable();
    assert_eq!(all, [(0, 1), (0, piece), (piece, 2 * piece), (2 * piece, file.len())]);
    for request in &server.requests()[1..] {
        assert_eq!(request.headers["if-match"], "\"1\"");
        assert!(!request.headers.contains_key("authorization") && !request.headers.contains_key("cookie"));
    }
}

#[test]
fn a_part_that_does_not_fit_into_memory_is_refused_before_a_request() {
    let server = Server::start(|_, _| {
        let range = format!("ETag: \"1\"\r\nContent-Range: bytes 0-0/{}\r\n", 1u64 << 60);
        Answer::of("206 Partial Content", &range, b"x")
    });
    let error = server.open(SOON).unwrap().read(0..1 << 60).unwrap_err();
    for word in [&*server.url("x"), "1152921504606846976 bytes", "data_memory"] {
        assert!(said(&error).contains(word), "{word} missing in {}", said(&error));
    }
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_part_of_which_the_reader_keeps_its_form_is_read_alone_and_pieces_in_memory_serve_it() {
    let file = bytes(3 * PIECE_BYTES as usize);
    let server = Server::of(file.clone());
    let remote = server.open(SOON).unwrap();
    let range = 100..PIECE_BYTES as usize + 200;
    let keep = |range: &std::ops::Range<usize>| {
        remote.read_to_keep(range.start as u64..range.end as u64).unwrap() == file[range.clone()]
    };
    let before = server.requests().len();
    // In requests of one piece at most. Nothing stays.
    assert!(keep(&range) && keep(&range));
    assert_eq!(server.requests().len() - before, 4);
    assert!(remote.read(0..file.len() as u64).unwrap() == file);
    let before = server.requests().len();
    assert!(keep(&range));
    assert_eq!(server.requests().len(), before);
}

#[test]
fn few_pieces_of_a_long_part_are_under_way_at_a_time() {
    let (begun, most, mut ended) = (Cell::new(0), Cell::new(0), Vec::new());
    let begin = |number: u64| {
        begun.set(begun.get() + 1);
        most.set(most.get().max(begun.get()));
        number * 10
    };
    ahead(5..=40, 7, begin, |number, work| {
        begun.set(begun.get() - 1);
        ended.push((number, work));
        Ok(())
    })
    .unwrap();
    assert_eq!(ended, (5..=40).map(|number| (number, number * 10)).collect::<Vec<_>>());
    assert_eq!((begun.get(), most.get()), (0, 7));
}

#[test]
fn an_empty_file_is_empty() {
    let server = Server::of(Vec::new());
    let object = Object::open(Path::new(&server.url("x")), Access::Anywhere, &()).unwrap();
    assert_eq!((object.len(), server.requests().len()), (0, 1));
}

#[test]
fn what_is_not_there_or_not_given_is_asked_for_once_and_says_what_to_check() {
    for (status, words) in [
        ("404 Not Found", ["no such file (404 Not Found)", "check the URL"]),
        ("403 Forbidden", ["refuses it (403 Forbidden)", "without credentials"]),
        ("401 Unauthorized", ["refuses it (401 Unauthorized)", "s3://"]),
        ("400 Bad Request", ["answers 400 Bad Request", "check the URL"]),
    ] {
        let server = Server::start(move |_, _| Answer::of(status, "", b"no"));
        let error = server.open(SOON).unwrap_err();
        assert!(matches!(error, Error::Remote { .. }) && !error.is_fatal(), "another worker may have rights");
        for word in words.iter().copied().chain([server.url("x").as_str()]) {
            assert!(said(&error).contains(word), "{word} missing in {}", said(&error));
        }
        assert_eq!(server.requests().len(), 1, "{status}");
    }
}

#[test]
fn a_server_that_is_busy_and_a_connection_that_breaks_are_asked_again() {
    let file = bytes(100_000);
    let served = file.clone();
    let server = Server::start(move |request, before| match before {
        0 | 3 => Answer::of("503 Service Unavailable", "", b"busy"),
        1 | 4 => Answer::Whole(Vec::new()),
        // The middle of the body.
        5 => Answer::Whole(good(request, &served, "\"1\"").cut(50_000)),
        6 => Answer::of("429 Too Many Requests", "", b""),
        _ => good(request, &served, "\"1\""),
    });
    let remote = server.open(SOON).unwrap();
    assert!(remote.read(0..100_000).unwrap() == file);
    assert_eq!(server.requests().len(), 8);
}

#[test]
fn a_server_that_stays_away_is_named_with_the_cause() {
    let busy = Server::start(|_, _| Answer::of("503 Service Unavailable", "", b""));
    let error = busy.open(NEVER).unwrap_err();
    let url = busy.url("x");
    for word in [&*url, "stays away: it answers 503", "attempt", "check that the server is up"] {
        assert!(said(&error).contains(word), "{word} missing in {}", said(&error));
    }
    assert_eq!(busy.requests().len(), 3);
    let stalled = Server::start(|_, _| Answer::Stall(b"HTTP/1.1 206 Partial".to_vec()));
    let error = stalled.open(STALLED).unwrap_err();
    assert!(said(&error).contains("the server stays away"), "{}", said(&error));
    // A server that hangs up at once. The port stays its own.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let error = Remote::open_within(&format!("http://{address}/x"), NEVER).unwrap_err();
    assert!(said(&error).contains("the server stays away") && !error.is_fatal(), "{}", said(&error));
}

#[test]
fn requests_are_repeated_for_as_long_as_the_process_says() {
    let (before, later) = (Limits::of_process().total, PATIENCE + Duration::from_secs(1));
    be_patient_for(later);
    let set = Limits::of_process().total;
    be_patient_for(PATIENCE);
    assert_eq!((before, set), (PATIENCE, later));
}

#[test]
fn an_answer_that_stops_in_its_middle_may_pass() {
    let served = bytes(1000);
    let server = Server::start(move |request, _| Answer::Stall(good(request, &served, "\"1\"").cut(500)));
    let file = Http::new(server.url("x").parse().unwrap(), &STALLED).unwrap();
    let state = State { bytes: 1000, tag: None, modified: None, has_ranges: true };
    let failure = bridge::wait(async move { file.get(0..1000, &state).await }).unwrap_err();
    assert!(matches!(failure, Failure::Passing(_)), "{failure:?}");
}

#[test]
fn a_slow_answer_is_an_answer() {
    let file = bytes(50_000);
    let served = file.clone();
    let server = Server::start(move |request, _| match good(request, &served, "\"1\"") {
        Answer::Whole(bytes) => Answer::Slow(bytes),
        other => other,
    });
    assert!(server.open(SOON).unwrap().read(7..40_000).unwrap() == file[7..40_000]);
}

#[test]
fn a_file_that_has_changed_is_refused_for_good() {
    let dated = |time: &str, size: usize| {
        Answer::of(
            "206 Partial Content",
            &format!("Last-Modified: {time}\r\nContent-Range: bytes 0-9/{size}\r\n"),
            &[0; 10],
        )
    };
    let (one, two) = ("Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT");
    type Answers = Box<dyn Fn(&Request, usize) -> Answer + Send + Sync>;
    let by_condition = |request: &Request, before: usize| match before {
        0 => good(request, &[0; 10], "\"1\""),
        _ => good(request, &[1; 10], "\"2\""),
    };
    // A server that does not know conditions.
    let by_tag = |request: &Request, before: usize| {
        let mut plain = request.clone();
        plain.headers.remove("if-match");
        good(&plain, &[0; 10], if before == 0 { "\"1\"" } else { "\"2\"" })
    };
    let by_time = move |_: &Request, before: usize| dated(if before == 0 { one } else { two }, 10);
    let by_size = move |_: &Request, before: usize| dated(one, if before == 0 { 10 } else { 11 });
    let servers: [(&str, Answers); 4] = [
        ("412 Precondition Failed", Box::new(by_condition)),
        ("its ETag is \"2\", it was \"1\"", Box::new(by_tag)),
        ("its Last-Modified is Tue, 02 Jan", Box::new(by_time)),
        ("it has 11 bytes, it had 10", Box::new(by_size)),
    ];
    for (what, answer) in servers {
        let server = Server::start(answer);
        let remote = server.open(SOON).unwrap();
        let error = remote.read(0..10).unwrap_err();
        assert!(error.is_fatal(), "{}", said(&error));
        for word in ["the file has changed since this worker opened it", what, "submit the job anew"] {
            assert!(said(&error).contains(word), "{word} missing in {}", said(&error));
        }
        assert_eq!(server.requests().len(), 2, "{what}");
    }
    let server = Server::start(move |_, _| dated(one, 10));
    server.open(SOON).unwrap().read(0..10).unwrap();
    assert_eq!(server.requests()[1].headers["if-unmodified-since"], one);
}

#[test]
fn a_server_that_gives_no_parts_is_read_as_a_whole_or_refused() {
    let text = b"a,b\n1,2\n3,4\n";
    let server = Server::start(move |_, before| match before {
        // A broken download is begun again.
        1 => Answer::Whole(Answer::of("200 OK", "", text).cut(5)),
        _ => Answer::of("200 OK", "", text),
    });
    let remote = server.open(SOON).unwrap();
    assert!(!remote.state().has_ranges);
    let error = remote.whole(10).unwrap_err();
    for word in ["it ignores `Range`", "12 bytes is larger than the 10 bytes of data_memory"] {
        assert!(said(&error).contains(word), "{word} missing in {}", said(&error));
    }
    let object = Object::open_remote(Path::new("x"), &remote.into(), Access::Anywhere, &()).unwrap();
    assert_eq!(object.slice(0..object.len()).unwrap(), &text[..]);
    assert_eq!(server.requests().len(), 3);

    let server = Server::start(move |request, before| match before {
        0 => good(request, text, "\"1\""),
        _ => Answer::of("200 OK", "", text),
    });
    let error = server.open(SOON).unwrap().read(0..5).unwrap_err();
    assert!(said(&error).contains("instead of a part (it ignores `Range`)"), "{}", said(&error));
    // Without a length nobody would notice that the end is missing.
    let server =
        Server::start(|_, _| Answer::Whole(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\na".to_vec()));
    let error = server.open(SOON).unwrap_err();
    assert!(said(&error).contains("does not say how long the file is"), "{}", said(&error));
}

#[test]
fn a_whole_file_that_never_ends_is_given_up() {
    let text = b"a,b\n1,2\n3,4\n";
    let server = Server::start(move |_, before| match before {
        0 => Answer::of("200 OK", "", text),
        _ => Answer::Stall(Answer::of("200 OK", "", text).cut(5)),
    });
    // The size adds no whole second.
    let remote = server.open(Limits { attempt: Duration::ZERO, ..NEVER }).unwrap();
    let error = remote.whole(100).unwrap_err();
    assert!(said(&error).contains("no whole answer within 0 s"), "{}", said(&error));
}

#[test]
fn redirects_carry_nothing_and_lead_only_where_a_url_may() {
    let server = Server::start(|request, _| {
        let to = |place: &str| Answer::of("302 Found", &format!("Location: {place}\r\n"), b"");
        match request.path.as_str() {
            "/x" => to("/y"),
            "/loop" => to("/loop"),
            "/link" => to("http://169.254.169.254/latest/meta-data?secret=hush"),
            "/user" => to("http://anna:hush@127.0.0.1:1/x"),
            "/file" => to("file:///etc/passwd"),
            _ => good(request, b"0123456789", "\"1\""),
        }
    });
    let open = |path: &str| Remote::open_within(&server.url(path), SOON);
    assert_eq!(open("x").unwrap().read(2..4).unwrap(), &b"23"[..]);
    for request in server.requests() {
        for header in ["authorization", "cookie", "referer"] {
            assert!(!request.headers.contains_key(header), "{request:?}");
        }
    }
    for (path, word) in [
        ("loop", "more than 5 redirects"),
        ("link", "a redirect to `http://169.254.169.254/latest/meta-data`: its host is a link-local address"),
        ("user", "a URL with a user name"),
        ("file", ""),
    ] {
        let error = open(path).unwrap_err();
        assert!(said(&error).contains(word) && !said(&error).contains("hush"), "{}", said(&error));
    }
}

#[test]
fn urls_that_are_not_to_be_read_are_refused_before_a_request() {
    for (url, word) in [
        ("http://169.254.169.254/latest/meta-data", "link-local"),
        ("http://[fe80::1]/x", "link-local"),
        ("https://anna:hush@host/x", "a user name or a password"),
        ("https://host/x?X-Amz-Signature=hush", "its query has `x-amz-signature`"),
        ("s3://bucket/part-*.csv", "a pattern"),
    ] {
        let error = Object::open(Path::new(url), Access::Anywhere, &()).unwrap_err();
        assert!(said(&error).contains(word) && !said(&error).contains("hush"), "{}", said(&error));
    }
}

/// Returns all records of all columns, each as bytes.
fn records(source: &dyn Source) -> Vec<(ColumnSpec, Vec<Vec<u8>>)> {
    let outline = source.outline().clone();
    let all: Vec<usize> = (0..outline.columns.len()).collect();
    let blocks: Vec<_> = (0..outline.blocks.len()).map(|block| source.read(block, &all).unwrap()).collect();
    let column = |(at, spec): (usize, &ColumnSpec)| {
        let blocks = blocks.iter().map(|block| &block[at]);
        let records =
            blocks.flat_map(|column| (0..column.records()).map(|record| column.record(record).to_vec()));
        (spec.clone(), records.collect())
    };
    outline.columns.iter().enumerate().map(column).collect()
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter(columns).unwrap()
}

fn parquet(batch: &RecordBatch, group: usize) -> Vec<u8> {
    let mut file = Vec::new();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(group)).build();
    let mut writer = ArrowWriter::try_new(&mut file, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    file
}

/// Returns files of all formats. Those of texts and archives are longer than what a reader fetches
/// at once.
fn files() -> Vec<(Format, Vec<u8>)> {
    let lines = 200_000;
    let csv: String = (0..lines)
        .map(|at| format!("{at},{},{}\n", at * 7 % 1000, "3.25".to_owned() + &"0".repeat(30)))
        .collect();
    let jsonl: String =
        (0..lines).map(|at| format!("{{\"a\": {at}, \"t\": \"{}\"}}\n", "x".repeat(30))).collect();
    let large = bytes(5 << 20);
    let members: Vec<(String, Vec<u8>)> = (0..3)
        .flat_map(|at| {
            [(format!("{at}.bin"), large[at..].to_vec()), (format!("{at}.cls"), at.to_string().into_bytes())]
        })
        .collect();
    let members: Vec<(&str, &[u8])> =
        members.iter().map(|(name, data)| (name.as_str(), data.as_slice())).collect();
    let table = batch(vec![
        ("id", Arc::new(Int64Array::from_iter_values(0..1000))),
        ("x", Arc::new(Float64Array::from_iter_values((0..1000).map(f64::from)))),
    ]);
    let halves = [table.slice(0, 400), table.slice(400, 600)];
    let mut arrow = arrow_ipc::writer::FileWriter::try_new(Vec::new(), &table.schema()).unwrap();
    let mut stream = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &table.schema()).unwrap();
    for half in &halves {
        arrow.write(half).unwrap();
        stream.write(half).unwrap();
    }
    let tensor =
        ::safetensors::tensor::TensorView::new(::safetensors::Dtype::U16, vec![4, 2], &[7; 16]).unwrap();
    let array =
        |values: &[u8], shape: &str| npy::tests::write(1, &npy::tests::header("<i4", "False", shape), values);
    let two = [
        ("a.npy", npz::tests::array(&[1, 2, 3, 4], "(2, 2)")),
        ("b.npy", npz::tests::array(&[5, 6], "(2,)")),
    ];
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(csv.as_bytes()).unwrap();
    vec![
        (Format::Csv, packed.finish().unwrap()),
        (Format::Csv, zstd::encode_all(csv.as_bytes(), 1).unwrap()),
        (Format::Csv, csv.into_bytes()),
        (Format::Jsonl, jsonl.into_bytes()),
        (Format::Tar, tar::tests::files(&members)),
        (Format::Tfrecord, tfrecord::tests::BY_ANOTHER_WRITER.repeat(40)),
        (Format::Parquet, parquet(&table, 300)),
        (Format::Arrow, arrow.into_inner().unwrap()),
        (Format::Arrow, stream.into_inner().unwrap()),
        (Format::Safetensors, ::safetensors::serialize([("x".to_owned(), tensor)], None).unwrap()),
        (Format::Npz, npz::tests::write(&two, false, false)),
        (Format::Npz, npz::tests::write(&two, true, true)),
        (Format::Npy, array(&bytes(9 << 20), "(589824, 4)")),
        (Format::Idx, idx::tests::write(&[1000, 3], &bytes(3000))),
        (Format::Tokens, bytes(300_000)),
    ]
}

#[test]
fn every_format_reads_from_a_server_what_it_reads_from_a_disk() {
    let tokens = TokensSpec { dtype: TokenType::U16, block: 64, stride: Some(48) };
    for (format, file) in files() {
        let mut spec = DataSpec::of(format, FilesSpec::default());
        spec.tokens = (format == Format::Tokens).then_some(tokens);
        let server = Server::of(file.clone());
        let url = PathBuf::from(server.url("x"));
        let open = |object: &Object| formats::open(&spec, object, "x", &url, &()).unwrap();
        let here = open(&Object::open(&written(&file), Access::Anywhere, &()).unwrap());
        let there = Object::open(&url, Access::Anywhere, &()).unwrap();
        let source = open(&there);
        let name = format.name();
        assert_eq!(source.outline().records(), here.outline().records(), "{name}");
        // As a job does: the whole file is read for its index, then the records.
        let content =
            |source: &dyn Source, object: &Object| source.content(object, Default::default(), &()).unwrap();
        let local = Object::open(&written(&file), Access::Anywhere, &()).unwrap();
        assert_eq!(content(source.as_ref(), &there), content(here.as_ref(), &local), "{name}");
        assert!(records(source.as_ref()) == records(here.as_ref()), "{name}: other records");
        assert_eq!(there.version(), "\"1\"", "{name}");
        let asked: usize =
            server.requests().iter().filter_map(Request::range).map(|(from, to)| to - from).sum();
        // A file is looked at with one byte. Its head and its footer are fetched for themselves.
        let most = file.len() + 1 + 4 * HEAD_BYTES as usize;
        assert!(asked <= most, "{name}: {asked} bytes of {} were fetched", file.len());
    }
}

/// Writes a file that stays until the tests end.
fn written(bytes: &[u8]) -> PathBuf {
    static FOLDER: std::sync::LazyLock<tempfile::TempDir> =
        std::sync::LazyLock::new(|| tempfile::tempdir().unwrap());
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let path = FOLDER.path().join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_compressed_file_on_a_server_is_unpacked_piece_by_piece() {
    let plain = bytes(9 << 20);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&plain).unwrap();
    let file = encoder.finish().unwrap();
    let server = Server::of(file.clone());
    let remote = Arc::new(server.open(SOON).unwrap());
    let object = always_in_pieces(Object::of_remote(Path::new("x"), &remote, Access::InSequence)).unwrap();
    assert_eq!((object.len(), object.is_here()), (plain.len(), false));
    for range in [5 << 20..6 << 20, 0..plain.len(), 10..20] {
        assert!(object.slice(range.clone()).unwrap() == plain[range.clone()], "{range:?}");
    }
    let asked: usize = server.requests().iter().filter_map(Request::range).map(|(from, to)| to - from).sum();
    // Each decoder finds the compressed pieces in the cache. A file is looked at with one byte, and
    // its head is fetched for itself.
    assert!(asked <= file.len() + 1 + HEAD_BYTES as usize, "{asked} bytes of {} were fetched", file.len());
}

#[test]
fn formats_with_random_access_fetch_what_they_need() {
    // Random values are as large in the file as in memory.
    let values = |seed: u64| {
        let bits = move |at: u64| (at + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Arc::new(Int64Array::from_iter_values((0..1_500_000).map(move |at| bits(at) as i64))) as ArrayRef
    };
    let table = batch(vec![("a", values(1)), ("b", values(2))]);
    let array = npy::tests::header("<i8", "False", "(3000000,)");
    let array = npy::tests::write(1, &array, &bytes(24_000_000));
    for (format, file, wanted) in
        [(Format::Parquet, parquet(&table, 500_000), 8_000_000), (Format::Npy, array, 4 << 20)]
    {
        let server = Server::of(file.clone());
        let object = Object::open(Path::new(&server.url("x")), Access::Anywhere, &()).unwrap();
        let spec = DataSpec::of(format, FilesSpec::default());
        let source = formats::open(&spec, &object, "x", Path::new("x"), &()).unwrap();
        source.read(1, &[0]).unwrap();
        let asked: usize =
            server.requests().iter().filter_map(Request::range).map(|(from, to)| to - from).sum();
        // Up to a piece at each end, those with the head and the footer.
        let most = wanted + 4 * PIECE_BYTES as usize;
        assert!(asked < most && asked < file.len(), "{}: {asked} bytes of {}", format.name(), file.len());
    }
}

#[test]
fn a_record_of_an_array_costs_its_own_bytes_in_any_order() {
    const RECORD: usize = 128 << 10;
    let header = npy::tests::header("|u1", "False", "(64, 131072)");
    let file = npy::tests::write(1, &header, &bytes(64 * RECORD));
    for (access, in_block) in [(Access::Anywhere, 1), (Access::InSequence, 32)] {
        let server = Server::of(file.clone());
        let object = Object::open(Path::new(&server.url("x")), access, &()).unwrap();
        let spec = DataSpec::of(Format::Npy, FilesSpec::default());
        let source = formats::open(&spec, &object, "x", Path::new("x"), &()).unwrap();
        let asked = || -> usize {
            server.requests().iter().filter_map(Request::range).map(|(from, to)| to - from).sum()
        };
        let before = asked();
        let block = 40 / in_block;
        let read = source.read(block, &[0]).unwrap();
        assert_eq!(asked() - before, in_block * RECORD, "{access:?}");
        let begin = file.len() - (64 - block * in_block) * RECORD;
        assert!(read[0].bytes() == &file[begin..begin + in_block * RECORD], "{access:?}");
    }
    // So the order `records` is accepted, wherever the data does not fit into memory.
    let server = Server::of(file);
    let list =
        FilesSpec { lists: [("files".to_owned(), vec![server.url("x")])].into(), ..FilesSpec::default() };
    let spec = DataSpec::of(Format::Npy, list.clone());
    // A file that is read in both orders at once has blocks for each.
    let orders = [(Access::InSequence, 32), (Access::Anywhere, 1)];
    let tables = orders.map(|(access, in_block)| {
        let table = tables::open(&spec, &list, 0, None, None, Pass { access, ..Pass::plain() }).unwrap();
        (table, in_block)
    });
    for (table, in_block) in tables {
        let drawn = table.drawn(table.columns(), 64);
        assert_eq!(drawn[0].together.map(|bytes| bytes / RECORD as u64), Some(in_block));
    }
}

#[test]
fn a_lane_that_moves_to_another_worker_costs_one_window_and_one_block_more() {
    const RECORD: usize = 1024;
    let (records, group): (usize, usize) = (8192, 512);
    let (window, micro): (u64, u64) = (2048, 256);
    let content = bytes(records * RECORD);
    let x = FixedSizeBinaryArray::try_from_iter(content.chunks(RECORD)).unwrap();
    let y = Int64Array::from_iter_values((0..records as i64).map(|record| record % 3));
    let table = batch(vec![("x", Arc::new(x) as ArrayRef), ("y", Arc::new(y) as ArrayRef)]);
    let file = parquet(&table, group);
    let server = Server::of(file.clone());
    let text = format!(
        r#"name = "t"
        epochs = 1
        seed = 5
        model = {{ builtin = "softmax" }}
        batch = {{ micro = {micro} }}
        optimizer = {{ kind = "sgd", learning_rate = 0.1 }}
        [data]
        format = "parquet"
        train = {{ files = ["{}"] }}
        inputs = ["x"]
        label = "y"
        shuffle = "window"
        window = {window}
        interleave = 1
        "#,
        server.url("x")
    );
    let spec = proto::spec::parse(&text, Path::new("job.toml"), &[]).unwrap();
    let asked =
        || server.requests().iter().filter_map(Request::range).map(|(from, to)| to - from).sum::<usize>();
    // Reads microbatches as a worker that has nothing in memory. Returns the values, the bytes that
    // it asked for to open the file, and all that it asked for.
    let worker = |microbatches: Range<u64>| {
        let before = asked();
        let data = Dataset::open(&spec, DataSet::Train, None).unwrap();
        let opening = asked() - before;
        let order = spec.order(&data.shards(), Epoch(0));
        let mut values = Vec::new();
        for at in microbatches {
            let found = data.batch(Epoch(0), order.records(at * micro..(at + 1) * micro)).unwrap();
            values.extend_from_slice(found.inputs[0].bytes());
        }
        (values, opening, asked() - before)
    };
    let count = records as u64 / micro;
    let (expected, _, undisturbed) = worker(0..count);
    assert!(undisturbed <= file.len() + 1 + HEAD_BYTES as usize, "{undisturbed} bytes of {}", file.len());
    // In the middle of the second window.
    let moves_at = 3 * window / micro / 2;
    let (first, opening, one) = worker(0..moves_at);
    let (rest, _, other) = worker(moves_at..count);
    assert!([first, rest].concat() == expected, "other records after a move");
    let more = one + other - opening - undisturbed;
    // Bytes are fetched in whole pieces.
    let most = ((window as usize + group) * RECORD).next_multiple_of(PIECE_BYTES as usize);
    assert!(more <= most, "{more} bytes more, expected at most {most}");
}

#[test]
fn a_file_whose_blocks_are_known_is_not_read_to_be_opened() {
    let large = bytes(300_000);
    let list = || tfrecord::List::Bytes(tfrecord::BytesList { value: vec![large.clone().into()] });
    let record = || tfrecord::record([("a".to_owned(), list())]);
    let names: Vec<_> = (0..80).map(|record| format!("{record:03}.a")).collect();
    let members: Vec<_> = names.iter().map(|name| (name.as_str(), large.as_slice())).collect();
    let records_file: Vec<u8> = (0..80).flat_map(|_| record()).collect();
    for (format, file) in [(Format::Tfrecord, records_file), (Format::Tar, tar::tests::files(&members))] {
        let (server, name) = (Server::of(file.clone()), format.name());
        let (spec, path) = (DataSpec::of(format, FilesSpec::default()), server.url("x"));
        let open = |known: Option<&Cuts>| {
            let object = Object::open(Path::new(&path), Access::Anywhere, &()).unwrap();
            let pass = Pass { cuts: known, ..Pass::plain() };
            (formats::open_collecting(&spec, &object, "x", Path::new("x"), pass).unwrap(), object)
        };
        let (whole, _kept) = open(None);
        let cuts = whole.cuts().unwrap().clone();
        assert!(cuts.records().len() > 4, "{name}");
        let before = server.requests().len();
        let (source, _kept) = open(Some(&cuts));
        assert_eq!(source.outline(), whole.outline(), "{name}");
        let asked: usize =
            server.requests()[before..].iter().filter_map(Request::range).map(|(from, to)| to - from).sum();
        assert!(asked < file.len() / 2, "{name}: {asked} bytes of {}", file.len());
        assert!(records(source.as_ref()) == records(whole.as_ref()), "{name}: other records");
    }
}

#[test]
fn an_error_of_a_server_is_not_taken_for_a_damaged_file() {
    let large =
        batch(vec![("x", Arc::new(Float64Array::from_iter_values((0..500_000).map(f64::from))) as ArrayRef)]);
    let mut arrow = arrow_ipc::writer::FileWriter::try_new(Vec::new(), &large.schema()).unwrap();
    let mut stream = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &large.schema()).unwrap();
    arrow.write(&large).unwrap();
    stream.write(&large).unwrap();
    let more = [
        (Format::Parquet, parquet(&large, 100_000)),
        (Format::Arrow, arrow.into_inner().unwrap()),
        (Format::Arrow, stream.into_inner().unwrap()),
    ];
    let large = files().into_iter().chain(more).filter(|(_, file)| file.len() > PIECE_BYTES as usize);
    let mut seen = 0;
    for (format, file) in large {
        let name = format.name();
        let served = file.clone();
        // The first piece is given, all others are refused.
        let server = Server::start(move |request, _| match request.range() {
            Some((0, _)) => good(request, &served, "\"1\""),
            _ => Answer::of("403 Forbidden", "", b""),
        });
        let spec = DataSpec::of(format, FilesSpec::default());
        let open = || {
            let object = Object::open(Path::new(&server.url("x")), Access::Anywhere, &())?;
            let source = formats::open(&spec, &object, "x", Path::new("x"), &())?;
            let last = source.outline().blocks.len() - 1;
            source.read(last, &[0]).map(drop)
        };
        let error = open().unwrap_err();
        assert!(matches!(error, Error::Remote { .. }), "{name}: {}", said(&error));
        assert!(said(&error).contains("403"), "{name}: {}", said(&error));
        seen += 1;
    }
    assert!(seen >= 7, "{seen} files have more than a piece");
}

/// Returns a server that gives a file until the switch is set, and refuses it then.
fn refusing(file: Vec<u8>, refuses: Arc<AtomicBool>) -> Server {
    Server::start(move |request, _| match refuses.load(Ordering::Relaxed) {
        false => good(request, &file, "\"1\""),
        true => Answer::of("403 Forbidden", "", b""),
    })
}

#[test]
fn a_value_that_a_server_does_not_give_is_neither_missing_nor_broken() {
    let tokens = TokensSpec { dtype: TokenType::U16, block: 64, stride: None };
    let mut refused = Vec::new();
    for (format, file) in files() {
        let mut spec = DataSpec::of(format, FilesSpec::default());
        spec.tokens = (format == Format::Tokens).then_some(tokens);
        let refuses = Arc::new(AtomicBool::new(false));
        let server = refusing(file, refuses.clone());
        let object = Object::open(Path::new(&server.url("x")), Access::Anywhere, &()).unwrap();
        let source = formats::open(&spec, &object, "x", Path::new("x"), &()).unwrap();
        let all: Vec<usize> = (0..source.outline().columns.len()).collect();
        refuses.store(true, Ordering::Relaxed);
        object.forget();
        for block in 0..source.outline().blocks.len() {
            match source.read(block, &all) {
                Err(error) => {
                    assert!(matches!(error, Error::Remote { .. }), "{}: {}", format.name(), said(&error));
                    refused.push(format);
                }
                // The whole file is in memory.
                Ok(columns) => {
                    let faults = |column: &Column| {
                        (0..column.records()).filter(|&record| column.fault(record).is_some()).count()
                    };
                    assert_eq!(columns.iter().map(faults).sum::<usize>(), 0, "{}", format.name());
                }
            }
        }
    }
    for format in [
        Format::Arrow,
        Format::Csv,
        Format::Jsonl,
        Format::Npy,
        Format::Parquet,
        Format::Tar,
        Format::Tfrecord,
        Format::Tokens,
    ] {
        assert!(refused.contains(&format), "{} was read from nowhere", format.name());
    }
}

#[test]
fn a_job_that_skips_bad_records_skips_none_that_a_server_does_not_give() {
    let array = npy::tests::header("<f4", "False", "(1310720,)");
    let array = npy::tests::write(1, &array, &[0; 5 << 20]);
    let refuses = Arc::new(AtomicBool::new(false));
    let server = refusing(array, refuses.clone());
    let text = format!(
        r#"name = "t"
        epochs = 1
        seed = 5
        model = {{ builtin = "mlp", loss = "mse" }}
        batch = {{ micro = 2 }}
        optimizer = {{ kind = "sgd", learning_rate = 0.1 }}
        [data]
        format = "npy"
        train = {{ features = ["{0}"], labels = ["{0}"] }}
        on_error = "skip"
        max_bad = 1.0
        "#,
        server.url("x")
    );
    let spec = proto::spec::parse(&text, Path::new("job.toml"), &[]).unwrap();
    let data = Dataset::open(&spec, DataSet::Train, None).unwrap();
    refuses.store(true, Ordering::Relaxed);
    let last = data.len() - 1;
    let error = data.read(Epoch(0), [last], &BTreeSet::new()).unwrap_err();
    assert!(matches!(error, Error::Remote { .. }) && said(&error).contains("403"), "{}", said(&error));
    refuses.store(false, Ordering::Relaxed);
    let (batch, bad) = data.read(Epoch(0), [last], &BTreeSet::new()).unwrap();
    assert_eq!((batch.samples, bad.len()), (1, 0), "a failure leaves nothing behind");
}

/// Objects of a bucket by their keys.
type Objects = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// Answers as an S3 server with the bucket `bucket`, which lists three objects on a page.
fn s3(request: &Request, objects: &Objects) -> Answer {
    let objects = objects.lock().unwrap();
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    if let Some(key) = path.strip_prefix("/bucket/").filter(|key| !key.is_empty()) {
        return match objects.get(&*data_url::decoded(key)) {
            Some(object) => good(request, object, &tag(object)),
            None => Answer::of("404 Not Found", "", b""),
        };
    }
    let value = |name: &str| {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.filter(|(key, _)| *key == name).map(|(_, value)| data_url::decoded(value).into_owned()).next()
    };
    let (prefix, begin) = (value("prefix").unwrap_or_default(), value("continuation-token"));
    let begin = begin.map_or(0, |token| token.parse().unwrap());
    let (mut entries, mut folders) = (Vec::new(), BTreeSet::new());
    for (key, object) in objects.iter().filter(|(key, _)| key.starts_with(&prefix)) {
        match key[prefix.len()..].split_once('/').filter(|_| value("delimiter").is_some()) {
            Some((folder, _)) => {
                folders
                    .insert(format!("<CommonPrefixes><Prefix>{prefix}{folder}/</Prefix></CommonPrefixes>"));
            }
            None => entries.push(format!(
                "<Contents><Key>{key}</Key><Size>{}</Size><ETag>{}</ETag>\
                 <LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>",
                object.len(),
                tag(object)
            )),
        }
    }
    entries.extend(folders);
    let end = entries.len().min(begin + 3);
    let more = if end < entries.len() {
        format!("<NextContinuationToken>{end}</NextContinuationToken>")
    } else {
        String::new()
    };
    let page = entries[begin..end].concat();
    let text = format!("<ListBucketResult>{page}{more}</ListBucketResult>");
    Answer::of("200 OK", "Content-Type: application/xml\r\n", text.as_bytes())
}

/// Makes a server the S3 server of this process, for one test at a time.
fn use_s3(server: &Server) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let endpoint = server.url("");
    let settings = [
        ("AWS_ENDPOINT", endpoint.trim_end_matches('/')),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
    ];
    use_store_settings(settings.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    turn
}

/// Returns the ETag of an object.
fn tag(object: &[u8]) -> String {
    format!("\"{:08x}\"", crc32c::crc32c(object))
}

#[test]
fn a_bucket_that_stays_busy_is_named_with_the_cause_and_asked_a_few_times() {
    let server = Server::start(|_, _| Answer::of("503 Slow Down", "", b""));
    let _turn = use_s3(&server);
    let (url, limits) = ("s3://bucket/data/x.npy", Limits { attempts_min: 2, ..NEVER });
    let error = Remote::open_within(url, limits).unwrap_err();
    assert!(matches!(error, Error::Remote { .. }) && !error.is_fatal(), "another worker may reach it");
    let check = "check the credentials, the region, the endpoint and the network of this machine";
    for word in [url, "the server stays away", "503", "(attempt 2, after ", check] {
        assert!(said(&error).contains(word), "{word} missing in {}", said(&error));
    }
    // The library asks up to four times in each attempt.
    let asked = server.requests().len();
    assert!((2..=8).contains(&asked), "{asked} requests");
}

#[test]
fn images_in_an_object_store_are_those_of_a_disk_and_each_reading_is_one_request() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Objects::default();
    let put = |key: &str, content: &[u8]| {
        objects.lock().unwrap().insert(format!("data/{key}"), content.to_vec());
    };
    for name in ["dog/b.jpg", "dog/b/a.PNG", "dog/b-1.webp", "cat/ü %#+.jpg", "cat/1.jpg", "cat/note.txt"] {
        let place = dir.path().join("train").join(name);
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::fs::write(&place, name).unwrap();
        put(&format!("train/{name}"), name.as_bytes());
    }
    // Some programs write an object without content for each folder.
    ["train/", "train/dog/", "train/dog/b/", "other", "training/cow/1.jpg", "train/.x/1.jpg"]
        .iter()
        .for_each(|key| put(key, b""));
    let served = objects.clone();
    let server = Server::start(move |request, _| s3(request, &served));
    let _turn = use_s3(&server);

    let open = |path: &Path, first: &Path| {
        let folder = Arc::new(Folder::open(path, &())?);
        images::open(folder.clone(), first).map(|source| (source, folder))
    };
    let (path, url) = (dir.path().join("train"), PathBuf::from("s3://bucket/data/train"));
    let (here, _) = open(&path, &path).unwrap();
    let (there, listed) = open(&url, &url).unwrap();
    assert_eq!(there.outline(), here.outline());
    assert_eq!(there.outline().records(), 5);
    let object = Object::copy(&url, Vec::new());
    let content = |source: &dyn Source| source.content(&object, Content::default(), &()).unwrap();
    assert_eq!(content(&*there), content(&*here));
    let listings = server.requests().len();
    assert!(server.requests().iter().all(|request| request.path.starts_with("/bucket?")), "only listings");
    for _epoch in 0..2 {
        for record in 0..5 {
            assert_eq!(there.name(record), here.name(record));
            let (one, other) = (there.read(record as usize, &[0, 1]), here.read(record as usize, &[0, 1]));
            assert!(one.unwrap() == other.unwrap(), "record {record}");
        }
    }
    let requests = server.requests().split_off(listings);
    assert!(requests.iter().all(|request| request.method == "GET"));
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    requests.into_iter().for_each(|request| *counts.entry(request.path).or_default() += 1);
    assert_eq!(counts.into_values().collect::<Vec<_>>(), [2; 5]);

    let other = PathBuf::from("s3://bucket/data/training");
    let refused = |path: &Path, first: &Path| said(&open(path, first).err().unwrap());
    assert!(
        refused(&other, &url)
            .contains("class folder `cow`: the first training folder s3://bucket/data/train has no")
    );
    assert!(refused(&url.join("cat"), &url.join("cat")).contains("data/train/cat: no subfolders"));
    put("train/dog/b.jpg", b"DOG/B.JPG");
    let message = said(&there.read(4, &[0]).unwrap_err());
    for word in ["s3://bucket/data/train/dog/b.jpg", "the file has changed since", "submit the job anew"] {
        assert!(message.contains(word), "{word} missing in {message}");
    }
    let (_, now) = open(&url, &url).unwrap();
    assert!(*now != *listed && now.version() != listed.version(), "{}", now.version());
    objects.lock().unwrap().remove("data/train/cat/1.jpg");
    let message = said(&there.read(0, &[0]).unwrap_err());
    assert!(message.contains("cat/1.jpg: no such file") && message.contains("check the bucket"), "{message}");
    put("train/empty/", b"");
    assert!(refused(&url, &url).contains("data/train/empty: a class folder without images"));
    put("train/cat//2.jpg", b"");
    let message = refused(&url, &url);
    assert!(message.contains("s3://bucket/data/train: ") && message.contains("empty"), "{message}");
    let message = refused(Path::new(&server.url("train")), &url);
    assert!(message.contains("a web server does not list the files of a folder"), "{message}");
}

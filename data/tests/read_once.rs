//! A text file on a web server is read once when it is indexed, with less memory than it has bytes.
//!
//! The memory of a process has one limit, so these tests have a process of their own.
#![cfg(feature = "cloud")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use data::{Dataset, Observer, index, index_observed, is_unchanged, limit_memory};
use proto::spec::{DataSet, JobSpec};

/// Bytes of the memory for data. A file has more.
const MEMORY: u64 = 4 << 20;
const FILE: usize = 13 << 20;

/// A web server of one file, which counts the requests for each range of its bytes.
struct Server {
    address: SocketAddr,
    ranges: Arc<Mutex<BTreeMap<(usize, usize), usize>>>,
}

impl Server {
    fn start(file: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, ranges) = (listener.local_addr().unwrap(), Arc::default());
        let (counts, file) = (Arc::clone(&ranges), Arc::new(file));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (counts, file) = (Arc::clone(&counts), file.clone());
                // A client that has left is no failure of the server.
                std::thread::spawn(move || drop(serve(client, &file, &counts)));
            }
        });
        Self { address, ranges }
    }

    fn url(&self) -> String {
        format!("http://{}/x", self.address)
    }
}

fn serve(
    mut client: TcpStream,
    file: &[u8],
    counts: &Mutex<BTreeMap<(usize, usize), usize>>,
) -> std::io::Result<()> {
    let lines = BufReader::new(&client).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    let range = lines.filter_map(|line| {
        let (first, last) = line
            .to_lowercase()
            .strip_prefix("range: bytes=")?
            .split_once('-')
            .map(|(first, last)| (first.to_owned(), last.trim().to_owned()))?;
        Some((first.parse().ok()?, last.parse::<usize>().ok()?))
    });
    let (first, last) = range.last().expect("each request asks for a part");
    *counts.lock().unwrap().entry((first, last)).or_default() += 1;
    let last = last.min(file.len() - 1);
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\nETag: \"1\"\r\nContent-Range: bytes {first}-{last}/{}\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        file.len(),
        last + 1 - first
    );
    client.write_all(head.as_bytes())?;
    client.write_all(&file[first..=last])
}

/// Counts pieces of reading.
#[derive(Default)]
struct Pieces(AtomicUsize);

impl Observer for Pieces {
    fn open(&self, _: &Path) {}

    fn advance(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn job(format: &str, file: &str, more: &str) -> JobSpec {
    let text = format!(
        "name = \"t\"\nepochs = 1\nmodel = {{ builtin = \"softmax\" }}\nbatch = {{ micro = 1 }}\n\
         optimizer = {{ kind = \"sgd\", learning_rate = 0.1 }}\n[data]\nformat = \"{format}\"\nlabel = \"y\"\ninputs = [\"x\"]\n\
         train = {{ files = [\"{file}\"] }}\n{more}\n"
    );
    proto::spec::parse(&text, Path::new("/job.toml"), &[]).unwrap()
}

/// Returns a text of about so many bytes. `label` gives the label of each record.
fn text(format: &str, bytes: usize, label: impl Fn(usize) -> String) -> String {
    let mut text = if format == "csv" { "x,z,y\n".to_owned() } else { String::new() };
    let wide = "5".repeat(200);
    for record in 0.. {
        if text.len() >= bytes {
            break;
        }
        let (label, x) = (label(record), record % 97);
        match format {
            "csv" => writeln!(text, "{x},0.{wide},{label}").unwrap(),
            _ => writeln!(text, "{{\"z\": \"{wide}\", \"x\": {x}, \"y\": {label}}}").unwrap(),
        }
    }
    text
}

#[test]
fn an_index_asks_for_each_part_of_a_text_once_and_reports_its_progress() {
    limit_memory(MEMORY);
    let folder = tempfile::tempdir().unwrap();
    for format in ["csv", "jsonl"] {
        let content = text(format, FILE, |record| (record / 1000 + 3).to_string());
        let path = folder.path().join(format);
        std::fs::write(&path, &content).unwrap();
        let server = Server::start(content.clone().into_bytes());
        let pieces = Pieces::default();
        let found =
            index_observed(&job(format, &server.url(), ""), DataSet::Train, 0, None, &pieces).unwrap();
        let local = index(&job(format, path.to_str().unwrap(), ""), DataSet::Train, 0, None).unwrap();
        assert_eq!((found.content, found.records), (local.content, local.records), "{format}");
        assert_eq!(found.stamp, format!("{}#\"1\"", content.len()));
        assert_eq!(
            (found.labels, local.labels),
            (Some((3, (found.records as i64 - 1) / 1000 + 3)), found.labels)
        );
        let ranges = server.ranges.lock().unwrap();
        assert!(ranges.values().all(|&count| count == 1), "{format}: {ranges:#?}");
        let bytes: usize = ranges.keys().map(|&(first, last)| last.min(content.len() - 1) + 1 - first).sum();
        // One byte more, because the first request asks whether the server gives parts, and the
        // head of the file, which says whether it is compressed.
        assert_eq!(bytes, content.len() + 1 + 1024, "{format}: {ranges:#?}");
        let pieces = pieces.0.into_inner();
        assert!(pieces >= content.len() / (8 << 20), "{format}: {pieces} pieces");
    }
}

#[test]
fn one_request_says_that_a_file_is_as_it_was_when_it_was_indexed() {
    limit_memory(MEMORY);
    let content = text("csv", 1 << 16, |record| (record % 3).to_string());
    let server = Server::start(content.clone().into_bytes());
    let spec = job("csv", &server.url(), "");
    let found = index(&spec, DataSet::Train, 0, None).unwrap();
    let requests = || server.ranges.lock().unwrap().values().sum::<usize>();
    let before = requests();
    let unchanged = |stamp: &str| is_unchanged(&spec, DataSet::Train, 0, None, stamp, &()).unwrap();
    assert!(unchanged(&found.stamp));
    assert_eq!(requests(), before + 1);
    assert!(!unchanged(&format!("{}#\"2\"", content.len())) && !unchanged(""));

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.csv");
    let (spec, write) =
        (job("csv", path.to_str().unwrap(), ""), |text: &str| std::fs::write(&path, text).unwrap());
    write(&content);
    let found = index(&spec, DataSet::Train, 0, None).unwrap();
    let unchanged = || is_unchanged(&spec, DataSet::Train, 0, None, &found.stamp, &()).unwrap();
    assert!(unchanged());
    write(&content[..content.len() - 1]);
    assert!(!unchanged(), "another size");
    write(&content);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let later = file.metadata().unwrap().modified().unwrap() + std::time::Duration::from_secs(7);
    file.set_modified(later).unwrap();
    assert!(!unchanged(), "written later");
    std::fs::remove_file(&path).unwrap();
    assert!(is_unchanged(&spec, DataSet::Train, 0, None, &found.stamp, &()).is_err());
}

#[test]
fn labels_that_are_collected_on_the_way_count_like_those_that_are_read() {
    limit_memory(MEMORY);
    let folder = tempfile::tempdir().unwrap();
    let odd = |csv: &str, jsonl: &str, format: &str| {
        if format == "csv" { csv.to_owned() } else { jsonl.to_owned() }
    };
    for format in ["csv", "jsonl"] {
        let path = folder.path().join(format!("small.{format}"));
        let file = path.to_str().unwrap();
        let write = |labels: &[String]| {
            let content = text(format, 1 << 15, |record| labels[record % labels.len()].clone());
            std::fs::write(&path, content).unwrap();
        };
        let labels = |more: &str| {
            let spec = job(format, file, more);
            let collected = index(&spec, DataSet::Train, 0, None).map(|found| found.labels);
            let read = Dataset::open(&spec, DataSet::Train, None).and_then(|data| data.label_range());
            let text = |result: data::Result<Option<(i64, i64)>>| result.map_err(|error| error.to_string());
            let (collected, read) = (text(collected), text(read));
            assert_eq!(collected, read, "{format} {more}");
            collected
        };
        let numbers = ["7", "2", "5"].map(str::to_owned);
        write(&numbers);
        assert_eq!(labels(""), Ok(Some((2, 7))));
        let with = |one: String| [&numbers[..], &[one]].concat();
        write(&with(odd("", "null", format)));
        assert!(labels("").unwrap_err().contains("column `y` of record 3 has no value"));
        assert_eq!(labels("missing = { y = 9 }"), Ok(Some((2, 9))));
        assert_eq!(labels("missing = { y = \"skip\" }"), Ok(Some((2, 7))));
        write(&with(odd("cat", "\"cat\"", format)));
        let said = labels("").unwrap_err();
        let line = if format == "csv" { "line 5, column 2 (`y`)" } else { "line 4, column" };
        assert!(said.contains(line), "{said}");
        assert_eq!(labels("on_error = \"skip\""), Ok(Some((2, 7))));
        write(&with("1.5".to_owned()));
        assert!(labels("").unwrap_err().contains("label 1.5 of record 3 is no class number"));
    }
}

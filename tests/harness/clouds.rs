//! A server for tests that answers readers as two clouds do: Google Cloud Storage with its XML
//! interface, and Azure Blob Storage at the paths of its emulator Azurite.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /bucket?list-type=2` | a page of Google's listing |
//! | `GET`, `HEAD /bucket/KEY` | an object, with ranges and conditions |
//! | `GET /devstoreaccount1/bucket?comp=list` | a page of Azure's listing |
//! | `GET`, `HEAD /devstoreaccount1/bucket/KEY` | an object; 403 without a signature |
//!
//! Azure leaves the quotation marks of an ETag out in a listing. The server looks for a signature,
//! and does not check it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use proto::spec::data_url::decoded;

use super::web::{answer, range, read};

/// Account of Azure's emulator.
const ACCOUNT: &str = "/devstoreaccount1";

/// Entries of a page of a listing.
const PAGE: usize = 3;

const MODIFIED: &str = "Thu, 01 Jan 2026 00:00:00 GMT";

/// Objects by their keys.
type Objects = BTreeMap<String, Vec<u8>>;

/// The server, with one bucket. It ends with the test's process.
pub struct Clouds {
    /// URL of both services.
    pub url: String,
    /// Methods and paths of requests.
    requests: Arc<Mutex<Vec<String>>>,
}

impl Clouds {
    pub const BUCKET: &'static str = "bucket";

    /// Serves objects by their keys.
    pub fn start(objects: Objects) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address: SocketAddr = listener.local_addr().expect("it is bound");
        let (objects, requests) = (Arc::new(objects), Arc::<Mutex<Vec<String>>>::default());
        let seen = requests.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (objects, seen) = (objects.clone(), seen.clone());
                // A client that has left is no failure of the server.
                std::thread::spawn(move || drop(serve(client, &objects, &seen)));
            }
        });
        Self { url: format!("http://{address}"), requests }
    }

    /// Returns the environment with which a program reads the bucket of Google Cloud Storage.
    pub fn google(&self) -> [(&str, &str); 2] {
        [("GOOGLE_BASE_URL", self.url.as_str()), ("GOOGLE_SKIP_SIGNATURE", "true")]
    }

    /// Returns the environment with which a program reads the container of Azure's emulator.
    pub fn azure(&self) -> [(&str, &str); 2] {
        [("AZURE_STORAGE_USE_EMULATOR", "true"), ("AZURITE_BLOB_STORAGE_URL", self.url.as_str())]
    }

    /// Returns method and path of each request so far, such as `GET /bucket?list-type=2`, and
    /// forgets them.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.requests.lock().expect("no panic"))
    }
}

fn serve(mut client: TcpStream, objects: &Objects, seen: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let (first, headers) = read(&client);
    let request = first.trim_end_matches(" HTTP/1.1");
    seen.lock().expect("no panic").push(request.to_owned());
    let (method, target) = request.split_once(' ').unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let of_account = path.strip_prefix(ACCOUNT);
    let signature = headers.get("authorization").map(String::as_str).unwrap_or_default();
    if of_account.is_some() && !signature.starts_with("SharedKey devstoreaccount1:") {
        return client.write_all(&answer("403 Forbidden", "", b""));
    }
    let place = of_account.unwrap_or(path).trim_start_matches('/');
    let whole = match place.split_once('/') {
        None if place == Clouds::BUCKET => {
            let page = listing(objects, query, of_account.is_some());
            answer("200 OK", "Content-Type: application/xml\r\n", page.as_bytes())
        }
        Some((Clouds::BUCKET, key)) => match objects.get(&*decoded(key)) {
            Some(object) => part(method, &headers, object),
            None => answer("404 Not Found", "", b""),
        },
        _ => answer("404 Not Found", "", b""),
    };
    client.write_all(&whole)
}

/// Returns the answer for an object.
fn part(method: &str, headers: &BTreeMap<String, String>, object: &[u8]) -> Vec<u8> {
    let tag = format!("\"{}\"", tag(object));
    let about = format!("ETag: {tag}\r\nLast-Modified: {MODIFIED}\r\n");
    if headers.get("if-match").is_some_and(|wanted| *wanted != tag) {
        return answer("412 Precondition Failed", "", b"");
    }
    match range(headers, object) {
        _ if method == "HEAD" => {
            let mut whole = answer("200 OK", &about, object);
            whole.truncate(whole.len() - object.len());
            whole
        }
        Some((first, last)) => {
            let about = format!("{about}Content-Range: bytes {first}-{last}/{}\r\n", object.len());
            answer("206 Partial Content", &about, &object[first..=last])
        }
        None => answer("200 OK", &about, object),
    }
}

/// Returns a page of the objects that a query asks for, as Azure or as Google writes it.
fn listing(objects: &Objects, query: &str, is_azure: bool) -> String {
    let value = |name: &str| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| decoded(value).into_owned())
    };
    let (prefix, has_delimiter) = (value("prefix").unwrap_or_default(), value("delimiter").is_some());
    let begin = value(if is_azure { "marker" } else { "continuation-token" });
    let begin: usize = begin.map_or(0, |token| token.parse().expect("a token of this server"));
    let (mut entries, mut folders) = (Vec::new(), BTreeSet::new());
    for (key, object) in objects.iter().filter(|(key, _)| key.starts_with(&prefix)) {
        match key[prefix.len()..].split_once('/').filter(|_| has_delimiter) {
            Some((folder, _)) => {
                folders.insert(format!("{prefix}{folder}/"));
            }
            None if is_azure => entries.push(format!(
                "<Blob><Name>{key}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified>\
                 <Content-Length>{}</Content-Length><Content-Type>application/octet-stream</Content-Type>\
                 <Etag>{}</Etag></Properties></Blob>",
                object.len(),
                tag(object)
            )),
            None => entries.push(format!(
                "<Contents><Key>{key}</Key><Size>{}</Size><ETag>\"{}\"</ETag>\
                 <LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>",
                object.len(),
                tag(object)
            )),
        }
    }
    entries.extend(folders.into_iter().map(|folder| match is_azure {
        true => format!("<BlobPrefix><Name>{folder}</Name></BlobPrefix>"),
        false => format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"),
    }));
    let end = entries.len().min(begin + PAGE);
    let next = if end < entries.len() { end.to_string() } else { String::new() };
    let page = entries[begin..end].concat();
    match is_azure {
        true => format!(
            "<EnumerationResults><Blobs>{page}</Blobs><NextMarker>{next}</NextMarker></EnumerationResults>"
        ),
        false if next.is_empty() => format!("<ListBucketResult>{page}</ListBucketResult>"),
        false => format!(
            "<ListBucketResult>{page}<NextContinuationToken>{next}</NextContinuationToken></ListBucketResult>"
        ),
    }
}

/// Returns the ETag of an object, without quotation marks.
fn tag(object: &[u8]) -> String {
    format!("0x{:08X}", crc32fast::hash(object))
}

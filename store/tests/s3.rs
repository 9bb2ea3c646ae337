//! Checkpoints over the real S3 protocol, with a real server that is busy, drops answers and
//! becomes unreachable.
#![cfg(feature = "cloud")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../tests/harness/skip.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
mod skip;

#[path = "../../tests/harness/s3.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use more of it")]
#[expect(clippy::disallowed_methods, reason = "the server is found through the environment")]
mod s3;

use std::collections::BTreeMap;

use bytes::Bytes;
use proto::checkpoint::{Error, MANIFEST};
use s3::{Fault, Proxy, S3};
use skip::{Lacks, skipped};
use store::found::Found;
use store::{Folder, PART_BYTES, Stores};

fn stores(proxy: &Proxy) -> Stores {
    let endpoint = format!("http://{}", proxy.address);
    let settings = [
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
    ];
    let owned = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Stores::new(BTreeMap::from(owned))
}

async fn upload(folder: &Folder, file: &str, bytes: &Bytes) -> Result<(), Error> {
    let mut upload = folder.upload(file).await?;
    upload.put(bytes.slice(..7), 2).await?;
    upload.put(bytes.slice(7..), 2).await?;
    upload.finish().await
}

/// Asserts that the error blames the store and not the checkpoint, so that a retry may help.
fn assert_store(error: &Error, what: &str, file: &str) {
    assert!(error.is_retryable(), "{error}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("{what} `s3://bucket/saved/")) && text.contains(file), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_holds_what_was_written_and_a_server_that_fails_is_no_missing_checkpoint() {
    let Some(server) = S3::start() else { return };
    let proxy = Proxy::start(&server);
    let stores = stores(&proxy);
    let job = stores.open("s3://bucket/saved").unwrap().below("a job");
    let folder = job.below("v0000000003");
    let large = Bytes::from((0..PART_BYTES + 10).map(|at| (at % 251) as u8).collect::<Vec<_>>());
    upload(&folder, "large", &large).await.unwrap();
    folder.write("small", Bytes::from_static(b"words")).await.unwrap();
    assert_eq!(job.list().await.unwrap(), ["v0000000003"]);
    assert_eq!(server.keys(), ["saved/a job/v0000000003/large", "saved/a job/v0000000003/small"]);

    for fault in [Fault::Busy, Fault::Drops, Fault::Away] {
        proxy.set(fault);
        assert_store(&upload(&folder, "other", &large).await.unwrap_err(), "write", "v0000000003/other");
        assert_store(&folder.read("small", 9).await.unwrap_err(), "read", "v0000000003/small");
        assert_store(
            &folder.ranges("large", &[0..9, 50..60]).await.unwrap_err(),
            "read",
            "v0000000003/large",
        );
        assert_store(&folder.write(MANIFEST, Bytes::new()).await.unwrap_err(), "write", MANIFEST);
        assert_store(&Found::look(&job).await.unwrap_err(), "list", "a job");
        assert!(proxy.met() >= 5, "{fault:?}: {} connections met it", proxy.met());

        proxy.set(Fault::Nothing);
        assert!(
            matches!(folder.size("other").await, Err(Error::Missing { .. })),
            "{fault:?}: half a file is there"
        );
        let ranges =
            folder.ranges("large", &[3..9, PART_BYTES as u64 - 5..PART_BYTES as u64 + 10]).await.unwrap();
        assert_eq!(ranges, [large.slice(3..9), large.slice(PART_BYTES - 5..)], "{fault:?}");
        assert_eq!(folder.read("small", 9).await.unwrap(), "words", "{fault:?}");
        let found = Found::look(&job).await.unwrap();
        assert!(found.manifests.is_empty() && found.damaged.len() + found.incomplete.len() == 1, "{found:?}");
    }
    upload(&folder, "other", &large).await.unwrap();
    assert_eq!(folder.size("other").await.unwrap(), large.len() as u64);
    folder.remove("small").await.unwrap();
    assert_eq!(server.keys(), [""; 0]);
}

//! Object stores of the clouds, opened by their URLs.
//!
//! `object_store` can open them too, but repeats a request for up to three minutes. The savers and
//! readers of checkpoints retry as well, so an unreachable store would be reported after a quarter
//! of an hour instead of some seconds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{BackoffConfig, ObjectStore, ObjectStoreScheme, Result, RetryConfig};
use url::Url;

/// Returns the limits for retries of one request. They suffice when a busy server refuses one among
/// thousands of parts.
fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(1),
            base: 2.0,
        },
        max_retries: 3,
        retry_timeout: Duration::from_secs(10),
    }
}

/// Says which cryptography HTTPS clients of this process use. A client that is built before has
/// none.
pub fn install_cryptography() {
    // If one is installed already, it is the same one.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
}

/// Opens the store of a URL, in a cloud or not. Returns the store and the path in it. `settings`
/// are those of object stores under their usual names, such as `AWS_REGION`.
///
/// # Errors
/// The URL names no store, or the settings do not suffice for it.
pub fn open(url: &Url, settings: &BTreeMap<String, String>) -> Result<(Arc<dyn ObjectStore>, Path)> {
    install_cryptography();
    // The builders share no trait. Each one ignores settings of the other clouds.
    macro_rules! store {
        ($builder:ty) => {{
            let begun = <$builder>::new().with_url(url.as_str()).with_retry(retry());
            let builder =
                settings.iter().fold(begun, |builder, (key, value)| match key.to_ascii_lowercase().parse() {
                    Ok(key) => builder.with_config(key, value),
                    Err(_) => builder,
                });
            Arc::new(builder.build()?)
        }};
    }
    let (scheme, path) = ObjectStoreScheme::parse(url)?;
    let store: Arc<dyn ObjectStore> = match scheme {
        ObjectStoreScheme::AmazonS3 => store!(AmazonS3Builder),
        ObjectStoreScheme::GoogleCloudStorage => store!(GoogleCloudStorageBuilder),
        ObjectStoreScheme::MicrosoftAzure => store!(MicrosoftAzureBuilder),
        _ => return object_store::parse_url(url).map(|(store, path)| (store.into(), path)),
    };
    Ok((store, path))
}

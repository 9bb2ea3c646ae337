//! Data on a web server that speaks TLS.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use crate::harness::web::Web;
use crate::harness::{ebb, text};
use crate::urls::{clicks, has, job, trained};

/// A door with TLS before a web server. It ends with the test's process.
struct Door {
    url: String,
    /// The certificate of the authority that has signed the server's.
    authority: String,
    folder: TempDir,
}

impl Door {
    fn before(web: &Web) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let (ca, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let signed = params.self_signed(&ca).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let authority = folder.path().join("ca.pem");
        fs::write(&authority, signed.pem()).unwrap();
        let server = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        let server = server.signed_by(&key, &Issuer::new(params, ca)).unwrap();

        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = config.with_single_cert(vec![server.der().clone()], key).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let behind = web.url("").trim_start_matches("http://").trim_end_matches('/').to_owned();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("https://{}/", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            tokio::runtime::Runtime::new().unwrap().block_on(async move {
                let listener = TcpListener::from_std(listener).unwrap();
                while let Ok((client, _)) = listener.accept().await {
                    let (acceptor, behind) = (acceptor.clone(), behind.clone());
                    tokio::spawn(async move {
                        // A client that trusts nobody here hangs up.
                        let Ok(mut client) = acceptor.accept(client).await else { return };
                        let mut server = TcpStream::connect(behind).await.unwrap();
                        drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
                    });
                }
            });
        });
        Self { url, authority: authority.display().to_string(), folder }
    }

    fn url(&self, name: &str) -> String {
        format!("{}{name}", self.url)
    }
}

#[test]
fn a_job_trains_by_tls_with_the_bits_of_a_disk_where_the_authority_is_trusted() {
    let file = fs::read(clicks()).unwrap();
    let web = Web::start(&[("clicks.parquet", file)]);
    let door = Door::before(&web);
    let folder = tempfile::tempdir().unwrap();
    let local = trained(&job(folder.path(), clicks().to_str().unwrap()), &[]);
    fs::remove_dir_all(folder.path().join("out")).unwrap();
    let by_tls = job(folder.path(), &door.url("clicks.parquet"));
    let trusted = [("SSL_CERT_FILE", door.authority.as_str())];
    assert!(trained(&by_tls, &trusted) == local, "other bits by TLS than from a disk");
    assert!(web.seen("clicks.parquet") > 0, "the file came from elsewhere");
}

#[test]
fn a_server_whose_authority_is_not_trusted_is_named_with_what_to_do() {
    let web = Web::start(&[("clicks.parquet", fs::read(clicks()).unwrap())]);
    let door = Door::before(&web);
    let url = door.url("clicks.parquet");
    let none = door.folder.path().join("none.pem");
    // Another authority is trusted.
    fs::write(&none, CertificateParams::default().self_signed(&KeyPair::generate().unwrap()).unwrap().pem())
        .unwrap();
    let out = door.folder.path().join("out");
    let mut run = ebb(["run", "--workers", "1", "--set", "limits.attempts_max=1", "--out"]);
    run.arg(&out).arg(job(door.folder.path(), &url)).env("SSL_CERT_FILE", &none);
    let output = run.output().unwrap();
    assert!(!output.status.success());
    has(&text(&output), &[&url, "invalid peer certificate", "SSL_CERT_FILE"]);
    assert_eq!(web.seen("clicks.parquet"), 0, "the file was asked for");
}

//! Both ends of an encrypted connection: TLS 1.3 and HTTP/2. Each end shows a certificate of the
//! cluster's authority.
//!
//! Sessions are not resumed: a resumption skips the check of the certificate, which may have been
//! replaced or have expired meanwhile. A handshake costs a millisecond, and connections last.

use std::io;
use std::path::Path;
use std::sync::Arc;

use proto::status::Refused;
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio_rustls::{TlsAcceptor, TlsConnector, rustls};

use super::error::Error;
use crate::channel::connection::Io;

const HTTP2: &[u8] = b"h2";

/// Bytes that are read ahead of the first message, to see that there is one.
const AHEAD: usize = 32;

/// TLS settings for the connections of one process.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    pub(super) client: Arc<ClientConfig>,
    /// Settings of servers, if the process has a certificate of its own.
    pub(super) server: Option<Arc<ServerConfig>>,
}

/// Content of the files, in the order of the flags.
#[derive(Clone, Copy, Debug)]
pub(super) struct Files<'a> {
    pub(super) ca: (&'a Path, &'a [u8]),
    /// Certificate and key of this process.
    pub(super) own: Option<[(&'a Path, &'a [u8]); 2]>,
}

impl Tls {
    pub(super) fn of(files: Files<'_>) -> Result<Self, Error> {
        let provider = Arc::new(ring::default_provider());
        let roots = Arc::new(roots(files.ca)?);
        let wrong = |(path, _): (&Path, &[u8]), what| {
            let path = path.to_owned();
            move |error: rustls::Error| Error::Content { what, path, reason: error.to_string() }
        };
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(wrong(files.ca, "--tls-ca"))?
            .with_root_certificates(roots.clone());
        let Some([cert, key]) = files.own else {
            return Ok(Self { client: Arc::new(client_of(client.with_no_client_auth())), server: None });
        };
        let (chain, private) = (chain(cert)?, private_key(key)?);
        let client = client
            .with_client_auth_cert(chain.clone(), private.clone_key())
            .map_err(wrong(cert, "--tls-cert"))?;
        let server = server_of(provider, roots, chain, private).map_err(wrong(cert, "--tls-cert"))?;
        Ok(Self { client: Arc::new(client_of(client)), server: Some(Arc::new(server)) })
    }
}

fn client_of(mut config: ClientConfig) -> ClientConfig {
    config.alpn_protocols = vec![HTTP2.to_vec()];
    config.resumption = Resumption::disabled();
    config
}

fn server_of(
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, rustls::Error> {
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![HTTP2.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn roots((path, pem): (&Path, &[u8])) -> Result<RootCertStore, Error> {
    let what = "--tls-ca";
    let mut roots = RootCertStore::empty();
    for certificate in certificates(what, path, pem)? {
        roots.add(certificate).map_err(|error| content(what, path, error.to_string()))?;
    }
    Ok(roots)
}

fn chain((path, pem): (&Path, &[u8])) -> Result<Vec<CertificateDer<'static>>, Error> {
    certificates("--tls-cert", path, pem)
}

fn certificates(what: &'static str, path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| content(what, path, error.to_string()))?;
    match found.is_empty() {
        true => Err(content(what, path, "expected PEM with a certificate, found none".to_owned())),
        false => Ok(found),
    }
}

fn private_key((path, pem): (&Path, &[u8])) -> Result<PrivateKeyDer<'static>, Error> {
    let found = PrivateKeyDer::from_pem_slice(pem);
    found.map_err(|error| content("--tls-key", path, format!("expected PEM with a private key: {error}")))
}

fn content(what: &'static str, path: &Path, reason: String) -> Error {
    Error::Content { what, path: path.to_owned(), reason }
}

/// Opens an encrypted connection that both ends have accepted.
///
/// # Errors
/// An error of the network, or an error that wraps [`Refused`].
pub(super) async fn connect(
    config: Arc<ClientConfig>,
    host: &str,
    io: Box<dyn Io>,
) -> io::Result<Box<dyn Io>> {
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let has_own = config.client_auth_cert_resolver.has_certs();
    let stream = TlsConnector::from(config).connect(name, io).await;
    // The buffer is smaller than all later reads, so those bypass it.
    let mut stream = BufReader::with_capacity(AHEAD, stream.map_err(|error| explain(error, has_own))?);
    // In TLS 1.3 this end has finished before the server looks at its certificate. A server that
    // accepts the certificate then sends HTTP/2's first bytes.
    if stream.fill_buf().await.map_err(|error| explain(error, has_own))?.is_empty() {
        let message = "the server closed the connection before it said anything";
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
    }
    Ok(Box::new(stream))
}

/// Accepts an encrypted connection.
///
/// # Errors
/// An error of the network, or a defect of the client's certificate.
pub(super) async fn accept<T: Io>(config: Arc<ServerConfig>, io: T) -> io::Result<Box<dyn Io>> {
    Ok(Box::new(TlsAcceptor::from(config).accept(io).await?))
}

/// Returns in a few fixed words why a server refused a connection.
pub(super) fn why(error: &io::Error) -> &'static str {
    let Some(cause) = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>()) else {
        return match error.kind() {
            io::ErrorKind::InvalidData => "not encrypted",
            io::ErrorKind::PermissionDenied => "a process of another user",
            _ => "handshake broken off",
        };
    };
    match cause {
        rustls::Error::NoCertificatesPresented => "no certificate",
        rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        ) => "an expired certificate",
        // A signature is bad if it comes from another authority with an equal name. All authorities
        // of `ebb certs init` have the same name.
        rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => "a certificate of another authority",
        rustls::Error::InvalidCertificate(_) => "a bad certificate",
        rustls::Error::AlertReceived(_) => "the client does not trust this server",
        _ => "not TLS 1.3 as it should be",
    }
}

/// Explains a failed handshake to a user at the client's end.
fn explain(error: io::Error, has_own: bool) -> io::Error {
    let Some(cause) = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>()) else {
        return error;
    };
    let own = match has_own {
        true => "this process's certificate (--tls-cert)",
        false => "a connection without a certificate (give one with --tls-cert and --tls-key)",
    };
    let ours = |what: &str| Refused(format!("the server refused {own}: {what}"));
    let theirs = |what: String| Refused(format!("the server's certificate is not good: {what}"));
    let refused = match cause {
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateRequired => ours("it wants one"),
            AlertDescription::CertificateExpired => ours("it has expired, or is not valid yet"),
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                ours("it is not of an authority that the server trusts")
            }
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied => ours(&format!("{alert:?}")),
            _ => return error,
        },
        rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => theirs("it is not of the authority in --tls-ca".to_owned()),
        rustls::Error::InvalidCertificate(reason) => theirs(reason.to_string()),
        rustls::Error::InvalidMessage(_) => {
            let message =
                "no TLS on the other end; is the server started with --tls-cert, or is its URL http://?";
            return io::Error::new(io::ErrorKind::InvalidData, message);
        }
        _ => return error,
    };
    io::Error::other(refused)
}

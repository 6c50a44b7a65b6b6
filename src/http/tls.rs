//! TLS to destinations. Every file is read and checked at start, and an error names the setting.
//!
//! The connector is like ureq's, but takes a configuration of rustls, which may have a verifier of its own
//! ([`Pinned`]).

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ALL_VERSIONS, ClientConfig, ClientConnection, RootCertStore};
use ureq::Error;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport,
    TransportAdapter,
};
use url::Url;

use super::pinned::Pinned;
use super::proxy::{host_and_port, left};
use crate::config::{self, Config, ConfigError, Destination, Roots, TlsVersion};
use crate::provider::{MISSING, provider};

/// Builds the TLS configurations of destinations.
#[derive(Default)]
pub(super) struct TlsSettings {
    /// The system's certificates, read once for all destinations.
    system: Option<Arc<RootCertStore>>,
}

/// A client certificate with its chain, and its key.
type ClientIdentity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl TlsSettings {
    /// The TLS of one destination, which all its agents share.
    pub(super) fn of(
        &mut self,
        destination: &Destination,
        config: &Config,
    ) -> Result<TlsConnector, ConfigError> {
        let Destination { name, tls, url, .. } = destination;
        let Some(provider) = provider() else {
            if url.scheme() == "http" {
                return Ok(TlsConnector::default());
            }
            return Err(ConfigError::new(
                format!("destinations.{name}.url"),
                format!("https needs cryptography, and {MISSING}"),
            ));
        };
        let provider = speaking(tls.min_version, provider);
        let (key, roots) = match &tls.roots {
            Some(roots) => (format!("destinations.{name}.tls.roots"), roots),
            None => ("OUTBOX_TLS_ROOTS".to_owned(), &config.tls_roots),
        };
        let verifier = self
            .verifier(roots, url, &provider)
            .map_err(|reason| ConfigError::new(key, reason))?;
        let identity = identity(tls, &provider).map_err(|(key, reason)| {
            ConfigError::new(format!("destinations.{name}.{key}"), reason)
        })?;
        let bad = |error: rustls::Error| {
            ConfigError::new(format!("destinations.{name}.tls"), error.to_string())
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(ALL_VERSIONS)
            .map_err(bad)?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let config = match identity {
            Some((chain, key)) => builder.with_client_auth_cert(chain, key).map_err(bad)?,
            None => builder.with_no_client_auth(),
        };
        Ok(TlsConnector(Some(Arc::new(config))))
    }

    fn verifier(
        &mut self,
        roots: &Roots,
        url: &Url,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ServerCertVerifier>, String> {
        let of = |roots: Arc<RootCertStore>| {
            WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(provider))
                .build()
                .map_err(|error| error.to_string())
        };
        Ok(match roots {
            Roots::Bundled => of(bundled_roots())?,
            // Without TLS the system's certificates are not read: a container may have none.
            Roots::System if url.scheme() == "http" => of(bundled_roots())?,
            Roots::System => {
                let roots = match &self.system {
                    Some(roots) => Arc::clone(roots),
                    None => system_roots()?,
                };
                of(Arc::clone(self.system.insert(roots)))?
            }
            Roots::File(path) => {
                let certificates = read_certificates(path)?;
                let mut roots = RootCertStore::empty();
                roots.add_parsable_certificates(certificates.iter().cloned());
                Arc::new(Pinned::new(of(Arc::new(roots))?, certificates))
            }
        })
    }
}

fn bundled_roots() -> Arc<RootCertStore> {
    Arc::new(RootCertStore {
        roots: webpki_roots::TLS_SERVER_ROOTS.to_vec(),
    })
}

/// Restricts the provider to the allowed versions: rustls offers only versions for which it has cipher suites.
fn speaking(oldest: TlsVersion, provider: Arc<CryptoProvider>) -> Arc<CryptoProvider> {
    match oldest {
        TlsVersion::V1_2 => provider,
        TlsVersion::V1_3 => {
            let mut provider = CryptoProvider::clone(&provider);
            provider
                .cipher_suites
                .retain(|suite| suite.tls13().is_some());
            Arc::new(provider)
        }
    }
}

fn system_roots() -> Result<Arc<RootCertStore>, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Systems may have old certificates that rustls cannot read.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first();
        let why = why.map_or_else(|| "none are installed".to_owned(), ToString::to_string);
        return Err(format!(
            "cannot load the system's trusted certificates: {why}"
        ));
    }
    Ok(Arc::new(roots))
}

fn is_readable(certificate: &CertificateDer<'static>) -> Result<(), rustls::Error> {
    RootCertStore::empty().add(certificate.clone())
}

/// The TLS settings of endpoints.
pub(super) fn of_endpoints(config: &Config) -> config::Tls {
    config::Tls {
        client_cert_file: config.endpoint_client_cert_file.clone(),
        client_key_file: config.endpoint_client_key_file.clone(),
        ..config::Tls::default()
    }
}

/// Checks the client certificate for endpoints.
pub(super) fn check_endpoints(config: &Config) -> Result<(), ConfigError> {
    let Some(provider) = provider() else {
        return Ok(());
    };
    let checked = identity(&of_endpoints(config), &provider).map(drop);
    checked.map_err(|(key, reason)| {
        let setting = match key {
            "tls.client_key_file" => "OUTBOX_ENDPOINT_CLIENT_KEY_FILE",
            _ => "OUTBOX_ENDPOINT_CLIENT_CERT_FILE",
        };
        ConfigError::new(setting, reason)
    })
}

/// The client certificate for a destination. An error comes with the setting that is invalid.
fn identity(
    tls: &config::Tls,
    provider: &CryptoProvider,
) -> Result<Option<ClientIdentity>, (&'static str, String)> {
    let (cert_file, key_file) = match (&tls.client_cert_file, &tls.client_key_file) {
        (None, None) => return Ok(None),
        (Some(cert_file), Some(key_file)) => (cert_file, key_file),
        _ => {
            let reason =
                "client_cert_file and client_key_file go together: set both or neither".to_owned();
            return Err(("tls", reason));
        }
    };
    let chain = read_certificates(cert_file).map_err(|reason| ("tls.client_cert_file", reason))?;
    let in_key_file = |reason| ("tls.client_key_file", reason);
    let key = read_key(key_file).map_err(in_key_file)?;
    check_key(&chain, key.clone_key(), provider)
        .map_err(|reason| in_key_file(format!("{}: {reason}", shown(key_file))))?;
    Ok(Some((chain, key)))
}

fn check_key(
    chain: &[CertificateDer<'static>],
    key: PrivateKeyDer<'static>,
    provider: &CryptoProvider,
) -> Result<(), String> {
    let signer = provider
        .key_provider
        .load_private_key(key)
        .map_err(|error| format!("the key cannot be used: {error}"))?;
    let belongs_to = |certificate: &CertificateDer<'static>| {
        CertifiedKey::new(vec![certificate.clone()], Arc::clone(&signer)).keys_match()
    };
    let mut belongs = chain.iter().map(belongs_to);
    match belongs.next() {
        Some(Ok(())) => Ok(()),
        Some(Err(rustls::Error::InconsistentKeys(_))) | None => {
            Err(match belongs.position(|belongs| belongs.is_ok()) {
                Some(others_before) => format!(
                    "the key belongs to certificate {} of client_cert_file: put that certificate first, followed by its chain",
                    others_before + 2
                ),
                None => "the key does not belong to the certificate in client_cert_file".to_owned(),
            })
        }
        Some(Err(error)) => Err(format!("the certificate cannot be used: {error}")),
    }
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let mut certificates = Vec::new();
    for der in CertificateDer::pem_slice_iter(&read(path)?) {
        let der = der.map_err(|error| damaged(path, &error))?;
        is_readable(&der).map_err(|error| {
            let number = certificates.len() + 1;
            format!(
                "{}: certificate {number} cannot be used: {error}",
                shown(path)
            )
        })?;
        certificates.push(der);
    }
    if certificates.is_empty() {
        return Err(format!(
            "{}: no certificate found (BEGIN CERTIFICATE)",
            shown(path)
        ));
    }
    Ok(certificates)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let text = read(path)?;
    // PKCS #8 marks encrypted keys in the first line, older OpenSSL files in the second.
    let encrypted = ["BEGIN ENCRYPTED PRIVATE KEY", "Proc-Type: 4,ENCRYPTED"];
    if encrypted.iter().any(|mark| contains(&text, mark)) {
        return Err(format!(
            "{}: the key is encrypted, and the relay cannot ask for a password: decrypt the key, for example with openssl pkey",
            shown(path)
        ));
    }
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            format!("{}: no private key found (BEGIN PRIVATE KEY)", shown(path))
        }
        error => damaged(path, &error),
    })
}

fn contains(text: &[u8], mark: &str) -> bool {
    text.windows(mark.len()).any(|part| part == mark.as_bytes())
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", shown(path)))
}

fn shown(path: &Path) -> String {
    format!("{path:?}")
}

/// The error of a damaged file. It shows no content of the file, which may be a key.
fn damaged(path: &Path, error: &pem::Error) -> String {
    let what = match error {
        pem::Error::MissingSectionEnd { .. } => "a section has no END line",
        pem::Error::IllegalSectionStart { .. } => "a BEGIN line is malformed",
        pem::Error::Base64Decode(_) => "a section is not base64",
        _ => "not a PEM file",
    };
    format!("{}: {what}", shown(path))
}

/// The TLS connector of all agents of a destination: they share one configuration and its session cache. `None`: only
/// for `http`.
#[derive(Debug, Clone, Default)]
pub(super) struct TlsConnector(Option<Arc<ClientConfig>>);

impl<In: Transport> Connector<In> for TlsConnector {
    type Out = Either<In, TlsTransport<In>>;

    fn connect(
        &self,
        details: &ConnectionDetails,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        let Some(transport) = chained else {
            return Ok(None);
        };
        if !details.needs_tls() {
            return Ok(Some(Either::A(transport)));
        }
        let config = self.0.as_ref().ok_or(Error::TlsRequired)?;
        let host = details.uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| Error::Tls("the host of the URL is not a valid name"))?;
        let mut conn = ClientConnection::new(Arc::clone(config), name)?;
        let mut sock = TransportAdapter::new(transport, Arc::clone(&details.current_time));
        sock.set_timeout(left(details));
        conn.complete_io(&mut sock)
            .map_err(|error| match error.into() {
                Error::Io(error) => Error::Other(Box::new(HandshakeFailed {
                    host: host_and_port(details.uri),
                    error,
                })),
                other => other,
            })?;
        let (input, output) = (
            details.config.input_buffer_size(),
            details.config.output_buffer_size(),
        );
        Ok(Some(Either::B(TlsTransport {
            buffers: LazyBuffers::new(input, output),
            conn,
            sock,
            written: 0,
        })))
    }
}

/// A connection with TLS.
pub(super) struct TlsTransport<In: Transport> {
    buffers: LazyBuffers,
    conn: ClientConnection,
    sock: TransportAdapter<In>,
    /// The bytes of the output that are encrypted: a write that has failed may be repeated.
    written: usize,
}

impl<In: Transport> Transport for TlsTransport<In> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.sock.set_timeout(timeout);
        while self.written < amount {
            let output = &self.buffers.output()[self.written..amount];
            self.written += self.conn.writer().write(output)?;
            while self.conn.wants_write() {
                self.conn.write_tls(&mut self.sock)?;
            }
        }
        while self.conn.wants_write() {
            self.conn.write_tls(&mut self.sock)?;
        }
        self.written = 0;
        Ok(())
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.sock.set_timeout(timeout);
        loop {
            let input = self.buffers.input_append_buf();
            match self.conn.reader().read(input) {
                Ok(amount) => {
                    self.buffers.input_appended(amount);
                    return Ok(amount > 0);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            // Writes nothing, unlike the streams of rustls: a response can be read after a write has failed.
            self.conn.read_tls(&mut self.sock)?;
            let invalid = |error| io::Error::new(ErrorKind::InvalidData, error);
            self.conn.process_new_packets().map_err(invalid)?;
        }
    }

    fn is_open(&mut self) -> bool {
        self.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}

impl<In: Transport> fmt::Debug for TlsTransport<In> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsTransport").finish_non_exhaustive()
    }
}

/// What to do about a fault whose name in rustls does not say it.
fn advice(error: &io::Error) -> &'static str {
    use rustls::{CertificateError, Error, InvalidMessage};

    let fault = error.get_ref().and_then(|error| error.downcast_ref());
    match fault {
        Some(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            " (no trusted root has signed it, or the receiver does not send the whole chain: see OUTBOX_TLS_ROOTS)"
        }
        Some(Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            " (the receiver may expect http:// on this port)"
        }
        _ => "",
    }
}

/// The TLS handshake failed, so nothing was sent.
#[derive(Debug, thiserror::Error)]
#[error("TLS handshake with {host}: {error}{}", advice(.error))]
pub(super) struct HandshakeFailed {
    /// Host and port.
    pub(super) host: String,
    pub(super) error: io::Error,
}

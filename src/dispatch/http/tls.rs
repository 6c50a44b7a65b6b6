//! The TLS configuration of destinations.
//!
//! Every file is read and checked at start, and an error names the setting. Without this check, a key that does
//! not match its certificate would make ureq panic later.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{ALL_VERSIONS, ClientConfig, RootCertStore};
use ureq::Error;
use ureq::tls::{
    Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, TlsProvider, parse_pem,
};
use ureq::unversioned::transport::{ConnectionDetails, Connector, RustlsConnector, Transport};
use url::Url;

use crate::config::{Config, ConfigError, Destination, Roots, Tls, TlsVersion};
use crate::provider::{MISSING, provider};

type Certificates = Arc<Vec<Certificate<'static>>>;

/// Builds the TLS configurations of destinations.
#[derive(Default)]
pub(super) struct TlsSettings {
    /// The system's certificates, read once for all destinations.
    system: Option<Certificates>,
}

impl TlsSettings {
    /// The configuration of one destination, which all its agents share.
    pub(super) fn of(
        &mut self,
        destination: &Destination,
        config: &Config,
    ) -> Result<TlsConfig, ConfigError> {
        let Destination { name, tls, url, .. } = destination;
        let Some(provider) = provider() else {
            if url.scheme() == "http" {
                return Ok(TlsConfig::default());
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
        let roots = self
            .roots(roots, url)
            .map_err(|reason| ConfigError::new(key, reason))?;
        let client = client_certificate(tls, &provider).map_err(|(key, reason)| {
            ConfigError::new(format!("destinations.{name}.{key}"), reason)
        })?;
        ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(ALL_VERSIONS)
            .map_err(|error| {
                ConfigError::new(format!("destinations.{name}.tls"), error.to_string())
            })?;
        Ok(TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .unversioned_rustls_crypto_provider(provider)
            .root_certs(roots)
            .client_cert(client)
            .build())
    }

    fn roots(&mut self, roots: &Roots, url: &Url) -> Result<RootCerts, String> {
        Ok(match roots {
            Roots::Bundled => RootCerts::WebPki,
            // Without TLS the system's certificates are not read: a container may have none.
            Roots::System if url.scheme() == "http" => RootCerts::WebPki,
            Roots::System => {
                let certificates = match &self.system {
                    Some(certificates) => Arc::clone(certificates),
                    None => system_roots()?,
                };
                RootCerts::Specific(Arc::clone(self.system.insert(certificates)))
            }
            Roots::File(path) => {
                let certificates = read_certificates(path)?;
                RootCerts::Specific(Arc::new(certificates))
            }
        })
    }
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

fn system_roots() -> Result<Certificates, String> {
    let found = rustls_native_certs::load_native_certs();
    let certificates: Vec<_> = found
        .certs
        .iter()
        // Systems may have old certificates that rustls cannot read.
        .filter(|certificate| is_readable(certificate).is_ok())
        .map(|certificate| Certificate::from_der(certificate).to_owned())
        .collect();
    if certificates.is_empty() {
        let why = found.errors.first();
        let why = why.map_or_else(|| "none are installed".to_owned(), ToString::to_string);
        return Err(format!(
            "cannot load the system's trusted certificates: {why}"
        ));
    }
    Ok(Arc::new(certificates))
}

fn is_readable(certificate: &CertificateDer<'static>) -> Result<(), rustls::Error> {
    RootCertStore::empty().add(certificate.clone())
}

/// The client certificate for a destination. An error comes with the setting that is invalid.
fn client_certificate(
    tls: &Tls,
    provider: &CryptoProvider,
) -> Result<Option<ClientCert>, (&'static str, String)> {
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
    let (key, of_ureq) = read_key(key_file).map_err(in_key_file)?;
    check_key(&chain, key, provider)
        .map_err(|reason| in_key_file(format!("{}: {reason}", shown(key_file))))?;
    Ok(Some(ClientCert::new_with_certs(&chain, of_ureq)))
}

fn check_key(
    chain: &[Certificate<'static>],
    key: PrivateKeyDer<'static>,
    provider: &CryptoProvider,
) -> Result<(), String> {
    let signer = provider
        .key_provider
        .load_private_key(key)
        .map_err(|error| format!("the key cannot be used: {error}"))?;
    let belongs_to = |certificate: &Certificate<'_>| {
        let certificate = CertificateDer::from(certificate.der().to_vec());
        CertifiedKey::new(vec![certificate], Arc::clone(&signer)).keys_match()
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

fn read_certificates(path: &Path) -> Result<Vec<Certificate<'static>>, String> {
    let mut certificates = Vec::new();
    for item in parse_pem(&read(path)?) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| damaged(path, &error))? {
            let der = CertificateDer::from(certificate.der().to_vec());
            is_readable(&der).map_err(|error| {
                let number = certificates.len() + 1;
                format!(
                    "{}: certificate {number} cannot be used: {error}",
                    shown(path)
                )
            })?;
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(format!(
            "{}: no certificate found (BEGIN CERTIFICATE)",
            shown(path)
        ));
    }
    Ok(certificates)
}

/// Reads the first key, as a type of rustls and as a type of ureq. Neither type converts to the other.
fn read_key(path: &Path) -> Result<(PrivateKeyDer<'static>, PrivateKey<'static>), String> {
    let text = read(path)?;
    // PKCS #8 marks encrypted keys in the first line, older OpenSSL files in the second.
    let encrypted = ["BEGIN ENCRYPTED PRIVATE KEY", "Proc-Type: 4,ENCRYPTED"];
    if encrypted.iter().any(|mark| contains(&text, mark)) {
        return Err(format!(
            "{}: the key is encrypted, and the relay cannot ask for a password: decrypt the key, for example with openssl pkey",
            shown(path)
        ));
    }
    let of_ureq = PrivateKey::from_pem(&text);
    match (PrivateKeyDer::from_pem_slice(&text), of_ureq) {
        (Ok(key), Ok(of_ureq)) => Ok((key, of_ureq)),
        (Err(pem::Error::NoItemsFound), _) => Err(format!(
            "{}: no private key found (BEGIN PRIVATE KEY)",
            shown(path)
        )),
        (Err(error), _) => Err(damaged(path, &Error::Pem(error))),
        (_, Err(error)) => Err(damaged(path, &error)),
    }
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
fn damaged(path: &Path, error: &Error) -> String {
    let what = match error {
        Error::Pem(pem::Error::MissingSectionEnd { .. }) => "a section has no END line",
        Error::Pem(pem::Error::IllegalSectionStart { .. }) => "a BEGIN line is malformed",
        Error::Pem(pem::Error::Base64Decode(_)) => "a section is not base64",
        _ => "not a PEM file",
    };
    format!("{}: {what}", shown(path))
}

/// The TLS connector of all agents of a destination: they share one rustls configuration and its session cache.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedTls(Arc<RustlsConnector>);

impl<In: Transport> Connector<In> for SharedTls {
    type Out = <RustlsConnector as Connector<In>>::Out;

    fn connect(
        &self,
        details: &ConnectionDetails,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        self.0
            .connect(details, chained)
            .map_err(|error| match error {
                Error::Io(error) => Error::Other(Box::new(HandshakeFailed(error))),
                other => other,
            })
    }
}

/// The TLS handshake failed, so nothing was sent.
#[derive(Debug)]
pub(super) struct HandshakeFailed(pub(super) io::Error);

impl fmt::Display for HandshakeFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TLS handshake: {}", self.0)
    }
}

impl std::error::Error for HandshakeFailed {}

//! The connection to a destination: TLS and the proxy.

use std::fmt;
use std::path::PathBuf;

use url::Url;

use crate::config::text::{shown_url, url};
use crate::words::words;

/// The TLS settings of a destination.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tls {
    /// The trusted root certificates. `None`: `OUTBOX_TLS_ROOTS`.
    pub roots: Option<Roots>,
    /// A PEM file with the relay's client certificate and its chain (mTLS).
    pub client_cert_file: Option<PathBuf>,
    /// A PEM file with the key of the client certificate.
    pub client_key_file: Option<PathBuf>,
    /// The minimum TLS version.
    pub min_version: TlsVersion,
}

/// The trusted root certificates.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Roots {
    /// Mozilla's list, compiled in.
    #[default]
    Bundled,
    /// The system's list.
    System,
    /// The certificates in a PEM file, and no others.
    File(PathBuf),
}

impl fmt::Display for Roots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bundled => f.pad("bundled"),
            Self::System => f.pad("system"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl Roots {
    /// Reads the value of the setting. The error is the reason.
    pub(in crate::config) fn read(word: &str) -> Result<Self, String> {
        match word {
            "bundled" => Ok(Self::Bundled),
            "system" => Ok(Self::System),
            "" => Err("must not be empty".to_owned()),
            path => Ok(Self::File(path.into())),
        }
    }
}

words! {
    setting:
    /// A version of TLS.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    #[non_exhaustive]
    pub enum TlsVersion {
        /// 1.2, or 1.3 if the receiver supports it.
        #[default]
        V1_2 = "1.2",
        /// 1.3 only.
        V1_3 = "1.3",
    }
}

/// The HTTP proxy to a destination. `HTTP_PROXY` and similar variables are ignored.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Proxy {
    /// No proxy.
    #[default]
    Direct,
    /// The proxy at this URL.
    Via(Url),
}

impl fmt::Display for Proxy {
    /// Without password and query.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct => f.pad("direct"),
            Self::Via(url) => f.pad(&shown_url(url)),
        }
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Proxy {
    /// Parses `direct` or the URL of a proxy. The error is the reason.
    pub(in crate::config) fn of(text: &str) -> Result<Self, String> {
        match text {
            "direct" => Ok(Self::Direct),
            text => url(text).map(Self::Via),
        }
    }
}

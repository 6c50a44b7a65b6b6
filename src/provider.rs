//! The cryptography of the process, which TLS and asymmetric signatures use.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// What to do where there is none.
pub(crate) const MISSING: &str = "this build has none: give diesel-outbox the feature `ring` or `aws-lc-rs`, or install a CryptoProvider of rustls before";

/// The provider that the application has installed, or ours. It is passed on explicitly: what rustls chooses by itself
/// depends on the features of all that is built together.
pub(crate) fn provider() -> Option<Arc<CryptoProvider>> {
    CryptoProvider::get_default().cloned().or_else(compiled_in)
}

#[cfg(feature = "ring")]
fn compiled_in() -> Option<Arc<CryptoProvider>> {
    Some(Arc::new(rustls::crypto::ring::default_provider()))
}

#[cfg(all(feature = "aws-lc-rs", not(feature = "ring")))]
fn compiled_in() -> Option<Arc<CryptoProvider>> {
    Some(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
}

#[cfg(not(any(feature = "ring", feature = "aws-lc-rs")))]
fn compiled_in() -> Option<Arc<CryptoProvider>> {
    None
}

//! The cryptography provider of the process, for TLS.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// The end of an error: there is no provider, and what to do about it.
pub(crate) const MISSING: &str = "this build has none: enable the feature `ring` or `aws-lc-rs` of diesel-outbox, or install a CryptoProvider of rustls first";

/// The provider that the application has installed, otherwise the provider of this build. It is passed to rustls
/// explicitly: the default of rustls depends on the features of all crates in the build.
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

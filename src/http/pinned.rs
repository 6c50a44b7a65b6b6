//! Accepts a receiver's certificate that is itself one of the configured roots, as curl does.
//!
//! `openssl req -x509` makes a certificate that signs itself and says that it is an authority. rustls refuses such a
//! certificate for a server. An operator who has put exactly this certificate into a file of `roots` means it: only the
//! name and the time are checked further.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};

/// The error of rustls for a certificate of an authority as a server's own. rustls checks the time before.
const IS_AUTHORITY: &str = "CaUsedAsEndEntity";

/// Verifies as rustls does, and accepts the configured certificates themselves.
#[derive(Debug)]
pub(super) struct Pinned {
    usual: Arc<WebPkiServerVerifier>,
    certificates: Vec<CertificateDer<'static>>,
}

impl Pinned {
    pub(super) fn new(
        usual: Arc<WebPkiServerVerifier>,
        certificates: Vec<CertificateDer<'static>>,
    ) -> Self {
        Self {
            usual,
            certificates,
        }
    }
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let result = self.usual.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        );
        let is_pinned = self.certificates.iter().any(|one| one == end_entity);
        match &result {
            Err(Error::InvalidCertificate(why)) if is_pinned && may_be_pinned(why) => {
                check_name(end_entity, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            _ => result,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.usual.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.usual.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.usual.supported_verify_schemes()
    }
}

/// Whether only the kind of the certificate or its name is wrong. The name is then checked again.
fn may_be_pinned(why: &CertificateError) -> bool {
    match why {
        CertificateError::Other(other) => other.to_string() == IS_AUTHORITY,
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => true,
        _ => false,
    }
}

/// Checks the name. A certificate without names for servers, as openssl makes it by default, has a common name.
fn check_name(end_entity: &CertificateDer<'_>, server_name: &ServerName<'_>) -> Result<(), Error> {
    let certificate = ParsedCertificate::try_from(end_entity)?;
    let result = verify_server_name(&certificate, server_name);
    let has_no_names = matches!(
        &result,
        Err(Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }))
            if presented.is_empty()
    );
    let is_common_name = || {
        let common = common_name(end_entity).unwrap_or_default();
        common.eq_ignore_ascii_case(server_name.to_str().as_bytes())
    };
    match has_no_names && is_common_name() {
        true => Ok(()),
        false => result,
    }
}

/// The common name of a certificate's subject (RFC 5280, 4.1).
fn common_name<'a>(certificate: &'a CertificateDer<'_>) -> Option<&'a [u8]> {
    const SEQUENCE: u8 = 0x30;
    const SET: u8 = 0x31;
    const OBJECT_ID: u8 = 0x06;
    const VERSION: u8 = 0xa0;
    const COMMON_NAME: [u8; 3] = [0x55, 0x04, 0x03];

    let mut rest = inside(SEQUENCE, inside(SEQUENCE, certificate.as_ref())?)?;
    if rest.first() == Some(&VERSION) {
        rest = part(rest)?.2;
    }
    // Serial number, signature algorithm, issuer and validity stand before the subject.
    for _ in 0..4 {
        rest = part(rest)?.2;
    }
    let mut names = inside(SEQUENCE, rest)?;
    while !names.is_empty() {
        let (tag, set, others) = part(names)?;
        let pair = inside(SEQUENCE, set).filter(|_| tag == SET)?;
        let (tag, id, value) = part(pair)?;
        if tag == OBJECT_ID && id == COMMON_NAME {
            return part(value).map(|(_, value, _)| value);
        }
        names = others;
    }
    None
}

/// The content of the first part, which must have this tag.
fn inside(wanted: u8, der: &[u8]) -> Option<&[u8]> {
    let (tag, content, _) = part(der)?;
    (tag == wanted).then_some(content)
}

/// The tag and the content of the first part of DER, and the rest.
fn part(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (tag, rest) = der.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(*first), rest),
        0x81..=0x84 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            let length = bytes
                .iter()
                .fold(0, |sum, byte| sum << 8 | usize::from(*byte));
            (length, rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((*tag, content, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, proptest};

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_have_a_common_name_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = common_name(&CertificateDer::from(bytes));
        }
    }
}

//! A signature over the body in a header of its own, by templates.

use std::fmt::{self, Write};

use ::http::header::{HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::ExposeSecret;
use sha1::Sha1;
use sha2::{Sha256, Sha512};

use crate::config::{Algorithm, AuthPart, Encoding, HeaderSignature, Template};

/// Adds the header to requests.
pub(super) struct HeaderSigner {
    name: HeaderName,
    key: HeaderKey,
    encoding: Encoding,
    value: Template,
    content: Template,
}

/// A prepared key.
enum HeaderKey {
    Sha256(Hmac<Sha256>),
    Sha512(Hmac<Sha512>),
    Sha1(Hmac<Sha1>),
}

impl HeaderSigner {
    /// The error is the reason.
    pub(super) fn new(settings: &HeaderSignature) -> Result<Self, String> {
        let secret = settings.secret.expose_secret().as_bytes();
        let key = match settings.algorithm {
            Algorithm::Sha256 => Hmac::new_from_slice(secret).map(HeaderKey::Sha256),
            Algorithm::Sha512 => Hmac::new_from_slice(secret).map(HeaderKey::Sha512),
            Algorithm::Sha1 => Hmac::new_from_slice(secret).map(HeaderKey::Sha1),
        };
        Ok(Self {
            name: HeaderName::try_from(&settings.name).map_err(|error| error.to_string())?,
            key: key.map_err(|error| error.to_string())?,
            encoding: settings.encoding,
            value: settings.value.clone(),
            content: settings.content.clone(),
        })
    }

    /// Adds the signature of a request. `body` must be the sent body, byte for byte.
    pub(super) fn sign(
        &self,
        headers: &mut HeaderMap,
        id: &str,
        timestamp: &str,
        body: &str,
    ) -> Result<(), InvalidHeaderValue> {
        let content = self.content.0.iter().map(|part| match part {
            AuthPart::Text(text) => text.as_str(),
            AuthPart::Id => id,
            AuthPart::Timestamp => timestamp,
            AuthPart::Body => body,
            AuthPart::Signature => "",
        });
        let mac = match &self.key {
            HeaderKey::Sha256(key) => mac(key, content),
            HeaderKey::Sha512(key) => mac(key, content),
            HeaderKey::Sha1(key) => mac(key, content),
        };
        let signature = match self.encoding {
            Encoding::Hex => hex(&mac),
            Encoding::Base64 => BASE64.encode(mac),
        };
        let value: String = self
            .value
            .0
            .iter()
            .map(|part| match part {
                AuthPart::Text(text) => text.as_str(),
                AuthPart::Id => id,
                AuthPart::Timestamp => timestamp,
                AuthPart::Signature => &signature,
                AuthPart::Body => "",
            })
            .collect();
        headers.insert(self.name.clone(), HeaderValue::try_from(value)?);
        Ok(())
    }
}

fn mac<'a>(key: &(impl Mac + Clone), content: impl Iterator<Item = &'a str>) -> Vec<u8> {
    let mut mac = key.clone();
    content.for_each(|part| mac.update(part.as_bytes()));
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    let mut hex = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

impl fmt::Debug for HeaderSigner {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeaderSigner({})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Auth, AuthKind};

    fn value(more: Value) -> String {
        let mut all =
            json!({ "type": "header", "name": "X-Sig", "secret": "It's a Secret to Everybody" });
        if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
            all.extend(more);
        }
        let auth: Auth = all.to_string().parse().expect("good");
        let AuthKind::Header(settings) = &auth.kind else {
            panic!("a header");
        };
        let signer = HeaderSigner::new(settings).expect("a signer");
        assert_eq!(format!("{signer:?}"), "HeaderSigner(x-sig)");
        let mut headers = HeaderMap::new();
        let signed = signer.sign(&mut headers, "msg_1", "1614265330", "Hello, World!");
        signed.expect("a header");
        headers["x-sig"].to_str().expect("ASCII").to_owned()
    }

    /// R59: the test vector of GitHub's documentation.
    #[test]
    fn a_prefix_and_hex_are_the_form_of_github() {
        assert_eq!(
            value(json!({ "prefix": "sha256=" })),
            "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
        );
    }

    /// R59: computed by `openssl dgst -hmac`.
    #[test]
    fn templates_fill_header_and_content() {
        let stripe = json!({
            "value": "t={timestamp},v1={signature}", "content": "{timestamp}.{body}", "algorithm": "hmac-sha1",
        });
        assert_eq!(
            value(stripe),
            "t=1614265330,v1=7553b25c3b738bfc8142961eb68e2b75f3f8d3a5"
        );
        let other = json!({
            "value": "{signature} {id}", "content": "{id}:{body}:{body}", "algorithm": "hmac-sha512", "encoding": "base64",
        });
        assert_eq!(
            value(other),
            "5SQsfaYzymsVUnazBOlftVFJ1/z1Vttu9AaFFIDtu5WcCJp1x/zQ8xE/cg1xvlIS9mP1zxovzo8Ha0a8z43w2w== msg_1"
        );
    }
}

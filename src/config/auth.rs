//! Authentication that receivers ask for, beside the signatures of Standard Webhooks.

use std::fmt;
use std::str::FromStr;

use secrecy::SecretString;
use serde_json::Value;
use url::Url;

use super::section::Section;
use super::text::url as parse_url;
use super::values::{parsed, text};
use crate::config_error::ConfigError;
use crate::header::check_header;
use crate::words::words;

const OAUTH2_KEYS: &[&str] = &[
    "token_url",
    "client_id",
    "client_secret",
    "private_key",
    "key_id",
    "method",
    "assertion_audience",
    "scope",
    "audience",
    "resource",
];
const HEADER_KEYS: &[&str] = &[
    "name",
    "secret",
    "algorithm",
    "encoding",
    "prefix",
    "value",
    "content",
];
/// The keys whose values are secret. In `outbox.toml`, each may be in a file instead: `secret_file`.
#[cfg(feature = "file")]
pub(super) const SECRET_KEYS: [&str; 3] = ["client_secret", "private_key", "secret"];
/// What an encrypted value begins with. No JSON begins with this text.
const SEALED: &str = "sealed";

/// Authentication that a receiver asks for: an OAuth 2.0 token, or a signature in a header of its own.
///
/// Each request also has the headers of Standard Webhooks. The text is a JSON object; `type` is `oauth2` or `header`.
/// The [reference](https://github.com/diesel-outbox/diesel-outbox/blob/main/docs/requests.md#authentication)
/// has all keys. `Display` and `Debug` show no secret.
///
/// ```
/// use diesel_outbox::Destination;
/// use diesel_outbox::config::Auth;
/// use serde_json::json;
///
/// let token = json!({
///     "type": "oauth2",
///     "token_url": "https://login.example/token",
///     "client_id": "shop",
///     "client_secret": "hunter2",
/// });
/// let token: Auth = token.to_string().parse()?;
/// assert_eq!(token.to_string(), "oauth2, token_url https://login.example/token, client_id shop");
/// let mut partner = Destination::new("partner", "https://partner.example/events")?;
/// partner.auth = Some(token);
///
/// // As GitHub signs: `X-Hub-Signature-256: sha256=…`.
/// let signature = json!({
///     "type": "header", "name": "X-Hub-Signature-256", "secret": "hunter2", "prefix": "sha256=",
/// });
/// let signature: Auth = signature.to_string().parse()?;
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct Auth {
    written: SecretString,
    pub(crate) kind: AuthKind,
}

#[derive(Clone)]
pub(crate) enum AuthKind {
    OAuth2(Box<OAuth2>),
    Header(HeaderSignature),
    /// The value of a column that is encrypted and not decrypted yet.
    Sealed,
}

/// The client credentials grant of OAuth 2.0 (RFC 6749, 4.4).
#[derive(Debug, Clone)]
pub(crate) struct OAuth2 {
    pub(crate) token_url: Url,
    pub(crate) client_id: String,
    pub(crate) client: Client,
    /// `scope`, `audience` and `resource`, if set.
    pub(crate) parameters: Vec<(&'static str, String)>,
}

/// How the client proves to the token server who it is.
#[derive(Debug, Clone)]
pub(crate) enum Client {
    Basic(SecretString),
    Post(SecretString),
    Jwt(ClientKey),
}

/// The key that signs assertions (RFC 7523).
#[derive(Debug, Clone)]
pub(crate) struct ClientKey {
    /// PEM.
    pub(crate) private_key: SecretString,
    pub(crate) key_id: Option<String>,
    pub(crate) audience: String,
}

/// A signature over the body in a header.
#[derive(Debug, Clone)]
pub(crate) struct HeaderSignature {
    pub(crate) name: String,
    pub(crate) secret: SecretString,
    pub(crate) algorithm: Algorithm,
    pub(crate) encoding: Encoding,
    /// The value of the header.
    pub(crate) value: Template,
    /// What is signed.
    pub(crate) content: Template,
}

words! {
    setting:
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) enum Algorithm {
        #[default]
        Sha256 = "hmac-sha256",
        Sha512 = "hmac-sha512",
        Sha1 = "hmac-sha1",
    }
}

words! {
    setting:
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) enum Encoding {
        #[default]
        Hex = "hex",
        Base64 = "base64",
    }
}

words! {
    setting:
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Method {
        Basic = "client_secret_basic",
        Post = "client_secret_post",
        Jwt = "private_key_jwt",
    }
}

/// Text with placeholders, such as `{timestamp}.{body}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template(pub(crate) Vec<AuthPart>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AuthPart {
    Text(String),
    Id,
    Timestamp,
    Body,
    Signature,
}

impl Template {
    /// Reads a template that may have these placeholders, and must have the last of them.
    fn parse(text: &str, allowed: &[(&str, AuthPart)]) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let found = allowed.iter().find_map(|(name, part)| {
                let rest = after.strip_prefix(name)?.strip_prefix('}')?;
                Some((part.clone(), rest))
            });
            let Some((part, after)) = found else {
                let names: Vec<String> = allowed
                    .iter()
                    .map(|(name, _)| format!("{{{name}}}"))
                    .collect();
                return Err(format!(
                    "unknown placeholder: known are {}",
                    names.join(", ")
                ));
            };
            parts.extend((!before.is_empty()).then(|| AuthPart::Text(before.to_owned())));
            parts.push(part);
            rest = after;
        }
        parts.extend((!rest.is_empty()).then(|| AuthPart::Text(rest.to_owned())));
        match allowed.last() {
            Some((name, part)) if !parts.contains(part) => Err(format!("must contain {{{name}}}")),
            _ => Ok(Self(parts)),
        }
    }
}

impl Auth {
    /// The text as it was given, with its secrets.
    pub(crate) fn written(&self) -> &SecretString {
        &self.written
    }

    /// What may be shown: the type, and the token URL and the client id, or the name of the header.
    pub(crate) fn shown(&self) -> Vec<(&'static str, String)> {
        match &self.kind {
            AuthKind::OAuth2(oauth2) => vec![
                ("type", "oauth2".to_owned()),
                ("token_url", oauth2.shown_url()),
                ("client_id", oauth2.client_id.clone()),
            ],
            AuthKind::Header(header) => {
                vec![("type", "header".to_owned()), ("name", header.name.clone())]
            }
            AuthKind::Sealed => vec![("type", "encrypted".to_owned())],
        }
    }

    /// Reads the column of an endpoint, plain or encrypted.
    pub(crate) fn of_column(column: String) -> Result<Self, ConfigError> {
        match column.starts_with(SEALED) {
            true => Ok(Self {
                written: column.into(),
                kind: AuthKind::Sealed,
            }),
            false => column.parse(),
        }
    }

    pub(crate) fn is_sealed(&self) -> bool {
        matches!(self.kind, AuthKind::Sealed)
    }

    /// Where tokens come from.
    pub(crate) fn token_url(&self) -> Option<&Url> {
        match &self.kind {
            AuthKind::OAuth2(oauth2) => Some(&oauth2.token_url),
            AuthKind::Header(_) | AuthKind::Sealed => None,
        }
    }

    /// Reads the table or object `key`.
    pub(super) fn read(key: &str, value: Value) -> Result<Self, ConfigError> {
        let written = value.to_string().into();
        let mut section = Section::open(key.to_owned(), value)?;
        let is_oauth2 =
            section.required("type", |key, value| match text(key, value)?.as_str() {
                "oauth2" => Ok(true),
                "header" => Ok(false),
                _ => Err(ConfigError::new(key, "expected oauth2 or header")),
            })?;
        let kind = match is_oauth2 {
            true => AuthKind::OAuth2(Box::new(OAuth2::read(section.only(OAUTH2_KEYS)?)?)),
            false => AuthKind::Header(HeaderSignature::read(section.only(HEADER_KEYS)?)?),
        };
        Ok(Self { written, kind })
    }

    /// Whether it can be used with these headers and this URL. The error is the reason.
    pub(crate) fn check(
        &self,
        headers: &[(String, SecretString)],
        url: &Url,
    ) -> Result<(), String> {
        let header = match &self.kind {
            AuthKind::OAuth2(_) => "authorization",
            AuthKind::Header(header) => &header.name,
            AuthKind::Sealed => return Ok(()),
        };
        if headers
            .iter()
            .any(|(name, _)| name.eq_ignore_ascii_case(header))
        {
            return Err(format!("sets the header {header}: remove it from headers"));
        }
        let has_user = !url.username().is_empty() || url.password().is_some();
        if has_user && header.eq_ignore_ascii_case("authorization") {
            return Err("sets the header authorization: remove the user from the URL".to_owned());
        }
        Ok(())
    }
}

impl OAuth2 {
    fn read(mut section: Section) -> Result<Self, ConfigError> {
        let takes = "expected a URL such as https://login.example/token";
        let token_url: Url = section.required("token_url", parsed(takes, parse_url))?;
        let has_user = !token_url.username().is_empty() || token_url.password().is_some();
        if has_user || token_url.fragment().is_some() {
            let reason = "must have no user, no password and no fragment";
            return Err(ConfigError::new(section.key("token_url"), reason));
        }
        let client_id = section.required("client_id", text)?;
        let secret = section.take("client_secret", text)?;
        let private_key = section.take("private_key", text)?;
        let key_id = section.take("key_id", text)?;
        let audience = section.take("assertion_audience", text)?;
        let takes = "expected client_secret_basic, client_secret_post or private_key_jwt";
        let method = section.take("method", parsed(takes, Method::read))?;
        let method = method.unwrap_or(match (&secret, &private_key) {
            (None, Some(_)) => Method::Jwt,
            _ => Method::Basic,
        });
        let wrong = |key: &str, reason: String| Err(ConfigError::new(section.key(key), reason));
        let client = match (method, secret, private_key) {
            (Method::Basic, Some(secret), None) => Client::Basic(secret.into()),
            (Method::Post, Some(secret), None) => Client::Post(secret.into()),
            (Method::Jwt, None, Some(key)) => Client::Jwt(ClientKey {
                private_key: key.into(),
                key_id: key_id.clone(),
                audience: audience.clone().unwrap_or_else(|| token_url.to_string()),
            }),
            (Method::Jwt, _, None) => {
                return wrong("private_key", format!("missing: {method} needs it"));
            }
            (Method::Jwt, Some(_), _) => {
                return wrong("client_secret", format!("{method} uses private_key alone"));
            }
            (_, None, _) => {
                return wrong("client_secret", format!("missing: {method} needs it"));
            }
            (_, _, Some(_)) => {
                return wrong("private_key", format!("{method} uses client_secret alone"));
            }
        };
        if method != Method::Jwt
            && let Some(key) = (key_id.map(|_| "key_id")).or(audience.map(|_| "assertion_audience"))
        {
            return wrong(key, format!("{method} does not use it"));
        }
        let mut parameters = Vec::new();
        for name in ["scope", "audience", "resource"] {
            let value = section.take(name, text)?;
            parameters.extend(value.map(|value| (name, value)));
        }
        Ok(Self {
            token_url,
            client_id,
            client,
            parameters,
        })
    }

    /// The token URL without its query, which may hold a token.
    pub(crate) fn shown_url(&self) -> String {
        let mut url = self.token_url.clone();
        url.set_query(url.query().map(|_| "***"));
        url.into()
    }
}

impl HeaderSignature {
    fn read(mut section: Section) -> Result<Self, ConfigError> {
        let name = section.required("name", text)?;
        check_header(&name, "x").map_err(|reason| ConfigError::new(section.key("name"), reason))?;
        let secret = section.required("secret", text)?.into();
        let algorithm = section.take(
            "algorithm",
            parsed(
                "expected hmac-sha256, hmac-sha512 or hmac-sha1",
                Algorithm::read,
            ),
        )?;
        let encoding =
            section.take("encoding", parsed("expected hex or base64", Encoding::read))?;
        let of_value = [
            ("timestamp", AuthPart::Timestamp),
            ("id", AuthPart::Id),
            ("signature", AuthPart::Signature),
        ];
        let of_content = [
            ("timestamp", AuthPart::Timestamp),
            ("id", AuthPart::Id),
            ("body", AuthPart::Body),
        ];
        let prefix = section.take("prefix", text)?;
        let value = section.take("value", text)?;
        let value = match (prefix, value) {
            (Some(_), Some(_)) => {
                let reason = "value is also set: remove one of them";
                return Err(ConfigError::new(section.key("prefix"), reason));
            }
            (prefix, value) => {
                value.unwrap_or_else(|| format!("{}{{signature}}", prefix.unwrap_or_default()))
            }
        };
        let at = |key: &str| {
            let key = section.key(key);
            move |reason| ConfigError::new(key, reason)
        };
        check_header(&name, &value).map_err(|reason| at("value")(reason.to_owned()))?;
        let value = Template::parse(&value, &of_value).map_err(at("value"))?;
        let content = section.take("content", text)?;
        let content = content.as_deref().unwrap_or("{body}");
        let content = Template::parse(content, &of_content)
            .map_err(|reason| ConfigError::new(section.key("content"), reason))?;
        Ok(Self {
            name,
            secret,
            algorithm: algorithm.unwrap_or_default(),
            encoding: encoding.unwrap_or_default(),
            value,
            content,
        })
    }
}

impl FromStr for Auth {
    type Err = ConfigError;

    /// The error does not show the text.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let value = serde_json::from_str(text);
        let value =
            value.map_err(|error| ConfigError::new("auth", format!("not JSON: {error}")))?;
        Self::read("auth", value)
    }
}

impl fmt::Display for Auth {
    /// Without secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, value)) in self.shown().into_iter().enumerate() {
            match index {
                0 => write!(f, "{value}")?,
                _ => write!(f, ", {name} {value}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Auth({self})")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<Auth, ConfigError> {
        value.to_string().parse()
    }

    fn oauth2(more: &Value) -> Value {
        let mut value = json!({
            "type": "oauth2", "token_url": "https://login.example/token", "client_id": "shop",
        });
        for (key, more) in more.as_object().expect("an object") {
            value[key] = more.clone();
        }
        value
    }

    fn header(more: &Value) -> Value {
        let mut value = json!({ "type": "header", "name": "x-sig", "secret": "hunter2" });
        for (key, more) in more.as_object().expect("an object") {
            value[key] = more.clone();
        }
        value
    }

    /// R59
    #[test]
    fn the_client_authenticates_as_the_settings_say() {
        let client = |more| match read(&oauth2(&more)).expect("good").kind {
            AuthKind::OAuth2(oauth2) => oauth2.client,
            AuthKind::Header(_) | AuthKind::Sealed => panic!("oauth2"),
        };
        assert!(matches!(
            client(json!({ "client_secret": "hunter2" })),
            Client::Basic(_)
        ));
        let post = json!({ "client_secret": "hunter2", "method": "client_secret_post" });
        assert!(matches!(client(post), Client::Post(_)));
        let Client::Jwt(key) = client(json!({ "private_key": "hunter2", "key_id": "a" })) else {
            panic!("a private key signs");
        };
        assert_eq!(key.key_id.as_deref(), Some("a"));
        assert_eq!(key.audience, "https://login.example/token");
    }

    /// R59
    #[test]
    fn a_bad_value_is_named_and_no_secret_is_shown() {
        let secret = json!({ "client_secret": "hunter2" });
        let with = |key: &str, value: Value| {
            let mut all = oauth2(&secret);
            all[key] = value;
            all
        };
        for (value, key) in [
            (json!("hunter2"), "auth"),
            (json!({ "client_secret": "hunter2" }), "auth.type"),
            (json!({ "type": "hunter2" }), "auth.type"),
            (with("token_url", json!("hunter2")), "auth.token_url"),
            (
                with("token_url", json!("https://u:hunter2@a.example/")),
                "auth.token_url",
            ),
            (
                with("token_url", json!("https://a.example/#hunter2")),
                "auth.token_url",
            ),
            (with("client_id", json!(["hunter2"])), "auth.client_id"),
            (with("method", json!("hunter2")), "auth.method"),
            (with("method", json!("private_key_jwt")), "auth.private_key"),
            (with("private_key", json!("hunter2")), "auth.private_key"),
            (with("key_id", json!("hunter2")), "auth.key_id"),
            (
                with("assertion_audience", json!("hunter2")),
                "auth.assertion_audience",
            ),
            (with("secret", json!("hunter2")), "auth.secret"),
            (
                with("client_secret_file", json!("/etc/passwd")),
                "auth.client_secret_file",
            ),
            (oauth2(&json!({})), "auth.client_secret"),
            (
                oauth2(&json!({
                    "client_secret": "hunter2", "private_key": "hunter2", "method": "private_key_jwt",
                })),
                "auth.client_secret",
            ),
            (header(&json!({ "name": "webhook-signature" })), "auth.name"),
            (header(&json!({ "name": "x sig" })), "auth.name"),
            (header(&json!({ "secret": "" })), "auth.secret"),
            (header(&json!({ "algorithm": "md5" })), "auth.algorithm"),
            (header(&json!({ "encoding": "octal" })), "auth.encoding"),
            (header(&json!({ "value": "v1=" })), "auth.value"),
            (header(&json!({ "value": "{signature}\n" })), "auth.value"),
            (header(&json!({ "prefix": "{body}" })), "auth.value"),
            (
                header(&json!({ "prefix": "a", "value": "{signature}" })),
                "auth.prefix",
            ),
            (header(&json!({ "content": "{timestamp}" })), "auth.content"),
            (header(&json!({ "content": "{body" })), "auth.content"),
        ] {
            let error = read(&value).expect_err(&value.to_string());
            assert_eq!(error.key(), key, "{value}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
        let error = "{\"secret\": hunter2".parse::<Auth>().expect_err("no JSON");
        assert!(!error.to_string().contains("hunter"), "{error}");
    }

    /// R59
    #[test]
    fn only_what_is_not_secret_is_shown() {
        for value in [
            oauth2(
                &json!({ "client_secret": "hunter2", "token_url": "https://a.example/t?key=hunter2" }),
            ),
            oauth2(&json!({ "private_key": "hunter2" })),
            header(&json!({})),
        ] {
            let auth = read(&value).expect("good");
            let shown = format!("{auth} {auth:?} {:?}", auth.shown());
            assert!(!shown.contains("hunter2"), "{shown}");
        }
        let sealed = Auth::of_column("sealed1_hunter2".to_owned()).expect("a sealed value");
        assert_eq!(format!("{sealed} {sealed:?}"), "encrypted Auth(encrypted)");
    }

    /// R59
    #[test]
    fn the_header_must_be_free() {
        let token = read(&oauth2(&json!({ "client_secret": "a" }))).expect("good");
        let signature = read(&header(&json!({}))).expect("good");
        let url = |url: &str| url.parse::<Url>().expect("a URL");
        let (plain, user) = (url("https://a.example/"), url("https://u@a.example/"));
        let set = |name: &str| [(name.to_owned(), SecretString::from("a"))];
        assert!(token.check(&set("X-Sig"), &plain).is_ok());
        assert!(token.check(&set("Authorization"), &plain).is_err());
        assert!(token.check(&[], &user).is_err());
        assert!(signature.check(&set("Authorization"), &user).is_ok());
        assert!(signature.check(&set("X-Sig"), &plain).is_err());
    }
}

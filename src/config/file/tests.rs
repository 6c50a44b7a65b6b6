//! Each key of the file sets its field of the configuration.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, fs, process};

use crate::config::{Class, Mode, Proxy, Roots, TlsVersion};
use secrecy::ExposeSecret;

use super::*;

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OLD_SECRET: &str = "whsec_Zm9vYmFyZm9vYmFyZm9vYmFyZm9vYmFyZm8=";

/// A file with every key of destinations and routes, and the files that its keys name.
pub(super) struct Good {
    pub(super) text: String,
    files: [PathBuf; 2],
}

impl Good {
    pub(super) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let unique = format!(
            "{}-{}",
            process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let file = |name: &str, content: &str| {
            let path = env::temp_dir().join(format!("outbox-{name}-{unique}"));
            fs::write(&path, content).expect("a file");
            path
        };
        let secrets = file("secrets", &format!("{SECRET}\n{OLD_SECRET}\n"));
        let token = file("token", "ToKeN555-of-file\r\n");
        Self {
            text: good(&secrets, &token),
            files: [secrets, token],
        }
    }
}

impl Drop for Good {
    fn drop(&mut self) {
        for file in &self.files {
            // The file may be gone already.
            let _ = fs::remove_file(file);
        }
    }
}

fn good(secret_file: &Path, token_file: &Path) -> String {
    let (secret_file, token_file) = (secret_file.display(), token_file.display());
    format!(
        r#"
database_url = "postgres://app:hunter22@db/shop"
secret = ["{SECRET}", "{OLD_SECRET}"]
batch = 100
cleaner = false
send_timeout = "1s"
no_proxy = "localhost, .internal"

[destinations.billing]
url = "https://u:hunter22@billing.example/events?key=ToKeN555"
secret = """
{SECRET}
{OLD_SECRET}
"""
mode = "structured"
batch_size = 10
batch_linger = "20ms"
timeout = "2s"
concurrency = 8
rate = 50
burst = 7
max_attempts = 5
backoff = "exponential(1s, 1m)"
retry_after_cap = "10m"
max_payload = "64KiB"
internal = false
allow = ["10.0.0.0/8", "fd00::1"]
https_only = true
proxy = "http://u:sauce777@proxy.example:3128"
[destinations.billing.headers]
authorization = "Bearer ToKeN555"
x-key = {{ file = "{token_file}" }}
[destinations.billing.breaker]
failure_ratio = 0.25
min_sends = 20
window = "1m"
open = "2s"
open_cap = "2m"
[destinations.billing.classes]
404 = "dead"
401 = "pause"
400 = "retry"
[destinations.billing.tls]
roots = "system"
client_cert_file = "/tls/cert.pem"
client_key_file = "/tls/key.pem"
min_version = "1.3"

[destinations.audit]
url = "http://audit.internal/"
secret_file = "{secret_file}"
rate = 0.5
max_payload = 1000
internal = true
breaker = false
proxy = "direct"
[destinations.audit.auth]
type = "oauth2"
token_url = "https://login.example/token"
client_id = "shop"
client_secret_file = "{token_file}"
scope = "events"

[[routes]]
topic = "order.*"
to = ["billing", "audit"]
[[routes]]
topic = "*"
to = "audit"
"#
    )
}

pub(super) fn read(text: &str) -> Result<Config, ConfigError> {
    let mut config = Config::default();
    apply_text(text, &mut config)?;
    Ok(config)
}

#[test]
fn settings_and_routes_are_read() {
    let config = read(&Good::new().text).expect("good");
    assert_eq!(config.validate(), Ok(()));
    assert_eq!(config.batch, 100);
    assert!(!config.cleaner);
    assert_eq!(config.send_timeout, Duration::from_secs(1));
    assert_eq!(config.secrets.len(), 2);
    assert_eq!(config.no_proxy, ["localhost", ".internal"]);
    let database = config.database_url().expect("a database").expose_secret();
    assert_eq!(database, "postgres://app:hunter22@db/shop");
    assert_eq!(
        config.routes,
        [
            Route::to_each("order.*", ["billing", "audit"]),
            Route::new("*", "audit")
        ]
    );
}

#[test]
fn a_setting_is_text_or_of_its_own_type() {
    for text in [
        "batch = 7\ncleaner = false\nno_proxy = ['A', '.b']\nadmin_hosts = ['a', 'b c']",
        "batch = '7'\ncleaner = 'false'\nno_proxy = 'A, .b'\nadmin_hosts = 'a,b c'",
    ] {
        let config = read(text).expect(text);
        assert_eq!((config.batch, config.cleaner), (7, false));
        assert_eq!(config.no_proxy, ["a", ".b"]);
        assert_eq!(config.admin.hosts, ["a", "b", "c"]);
    }
}

#[test]
fn every_key_of_a_destination_is_read() {
    let config = read(&Good::new().text).expect("good");
    let [audit, billing] = config.destinations.as_slice() else {
        panic!("two destinations");
    };
    assert_eq!(billing.name, "billing");
    assert_eq!(billing.url.host_str(), Some("billing.example"));
    assert_eq!(billing.secrets.len(), 2);
    assert_eq!(billing.policy.mode, Some(Mode::Structured));
    assert_eq!(billing.request_batch.size, 10);
    assert_eq!(billing.request_batch.linger, Duration::from_millis(20));
    assert_eq!(billing.policy.timeout, Some(Duration::from_secs(2)));
    assert_eq!(billing.policy.concurrency, Some(8));
    let rate = billing.policy.rate.expect("a rate");
    assert_eq!((rate.per_second, rate.burst), (50.0, 7));
    assert_eq!(billing.policy.max_attempts, Some(5));
    assert_eq!(
        billing
            .policy
            .backoff
            .as_ref()
            .map(ToString::to_string)
            .as_deref(),
        Some("exponential(1s, 1m)")
    );
    assert_eq!(billing.policy.retry_after_cap, Duration::from_secs(600));
    assert_eq!(billing.max_payload_bytes, Some(64 * 1024));
    assert_eq!(billing.internal, Some(false));
    let allow: Vec<String> = billing.allow.iter().map(ToString::to_string).collect();
    assert_eq!(allow, ["10.0.0.0/8", "fd00::1/128"]);
    assert_eq!(billing.https_only, Some(true));
    assert!(matches!(&billing.proxy, Some(Proxy::Via(url)) if url.port() == Some(3128)));
    let headers: Vec<(&str, &str)> = billing
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.expose_secret()))
        .collect();
    assert_eq!(
        headers,
        [
            ("authorization", "Bearer ToKeN555"),
            ("x-key", "ToKeN555-of-file")
        ]
    );
    let breaker = billing.policy.breaker.expect("a breaker");
    assert_eq!((breaker.failure_ratio, breaker.min_sends), (0.25, 20));
    assert_eq!(breaker.window, Duration::from_secs(60));
    assert_eq!(breaker.open, Duration::from_secs(2));
    assert_eq!(breaker.open_cap, Duration::from_secs(120));
    let classes = [404, 401, 400, 422].map(|status| billing.policy.classes.of(status));
    let [dead, pause, retry] = [Class::Dead, Class::Pause, Class::Retry];
    assert_eq!(classes, [dead, pause, retry, dead]);
    assert_eq!(billing.tls.roots, Some(Roots::System));
    assert_eq!(billing.tls.client_cert_file, Some("/tls/cert.pem".into()));
    assert_eq!(billing.tls.client_key_file, Some("/tls/key.pem".into()));
    assert_eq!(billing.tls.min_version, TlsVersion::V1_3);

    assert_eq!(audit.secrets.len(), 2);
    assert_eq!(audit.policy.rate.map(|rate| rate.per_second), Some(0.5));
    assert_eq!(audit.max_payload_bytes, Some(1000));
    assert_eq!(audit.internal, Some(true));
    assert_eq!(audit.policy.breaker, None);
    assert_eq!(audit.proxy, Some(Proxy::Direct));
    let auth = audit.auth.as_ref().expect("authentication");
    assert_eq!(
        auth.to_string(),
        "oauth2, token_url https://login.example/token, client_id shop"
    );
    let written = auth.written().expose_secret();
    assert!(written.contains(r#""client_secret":"ToKeN555-of-file""#));
}

#[test]
fn a_key_that_is_not_set_has_the_default_of_the_library() {
    let config = read("[destinations.a]\nurl = 'http://a.example/'").expect("good");
    let expected = crate::config::Destination::new("a", "http://a.example/").expect("a URL");
    let read = &config.destinations[0];
    assert_eq!(format!("{read:?}"), format!("{expected:?}"));
    assert_eq!(read.policy, expected.policy);
    assert_eq!(read.request_batch, expected.request_batch);
    assert_eq!(read.tls, expected.tls);
}

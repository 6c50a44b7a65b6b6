//! The table of settings.
//!
//! A new setting is a row here, a field of [`Config`] and a row of `docs/settings.md`, which a test compares.

use std::str::FromStr;
use std::time::Duration;

use self::SettingKind::{Count, Switch, SwitchOr, Text, Time, Words};
use self::SettingPlace::{NoFile, OwnFile};
use super::destination::{MOST, MOST_SENDERS, Mode, OnDead, Proxy, Roots, Verification};
use super::secret::secrets;
use super::secret_keys::secret_keys;
use super::text::{
    TICK, at_least, bytes, database_url, duration, not_empty, path, ports, source, switch, topics,
    url, within,
};
use super::{Config, LedgerPayload, LogFormat, admin, no_proxy};
use crate::backoff::Backoff;
use crate::config_error::{ConfigError, nearest};
use crate::name::OutboxName;

/// A setting: variable, default and summary.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Setting {
    /// The environment variable.
    pub variable: &'static str,
    /// The default as text. Empty if there is no default.
    pub default: &'static str,
    /// What the setting does, in one line.
    pub summary: &'static str,
    pub(super) kind: SettingKind,
    pub(super) place: SettingPlace,
    /// The method that sets the value in code, unless that is a field of [`Config`].
    in_code: Option<&'static str>,
}

/// The values that a setting takes, and how [`Config`] stores them.
#[derive(Debug, Clone, Copy)]
pub(super) enum SettingKind {
    /// `true` or `false`.
    Switch(fn(&mut Config) -> &mut bool),
    /// A whole number in this range.
    Count((u32, u32), fn(&Config) -> usize, fn(&mut Config, u32)),
    /// A duration of at least this minimum.
    Time(Duration, fn(&Config) -> Duration, fn(&mut Config, Duration)),
    /// Text, with the value name of `--help`. The error is the reason.
    Text(&'static str, fn(&mut Config, &str) -> Result<(), String>),
    /// `true`, `false` or text, with the value name of `--help`.
    SwitchOr(&'static str, fn(&mut Config, &str) -> Result<(), String>),
    /// Words separated by commas or spaces. `outbox.toml` also takes an array.
    Words(&'static str, fn(&mut Config, &str) -> Result<(), String>),
}

/// Where a setting may be given, in addition to a flag and the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SettingPlace {
    /// In `outbox.toml`.
    File,
    /// In `outbox.toml`, or alone in a file: `DATABASE_URL_FILE` names the file with the value of `DATABASE_URL`.
    OwnFile,
    /// In no file.
    NoFile,
}

const fn setting(
    variable: &'static str,
    default: &'static str,
    kind: SettingKind,
    summary: &'static str,
) -> Setting {
    Setting {
        variable,
        default,
        summary,
        kind,
        place: SettingPlace::File,
        in_code: None,
    }
}

/// A field of [`Config`], and the [`SettingKind`] that sets it.
macro_rules! field {
    ($($field:ident).+: Switch) => {
        Switch(|config| &mut config.$($field).+)
    };
    ($field:ident: Count($most:expr)) => {
        Count((1, $most), |config| config.$field as usize, |config, count| config.$field = count as _)
    };
    ($field:ident: Time($least:expr)) => {
        Time($least, |config| config.$field, |config, time| config.$field = time)
    };
    ($($field:ident).+: $kind:ident($name:literal, $read:path)) => {
        $kind($name, |config, text| {
            config.$($field).+ = $read(text).map_err(|error| error.to_string())?.into();
            Ok(())
        })
    };
}

impl Setting {
    const fn at(mut self, place: SettingPlace) -> Self {
        self.place = place;
        self
    }

    /// Records the method that sets the value in code.
    const fn by(mut self, method: &'static str) -> Self {
        self.in_code = Some(method);
        self
    }

    /// The name under which code sets the value.
    #[cfg(feature = "relay")]
    pub(crate) fn name_in_code(&self) -> String {
        let field = || self.variable.trim_start_matches("OUTBOX_").to_lowercase();
        (self.in_code).map_or_else(|| format!("Config::{}", field()), str::to_owned)
    }

    /// The setting of this variable.
    pub(super) fn of(variable: &str) -> Option<&'static Self> {
        SETTINGS.iter().find(|setting| setting.variable == variable)
    }

    /// The settings whose values may be in files of their own.
    pub(super) fn in_own_files() -> impl Iterator<Item = &'static Self> {
        SETTINGS.iter().filter(|setting| setting.place == OwnFile)
    }

    /// The name of the value in `--help`.
    pub fn value_name(&self) -> &'static str {
        match self.kind {
            Switch(_) => "BOOL",
            Count(..) => "NUMBER",
            Time(..) => "DURATION",
            Text(name, _) | SwitchOr(name, _) | Words(name, _) => name,
        }
    }

    /// Sets the value from text. The error is the reason.
    pub(super) fn set(&self, config: &mut Config, text: &str) -> Result<(), String> {
        match self.kind {
            Switch(field) => *field(config) = switch(text)?,
            Count(range, _, set) => set(config, within(text, text.parse::<u32>().ok(), range)?),
            Time(least, _, set) => set(config, at_least(duration(text)?, least)?),
            Text(_, set) | SwitchOr(_, set) | Words(_, set) => set(config, text)?,
        }
        Ok(())
    }

    /// Checks that the value is in the setting's range: code may have set any value.
    pub(super) fn check(&self, config: &Config) -> Result<(), String> {
        match self.kind {
            Count(range, get, _) => within(get(config), Some(get(config)), range).map(drop),
            Time(least, get, _) => at_least(get(config), least).map(drop),
            Switch(_) | Text(..) | SwitchOr(..) | Words(..) => Ok(()),
        }
    }
}

/// All settings, with the only copy of their defaults. A row is: variable, default, field with the values it takes,
/// summary, other places, method in code.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    setting("DATABASE_URL", "", field!(database_url: Text("URL", database_url)),
        "PostgreSQL connection: a URL or key=value pairs; or DATABASE_URL_FILE").at(OwnFile).by("Relay::builder"),
    setting("OUTBOX_CONFIG", "", field!(config: Text("PATH", not_empty)),
        "Path of the outbox.toml with settings, destinations and routes").at(NoFile),
    setting("OUTBOX_ENABLED", "true", field!(enabled: Switch),
        "false: the relay claims and sends nothing; messages stay in the outbox").by("RelayBuilder::enabled"),
    setting("OUTBOX_TABLE", "outbox", field!(table: Text("NAME", OutboxName::from_str)),
        "The outbox: name or schema.name").by("RelayBuilder::outbox"),
    setting("OUTBOX_URL", "", field!(url: Text("URL", url)),
        "URL of the default destination, for topics without a route; or OUTBOX_URL_FILE").at(OwnFile).by("RelayBuilder::url"),
    setting("OUTBOX_SECRET", "", field!(secrets: Words("SECRET", secrets)),
        "Secrets that sign requests: whsec_… or whsk_…, newest first; or OUTBOX_SECRET_FILE").at(OwnFile),
    setting("OUTBOX_SECRET_KEY", "", field!(secret_keys: Words("KEY", secret_keys)),
        "Keys that encrypt the secrets of endpoints in the database: base64 of 32 bytes, newest first; or OUTBOX_SECRET_KEY_FILE").at(OwnFile).by("RelayBuilder::secret_keys"),
    setting("OUTBOX_MODE", "binary", field!(mode: Text("WORD", Mode::read)),
        "CloudEvents mode of requests: binary, structured or batched"),
    setting("OUTBOX_SOURCE", "", field!(source: Text("REFERENCE", source)),
        "ce-source of all messages; unset: diesel-outbox/ followed by the name of the outbox"),
    setting("OUTBOX_HTTPS_ONLY", "false", field!(https_only: Switch),
        "true: refuse destinations without TLS"),
    setting("OUTBOX_PUBLIC_ONLY", "false", field!(public_only: Switch),
        "true: destinations may resolve only to public addresses, unless marked internal"),
    setting("OUTBOX_TLS_ROOTS", "bundled", field!(tls_roots: Text("ROOTS", Roots::read)),
        "Trusted root certificates: bundled (Mozilla's), system, or the path of a PEM file"),
    setting("OUTBOX_PROXY", "direct", field!(proxy: Text("URL", Proxy::of)),
        "HTTP proxy of all destinations: a URL, or direct; HTTP_PROXY and similar variables are ignored"),
    setting("OUTBOX_NO_PROXY", "", field!(no_proxy: Words("HOSTS", no_proxy::hosts)),
        "Hosts reached without the proxy: names, .suffix or networks, separated by commas"),
    setting("OUTBOX_TOPICS", "", field!(topics: Words("PATTERNS", topics)),
        "Patterns of the application's topics, separated by commas: messages of other topics that nobody wants wait (UNKNOWN_TOPIC); unset: they end without a subscriber").by("RelayBuilder::topics"),
    setting("OUTBOX_CONCURRENCY", "16", field!(concurrency: Count(MOST_SENDERS)),
        "Sender threads of each destination, and so its maximum number of concurrent requests per relay").by("RelayBuilder::concurrency"),
    setting("OUTBOX_ENDPOINT_THREADS", "64", Count((0, MOST_SENDERS), |config| config.endpoint_threads, |config, count| {
            config.set_endpoint_threads(count as usize);
        }),
        "Sender threads that all endpoints share, up to four times as many while sends take 500 ms or more; 0: serve feeds only; required if there are no other destinations").by("RelayBuilder::endpoint_threads"),
    setting("OUTBOX_ENDPOINT_HTTPS_ONLY", "true", field!(endpoint_https_only: Switch),
        "true: refuse endpoints without TLS"),
    setting("OUTBOX_ENDPOINT_PUBLIC_ONLY", "true", field!(endpoint_public_only: Switch),
        "true: endpoints may resolve only to public addresses"),
    setting("OUTBOX_ENDPOINT_PORTS", "", field!(endpoint_ports: Words("PORTS", ports)),
        "Ports allowed in URLs of endpoints, separated by commas: 443,8443; unset: any"),
    setting("OUTBOX_ENDPOINT_PROXY", "", field!(endpoint_proxy: Text("URL", Proxy::of)),
        "HTTP proxy of endpoints: a URL, or direct; unset: OUTBOX_PROXY"),
    setting("OUTBOX_ENDPOINT_CLIENT_CERT_FILE", "", field!(endpoint_client_cert_file: Text("PATH", path)),
        "PEM file with the client certificate that endpoints see, and its chain (mTLS)"),
    setting("OUTBOX_ENDPOINT_CLIENT_KEY_FILE", "", field!(endpoint_client_key_file: Text("PATH", path)),
        "PEM file with the key of this certificate"),
    setting("OUTBOX_ENDPOINT_DISABLE_AFTER", "120h", field!(endpoint_disable_after: Time(TICK)),
        "How long an endpoint may fail before the relay disables it"),
    setting("OUTBOX_ENDPOINT_MODE", "structured", field!(endpoint_mode: Text("WORD", Mode::read)),
        "CloudEvents mode of requests to endpoints without their own: binary, structured or batched"),
    setting("OUTBOX_ENDPOINT_VERIFICATION", "none", field!(endpoint_verification: Text("WORD", Verification::read)),
        "How endpoints that customers register in the portal show that they want messages: none, challenge or cloudevents"),
    setting("OUTBOX_ENDPOINT_TIMEOUT", "15s", field!(endpoint_timeout: Time(TICK)),
        "Time limit of one send to an endpoint without its own, up to 5m"),
    setting("OUTBOX_ENDPOINT_MAX_ATTEMPTS", "10", field!(endpoint_max_attempts: Count(MOST)),
        "Failed attempts at an endpoint without its own limit after which a message is dead-lettered"),
    setting("OUTBOX_ENDPOINT_BACKOFF", "5s,5m,30m,2h,5h,10h,14h,20h,24h", field!(endpoint_backoff: Text("BACKOFF", Backoff::from_str)),
        "Delay between attempts at an endpoint without its own"),
    setting("OUTBOX_BATCH", "500", field!(batch: Count(10_000)),
        "Maximum messages per claim or settle; doubled in batched mode").by("RelayBuilder::batch"),
    setting("OUTBOX_POLL_INTERVAL", "500ms", field!(poll_interval: Time(TICK)),
        "How long an idle relay waits between polls").by("RelayBuilder::poll_interval"),
    setting("OUTBOX_LEASE", "60s", field!(lease: Time(TICK)),
        "How long a relay keeps its claimed messages without renewing its lease").by("RelayBuilder::lease"),
    setting("OUTBOX_SEND_TIMEOUT", "2500ms", field!(send_timeout: Time(TICK)),
        "Time limit of one send, from resolving the name to the end of the response").by("RelayBuilder::send_timeout"),
    setting("OUTBOX_MAX_ATTEMPTS", "20", field!(max_attempts: Count(MOST)),
        "Failed attempts after which a message is dead-lettered").by("RelayBuilder::max_attempts"),
    setting("OUTBOX_BACKOFF", "exponential(5s, 1h)", field!(backoff: Text("BACKOFF", Backoff::from_str)),
        "Delay between attempts: exponential(base, cap), exponential(base, cap, jitter 20%), or a table 5s,10s,20s; jitter shortens each delay at random by up to this share (default 50%)").by("RelayBuilder::backoff"),
    setting("OUTBOX_SHUTDOWN_TIMEOUT", "30s", field!(shutdown_timeout: Time(Duration::ZERO)),
        "Time at shutdown for sends in flight and the last settles"),
    setting("OUTBOX_ON_DEAD", "continue", field!(on_dead: Text("WORD", OnDead::read)),
        "Whether later messages with the ordering key of a dead letter are sent or wait: continue or block"),
    setting("OUTBOX_SINGLE_ACTIVE", "false", field!(single_active: Switch),
        "true: one relay of the outbox is active, the others stand by and take over"),
    setting("OUTBOX_SHARE_CONNECTION", "false", field!(share_connection: Switch),
        "true: a relay uses two connections, and one more with a listener, instead of up to seven; slower under load"),
    setting("OUTBOX_LISTENER", "true", field!(listener: Switch),
        "false: the relay finds new messages by polling only"),
    setting("OUTBOX_LISTENER_URL", "", field!(listener_url: Text("URL", database_url)),
        "Direct connection for the listener, if DATABASE_URL leads through a pooler; or OUTBOX_LISTENER_URL_FILE").at(OwnFile).by("RelayBuilder::listener_url"),
    setting("OUTBOX_RETENTION", "168h", field!(retention: Time(Duration::ZERO)),
        "How long the ledger keeps settled messages; dead letters do not expire").by("RelayBuilder::retention"),
    setting("OUTBOX_INBOX_RETENTION", "", field!(inbox_retention: Text("DURATION", duration)),
        "How long the inbox remembers handled messages; unset: the relay does not clean the inbox"),
    setting("OUTBOX_FEED_RETENTION", "168h", field!(feed_retention: Time(Duration::ZERO)),
        "How long feeds keep their events, read or not; a sixth longer at most"),
    setting("OUTBOX_FEED_MAX_BYTES", "", field!(feed_max_bytes: Text("BYTES", bytes)),
        "Most bytes of the events of all feeds together, beyond which the oldest go early; unset: no limit"),
    setting("OUTBOX_FEED_UNREAD_AFTER", "72h", field!(feed_unread_after: Time(Duration::ZERO)),
        "How long nobody reads a feed with new events until its state is unread"),
    setting("OUTBOX_CLEANER", "true", field!(cleaner: Switch),
        "false: the ledger is never cleaned"),
    setting("OUTBOX_LEDGER_PAYLOAD", "false", field!(ledger_payload: SwitchOr("DURATION", LedgerPayload::read)),
        "true: the ledger keeps payloads and headers; or for how long, less than the retention, such as 72h"),
    setting("OUTBOX_OWN_EVENTS", "false", field!(own_events: Switch),
        "true: what happens to destinations (failing, unread, recovered, paused, disabled, open breakers, dead letters) becomes messages (outbox.…)").by("RelayBuilder::own_events"),
    setting("OUTBOX_LOG_FORMAT", "text", field!(log_format: Text("WORD", LogFormat::read)),
        "Format of log lines: text or json"),
    setting("OUTBOX_ADMIN_ADDR", "", field!(admin.addr: Text("ADDRESS", admin::addr)),
        "Address of the admin page, health and metrics, such as 127.0.0.1:8687; unset: `run` has none, `admin` uses 127.0.0.1:8687"),
    setting("OUTBOX_FEED_WAITERS", "1000", field!(feed_waiters: Count(100_000)),
        "Most requests that wait for new events of feeds at the same time; beyond, 429"),
    setting("OUTBOX_ADMIN_TOKEN", "", field!(admin.token: Text("TOKEN", admin::token)),
        "Token that the admin page asks for (32 characters or more); required beyond loopback; or OUTBOX_ADMIN_TOKEN_FILE").at(OwnFile),
    setting("OUTBOX_ADMIN_HOSTS", "", field!(admin.hosts: Words("HOSTS", admin::hosts)),
        "Host names of the admin page, separated by commas; IP addresses and localhost always work"),
    setting("OUTBOX_ADMIN_BASE", "", field!(admin.base: Text("PATH", admin::base)),
        "Path below which the admin page is served, such as /ops/outbox, whether a proxy keeps or removes it"),
    setting("OUTBOX_ADMIN_PAYLOADS", "false", field!(admin.payloads: Switch),
        "true: the admin page shows payloads, headers and responses; false: only their shape"),
    setting("OUTBOX_ADMIN_READ_ONLY", "false", field!(admin.read_only: Switch),
        "true: the admin page changes nothing"),
];

pub(super) fn unknown(variable: &str) -> ConfigError {
    let reason = match nearest(variable, SETTINGS.iter().map(|setting| setting.variable)) {
        Some(name) => format!("unknown setting: did you mean {name}?"),
        None => "unknown setting".to_owned(),
    };
    ConfigError::new(variable, reason)
}

//! The table of settings, and the error of one that cannot be used.

/// One setting: its variable, its default as one would write it, and what it does.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Setting {
    /// The variable of the environment.
    pub variable: &'static str,
    /// The default, empty where there is none.
    pub default: &'static str,
    /// What it does, in a sentence.
    pub summary: &'static str,
}

const fn setting(variable: &'static str, default: &'static str, summary: &'static str) -> Setting {
    Setting {
        variable,
        default,
        summary,
    }
}

/// All settings. Defaults stand here and nowhere else.
pub const SETTINGS: &[Setting] = &[
    setting(
        "DATABASE_URL",
        "",
        "PostgreSQL, as a URL or key=value pairs; or DATABASE_URL_FILE",
    ),
    setting(
        "OUTBOX_CONFIG",
        "",
        "Path of an outbox.toml with settings, destinations and routes",
    ),
    setting(
        "OUTBOX_ENABLED",
        "true",
        "false: claim and send nothing; nothing is lost",
    ),
    setting(
        "OUTBOX_TABLE",
        "outbox",
        "The outbox to work on: name or schema.name",
    ),
    setting(
        "OUTBOX_URL",
        "",
        "The destination of every topic that no route serves; or OUTBOX_URL_FILE",
    ),
    setting(
        "OUTBOX_SECRET",
        "",
        "Signs requests: whsec_…, or several, the newest first; or OUTBOX_SECRET_FILE",
    ),
    setting(
        "OUTBOX_MODE",
        "binary",
        "How requests look (CloudEvents): binary, structured or batched",
    ),
    setting(
        "OUTBOX_SOURCE",
        "",
        "ce-source of all messages; unset: diesel-outbox/ and the outbox's name",
    ),
    setting(
        "OUTBOX_HTTPS_ONLY",
        "false",
        "true: destinations without TLS are refused",
    ),
    setting(
        "OUTBOX_PUBLIC_ONLY",
        "false",
        "true: destinations may resolve to public addresses only, unless marked internal",
    ),
    setting(
        "OUTBOX_TLS_ROOTS",
        "bundled",
        "Trusted certificates: bundled (Mozilla's), system, or the path of a PEM file",
    ),
    setting(
        "OUTBOX_PROXY",
        "direct",
        "HTTP proxy of all destinations: a URL, or direct; never taken from elsewhere",
    ),
    setting(
        "OUTBOX_NO_PROXY",
        "",
        "Hosts that are reached without the proxy: names, .suffix or networks, with commas",
    ),
    setting(
        "OUTBOX_CONCURRENCY",
        "16",
        "Threads that send to a destination; each has its own",
    ),
    setting(
        "OUTBOX_BATCH",
        "500",
        "Messages claimed, and settled, at once at most; twice as many in batched mode",
    ),
    setting(
        "OUTBOX_POLL_INTERVAL",
        "500ms",
        "How long an idle relay waits before it looks again",
    ),
    setting(
        "OUTBOX_LEASE",
        "60s",
        "How long a silent relay keeps its messages",
    ),
    setting(
        "OUTBOX_SEND_TIMEOUT",
        "2500ms",
        "For one send, from resolving the name to the end of the answer",
    ),
    setting(
        "OUTBOX_MAX_ATTEMPTS",
        "20",
        "Failed attempts after which a message is dead",
    ),
    setting(
        "OUTBOX_BACKOFF",
        "exponential(5s, 1h)",
        "Delay between attempts: exponential(base, cap), exponential(base, cap, jitter 20%) (the share that is random; 50% if not said), or a table 5s,10s,20s",
    ),
    setting(
        "OUTBOX_SHUTDOWN_TIMEOUT",
        "30s",
        "Time for sends under way and the last settles",
    ),
    setting(
        "OUTBOX_ON_DEAD",
        "continue",
        "What a dead message means for those behind it with its ordering key: continue or block",
    ),
    setting(
        "OUTBOX_SINGLE_ACTIVE",
        "false",
        "true: one relay of an outbox works, the others stand by and take over",
    ),
    setting(
        "OUTBOX_LISTENER",
        "true",
        "false: the relay finds new messages by polling only",
    ),
    setting(
        "OUTBOX_LISTENER_URL",
        "",
        "Direct connection to listen on, where DATABASE_URL leads through a pooler; or OUTBOX_LISTENER_URL_FILE",
    ),
    setting(
        "OUTBOX_RETENTION",
        "168h",
        "How long the ledger keeps settled messages",
    ),
    setting(
        "OUTBOX_INBOX_RETENTION",
        "",
        "How long the inbox remembers what was handled here; unset: the relay does not clean it",
    ),
    setting(
        "OUTBOX_CLEANER",
        "true",
        "false: the ledger is never cleaned",
    ),
    setting(
        "OUTBOX_LEDGER_PAYLOAD",
        "false",
        "true: the ledger keeps payloads",
    ),
    setting("OUTBOX_LOG_FORMAT", "text", "text or json"),
    setting(
        "OUTBOX_ADMIN_ADDR",
        "",
        "Where the binary serves its admin page, health and metrics: 127.0.0.1:8687; unset: nowhere",
    ),
    setting(
        "OUTBOX_ADMIN_TOKEN",
        "",
        "What the admin page asks for (32 characters or more); needed beyond the loopback; or OUTBOX_ADMIN_TOKEN_FILE",
    ),
    setting(
        "OUTBOX_ADMIN_HOSTS",
        "",
        "Names by which the admin page is reached, with commas; IP addresses and localhost always work",
    ),
    setting(
        "OUTBOX_ADMIN_PAYLOADS",
        "false",
        "true: the admin page shows payloads, headers and answers; else only their shape",
    ),
    setting(
        "OUTBOX_ADMIN_READ_ONLY",
        "false",
        "true: the admin page changes nothing",
    ),
];

/// The settings whose values may stand in files: that of `DATABASE_URL` in the one that `DATABASE_URL_FILE` names.
pub(super) const IN_FILES: [&str; 5] = [
    "DATABASE_URL",
    "OUTBOX_ADMIN_TOKEN",
    "OUTBOX_LISTENER_URL",
    "OUTBOX_SECRET",
    "OUTBOX_URL",
];

/// A setting that cannot be used, by its name.
///
/// ```
/// use diesel_outbox::{Config, ConfigError};
///
/// let mut config = Config::default();
/// if let Err(error) = config.set("OUTBOX_LEES", "30s") {
///     assert_eq!(error.key(), "OUTBOX_LEES");
///     assert_eq!(error.reason(), "there is no such setting; OUTBOX_LEASE is one");
/// }
///
/// // An application's own settings can fail in the same way.
/// let error = ConfigError::new("shop.currency", "it is empty");
/// assert_eq!(error.to_string(), "shop.currency: it is empty");
/// let error = ConfigError::unknown_key("shop.curency", "curency", &["currency", "name"]);
/// assert_eq!(error.reason(), "there is no such key; currency is one");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct ConfigError {
    key: String,
    reason: String,
}

impl ConfigError {
    /// An error of the setting `key`.
    pub fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            reason: reason.into(),
        }
    }

    /// An error of `key`, whose last part `word` is none of the `known` words. It tells the nearest
    /// of them or, where none is near, all.
    pub fn unknown_key(key: impl Into<String>, word: &str, known: &[&str]) -> Self {
        let nearest = known
            .iter()
            // What is much longer is near to none, and would take its time.
            .filter(|other| word.len() <= other.len() + 3)
            .map(|other| (edits(word, other), *other))
            .min()
            .filter(|(edits, other)| *edits <= (other.len() / 2).min(3));
        let reason = match nearest {
            Some((_, other)) => format!("there is no such key; {other} is one"),
            None => format!("there is no such key; there are {}", known.join(", ")),
        };
        Self::new(key, reason)
    }

    /// The setting's name.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What is wrong with it.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

pub(super) fn unknown(variable: &str) -> ConfigError {
    let nearest = SETTINGS
        .iter()
        .map(|setting| (edits(variable, setting.variable), setting.variable))
        .min()
        .filter(|(edits, _)| *edits <= 3);
    match nearest {
        Some((_, name)) => bad(
            variable,
            &format!("there is no such setting; {name} is one"),
        ),
        None => bad(variable, "there is no such setting"),
    }
}

/// Levenshtein's distance.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

pub(super) fn bad(key: &str, reason: &str) -> ConfigError {
    ConfigError {
        key: key.to_owned(),
        reason: reason.to_owned(),
    }
}

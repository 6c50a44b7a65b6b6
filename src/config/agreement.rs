//! The settings that the relays of an outbox must agree on. A relay publishes its own with its lease.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::config::Config;

/// The settings of a relay that others must have, too, as JSON: only those that it uses. `registered`: the relay sends to
/// endpoints.
pub(super) fn published(config: &Config, registered: bool) -> String {
    let time = |duration| humantime::format_duration(duration).to_string();
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    let mut add = |setting: &str, value: String| all.insert(setting.to_owned(), value);
    add("OUTBOX_LEDGER_PAYLOAD", config.ledger_payload.to_string());
    add("OUTBOX_ON_DEAD", config.on_dead.to_string());
    if config.cleaner {
        add("OUTBOX_RETENTION", time(config.retention));
    }
    for destination in config.all_destinations() {
        if let Some(on_dead) = destination.policy.on_dead {
            let setting = format!("destinations.{}.on_dead", destination.name);
            add(&setting, on_dead.to_string());
        }
    }
    if registered {
        add("OUTBOX_ENDPOINT_MODE", config.endpoint_mode.to_string());
        add("OUTBOX_ENDPOINT_TIMEOUT", time(config.endpoint_timeout));
        add(
            "OUTBOX_ENDPOINT_BACKOFF",
            config.endpoint_backoff.to_string(),
        );
        let attempts = config.endpoint_max_attempts.to_string();
        add("OUTBOX_ENDPOINT_MAX_ATTEMPTS", attempts);
        let disable_after = time(config.endpoint_disable_after);
        add("OUTBOX_ENDPOINT_DISABLE_AFTER", disable_after);
        let mut keys: Vec<String> = config.secret_keys.bytes().map(fingerprint).collect();
        keys.sort_unstable();
        let keys = match keys.is_empty() {
            true => "unset".to_owned(),
            false => keys.join("+"),
        };
        add("OUTBOX_SECRET_KEY", keys);
    }
    serde_json::json!(all).to_string()
}

/// The first 8 hexadecimal digits of a key's SHA-256: a random key of 256 bits cannot be guessed from it.
fn fingerprint(key: &[u8; 32]) -> String {
    let digest = Sha256::digest(key);
    digest[..4]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

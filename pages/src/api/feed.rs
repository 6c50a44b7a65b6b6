//! Feeds as JSON, for operators and for customers.

use diesel_outbox::program::{FeedState, ReaderState};
use schemars::JsonSchema;
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use uuid::Uuid;

use super::Time;

/// A feed, and how far it is read.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Feed {
    name: String,
    tenant: Option<Uuid>,
    /// Of the first event that is kept; above `last_position`: none is.
    first_position: i64,
    last_position: i64,
    /// Up to where readers with tokens have read.
    read_to: i64,
    /// Events that no reader with a token has read.
    lag_events: u64,
    /// Since the first of them was stored. Null: all are read.
    lag_seconds: Option<f64>,
    /// When a reader with a token was last here.
    last_read_at: Option<Time>,
    readers: Vec<Reader>,
}

/// A reader with a token.
#[derive(Debug, Serialize, JsonSchema)]
struct Reader {
    created_at: Time,
    /// When the token ends. Null: it stays.
    valid_until: Option<Time>,
    last_position: Option<i64>,
    last_read_at: Option<Time>,
}

/// A token for the readers of a feed, which is shown only now.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Token {
    /// Null: it was shown before.
    token: Option<String>,
}

impl Feed {
    pub(crate) fn of(state: &FeedState) -> Self {
        Self {
            name: state.name.clone(),
            tenant: state.tenant_id,
            first_position: state.first_position,
            last_position: state.last_position,
            read_to: state.read_to,
            lag_events: state.unread(),
            lag_seconds: state.lag.map(|lag| lag.as_secs_f64()),
            last_read_at: state.last_read_at().map(Time::from),
            readers: state.readers.iter().map(Reader::of).collect(),
        }
    }
}

impl Reader {
    fn of(one: &ReaderState) -> Self {
        Self {
            created_at: one.created_at.into(),
            valid_until: one.valid_until.map(Time::from),
            last_position: one.last_position,
            last_read_at: one.last_read_at.map(Time::from),
        }
    }
}

impl From<SecretString> for Token {
    fn from(token: SecretString) -> Self {
        Self {
            token: Some(token.expose_secret().to_owned()),
        }
    }
}

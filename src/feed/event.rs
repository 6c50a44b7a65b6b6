//! An event of a feed, as it is stored.

use std::time::SystemTime;

use uuid::Uuid;

use super::cursor::{Cursor, Mark};

/// An event of a feed.
#[derive(Debug, Clone)]
pub struct FeedEvent {
    /// Its position: 1 more than that of the event before it.
    pub position: i64,
    /// The id of the message.
    pub message_id: Uuid,
    /// The position of the message in the outbox.
    pub sequence: i64,
    /// The topic.
    pub topic: String,
    /// The payload as JSON, byte for byte. `None`: it was expunged.
    pub payload: Option<String>,
    /// The headers as a JSON object.
    pub headers: Option<String>,
    /// The ordering key.
    pub ordering_key: Option<String>,
    /// The tenant of the message.
    pub tenant_id: Option<Uuid>,
    /// When the message was enqueued.
    pub created_at: SystemTime,
    /// When the event occurred, if the application has said so.
    pub occurred_at: Option<SystemTime>,
    /// When it was stored, in PostgreSQL's microseconds.
    pub(crate) stored_at: i64,
}

impl FeedEvent {
    /// The cursor behind it.
    pub(crate) fn cursor(&self) -> Cursor {
        let mark = Mark {
            id: self.message_id,
            stored_at: Some(self.stored_at),
        };
        Cursor::new(self.position, Some(mark))
    }
}

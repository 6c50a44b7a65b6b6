//! All stored payloads: of messages that wait, of dead letters, and of the ledger where it keeps them.

use std::time::Duration;

use diesel::PgConnection;
use diesel::pg::PgRowByRowLoadingMode;
use diesel::prelude::{ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use uuid::Uuid;

use super::messages::KeptIn;
use crate::event::version_of;
use crate::name::OutboxName;
use crate::sql::functions::{JsonText, MaybeJson};
use crate::sql::looking::looking;
use crate::sql::table::{dead, ledger, outbox};
use crate::status::Status;

/// The largest ledger is read in this time.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// A stored payload.
#[derive(Debug)]
#[non_exhaustive]
pub struct StoredPayload {
    /// Where it is stored.
    pub kept_in: KeptIn,
    /// The id of the message.
    pub message_id: Uuid,
    /// The topic of the message.
    pub topic: String,
    /// The version of the payload's shape: see [`Message::version`](crate::Message::version).
    pub version: u32,
    /// The payload, as it was written.
    pub payload: String,
}

/// Calls `each` for each stored payload, without holding more than one in memory. Needs as long as the database to read
/// all of them.
pub(crate) fn for_each(
    conn: &mut PgConnection,
    name: &OutboxName,
    mut each: impl FnMut(StoredPayload),
) -> QueryResult<()> {
    type PayloadRow = (Uuid, String, MaybeJson, JsonText);
    let mut tell = |kept_in: KeptIn, (message_id, topic, headers, payload): PayloadRow| {
        let headers: Option<String> = headers.into();
        each(StoredPayload {
            kept_in,
            message_id,
            topic,
            version: version_of(headers.as_deref()),
            payload: payload.into(),
        });
    };
    looking(conn, Some(TIMEOUT), |conn| {
        let waiting = outbox::table(name.outbox()).select((
            outbox::message_id,
            outbox::topic,
            outbox::headers,
            outbox::payload,
        ));
        for row in waiting.load_iter::<PayloadRow, PgRowByRowLoadingMode>(conn)? {
            tell(KeptIn::Live, row?);
        }
        let dead = dead::table(name.dead()).select((
            dead::message_id,
            dead::topic,
            dead::headers,
            dead::payload,
        ));
        for row in dead.load_iter::<PayloadRow, PgRowByRowLoadingMode>(conn)? {
            tell(KeptIn::Dead, row?);
        }
        let kept = ledger::table(name.ledger())
            .filter(ledger::payload.is_not_null())
            // Its dead letter has the same payload.
            .filter(ledger::status.ne(Status::Dead))
            .select((
                ledger::message_id,
                ledger::topic,
                ledger::headers,
                ledger::payload.assume_not_null(),
            ));
        for row in kept.load_iter::<PayloadRow, PgRowByRowLoadingMode>(conn)? {
            tell(KeptIn::Ledger, row?);
        }
        Ok(())
    })
}

//! Removes the content of one message.

use diesel::{Connection, PgConnection};
use uuid::Uuid;

use super::Note;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::operate::audit::Act;
use crate::store::operate::expunge as store;
use crate::store::pinned::pinned;

/// What [`expunge`] has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Expunged {
    /// Live rows cancelled: a message has one for each destination.
    pub cancelled: u64,
    /// Dead letters discarded.
    pub discarded: u64,
    /// Ledger entries blanked.
    pub ledger_entries: u64,
    /// Attempts blanked.
    pub attempts: u64,
    /// Live rows that remain because relays hold them. Call [`expunge`] again once they are settled.
    pub left: u64,
}

impl Expunged {
    /// Whether the outbox has nothing of this message.
    ///
    /// ```
    /// use diesel_outbox::admin::Expunged;
    ///
    /// assert!(Expunged::default().is_unknown());
    /// ```
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

/// Removes the content of a message wherever the outbox has it: payload, headers, responses and errors. This cannot be
/// undone.
///
/// | data | effect |
/// |---|---|
/// | live rows | Cancelled, so that they are not sent |
/// | dead letters | Discarded; ordering keys that they blocked continue |
/// | the ledger and the history of attempts | The content is blanked. What happened, when and where remains, with the keys |
///
/// All of it is one transaction. Rows that a relay holds are [`left`](Expunged::left). What a receiver got, log lines and
/// backups are not touched. The role needs the rights of the outbox's owner: no relay may change the ledger.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// # use uuid::Uuid;
/// fn remove(conn: &mut PgConnection, outbox: &OutboxName, message: Uuid) -> Result<bool, DatabaseError> {
///     let note = admin::Note::new("alice", "a card number by mistake");
///     let expunged = admin::expunge(conn, outbox, message, &note)?;
///     Ok(!expunged.is_unknown() && expunged.left == 0)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`]: [`Schema`](DatabaseError::Schema) if the role lacks rights. Nothing is changed then.
pub fn expunge(
    conn: &mut PgConnection,
    name: &OutboxName,
    message: Uuid,
    note: &Note,
) -> Result<Expunged, DatabaseError> {
    pinned(conn, name, |conn, name| {
        let missing = store::missing(conn, name)?;
        if !missing.is_empty() {
            return Err(DatabaseError::Schema(format!(
                "cannot expunge the message: this needs the rights of the owner of the outbox {name}, and the role lacks {}",
                missing.join(", ")
            )));
        }
        let rows = conn.transaction(|conn| {
            let rows = store::expunge(conn, name, message, note.as_str())?;
            if rows != store::Rows::default() {
                note.audit(conn, name, Act::ExpungeMessage, &message.to_string())?;
            }
            diesel::QueryResult::Ok(rows)
        })?;
        let count = |rows: usize| u64::try_from(rows).unwrap_or(u64::MAX);
        Ok(Expunged {
            cancelled: count(rows.cancelled),
            discarded: count(rows.discarded),
            ledger_entries: count(rows.entries),
            attempts: count(rows.attempts),
            left: count(rows.left),
        })
    })
}

//! Removes the content of one message.

use diesel::PgConnection;
use uuid::Uuid;

use super::Note;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::operate::audit::Act;
use crate::store::operate::expunge::{self as store, Expunged};
use crate::store::pinned::pinned;

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
        store::check_rights(conn, name)?;
        let expunged = store::expunge(conn, name, message, note.as_str())?;
        if !expunged.is_unknown() {
            note.audit(conn, name, Act::ExpungeMessage, &message.to_string())?;
        }
        Ok(expunged)
    })
}

//! A delivered message or a dead letter goes to its endpoint once more.

use diesel::{Connection, PgConnection};
use uuid::Uuid;

use crate::endpoints::{EndpointError, Endpoints};
use crate::operate::sql::audit::Act;
use crate::operate::waiting::Note;
use crate::sql::pinned::pinned;

/// Sends a message to the endpoint again, and records who did, in the history of the message, too. `false`: there is no such
/// endpoint or message.
///
/// # Errors
/// Those of [`Endpoints::send_again`].
pub fn send_again(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    name: &str,
    id: Uuid,
    note: &Note,
) -> Result<bool, EndpointError> {
    conn.transaction(|conn| {
        let is_there = endpoints.send_again_by(conn, name, id, note.as_str())?;
        if is_there {
            pinned(conn, endpoints.name, |conn, outbox| {
                note.audit(conn, outbox, Act::SendAgain, name)
            })?;
        }
        Ok(is_there)
    })
}

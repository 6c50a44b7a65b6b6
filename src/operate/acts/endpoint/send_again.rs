//! A delivered message or a dead letter goes to its endpoint once more.

use diesel::PgConnection;
use uuid::Uuid;

use crate::endpoints::{EndpointError, Endpoints};
use crate::operate::sql::audit::Act;
use crate::operate::waiting::{Note, audited};

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
    audited(conn, endpoints.name, note, Act::SendAgain, name, |conn| {
        endpoints.send_again_by(conn, name, id, note.as_str())
    })
}

//! An endpoint has a new secret.

use std::time::Duration;

use diesel::PgConnection;

use crate::config::SigningSecret;
use crate::endpoints::{EndpointError, Endpoints};
use crate::operate::sql::audit::Act;
use crate::operate::waiting::{Note, audited};

/// Gives the endpoint this secret, and records who did. The older ones also sign for this time. `false`: there is no such
/// endpoint.
///
/// # Errors
/// Those of [`Endpoints::rotate_to`].
pub fn rotate(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    name: &str,
    (secret, keep): (&SigningSecret, Duration),
    note: &Note,
) -> Result<bool, EndpointError> {
    let act = Act::RotateEndpoint;
    audited(conn, endpoints.name, note, act, name, |conn| {
        endpoints.rotate_to(conn, name, secret, keep)
    })
}

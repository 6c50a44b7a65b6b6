//! Requests to an endpoint that a person asks for. Who has asked is recorded before the request is sent: it may have been
//! received although nobody hears of its result.

use diesel::PgConnection;

use crate::config::Config;
use crate::endpoints::{EndpointCheck, EndpointError, EndpointTest, Endpoints};
use crate::operate::sql::audit::Act;
use crate::operate::waiting::Note;

/// Prepares a test event. `None`: there is no such endpoint.
///
/// # Errors
/// Those of [`Endpoints::test`].
pub fn begin_test(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    name: &str,
    config: &Config,
    note: &Note,
) -> Result<Option<EndpointTest>, EndpointError> {
    note.recorded(conn, endpoints.name, Act::TestEndpoint, name, |conn| {
        endpoints.test(conn, name, config)
    })
}

/// Prepares the question whether the endpoint wants messages. `None`: there is no such endpoint.
///
/// # Errors
/// Those of [`Endpoints::verify`].
pub fn begin_verification(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    name: &str,
    config: &Config,
    note: &Note,
) -> Result<Option<EndpointCheck>, EndpointError> {
    note.recorded(conn, endpoints.name, Act::VerifyEndpoint, name, |conn| {
        endpoints.verify(conn, name, config)
    })
}

//! What whoever registers or changes an endpoint is told.

use diesel::PgConnection;

use crate::config::Config;
use crate::endpoints::{EndpointError, EndpointKind, Endpoints};

/// Why a relay with these settings would not send to the endpoint. Its messages wait, unless another relay has settings that
/// allow it.
///
/// # Errors
/// If the database fails.
pub fn refusal(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    name: &str,
    config: &Config,
) -> Result<Option<String>, EndpointError> {
    let found = endpoints.get(conn, name)?;
    if found.is_none_or(|one| one.kind == EndpointKind::Feed && one.problem.is_none()) {
        return Ok(None);
    }
    match endpoints.test(conn, name, config) {
        Ok(_) => Ok(None),
        Err(error @ (EndpointError::Refused(_) | EndpointError::Invalid(_))) => {
            Ok(Some(error.to_string()))
        }
        Err(error) => Err(error),
    }
}

//! The pool that a relay opens for its handlers, so that they take no connection from the application.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::r2d2::{self, ConnectionManager, ManageConnection};

use super::HandlerError;
use super::context::{ConnectionPool, Pooled};
use crate::engine::host::sql::connection::{LoginTurn, Manager};
use crate::engine::host::sql::logins::Logins;

/// How long a call waits for a connection. There is one for each concurrent call, so a call waits only for the server, or
/// for calls past their limit.
const PATIENCE: Duration = Duration::from_secs(5);

/// Opens connections when they are needed, at most `most`.
pub(crate) fn pool_of(manager: Arc<dyn Manager>, most: u32) -> Arc<ConnectionPool> {
    let pool = r2d2::Pool::builder()
        .max_size(most.max(1))
        .min_idle(Some(0))
        .connection_timeout(PATIENCE)
        .error_handler(Box::new(r2d2::NopErrorHandler))
        .build_unchecked(OwnPool {
            manager,
            logins: Logins::default(),
        });
    Arc::new(move || match pool.get() {
        Ok(conn) => Ok(Box::new(conn) as Pooled),
        Err(error) => Err(no_connection(error)),
    })
}

/// The source of connections of a URL.
pub(crate) fn of_url(database_url: &str) -> Arc<dyn Manager> {
    Arc::new(ConnectionManager::<PgConnection>::new(database_url))
}

/// The error of a handler that got no connection.
pub(crate) fn no_connection(error: impl std::fmt::Display) -> HandlerError {
    HandlerError::unavailable(format_args!("no connection for the handler: {error}"))
}

struct OwnPool {
    manager: Arc<dyn Manager>,
    /// r2d2 tries again for each connection that is wanted.
    logins: Logins,
}

impl ManageConnection for OwnPool {
    type Connection = PgConnection;
    type Error = r2d2::Error;

    fn connect(&self) -> Result<PgConnection, r2d2::Error> {
        let bad = |error: crate::DatabaseError| {
            r2d2::Error::ConnectionError(diesel::ConnectionError::BadConnection(error.to_string()))
        };
        let attempt = self.logins.begin(Instant::now()).map_err(bad)?;
        let turn = LoginTurn::wait();
        let connected = self.manager.connect();
        drop(turn);
        attempt.end(&connected, Instant::now());
        connected.map_err(bad)
    }

    fn is_valid(&self, conn: &mut PgConnection) -> Result<(), r2d2::Error> {
        match self.manager.is_valid(conn) {
            true => Ok(()),
            false => Err(r2d2::Error::QueryError(
                diesel::result::Error::BrokenTransactionManager,
            )),
        }
    }

    fn has_broken(&self, conn: &mut PgConnection) -> bool {
        self.manager.has_broken(conn)
    }
}

//! Shared by unit tests: an outbox in its own schema.

use std::sync::Once;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection};

use crate::engine::host::sql::connection::{self, Plans, StatementLimits};
use crate::engine::keys::sql::lock::keep_lock;
use crate::engine::lease::sql::lease::{self, LeaseId, Registration};
use crate::name::OutboxName;
use crate::setup::sql::migrate;
use crate::setup::sql::migrate::EndpointTables::WithOutbox;

/// One thread plays all parts, so a statement that waits for another would wait forever without these timeouts.
const SESSION: &str = "SET synchronous_commit = off; SET lock_timeout = '3s'; SET statement_timeout = '10s'; SET client_min_messages = warning";

/// An outbox in its own schema, removed on drop.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) url: String,
    schema: String,
    pub(crate) name: OutboxName,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        let outbox = Self::without_endpoints();
        let made = format!(
            "SELECT public.outbox_create_endpoints('{name}'), public.outbox_create_feeds('{name}')",
            name = outbox.name
        );
        outbox.connect().batch_execute(&made).expect("endpoints");
        outbox
    }

    /// Without the tables of endpoints.
    pub(crate) fn without_endpoints() -> Self {
        static MIGRATED: Once = Once::new();
        let url = std::env::var("DATABASE_URL")
            .expect("DATABASE_URL is set: run `make test`, or `scripts/with-postgres cargo test`");
        let mut conn = PgConnection::establish(&url).expect("PostgreSQL is running");
        MIGRATED.call_once(|| {
            let first = "outbox".parse().expect("a name");
            migrate::migrate(&mut conn, &first, WithOutbox).expect("migrations run");
        });
        let schema = format!("test_{}", uuid::Uuid::now_v7().simple());
        conn.batch_execute(&format!(
            "CREATE SCHEMA {schema}; SELECT public.outbox_create('{schema}.outbox')"
        ))
        .expect("an outbox");
        let name = format!("{schema}.outbox").parse().expect("a name");
        keep_lock(&mut conn, &name).expect("a lock");
        Self { url, schema, name }
    }

    pub(crate) fn connect(&self) -> PgConnection {
        let mut conn = PgConnection::establish(&self.url).expect("PostgreSQL is running");
        conn.batch_execute(SESSION).expect("settings");
        conn
    }

    /// A lease of one minute.
    pub(crate) fn lease(&self, conn: &mut PgConnection) -> LeaseId {
        self.lease_for(conn, Duration::from_secs(60), false)
    }

    pub(crate) fn lease_for(
        &self,
        conn: &mut PgConnection,
        lease: Duration,
        is_single_active: bool,
    ) -> LeaseId {
        let registration = Registration {
            relay: "test".to_owned(),
            lease,
            is_single_active,
            serves: None,
            records_topics: false,
            settings: None,
        };
        lease::register(conn, &self.name, &registration).expect("a lease")
    }

    /// Connects with the limits of a relay.
    pub(crate) fn connect_as_relay(&self) -> PgConnection {
        let limits = StatementLimits::of_relay(Duration::from_secs(30), Plans::ByIndex);
        let connected = connection::connect(&self.url.clone().into(), "test", limits);
        connected.expect("PostgreSQL is running").conn
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        if let Ok(mut conn) = PgConnection::establish(&self.url) {
            let _ = conn.batch_execute(&format!("DROP SCHEMA {} CASCADE", self.schema));
        }
    }
}

//! A separate database, for tests of things that exist once per database.

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use url::Url;

use crate::support::{AS_POSTGRESQL_15, database_url, eventually};

/// An empty database, removed when dropped.
pub(crate) struct FreshDatabase {
    pub(crate) name: String,
    pub(crate) url: String,
}

impl FreshDatabase {
    pub(crate) fn new() -> Self {
        let name = format!("t_{}", uuid::Uuid::now_v7().simple());
        let mut url = Url::parse(&database_url()).expect("a URL");
        url.set_path(&name);
        admin(&format!("CREATE DATABASE {name}"));
        let database = Self {
            name,
            url: url.into(),
        };
        database.execute(AS_POSTGRESQL_15);
        database
    }

    pub(crate) fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url).expect("PostgreSQL is there")
    }

    /// Runs statements as `psql` would.
    pub(crate) fn execute(&self, sql: &str) {
        self.connect()
            .batch_execute(sql)
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    pub(crate) fn number(&self, select: &str) -> i64 {
        diesel::select(diesel::dsl::sql::<diesel::sql_types::BigInt>(&format!(
            "({select})::bigint"
        )))
        .get_result(&mut self.connect())
        .unwrap_or_else(|error| panic!("{select}: {error}"))
    }

    /// Reads a number from the server's statistics, including everything read by connections that are just closing. A
    /// connection reports its counts when it closes. PostgreSQL 13 and 14 record the reports a while later, in the
    /// order of the reports. Connections that only hold a snapshot are not waited for.
    pub(crate) fn statistic(&self, select: &str) -> i64 {
        let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
            AND backend_type = 'client backend' AND state <> 'idle in transaction'
            AND pid <> pg_backend_pid()";
        eventually("the others' connections have ended", || {
            self.number(others) == 0
        });
        self.execute("DROP TABLE IF EXISTS mark; CREATE TABLE mark ()");
        self.execute("SELECT FROM mark");
        eventually("the statistics are recorded", || {
            self.number("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'mark'") == 1
        });
        self.number(select)
    }

    /// The number of objects besides PostgreSQL's own: tables, views, sequences, indexes, functions.
    pub(crate) fn objects(&self) -> i64 {
        self.number(
            "SELECT (SELECT count(*) FROM pg_class WHERE relnamespace NOT IN
                        (SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_|^information_schema$'))
                  + (SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace)",
        )
    }

    /// Refuses new connections and ends the existing ones.
    pub(crate) fn close(&self) {
        admin(&format!(
            "ALTER DATABASE {} WITH ALLOW_CONNECTIONS false",
            self.name
        ));
        admin(&format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'",
            self.name
        ));
    }

    /// Accepts connections again.
    pub(crate) fn open(&self) {
        admin(&format!(
            "ALTER DATABASE {} WITH ALLOW_CONNECTIONS true",
            self.name
        ));
    }
}

fn admin(statement: &str) {
    let mut conn = PgConnection::establish(&database_url()).expect("PostgreSQL is there");
    sql_query(statement)
        .execute(&mut conn)
        .unwrap_or_else(|error| panic!("{statement}: {error}"));
}

impl Drop for FreshDatabase {
    fn drop(&mut self) {
        if let Ok(mut conn) = PgConnection::establish(&database_url()) {
            let _ = conn.batch_execute(&format!(
                "DROP DATABASE IF EXISTS {} WITH (FORCE)",
                self.name
            ));
        }
    }
}

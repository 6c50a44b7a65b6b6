//! The outbox in a migration of the application's own, as Diesel runs it.

use diesel::connection::SimpleConnection;
use diesel::migration::MigrationConnection;
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::admin::{self, Direction};
use diesel_outbox::{NewMessage, Outbox, OutboxName};

use crate::fresh::FreshDatabase;

/// A folder of migrations with one in it, as `diesel migration generate` makes it.
struct Folder {
    up: String,
    down: String,
}

const VERSION: &str = "20260101000000";

impl Folder {
    fn with_outbox(name: &OutboxName) -> Self {
        Self {
            up: format!(
                "-- Your SQL goes here\nCREATE TABLE orders (id int PRIMARY KEY);\n{}",
                admin::migration_sql(Direction::Up, name)
            ),
            down: format!(
                "-- This file should undo anything in `up.sql`\n{}\nDROP TABLE orders;\n",
                admin::migration_sql(Direction::Down, name)
            ),
        }
    }

    /// Diesel's way: SQL and record in one transaction.
    fn run(&self, conn: &mut PgConnection) {
        conn.setup().expect("Diesel's own table");
        conn.transaction(|conn| {
            conn.batch_execute(&self.up)?;
            let record = "INSERT INTO __diesel_schema_migrations (version) VALUES ($1)";
            sql_query(record)
                .bind::<diesel::sql_types::Text, _>(VERSION)
                .execute(conn)
        })
        .expect("up");
    }

    fn revert(&self, conn: &mut PgConnection) {
        conn.transaction(|conn| {
            conn.batch_execute(&self.down)?;
            sql_query("DELETE FROM __diesel_schema_migrations").execute(conn)
        })
        .expect("down");
    }
}

fn enqueues(conn: &mut PgConnection, name: &OutboxName) {
    let outbox = Outbox::new(&name.to_string()).expect("a name");
    let message = NewMessage::new("t", &1).expect("JSON");
    conn.transaction(|conn| outbox.enqueue(conn, message))
        .expect("enqueued");
    admin::check_schema(conn, name).expect("as needed");
}

#[test]
fn an_applications_migration_makes_an_outbox_and_undoes_it() {
    for name in ["outbox", "hrm.events"] {
        let database = FreshDatabase::new();
        let conn = &mut database.connect();
        let name: OutboxName = name.parse().expect("a name");
        database.execute("CREATE SCHEMA hrm");
        conn.setup().expect("Diesel's own table");
        let before = database.objects();
        let folder = Folder::with_outbox(&name);
        for _ in 0..2 {
            folder.run(conn);
            enqueues(conn, &name);
            folder.revert(conn);
            assert_eq!(database.objects(), before);
        }
    }
}

/// Our runner finds what the application's migration did, and does not trip over it when that is undone.
#[test]
fn our_runner_knows_what_an_applications_migration_did_and_undid() {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    let name = OutboxName::default();
    let folder = Folder::with_outbox(&name);
    folder.run(conn);
    let done = admin::migrate(conn, &name).expect("migrated");
    assert!(!done.is_empty());
    assert!(
        done.iter().all(|what| what.starts_with("found ")),
        "{done:?}"
    );
    enqueues(conn, &name);
    assert_eq!(
        admin::migrate(conn, &name).expect("migrated"),
        Vec::<String>::new()
    );
    folder.revert(conn);
    let done = admin::migrate(conn, &name).expect("migrated");
    assert!(
        done.iter().all(|what| what.starts_with("applied ")),
        "{done:?}"
    );
    enqueues(conn, &name);
}

/// `diesel migration revert` of the application undoes its own last migration, and not ours.
#[test]
fn what_our_runner_did_is_no_migration_of_the_application() {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    let name = OutboxName::default();
    admin::migrate(conn, &name).expect("migrated");
    let folder = Folder {
        up: "CREATE TABLE orders (id int PRIMARY KEY)".to_owned(),
        down: "DROP TABLE orders".to_owned(),
    };
    folder.run(conn);
    folder.revert(conn);
    enqueues(conn, &name);
}

//! The outbox in the application's own migrations, as Diesel runs them.

use diesel::connection::SimpleConnection;
use diesel::migration::MigrationConnection;
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_migrations::{FileBasedMigrations, MigrationHarness};
use diesel_outbox::Direction;
use diesel_outbox::admin;
use diesel_outbox::program;
use diesel_outbox::{MIGRATIONS, NewMessage, Outbox, OutboxName};

use crate::fresh::FreshDatabase;

/// A folder with one migration, as `diesel migration generate` makes it.
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

    /// Diesel's way: the SQL and its record in one transaction.
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

/// Our runner recognises the application's migration, and still works after that migration is reverted.
#[test]
fn our_runner_knows_what_an_applications_migration_did_and_undid() {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    let name = OutboxName::default();
    let folder = Folder::with_outbox(&name);
    folder.run(conn);
    let done = diesel_outbox::migrate(conn, &name).expect("migrated");
    assert!(!done.is_empty());
    assert!(
        done.iter().all(|what| what.starts_with("found ")),
        "{done:?}"
    );
    enqueues(conn, &name);
    assert_eq!(
        diesel_outbox::migrate(conn, &name).expect("migrated"),
        Vec::<String>::new()
    );
    folder.revert(conn);
    let done = diesel_outbox::migrate(conn, &name).expect("migrated");
    assert!(
        done.iter().all(|what| what.starts_with("applied ")),
        "{done:?}"
    );
    enqueues(conn, &name);
}

/// `diesel migration revert` of the application reverts its own last migration, not ours.
#[test]
fn migrations_of_our_runner_are_none_of_the_application() {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    let name = OutboxName::default();
    diesel_outbox::migrate(conn, &name).expect("migrated");
    let folder = Folder {
        up: "CREATE TABLE orders (id int PRIMARY KEY)".to_owned(),
        down: "DROP TABLE orders".to_owned(),
    };
    folder.run(conn);
    folder.revert(conn);
    enqueues(conn, &name);
}

/// The application's folder of migrations, in the layout of the `diesel` program.
fn folder_of_the_application() -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("migrations-{}", uuid::Uuid::now_v7()));
    let step = folder.join("2026-11-21-120000_orders");
    std::fs::create_dir_all(&step).expect("a folder");
    for (file, sql) in [
        (
            "up.sql",
            "CREATE TABLE orders (id int PRIMARY KEY);\nSELECT outbox_create('orders_outbox');\nSELECT outbox_create_endpoints('orders_outbox');\n",
        ),
        (
            "down.sql",
            "SELECT outbox_drop('orders_outbox');\nDROP TABLE orders;\n",
        ),
    ] {
        std::fs::write(step.join(file), sql).expect("a file");
    }
    folder
}

#[test]
fn diesels_harness_runs_our_migrations_beside_the_applications() {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    conn.setup().expect("Diesel's own table");
    let before = database.objects();
    let folder = folder_of_the_application();
    let own = FileBasedMigrations::from_path(&folder).expect("migrations");
    for _ in 0..2 {
        let ran = conn.run_pending_migrations(MIGRATIONS).expect("ours");
        let ran: Vec<String> = ran.iter().map(ToString::to_string).collect();
        assert_eq!(
            ran,
            [
                "0_outbox_000001_outbox_functions",
                "0_outbox_000002_first_outbox",
                "0_outbox_000003_inbox"
            ]
        );
        conn.run_pending_migrations(own.clone()).expect("theirs");
        let pending = conn.has_pending_migration(MIGRATIONS).expect("an answer");
        assert!(!pending);
        for name in ["outbox", "orders_outbox"] {
            enqueues(conn, &name.parse().expect("a name"));
        }
        // `diesel migration redo` and `revert` know only the folder.
        conn.revert_last_migration(own.clone()).expect("reverted");
        conn.run_pending_migrations(own.clone()).expect("run again");
        conn.revert_last_migration(own.clone()).expect("reverted");
        conn.revert_all_migrations(MIGRATIONS).expect("ours");
        assert_eq!(database.objects(), before);
    }
    std::fs::remove_dir_all(folder).expect("our folder");
}

#[test]
fn diesels_harness_and_our_command_follow_one_another_in_any_order() {
    let name = OutboxName::default();
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    diesel_outbox::migrate(conn, &name).expect("migrated");
    conn.run_pending_migrations(MIGRATIONS)
        .expect("only recorded");
    enqueues(conn, &name);
    conn.revert_last_migration(MIGRATIONS)
        .expect("the inbox is gone");
    let done = diesel_outbox::migrate(conn, &name).expect("migrated");
    assert_eq!(done, ["applied 2026-11-21-000003_inbox"]);
    conn.revert_all_migrations(MIGRATIONS)
        .expect("all reverted");
    conn.run_pending_migrations(MIGRATIONS)
        .expect("created again");
    let done = diesel_outbox::migrate(conn, &name).expect("nothing to do");
    assert_eq!(done, Vec::<String>::new());
    enqueues(conn, &name);

    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    conn.run_pending_migrations(MIGRATIONS).expect("created");
    let done = diesel_outbox::migrate(conn, &name).expect("only recorded");
    assert_eq!(done.len(), 3);
    assert!(
        done.iter().all(|step| step.starts_with("found ")),
        "{done:?}"
    );
    program::revert_migrations(conn).expect("reverted");
    // The migrations were reverted behind its back: objects that are already gone cause no error.
    conn.revert_all_migrations(MIGRATIONS)
        .expect("nothing to do");
}

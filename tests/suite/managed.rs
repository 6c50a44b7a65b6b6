//! A relay whose connections come from a connection manager of the application.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::r2d2::{self, ManageConnection};
use diesel::{Connection, PgConnection};
use diesel_outbox::{NewMessage, Outbox, Relay, RelayBuilder};
use url::Url;

use crate::fresh::FreshDatabase;
use crate::logged;
use crate::support::{Receiver, end, eventually};

/// A database whose outbox belongs to a role, and a login that may only become this role.
struct Ground {
    database: FreshDatabase,
    roles: Roles,
}

/// Roles belong to the server, so each test has its own. Dropped after the database.
struct Roles(String);

impl Drop for Roles {
    fn drop(&mut self) {
        if let Ok(mut conn) = PgConnection::establish(&crate::support::database_url()) {
            let (owner, login) = (self.owner(), self.login());
            let _ = conn.batch_execute(&format!("DROP ROLE {login}; DROP ROLE {owner}"));
        }
    }
}

impl Roles {
    fn owner(&self) -> String {
        format!("{}_owner", self.0)
    }

    fn login(&self) -> String {
        format!("{}_login", self.0)
    }
}

impl Ground {
    fn new() -> Self {
        let database = FreshDatabase::new();
        let roles = Roles(format!("m_{}", uuid::Uuid::now_v7().simple()));
        let (owner, login) = (roles.owner(), roles.login());
        database.execute(&format!(
            "CREATE ROLE {owner}; CREATE ROLE {login} LOGIN NOINHERIT PASSWORD 'first' IN ROLE {owner};
             ALTER SCHEMA public OWNER TO {owner}"
        ));
        let mut conn = database.connect();
        conn.batch_execute(&format!("SET ROLE {owner}"))
            .expect("a role");
        diesel_outbox::migrate(&mut conn, Outbox::default().name()).expect("migrated");
        Self { database, roles }
    }

    fn url(&self, password: &str) -> String {
        let mut url = Url::parse(&self.database.url).expect("a URL");
        url.set_username(&self.roles.login()).expect("a user");
        url.set_password(Some(password)).expect("a password");
        url.into()
    }

    fn manager(&self) -> Manager {
        Manager(Arc::new(State {
            url: Mutex::new(self.url("first")),
            role: self.roles.owner(),
            asked: AtomicUsize::new(0),
        }))
    }

    fn relay(&self, manager: &Manager, receiver: &Receiver) -> RelayBuilder {
        Relay::managed(manager.clone()).url(&receiver.url())
    }

    fn enqueue(&self) {
        let message = NewMessage::new("order.paid", &7).expect("JSON");
        self.database
            .connect()
            .transaction(|conn| Outbox::default().enqueue(conn, message))
            .expect("enqueued");
    }

    /// The numbers of the login's connections with and without the relay's application names.
    fn connections(&self) -> (i64, i64) {
        let count = |which: &str| {
            self.database.number(&format!(
                "SELECT count(*) FROM pg_stat_activity
                  WHERE usename = '{}' AND application_name {which} 'diesel-outbox %'",
                self.roles.login()
            ))
        };
        (count("LIKE"), count("NOT LIKE"))
    }
}

/// Connects with the current password, and sets the role.
#[derive(Clone)]
struct Manager(Arc<State>);

struct State {
    url: Mutex<String>,
    role: String,
    asked: AtomicUsize,
}

impl Manager {
    fn asked(&self) -> usize {
        self.0.asked.load(Ordering::SeqCst)
    }
}

impl ManageConnection for Manager {
    type Connection = PgConnection;
    type Error = r2d2::Error;

    fn connect(&self) -> Result<PgConnection, r2d2::Error> {
        self.0.asked.fetch_add(1, Ordering::SeqCst);
        let url = self.0.url.lock().expect("no panic").clone();
        let mut conn = PgConnection::establish(&url).map_err(r2d2::Error::ConnectionError)?;
        conn.batch_execute(&format!("SET ROLE {}", self.0.role))
            .map_err(r2d2::Error::QueryError)?;
        Ok(conn)
    }

    fn is_valid(&self, _: &mut PgConnection) -> Result<(), r2d2::Error> {
        Ok(())
    }

    fn has_broken(&self, _: &mut PgConnection) -> bool {
        false
    }
}

/// Makes the server ask one login for its password; other logins of the tests need none.
struct AskedForPassword {
    file: PathBuf,
    line: String,
}

impl AskedForPassword {
    fn new(ground: &Ground) -> Self {
        let data = std::env::var_os("PGDATA").expect(
            "PGDATA is not set: this test asks for passwords; run it with scripts/with-postgres",
        );
        let asked = Self {
            file: PathBuf::from(data).join("pg_hba.conf"),
            line: format!("host all {} all md5\n", ground.roles.login()),
        };
        let others = std::fs::read_to_string(&asked.file).expect("the server's file");
        std::fs::write(&asked.file, asked.line.clone() + &others).expect("written");
        ground.database.number("SELECT pg_reload_conf()::int");
        asked
    }
}

impl Drop for AskedForPassword {
    fn drop(&mut self) {
        let all = std::fs::read_to_string(&self.file).expect("the server's file");
        std::fs::write(&self.file, all.replace(&self.line, "")).expect("written");
    }
}

#[test]
fn a_password_that_rotates_while_the_relay_runs_is_asked_of_the_manager() {
    let ground = Ground::new();
    let _asked = AskedForPassword::new(&ground);
    eventually("the server asks for passwords", || {
        PgConnection::establish(&ground.url("wrong")).is_err()
    });
    let receiver = Receiver::ok();
    let manager = ground.manager();
    let relay = ground
        .relay(&manager, &receiver)
        .poll_interval(Duration::from_millis(50))
        .start()
        .expect("started");
    ground.enqueue();
    receiver.wait_for(1);
    // One at the start, then one each for claimer, settler, heartbeat and janitor.
    eventually("each thread has a connection", || manager.asked() == 5);
    ground.enqueue();
    receiver.wait_for(2);
    assert_eq!(manager.asked(), 5);
    eventually("each connection has its role", || {
        ground.connections() == (4, 0)
    });

    *manager.0.url.lock().expect("no panic") = ground.url("second");
    ground.database.execute(&format!(
        "ALTER ROLE {login} PASSWORD 'second';
         SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{login}'",
        login = ground.roles.login()
    ));
    assert!(PgConnection::establish(&ground.url("first")).is_err());
    ground.enqueue();
    receiver.wait_for(3);
    eventually("each thread has a connection again", || {
        ground.connections() == (4, 0)
    });
    end(&relay);
}

#[test]
fn a_manager_sets_a_role_on_each_connection_and_the_listener_has_a_url_of_its_own() {
    let ground = Ground::new();
    let receiver = Receiver::ok();
    let without = Relay::builder(ground.url("first"))
        .url(&receiver.url())
        .start();
    assert!(without.is_err(), "the login alone has no rights");

    let manager = ground.manager();
    let relay = ground
        .relay(&manager, &receiver)
        .listener_url(&ground.database.url)
        .poll_interval(Duration::from_secs(600))
        .start()
        .expect("started");
    let asleep = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 1
                     AND mode = 'ExclusiveLock' AND granted
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    for count in 1..=2 {
        eventually("the relay sleeps", || ground.database.number(asleep) == 1);
        ground.enqueue();
        receiver.wait_for(count);
    }
    // A new connection gets its role a moment later.
    eventually("each connection has its role", || {
        ground.connections().1 == 0
    });
    end(&relay);
}

#[test]
fn a_relay_with_a_manager_says_so_and_that_it_cannot_listen() {
    logged::keep();
    let ground = Ground::new();
    let receiver = Receiver::ok();
    let relay = ground
        .relay(&ground.manager(), &receiver)
        // No other relay of the tests has this interval.
        .poll_interval(Duration::from_millis(54))
        .start()
        .expect("started");
    let started = format!("database=managed url={}", receiver.url());
    eventually("the line is logged", || {
        logged::is_logged("relay_started", &started)
    });
    eventually("the relay logs that it cannot listen", || {
        logged::is_logged("listener_without_url", "poll_interval=54ms")
    });
    // The relay works without listening.
    ground.enqueue();
    receiver.wait_for(1);
    end(&relay);
}

//! Readers of a feed whose database was restored from a copy of its files, with and without the log that came after it
//! (point-in-time recovery): R73.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::sql_types::Bool;
use diesel::{Connection, PgConnection, RunQueryDsl};
use diesel_outbox::endpoints::Endpoint;

use crate::ground::{Server, alone};
use crate::support::{Database, database_url, eventually, finish};

/// A server of its own on a copy of the data. It is stopped, and the copy removed, when this value is dropped.
struct Copy {
    server: Server,
    data: PathBuf,
    url: String,
}

impl Copy {
    /// Copies the files of a server that does not run.
    fn of(data: &Path, name: &str) -> Self {
        let copy = data.with_file_name(name);
        // With their owner, who runs the server.
        let done = Command::new("cp").arg("-a").args([data, &copy]).status();
        assert!(done.expect("cp runs").success());
        let address = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let port = address.expect("a free port").port();
        let settings = copy.join("postgresql.conf");
        let mut text = fs::read_to_string(&settings).expect("settings");
        text += &format!("\nport = {port}\nunix_socket_directories = ''\n");
        fs::write(&settings, text).expect("written");
        let url = database_url();
        let (before, after) = url.split_once("@127.0.0.1:").expect("a host and a port");
        let path = after.trim_start_matches(|c: char| c.is_ascii_digit());
        Self {
            server: Server::at(&copy),
            data: copy,
            url: format!("{before}@127.0.0.1:{port}{path}"),
        }
    }

    /// Lets it recover what the log has up to this place, then begin a history of its own.
    fn recovers(&self, log: &Path, upto: &str) {
        let settings = self.data.join("postgresql.conf");
        let mut text = fs::read_to_string(&settings).expect("settings");
        let log = log.display();
        text += &format!(
            "restore_command = 'cp \"{log}/%f\" \"%p\"'\nrecovery_target_lsn = '{upto}'\nrecovery_target_action = promote\n"
        );
        fs::write(&settings, text).expect("written");
        fs::write(self.data.join("recovery.signal"), "").expect("written");
    }

    /// Starts it, and waits until it takes writes.
    fn start(&self) {
        self.server.start();
        eventually("the copy has recovered", || {
            let conn = &mut PgConnection::establish(&self.url).expect("it runs");
            let recovers = diesel::select(sql::<Bool>("pg_is_in_recovery()"));
            !recovers.get_result::<bool>(conn).expect("known")
        });
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        self.server.give_up();
    }
}

/// The outbox on a server with this URL.
struct Site<'a> {
    database: &'a Database,
    url: &'a str,
}

impl Site<'_> {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.database.binary(arguments);
        command
            .env("DATABASE_URL", self.url)
            .env("OUTBOX_ENDPOINT_THREADS", "0");
        command
    }

    /// Stores one more event.
    fn works(&self) {
        let conn = &mut PgConnection::establish(self.url).expect("it runs");
        let name = self.database.name();
        let insert = format!("INSERT INTO {name} (topic, payload) VALUES ('a', '1')");
        conn.batch_execute(&insert).expect("inserted");
        finish(self.command(&["drain"])).code(0);
    }

    /// The number of events behind this cursor and the next cursor, or the error.
    fn read(&self, after: &str) -> Result<(usize, String), String> {
        let read = finish(self.command(&["feed", "read", "crm", "--after", after]));
        let mut lines = read.stderr.lines();
        match lines.find_map(|line| line.strip_prefix("next: ")) {
            Some(next) => Ok((read.stdout.lines().count(), next.to_owned())),
            None => Err(read.stderr.clone()),
        }
    }
}

/// R73
#[test]
fn r73_readers_learn_of_a_restored_copy_and_of_a_recovery_to_an_earlier_time() {
    let _alone = alone();
    let (database, server, url) = (Database::new(), Server::new(), database_url());
    let conn = &mut database.connect();
    let feed = Endpoint::feed("crm").topics(["*"]);
    database.outbox().endpoints().put(conn, &feed).expect("put");
    let site = Site {
        database: &database,
        url: &url,
    };
    site.works();
    let (_, first) = site.read("begin").expect("an event");
    server.stop("fast");
    let copy = Copy::of(server.data(), "copy");
    let recovered = Copy::of(server.data(), "recovered");
    server.start();
    site.works();
    let (_, second) = site.read(&first).expect("an event");
    let upto = database.text("SELECT pg_current_wal_insert_lsn()::text");
    site.works();
    let (_, third) = site.read(&second).expect("an event");
    database.execute("SELECT pg_switch_wal()");
    recovered.recovers(&server.data().join("pg_wal"), &upto.expect("a place"));

    for (restored, last, lost) in [(&copy, &first, &second), (&recovered, &second, &third)] {
        restored.start();
        let site = Site {
            database: &database,
            url: &restored.url,
        };
        assert_eq!(site.read(last), Ok((0, last.clone())));
        let told = || {
            let error = site.read(lost).expect_err("an event that it lacks");
            assert!(error.contains("was restored"), "{error}");
        };
        told();
        // Another event at the position of the lost one.
        site.works();
        told();
        assert_eq!(site.read(last).expect("it continues").0, 1);
    }
}

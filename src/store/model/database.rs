//! The outbox that histories are played in, and its rows beside those that the model expects.

use std::collections::BTreeMap;
use std::sync::Once;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text};
use diesel::{Connection, PgConnection, RunQueryDsl};

use crate::name::OutboxName;
use crate::store::SequenceRow;
use crate::store::relay::connection::{self, Limits, Plans};
use crate::store::setup::migrate;
use crate::store::statement::statement;

use super::expected::{Identity, Message, Model, State};
use super::history::{PRODUCERS, RELAYS};
use super::promises::{Kept, Promise, keep};

/// A statement that waits for another one would wait for ever: one thread plays all.
const SESSION: &str = "SET synchronous_commit = off; SET lock_timeout = '3s'; SET statement_timeout = '10s'; SET client_min_messages = warning";

/// An outbox in a schema of its own, removed when dropped.
pub(crate) struct Outbox {
    pub(crate) url: String,
    schema: String,
    pub(crate) name: OutboxName,
}

/// One for each of those that take part.
pub(super) struct Connections {
    pub(super) operator: PgConnection,
    pub(super) producers: Vec<PgConnection>,
    pub(super) relays: Vec<PgConnection>,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        static MIGRATED: Once = Once::new();
        let url = std::env::var("DATABASE_URL")
            .expect("DATABASE_URL is set: run `make test`, or `scripts/with-postgres cargo test`");
        let mut conn = PgConnection::establish(&url).expect("PostgreSQL is there");
        MIGRATED.call_once(|| {
            let first = "outbox".parse().expect("a name");
            migrate::migrate(&mut conn, &first).expect("migrations run");
        });
        let schema = format!("model_{}", uuid::Uuid::now_v7().simple());
        conn.batch_execute(&format!(
            "CREATE SCHEMA {schema}; SELECT public.outbox_create('{schema}.outbox')"
        ))
        .expect("an outbox");
        let name = format!("{schema}.outbox").parse().expect("a name");
        Self { url, schema, name }
    }

    pub(crate) fn connect(&self) -> PgConnection {
        let mut conn = PgConnection::establish(&self.url).expect("PostgreSQL is there");
        conn.batch_execute(SESSION).expect("settings");
        conn
    }

    /// With the limits of a relay.
    pub(in crate::store) fn connect_as_relay(&self) -> PgConnection {
        let limits = Limits::of_relay(Duration::from_secs(30), Plans::ByIndex);
        let connected = connection::connect(&self.url.clone().into(), "test", limits);
        connected.expect("PostgreSQL is there").conn
    }

    pub(super) fn connections(&self) -> Connections {
        Connections {
            operator: self.connect(),
            producers: (0..PRODUCERS).map(|_| self.connect()).collect(),
            relays: (0..RELAYS).map(|_| self.connect()).collect(),
        }
    }

    /// Removes what another history has left.
    pub(super) fn empty(&self, conn: &mut PgConnection) {
        for table in tables(&self.name) {
            conn.batch_execute(&format!("DELETE FROM {table}"))
                .expect("nothing holds the rows");
        }
    }
}

fn tables(name: &OutboxName) -> [String; 4] {
    [name.outbox(), name.ledger(), name.dead(), name.lease()]
}

/// The tables' copies, of this connection only.
const COPIES: [&str; 4] = ["outbox_copy", "ledger_copy", "dead_copy", "lease_copy"];

/// Copies all rows, as a standby would have them now. Returns the last sequence that was given out.
pub(super) fn replicate(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<i64> {
    for (table, copy) in tables(name).into_iter().zip(COPIES) {
        conn.batch_execute(&format!(
            "DROP TABLE IF EXISTS pg_temp.{copy}; CREATE TEMP TABLE {copy} AS TABLE {table}"
        ))?;
    }
    statement(format!(
        "SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('{}', 'sequence')), 0) AS sequence",
        name.outbox()
    ))
    .get_result::<SequenceRow>(conn)
    .map(|row| row.sequence)
}

/// Puts the copies in the place of the rows. Returns the leases that are there.
pub(super) fn fail_over(
    conn: &mut PgConnection,
    name: &OutboxName,
    last_sequence: i64,
) -> QueryResult<Vec<i64>> {
    for (table, copy) in tables(name).into_iter().zip(COPIES) {
        conn.batch_execute(&format!(
            "DELETE FROM {table}; INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE {copy}"
        ))?;
    }
    conn.batch_execute(&format!(
        "SELECT setval(pg_get_serial_sequence('{}', 'sequence'), {}, false)",
        name.outbox(),
        last_sequence + 1
    ))?;
    statement(format!("SELECT id AS sequence FROM {}", name.lease()))
        .load::<SequenceRow>(conn)
        .map(|rows| rows.into_iter().map(|row| row.sequence).collect())
}

impl Drop for Outbox {
    fn drop(&mut self) {
        if let Ok(mut conn) = PgConnection::establish(&self.url) {
            let _ = conn.batch_execute(&format!("DROP SCHEMA {} CASCADE", self.schema));
        }
    }
}

/// A row of the outbox, of its dead letters or of its ledger.
#[derive(Debug, PartialEq, Eq, diesel::QueryableByName)]
struct Row {
    #[diesel(sql_type = Text)]
    kind: String,
    #[diesel(sql_type = BigInt)]
    sequence: i64,
    #[diesel(sql_type = Text)]
    idempotency_key: String,
    #[diesel(sql_type = Text)]
    destination: String,
    #[diesel(sql_type = Integer)]
    attempts: i32,
    #[diesel(sql_type = Nullable<BigInt>)]
    locked_by: Option<i64>,
    #[diesel(sql_type = BigInt)]
    place: i64,
    /// It is due; it keeps its key back; it is delivered.
    #[diesel(sql_type = Bool)]
    flag: bool,
}

/// Whether the database has what the model expects, neither more nor less.
pub(super) fn compare(conn: &mut PgConnection, name: &OutboxName, model: &mut Model) -> Kept {
    let rows: Vec<Row> = statement(format!(
        "SELECT 'outbox' AS kind, sequence, {key} AS idempotency_key, destination, attempts, locked_by,
                coalesce(split_from, sequence) AS place, available_at <= clock_timestamp() AS flag
           FROM {}
         UNION ALL
         SELECT 'dead', sequence, {key}, named_destination, attempts, NULL,
                coalesce(split_from, sequence), blocks_key
           FROM {}
         UNION ALL
         SELECT 'ledger', sequence, {key}, named_destination, attempts, NULL, sequence,
                status = 'delivered'
           FROM {}",
        name.outbox(),
        name.dead(),
        name.ledger(),
        key = "coalesce(idempotency_key, message_id::text)",
    ))
    .load(conn)?;
    adopt(model, &rows);
    keep(model.parts.is_empty(), Promise::G2, || {
        format!("parts are missing: {:?}", model.parts)
    })?;
    let mut expected = expected(model);
    for row in rows {
        let (kind, sequence) = (row.kind.clone(), row.sequence);
        let identity = (row.idempotency_key.clone(), row.destination.clone());
        let key = (kind.clone(), sequence, identity);
        let of_key = expected.get_mut(&key).filter(|rows| !rows.is_empty());
        let Some(wanted) = of_key else {
            let is_committed = model.messages.get(&sequence).is_some_and(|message| {
                !matches!(message.state, State::Open(_) | State::RolledBack)
            });
            let promise = if is_committed {
                Promise::G2
            } else {
                Promise::G1
            };
            return keep(false, promise, || format!("not expected: {row:?}"));
        };
        // The ledger may have several entries of one message.
        let place = wanted.iter().position(|one| *one == row).unwrap_or(0);
        let wanted = wanted.swap_remove(place);
        keep(row == wanted, promise_of(&row, &wanted), || {
            format!("{row:?} instead of {wanted:?}")
        })?;
    }
    let missing: Vec<&Row> = expected.values().flatten().collect();
    keep(missing.is_empty(), Promise::G2, || {
        format!("missing: {missing:?}")
    })
}

/// Which promise keeps the first difference away.
fn promise_of(row: &Row, wanted: &Row) -> Promise {
    if row.attempts != wanted.attempts {
        Promise::G6
    } else if row.locked_by != wanted.locked_by {
        Promise::G4
    } else if row.place != wanted.place {
        Promise::G5
    } else {
        Promise::G2
    }
}

/// Parts of split messages get their sequences from the database.
fn adopt(model: &mut Model, rows: &[Row]) {
    for row in rows {
        let identity: Identity = (row.idempotency_key.clone(), row.destination.clone());
        if row.kind == "outbox"
            && !model.messages.contains_key(&row.sequence)
            && let Some(part) = model.parts.remove(&identity)
        {
            model.messages.insert(row.sequence, part);
        }
    }
}

type Expected = BTreeMap<(String, i64, Identity), Vec<Row>>;

fn expected(model: &Model) -> Expected {
    let mut expected = Expected::new();
    let mut add = |row: Row| {
        let identity = (row.idempotency_key.clone(), row.destination.clone());
        let key = (row.kind.clone(), row.sequence, identity);
        expected.entry(key).or_default().push(row);
    };
    for (&sequence, message) in &model.messages {
        match message.state {
            State::Waiting => add(row("outbox", sequence, message, None, message.is_due)),
            State::Held { lease, .. } => {
                add(row(
                    "outbox",
                    sequence,
                    message,
                    Some(lease),
                    message.is_due,
                ));
            }
            State::Dead { blocks_key } => add(row("dead", sequence, message, None, blocks_key)),
            _ => {}
        }
    }
    let entries = model.ledger.iter();
    let entries = entries.flat_map(|(identity, all)| all.iter().map(move |one| (identity, one)));
    for ((idempotency_key, destination), settled) in entries {
        add(Row {
            kind: "ledger".to_owned(),
            sequence: settled.sequence,
            idempotency_key: idempotency_key.clone(),
            destination: destination.clone(),
            attempts: settled.attempts,
            locked_by: None,
            place: settled.sequence,
            flag: settled.is_delivered,
        });
    }
    expected
}

fn row(kind: &str, sequence: i64, message: &Message, locked_by: Option<i64>, flag: bool) -> Row {
    let (idempotency_key, destination) = message.identity.clone();
    Row {
        kind: kind.to_owned(),
        sequence,
        idempotency_key,
        destination,
        attempts: message.attempts,
        locked_by,
        place: message.place,
        flag,
    }
}

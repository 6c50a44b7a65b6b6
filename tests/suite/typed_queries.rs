//! Typed queries on an outbox's tables, and every kind of connection that an application has.

use std::time::{Duration, SystemTime};

use diesel::connection::SimpleConnection;
use diesel::expression::Expression;
use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::*;
use diesel::query_source::Column;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::sql_types::{HasSqlType, Int8, SqlType, Text, is_nullable};
use diesel_outbox::rows::{self, DeadLetter, LedgerEntry, MessageRow};
use diesel_outbox::schema::{
    self, outbox, outbox_dead, outbox_lease, outbox_ledger, outbox_messages, outbox_pause,
};
use diesel_outbox::{NewMessage, Outbox, ReasonCode, Sequence, Status};
use serde_json::json;

use crate::fresh::FreshDatabase;
use crate::support::{Database, Receiver, eventually};

mod hrm {
    diesel_outbox::outbox_tables!(hrm.outbox);
}

mod org {
    diesel_outbox::outbox_tables!(
        org_outbox: org_outbox_ledger, org_outbox_attempt, org_outbox_dead, org_outbox_lease, org_outbox_pause,
        org_outbox_endpoint, org_outbox_messages
    );
}

mod billing {
    diesel_outbox::outbox_tables!(
        billing.events: events_ledger, events_attempt, events_dead, events_lease, events_pause, events_endpoint, events_messages,
    );
}

/// An application's declarations of its own tables, next to the outbox's.
mod application {
    diesel_outbox::outbox_tables!(outbox);

    diesel::table! {
        orders (id) {
            id -> Int4,
            message -> Int8,
        }
    }
    diesel::joinable!(orders -> outbox_messages (message));
    diesel::allow_tables_to_appear_in_same_query!(orders, outbox_messages);
    diesel::allow_tables_to_appear_in_same_query!(orders, outbox_dead);
}

/// A connection on which `outbox` means this database's outbox.
fn connect(database: &Database) -> PgConnection {
    let mut conn = database.connect();
    conn.batch_execute(&format!("SET search_path = {}, public", database.schema()))
        .expect("set");
    conn
}

// --- Declared tables match the database ------------------------------------------------------

/// A column: its name, the number of its type, and whether it may be null.
type Described = (String, u32, bool);

/// The columns of a table as a tuple.
trait Columns {
    fn described(conn: &mut PgConnection) -> Vec<Described>;
}

trait MayBeNull {
    const MAY_BE_NULL: bool;
}

impl MayBeNull for is_nullable::NotNull {
    const MAY_BE_NULL: bool = false;
}

impl MayBeNull for is_nullable::IsNullable {
    const MAY_BE_NULL: bool = true;
}

fn described<C>(conn: &mut PgConnection) -> Described
where
    C: Column + Expression,
    C::SqlType: SqlType,
    <C::SqlType as SqlType>::IsNull: MayBeNull,
    Pg: HasSqlType<C::SqlType>,
{
    let metadata = <Pg as HasSqlType<C::SqlType>>::metadata(conn);
    (
        C::NAME.to_owned(),
        metadata.oid().expect("a type of PostgreSQL's own"),
        <C::SqlType as SqlType>::IsNull::MAY_BE_NULL,
    )
}

macro_rules! tuples {
    ($($name:ident)*) => {
        tuples!(@ [] $($name)*);
    };
    (@ [$($done:ident)*] $next:ident $($rest:ident)*) => {
        impl<$($done,)* $next> Columns for ($($done,)* $next,)
        where
            $($done: Column + Expression, $done::SqlType: SqlType,
              <$done::SqlType as SqlType>::IsNull: MayBeNull, Pg: HasSqlType<$done::SqlType>,)*
            $next: Column + Expression, $next::SqlType: SqlType,
            <$next::SqlType as SqlType>::IsNull: MayBeNull, Pg: HasSqlType<$next::SqlType>,
        {
            fn described(conn: &mut PgConnection) -> Vec<Described> {
                vec![$(described::<$done>(conn),)* described::<$next>(conn)]
            }
        }
        tuples!(@ [$($done)* $next] $($rest)*);
    };
    (@ [$($done:ident)*]) => {};
}
tuples!(A B C D E F G H I J K L M N O P Q R S T U V W X Y Z);

fn declared<T: Table>(conn: &mut PgConnection, _: T) -> Vec<Described>
where
    T::AllColumns: Columns,
{
    T::AllColumns::described(conn)
}

#[derive(QueryableByName)]
struct ColumnRow {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Int8)]
    kind: i64,
    #[diesel(sql_type = diesel::sql_types::Bool)]
    may_be_null: bool,
}

fn there(conn: &mut PgConnection, table: &str) -> Vec<Described> {
    diesel::sql_query(
        "SELECT attname::text AS name, atttypid::bigint AS kind, NOT attnotnull AS may_be_null
           FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped
          ORDER BY attnum",
    )
    .bind::<Text, _>(table)
    .load::<ColumnRow>(conn)
    .expect("columns")
    .into_iter()
    .map(|row| {
        let kind = u32::try_from(row.kind).expect("an oid");
        (row.name, kind, row.may_be_null)
    })
    .collect()
}

#[test]
fn the_declared_tables_are_those_of_the_database() {
    let database = Database::new();
    let conn = &mut connect(&database);
    for (table, declared) in [
        ("outbox", declared(conn, outbox::table)),
        ("outbox_ledger", declared(conn, outbox_ledger::table)),
        (
            "outbox_attempt",
            declared(conn, schema::outbox_attempt::table),
        ),
        ("outbox_dead", declared(conn, schema::outbox_dead::table)),
        ("outbox_lease", declared(conn, outbox_lease::table)),
        ("outbox_pause", declared(conn, outbox_pause::table)),
        ("outbox_inbox", declared(conn, schema::outbox_inbox::table)),
        (
            "outbox_feed_position",
            declared(conn, schema::outbox_feed_position::table),
        ),
    ] {
        assert_eq!(declared, there(conn, table), "{table}");
    }
}

/// PostgreSQL calls every column of a view nullable. A declared column is nullable if it is in one of the three
/// tables.
#[test]
fn the_declared_view_is_that_of_the_database() {
    let database = Database::new();
    let conn = &mut connect(&database);
    let without_null = |columns: Vec<Described>| -> Vec<(String, u32)> {
        columns.into_iter().map(|(n, k, _)| (n, k)).collect()
    };
    let declared = declared(conn, schema::outbox_messages::table);
    assert_eq!(
        without_null(declared.clone()),
        without_null(there(conn, "outbox_messages"))
    );
    let parts = ["outbox", "outbox_dead", "outbox_ledger"].map(|table| there(conn, table));
    let never_null = |column: &str| {
        let is_in = |part: &Vec<Described>| part.iter().any(|(n, _, null)| n == column && !null);
        ["status", "idempotency_key"].contains(&column) || parts.iter().all(is_in)
    };
    for (column, _, may_be_null) in declared {
        assert_eq!(may_be_null, !never_null(&column), "{column}");
    }
}

#[test]
fn an_outbox_of_another_name_has_tables_of_its_own() {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    for name in ["org_outbox", "hrm.outbox", "billing.events"] {
        if let Some((schema, _)) = name.split_once('.') {
            database.execute(&format!("CREATE SCHEMA {schema}"));
        }
        diesel_outbox::migrate(conn, &name.parse().expect("a name")).expect("migrated");
        let outbox = Outbox::new(name).expect("a name");
        let message = NewMessage::new("t", &json!(name)).expect("JSON");
        conn.transaction(|conn| outbox.enqueue(conn, message))
            .expect("enqueued");
    }
    let payloads: [serde_json::Value; 3] = [
        hrm::outbox::table.select(hrm::outbox::payload).first(conn),
        org::org_outbox::table
            .select(org::org_outbox::payload)
            .first(conn),
        billing::events::table
            .select(billing::events::payload)
            .first(conn),
    ]
    .map(|payload| payload.expect("one message"));
    assert_eq!(
        payloads,
        [
            json!("hrm.outbox"),
            json!("org_outbox"),
            json!("billing.events")
        ]
    );
    let states: [String; 3] = [
        hrm::outbox_messages::table
            .select(hrm::outbox_messages::status)
            .first(conn),
        org::org_outbox_messages::table
            .select(org::org_outbox_messages::status)
            .first(conn),
        billing::events_messages::table
            .select(billing::events_messages::status)
            .first(conn),
    ]
    .map(|status| status.expect("one message"));
    assert_eq!(states, ["pending", "pending", "pending"]);
    assert_eq!(
        declared(conn, billing::events_dead::table),
        there(conn, "billing.events_dead")
    );
}

// --- Queries --------------------------------------------------------------------------------

#[test]
fn whole_rows_load_with_the_types_of_an_application() {
    #[derive(Queryable, Selectable)]
    #[diesel(table_name = outbox, check_for_backend(Pg))]
    struct Row {
        sequence: i64,
        message_id: uuid::Uuid,
        payload: serde_json::Value,
        headers: Option<serde_json::Value>,
        digest: Option<Vec<u8>>,
        created_at: PgTimestamp,
        locked_by: Option<i64>,
    }
    let database = Database::new();
    let message = NewMessage::new("t", &json!({ "n": [1, 2] }))
        .expect("JSON")
        .header("x-shop", "berlin");
    let id = message.message_id();
    let sequence = database.enqueue_message(message);
    let conn = &mut connect(&database);
    let row = outbox::table
        .find(sequence)
        .select(Row::as_select())
        .first(conn)
        .expect("a row");
    assert_eq!(row.sequence, sequence);
    assert_eq!(row.message_id, id);
    assert_eq!(row.payload, json!({ "n": [1, 2] }));
    assert_eq!(row.headers, Some(json!({ "x-shop": "berlin" })));
    assert_eq!(row.digest, None, "there is no key to compare under");
    assert!(row.created_at.0 > 0);
    assert_eq!(row.locked_by, None);

    let created: SystemTime = outbox::table
        .select(outbox::created_at.at_time_zone("UTC"))
        .first(conn)
        .expect("a time");
    let age = SystemTime::now().duration_since(created);
    assert!(age.is_ok_and(|age| age < Duration::from_secs(60)));
}

#[test]
fn a_typed_insert_is_a_message() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let conn = &mut connect(&database);
    let sequence: i64 = diesel::insert_into(outbox::table)
        .values((
            outbox::topic.eq("order.paid"),
            outbox::payload.eq(json!({ "order_id": 7 })),
        ))
        .returning(outbox::sequence)
        .get_result(conn)
        .expect("inserted");
    let relay = database.relay().url(&receiver.url()).start();
    let request = receiver.wait_for(1).remove(0);
    assert_eq!(request.json(), json!({ "order_id": 7 }));
    assert_eq!(
        request.header("ce-sequence"),
        Some(sequence.to_string().as_str())
    );
    drop(relay);
}

#[test]
fn an_applications_table_is_joined_with_an_outboxs() {
    use application::{orders, outbox_dead, outbox_ledger, outbox_messages};

    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.json().as_i64() {
        Some(2) => 400,
        _ => 200,
    });
    let conn = &mut connect(&database);
    conn.batch_execute("CREATE TABLE orders (id int PRIMARY KEY, message bigint NOT NULL)")
        .expect("created");
    for id in 1..=3 {
        let mut message = NewMessage::new("order.paid", &id).expect("JSON");
        if id == 3 {
            message = message.delay(Duration::from_secs(3600));
        }
        let outbox = Outbox::new("outbox").expect("a name");
        conn.transaction(|conn| {
            let enqueued = outbox.enqueue(conn, message)?;
            diesel::insert_into(orders::table)
                .values((orders::id.eq(id), orders::message.eq(enqueued.sequence.0)))
                .execute(conn)?;
            Ok::<(), diesel_outbox::EnqueueError>(())
        })
        .expect("committed");
    }
    let relay = database.relay().url(&receiver.url()).start();
    eventually("two messages are settled", || {
        database.count("delivered") + database.count("dead") == 2
    });
    drop(relay);
    let states: Vec<(i32, String, Option<i32>)> = orders::table
        .inner_join(outbox_messages::table)
        .order(orders::id)
        .select((
            orders::id,
            outbox_messages::status,
            outbox_messages::http_status,
        ))
        .load(conn)
        .expect("states");
    let expected = [
        (1, "delivered".to_owned(), Some(200)),
        (2, "dead".to_owned(), Some(400)),
        (3, "pending".to_owned(), None),
    ];
    assert_eq!(states, expected);

    // A left join, and a subselect.
    let reasons: Vec<(i32, Option<String>)> = orders::table
        .left_join(outbox_dead::table.on(outbox_dead::sequence.eq(orders::message)))
        .order(orders::id)
        .select((orders::id, outbox_dead::reason.nullable()))
        .load(conn)
        .expect("reasons");
    assert_eq!(reasons[1], (2, Some("REJECTED".to_owned())));
    assert_eq!(reasons[0].1, None);
    let dead: Vec<i32> = orders::table
        .filter(orders::message.eq_any(outbox_dead::table.select(outbox_dead::sequence)))
        .select(orders::id)
        .load(conn)
        .expect("ids");
    assert_eq!(dead, [2]);

    // Tables of one outbox.
    let response: Option<i32> = outbox_messages::table
        .inner_join(outbox_ledger::table.on(outbox_ledger::sequence.eq(outbox_messages::sequence)))
        .filter(outbox_messages::status.eq("dead"))
        .select(outbox_ledger::http_status)
        .first(conn)
        .expect("a row");
    assert_eq!(response, Some(400));
}

// --- Rows -----------------------------------------------------------------------------------

/// One message is delivered, one is dead, and one waits.
fn settled_and_waiting(database: &Database) -> [Sequence; 3] {
    let receiver = Receiver::answering(|request| match request.json().as_i64() {
        Some(2) => 400,
        _ => 200,
    });
    let message = |n: i32| NewMessage::new("order.paid", &n).expect("JSON");
    let sequences = [
        message(1).occurred_at(SystemTime::UNIX_EPOCH),
        message(2).ordering_key("order-7").idempotency_key("paid-7"),
        message(3).delay(Duration::from_secs(3600)),
    ]
    .map(|message| Sequence(database.enqueue_message(message)));
    let relay = database.relay().url(&receiver.url()).start();
    eventually("two messages are settled", || {
        database.count("delivered") + database.count("dead") == 2
    });
    drop(relay);
    sequences
}

fn is_recent(time: SystemTime) -> bool {
    SystemTime::now()
        .duration_since(time)
        .is_ok_and(|age| age < Duration::from_secs(60))
}

#[test]
fn rows_of_the_view_dead_letters_and_the_ledger_load_by_their_query() {
    let database = Database::new();
    let [delivered, dead, waiting] = settled_and_waiting(&database);
    let conn = &mut connect(&database);

    let rows: Vec<MessageRow> = MessageRow::query()
        .order(outbox_messages::sequence)
        .load(conn)
        .expect("rows");
    let found: Vec<_> = rows
        .iter()
        .map(|row| (row.envelope.sequence, row.status))
        .collect();
    let expected = [
        (delivered, Status::Delivered),
        (dead, Status::Dead),
        (waiting, Status::Pending),
    ];
    assert_eq!(found, expected);
    let [of_delivered, of_dead, of_waiting] = rows.as_slice() else {
        panic!("three rows: {rows:?}");
    };
    assert_eq!(of_delivered.envelope.topic, "order.paid");
    assert_eq!(of_delivered.envelope.attempts, 1);
    assert_eq!(
        of_delivered.envelope.occurred_at,
        Some(SystemTime::UNIX_EPOCH)
    );
    assert!(is_recent(of_delivered.envelope.created_at));
    assert!(of_delivered.settled_at.is_some_and(is_recent));
    assert_eq!(of_delivered.available_at, None);
    assert_eq!(of_dead.idempotency_key, "paid-7");
    assert_eq!(of_dead.envelope.ordering_key.as_deref(), Some("order-7"));
    assert_eq!(of_dead.last_error_code.as_deref(), Some("REJECTED"));
    let ahead = of_waiting
        .available_at
        .expect("a time")
        .duration_since(SystemTime::now());
    assert!(ahead.is_ok_and(|ahead| ahead > Duration::from_secs(3500)));
    assert_eq!(
        (of_waiting.settled_at, of_waiting.http_status),
        (None, None)
    );

    let letters: Vec<(DeadLetter, serde_json::Value)> = outbox_dead::table
        .filter(outbox_dead::reason.eq(ReasonCode::Rejected))
        .select((DeadLetter::as_select(), outbox_dead::payload))
        .load(conn)
        .expect("letters");
    let [(letter, payload)] = letters.as_slice() else {
        panic!("one letter: {letters:?}");
    };
    assert_eq!(payload, &json!(2));
    assert_eq!(letter.envelope, of_dead.envelope);
    assert_eq!(letter.http_status, Some(400));
    assert!(is_recent(letter.dead_lettered_at));
    assert!(!letter.blocks_key);
    assert_eq!(letter.split_from, None);

    let entry: LedgerEntry = LedgerEntry::query()
        .filter(outbox_ledger::sequence.eq(delivered))
        .first(conn)
        .expect("an entry");
    assert_eq!(entry.envelope, of_delivered.envelope);
    assert_eq!(entry.status, Status::Delivered);
    assert_eq!((entry.http_status, entry.reason), (Some(200), None));
    assert_eq!(Some(entry.settled_at), of_delivered.settled_at);
}

#[test]
fn rows_load_from_an_outbox_of_another_name() {
    let database = FreshDatabase::new();
    let conn = &mut database.connect();
    diesel_outbox::migrate(conn, &"org_outbox".parse().expect("a name")).expect("migrated");
    let message = NewMessage::new("t", &1).expect("JSON");
    let outbox = Outbox::new("org_outbox").expect("a name");
    conn.transaction(|conn| outbox.enqueue(conn, message))
        .expect("enqueued");
    let rows: Vec<(MessageRow, i32)> = org::org_outbox_messages::table
        .filter(org::org_outbox_messages::status.eq(Status::Pending))
        .select((
            rows::of::<MessageRow, _>(org::org_outbox_messages::table),
            org::org_outbox_messages::attempts,
        ))
        .load(conn)
        .expect("rows");
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].0.envelope.topic, "t");
    let dead = org::org_outbox_dead::table
        .select(rows::of::<DeadLetter, _>(org::org_outbox_dead::table))
        .load::<DeadLetter>(conn);
    assert_eq!(dead, Ok(vec![]));
    let ledger = org::org_outbox_ledger::table
        .select(rows::of::<LedgerEntry, _>(org::org_outbox_ledger::table))
        .load::<LedgerEntry>(conn);
    assert_eq!(ledger, Ok(vec![]));
}

/// A relay of a later version may have written the reason.
#[test]
fn a_reason_of_another_version_is_a_text_in_a_row_and_an_error_as_a_code() {
    let database = Database::new();
    settled_and_waiting(&database);
    let conn = &mut connect(&database);
    let reason = |conn: &mut PgConnection| -> QueryResult<ReasonCode> {
        outbox_dead::table.select(outbox_dead::reason).first(conn)
    };
    assert_eq!(reason(conn), Ok(ReasonCode::Rejected));
    conn.batch_execute("UPDATE outbox_dead SET reason = 'BORED'")
        .expect("updated");
    let error = format!("{:?}", reason(conn).expect_err("unknown"));
    assert!(
        error.contains("UnknownWord") && error.contains("BORED"),
        "{error}"
    );
    let letter: DeadLetter = DeadLetter::query().first(conn).expect("a letter");
    assert_eq!(letter.reason, "BORED");
}

#[test]
fn times_without_an_end_are_the_furthest_ones() {
    let database = Database::new();
    let sequence = database.enqueue("t", json!(1));
    let conn = &mut connect(&database);
    conn.batch_execute("UPDATE outbox SET available_at = 'infinity', expires_at = '-infinity', created_at = '1960-01-01Z'")
        .expect("updated");
    let row: MessageRow = MessageRow::query().first(conn).expect("a row");
    assert_eq!(row.envelope.sequence, Sequence(sequence));
    let now = SystemTime::now();
    let century = Duration::from_secs(100 * 365 * 86_400);
    assert!(
        row.available_at
            .is_some_and(|time| time > now + 100 * century)
    );
    assert!(
        row.expires_at
            .is_some_and(|time| time < now - 100 * century)
    );
    let before = SystemTime::UNIX_EPOCH.duration_since(row.envelope.created_at);
    // 1960, 1964 and 1968 are leap years.
    assert_eq!(
        before.expect("a time before 1970"),
        Duration::from_secs((10 * 365 + 3) * 86_400)
    );
}

// --- Connections ----------------------------------------------------------------------------

#[test]
fn a_pooled_connection_enqueues_as_a_plain_one() {
    let database = Database::new();
    let pool = Pool::builder()
        .max_size(2)
        .build(ConnectionManager::<PgConnection>::new(&database.url))
        .expect("a pool");
    let outbox = database.outbox();
    let message = |n: i32| NewMessage::new("t", &n).expect("JSON");
    let mut pooled = pool.get().expect("a connection");
    outbox.enqueue(&mut pooled, message(1)).expect("enqueued");
    pooled
        .transaction(|conn| outbox.enqueue(conn, message(2)))
        .expect("enqueued");
    outbox
        .enqueue_batch(&mut pooled, [message(3)])
        .expect("enqueued");
    outbox
        .enqueue_bulk(&mut pooled, [message(4)])
        .expect("enqueued");
    outbox
        .enqueue(&mut database.connect(), message(5))
        .expect("enqueued");
    assert_eq!(database.count("pending"), 5);
}

/// As in an application's tests: no change stays, and a refused message does not end the transaction.
#[test]
fn a_test_transaction_enqueues_and_leaves_nothing() {
    let database = Database::new();
    let outbox = database.outbox();
    let mut conn = connect(&database);
    conn.begin_test_transaction().expect("begun");
    let message = |n: i32| {
        let message = NewMessage::new("t", &n).expect("JSON");
        message.idempotency_key("one")
    };
    let first = outbox.enqueue(&mut conn, message(1)).expect("enqueued");
    let again = outbox.enqueue(&mut conn, message(1)).expect("enqueued");
    assert_eq!((again.sequence, again.is_new), (first.sequence, false));
    outbox
        .enqueue(&mut conn, message(2))
        .expect_err("another message");
    let rolled_back = conn.transaction(|conn| {
        outbox.enqueue(conn, NewMessage::new("t", &3)?)?;
        Err::<(), diesel_outbox::EnqueueError>(diesel::result::Error::RollbackTransaction.into())
    });
    rolled_back.expect_err("as asked");
    outbox
        .enqueue_bulk(&mut conn, [NewMessage::new("t", &4).expect("JSON")])
        .expect("enqueued");
    let payloads: Vec<serde_json::Value> = outbox::table
        .order(outbox::sequence)
        .select(outbox::payload)
        .load(&mut conn)
        .expect("payloads");
    assert_eq!(payloads, [json!(1), json!(4)]);
    drop(conn);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
}

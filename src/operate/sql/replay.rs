//! Replays: delivered messages are enqueued again, as new messages.

use std::time::SystemTime;

use diesel::dsl::{min, sql};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, NullableExpressionMethods,
    OptionalExtension, QueryDsl, Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use diesel::{PgConnection, insert_into, select};
use uuid::Uuid;

pub(crate) use crate::message::replays::LONGEST_RUN;

use crate::endpoints::sql::filter::is_of_registration;
use crate::endpoints::sql::missed::Bulked;
use crate::endpoints::sql::recipient::Recipient;
use crate::endpoints::sql::removed::removed_again;
use crate::endpoints::sql::rows::{self, WhichEndpoint};
use crate::message::replays::replayed;
use crate::name::OutboxName;
use crate::operate::sql::place::Place;
use crate::operate::sql::selection::Selection;
use crate::operate::sql::selection::selected;
use crate::schema::values::{as_micros, from_micros, to_micros};
use crate::sql::functions::{On, TimeAndSequence, all_of, clock_timestamp, given, shown_key};
use crate::sql::looking::looking;
use crate::sql::statement::{unprepared, unprepared_statement};
use crate::sql::table::{ledger, lock};
use crate::sql::{digest_of, open_part};
use crate::status::Status;

/// The row of `outbox_lock` that replays lock.
const REPLAYS: &str = "replay";

fn keys_of(selection: &Selection) -> &[String] {
    selection.idempotency_keys.as_deref().unwrap_or_default()
}

/// The message ids of replayed messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReplayIds {
    /// The same ids: receivers that remember handled ids ignore the messages.
    #[default]
    Same,
    /// New ids: receivers handle the messages again.
    New,
}

#[derive(Queryable)]
struct FoundRow {
    message_id: Uuid,
    /// The idempotency key; the message id if the caller gave none.
    key: String,
    has_payload: bool,
    settled_at: PgTimestamp,
    sequence: i64,
}

/// A replay in progress: its place in the ledger, and its end.
#[derive(Debug)]
pub(crate) struct ReplayWalk {
    /// The name of the run, part of the keys of its messages.
    pub(crate) run: String,
    /// The place of the last row that was read.
    place: Place,
    end: i64,
    /// The time span that is read at once, in microseconds.
    window: i64,
    /// If only one destination is meant, and its name is registered: its registration.
    registration: Option<Uuid>,
}

/// Begins a replay.
pub(crate) fn begin(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    run: &str,
) -> QueryResult<ReplayWalk> {
    let now: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
    let since = match selection.since {
        Some(since) => Some(as_micros(since)),
        None if keys_of(selection).is_empty() => oldest(conn, name)?.map(to_micros),
        None => None,
    };
    let until = selection.until.map_or(i64::MAX, as_micros);
    let registration = match selection.destination.as_deref() {
        Some(which) => {
            let which = WhichEndpoint {
                name: which,
                tenant: None,
            };
            rows::registration(conn, name, which)?
        }
        None => None,
    };
    Ok(ReplayWalk {
        registration,
        run: run.to_owned(),
        place: Place::before(since.unwrap_or(i64::MIN)),
        end: until.min(to_micros(now).saturating_add(1)),
        window: 1_000_000,
    })
}

/// When the oldest entry of the ledger was settled.
fn oldest(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Option<PgTimestamp>> {
    let first = ledger::table(name.ledger()).select(min(ledger::settled_at));
    looking(conn, None, |conn| unprepared(first).get_result(conn))
}

/// A new name of a run, such as `20261121T101500-5f3a9c`: the time in seconds, and a random number.
pub(crate) fn new_run() -> String {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let now = now.trim_end_matches('Z').chars();
    let time: String = now.filter(char::is_ascii_alphanumeric).collect();
    format!("{time}-{:06x}", fastrand::u32(0..1 << 24))
}

/// Whether a ledger entry is selected, settled at or after the time of the walk's place and before this time.
fn is_meant<'f>(selection: &'f Selection, walk: &ReplayWalk, to: i64) -> On<'f, ledger::table> {
    let is_of_time = ledger::settled_at
        .ge(from_micros(walk.place.micros))
        .and(ledger::settled_at.lt(from_micros(to)));
    let others = [
        given(walk.registration, |id| is_of_registration!(ledger, id)),
        given(selection.destination.as_deref(), went_to),
        given(selection.status, |status| {
            ledger::status.eq(status.as_str())
        }),
        Some(Box::new(is_of_time.and(ledger::status.ne("dead"))) as On<'_, ledger::table>),
    ];
    let own = selected!(ledger, selection, settled_at, reason);
    all_of(own.into_iter().chain(others))
}

/// Whether an entry was delivered to this destination. Empty: whether the message named none.
fn went_to(destination: &str) -> On<'_, ledger::table> {
    match destination {
        "" => Box::new(ledger::named_destination.eq("")),
        used => Box::new(ledger::destination.eq(used)),
    }
}

/// A message of the ledger at the destination where its replay goes; then follows that of messages that name none. Entries of
/// earlier replays are entries of the same message: see [`replayed`].
///
/// Text: Diesel counts no distinct rows, and has no `regexp_replace`.
const SAME: &str = r"(pg_catalog.regexp_replace(coalesce(idempotency_key, message_id::text),
    '#replay-[A-Za-z0-9-]{1,22}(\+new)?$', ''), coalesce(nullif(named_destination, ''), ";

/// Counts the messages to replay after the place of the walk. A message counts once, however often it was replayed.
pub(crate) fn count(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    walk: &ReplayWalk,
) -> QueryResult<Bulked> {
    let asked = selection.destination.as_deref().unwrap_or_default();
    let distinct = || {
        sql::<BigInt>(&format!("count(DISTINCT {SAME}"))
            .bind::<Text, _>(asked)
            .sql(")))")
    };
    let (with_payload, all): (i64, i64) = looking(conn, None, |conn| {
        let counts = ledger::table(name.ledger())
            .filter(is_meant(selection, walk, walk.end))
            .select((
                distinct().sql(" FILTER (WHERE payload IS NOT NULL)"),
                distinct(),
            ));
        unprepared(counts).get_result(conn)
    })?;
    Ok(Bulked {
        changed: u64::try_from(with_payload).unwrap_or(0),
        without_payload: u64::try_from(all - with_payload).unwrap_or(0),
        skipped: 0,
    })
}

/// Replays the next messages, at most `most`, in one statement. `None`: the walk has ended. `operator`: who replays, and
/// why.
pub(crate) fn step(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    ids: ReplayIds,
    walk: &mut ReplayWalk,
    most: usize,
    operator: &str,
) -> QueryResult<Option<Bulked>> {
    let rows = loop {
        if walk.place.micros >= walk.end {
            return Ok(None);
        }
        let rows = next(conn, name, selection, walk, most)?;
        if !rows.is_empty() {
            break rows;
        }
    };
    take_turns(conn, name)?;
    let with_payload: Vec<&FoundRow> = rows.iter().filter(|row| row.has_payload).collect();
    let asked = selection.destination.as_deref().unwrap_or_default();
    let inserted = insert(conn, name, ids, asked, &walk.run, &with_payload, operator)?;
    Ok(Some(Bulked {
        without_payload: (rows.len() - with_payload.len()) as u64,
        ..Bulked::of(with_payload.len(), inserted)
    }))
}

/// Waits for other replays until the end of their transactions. Two replays of one run insert the same keys, but not in
/// the same order: the ledger may have a key several times, and each insert waits for the other transaction.
fn take_turns(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<()> {
    insert_into(lock::table(name.lock()))
        .values(lock::name.eq(REPLAYS))
        .on_conflict_do_nothing()
        .execute(conn)?;
    let row = lock::table(name.lock()).filter(lock::name.eq(REPLAYS));
    let row = row.select(lock::name).for_no_key_update();
    row.get_result::<String>(conn).optional().map(drop)
}

/// The next rows in the order in which they were settled; moves the walk past them. Reads a window of time,
/// which grows and shrinks until it holds about `most` rows.
fn next(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    walk: &mut ReplayWalk,
    most: usize,
) -> QueryResult<Vec<FoundRow>> {
    // Keys have an index, so one window covers all of them.
    if !keys_of(selection).is_empty() {
        walk.window = i64::MAX;
    }
    let to = match walk.window {
        i64::MAX => walk.end,
        window => walk.place.micros.saturating_add(window).min(walk.end),
    };
    let rows: Vec<FoundRow> = looking(conn, None, |conn| {
        let when = (ledger::settled_at, ledger::sequence).into_sql::<TimeAndSequence>();
        let rows = ledger::table(name.ledger())
            .filter(is_meant(selection, walk, to))
            .filter(when.gt(walk.place.of_row()))
            .order((ledger::settled_at, ledger::sequence))
            .limit(i64::try_from(most).unwrap_or(i64::MAX))
            .select((
                ledger::message_id,
                shown_key!(ledger),
                ledger::payload.is_not_null(),
                ledger::settled_at,
                ledger::sequence,
            ));
        unprepared(rows).load(conn)
    })?;
    walk.place = match rows.last() {
        Some(last) if rows.len() >= most => Place {
            micros: to_micros(last.settled_at),
            sequence: last.sequence,
        },
        _ => Place::before(to),
    };
    if rows.len() >= most {
        walk.window = (walk.window / 2).max(1_000);
    } else if rows.len() < most / 2 {
        walk.window = walk.window.saturating_mul(4);
    }
    Ok(rows)
}

/// The result of sending one message again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SentAgain {
    /// The message is sent once more, or already waits: it was sent again before, or an attempt has failed.
    Yes,
    /// No such message was delivered to the destination or is dead, or the destination does not exist.
    NotFound,
    /// The message was delivered, and its payload is not kept.
    NotKept,
}

/// Replays one message to a destination that has received it.
pub(super) fn once_more(
    conn: &mut PgConnection,
    name: &OutboxName,
    to: Recipient<'_>,
    message_id: Uuid,
    operator: &str,
) -> QueryResult<SentAgain> {
    let delivered = ledger::table(name.ledger())
        .filter(ledger::message_id.eq(message_id))
        .filter(ledger::status.eq(Status::Delivered.as_str()))
        .filter(to.entries())
        .order(ledger::settled_at.desc())
        .select((
            ledger::message_id,
            shown_key!(ledger),
            ledger::payload.is_not_null(),
            ledger::settled_at,
            ledger::sequence,
        ));
    let rows: Vec<FoundRow> = unprepared(delivered).load(conn)?;
    let Some(row) = rows.iter().find(|row| row.has_payload) else {
        return Ok(match rows.is_empty() {
            true => SentAgain::NotFound,
            false => SentAgain::NotKept,
        });
    };
    let (ids, run) = (ReplayIds::Same, new_run());
    insert(conn, name, ids, to.destination, &run, &[row], operator)?;
    Ok(SentAgain::Yes)
}

/// Inserts new messages for these rows, in their order, and a history entry for each. Messages that this run has
/// inserted before are skipped. A new message is enqueued now, but its event keeps its time, which receivers see: the
/// time of the first enqueueing, if the application gave none. `asked`: the destination of messages that name none; empty: the current routes decide.
///
/// Text: Diesel has no `unnest`, and no WITH.
fn insert(
    conn: &mut PgConnection,
    name: &OutboxName,
    ids: ReplayIds,
    asked: &str,
    run: &str,
    rows: &[&FoundRow],
    operator: &str,
) -> QueryResult<usize> {
    let message_ids: Vec<Uuid> = rows.iter().map(|row| row.message_id).collect();
    let sequences: Vec<i64> = rows.iter().map(|row| row.sequence).collect();
    let settled_at: Vec<PgTimestamp> = rows.iter().map(|row| row.settled_at).collect();
    let has_new_ids = ids == ReplayIds::New;
    let key = |row: &&FoundRow| replayed(&row.key, run, has_new_ids);
    let keys: Vec<String> = rows.iter().map(key).collect();
    let new_ids: Vec<Option<Uuid>> = match ids {
        ReplayIds::Same => rows.iter().map(|_| None).collect(),
        ReplayIds::New => rows.iter().map(|_| Some(Uuid::now_v7())).collect(),
    };
    unprepared_statement(format!(
        "WITH replayed AS (
            INSERT INTO {outbox} (message_id, topic, destination, payload, headers, ordering_key,
                idempotency_key, digest, tenant_id, occurred_at, registration)
            SELECT coalesce(r.new_id, l.message_id), l.topic, {goes_to}, l.payload, l.headers,
                   l.ordering_key, r.key, {digest}, l.tenant_id, coalesce(l.occurred_at, l.created_at),
                   CASE WHEN l.destination = {goes_to} THEN l.registration END
              FROM unnest($1::uuid[], $2::bigint[], $3::timestamptz[], $4::uuid[], $5::text[])
                   WITH ORDINALITY AS r(message_id, sequence, settled_at, new_id, key, n)
              JOIN {ledger} l ON l.message_id = r.message_id AND l.sequence = r.sequence
                             AND l.settled_at = r.settled_at
             WHERE l.status <> 'dead' AND l.payload IS NOT NULL
               AND NOT EXISTS (SELECT FROM {ledger} e
                                WHERE e.idempotency_key = r.key AND e.named_destination = {goes_to})
             ORDER BY r.n
            ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO NOTHING
            RETURNING sequence, message_id, topic, destination, tenant_id, registration
         ), removed AS (
            {removed}
         )
         INSERT INTO {attempt} (part, sequence, message_id, topic, destination, tenant_id, event, operator)
         SELECT {part}, sequence, message_id, topic, destination, tenant_id, 'replayed', $6 FROM replayed",
        outbox = name.outbox(),
        ledger = name.ledger(),
        attempt = name.attempt(),
        goes_to = "coalesce(nullif(l.named_destination, ''), $7)",
        part = open_part(name),
        digest = digest_of("l"),
        removed = removed_again(name, "SELECT destination, registration FROM replayed"),
    ))
    .bind::<Array<SqlUuid>, _>(message_ids)
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Array<Timestamptz>, _>(settled_at)
    .bind::<Array<Nullable<SqlUuid>>, _>(new_ids)
    .bind::<Array<Text>, _>(keys)
    .bind::<Text, _>(operator)
    .bind::<Text, _>(asked)
    .execute(conn)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use diesel::Connection;
    use diesel::connection::SimpleConnection;
    use diesel::dsl::sql;
    use diesel::sql_types::Bool;

    use super::*;
    use crate::sql::functions::pg_backend_pid;
    use crate::sql::tests::Outbox;

    /// Replays what was delivered in these seconds, as the run `again`.
    fn replay(conn: &mut PgConnection, name: &OutboxName, from: u64, to: u64) -> u64 {
        let selection = Selection {
            since: Some(UNIX_EPOCH + Duration::from_secs(from)),
            until: Some(UNIX_EPOCH + Duration::from_secs(to)),
            ..Selection::default()
        };
        let mut walk = begin(conn, name, &selection, "again").expect("begun");
        walk.window = i64::from(u32::MAX);
        let done = step(conn, name, &selection, ReplayIds::Same, &mut walk, 1000, "");
        done.expect("replayed").expect("messages").changed
    }

    /// R36: the ledger has a key twice, so the replays insert the keys in different orders.
    #[test]
    fn two_replays_of_one_run_take_turns() {
        let outbox = Outbox::new();
        let (mut first, mut second) = (outbox.connect(), outbox.connect());
        let (mut watch, name) = (outbox.connect(), &outbox.name);
        let ledger = name.ledger();
        for (second, key) in [(1, "a"), (2, "b"), (3, "a")] {
            watch
                .batch_execute(&format!(
                    "INSERT INTO {ledger} (part, sequence, message_id, topic, destination, idempotency_key,
                        status, attempts, payload, created_at, settled_at)
                     VALUES (0, {second}, '{}', 't', 'default', '{key}', 'delivered', 1, '1', now(), to_timestamp({second}))",
                    Uuid::now_v7()
                ))
                .expect("a row");
        }
        let waiter: i32 = select(pg_backend_pid())
            .get_result(&mut second)
            .expect("a process");
        std::thread::scope(|scope| {
            let both = scope.spawn(|| {
                first.transaction(|first| {
                    let done = replay(first, name, 1, 2);
                    let other = scope.spawn(|| {
                        second.transaction(|conn| QueryResult::Ok(replay(conn, name, 2, 4)))
                    });
                    let mut waits = false;
                    while !waits {
                        assert!(
                            !other.is_finished(),
                            "the second replay waits for the first"
                        );
                        waits = select(sql::<Bool>(&format!(
                            "cardinality(pg_blocking_pids({waiter})) > 0"
                        )))
                        .get_result(&mut watch)?;
                    }
                    let done = done + replay(first, name, 2, 3);
                    QueryResult::Ok((done, other))
                })
            });
            let (done, other) = both.join().expect("no panic").expect("no deadlock");
            assert_eq!(done, 2);
            assert_eq!(other.join().expect("no deadlock"), Ok(0));
        });
    }
}

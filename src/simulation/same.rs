//! The comparison of the simulated database with PostgreSQL. A seed asks both the same questions. After each question,
//! the answers and all rows must be equal.
//!
//! The two clocks differ. So every time is the middle of a turn, and time passes by whole turns; on PostgreSQL, the
//! rows are made older instead. The comparison covers which messages are due and their order, not exact times.
//!
//! Why: docs/decisions.md#same-as-postgresql

mod question;
mod side;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel::pg::data_types::PgTimestamp;
use diesel::sql_types::{BigInt, Bool, Nullable, Text, Timestamptz};
use diesel::{PgConnection, QueryableByName, RunQueryDsl};
use fastrand::Rng;
use uuid::Uuid;

use self::question::{Ask, Dice, New};
use self::side::Side;
use super::broken::Broken;
use super::history::History;
use super::link::Link;
use super::process::{Actor, Process};
use super::promises::Promise;
use super::setting;
use super::stage::{Stage, Truth};
use super::tables::{self, Changes, Tables, micros};
use crate::clock;
use crate::config::{LedgerPayload, OnDead};
use crate::doctor::sql::rights::check_relay;
use crate::engine::host::session::Session;
use crate::engine::host::settings::Settings;
use crate::engine::host::shared::Shared;
use crate::engine::host::sql::connection::{Plans, Source, StatementLimits};
use crate::engine::host::threads::Post;
use crate::engine::lease::sql::lease;
use crate::engine::send::verdict::Verdict;
use crate::feed::sql::store::EventLog;
use crate::message::{Due, NewMessage, Sequence};
use crate::name::OutboxName;
use crate::operate::sql::messages::LetterId;
use crate::operate::sql::replay::{self, ReplayIds};
use crate::operate::sql::selection::Selection;
use crate::operate::sql::why::{WaitReason, WhyFacts, of_live};
use crate::operate::sql::{dead, depths};
use crate::outbox::sql::enqueue;
use crate::outbox::sql::waiting::{MessageRef, cancel_waiting, reschedule};
use crate::sql::statement::statement;
use crate::sql::tests::Outbox;

/// The default number of histories.
const HISTORIES: u64 = 20;
const QUESTIONS: usize = 250;
/// Each broken statement must be found within this many histories.
const HISTORIES_OF_BROKEN: u64 = 20;
const TURN: Duration = Duration::from_secs(600);
/// The name of the run of all replays.
const RUN: &str = "r";
/// The time limit of a statement.
const LONG: Duration = Duration::from_secs(30);

/// The time until the middle of the nth turn; 0: at once.
fn turns(n: u32) -> Duration {
    (TURN * n).saturating_sub(TURN / 2)
}

/// Like [`turns`], for pauses: none ends when a message is due, so both databases agree on which is later.
fn pause_turns(n: u32) -> Duration {
    match n {
        0 => Duration::ZERO,
        n => turns(n) + TURN / 8,
    }
}

/// The dead letters with these sequences. No sequence is used twice here.
fn letters(conn: &mut PgConnection, name: &OutboxName, sequences: &[i64]) -> Vec<LetterId> {
    let all = dead::matching(conn, name, &Selection::default()).expect("letters");
    let is_asked = |letter: &LetterId| sequences.contains(&letter.sequence.0);
    all.into_iter().filter(is_asked).collect()
}

/// A row of any of the tables.
#[derive(QueryableByName)]
struct Row {
    #[diesel(sql_type = Text)]
    what: String,
    #[diesel(sql_type = BigInt)]
    sequence: i64,
    #[diesel(sql_type = Nullable<BigInt>)]
    lease: Option<i64>,
    /// When the row is due or expires.
    #[diesel(sql_type = Nullable<Timestamptz>)]
    at: Option<PgTimestamp>,
}

fn rows_of_postgres(conn: &mut PgConnection, name: &OutboxName) -> Vec<Row> {
    statement(format!(
        "SELECT concat_ws(' ', 'live', topic, destination, coalesce(ordering_key, '-'),
                    coalesce(idempotency_key, '-'), payload, attempts, coalesce(split_from, 0), coalesce(split_to, '-'),
                    coalesce(headers->>'h', '-'), coalesce(last_error_code = 'ABANDONED', false)::text,
                    (available_at <= clock_timestamp())::text) AS what,
                sequence, locked_by AS lease, available_at AS at FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'dead', topic, named_destination, coalesce(ordering_key, '-'),
                    coalesce(idempotency_key, '-'), payload, attempts, coalesce(split_from, 0), coalesce(split_to, '-'),
                    coalesce(headers->>'h', '-'), blocks_key::text), sequence, NULL, NULL FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'ledger', topic, named_destination, coalesce(ordering_key, '-'),
                    coalesce(idempotency_key, '-'), attempts, status), sequence, NULL, NULL FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'lease', single_active::text, ended::text,
                    (expires_at <= clock_timestamp())::text), 0, id, expires_at FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'pause', kind, name, paused_by, reason, openings), 0, NULL, paused_until FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'event', feed, position, topic, coalesce(ordering_key, '-')), sequence, NULL, NULL FROM {}",
        name.outbox(),
        name.dead(),
        name.ledger(),
        name.lease(),
        name.pause(),
        name.feed_event()
    ))
    .load(conn)
    .expect("all rows")
}

fn rows_of_tables(tables: &Tables, now: i64) -> Vec<Row> {
    let row = |what: String, sequence, lease, at: Option<i64>| Row {
        what,
        sequence,
        lease,
        at: at.map(PgTimestamp),
    };
    let named = |of: &tables::Row| {
        let key = of.ordering_key.unwrap_or("-");
        let known_by = of.idempotency_key.as_deref().unwrap_or("-");
        format!("{} {} {key} {known_by}", of.topic, of.destination)
    };
    let message = |of: &tables::Row| {
        let (attempts, from) = (of.attempts, of.split_from.unwrap_or(0));
        let split_to = of.split_to.as_deref().unwrap_or("-");
        let headers = of.headers.map_or("-".to_owned(), |value| value.to_string());
        format!(
            "{} {} {attempts} {from} {split_to} {headers}",
            named(of),
            of.body
        )
    };
    let live = tables.rows.values().map(|one| {
        let (message, is_due) = (message(one), one.available_at <= now);
        let what = format!("live {message} {} {is_due}", one.is_abandoned);
        let lease = one.held.map(|held| held.lease);
        row(what, one.sequence, lease, Some(one.available_at))
    });
    let dead = tables.dead.iter().map(|one| {
        let what = format!("dead {} {}", message(&one.row), one.blocks_key);
        row(what, one.row.sequence, None, None)
    });
    let ledger = tables.ledger.iter().map(|one| {
        let status = if one.is_delivered {
            "delivered"
        } else {
            "dead"
        };
        let what = format!("ledger {} {} {status}", named(&one.row), one.row.attempts);
        row(what, one.row.sequence, None, None)
    });
    let leases = tables.leases.iter().map(|(id, one)| {
        let (single, ended, at) = (one.is_single_active, one.is_ended, one.expires_at);
        let what = format!("lease {single} {ended} {}", at <= now);
        row(what, 0, Some(*id), Some(at))
    });
    let pauses = tables.pauses.iter();
    let pauses = pauses.map(|((kind, name, by), (reason, openings, until))| {
        row(
            format!("pause {kind} {name} {by} {reason} {openings}"),
            0,
            None,
            *until,
        )
    });
    let events = tables.feeds.iter();
    let events = events.flat_map(|(feed, of)| of.log.iter().map(move |one| (feed, one)));
    let events = events.map(|(feed, one)| {
        let key = one.ordering_key.unwrap_or("-");
        let what = format!("event {feed} {} {} {key}", one.position, one.topic);
        row(what, one.sequence, None, None)
    });
    let rows = live.chain(dead).chain(ledger).chain(events);
    rows.chain(leases).chain(pauses).collect()
}

/// The stored row of each enqueued message: sequence, number, whether the row is new, and whether its content is the
/// same.
type Stored = Vec<(i64, u128, bool, bool)>;

/// `open`: the rows of the producer's transaction, which began at `began`.
fn enqueue_in_tables(
    stage: &Stage<'_>,
    new: &[New],
    began: i64,
    open: &mut Vec<tables::Row>,
) -> Stored {
    let tables = &mut *stage.tables.borrow_mut();
    let mut truths = stage.messages.borrow_mut();
    let mut stored: Stored = Vec::new();
    for (number, one) in new.iter().enumerate() {
        truths.push(Truth::default());
        let row = tables::Row {
            sequence: tables.last_sequence + 1,
            id: truths.len() - 1,
            topic: one.topic,
            destination: one.destination.to_owned(),
            ordering_key: one.ordering_key,
            idempotency_key: one.idempotency_key.map(str::to_owned),
            body: one.body,
            headers: one.headers,
            occurred_at: began,
            available_at: began + micros(turns(one.delay)),
            expires_at: one.expires.map(|lasts| began + micros(turns(lasts))),
            ..tables::Row::default()
        };
        let is_it = |other: &&tables::Row| other.is_known_by(one.idempotency_key, one.destination);
        // A row that the index refuses uses up a sequence, except for the same key twice in one statement.
        let is_asked = |other: &New| row.is_known_by(other.idempotency_key, other.destination);
        tables.last_sequence += i64::from(!new[..number].iter().any(is_asked));
        let mut before = open.iter().chain(tables.rows.values());
        let found = before.find(is_it).unwrap_or(&row);
        stored.push((
            found.sequence,
            found.id as u128,
            found.id == row.id,
            found.has_content_of(&row),
        ));
        if found.id == row.id {
            open.push(row);
        }
    }
    stored
}

/// `first`: the number of the first message.
fn enqueue_in_postgres(
    conn: &mut PgConnection,
    name: &OutboxName,
    new: &[New],
    first: usize,
) -> Stored {
    let row = |(id, one): (u128, &New)| {
        let mut message = NewMessage::new(one.topic, &one.body).expect("JSON");
        message.message_id = Uuid::from_u128(id);
        one.destination.clone_into(&mut message.destination);
        message.ordering_key = one.ordering_key.map(str::to_owned);
        message.idempotency_key = one.idempotency_key.map(str::to_owned);
        if let Some(value) = one.headers {
            message = message.header("h", value.to_string());
        }
        message = message.delay(turns(one.delay));
        if let Some(lasts) = one.expires {
            message = message.expires_after(turns(lasts));
        }
        enqueue::NewRow::new(message)
    };
    let rows: Vec<enqueue::NewRow> = (first as u128..).zip(new).map(row).collect();
    let stored = enqueue::insert_or_find(conn, name, &rows).expect("enqueued");
    let told = |one: enqueue::StoredMessage| {
        (
            one.sequence,
            one.message_id.as_u128(),
            one.is_new,
            one.is_same,
        )
    };
    stored.into_iter().map(told).collect()
}

/// Lets a turn pass: makes all rows older by one turn.
fn pass_in_postgres(conn: &mut PgConnection, name: &OutboxName) {
    let older = |column| format!("{column} = {column} - interval '{} s'", TURN.as_secs());
    let (outbox, lease, pause) = (name.outbox(), name.lease(), name.pause());
    let (dead, available, expires, paused) = (
        name.dead(),
        older("available_at"),
        older("expires_at"),
        older("paused_until"),
    );
    conn.batch_execute(&format!(
        "UPDATE {outbox} SET {available}, {expires}; UPDATE {lease} SET {expires};
         UPDATE {dead} SET {expires}; UPDATE {pause} SET {paused}"
    ))
    .expect("no transaction locks the rows");
}

/// Why each live message waits.
fn reasons(tables: &Tables, now: i64) -> BTreeMap<i64, WaitReason> {
    let facts = tables.facts(now);
    let reason = |row: &tables::Row| timeless(tables.reason(&facts, row, now));
    let rows = tables.rows.values();
    rows.map(|row| (row.sequence, reason(row))).collect()
}

/// The reason without times.
fn timeless(mut reason: WaitReason) -> WaitReason {
    match &mut reason {
        WaitReason::NotDue { until }
        | WaitReason::TopicPaused { until, .. }
        | WaitReason::DestinationPaused { until, .. }
        | WaitReason::BreakerOpen { until, .. } => *until = None,
        WaitReason::Sending { since, .. } => since.clear(),
        WaitReason::Expired { held_by } => **held_by = timeless(held_by.as_ref().clone()),
        _ => {}
    }
    reason
}

/// Whether exactly those due messages wait for others of their keys that a claim leaves. If no relay is active, the
/// destinations are not known.
fn explains_claims(tables: &Tables, reasons: &BTreeMap<i64, WaitReason>, now: i64) -> bool {
    let is_behind = |reason: &WaitReason| match reason {
        WaitReason::Expired { held_by } => matches!(**held_by, WaitReason::BehindKey { .. }),
        reason => matches!(reason, WaitReason::BehindKey { .. }),
    };
    let behind = reasons.iter().filter(|(_, reason)| is_behind(reason));
    let behind: Vec<i64> = behind.map(|(sequence, _)| *sequence).collect();
    !tables.has_active_relay(now) || behind == tables.behind(now)
}

/// The tables, and the names of their copies.
fn copies(name: &OutboxName) -> [(String, &'static str); 7] {
    [
        (name.outbox(), "outbox_copy"),
        (name.ledger(), "ledger_copy"),
        (name.dead(), "dead_copy"),
        (name.lease(), "lease_copy"),
        (name.pause(), "pause_copy"),
        (name.feed(), "feed_copy"),
        (name.feed_event(), "event_copy"),
    ]
}

/// Copies all rows: the standby's state.
fn replicate_in_postgres(conn: &mut PgConnection, name: &OutboxName) {
    for (table, copy) in copies(name) {
        conn.batch_execute(&format!(
            "DROP TABLE IF EXISTS pg_temp.{copy}; CREATE TEMP TABLE {copy} AS TABLE {table}"
        ))
        .expect("a copy");
    }
}

/// Replaces the rows with the copies. Sequences continue after this one.
fn fail_over_in_postgres(conn: &mut PgConnection, name: &OutboxName, last_sequence: i64) {
    for (table, copy) in copies(name) {
        conn.batch_execute(&format!(
            "DELETE FROM {table}; INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE {copy}"
        ))
        .expect("no transaction locks the rows");
    }
    conn.batch_execute(&format!(
        "SELECT setval(pg_get_serial_sequence('{}', 'sequence'), {}, false)",
        name.outbox(),
        last_sequence + 1
    ))
    .expect("a sequence");
}

/// Whether the ledger records this verdict.
fn is_recorded(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Delivered(_) | Verdict::Dead(..))
}

/// Whether the last claim was made in the transaction of the last settle. If so, other transactions never see the key
/// between its messages.
fn went_on_at_once(conn: &mut PgConnection, name: &OutboxName) -> bool {
    let of_last = |table, time| {
        format!(
            "(SELECT xmin::text FROM {table} WHERE {time} IS NOT NULL ORDER BY {time} DESC LIMIT 1)"
        )
    };
    let settled = of_last(name.ledger(), "settled_at");
    let claimed = of_last(name.outbox(), "locked_at");
    let is_one = diesel::dsl::sql::<Bool>(&format!("{settled} = {claimed}"));
    diesel::select(is_one).get_result(conn).expect("two rows")
}

/// Returns the first difference, with the questions that led to it.
fn compare(seed: u64, broken: Option<Broken>) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let is_single_active = rng.u8(..3) == 0;
    let history = History {
        items: Vec::new(),
        troubles: 0,
        slow: 0,
        has_dead_entries: false,
        is_crowded: false,
        feeds: &["a"],
        ..History::of(seed)
    };
    let slots = [OnceCell::new()];
    let stage = Stage::new(&history, broken, &slots, false);
    stage.set_clocks(Duration::ZERO);
    let process = Process::new(&stage, 0, 0, &slots[0]);
    let shared = process.shared;
    stage.processes.borrow_mut().push(process);
    // After the end of a history, no events happen.
    stage.fall(Promise::Busy, String::new);
    let result = compare_on(&stage, shared, &mut rng, is_single_active);
    drop(std::mem::take(&mut *stage.processes.borrow_mut()));
    clock::simulated::set(None);
    result
}

fn compare_on<'w>(
    stage: &'w Stage<'w>,
    shared: &Shared,
    rng: &mut Rng,
    is_single_active: bool,
) -> Result<(), String> {
    let outbox = Outbox::new();
    let name = &outbox.name;
    let session = || {
        Session::new(
            Source::of_url(outbox.url.clone().into()),
            name.clone(),
            Arc::clone(&shared.threads),
            Post::Claimer,
            StatementLimits::of_relay(LONG, Plans::ByIndex),
            check_relay,
        )
    };
    let settings = Settings {
        table: name.clone(),
        on_dead: OnDead::Block,
        ledger_payload: LedgerPayload::WithEntry,
        log: Some(&EventLog),
        ..shared.settings.clone()
    };
    let link = || Link::new(stage, 0, Actor::Claimer);
    let bulkheads = &shared.bulkheads;
    let mut simulated = Side::new([link(), link()], &settings, bulkheads, clock::now);
    let mut real = Side::new([session(), session()], &settings, bulkheads, Instant::now);
    let (mut operator, mut producer) = (outbox.connect(), outbox.connect());
    // Discarded messages let keys continue in the order of their messages.
    (operator
        .batch_execute("SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off"))
    .expect("settings");
    // The rows that an open transaction has enqueued.
    let (mut open, mut began) = (None::<Vec<tables::Row>>, 0);
    let (mut is_beside, mut standby) = (false, None::<Tables>);
    simulated.register(3, is_single_active).expect("a lease");
    real.register(3, is_single_active).expect("a lease");
    let mut story = Vec::new();
    for _ in 0..QUESTIONS {
        let mut enqueued = open.iter().flatten();
        let question = Dice {
            rng,
            tables: &stage.tables.borrow(),
            now: stage.database_now().micros,
            leases: &simulated.leases,
            claimed: &simulated.claimed,
            is_single_active,
            is_enqueueing: open.is_some(),
            has_enqueued_key: enqueued.any(|row| row.idempotency_key.is_some()),
            is_beside,
            has_standby: standby.is_some(),
        }
        .question();
        let mut told = [String::new(), String::new()];
        let now = stage.database_now().micros;
        match &question.ask {
            Ask::Enqueue(new) => {
                let open = open.get_or_insert_with(|| {
                    producer.batch_execute("BEGIN").expect("begun");
                    began = now;
                    Vec::new()
                });
                let first = stage.messages.borrow().len();
                let stored = enqueue_in_tables(stage, new, began, open);
                told = [stored, enqueue_in_postgres(&mut producer, name, new, first)]
                    .map(|stored| format!("{stored:?}"));
            }
            ask @ (Ask::Commit | Ask::RollBack) => {
                let is_kept = matches!(ask, Ask::Commit)
                    || stage.broken == Some(Broken::KeepsWhatIsRolledBack);
                let end = if matches!(ask, Ask::Commit) {
                    "COMMIT"
                } else {
                    "ROLLBACK"
                };
                producer.batch_execute(end).expect("ended");
                let rows = open.take().into_iter().flatten().filter(|_| is_kept);
                let rows = rows.map(|row| (row.sequence, row));
                stage.tables.borrow_mut().rows.extend(rows);
            }
            Ask::LetGo => {
                is_beside = false;
                simulated.other.commit();
                (real.other)
                    .run(|conn, _| AnsiTransactionManager::commit_transaction(conn))
                    .expect("ended");
            }
            Ask::TimePasses => {
                pass_in_postgres(&mut operator, name);
                stage.pass(0, TURN);
                // The standby's rows would not become older.
                standby = None;
            }
            Ask::Requeue(sequences) => {
                let letters = letters(&mut operator, name, sequences);
                dead::requeue(&mut operator, name, &letters, "").expect("requeued");
                stage.tables.borrow_mut().requeue(sequences, now);
            }
            Ask::Discard(sequences) => {
                let letters = letters(&mut operator, name, sequences);
                dead::discard(&mut operator, name, &letters, "").expect("discarded");
                stage.tables.borrow_mut().discard(sequences, now);
            }
            Ask::Cancel(sequences) => {
                cancel_waiting(&mut operator, name, sequences, None).expect("cancelled");
                stage.tables.borrow_mut().cancel(sequences, now);
            }
            Ask::Reschedule(sequence, delay) => {
                let tables = &mut *stage.tables.borrow_mut();
                let (row, after) = (&tables.rows[sequence], turns(*delay));
                let which = MessageRef::from(Sequence(*sequence))
                    .with_id(Uuid::from_u128(row.id as u128))
                    .at(&row.destination);
                reschedule(&mut operator, name, &which, Due::After(after)).expect("rescheduled");
                tables.reschedule(*sequence, after, now);
            }
            Ask::Replay(topic) => {
                let filter = Selection {
                    topic: Some((*topic).to_owned()),
                    ..Selection::default()
                };
                let mut walk = replay::begin(&mut operator, name, &filter, RUN).expect("begun");
                let mut step = || {
                    let same = ReplayIds::Same;
                    replay::step(&mut operator, name, &filter, same, &mut walk, 1000, "")
                        .expect("replayed")
                };
                while step().is_some() {}
                let tables = &mut *stage.tables.borrow_mut();
                let mut sent: Vec<_> = (tables.ledger.iter())
                    .filter(|one| one.is_delivered && one.row.topic == *topic)
                    .collect();
                sent.sort_by_key(|one| (one.at, one.row.sequence));
                let sent = sent.into_iter().map(|one| one.row.clone()).collect();
                tables.replay(sent, RUN, now);
            }
            Ask::Forget => {
                let all =
                    lease::holders(&mut operator, name, i64::MIN, i64::MAX).expect("all leases");
                lease::forget(&mut operator, name, Duration::ZERO, &all.holders)
                    .expect("forgotten leases");
                let numbers = |of: Vec<i64>| of.into_iter().map(|id| real.number(id)).collect();
                let vanished: [Vec<_>; 2] = [
                    stage
                        .tables
                        .borrow()
                        .vanished()
                        .into_iter()
                        .map(|id| simulated.number(id))
                        .collect(),
                    numbers(all.vanished),
                ];
                told = vanished.map(|numbers| format!("{numbers:?}"));
                stage.tables.borrow_mut().forget(now);
            }
            Ask::Replicate => {
                replicate_in_postgres(&mut operator, name);
                standby = Some(stage.tables.borrow().clone());
            }
            Ask::FailOver => {
                if open.take().is_some() {
                    producer.batch_execute("ROLLBACK").expect("ended");
                }
                let tables = standby.take().expect("a standby");
                fail_over_in_postgres(&mut operator, name, tables.last_sequence);
                *stage.tables.borrow_mut() = tables;
            }
            _ => {}
        }
        if question.stays_open {
            is_beside = true;
            simulated.other.open = Some(Changes::default());
            let begun = real.other.run(|conn, _| {
                AnsiTransactionManager::begin_transaction(conn)?;
                // The transaction stays open for longer than a relay's.
                conn.batch_execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            });
            begun.expect("begun");
        }
        let answers = [simulated.answer(&question), real.answer(&question)];
        let mut answers = answers.map(|answer| answer.unwrap_or_else(|error| format!("{error:?}")));
        (answers.iter_mut().zip(&told)).for_each(|(answer, told)| *answer += told);
        if matches!(&question.ask, Ask::Settle { verdict, .. } if is_recorded(verdict))
            && !question.stays_open
            && answers[1].contains("\n    ")
        {
            assert!(went_on_at_once(&mut operator, name), "{question:?}");
        }
        stage.pass(0, Duration::from_millis(1));
        let now = stage.database_now().micros;
        let rows = [
            simulated.told_rows(rows_of_tables(&stage.tables.borrow(), now)),
            real.told_rows(rows_of_postgres(&mut operator, name)),
        ];
        story.push(format!("{question:?}\n    {}", answers[0]));
        let lanes = depths::lanes(&mut operator, name).expect("lanes");
        let names = lanes
            .iter()
            .map(|(_, destination)| destination.as_str())
            .collect();
        let facts = WhyFacts::load(&mut operator, name, &names, None).expect("facts");
        let told = of_live(&mut operator, name, &facts, &[]).expect("the live messages");
        let told = told.into_iter();
        let told = told.map(|(record, why)| (record.sequence.0, timeless(why)));
        let (told, reasons) = (told.collect(), reasons(&stage.tables.borrow(), now));
        if reasons != told || !explains_claims(&stage.tables.borrow(), &reasons, now) {
            return Err(format!(
                "{}\nthe messages wait for {reasons:?}, but operators are told: {told:?}",
                story.join("\n")
            ));
        }
        if answers[0] != answers[1] || rows[0] != rows[1] {
            let [simulated, real] = rows;
            return Err(format!(
                "{}\nbut PostgreSQL:\n    {}\nsimulated {simulated:#?}\nPostgreSQL {real:#?}",
                story.join("\n"),
                answers[1],
            ));
        }
    }
    Ok(())
}

/// G1 to G6, as far as they depend on statements.
#[test]
fn the_simulated_database_and_postgresql_do_the_same() {
    let from = setting("SEED").unwrap_or(1);
    for seed in from..from + setting("OUTBOX_SAME_CASES").unwrap_or(HISTORIES) {
        if let Err(difference) = compare(seed, None) {
            panic!("SEED={seed} OUTBOX_SAME_CASES=1\n{difference}");
        }
    }
}

/// Otherwise the comparison would prove nothing.
#[test]
fn each_broken_statement_is_found_out() {
    let find =
        |broken| (1..=HISTORIES_OF_BROKEN).find(|seed| compare(*seed, Some(broken)).is_err());
    let only = std::env::var("BROKEN").unwrap_or_default();
    let mut missed = Vec::new();
    for broken in Broken::OF_STATEMENTS {
        if !format!("{broken:?}").contains(&only) {
            continue;
        }
        match find(broken) {
            Some(seed) => eprintln!("{broken:?} in history {seed}"),
            None => missed.push(broken),
        }
    }
    assert!(missed.is_empty(), "{missed:?}");
}

//! The simulated database and PostgreSQL do the same: asked the same by a seed, they give the same answers and have
//! the same rows after each.
//!
//! Their clocks differ. So every time is the middle of a turn, and time passes by whole turns: on PostgreSQL the
//! rows become older instead. Compared is what is due, and in which order.

mod question;
mod side;

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::pg::data_types::PgTimestamp;
use diesel::sql_types::{BigInt, Nullable, Text, Timestamptz};
use diesel::{PgConnection, QueryableByName, RunQueryDsl};
use fastrand::Rng;
use uuid::Uuid;

use self::question::{Ask, Dice, New};
use self::side::Side;
use super::history::History;
use super::link::Link;
use super::process::{Actor, Process};
use super::promises::Promise;
use super::setting;
use super::stage::{Stage, Truth};
use super::tables::{self, Tables, micros};
use crate::clock;
use crate::config::{Config, OnDead};
use crate::message::NewMessage;
use crate::name::OutboxName;
use crate::relay::session::Session;
use crate::relay::threads::Post;
use crate::store::model::database::Outbox;
use crate::store::relay::connection::{Plans, Source};
use crate::store::statement::statement;
use crate::store::write::enqueue;

/// Histories, where nothing says how many.
const HISTORIES: u64 = 4;
const QUESTIONS: usize = 250;
const TURN: Duration = Duration::from_secs(600);
/// A statement may take so long.
const LONG: Duration = Duration::from_secs(30);

/// Until the middle of the nth turn; 0: at once.
fn turns(n: u32) -> Duration {
    (TURN * n).saturating_sub(TURN / 2)
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
    /// When it is due or over.
    #[diesel(sql_type = Nullable<Timestamptz>)]
    at: Option<PgTimestamp>,
}

fn rows_of_postgres(conn: &mut PgConnection, name: &OutboxName) -> Vec<Row> {
    statement(format!(
        "SELECT concat_ws(' ', 'live', topic, destination, coalesce(ordering_key, '-'), attempts,
                    coalesce(split_from, 0), coalesce(last_error_code = 'ABANDONED', false)::text,
                    (available_at <= clock_timestamp())::text) AS what,
                sequence, locked_by AS lease, available_at AS at FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'dead', topic, named_destination, coalesce(ordering_key, '-'), attempts,
                    coalesce(split_from, 0), blocks_key::text), sequence, NULL, NULL FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'ledger', named_destination, status), sequence, NULL, NULL FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'lease', single_active::text, ended::text,
                    (expires_at <= clock_timestamp())::text), 0, id, expires_at FROM {}
         UNION ALL
         SELECT concat_ws(' ', 'pause', kind, name, reason, openings), 0, NULL, paused_until FROM {}",
        name.outbox(),
        name.dead(),
        name.ledger(),
        name.lease(),
        name.pause()
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
    let message = |of: &tables::Row| {
        let (key, from) = (of.ordering_key.unwrap_or("-"), of.split_from.unwrap_or(0));
        let (topic, destination, attempts) = (of.topic, &of.destination, of.attempts);
        format!("{topic} {destination} {key} {attempts} {from}")
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
        let what = format!("ledger {} {status}", one.destination);
        row(what, one.sequence, None, None)
    });
    let leases = tables.leases.iter().map(|(id, one)| {
        let (single, ended, at) = (one.is_single_active, one.is_ended, one.expires_at);
        let what = format!("lease {single} {ended} {}", at <= now);
        row(what, 0, Some(*id), Some(at))
    });
    let pauses = tables.pauses.iter();
    let pauses = pauses.map(|((kind, name), (reason, openings, until))| {
        row(
            format!("pause {kind} {name} {reason} {openings}"),
            0,
            None,
            *until,
        )
    });
    let rows = live.chain(dead).chain(ledger);
    rows.chain(leases).chain(pauses).collect()
}

/// The rows of a transaction that began then, for its end.
fn enqueue_in_tables(stage: &Stage<'_>, new: &[New], began: i64) -> Vec<tables::Row> {
    let tables = &mut *stage.tables.borrow_mut();
    let mut truths = stage.messages.borrow_mut();
    let row = |one: &New| {
        tables.last_sequence += 1;
        truths.push(Truth::default());
        tables::Row {
            sequence: tables.last_sequence,
            id: truths.len() - 1,
            topic: one.topic,
            destination: one.destination.to_owned(),
            ordering_key: one.ordering_key,
            available_at: began + micros(turns(one.delay)),
            expires_at: one.expires.map(|lasts| began + micros(turns(lasts))),
            attempts: 0,
            is_abandoned: false,
            held: None,
            split_from: None,
        }
    };
    new.iter().map(row).collect()
}

/// `first`: the id of the first one.
fn enqueue_in_postgres(conn: &mut PgConnection, name: &OutboxName, new: &[New], first: usize) {
    let row = |(id, one): (u128, &New)| {
        let mut message = NewMessage::new(one.topic, &()).expect("JSON");
        message.message_id = Uuid::from_u128(id);
        one.destination.clone_into(&mut message.destination);
        message.ordering_key = one.ordering_key.map(str::to_owned);
        message = message.delay(turns(one.delay));
        if let Some(lasts) = one.expires {
            message = message.expires_after(turns(lasts));
        }
        enqueue::Row::new(message)
    };
    let rows: Vec<enqueue::Row> = (first as u128..).zip(new).map(row).collect();
    enqueue::insert_or_find(conn, name, &rows).expect("they are enqueued");
}

/// A turn passes: everything is by so much older.
fn pass_in_postgres(conn: &mut PgConnection, name: &OutboxName) {
    let older = |column| format!("{column} = {column} - interval '{} s'", TURN.as_secs());
    let (outbox, lease, pause) = (name.outbox(), name.lease(), name.pause());
    let (available, expires, paused) = (
        older("available_at"),
        older("expires_at"),
        older("paused_until"),
    );
    conn.batch_execute(&format!(
        "UPDATE {outbox} SET {available}, {expires}; UPDATE {lease} SET {expires};
         UPDATE {pause} SET {paused}"
    ))
    .expect("nothing holds the rows");
}

/// The first difference, and what led to it.
fn compare(seed: u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let is_single_active = rng.u8(..3) == 0;
    let history = History {
        items: Vec::new(),
        troubles: 0,
        slow: 0,
        has_dead_entries: false,
        ..History::of(seed)
    };
    let slots = [OnceCell::new()];
    let stage = Stage::new(&history, None, &slots, false);
    stage.set_clocks(Duration::ZERO);
    let process = Process::new(&stage, 0, 0, &slots[0]);
    let shared = process.shared;
    stage.processes.borrow_mut().push(process);
    // Behind the end of a history nothing happens by itself.
    stage.fall(Promise::Busy, String::new);
    let outbox = Outbox::new();
    let name = &outbox.name;
    let session = Session::new(
        Source::Url(outbox.url.clone().into()),
        name.clone(),
        Arc::clone(&shared.threads),
        Post::Claimer,
        LONG,
        Plans::ByIndex,
    );
    let config = Config {
        table: name.clone(),
        on_dead: OnDead::Block,
        ..shared.config.clone()
    };
    let mut simulated = Side::new(
        Link::new(&stage, 0, Actor::Claimer),
        &config,
        &shared.bulkheads,
        clock::now,
    );
    let mut real = Side::new(session, &config, &shared.bulkheads, Instant::now);
    let (mut operator, mut producer) = (outbox.connect(), outbox.connect());
    // What a transaction has enqueued that is open.
    let (mut open, mut began) = (Vec::new(), 0);
    simulated.register(3, is_single_active).expect("a lease");
    real.register(3, is_single_active).expect("a lease");
    let mut story = Vec::new();
    for _ in 0..QUESTIONS {
        let question = Dice {
            rng: &mut rng,
            tables: &stage.tables.borrow(),
            now: stage.database_now().micros,
            leases: &simulated.leases,
            claimed: &simulated.claimed,
            is_single_active,
        }
        .question();
        match &question.ask {
            Ask::Enqueue(new) => {
                if open.is_empty() {
                    producer.batch_execute("BEGIN").expect("it begins");
                    began = stage.database_now().micros;
                }
                enqueue_in_postgres(&mut producer, name, new, stage.messages.borrow().len());
                open.extend(enqueue_in_tables(&stage, new, began));
            }
            Ask::Commit if !open.is_empty() => {
                producer.batch_execute("COMMIT").expect("it ends");
                let rows = open.drain(..).map(|row| (row.sequence, row));
                stage.tables.borrow_mut().rows.extend(rows);
            }
            // Open ones would not become older.
            Ask::TimePasses if !open.is_empty() => {}
            Ask::TimePasses => {
                pass_in_postgres(&mut operator, name);
                stage.pass(0, TURN);
            }
            Ask::DeadLettersGo => {
                let delete = format!("DELETE FROM {}", name.dead());
                operator.batch_execute(&delete).expect("they go");
                stage.tables.borrow_mut().dead.clear();
            }
            _ => {}
        }
        let answers = [simulated.answer(&question), real.answer(&question)];
        let answers = answers.map(|answer| answer.unwrap_or_else(|error| format!("{error:?}")));
        stage.pass(0, Duration::from_millis(1));
        let now = stage.database_now().micros;
        let rows = [
            simulated.told_rows(rows_of_tables(&stage.tables.borrow(), now)),
            real.told_rows(rows_of_postgres(&mut operator, name)),
        ];
        story.push(format!("{question:?}\n    {}", answers[0]));
        if answers[0] != answers[1] || rows[0] != rows[1] {
            let [simulated, real] = rows;
            return Err(format!(
                "{}\nbut PostgreSQL:\n    {}\nsimulated {simulated:#?}\nPostgreSQL {real:#?}",
                story.join("\n"),
                answers[1],
            ));
        }
    }
    drop(std::mem::take(&mut *stage.processes.borrow_mut()));
    clock::simulated::set(None);
    Ok(())
}

/// `SEED` and `OUTBOX_SAME_CASES` say which histories, and how many.
#[test]
fn the_simulated_database_and_postgresql_do_the_same() {
    let from = setting("SEED").unwrap_or(1);
    for seed in from..from + setting("OUTBOX_SAME_CASES").unwrap_or(HISTORIES) {
        if let Err(difference) = compare(seed) {
            panic!("SEED={seed} OUTBOX_SAME_CASES=1\n{difference}");
        }
    }
}

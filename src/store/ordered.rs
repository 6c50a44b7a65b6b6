//! Order by key: claiming messages that have an ordering key.
//!
//! Such a message is claimed only when none before it in its key is live, none of its key is held by
//! a live lease, and no dead letter before it keeps the key back.
//!
//! Messages that name no destination are one order, wherever they go. The parts of a fan-out, and other
//! messages that name one, are an order for each destination: one that hangs does not hold the parts
//! for another. Each part waits for those before it that name none; and a message that names none
//! waits for the parts before it at the destination that it goes to. One that is to be split goes
//! nowhere by itself, and waits for none. A dead letter that keeps its key back does so within the same
//! order: at its destination, or everywhere where it names none.
//!
//! Claims of keyed messages exclude one another by an advisory lock. Otherwise a message that was
//! committed late could be claimed while another claim, not yet seen, takes one behind it.

#[cfg(test)]
mod tests;
mod walk;

use std::time::Instant;

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Integer, Text, Timestamptz};
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};

pub(crate) use self::walk::{first_of, walk};

use super::OUTBOX_NUMBER;
use super::claim::{
    Batch, Claimant, Claimed, ClaimedRow, Lane, Lanes, Position, Topic, as_bigint, candidate,
    claim_statement, claimed, is_live, most,
};
use super::lease::LeaseId;
use super::settle::of_row;
use super::statement::statement;
use crate::message::Message;
use crate::name::OutboxName;

/// A key, and the destination within which it orders.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) ordering_key: String,
    pub(crate) destination: String,
}

impl Key {
    /// That of a message, if it has one.
    pub(crate) fn of(message: &Message) -> Option<Self> {
        Some(Self {
            ordering_key: message.ordering_key.clone()?,
            destination: message.destination.clone(),
        })
    }
}

/// The first message of a key.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) key: Key,
    pub(crate) topic: Topic,
    pub(crate) sequence: i64,
}

/// A part of the walk over all keys.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// Those that can be claimed, as it seems.
    pub(crate) heads: Vec<Head>,
    /// The last key that was looked at; `None`: it was the last one.
    pub(crate) last: Option<Key>,
}

/// A message's place in the order of its key.
fn place(row: &str) -> String {
    format!("coalesce({row}.split_from, {row}.sequence)")
}

/// Whether no live message stands before `o`, which goes to the destination `goes_to`. Written so that
/// each question is a probe of the index (ordering_key, destination, place), and stays one: a NOT
/// EXISTS could become a join.
fn is_first(name: &OutboxName, goes_to: GoesTo<'_>) -> String {
    let of_others = match goes_to {
        GoesTo::Known(destination) => format!("> '' AND e.destination = {destination}"),
        GoesTo::Unknown => "> ''".to_owned(),
    };
    format!(
        "{} AND (o.destination = '' OR {}) AND (o.destination <> '' OR {})",
        none_before(name, "= o.destination"),
        none_before(name, "= ''"),
        none_before(name, &of_others),
    )
}

/// Whether no live message of the key stands before `o` that names one of these destinations.
fn none_before(name: &OutboxName, destinations: &str) -> String {
    format!(
        "(SELECT 1 FROM {outbox} e
           WHERE e.ordering_key = o.ordering_key AND e.destination {destinations}
             AND {before} < {here} LIMIT 1) IS NULL",
        outbox = name.outbox(),
        before = place("e"),
        here = place("o"),
    )
}

/// Where a message goes that names no destination.
#[derive(Debug, Clone, Copy)]
enum GoesTo<'a> {
    /// To what this expression says.
    Known(&'a str),
    /// It may be any.
    Unknown,
}

/// Whether nothing else of the key is on its way, as far as it is in one order with `o`, and no dead
/// letter keeps it back. $2: leases that are over.
fn is_alone(name: &OutboxName, goes_to: &str) -> String {
    format!(
        "(SELECT 1 FROM {outbox} e
           WHERE e.ordering_key = o.ordering_key AND e.sequence <> o.sequence
             AND (e.destination = '' OR e.destination = o.destination
                  OR (o.destination = '' AND e.destination = {goes_to}))
             AND e.locked_by IS NOT NULL AND e.locked_by <> ALL($2) LIMIT 1) IS NULL
         AND {not_kept_back}",
        outbox = name.outbox(),
        not_kept_back = is_not_kept_back(name, GoesTo::Known(goes_to)),
    )
}

/// Whether no dead letter keeps back `o`, which goes to the destination `goes_to`. The first question is
/// answered once for all: mostly there is none that keeps any key back.
fn is_not_kept_back(name: &OutboxName, goes_to: GoesTo<'_>) -> String {
    let of_others = match goes_to {
        GoesTo::Known(destination) => {
            format!("o.destination = '' AND d.destination = {destination}")
        }
        GoesTo::Unknown => "o.destination = ''".to_owned(),
    };
    format!(
        "((SELECT 1 FROM {dead} WHERE blocks_key LIMIT 1) IS NULL
          OR (SELECT 1 FROM {dead} d
               WHERE d.blocks_key AND d.ordering_key = o.ordering_key AND {before} < {here}
                 AND (d.destination = o.destination OR d.destination = '' OR ({of_others}))
               LIMIT 1) IS NULL)",
        dead = name.dead(),
        before = place("d"),
        here = place("o"),
    )
}

/// A message that may be claimed.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) sequence: i64,
    /// The destination that it is for; empty where it is to be split, or nothing serves it.
    pub(crate) goes_to: String,
}

/// What a lane has.
#[derive(Debug, Default, Clone)]
pub(crate) struct Found {
    pub(crate) candidates: Vec<Candidate>,
    /// Where the look at it ended; `None`: it has no more.
    pub(crate) reached: Option<Position>,
}

/// Messages of a lane that one statement looks at, at most: most of them may wait for one before
/// them.
const LOOKED_AT: i64 = 2000;

#[derive(diesel::QueryableByName)]
struct DueRow {
    #[diesel(sql_type = BigInt)]
    lane: i64,
    #[diesel(sql_type = BigInt)]
    sequence: i64,
    #[diesel(sql_type = Timestamptz)]
    available_at: PgTimestamp,
    #[diesel(sql_type = Bool)]
    is_candidate: bool,
    /// Counted from the lane's place on.
    #[diesel(sql_type = BigInt)]
    place: i64,
}

/// The messages of these lanes that can be claimed, as it seems: from each lane's place on. `goes_to`:
/// the destination of each lane. The answers are in the order of the lanes.
pub(crate) fn due(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    lanes: &[Lane],
    goes_to: &[&str],
) -> QueryResult<Vec<Found>> {
    let of_lanes = Lanes::of(lanes);
    let rows: Vec<DueRow> = statement(format!(
        "SELECT lane.n AS lane, seen.sequence, seen.available_at, seen.is_candidate, seen.place
           FROM unnest($2::text[], $3::text[], $4::timestamptz[], $5::bigint[], $6::text[])
                WITH ORDINALITY AS lane(topic, destination, after_time, after_sequence, goes_to, n)
          CROSS JOIN LATERAL (
                SELECT o.sequence, o.available_at, o.place,
                       (o.locked_by IS NULL OR o.locked_by = ANY($1)) AND {is_first} AS is_candidate
                  FROM (SELECT *, row_number() OVER (ORDER BY available_at, sequence) AS place
                          FROM {outbox}
                         WHERE topic = lane.topic AND destination = lane.destination
                           AND ordering_key IS NOT NULL
                           AND available_at <= now()
                           AND (available_at, sequence) > (lane.after_time, lane.after_sequence)
                         ORDER BY available_at, sequence LIMIT $7) o
          ) seen
          WHERE seen.is_candidate OR seen.place = $7
          ORDER BY lane.n, seen.available_at, seen.sequence",
        outbox = name.outbox(),
        is_first = is_first(name, GoesTo::Known("lane.goes_to")),
    ))
    .bind::<Array<BigInt>, _>(claimant.expired)
    .bind::<Array<Text>, _>(of_lanes.topics)
    .bind::<Array<Text>, _>(of_lanes.destinations)
    .bind::<Array<Timestamptz>, _>(of_lanes.after_times)
    .bind::<Array<BigInt>, _>(of_lanes.after_sequences)
    .bind::<Array<Text>, _>(goes_to)
    .bind::<BigInt, _>(LOOKED_AT)
    .load(conn)?;
    let mut found = vec![Found::default(); lanes.len()];
    for row in rows {
        let number = usize::try_from(row.lane - 1).unwrap_or(0);
        let of_lane = &mut found[number];
        if of_lane.candidates.len() >= lanes[number].room {
            continue;
        }
        if row.is_candidate {
            of_lane.candidates.push(Candidate {
                sequence: row.sequence,
                goes_to: goes_to[number].to_owned(),
            });
        }
        let is_last = row.place >= LOOKED_AT || of_lane.candidates.len() >= lanes[number].room;
        if is_last {
            of_lane.reached = Some(Position {
                available_at: row.available_at.0,
                sequence: row.sequence,
            });
        }
    }
    Ok(found)
}

#[derive(diesel::QueryableByName)]
struct LockedRow {
    #[diesel(sql_type = Bool)]
    is_locked: bool,
}

/// Claims those of these keyed messages that are the first of their key and alone. `None`: another
/// relay is claiming just now.
pub(crate) fn claim(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    chosen: &[Candidate],
) -> QueryResult<Option<Batch>> {
    let goes_to = of_row("$6::text[]", "$5");
    let candidates = format!(
        "WITH candidate AS MATERIALIZED (
            SELECT {candidate}
              FROM {outbox} o
             WHERE o.sequence = ANY($5) AND {is_live}
               AND o.available_at <= now()
               AND (o.locked_by IS NULL OR o.locked_by = ANY($2))
               AND {is_first} AND {is_alone}
             ORDER BY o.sequence
               FOR NO KEY UPDATE SKIP LOCKED
        )",
        candidate = candidate(),
        outbox = name.outbox(),
        is_live = is_live(name),
        is_first = is_first(name, GoesTo::Known(&goes_to)),
        is_alone = is_alone(name, &goes_to),
    );
    let before = Instant::now();
    let mut chosen: Vec<&Candidate> = chosen.iter().collect();
    chosen.sort_unstable_by_key(|one| one.sequence);
    let (sequences, goes_to): (Vec<i64>, Vec<&str>) = chosen
        .iter()
        .map(|one| (one.sequence, one.goes_to.as_str()))
        .unzip();
    conn.transaction(|conn| {
        // A statement of its own: the claim sees what the last holder of the lock did.
        let locked: LockedRow = sql_query(format!(
            "SELECT pg_try_advisory_xact_lock({OUTBOX_NUMBER}, 2) AS is_locked"
        ))
        .bind::<Text, _>(name.outbox())
        .get_result(conn)?;
        if !locked.is_locked {
            return Ok(None);
        }
        statement(claim_statement(name, &candidates))
            .bind::<BigInt, _>(claimant.lease.0)
            .bind::<Array<BigInt>, _>(claimant.expired)
            .bind::<Integer, _>(most(claimant))
            .bind::<BigInt, _>(as_bigint(claimant.bytes))
            .bind::<Array<BigInt>, _>(sequences)
            .bind::<Array<Text>, _>(goes_to)
            .load::<ClaimedRow>(conn)
            .map(|rows| Some(claimed(rows, before)))
    })
}

/// Claims the first message that is due and that none of these is, in its order, keyed or not: for tests,
/// where nobody else claims. Due is what is due now, and not what was when the transaction began.
pub(crate) fn claim_one(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    but: &[i64],
) -> QueryResult<Option<Claimed>> {
    let candidates = format!(
        "WITH candidate AS MATERIALIZED (
            SELECT {candidate}
              FROM {outbox} o
             WHERE o.available_at <= clock_timestamp() AND o.sequence <> ALL($5)
               AND o.locked_by IS NULL
               AND (o.ordering_key IS NULL OR ({is_first} AND {is_not_kept_back}))
             ORDER BY o.sequence LIMIT 1
               FOR NO KEY UPDATE SKIP LOCKED
        )",
        candidate = candidate(),
        outbox = name.outbox(),
        is_first = is_first(name, GoesTo::Unknown),
        is_not_kept_back = is_not_kept_back(name, GoesTo::Unknown),
    );
    let before = Instant::now();
    statement(claim_statement(name, &candidates))
        .bind::<BigInt, _>(lease.0)
        .bind::<Array<BigInt>, _>(Vec::<i64>::new())
        .bind::<Integer, _>(i32::MAX)
        .bind::<BigInt, _>(i64::MAX)
        .bind::<Array<BigInt>, _>(but)
        .load::<ClaimedRow>(conn)
        .map(|rows| claimed(rows, before).claimed.pop())
}

/// Claims the next message of each of these keys.
///
/// For a transaction that has just removed a message of each, held by the same lease: until it
/// commits, no other claim can find any of these keys free, so this needs no lock. But a part for some
/// destination may be on its way that was claimed before the removed message, which went elsewhere: the
/// next one that names none may go there, and waits. Nothing of the topics `closed` is taken. Due is what
/// is due now: the next one may have been enqueued since the transaction began.
pub(crate) fn claim_next(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    keys: &[Key],
    closed: &[String],
) -> QueryResult<Batch> {
    let candidates = format!(
        "WITH candidate AS MATERIALIZED (
            SELECT {candidate}
              FROM {outbox} o
             WHERE o.sequence = ANY(ARRAY(
                    SELECT next.sequence FROM unnest($5::text[], $6::text[]) AS k(ordering_key, destination)
                     CROSS JOIN LATERAL (
                        SELECT n.sequence FROM {outbox} n
                         WHERE n.ordering_key = k.ordering_key AND n.destination = k.destination
                         ORDER BY {place} LIMIT 1
                     ) next))
               AND {is_live}
               AND o.available_at <= clock_timestamp() AND o.topic <> ALL($7)
               AND (o.locked_by IS NULL OR o.locked_by = ANY($2))
               AND {is_not_kept_back}
               AND (o.destination = '' OR {none_before})
               AND (o.destination <> '' OR (SELECT 1 FROM {outbox} e
                     WHERE e.ordering_key = o.ordering_key AND e.destination > ''
                       AND ({before} < {here}
                            OR (e.locked_by IS NOT NULL AND e.locked_by <> ALL($2))) LIMIT 1) IS NULL)
             ORDER BY o.sequence
               FOR NO KEY UPDATE SKIP LOCKED
        )",
        candidate = candidate(),
        outbox = name.outbox(),
        place = place("n"),
        is_live = is_live(name),
        is_not_kept_back = is_not_kept_back(name, GoesTo::Unknown),
        none_before = none_before(name, "= ''"),
        before = place("e"),
        here = place("o"),
    );
    let before = Instant::now();
    let (ordering_keys, destinations): (Vec<&str>, Vec<&str>) = keys
        .iter()
        .map(|key| (key.ordering_key.as_str(), key.destination.as_str()))
        .unzip();
    statement(claim_statement(name, &candidates))
        .bind::<BigInt, _>(claimant.lease.0)
        .bind::<Array<BigInt>, _>(claimant.expired)
        .bind::<Integer, _>(most(claimant))
        .bind::<BigInt, _>(as_bigint(claimant.bytes))
        .bind::<Array<Text>, _>(ordering_keys)
        .bind::<Array<Text>, _>(destinations)
        .bind::<Array<Text>, _>(closed)
        .load::<ClaimedRow>(conn)
        .map(|rows| claimed(rows, before))
}

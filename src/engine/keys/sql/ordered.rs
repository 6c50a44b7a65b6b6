//! Order by key: claiming messages that have an ordering key.
//!
//! A keyed message is claimed only if no message before it in its key is live, no valid lease holds a message of its
//! key, and no dead letter before it blocks the key.
//!
//! Messages that name no destination form one order, wherever they go. The parts of a fan-out, and other messages that
//! name a destination, form one order for each destination: a destination that hangs does not hold up the parts for
//! another. Each part waits for earlier messages that name no destination. A message that names no destination waits
//! for earlier parts at the destination that it goes to. A message that is to be split (fanned out) goes nowhere
//! itself, and waits for no parts. A dead letter blocks its key within the same order: at its destination, or
//! everywhere if it names none.
//!
//! A claim takes the first message of a key. At destinations with a `key_run` above 1, it also takes messages behind
//! this one: a [run](run). While the first message is live, no other claim can take them.
//!
//! The lock of a row keeps claims of keyed messages apart. Otherwise a message that was committed late could be claimed
//! while another claim, not visible yet, takes a message behind it.

mod next;
mod run;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use diesel::dsl::array;
use diesel::internal::table_macro::{Inner, Join, NoFromClause};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, Connection, ExpressionMethods, IntoSql, NullableExpressionMethods,
    QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Integer, Record, Timestamptz};
use diesel::{PgConnection, select};

pub(crate) use self::next::{claim_next, deliver_and_claim_next};

use self::run::claim_behind;
use super::lock::try_lock;
use crate::engine::claim::sql::claim::{
    ARRAYS_AT_ONCE, Batch, Candidates, Claimant, Claimed, Lane, Position, Stream, can_be_taken,
    claim_from, concatenated, facts, is_due, is_in,
};
use crate::engine::lease::sql::lease::LeaseId;
use crate::message::Message;
use crate::name::OutboxName;
use crate::sql::functions::{On, clock_timestamp, coalesce};
use crate::sql::table::{candidate, dead, other};

/// An ordering key, and the destination within which the key orders messages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) ordering_key: String,
    pub(crate) destination: String,
}

impl Key {
    /// The key of a message, if the message has one.
    pub(crate) fn of(message: &Message) -> Option<Self> {
        Some(Self {
            ordering_key: message.ordering_key.clone()?,
            destination: message.destination.clone(),
        })
    }
}

/// A condition on a candidate and another message.
type Beside<'a, T> = On<'a, Join<T, candidate::table, Inner>>;

/// Whether no live message comes before the candidate, if it goes to the destination `goes_to` (`None`: to any). Each
/// condition is a probe of the index (ordering_key, destination, place).
pub(crate) fn is_first<'a>(
    name: &OutboxName,
    goes_to: Option<&'a str>,
) -> On<'a, candidate::table> {
    let of_its_own = Box::new(other::destination.eq(candidate::destination));
    Box::new(none_before(name, of_its_own).and(none_beside(name, goes_to)))
}

/// Whether no live message comes before the candidate, among those of its key that do not name the same destination, or
/// none, as it does.
fn none_beside<'a>(name: &OutboxName, goes_to: Option<&'a str>) -> On<'a, candidate::table> {
    let named = names_one().or(none_before(name, names(goes_to)));
    Box::new((names_none().or(none_before(name, Box::new(other::destination.eq(""))))).and(named))
}

fn names_none() -> On<'static, candidate::table> {
    Box::new(candidate::destination.eq(""))
}

fn names_one() -> On<'static, candidate::table> {
    Box::new(candidate::destination.ne(""))
}

/// The other message names the destination `goes_to` (`None`: any destination).
fn names(goes_to: Option<&str>) -> Beside<'_, other::table> {
    let names_one = other::destination.gt("");
    match goes_to {
        Some(goes_to) => Box::new(names_one.and(other::destination.eq(goes_to))),
        None => Box::new(names_one),
    }
}

/// Whether none of these messages comes before the candidate in its key. A subquery with a LIMIT stays a probe; NOT
/// EXISTS could become a join.
fn none_before<'a>(name: &OutboxName, these: Beside<'a, other::table>) -> On<'a, candidate::table> {
    none_of_its_key(name, Box::new(these.and(is_before())))
}

fn none_of_its_key<'a>(
    name: &OutboxName,
    these: Beside<'a, other::table>,
) -> On<'a, candidate::table> {
    let found = other::table(name.outbox())
        .filter(other::ordering_key.eq(candidate::ordering_key))
        .filter(these)
        .select(other::sequence);
    Box::new(found.single_value().is_null())
}

/// The other message comes before the candidate. A part of a fan-out keeps the place of the original message.
fn is_before() -> Beside<'static, other::table> {
    let here = coalesce(candidate::split_from, candidate::sequence);
    Box::new(coalesce(other::split_from, other::sequence).lt(here))
}

/// The other message is in flight, and not held under an expired lease.
fn is_held(expired: &[i64]) -> Beside<'_, other::table> {
    let is_locked = other::locked_by.is_not_null();
    Box::new(is_locked.and(other::locked_by.assume_not_null().ne_all(expired)))
}

/// Whether no other message of the candidate's key and order is in flight.
// Why: docs/decisions.md#first-and-alone
fn is_alone<'a>(
    name: &OutboxName,
    expired: &'a [i64],
    goes_to: &'a str,
) -> On<'a, candidate::table> {
    let goes_there = candidate::destination
        .eq("")
        .and(other::destination.eq(goes_to));
    let is_in_its_order = other::destination
        .eq("")
        .or(other::destination.eq(candidate::destination))
        .or(goes_there);
    let these = other::sequence
        .ne(candidate::sequence)
        .and(is_in_its_order)
        .and(is_held(expired));
    none_of_its_key(name, Box::new(these))
}

/// Whether no dead letter blocks the candidate, if it goes to the destination `goes_to` (`None`: to any). The first
/// subquery runs once for all candidates: usually no dead letter blocks any key.
fn is_not_kept_back<'a>(name: &OutboxName, goes_to: Option<&'a str>) -> On<'a, candidate::table> {
    let keeping_back = || dead::table(name.dead()).filter(dead::blocks_key);
    let is_before = coalesce(dead::split_from, dead::sequence)
        .lt(coalesce(candidate::split_from, candidate::sequence));
    let names_none = candidate::destination.eq("");
    let goes_there: Beside<'_, dead::table> = match goes_to {
        Some(goes_to) => Box::new(names_none.and(dead::named_destination.eq(goes_to))),
        None => Box::new(names_none),
    };
    let is_in_its_order = dead::named_destination
        .eq(candidate::destination)
        .or(dead::named_destination.eq(""))
        .or(goes_there);
    let none = keeping_back().select(dead::sequence).single_value();
    let none_of_its_key = keeping_back()
        .filter(dead::ordering_key.eq(candidate::ordering_key))
        .filter(is_before)
        .filter(is_in_its_order)
        .select(dead::sequence)
        .single_value();
    Box::new(none.is_null().or(none_of_its_key.is_null()))
}

/// A message that may be claimed.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) sequence: i64,
    /// The destination of the message; empty if the message is to be split, or no destination serves it.
    pub(crate) goes_to: String,
}

/// The most messages of a lane that one statement reads: most of the messages may wait for an earlier one.
const LOOKED_AT: i64 = 2000;

/// The number of the lane, the sequence, when the message is available, whether it can be claimed.
type DueKeyRow = (i32, i64, PgTimestamp, bool);
type DueRowSql = (Integer, BigInt, Timestamptz, Bool);

/// The messages of these lanes that appear claimable, from each lane's position, in the order of the lanes. Also the
/// position that was reached in each lane that has more messages. `goes_to`: the destination of each lane.
pub(crate) fn due(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    lanes: &[Lane],
    goes_to: &[String],
) -> QueryResult<(Vec<Candidate>, HashMap<Stream, Position>)> {
    let (mut due, mut reached) = (Vec::new(), HashMap::new());
    let numbered: Vec<(i32, (&Lane, &String))> = (0..).zip(lanes.iter().zip(goes_to)).collect();
    for part in numbered.chunks(ARRAYS_AT_ONCE) {
        let seen = part
            .iter()
            .map(|(number, (lane, goes_to))| seen_in(name, claimant, *number, lane, goes_to));
        let Some(seen) = concatenated(seen) else {
            continue;
        };
        let seen: Vec<DueKeyRow> = select(seen).get_result(conn)?;
        for of_lane in seen.chunk_by(|one, other| one.0 == other.0) {
            let number = usize::try_from(of_lane[0].0).unwrap_or(0);
            let lane = &lanes[number];
            let end = add_candidates(&mut due, of_lane, lane.room, &goes_to[number]);
            reached.extend(end.map(|at| (lane.stream.clone(), at)));
        }
    }
    Ok((due, reached))
}

/// The first messages of a lane after its position, whether they can be claimed or not.
fn seen_in<'a>(
    name: &OutboxName,
    claimant: Claimant<'a>,
    number: i32,
    lane: &'a Lane,
    goes_to: &'a str,
) -> On<'a, NoFromClause, Array<Record<DueRowSql>>> {
    let can_be_claimed = can_be_taken(claimant).and(is_first(name, Some(goes_to)));
    let seen = (
        number,
        candidate::sequence,
        candidate::available_at,
        can_be_claimed,
    );
    let first = candidate::table(name.outbox())
        .filter(is_in(lane))
        .filter(candidate::ordering_key.is_not_null())
        .filter(is_due())
        .order((candidate::available_at, candidate::sequence))
        .limit(LOOKED_AT)
        .select(seen.into_sql::<Record<DueRowSql>>());
    Box::new(array(first))
}

/// Returns where the scan of the lane ended; `None`: the lane has no more messages.
fn add_candidates(
    due: &mut Vec<Candidate>,
    seen: &[DueKeyRow],
    room: usize,
    goes_to: &str,
) -> Option<Position> {
    let most = due.len().saturating_add(room);
    for (place, (_, sequence, available_at, can_be_claimed)) in (1..).zip(seen) {
        if *can_be_claimed {
            due.push(Candidate {
                sequence: *sequence,
                goes_to: goes_to.to_owned(),
            });
        }
        if place >= LOOKED_AT || due.len() >= most {
            return Some(Position::new(*available_at, *sequence));
        }
    }
    None
}

/// Claims the keyed messages among `chosen` that are the first of their key, with no other in flight. `None`: another
/// relay is claiming now.
pub(crate) fn claim(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    chosen: &[Candidate],
) -> QueryResult<Option<Batch>> {
    let mut going_to: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for one in chosen {
        going_to.entry(&one.goes_to).or_default().push(one.sequence);
    }
    let going_to: Vec<(&str, Vec<i64>)> = going_to.into_iter().collect();
    conn.transaction(|conn| {
        if !try_lock(conn, name)? {
            return Ok(None);
        }
        let looks = going_to.chunks(ARRAYS_AT_ONCE).map(|part| {
            let chosen = part.iter();
            let chosen = chosen.map(|(to, these)| chosen_for(name, claimant, to, these));
            chosen.collect()
        });
        let mut batch = claim_from(conn, name, claimant, looks, usize::MAX)?;
        claim_behind(conn, name, claimant, &mut batch)?;
        Ok(Some(batch))
    })
}

/// The messages that may be claimed for a destination.
fn chosen_for<'a>(
    name: &OutboxName,
    claimant: Claimant<'a>,
    goes_to: &'a str,
    sequences: &'a [i64],
) -> Candidates<'a> {
    let chosen = candidate::table(name.outbox())
        .filter(candidate::sequence.eq_any(sequences))
        .filter(is_due())
        .filter(can_be_taken(claimant))
        .filter(is_first(name, Some(goes_to)))
        .filter(is_alone(name, claimant.expired, goes_to))
        .filter(is_not_kept_back(name, Some(goes_to)))
        .order(candidate::sequence)
        .select(facts())
        .for_no_key_update()
        .skip_locked();
    Box::new(array(chosen))
}

/// Claims the first due message by sequence, keyed or not, except `but`: for tests, without other claimants. Due
/// means due now, not when the transaction began.
pub(crate) fn claim_one(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    but: &[i64],
) -> QueryResult<Option<Claimed>> {
    let has_its_turn = is_first(name, None).and(is_not_kept_back(name, None));
    let one = candidate::table(name.outbox())
        .filter(candidate::available_at.le(clock_timestamp()))
        .filter(candidate::sequence.ne_all(but))
        .filter(candidate::locked_by.is_null())
        .filter(candidate::ordering_key.is_null().or(has_its_turn))
        .order(candidate::sequence)
        .limit(1)
        .select(facts())
        .for_no_key_update()
        .skip_locked();
    let claimant = Claimant::of(lease);
    let look = vec![Box::new(array(one)) as Candidates<'_>];
    let batch = conn.transaction(|conn| claim_from(conn, name, claimant, [look], 1))?;
    Ok(batch.claimed.into_iter().next())
}

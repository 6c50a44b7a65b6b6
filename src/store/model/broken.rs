//! The store with one thing done wrong: for each promise, some that break it.

mod keyed;

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Integer, Timestamptz};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use crate::message::NewMessage;
use crate::name::OutboxName;
use crate::store::SequenceRow;
use crate::store::operate::dead;
use crate::store::relay::claim::{self, Claimant, Claimed, Known, Lane, Position, Stream};
use crate::store::relay::ordered::Candidate;
use crate::store::relay::settle;
use crate::store::write::enqueue::Stored;

pub(super) use self::keyed::{ClaimsKeyed, Part};

use super::system::{Moment, Settle, Store, System, Verdict, continue_keys, settle_them};

/// Messages are written by a connection of their own, outside of the caller's transaction.
pub(super) struct EnqueuesOutside(pub(super) Mutex<PgConnection>);

impl System for EnqueuesOutside {
    fn enqueue(
        &self,
        _: &mut PgConnection,
        name: &OutboxName,
        message: NewMessage,
    ) -> QueryResult<Stored> {
        let mut conn = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Store.enqueue(&mut conn, name, message)
    }
}

/// Messages are removed and the ledger does not get to know.
pub(super) struct ForgetsWhatIsDelivered;

impl System for ForgetsWhatIsDelivered {
    fn settle(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        settle: &Settle,
    ) -> QueryResult<Vec<i64>> {
        if settle.verdict == Verdict::Delivered {
            return settle::deduplicated(conn, name, settle.lease, &settle.claims());
        }
        settle_them(conn, name, settle)
    }
}

/// Claims never go back before the place where the last one ended.
#[derive(Default)]
pub(super) struct NeverSweeps(Mutex<HashMap<(i64, Stream), Position>>);

impl System for NeverSweeps {
    fn claim(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        lanes: &[Lane],
        room: usize,
    ) -> QueryResult<Vec<Claimed>> {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lanes: Vec<Lane> = (lanes.iter())
            .map(|lane| {
                let place = places.get(&(claimant.lease.0, lane.stream.clone()));
                Lane {
                    after: lane.after.max(*place.unwrap_or(&Position::START)),
                    ..lane.clone()
                }
            })
            .collect();
        let claimed = Store.claim(conn, name, claimant, &lanes, room)?;
        for one in &claimed {
            let stream = super::harness::stream_of(one);
            let place = places.entry((claimant.lease.0, stream));
            let place = place.or_insert(Position::START);
            *place = one.position.max(*place);
        }
        Ok(claimed)
    }
}

/// Requeued messages stay dead letters too.
pub(super) struct RequeuesCopies;

impl System for RequeuesCopies {
    fn requeue(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        sequences: &[i64],
    ) -> QueryResult<usize> {
        sql_query(format!("CREATE TEMP TABLE copy AS TABLE {}", name.dead())).execute(conn)?;
        let count = dead::requeue(conn, name, sequences, "")?;
        sql_query(format!(
            "INSERT INTO {} TABLE copy ON CONFLICT DO NOTHING",
            name.dead()
        ))
        .execute(conn)?;
        sql_query("DROP TABLE copy").execute(conn)?;
        Ok(count)
    }
}

/// What another relay has counts as free.
pub(super) struct ClaimsWhatOthersHave;

impl System for ClaimsWhatOthersHave {
    fn claim(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        lanes: &[Lane],
        room: usize,
    ) -> QueryResult<Vec<Claimed>> {
        let expired = all_leases(conn, name)?;
        let claimant = Claimant {
            expired: &expired,
            ..claimant
        };
        Store.claim(conn, name, claimant, lanes, room)
    }
}

/// Every relay counts as dead.
pub(super) struct TakesOverFromTheLiving;

impl System for TakesOverFromTheLiving {
    fn ended(&self, conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<i64>> {
        all_leases(conn, name)
    }
}

/// The ledger is not asked whether a key was delivered.
pub(super) struct ForgetsKeys;

impl System for ForgetsKeys {
    fn claim(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        lanes: &[Lane],
        room: usize,
    ) -> QueryResult<Vec<Claimed>> {
        let mut claimed = Store.claim(conn, name, claimant, lanes, room)?;
        claimed.iter_mut().for_each(|one| one.known = Known::No);
        Ok(claimed)
    }

    fn claim_keyed(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        candidates: &[Candidate],
    ) -> QueryResult<Option<Vec<Claimed>>> {
        let mut claimed = Store.claim_keyed(conn, name, claimant, candidates)?;
        (claimed.iter_mut().flatten()).for_each(|one| one.known = Known::No);
        Ok(claimed)
    }
}

/// A settle does not ask who has the message.
pub(super) struct SettlesUnfenced;

impl System for SettlesUnfenced {
    fn settle(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        settle: &Settle,
    ) -> QueryResult<Vec<i64>> {
        let of_others: Vec<HeldRow> = sql_query(format!(
            "UPDATE {} SET locked_by = $2 WHERE sequence = ANY($1) AND locked_by <> $2
             RETURNING sequence, locked_at, attempts",
            name.outbox()
        ))
        .bind::<Array<BigInt>, _>(settle.sequences())
        .bind::<BigInt, _>(settle.lease.0)
        .load(conn)?;
        settle_them(conn, name, &of_claims(settle, &of_others))
    }
}

/// What is delivered or split is asked for its lease only, and not for the time of its claim.
pub(super) struct SettlesByLease;

impl System for SettlesByLease {
    fn settle(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        settle: &Settle,
    ) -> QueryResult<Vec<i64>> {
        match settle.verdict {
            Verdict::Delivered | Verdict::Deduplicated | Verdict::Split => {
                let settle = of_any_claim(conn, name, settle)?;
                settle_them(conn, name, &settle)
            }
            Verdict::Retry { .. } | Verdict::Dead { .. } | Verdict::Released => {
                settle_them(conn, name, settle)
            }
        }
    }
}

/// A repeated settle changes what its relay has claimed anew.
pub(super) struct CountsTwice;

#[derive(diesel::QueryableByName)]
struct HeldRow {
    #[diesel(sql_type = BigInt)]
    sequence: i64,
    #[diesel(sql_type = Timestamptz)]
    locked_at: PgTimestamp,
    #[diesel(sql_type = Integer)]
    attempts: i32,
}

impl System for CountsTwice {
    fn settle(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        settle: &Settle,
    ) -> QueryResult<Vec<i64>> {
        let settle = of_any_claim(conn, name, settle)?;
        settle_them(conn, name, &settle)
    }
}

/// The settle as if its jobs were of whatever claim its lease holds their sequences by.
fn of_any_claim(
    conn: &mut PgConnection,
    name: &OutboxName,
    settle: &Settle,
) -> QueryResult<Settle> {
    let held: Vec<HeldRow> = sql_query(format!(
        "SELECT sequence, locked_at, attempts FROM {} WHERE locked_by = $1",
        name.outbox()
    ))
    .bind::<BigInt, _>(settle.lease.0)
    .load(conn)?;
    Ok(of_claims(settle, &held))
}

fn of_claims(settle: &Settle, held: &[HeldRow]) -> Settle {
    let mut settle = settle.clone();
    for job in &mut settle.jobs {
        if let Some(row) = held.iter().find(|row| row.sequence == job.sequence) {
            (job.claimed_at, job.attempts) = (row.locked_at.0, row.attempts);
        }
    }
    settle
}

/// A failed send costs nothing.
pub(super) struct RetriesForFree;

impl System for RetriesForFree {
    fn settle(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        settle: &Settle,
    ) -> QueryResult<Vec<i64>> {
        let mut settle = settle.clone();
        if let Verdict::Retry { counted, .. } = &mut settle.verdict {
            *counted = 0;
        }
        settle_them(conn, name, &settle)
    }
}

/// A message that was given back unsent pays for it.
pub(super) struct CountsReleases;

impl System for CountsReleases {
    fn settle(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        settle: &Settle,
    ) -> QueryResult<Vec<i64>> {
        let changed = settle_them(conn, name, settle)?;
        if settle.verdict == Verdict::Released {
            add_attempts(conn, name, &changed, 1)?;
        }
        Ok(changed)
    }
}

/// A message that kills relays does so for ever.
pub(super) struct TakesOverForFree;

impl System for TakesOverForFree {
    fn claim(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        lanes: &[Lane],
        room: usize,
    ) -> QueryResult<Vec<Claimed>> {
        let mut claimed = Store.claim(conn, name, claimant, lanes, room)?;
        for one in &mut claimed {
            if one.taken_over == claim::TakenOver::Once {
                add_attempts(conn, name, &[one.message.sequence.0], -1)?;
                one.message.attempts -= 1;
            }
        }
        Ok(claimed)
    }
}

/// Keys go on after the settle's transaction, and not in it.
pub(super) struct ContinuesLater;

impl System for ContinuesLater {
    fn settle_and_continue(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        settle: &Settle,
        meanwhile: &mut dyn FnMut(Moment<'_>),
    ) -> QueryResult<(Vec<i64>, Vec<Claimed>)> {
        let changed = self.settle(conn, name, settle)?;
        meanwhile(Moment::Settled(&changed));
        let next = continue_keys(conn, name, claimant, &settle.keys_of(&changed))?;
        meanwhile(Moment::Settled(&changed));
        Ok((changed, next))
    }
}

fn all_leases(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<i64>> {
    sql_query(format!("SELECT id AS sequence FROM {}", name.lease()))
        .load::<SequenceRow>(conn)
        .map(|rows| rows.into_iter().map(|row| row.sequence).collect())
}

fn add_attempts(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
    count: i32,
) -> QueryResult<usize> {
    sql_query(format!(
        "UPDATE {} SET attempts = attempts + $2 WHERE sequence = ANY($1)",
        name.outbox()
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Integer, _>(count)
    .execute(conn)
}

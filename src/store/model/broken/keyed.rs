//! The claim of keyed messages, written once more so that a part of it can be left out.

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Integer, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl};

use crate::name::OutboxName;
use crate::store::model::system::System;
use crate::store::relay::claim::{Claimant, Claimed, Found, take};
use crate::store::relay::ordered::{self, Candidate};
use crate::store::statement::statement;

/// A part of the claim of keyed messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store::model) enum Part {
    Lock,
    IsLive,
    IsFirst,
    IsAlone,
    IsNotKeptBack,
}

/// The claim of keyed messages without one of its parts, or with all.
pub(in crate::store::model) struct ClaimsKeyed {
    pub(in crate::store::model) without: Option<Part>,
}

#[derive(diesel::QueryableByName)]
struct FoundRow {
    #[diesel(sql_type = BigInt)]
    sequence: i64,
    #[diesel(sql_type = Nullable<BigInt>)]
    locked_by: Option<i64>,
    #[diesel(sql_type = Integer)]
    attempts: i32,
    #[diesel(sql_type = Nullable<Text>)]
    last_error_code: Option<String>,
}

impl System for ClaimsKeyed {
    fn claim_keyed(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        claimant: Claimant<'_>,
        candidates: &[Candidate],
    ) -> QueryResult<Option<Vec<Claimed>>> {
        if self.without != Some(Part::Lock) && ordered::claim(conn, name, claimant, &[])?.is_none()
        {
            return Ok(None);
        }
        let before = std::time::Instant::now();
        let one = |one: &Candidate| (one.sequence, one.goes_to.clone());
        let (sequences, goes_to): (Vec<i64>, Vec<String>) = candidates.iter().map(one).unzip();
        let rows: Vec<FoundRow> = statement(self.lock(name))
            .bind::<BigInt, _>(claimant.lease.0)
            .bind::<Array<BigInt>, _>(claimant.expired)
            .bind::<Array<BigInt>, _>(sequences)
            .bind::<Array<Text>, _>(goes_to)
            .load(conn)?;
        let found = |row: FoundRow| {
            let facts = (
                row.sequence,
                0,
                None,
                row.locked_by,
                row.attempts,
                row.last_error_code,
            );
            Found::new(facts, claimant.max_attempts)
        };
        let found: Vec<Found> = rows.into_iter().map(found).collect();
        take(conn, name, claimant.lease, &found, before).map(Some)
    }
}

impl ClaimsKeyed {
    /// Locks them.
    fn lock(&self, name: &OutboxName) -> String {
        let (outbox, dead) = (name.outbox(), name.dead());
        // `named`: the destination that the row names.
        let in_order = |row: &str, named: &str| {
            format!(
                "{row}.ordering_key = o.ordering_key
                 AND ({row}.{named} IN ('', o.destination)
                      OR (o.destination = '' AND {row}.{named} = w.goes_to))"
            )
        };
        let before = |row: &str| {
            format!(
                "coalesce({row}.split_from, {row}.sequence) < coalesce(o.split_from, o.sequence)"
            )
        };
        let parts = [
            (
                Part::IsLive,
                format!(
                    "EXISTS (SELECT FROM {lease} l WHERE l.id = $1 AND NOT l.ended
                        AND l.expires_at > clock_timestamp() AND NOT (l.single_active AND EXISTS (
                            SELECT FROM {lease} e WHERE e.single_active AND e.id < l.id AND NOT e.ended)))",
                    lease = name.lease()
                ),
            ),
            (
                Part::IsFirst,
                format!(
                    "NOT EXISTS (SELECT FROM {outbox} e WHERE {} AND {})",
                    in_order("e", "destination"),
                    before("e")
                ),
            ),
            (
                Part::IsAlone,
                format!(
                    "NOT EXISTS (SELECT FROM {outbox} e WHERE {} AND e.sequence <> o.sequence
                        AND e.locked_by IS NOT NULL AND e.locked_by <> ALL($2))",
                    in_order("e", "destination")
                ),
            ),
            (
                Part::IsNotKeptBack,
                format!(
                    "NOT EXISTS (SELECT FROM {dead} d WHERE d.blocks_key AND {} AND {})",
                    in_order("d", "named_destination"),
                    before("d")
                ),
            ),
        ];
        let kept = parts
            .into_iter()
            .filter(|(part, _)| self.without != Some(*part));
        let kept: Vec<String> = kept.map(|(_, condition)| condition).collect();
        format!(
            "SELECT o.sequence, o.locked_by, o.attempts, o.last_error_code
               FROM unnest($3::bigint[], $4::text[]) AS w(sequence, goes_to)
               JOIN {outbox} o USING (sequence)
              WHERE $1::bigint IS NOT NULL AND o.available_at <= now()
                AND (o.locked_by IS NULL OR o.locked_by = ANY($2)) AND {kept}
              ORDER BY o.sequence FOR NO KEY UPDATE OF o SKIP LOCKED",
            kept = kept.join(" AND "),
        )
    }
}

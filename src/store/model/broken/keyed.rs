//! The claim of keyed messages, written once more so that a part of it can be left out.

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Integer, Text};
use diesel::{PgConnection, RunQueryDsl};

use crate::name::OutboxName;
use crate::store::claim::{
    Claimant, Claimed, ClaimedRow, as_bigint, candidate, claim_statement, claimed, is_live, most,
};
use crate::store::model::system::System;
use crate::store::ordered::{self, Candidate};
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
        statement(claim_statement(name, &self.candidates(name)))
            .bind::<BigInt, _>(claimant.lease.0)
            .bind::<Array<BigInt>, _>(claimant.expired)
            .bind::<Integer, _>(most(claimant))
            .bind::<BigInt, _>(as_bigint(claimant.bytes))
            .bind::<Array<BigInt>, _>(sequences)
            .bind::<Array<Text>, _>(goes_to)
            .load::<ClaimedRow>(conn)
            .map(|rows| Some(claimed(rows, before).claimed))
    }
}

impl ClaimsKeyed {
    fn candidates(&self, name: &OutboxName) -> String {
        let (outbox, dead) = (name.outbox(), name.dead());
        let in_order = |row: &str| {
            format!(
                "{row}.ordering_key = o.ordering_key
                 AND ({row}.destination IN ('', o.destination)
                      OR (o.destination = '' AND {row}.destination = w.goes_to))"
            )
        };
        let before = |row: &str| {
            format!(
                "coalesce({row}.split_from, {row}.sequence) < coalesce(o.split_from, o.sequence)"
            )
        };
        let parts = [
            (Part::IsLive, is_live(name)),
            (
                Part::IsFirst,
                format!(
                    "NOT EXISTS (SELECT FROM {outbox} e WHERE {} AND {})",
                    in_order("e"),
                    before("e")
                ),
            ),
            (
                Part::IsAlone,
                format!(
                    "NOT EXISTS (SELECT FROM {outbox} e WHERE {} AND e.sequence <> o.sequence
                        AND e.locked_by IS NOT NULL AND e.locked_by <> ALL($2))",
                    in_order("e")
                ),
            ),
            (
                Part::IsNotKeptBack,
                format!(
                    "NOT EXISTS (SELECT FROM {dead} d WHERE d.blocks_key AND {} AND {})",
                    in_order("d"),
                    before("d")
                ),
            ),
        ];
        let kept = parts
            .into_iter()
            .filter(|(part, _)| self.without != Some(*part));
        let kept: Vec<String> = kept.map(|(_, condition)| condition).collect();
        format!(
            "WITH candidate AS MATERIALIZED (
                SELECT {candidate}
                  FROM unnest($5::bigint[], $6::text[]) AS w(sequence, goes_to)
                  JOIN {outbox} o USING (sequence)
                 WHERE o.available_at <= now()
                   AND (o.locked_by IS NULL OR o.locked_by = ANY($2)) AND {kept}
                 ORDER BY o.sequence FOR NO KEY UPDATE OF o SKIP LOCKED
            )",
            candidate = candidate(),
            kept = kept.join(" AND "),
        )
    }
}

//! Every statement. Free functions, the connection first, one short transaction each.
//!
//! Invariants: a settle of a claimed message names the lease that holds it
//! (`locked_by = $lease`) and the time of the claim (`locked_at`), so a relay whose messages were taken
//! over changes nothing, and nor does one whose sequences were given to other messages; rows are
//! locked in the order of their sequence (a sorted `= ANY(array)` on the primary key); only the
//! database's clock decides what is due and which lease is over.

// What statements are made of.
pub(crate) mod brief;
pub(crate) mod catalogue;
mod live;
pub(crate) mod looking;
pub(crate) mod pinned;
pub(crate) mod place;
pub(crate) mod range;
pub(crate) mod searched;
pub(crate) mod sql;
pub(crate) mod statement;
pub(crate) mod table;

#[cfg(feature = "relay")]
pub(crate) mod destinations;
pub(crate) mod operate;
#[cfg(feature = "relay")]
pub(crate) mod relay;
pub(crate) mod setup;
pub(crate) mod testing;
pub(crate) mod write;

#[cfg(test)]
pub(crate) mod tests;

use diesel::pg::Pg;
use diesel::result::QueryResult;
use diesel::sql_types::Integer;
use diesel::{Connection, IntoSql, RunQueryDsl};

use crate::name::OutboxName;

/// The digest of a row's content: plain inserts give none. As `message::digest` makes it.
///
/// Text, as what follows: parts of statements that are text.
pub(crate) fn digest_of(row: &str) -> String {
    format!(
        "coalesce({row}.digest, pg_catalog.sha256(pg_catalog.convert_to(
            {row}.topic OPERATOR(pg_catalog.||) E'\\n' OPERATOR(pg_catalog.||) {row}.payload::pg_catalog.text,
            'UTF8')))"
    )
}

/// The digest that the ledger keeps: of a row that has a key to compare under.
pub(crate) fn kept_digest(row: &str) -> String {
    format!(
        "CASE WHEN {row}.idempotency_key IS NOT NULL THEN {} END",
        digest_of(row)
    )
}

/// The part of the ring that the ledger is written into now. Where its rows are lost: the first one, so that a
/// settle never depends on them; `outbox_rotate` makes them again.
pub(crate) fn open_part(name: &OutboxName) -> String {
    format!(
        "coalesce((SELECT part FROM {} WHERE opened_at IS NOT NULL AND closed_at IS NULL), 0)",
        name.part()
    )
}

/// The outbox named $1, its table's oid as a signed number: the first half of the keys of its advisory locks. As
/// the trigger `outbox_wake` makes it.
const OUTBOX_NUMBER: &str = "to_regclass($1)::oid::bigint::bit(32)::integer";

/// A thousand years: the database cannot count much further back.
const LONGEST_AGE: std::time::Duration = std::time::Duration::from_secs(1000 * 365 * 24 * 3600);

/// Milliseconds for a `bigint` parameter. Settings are far below its range.
pub(crate) fn millis(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// An error where a statement of the open transaction has failed. PostgreSQL would answer its COMMIT with
/// a rollback, and Diesel would take that for a commit.
pub(crate) fn check_transaction(conn: &mut impl Connection<Backend = Pg>) -> QueryResult<()> {
    diesel::select(1.into_sql::<Integer>())
        .execute(conn)
        .map(drop)
}

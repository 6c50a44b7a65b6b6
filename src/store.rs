//! Every statement. Free functions, the connection first, one short transaction each.
//!
//! Invariants of all of them: a change of a claimed message names the lease that holds it
//! (`locked_by = $lease`) and the time of the claim (`locked_at`), so a relay whose messages were taken
//! over changes nothing, and nor does one whose sequences were given to other messages; rows are
//! locked in the order of their sequence (a sorted `= ANY(array)` on the primary key); only the
//! database's clock decides what is due and which lease is over.

pub(crate) mod activity;
pub(crate) mod blocked;
pub(crate) mod claim;
pub(crate) mod claimable;
pub(crate) mod clean;
pub(crate) mod connection;
pub(crate) mod dead;
pub(crate) mod depths;
pub(crate) mod doctor;
pub(crate) mod enqueue;
pub(crate) mod holders;
pub(crate) mod inbox;
pub(crate) mod inspect;
pub(crate) mod lease;
pub(crate) mod ledger;
pub(crate) mod look;
pub(crate) mod looking;
pub(crate) mod messages;
pub(crate) mod migrate;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod notifications;
pub(crate) mod ordered;
pub(crate) mod patrol;
pub(crate) mod pause;
pub(crate) mod pinned;
pub(crate) mod place;
pub(crate) mod range;
pub(crate) mod replay;
pub(crate) mod rights;
pub(crate) mod searched;
pub(crate) mod served;
pub(crate) mod settle;
pub(crate) mod split;
pub(crate) mod sql;
pub(crate) mod statement;
pub(crate) mod streams;
pub(crate) mod table;
pub(crate) mod troubles;
pub(crate) mod unserved;
pub(crate) mod waiting;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Integer};
use diesel::{IntoSql, PgConnection, RunQueryDsl};

/// A row that is only a sequence.
#[derive(diesel::QueryableByName)]
pub(crate) struct SequenceRow {
    #[diesel(sql_type = BigInt)]
    pub(crate) sequence: i64,
}

/// The digest of a row's content: plain inserts give none. As `message::digest` makes it.
pub(crate) fn digest_of(row: &str) -> String {
    format!(
        "coalesce({row}.digest, pg_catalog.sha256(pg_catalog.convert_to(
            {row}.topic OPERATOR(pg_catalog.||) E'\\n' OPERATOR(pg_catalog.||) {row}.payload::pg_catalog.text,
            'UTF8')))"
    )
}

/// The outbox named $1 as a number of 32 bits: the first half of the keys of its advisory locks. As
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
pub(crate) fn check_transaction(conn: &mut PgConnection) -> QueryResult<()> {
    diesel::select(1.into_sql::<Integer>())
        .execute(conn)
        .map(drop)
}

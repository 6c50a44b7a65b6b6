//! What SQL statements are made of. Statements are in folders named `sql` of each room: free functions that take the
//! connection first, one short transaction each. They use only plain values of their room.
//!
//! Invariants:
//! - A settle (recording the result of a claimed message) names the lease that holds the message
//!   (`locked_by = $lease`) and the time of the claim (`locked_at`). A relay whose messages were taken over
//!   changes nothing, nor does a relay whose sequences were given to other messages.
//! - Rows are locked in the order of their sequence (a sorted `= ANY(array)` on the primary key).
//! - Only the database's clock decides which messages are due and which leases have expired.
//!
//! Statements use Diesel's query builder where they can. A comment with `Text:` says why a statement is SQL text.

// Building blocks of statements.
#[cfg(feature = "relay")]
pub(crate) mod absent;
pub(crate) mod brief;
pub(crate) mod expired;
pub(crate) mod functions;
pub(crate) mod live;
pub(crate) mod lock_number;
pub(crate) mod looking;
pub(crate) mod pinned;
pub(crate) mod range;
pub(crate) mod statement;
pub(crate) mod table;

#[cfg(feature = "relay")]
pub(crate) mod paused;

#[cfg(test)]
pub(crate) mod tests;

use diesel::result::QueryResult;
use diesel::{ExpressionMethods, OptionalExtension, PgConnection, QueryDsl, RunQueryDsl};

use self::table::part;
use crate::name::OutboxName;

/// SQL for the digest of a row's content. Plain inserts write no digest, so it is computed as in `message::digest`.
///
/// Text, like the functions below: fragments of statements that are SQL text.
pub(crate) fn digest_of(row: &str) -> String {
    format!(
        "coalesce({row}.digest, pg_catalog.sha256(pg_catalog.convert_to(
            {row}.topic OPERATOR(pg_catalog.||) E'\\n' OPERATOR(pg_catalog.||) {row}.payload::pg_catalog.text,
            'UTF8')))"
    )
}

/// SQL for the digest that the ledger keeps: only rows with an idempotency key need one.
pub(crate) fn kept_digest(row: &str) -> String {
    format!(
        "CASE WHEN {row}.idempotency_key IS NOT NULL THEN {} END",
        digest_of(row)
    )
}

/// The part of the ledger's ring that takes new entries: the same as [`open_part`].
pub(crate) fn open_part_now(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<i16> {
    let open = part::table(name.part())
        .filter(part::opened_at.is_not_null())
        .filter(part::closed_at.is_null())
        .select(part::part);
    Ok(open.first(conn).optional()?.unwrap_or(0))
}

/// SQL for the part of the ledger's ring that takes new entries. If the rows that describe the ring are lost, the
/// first part does, so that a settle never depends on those rows; `outbox_rotate` recreates them.
// Why: docs/decisions.md#ring
pub(crate) fn open_part(name: &OutboxName) -> String {
    format!(
        "coalesce((SELECT part FROM {} WHERE opened_at IS NOT NULL AND closed_at IS NULL), 0)",
        name.part()
    )
}

/// The first half of the keys of an outbox's advisory locks: the oid of the table named $1, as a signed number.
/// The trigger `outbox_wake` computes the same number.
pub(crate) const OUTBOX_NUMBER: &str = "to_regclass($1)::oid::bigint::bit(32)::integer";

/// Notifies all relays of the outbox named $1, on the channel of `outbox_wake`.
pub(crate) const NOTIFY: &str = "pg_notify('outbox_' || to_regclass($1)::oid::text, '')";

/// Milliseconds for a `bigint` parameter. Settings are far below the largest `bigint`.
pub(crate) fn millis(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

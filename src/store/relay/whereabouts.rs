//! The state and the holder of a message, for a settle that found the message released or held by another relay.

use diesel::PgConnection;
use diesel::prelude::{
    CombineDsl, ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl, Queryable,
    RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable, Text};
use uuid::Uuid;

use super::lease::leases;
use super::settle::Trace;
use crate::name::OutboxName;
use crate::store::live;
use crate::store::sql::null;
use crate::store::table::{dead, lease, ledger, outbox};

/// A message, from the outbox, the dead letters or the ledger.
#[derive(Debug, Clone, Queryable)]
pub(crate) struct Whereabouts {
    pub(crate) sequence: i64,
    pub(crate) message_id: Uuid,
    pub(crate) status: String,
    pub(crate) attempts: i32,
    /// The lease that holds the message.
    pub(crate) lease: Option<i64>,
    /// The relay of that lease.
    pub(crate) relay: Option<String>,
}

/// The current state of these messages. Messages that were discarded or removed by retention are missing.
pub(crate) fn whereabouts(
    conn: &mut PgConnection,
    name: &OutboxName,
    missed: &[Trace],
) -> QueryResult<Vec<Whereabouts>> {
    let sequences: Vec<i64> = missed.iter().map(|one| one.claim.sequence).collect();
    let ids: Vec<Uuid> = missed.iter().map(|one| one.message_id).collect();
    let holder = leases(name)
        .filter(lease::id.nullable().eq(outbox::locked_by))
        .select(lease::relay);
    let live = outbox::table(name.outbox())
        .filter(outbox::sequence.eq_any(sequences.clone()))
        .select((
            outbox::sequence,
            outbox::message_id,
            live::status(),
            outbox::attempts,
            outbox::locked_by,
            holder.single_value(),
        ));
    let dead = dead::table(name.dead())
        .filter(dead::sequence.eq_any(sequences.clone()))
        .select((
            dead::sequence,
            dead::message_id,
            "dead".into_sql::<Text>(),
            dead::attempts,
            null!(i64, BigInt),
            null!(&str, Text),
        ));
    let delivered = ledger::table(name.ledger())
        .filter(ledger::message_id.eq_any(ids))
        .filter(ledger::sequence.eq_any(sequences))
        .filter(ledger::status.ne("dead"))
        .select((
            ledger::sequence,
            ledger::message_id,
            ledger::status,
            ledger::attempts,
            null!(i64, BigInt),
            null!(&str, Text),
        ));
    live.union_all(dead).union_all(delivered).load(conn)
}

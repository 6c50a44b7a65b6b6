//! The state and the holder of a message, for a settle that found the message released or held by another relay.

use diesel::PgConnection;
use diesel::prelude::{
    CombineDsl, ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl, Queryable,
    RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable, Text};
use uuid::Uuid;

use super::settle::Trace;
use crate::engine::lease::sql::lease::leases;
use crate::name::OutboxName;
use crate::sql::functions::null;
use crate::sql::live;
use crate::sql::table::{dead, lease, ledger, outbox};

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

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::super::settle::Claim;
    use super::*;
    use crate::sql::tests::Outbox;

    /// R37: who holds a message now, or what its state is. The relay that logs a conflict no longer has it.
    #[test]
    fn the_present_state_and_the_holder_of_each_message_are_read() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let lease = outbox.lease(conn);
        conn.batch_execute(&format!(
            "INSERT INTO {} (topic, payload, attempts, locked_by, locked_at) VALUES
                ('t', '1', 1, {lease}, now()), ('t', '2', 0, 7, now()), ('t', '3', 0, NULL, NULL), ('t', '4', 2, NULL, NULL)",
            name.outbox(),
            lease = lease.0
        ))
        .expect("messages");
        let missed: Vec<Trace> = (1..=5)
            .map(|sequence| Trace {
                claim: Claim { sequence, at: 0 },
                message_id: Uuid::nil(),
            })
            .collect();
        let mut found = whereabouts(conn, name, &missed).expect("an answer");
        found.sort_unstable_by_key(|one| one.sequence);
        let found = found.into_iter().map(|one| {
            let holder = (one.lease, one.relay.is_some());
            (one.sequence, one.status, one.attempts, holder)
        });
        let expected = [
            (1, "sending", 1, (Some(lease.0), true)),
            (2, "sending", 0, (Some(7), false)),
            (3, "pending", 0, (None, false)),
            (4, "retrying", 2, (None, false)),
        ];
        let expected = expected.map(|(sequence, status, attempts, holder)| {
            (sequence, status.to_owned(), attempts, holder)
        });
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}

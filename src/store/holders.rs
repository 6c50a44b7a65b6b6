//! Who has a message now, for a settle that found it in nobody's hands or in another's.
//!
//! Text: `unnest`, and a UNION of joins.

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Integer, Nullable, Text, Uuid as SqlUuid};
use diesel::{PgConnection, QueryableByName, RunQueryDsl, sql_query};
use uuid::Uuid;

use crate::name::OutboxName;

/// A row of the outbox, of the dead letters or of the ledger, as it is now.
#[derive(Debug, Clone, QueryableByName)]
pub(crate) struct Standing {
    #[diesel(sql_type = BigInt)]
    pub(crate) sequence: i64,
    #[diesel(sql_type = SqlUuid)]
    pub(crate) message_id: Uuid,
    #[diesel(sql_type = Text)]
    pub(crate) status: String,
    #[diesel(sql_type = Integer)]
    pub(crate) attempts: i32,
    /// The lease that holds it.
    #[diesel(sql_type = Nullable<BigInt>)]
    pub(crate) lease: Option<i64>,
    /// The relay whose lease that is.
    #[diesel(sql_type = Nullable<Text>)]
    pub(crate) relay: Option<String>,
}

/// A message that a settle missed.
pub(crate) struct Missed<'a> {
    pub(crate) sequence: i64,
    pub(crate) idempotency_key: &'a str,
    pub(crate) destination: &'a str,
}

/// What is known of these messages now. Of one that was discarded or cleaned away: nothing.
pub(crate) fn standings(
    conn: &mut PgConnection,
    name: &OutboxName,
    missed: &[Missed<'_>],
) -> QueryResult<Vec<Standing>> {
    let sequences: Vec<i64> = missed.iter().map(|one| one.sequence).collect();
    let keys: Vec<&str> = missed.iter().map(|one| one.idempotency_key).collect();
    let destinations: Vec<&str> = missed.iter().map(|one| one.destination).collect();
    sql_query(format!(
        "SELECT o.sequence, o.message_id,
                CASE WHEN o.locked_by IS NOT NULL THEN 'sending'
                     WHEN o.attempts > 0 THEN 'retrying'
                     ELSE 'pending' END AS status,
                o.attempts, o.locked_by AS lease, l.relay
           FROM {} o LEFT JOIN {} l ON l.id = o.locked_by
          WHERE o.sequence = ANY($1)
         UNION ALL
         SELECT d.sequence, d.message_id, 'dead', d.attempts, NULL, NULL
           FROM {} d WHERE d.sequence = ANY($1)
         UNION ALL
         SELECT s.sequence, s.message_id, s.status, s.attempts, NULL, NULL
           FROM unnest($2::text[], $3::text[]) AS t(k, d)
           JOIN {} s ON s.idempotency_key = t.k AND s.destination = t.d
          WHERE s.sequence = ANY($1) AND s.status = 'delivered'",
        name.outbox(),
        name.lease(),
        name.dead(),
        name.ledger()
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Array<Text>, _>(keys)
    .bind::<Array<Text>, _>(destinations)
    .load(conn)
}

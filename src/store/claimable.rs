//! Whether something is due that a claim would take: asked where a relay finds nothing.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::looking::looking_briefly;
use super::millis;
use crate::name::OutboxName;

/// How long the look may take.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(diesel::QueryableByName)]
struct FoundRow {
    #[diesel(sql_type = Bool)]
    is_there: bool,
}

/// Whether a lane has a message without an ordering key that has been due for as long, is claimed by
/// nobody, and could be locked. `false` also where the look takes too long.
pub(crate) fn is_claimable(
    conn: &mut PgConnection,
    name: &OutboxName,
    topic: &str,
    destination: &str,
    due_for: Duration,
) -> QueryResult<bool> {
    let found = looking_briefly(conn, PATIENCE, |conn| {
        sql_query(format!(
            "WITH first AS (
                SELECT sequence FROM {outbox}
                 WHERE ordering_key IS NULL AND topic = $1 AND destination = $2
                   AND available_at <= now() - $3 * interval '1 ms' AND locked_by IS NULL
                 ORDER BY available_at, sequence LIMIT 1
                   FOR NO KEY UPDATE SKIP LOCKED
             )
             SELECT EXISTS (SELECT FROM first) AS is_there",
            outbox = name.outbox()
        ))
        .bind::<Text, _>(topic)
        .bind::<Text, _>(destination)
        .bind::<BigInt, _>(millis(due_for))
        .get_result::<FoundRow>(conn)
    })?;
    Ok(found.is_some_and(|row| row.is_there))
}

#[cfg(test)]
mod tests {
    use diesel::Connection;
    use diesel::connection::SimpleConnection;
    use diesel::result::Error;

    use super::*;
    use crate::store::migrate;

    #[test]
    fn what_waits_held_keyed_or_not_for_long_is_nobodys_fault() {
        let url = std::env::var("DATABASE_URL").expect(
            "DATABASE_URL is set: run `make test`, or `scripts/with-postgres cargo test --features cli`",
        );
        let mut conn = PgConnection::establish(&url).expect("PostgreSQL is there");
        migrate::migrate(&mut conn, &OutboxName::default()).expect("migrations run");
        let schema = format!("claimable_{}", uuid::Uuid::now_v7().simple());
        let name: OutboxName = format!("{schema}.outbox").parse().expect("a name");
        conn.batch_execute(&format!(
            "CREATE SCHEMA {schema}; SELECT public.outbox_create('{schema}.outbox');
             INSERT INTO {schema}.outbox (topic, payload, available_at, ordering_key) VALUES
                ('late', '1', now() - interval '1 h', NULL),
                ('new', '1', now() - interval '1 s', NULL),
                ('keyed', '1', now() - interval '1 h', 'key')"
        ))
        .expect("an outbox");
        let ask = |conn: &mut PgConnection, topic| {
            is_claimable(conn, &name, topic, "", Duration::from_secs(60)).expect("an answer")
        };
        let found = ["late", "new", "keyed", "none"].map(|topic| ask(&mut conn, topic));
        assert_eq!(found, [true, false, false, false]);
        let mut another = PgConnection::establish(&url).expect("PostgreSQL is there");
        another
            .transaction::<(), Error, _>(|another| {
                another.batch_execute(&format!("SELECT FROM {schema}.outbox FOR UPDATE"))?;
                assert!(!ask(&mut conn, "late"), "somebody holds it");
                Ok(())
            })
            .expect("locks");
        conn.batch_execute(&format!("DROP SCHEMA {schema} CASCADE"))
            .expect("removed");
    }
}

//! Whether a message is due that a claim would take: checked when a relay finds no messages.

use std::time::Duration;

use diesel::PgConnection;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, OptionalExtension, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;

use super::namesakes::{Namesakes, is_not_left};
use crate::name::OutboxName;
use crate::sql::functions::{On, interval, now};
use crate::sql::looking::looking_briefly;
use crate::sql::statement::unprepared;
use crate::sql::table::candidate;

/// The time limit of the check.
const PATIENCE: Duration = Duration::from_millis(100);

/// Claimed by no relay, and not left to others.
fn is_free(namesakes: Option<&Namesakes>) -> On<'_, candidate::table> {
    let is_free = candidate::locked_by.is_null();
    match namesakes {
        Some(namesakes) => Box::new(is_free.and(is_not_left(namesakes))),
        None => Box::new(is_free),
    }
}

/// Whether a lane (the waiting messages of one topic and destination) has a message without an ordering key that has
/// been due for `due_for`, is not claimed, could be locked, and is not left to other relays. Also `false` if the check takes
/// too long.
pub(crate) fn is_claimable(
    conn: &mut PgConnection,
    name: &OutboxName,
    topic: &str,
    destination: &str,
    namesakes: Option<&Namesakes>,
    due_for: Duration,
) -> QueryResult<bool> {
    let found = looking_briefly(conn, PATIENCE, |conn| {
        let first = candidate::table(name.outbox())
            .filter(candidate::ordering_key.is_null())
            .filter(candidate::topic.eq(topic))
            .filter(candidate::destination.eq(destination))
            .filter(candidate::available_at.le(now() - interval(due_for)))
            .filter(is_free(namesakes))
            .order((candidate::available_at, candidate::sequence))
            .limit(1)
            .select(candidate::sequence)
            .for_no_key_update()
            .skip_locked();
        unprepared(first).get_result::<i64>(conn).optional()
    })?;
    Ok(found.flatten().is_some())
}

#[cfg(test)]
mod tests {
    use diesel::Connection;
    use diesel::connection::SimpleConnection;
    use diesel::result::Error;

    use super::*;
    use crate::sql::tests::Outbox;

    #[test]
    fn messages_that_are_held_or_keyed_or_new_are_not_late() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        conn.batch_execute(&format!(
            "INSERT INTO {} (topic, payload, available_at, ordering_key) VALUES
                ('late', '1', now() - interval '1 h', NULL),
                ('new', '1', now() - interval '1 s', NULL),
                ('keyed', '1', now() - interval '1 h', 'key')",
            name.outbox()
        ))
        .expect("messages");
        let ask = |conn: &mut PgConnection, topic| {
            is_claimable(conn, name, topic, "", None, Duration::from_secs(60)).expect("an answer")
        };
        let found = ["late", "new", "keyed", "none"].map(|topic| ask(&mut conn, topic));
        assert_eq!(found, [true, false, false, false]);
        let lock = format!("SELECT FROM {} FOR UPDATE", name.outbox());
        (outbox.connect())
            .transaction::<(), Error, _>(|another| {
                another.batch_execute(&lock)?;
                assert!(!ask(&mut conn, "late"), "another session holds the message");
                Ok(())
            })
            .expect("locks");
    }
}

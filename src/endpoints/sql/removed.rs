//! SQL: marks of removed endpoints. A trigger writes one, so that messages for the endpoint end, even if no relay was
//! running.

use std::time::Duration;

use diesel::pg::PgConnection;
use diesel::prelude::{
    BoolExpressionMethods, Connection, ExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{delete, update};
use uuid::Uuid;

use crate::engine::send::sql::pause::is_named;
use crate::name::OutboxName;
use crate::sql::absent::{all_endpoints, all_endpoints_text};
use crate::sql::functions::{On, clock_timestamp, interval};
use crate::sql::paused::pauses;
use crate::sql::table::{endpoint, pause};
use crate::status::ReasonCode;

/// The kind of a row for an endpoint that was removed. A trigger writes the row.
const REMOVED: &str = "removed";

/// How many removals one call looks at.
const MOST_REMOVALS: i64 = 1000;

/// The row marks a removed endpoint, and is no pause.
fn is_removal() -> On<'static, pause::table> {
    Box::new(pause::kind.eq(REMOVED))
}

/// Those of these names whose endpoints were removed. There may be many removals, so nobody reads them all
/// to send messages.
pub(crate) fn removed_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &[&str],
) -> QueryResult<Vec<String>> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let marks = QueryDsl::filter(pauses(name), is_removal());
    QueryDsl::filter(marks, pause::name.eq_any(names))
        .select(pause::name)
        .load(conn)
}

/// A statement for WITH: records again that the destinations of these rows, which name a registration, were removed, unless
/// a destination of the name exists. The removal may have been forgotten, because no message named the destination.
pub(crate) fn removed_again(name: &OutboxName, rows: &str) -> String {
    format!(
        "INSERT INTO {pause} AS p (kind, name, reason)
         SELECT DISTINCT '{REMOVED}', r.destination, '{reason}' FROM ({rows}) r
          WHERE r.registration <> '{of_route}'
            AND NOT EXISTS (SELECT FROM {destination} d WHERE d.name = r.destination)
          ORDER BY r.destination
         ON CONFLICT (kind, name, paused_by) DO UPDATE SET paused_at = clock_timestamp()",
        pause = name.pause(),
        destination = all_endpoints_text(name),
        reason = ReasonCode::DestinationRemoved.as_str(),
        of_route = Uuid::nil(),
    )
}

/// Forgets removals that are older than `age`, if no message names the destination or the destination exists. Inserting a row
/// forgets the removal, too, but not in a transaction whose snapshot is older than the removal. The others are old again after
/// `age`. A call looks at [`MOST_REMOVALS`], the oldest first. Returns whether there may be more.
pub(crate) fn forget_removed(
    conn: &mut PgConnection,
    name: &OutboxName,
    age: Duration,
) -> QueryResult<bool> {
    let is_old = || pause::paused_at.lt(clock_timestamp() - interval(age));
    let marks = || QueryDsl::filter(pauses(name), is_removal().and(is_old()));
    let oldest = marks().order(pause::paused_at).limit(MOST_REMOVALS);
    let oldest: Vec<String> = oldest.select(pause::name).load(conn)?;
    let is_full = i64::try_from(oldest.len()) == Ok(MOST_REMOVALS);
    for one in oldest {
        conn.transaction(|conn| {
            // A row that is locked here cannot be removed before the mark. A row that is just being removed is left out.
            let there = all_endpoints(name);
            let there = QueryDsl::filter(there, endpoint::name.eq(&one));
            let there = there.select(endpoint::name).for_key_share().skip_locked();
            let has_returned = !there.load::<String>(conn)?.is_empty();
            let mark = is_removal().and(is_old()).and(pause::name.eq(&one));
            // Whoever has locked the mark makes it new.
            let marks = QueryDsl::filter(pauses(name), is_removal().and(pause::name.eq(&one)));
            let free = marks.select(pause::name).for_no_key_update().skip_locked();
            if free.load::<String>(conn)?.is_empty() {
                return Ok(0);
            }
            // A message may name the destination since: then the mark is new.
            if has_returned || !is_named(conn, name, &one)? {
                delete(pauses(name)).filter(mark).execute(conn)
            } else {
                let rows = update(pauses(name)).filter(mark);
                rows.set(pause::paused_at.eq(clock_timestamp()))
                    .execute(conn)
            }
        })?;
    }
    Ok(is_full)
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::engine::send::sql::pause::{Paused, all, open_breaker, pause, resume};
    use crate::hand::Hand;
    use crate::sql::paused::Pausable;
    use crate::sql::tests::Outbox;

    const MINUTE: Duration = Duration::from_secs(60);

    fn removed(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<String>> {
        let marks = QueryDsl::filter(pauses(name), is_removal());
        marks.select(pause::name).load(conn)
    }

    /// R46: the row of a removed destination stays while a message names the destination. `resume` does not end it.
    #[test]
    fn a_removed_destination_is_forgotten_when_no_message_names_it() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        conn.batch_execute(&format!(
            "INSERT INTO {destination} (name, url) VALUES ('acme', 'https://a.example'), ('other', 'https://a.example');
             INSERT INTO {table} (topic, destination, ordering_key, payload) VALUES
                ('a', '', NULL, '1'), ('b', 'other', NULL, '1'), ('c', 'acme', 'k', '1');
             DELETE FROM {destination}",
            destination = name.endpoint(),
            table = name.outbox()
        ))
        .expect("rows");
        let left = |conn: &mut PgConnection, age| {
            forget_removed(conn, name, age).expect("an answer");
            let mut left = removed(conn, name).expect("marks");
            left.sort_unstable();
            left
        };
        assert_eq!(left(conn, MINUTE).len(), 2, "both were just removed");
        assert_eq!(resume(conn, name, Pausable::Destination, "acme"), Ok(false));
        assert_eq!(left(conn, Duration::ZERO), ["acme", "other"]);
        conn.batch_execute(&format!("DELETE FROM {} WHERE topic = 'b'", name.outbox()))
            .expect("settled");
        assert_eq!(left(conn, Duration::ZERO), ["acme"]);
    }

    /// R46: the transaction that names the destination again commits after the question whether any message does.
    #[test]
    fn a_removal_that_is_recorded_again_is_not_forgotten() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let mut other = outbox.connect();
        let record = removed_again(
            name,
            "SELECT 'acme' AS destination, gen_random_uuid() AS registration",
        );
        let long_ago = format!(
            "{record}; UPDATE {} SET paused_at = now() - interval '1 h'",
            name.pause()
        );
        conn.batch_execute(&long_ago).expect("recorded");
        conn.batch_execute(&format!("BEGIN; {record}"))
            .expect("recorded again");
        forget_removed(&mut other, name, MINUTE).expect("an answer, without waiting");
        conn.batch_execute("COMMIT").expect("committed");
        forget_removed(&mut other, name, MINUTE).expect("an answer");
        assert_eq!(removed(conn, name), Ok(vec!["acme".to_owned()]));
    }

    /// R46: a transaction that inserts the row again may not see that another transaction has removed the row.
    #[test]
    fn the_mark_of_a_removal_does_not_outlive_the_return_of_the_row() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let insert = format!(
            "INSERT INTO {} (name, url) VALUES ('acme', 'https://a.example')",
            name.endpoint()
        );
        conn.batch_execute(&insert).expect("registered");
        let mut other = outbox.connect();
        other
            .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
            .expect("a snapshot");
        conn.batch_execute(&format!("DELETE FROM {}", name.endpoint()))
            .expect("removed");
        other
            .batch_execute(&format!("{insert}; COMMIT"))
            .expect("registered again");
        let is_marked = |conn: &mut PgConnection| {
            let marked = removed(conn, name).expect("marks");
            marked == ["acme"]
        };
        assert!(is_marked(conn), "the trigger did not see the mark");
        // While the row is being removed, the mark stays, as long as a message names the destination.
        let message = format!(
            "INSERT INTO {} (topic, destination, payload) VALUES ('a', 'acme', '1')",
            name.outbox()
        );
        conn.batch_execute(&message).expect("a message");
        other
            .batch_execute(&format!("BEGIN; DELETE FROM {}", name.endpoint()))
            .expect("removed");
        forget_removed(conn, name, Duration::ZERO).expect("an answer");
        other.batch_execute("ROLLBACK").expect("kept");
        assert!(is_marked(conn));
        forget_removed(conn, name, Duration::ZERO).expect("an answer");
        assert!(!is_marked(conn));
    }

    /// R46, R50: another relay may have configured a destination of the name that is registered here.
    #[test]
    fn pauses_and_breakers_of_a_name_outlast_its_registration() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let pause_it = |conn: &mut PgConnection, which, reason| {
            let kind = Pausable::Destination;
            pause(conn, name, kind, which, (Hand::Operator, reason), None, 0).expect("paused");
        };
        pause_it(conn, "gone", "GONE");
        pause_it(conn, "paused", "OPERATOR");
        open_breaker(conn, name, "open", MINUTE, 3).expect("an answer");
        let before = all(conn, name).expect("pauses");
        let shown = |rows: &[Paused]| {
            let shown = |one: &Paused| (one.name.clone(), one.reason.clone(), one.openings);
            rows.iter().map(shown).collect::<Vec<_>>()
        };
        let table = name.endpoint();
        for _ in 0..2 {
            conn.batch_execute(&format!(
                "INSERT INTO {table} (name, url) SELECT unnest('{{gone,paused,open}}'::text[]), 'https://a.example'"
            ))
            .expect("registered");
            assert_eq!(removed(conn, name), Ok(Vec::new()));
            conn.batch_execute(&format!("DELETE FROM {table}"))
                .expect("removed");
            assert_eq!(removed(conn, name).map(|names| names.len()), Ok(3));
            let after = all(conn, name).expect("pauses");
            assert_eq!(shown(&after), shown(&before));
        }
        assert_eq!(
            resume(conn, name, Pausable::Destination, "paused"),
            Ok(true)
        );
        assert_eq!(removed(conn, name).map(|names| names.len()), Ok(3));
    }
}

//! The tables of endpoints, which an outbox may lack (docs/decisions.md#tables-of-endpoints). Statements that read the
//! tables then read no rows.
//!
//! Text: a table without rows that is no table of the database.

use super::table::endpoint;
use crate::name::OutboxName;

/// The endpoints, for statements that read them. A statement that changes rows must not run without the tables.
pub(crate) fn all_endpoints(name: &OutboxName) -> endpoint::table {
    endpoint::table(all_endpoints_text(name))
}

/// The same for SQL text, which gives the table an alias.
pub(crate) fn all_endpoints_text(name: &OutboxName) -> String {
    if name.has_endpoints() {
        return name.endpoint();
    }
    let column = |(column, kind): &(&str, &str)| format!("NULL::{kind} AS {column}");
    let columns: Vec<String> = endpoint::COLUMNS.iter().map(column).collect();
    format!("(SELECT {} WHERE false)", columns.join(", "))
}

/// For statements of a relay that has read no such table: 0 if it is there by now; null: it is not. A function would need a
/// type for every query.
macro_rules! appeared {
    ($table:expr) => {
        diesel::select(diesel::dsl::case_when(
            crate::sql::functions::to_regclass($table).is_not_null(),
            0_i64.into_sql::<diesel::sql_types::BigInt>(),
        ))
        .single_value()
    };
}

pub(crate) use appeared;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use diesel::connection::SimpleConnection;
    use uuid::Uuid;

    use super::super::pinned::{located, look_for_endpoints, pin};
    use super::super::tests::Outbox;
    use crate::endpoints::sql::rows::{self, AsSeen, WhichEndpoint};
    use crate::endpoints::sql::{failing, paused, registrations, verification};
    use crate::endpoints::sql::{removed, served, subscribers};
    use crate::engine::claim::sql::glance;
    use crate::engine::lease::sql::lease::{self, Registration};
    use crate::engine::serves::routes::Serves;
    use crate::operate::sql::{forget, status};
    use crate::status::ReasonCode;

    const NOW: Duration = Duration::ZERO;

    /// R70: statements of relays and operators, on each version of PostgreSQL.
    #[test]
    fn without_the_tables_no_statement_finds_a_row_or_fails() {
        let outbox = Outbox::without_endpoints();
        let conn = &mut outbox.connect();
        let name = &located(conn, &outbox.name).expect("a name");
        assert!(!name.has_endpoints());
        pin(conn).expect("a path");
        let lease = lease::register(
            conn,
            name,
            &Registration {
                relay: "test".to_owned(),
                lease: Duration::from_secs(60),
                is_single_active: false,
                serves: Some(
                    Serves {
                        members: true,
                        ..Serves::default()
                    }
                    .to_json(),
                ),
                records_topics: true,
                settings: None,
            },
        )
        .expect("a lease");
        let tenant = Uuid::now_v7();
        conn.batch_execute(&format!(
            "INSERT INTO {pause} (kind, name, reason, paused_at) VALUES
                ('removed', 'acme', 'DESTINATION_REMOVED', now() - interval '1 day'), ('tenant', '{tenant}', 'a test', now());
             INSERT INTO {topic} (pattern, kind) VALUES ('order.*', 'route'), ('lost', 'no_subscriber');
             INSERT INTO {outbox} (topic, payload) VALUES ('order.paid', '1')",
            pause = name.pause(),
            topic = name.topic(),
            outbox = name.outbox(),
        ))
        .expect("rows");
        let seen = AsSeen {
            name: "acme",
            updated_at: None,
        };
        let which = WhichEndpoint {
            name: "acme",
            tenant: None,
        };
        assert_eq!(rows::stamp(conn, name).expect("a stamp"), ((0, 0), 0));
        assert_eq!(rows::stamps(conn, name, None).expect("stamps"), []);
        let stamps = rows::stamps(conn, name, Some(&["acme"]));
        assert_eq!(stamps.expect("stamps"), []);
        let rows = rows::endpoint_rows(conn, name, &["acme".to_owned()]);
        assert!(rows.expect("rows").is_empty());
        let counts = rows::counts_and_pages(conn, name, ["a", "b", "c"]);
        assert_eq!(counts.expect("counts").0, rows::EndpointCounts::default());
        assert!(!rows::hold(conn, name, which).expect("held"));
        assert!(!rows::hold_as_seen(conn, name, seen).expect("held"));
        assert!(rows::lock(conn, name, which).expect("locked").is_none());
        assert!(failing::all(conn, name, None).expect("rows").is_empty());
        assert_eq!(failing::count_overdue(conn, name).expect("a count"), 0);
        assert!(
            failing::record_overdue(conn, name)
                .expect("rows")
                .is_empty()
        );
        let failed = Some((Duration::from_secs(1), ReasonCode::Timeout));
        assert!(
            failing::record(conn, name, seen, failed)
                .expect("a row")
                .is_none()
        );
        let due = verification::take(conn, name, &[(seen, Duration::ZERO)], |all| all);
        assert!(due.expect("rows").is_empty());
        assert!(!removed::forget_removed(conn, name, NOW).expect("forgotten"));
        assert!(
            removed::removed_of(conn, name, &["acme"])
                .expect("marks")
                .is_empty()
        );
        let paused = paused::of_destinations(conn, name, &["acme"]).expect("pauses");
        assert!(paused.is_empty());
        let all = served::served(conn, name, &BTreeSet::from(["", "acme"])).expect("served");
        assert!(all.unserved("order.paid", "acme").is_some());
        assert_eq!(served::others(conn, name).expect("others").registered, 1);
        assert!(served::refused(conn, name).expect("refused").is_empty());
        assert!(!subscribers::has_endpoints(conn, name).expect("an answer"));
        let patterns = subscribers::subscribed(conn, name, true).expect("patterns");
        assert!(patterns.is_empty());
        let freed = subscribers::count_freed(conn, name, vec!["order.paid".to_owned()], &[]);
        assert_eq!(freed.expect("a count").without_subscriber, 1);
        assert_eq!(
            subscribers::without_subscriber(conn, name)
                .expect("topics")
                .len(),
            1
        );
        assert!(!status::work(conn, name).expect("work").is_nothing());
        forget::check_rights(conn, name).expect("all rights");
        let mine = forget::endpoints(conn, name, tenant, None).expect("names");
        assert_eq!(forget::remove_endpoints(conn, name, tenant, &mine), Ok(0));
        registrations::forget(conn, name, None).expect("forgotten");
        let marks = |conn: &mut diesel::PgConnection| {
            let seen = glance::at_all(conn, name, lease, Some(Some(&registrations::Unread)));
            seen.expect("marks").2.expect("marks")
        };
        assert_eq!(marks(conn).destinations, None);
        assert!(!look_for_endpoints(conn, name).expect("an answer"));

        let clone = name.clone();
        let made = format!("SELECT public.outbox_create_endpoints('{}')", outbox.name);
        outbox.connect().batch_execute(&made).expect("endpoints");
        assert_eq!(marks(conn).destinations, Some(0));
        assert!(look_for_endpoints(conn, name).expect("an answer"));
        assert!(clone.has_endpoints(), "the other threads know");
        assert!(
            !look_for_endpoints(conn, name).expect("an answer"),
            "not again"
        );
        assert_eq!(rows::stamp(conn, name).expect("a stamp"), ((0, 0), 0));
    }
}

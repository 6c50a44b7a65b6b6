//! The events that settles write.
//!
//! Text: parts of the settle's statement, and a function of the outbox.

use diesel::dsl::not;
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::sql_types::{Array, Nullable, Text, Uuid as SqlUuid};
use diesel::{ExpressionMethods, OptionalExtension, PgConnection, QueryDsl, RunQueryDsl};
use uuid::Uuid;

use crate::engine::settle::sql::log::Log;
use crate::name::OutboxName;
use crate::setup::sql::inspect::has_feeds;
use crate::sql::absent::{all_endpoints, all_endpoints_text};
use crate::sql::statement::statement;
use crate::sql::table::{endpoint, feed};

/// The log of events.
#[derive(Debug)]
pub(crate) struct EventLog;

// Why: docs/decisions.md#positions
impl Log for EventLog {
    fn locks(&self, name: &OutboxName) -> String {
        format!(
            "SELECT f.name, f.registration FROM {feed} f WHERE f.name IN (SELECT destination FROM outcome)
              ORDER BY f.name FOR NO KEY UPDATE",
            feed = name.feed()
        )
    }

    fn stores(&self, name: &OutboxName) -> String {
        // Materialized: once. A join would ask for each event.
        format!(
            "WITH ends AS MATERIALIZED (SELECT * FROM {ends}(ARRAY(SELECT name FROM held)))
             INSERT INTO {event} (part, feed, position, message_id, sequence, topic, payload, headers, ordering_key,
                 tenant_id, created_at, occurred_at, stored_at)
             SELECT e.part, o.destination,
                    e.last + row_number() OVER (PARTITION BY o.destination COLLATE \"C\" ORDER BY coalesce(g.split_from, g.sequence), g.sequence),
                    g.message_id, g.sequence, g.topic, g.payload, g.headers, g.ordering_key, g.tenant_id, g.created_at,
                    g.occurred_at, greatest(clock_timestamp(), e.last_stored_at)
               FROM gone g JOIN outcome o USING (sequence)
               JOIN ends e ON e.feed = o.destination",
            event = name.feed_event(),
            ends = name.feed_ends(),
        )
    }

    fn locked(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        feeds: &[&str],
    ) -> QueryResult<Vec<String>> {
        let these = || {
            feed::table(name.feed())
                .filter(feed::name.eq_any(feeds))
                .select(feed::name)
        };
        let mut all: Vec<String> = these().load(conn)?;
        let mut free: Vec<String> = these().for_no_key_update().skip_locked().load(conn)?;
        // A feed without a row gets one while nobody changes its endpoint.
        let endpoints = || {
            all_endpoints(name)
                .filter(endpoint::name.eq_any(feeds))
                .filter(not(endpoint::name.eq_any(&all)))
                .select(endpoint::name)
        };
        let of_none: Vec<String> = endpoints().load(conn)?;
        free.extend(endpoints().for_share().skip_locked().load(conn)?);
        all.extend(of_none);
        all.retain(|name| !free.contains(name));
        Ok(all)
    }

    fn mend(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        feeds: &[(&str, Option<Uuid>)],
    ) -> QueryResult<()> {
        let (names, registrations): (Vec<&str>, Vec<Option<Uuid>>) = feeds.iter().copied().unzip();
        make(conn, name, &names, &registrations)?;
        let taken: Option<String> = statement(format!(
            "SELECT f.name FROM {feed} f JOIN unnest($1::text[], $2::uuid[]) w(name, registration) ON w.name = f.name
              WHERE f.registration IS DISTINCT FROM w.registration
                AND (w.registration IS NULL OR EXISTS (SELECT FROM {endpoints} d WHERE d.name = w.name AND d.id = w.registration))
              ORDER BY f.name LIMIT 1",
            feed = name.feed(),
            endpoints = all_endpoints_text(name),
        ))
        .bind::<Array<Text>, _>(&names)
        .bind::<Array<Nullable<SqlUuid>>, _>(&registrations)
        .giving::<Text>()
        .get_result(conn)
        .optional()?;
        match taken {
            None => Ok(()),
            // As the table would refuse it: the settler sets such messages aside, and people are told.
            Some(feed) => Err(Error::DatabaseError(
                DatabaseErrorKind::CheckViolation,
                Box::new(format!(
                    "the feed {feed:?} belongs to another endpoint: its row in {} says to which",
                    name.feed()
                )),
            )),
        }
    }
}

/// Makes the rows of these feeds of the settings. Returns `false` if the outbox has no tables of feeds.
pub(crate) fn make_configured(
    conn: &mut PgConnection,
    name: &OutboxName,
    feeds: &[String],
) -> QueryResult<bool> {
    let has_tables = has_feeds(conn, name)?;
    if has_tables {
        let names: Vec<&str> = feeds.iter().map(String::as_str).collect();
        make(conn, name, &names, &vec![None; names.len()])?;
    }
    Ok(has_tables)
}

/// Makes the rows of these feeds that have none, if the endpoint still has this registration: whoever changes it moves only
/// rows that are there. Events that are there belong to nobody any more.
pub(crate) fn make(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &[&str],
    registrations: &[Option<Uuid>],
) -> QueryResult<()> {
    statement(format!(
        "WITH current AS MATERIALIZED (SELECT d.name, d.id FROM {endpoints} d WHERE d.name = ANY($1) ORDER BY d.name FOR SHARE)
         INSERT INTO {feed} (name, registration, base, base_id, base_stored_at)
         SELECT w.name, w.registration, coalesce(e.position, 0), e.message_id, e.stored_at
           FROM unnest($1::text[], $2::uuid[]) w(name, registration)
           LEFT JOIN LATERAL (SELECT position, message_id, stored_at FROM {event} e WHERE e.feed = w.name ORDER BY position DESC LIMIT 1) e ON true
          WHERE w.registration IS NULL OR EXISTS (SELECT FROM current c WHERE c.name = w.name AND c.id = w.registration)
         ON CONFLICT (name) DO NOTHING",
        feed = name.feed(),
        event = name.feed_event(),
        endpoints = all_endpoints_text(name),
    ))
    .bind::<Array<Text>, _>(names)
    .bind::<Array<Nullable<SqlUuid>>, _>(registrations)
    .execute(conn)
    .map(drop)
}

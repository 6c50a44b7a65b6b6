//! Why messages wait or were dead-lettered, and how many messages the ledger has as delivered. Small tables are
//! counted, large tables are estimated.
//!
//! Text: a sample (TABLESAMPLE), `unnest` and a subquery for each row (LATERAL).

use std::cmp::Reverse;
use std::collections::BTreeMap;

use diesel::dsl::{count_star, exists, select};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Double, Nullable, Text};
use diesel::{ExpressionMethods, NullableExpressionMethods, PgConnection, QueryDsl, RunQueryDsl};

use super::depths::{COUNTED_PAGES, Care, PATIENCE, lanes, of_lane, rows_of_each, sample};
use crate::name::OutboxName;
use crate::setup::sql::catalogue::{
    self, has_table_privilege, pages_of, pg_class, pg_inherits, pg_relation_size,
};
use crate::sql::functions::to_regclass;
use crate::sql::looking::{looking, looking_briefly};
use crate::sql::statement::{unprepared, unprepared_statement};
use crate::sql::table::{messages, outbox};
use crate::status::Status;

/// The most troubles that are shown.
pub(crate) const MOST: usize = 100;

/// The number of messages in one state.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StatusCount {
    /// The state.
    pub status: Status,
    /// The number of messages.
    pub count: i64,
    /// The number is an estimate.
    pub is_estimate: bool,
}

/// A reason why messages of one topic wait, or were dead-lettered.
#[derive(Debug, Clone, diesel::QueryableByName)]
#[non_exhaustive]
pub struct TroubleCount {
    /// The state of the messages: pending (waiting without attempts), sending, retrying or dead.
    #[diesel(sql_type = Text)]
    pub status: Status,
    /// The topic.
    #[diesel(sql_type = Text)]
    pub topic: String,
    /// The destination that the messages name, that a route sends them to, or that was used; empty: none, or several.
    #[diesel(sql_type = Text)]
    pub destination: String,
    /// The reason: the name of a [`ReasonCode`](crate::ReasonCode), `DISABLED` (the endpoint is disabled), or `LEASE_REMOVED`: somebody has removed the row of
    /// the lease that holds the messages. A running relay takes the messages over within seconds.
    #[diesel(sql_type = Text)]
    pub reason: String,
    /// The number of messages.
    #[diesel(sql_type = BigInt)]
    pub count: i64,
    /// The error of one of the messages.
    #[diesel(sql_type = Nullable<Text>)]
    pub example: Option<String>,
    /// The number is an estimate.
    #[diesel(sql_type = Bool)]
    pub is_estimate: bool,
}

/// The numbers of messages that the ledger has as delivered, and without a subscriber; `dead`: the number of dead letters.
/// A read-only role may not read the ledger, but may count it through the view. The size of a large ledger is the server's
/// estimate, and the share of messages without a subscriber is that of a sample.
pub(crate) fn settled(
    conn: &mut PgConnection,
    name: &OutboxName,
    care: Care,
    dead: i64,
) -> QueryResult<Vec<StatusCount>> {
    looking(conn, None, |conn| {
        let pages = catalogue::pages(conn, &name.ledger())?;
        let estimate = if care == Care::Cheap && pages > COUNTED_PAGES {
            rows_by_size(conn, &name.ledger())?
        } else {
            None
        };
        let counts: Vec<(Status, i64)> = match estimate {
            Some(rows) => {
                let unsent = sample::times(rows, share_without_subscriber(conn, name, pages)?);
                let delivered = (rows - dead - unsent).max(0);
                vec![
                    (Status::Delivered, delivered),
                    (Status::NoSubscriber, unsent),
                ]
            }
            None => {
                // Live messages have no `settled_at`, so the planner leaves their table out.
                let settled = messages::table(name.messages())
                    .filter(messages::status.ne("dead"))
                    .filter(messages::settled_at.is_not_null())
                    .group_by(messages::status)
                    .select((messages::status, count_star()))
                    .order(messages::status);
                unprepared(settled).load(conn)?
            }
        };
        let count = |(status, count)| StatusCount {
            status,
            count,
            is_estimate: estimate.is_some(),
        };
        Ok(counts.into_iter().map(count).collect())
    })
}

/// The share of messages without a subscriber in a sample of the ledger. 0 for a role that may not read the ledger.
fn share_without_subscriber(
    conn: &mut PgConnection,
    name: &OutboxName,
    pages: i64,
) -> QueryResult<f64> {
    let ledger = name.ledger();
    let may_read = select(has_table_privilege(to_regclass(ledger.as_str()), "SELECT"));
    if may_read.get_result::<Option<bool>>(conn)? != Some(true) {
        return Ok(0.0);
    }
    let (sample, _) = sample::of(pages);
    let share = unprepared_statement(format!(
        "SELECT coalesce(avg((status = 'no_subscriber')::int), 0)::float8 FROM {ledger} {sample}"
    ));
    share.giving::<Double>().get_result(conn)
}

/// Estimates the rows as the planner does: each part has as many rows per page as when it was last vacuumed or
/// analysed. `None`: a part was never vacuumed or analysed.
fn rows_by_size(conn: &mut PgConnection, table: &str) -> QueryResult<Option<i64>> {
    let parts = pg_inherits::table
        .filter(pg_inherits::inhparent.nullable().eq(to_regclass(table)))
        .select(pg_inherits::inhrelid);
    let parts: Vec<(f32, i32, Option<i64>)> = pg_class::table
        .filter(pg_class::oid.eq_any(parts))
        .select((
            pg_class::reltuples,
            pg_class::relpages,
            pages_of!(pg_relation_size(pg_class::oid.nullable())),
        ))
        .load(conn)?;
    let mut all = 0;
    for (rows_then, pages_then, pages) in parts {
        let pages = pages.unwrap_or(0);
        if pages > 0 && (rows_then <= 0.0 || pages_then <= 0) {
            return Ok(None);
        }
        all += sample::times(pages, f64::from(rows_then) / f64::from(pages_then.max(1)));
    }
    Ok(Some(all))
}

/// The most frequent troubles by state, at most [`MOST`].
pub(crate) fn troubles(
    conn: &mut PgConnection,
    name: &OutboxName,
    care: Care,
) -> QueryResult<Vec<TroubleCount>> {
    let mut found: BTreeMap<(&str, String, String, String), TroubleCount> = BTreeMap::new();
    let mut add = |rows: Vec<TroubleCount>, factor: Option<f64>| {
        for mut row in rows {
            let count = sample::times(row.count, factor.unwrap_or(1.0));
            let (topic, destination) = (row.topic.clone(), row.destination.clone());
            let key = (row.status.as_str(), topic, destination, row.reason.clone());
            row.is_estimate = factor.is_some();
            let trouble = found.entry(key).or_insert(TroubleCount { count, ..row });
            // Both counts are of the same messages: the higher count is closer.
            trouble.count = trouble.count.max(count);
        }
    };
    looking(conn, None, |conn| {
        let (from, factor) = sample::source(
            &name.outbox(),
            catalogue::pages(conn, &name.outbox())?,
            care,
        );
        add(live_troubles(conn, &from)?, factor);
        add(of_removed_leases(conn, name, &from)?, factor);
        if factor.is_some() {
            add(of_lanes(conn, name)?, Some(1.0));
        }
        let (from, factor) =
            sample::source(&name.dead(), catalogue::pages(conn, &name.dead())?, care);
        add(dead_troubles(conn, &from)?, factor);
        Ok(())
    })?;
    Ok(most_frequent(found.into_values().collect()))
}

/// The [`MOST`] frequent troubles, by state, the most frequent of a state first.
fn most_frequent(mut troubles: Vec<TroubleCount>) -> Vec<TroubleCount> {
    troubles.sort_by_key(|trouble| Reverse(trouble.count));
    troubles.truncate(MOST);
    troubles.sort_by_key(|trouble| trouble.status);
    troubles
}

fn live_troubles(conn: &mut PgConnection, from: &str) -> QueryResult<Vec<TroubleCount>> {
    unprepared_statement(live_of(from)).load(conn)
}

/// SQL for the troubles of these rows of an outbox.
fn live_of(from: &str) -> String {
    format!(
        "SELECT CASE WHEN attempts = 0 THEN 'pending' ELSE 'retrying' END AS status, topic, destination,
                last_error_code AS reason, count(*) AS count, min(last_error) AS example,
                false AS is_estimate
           FROM {from} WHERE last_error_code IS NOT NULL GROUP BY 1, topic, destination, last_error_code"
    )
}

/// Messages in flight under leases whose rows are gone.
fn of_removed_leases(
    conn: &mut PgConnection,
    name: &OutboxName,
    from: &str,
) -> QueryResult<Vec<TroubleCount>> {
    unprepared_statement(format!(
        "SELECT 'sending' AS status, topic, destination, 'LEASE_REMOVED' AS reason, count(*) AS count,
                'locked by the lease ' || min(locked_by) || ', whose row somebody has removed' AS example,
                false AS is_estimate
           FROM {from} WHERE locked_by IS NOT NULL AND NOT EXISTS (SELECT FROM {lease} l WHERE l.id = locked_by)
          GROUP BY topic, destination",
        lease = name.lease()
    ))
    .load(conn)
}

/// The leases whose rows are gone, with the messages that they lock. `None`: the outbox is too large to look.
pub(crate) fn removed_leases(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Option<Vec<(i64, i64)>>> {
    looking_briefly(conn, PATIENCE, |conn| {
        unprepared_statement(format!(
            "SELECT o.locked_by, count(*) FROM {outbox} o
              WHERE o.locked_by IS NOT NULL AND NOT EXISTS (SELECT FROM {lease} l WHERE l.id = o.locked_by)
              GROUP BY 1 ORDER BY 1",
            outbox = name.outbox(),
            lease = name.lease()
        ))
        .giving::<(BigInt, BigInt)>()
        .load(conn)
    })
}

/// Whether a lease locks no message. `false` if the outbox is too large to look.
pub(crate) fn holds_none(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: i64,
) -> QueryResult<bool> {
    let held = outbox::table(name.outbox()).filter(outbox::locked_by.eq(lease));
    let held = select(exists(held.select(outbox::sequence)));
    let is_held = looking_briefly(conn, PATIENCE, |conn| held.get_result::<bool>(conn))?;
    Ok(is_held == Some(false))
}

fn dead_troubles(conn: &mut PgConnection, from: &str) -> QueryResult<Vec<TroubleCount>> {
    unprepared_statement(format!(
        "SELECT 'dead' AS status, topic, destination, reason, count(*) AS count, min(last_error) AS example,
                false AS is_estimate
           FROM {from} GROUP BY topic, destination, reason"
    ))
    .load(conn)
}

/// The troubles of the first messages of each lane (a topic and a destination), and of the first messages that are
/// not due yet. A sample of a large table misses a trouble of few messages; these messages show it.
fn of_lanes(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<TroubleCount>> {
    let columns = "o.sequence, o.attempts, o.last_error_code, o.last_error";
    let sql = live_of(&format!(
        "(SELECT DISTINCT lane.topic, lane.destination, f.* FROM unnest($1::text[], $2::text[]) AS lane(topic, destination)
           CROSS JOIN LATERAL (SELECT * FROM {first} a UNION ALL SELECT * FROM {later} b) f) m",
        first = of_lane(name, columns, "true"),
        later = of_lane(name, columns, "o.available_at > now()"),
    ));
    let found = looking_briefly(conn, PATIENCE, |conn| {
        let lanes = lanes(conn, name)?.into_iter();
        let (topics, destinations): (Vec<String>, Vec<String>) = lanes.unzip();
        let limit = rows_of_each(topics.len());
        unprepared_statement(&sql)
            .bind::<Array<Text>, _>(topics)
            .bind::<Array<Text>, _>(destinations)
            .bind::<BigInt, _>(limit)
            .load(conn)
    })?;
    Ok(found.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_reasons_of_one_state_do_not_hide_the_troubles_of_another() {
        let trouble = |status, count| TroubleCount {
            status,
            topic: format!("topic {count}"),
            destination: String::new(),
            reason: "NO_ROUTE".to_owned(),
            count,
            example: None,
            is_estimate: false,
        };
        let mut all: Vec<TroubleCount> = (1..=200)
            .map(|count| trouble(Status::Pending, count))
            .collect();
        all.push(trouble(Status::Dead, 150));
        let shown = most_frequent(all);
        assert_eq!(shown.len(), MOST);
        assert_eq!(shown[0].count, 200);
        assert_eq!(shown[MOST - 1].status, Status::Dead);
    }
}

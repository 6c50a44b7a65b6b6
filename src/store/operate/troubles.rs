//! What messages wait for or died of, and how many the ledger has delivered: counted where the tables are
//! small, estimated where they are not.
//!
//! Text: a sample (TABLESAMPLE), `unnest` and a subquery for each row (LATERAL).

use std::collections::{BTreeMap, BTreeSet};

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text};
use diesel::{ExpressionMethods, NullableExpressionMethods, PgConnection, QueryDsl, RunQueryDsl};

use super::depths::{COUNTED_PAGES, PATIENCE, of_lane, rows_of_each, sample};
use crate::name::OutboxName;
use crate::status::Status;
use crate::store::catalogue::{self, pages_of, pg_class, pg_inherits};
use crate::store::looking::{looking, looking_briefly};
use crate::store::relay::streams::{Found, streams};
use crate::store::sql::{pg_relation_size, to_regclass};
use crate::store::statement::{planned_anew, statement_anew};
use crate::store::table::messages;

/// Troubles that are shown.
pub(crate) const MOST: usize = 100;

/// How many messages are in one state.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StatusCount {
    /// The state.
    pub status: Status,
    /// How many messages.
    pub count: i64,
    /// The number is an estimate.
    pub is_estimate: bool,
}

/// What messages of one topic wait for, or died of.
#[derive(Debug, Clone, diesel::QueryableByName)]
#[non_exhaustive]
pub struct TroubleCount {
    /// Pending (it waited at no cost), retrying or dead.
    #[diesel(sql_type = Text)]
    pub status: Status,
    /// The topic.
    #[diesel(sql_type = Text)]
    pub topic: String,
    /// The name of a [`ReasonCode`](crate::ReasonCode).
    #[diesel(sql_type = Text)]
    pub reason: String,
    /// How many messages.
    #[diesel(sql_type = BigInt)]
    pub count: i64,
    /// The error of one of them.
    #[diesel(sql_type = Nullable<Text>)]
    pub example: Option<String>,
    /// The number is an estimate.
    #[diesel(sql_type = Bool)]
    pub is_estimate: bool,
}

/// How large tables are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Care {
    /// At a cost that does not grow with them.
    Cheap,
    /// Row by row.
    Exact,
}

/// What a table of this size is read from, and what each row of that stands for where it is a sample.
fn sample_of(
    conn: &mut PgConnection,
    table: &str,
    care: Care,
) -> QueryResult<(String, Option<f64>)> {
    let pages = catalogue::pages(conn, table)?;
    if care == Care::Exact || pages <= COUNTED_PAGES {
        return Ok((table.to_owned(), None));
    }
    let (sample, factor) = sample::of(pages);
    Ok((format!("{table} {sample}"), Some(factor)))
}

/// How many messages the ledger has as delivered; `dead`: how many dead letters there are. Who only looks
/// may not read the ledger, but count it through the view. A large one is as large as the server thinks.
pub(crate) fn delivered(
    conn: &mut PgConnection,
    name: &OutboxName,
    care: Care,
    dead: i64,
) -> QueryResult<StatusCount> {
    looking(conn, None, |conn| {
        let pages = catalogue::pages(conn, &name.ledger())?;
        let estimate = if care == Care::Cheap && pages > COUNTED_PAGES {
            rows_by_size(conn, &name.ledger())?
        } else {
            None
        };
        let count = match estimate {
            Some(rows) => (rows - dead).max(0),
            None => {
                // Live messages have none of the second, so the planner leaves their table out.
                let delivered = messages::table(name.messages())
                    .filter(messages::status.eq("delivered"))
                    .filter(messages::settled_at.is_not_null());
                planned_anew(delivered.count()).get_result(conn)?
            }
        };
        Ok(StatusCount {
            status: Status::Delivered,
            count,
            is_estimate: estimate.is_some(),
        })
    })
}

/// As the planner does it: as many rows on a page of each part as when the part was last vacuumed or
/// analysed. `None`: one never was.
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

/// By state, the most frequent first, a hundred at most.
pub(crate) fn troubles(
    conn: &mut PgConnection,
    name: &OutboxName,
    care: Care,
) -> QueryResult<Vec<TroubleCount>> {
    let mut found: BTreeMap<(&str, String, String), TroubleCount> = BTreeMap::new();
    let mut add = |rows: Vec<TroubleCount>, factor: Option<f64>| {
        for mut row in rows {
            let count = sample::times(row.count, factor.unwrap_or(1.0));
            let key = (row.status.as_str(), row.topic.clone(), row.reason.clone());
            row.is_estimate = factor.is_some();
            let trouble = found.entry(key).or_insert(TroubleCount { count, ..row });
            // Both are of the same messages: the one that has seen more is nearer.
            trouble.count = trouble.count.max(count);
        }
    };
    looking(conn, None, |conn| {
        let (from, factor) = sample_of(conn, &name.outbox(), care)?;
        add(live_troubles(conn, &from)?, factor);
        if factor.is_some() {
            add(of_lanes(conn, name)?, Some(1.0));
        }
        let (from, factor) = sample_of(conn, &name.dead(), care)?;
        add(dead_troubles(conn, &from)?, factor);
        Ok(())
    })?;
    let mut troubles: Vec<TroubleCount> = found.into_values().collect();
    troubles.sort_by(|a, b| (&a.status, b.count).cmp(&(&b.status, a.count)));
    // Those of each state that there are most of, where not all can be shown.
    troubles.truncate(MOST);
    Ok(troubles)
}

fn live_troubles(conn: &mut PgConnection, from: &str) -> QueryResult<Vec<TroubleCount>> {
    statement_anew(live_of(from)).load(conn)
}

/// The troubles of these rows of an outbox.
fn live_of(from: &str) -> String {
    format!(
        "SELECT CASE WHEN attempts = 0 THEN 'pending' ELSE 'retrying' END AS status, topic,
                last_error_code AS reason, count(*) AS count, min(last_error) AS example,
                false AS is_estimate
           FROM {from} WHERE last_error_code IS NOT NULL GROUP BY 1, topic, last_error_code"
    )
}

fn dead_troubles(conn: &mut PgConnection, from: &str) -> QueryResult<Vec<TroubleCount>> {
    statement_anew(format!(
        "SELECT 'dead' AS status, topic, reason, count(*) AS count, min(last_error) AS example,
                false AS is_estimate
           FROM {from} GROUP BY topic, reason"
    ))
    .load(conn)
}

/// The troubles of the first messages of each lane, and of the first that are not due yet: few messages
/// that have a trouble are not in a sample of many, but here.
fn of_lanes(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<TroubleCount>> {
    let columns = "o.sequence, o.attempts, o.last_error_code, o.last_error";
    let sql = live_of(&format!(
        "(SELECT DISTINCT lane.topic, f.* FROM unnest($1::text[], $2::text[]) AS lane(topic, destination)
           CROSS JOIN LATERAL (SELECT * FROM {first} a UNION ALL SELECT * FROM {later} b) f) m",
        first = of_lane(name, columns, "true"),
        later = of_lane(name, columns, "o.available_at > now()"),
    ));
    let found = looking_briefly(conn, PATIENCE, |conn| {
        let found = streams(conn, name)?.into_iter();
        // Each once, where it has messages with keys and others.
        let lanes: BTreeSet<(String, String)> = found
            .map(|Found { stream, .. }| (stream.topic.topic, stream.topic.destination))
            .collect();
        let (topics, destinations): (Vec<String>, Vec<String>) = lanes.into_iter().unzip();
        let limit = rows_of_each(topics.len());
        statement_anew(&sql)
            .bind::<Array<Text>, _>(topics)
            .bind::<Array<Text>, _>(destinations)
            .bind::<BigInt, _>(limit)
            .load(conn)
    })?;
    Ok(found.unwrap_or_default())
}

//! The leases of relays, and the number of due messages.

use std::collections::HashSet;
use std::time::Duration;

use diesel::dsl::{max, not};
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Text};
use diesel::{NullableExpressionMethods, PgConnection, select};

use crate::endpoints::sql::failing;
use crate::endpoints::sql::silent::silent;
use crate::engine::claim::sql::claim::{Position, Stream, Topic};
use crate::engine::claim::sql::streams;
use crate::engine::lease::sql::lease::{self as relays, stands_by};
use crate::engine::send::sql::pause::{self, Pausable};
use crate::engine::serves::routes::Serves;
use crate::name::OutboxName;
use crate::sql::absent::all_endpoints;
use crate::sql::functions::{MaybeJson, clock_timestamp, now};
use crate::sql::statement::unprepared_statement;
use crate::sql::table::{endpoint, lease, outbox};

/// The lease of a relay that is or was running.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LeaseRow {
    /// The id of the lease: the fencing token.
    pub id: i64,
    /// The name of the relay: host and process.
    pub relay: String,
    /// Seconds since the lease was registered: the age of the relay, or the time since it lost its last lease.
    pub started_seconds_ago: f64,
    /// Seconds since the lease was renewed.
    pub renewed_seconds_ago: f64,
    /// Seconds until the lease expires; negative: the lease has expired.
    pub seconds_left: f64,
    /// The heartbeat of the relay has stopped, and its lease will expire.
    pub silent: bool,
    /// The relay stands by, because the relay of an older lease is active.
    pub stands_by: bool,
    /// `OUTBOX_ENABLED` is true: the relay claims messages.
    pub enabled: bool,
    /// The names of the relay's destinations (`default`: that of `OUTBOX_URL`) and groups of handlers, without endpoints.
    pub destinations: Vec<String>,
    /// Whether the relay sends to endpoints.
    pub endpoints: bool,
}

impl LeaseRow {
    /// Whether the lease is valid, and the relay renews it.
    pub fn is_alive(&self) -> bool {
        self.seconds_left > 0.0 && !self.silent
    }
}

pub(crate) fn leases(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<LeaseRow>> {
    let silent = silent(conn, name)?;
    #[allow(clippy::cast_precision_loss, reason = "times are short")]
    let seconds = |from: PgTimestamp, to: PgTimestamp| to.0.saturating_sub(from.0) as f64 / 1e6;
    type StatusRow = (
        i64,
        String,
        PgTimestamp,
        PgTimestamp,
        PgTimestamp,
        PgTimestamp,
        bool,
        MaybeJson,
    );
    let rows = relays::leases(name)
        .order(lease::id)
        .select((
            lease::id,
            lease::relay,
            lease::started_at,
            lease::renewed_at,
            lease::expires_at,
            clock_timestamp(),
            stands_by(name),
            lease::serves,
        ))
        .load(conn)?;
    let row = |(id, relay, started, renewed, expires, now, stands_by, json): StatusRow| {
        let json = Option::<String>::from(json);
        let enabled = json.is_some();
        let serves = json.and_then(|json| Serves::from_json(&json));
        let serves = serves.unwrap_or_default();
        LeaseRow {
            id,
            relay,
            started_seconds_ago: seconds(started, now),
            renewed_seconds_ago: seconds(renewed, now),
            seconds_left: seconds(now, expires),
            silent: silent.contains_key(&id),
            stands_by,
            enabled,
            endpoints: serves.members,
            destinations: serves.names(),
        }
    };
    Ok(rows.into_iter().map(row).collect())
}

pub(crate) fn count_due(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<i64> {
    outbox::table(name.outbox())
        .filter(outbox::locked_by.is_null())
        .filter(outbox::available_at.le(now()))
        .count()
        .get_result(conn)
}

/// What a relay would find to do. Two of them are the same if nothing has changed that a relay could do something about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Work {
    /// The streams whose first message is due and not paused, whoever has claimed it, and that message.
    due: Vec<(Stream, Position)>,
    /// The number of endpoints that wait for their verification.
    unverified: i64,
    /// The number of destinations that have failed for so long that somebody must be told.
    overdue: i64,
    /// The last message that waits, if any is due.
    last: Option<i64>,
}

impl Work {
    /// Whether there is nothing to do.
    pub fn is_nothing(&self) -> bool {
        self.due.is_empty() && self.unverified == 0 && self.overdue == 0
    }
}

pub(crate) fn work(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Work> {
    let found = streams::streams(conn, name)?;
    let at: PgTimestamp = select(now()).get_result(conn)?;
    let is_due = |one: &streams::FoundStream| one.first.available_at <= at.0;
    let mut due: Vec<_> = found.into_iter().filter(is_due).collect();
    if !due.is_empty() {
        let pauses = pause::of_each(conn, name, None)?;
        let lasts = |left: Option<Duration>| left.is_none_or(|left| !left.is_zero());
        let paused: HashSet<(&str, &str)> = (pauses.iter())
            .filter(|one| lasts(one.left))
            .map(|one| (one.kind.as_str(), one.name.as_str()))
            .collect();
        let disabled: HashSet<String> = all_endpoints(name)
            .filter(not(endpoint::enabled))
            .select(endpoint::name)
            .load(conn)?
            .into_iter()
            .collect();
        due.retain(|one| {
            let Topic { topic, destination } = &one.stream.topic;
            !disabled.contains(destination)
                && !paused.contains(&(Pausable::Topic.as_str(), topic.as_str()))
                && !paused.contains(&(Pausable::Destination.as_str(), destination.as_str()))
        });
    }
    let verification_due = endpoint::verification_due;
    let unverified = all_endpoints(name)
        .filter(endpoint::enabled)
        .filter(endpoint::verification.ne("none"))
        .filter(endpoint::verified_at.is_null())
        .filter(
            verification_due
                .is_null()
                .or(verification_due.assume_not_null().le(now())),
        )
        .count()
        .get_result(conn)?;
    let last = match due.is_empty() {
        true => None,
        false => outbox::table(name.outbox())
            .select(max(outbox::sequence))
            .get_result(conn)?,
    };
    let due = due.into_iter().map(|one| (one.stream, one.first)).collect();
    Ok(Work {
        due,
        unverified,
        overdue: failing::count_overdue(conn, name)?,
        last,
    })
}

/// The due, unclaimed messages of one topic and destination.
#[derive(Debug, Clone, diesel::Queryable)]
pub(crate) struct DueRow {
    pub(crate) topic: String,
    pub(crate) destination: String,
    pub(crate) count: i64,
    /// The number of these messages that wait for another message of their ordering key, live or dead.
    pub(crate) behind: i64,
}

/// Text: GROUP BY several columns, for which Diesel wants each pair of columns declared.
pub(crate) fn due(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<DueRow>> {
    let stands_before = |row: &str| {
        format!(
            "{row}.ordering_key = o.ordering_key
             AND coalesce({row}.split_from, {row}.sequence) < coalesce(o.split_from, o.sequence)
             AND ({row}.destination = o.destination OR {row}.destination = '' OR o.destination = '')"
        )
    };
    unprepared_statement(format!(
        "SELECT o.topic, o.destination, count(*) AS count,
                count(*) FILTER (WHERE o.ordering_key IS NOT NULL AND (
                    EXISTS (SELECT FROM {outbox} e WHERE {e})
                    OR EXISTS (SELECT FROM {dead} d WHERE d.blocks_key AND {d}))) AS behind
           FROM {outbox} o
          WHERE o.locked_by IS NULL AND o.available_at <= now()
          GROUP BY 1, 2 ORDER BY 1, 2",
        outbox = name.outbox(),
        dead = name.dead(),
        e = stands_before("e"),
        d = stands_before("d"),
    ))
    .giving::<(Text, Text, BigInt, BigInt)>()
    .load(conn)
}

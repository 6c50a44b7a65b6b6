//! SQL: topics that endpoints have patterns for, and those that end without a subscriber.

use std::time::Duration;

use diesel::dsl::exists;
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Text};
use diesel::{PgConnection, select, update};

use crate::engine::serves::routes::{matches_any, nearest_pattern};
use crate::engine::serves::sql::topics::{
    NO_SUBSCRIBER, PATIENCE, Patterns, add, did_you_mean, patterns,
};
use crate::name::OutboxName;
use crate::sql::absent::{all_endpoints, all_endpoints_text};
use crate::sql::functions::{clock_timestamp, interval};
use crate::sql::looking::looking_briefly;
use crate::sql::statement::unprepared_statement;
use crate::sql::table::{endpoint, ledger, topic};
use crate::status::Status;

/// How long after the last such message a topic without a subscriber is a problem.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

/// A topic whose messages end without a subscriber, although none of it was ever delivered. Perhaps it is misspelt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WithoutSubscriber {
    /// The topic.
    pub(crate) topic: String,
    /// The nearest pattern that a relay has served or that an endpoint has.
    pub(crate) nearest: Option<String>,
}

impl WithoutSubscriber {
    /// What has happened.
    pub(crate) fn what(&self) -> String {
        let meant = did_you_mean(self.nearest.as_deref());
        format!(
            "messages of the topic {:?}{meant} end without a subscriber (no_subscriber), and the ledger has no delivery of the topic",
            self.topic
        )
    }

    /// What to do, as an imperative.
    pub(crate) fn next_step(&self) -> String {
        format!(
            "correct the topic where messages are enqueued; or declare the application's topics (OUTBOX_TOPICS), so that messages of others wait; `diesel-outbox topics forget '{}'` ends this warning",
            self.topic
        )
    }
}

/// Records that messages of a topic have ended without a subscriber, unless a message of the topic was ever sent to
/// anybody (`false`). Where topics are declared, only declared ones end so, which is no news (`false`).
pub(crate) fn record_without_subscriber(
    conn: &mut PgConnection,
    name: &OutboxName,
    of: &str,
) -> QueryResult<bool> {
    if !patterns(conn, name)?.declared.is_empty() {
        return Ok(false);
    }
    let seen = update(topic::table(name.topic()))
        .filter(topic::pattern.eq(of.to_owned()))
        .filter(topic::kind.eq(NO_SUBSCRIBER))
        .set(topic::last_served.eq(clock_timestamp()))
        .execute(conn)?;
    if seen > 0 {
        return Ok(true);
    }
    let sent = ledger::table(name.ledger())
        .filter(ledger::topic.eq(of.to_owned()))
        .filter(ledger::status.ne(Status::NoSubscriber.as_str()))
        .select(ledger::sequence);
    let sent = select(exists(sent));
    // A ledger too large to look at within this time, and no delivery found: said as it is.
    let was_sent = looking_briefly(conn, PATIENCE, |conn| sent.get_result::<bool>(conn))?;
    if was_sent == Some(true) {
        return Ok(false);
    }
    add(conn, name, of, NO_SUBSCRIBER)?;
    Ok(true)
}

/// The topics that lately ended without a subscriber, and never had one. Where topics are declared, none ends so.
pub(crate) fn without_subscriber(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<WithoutSubscriber>> {
    let lately: Vec<String> = topic::table(name.topic())
        .filter(topic::kind.eq(NO_SUBSCRIBER))
        .filter(topic::last_served.gt(clock_timestamp() - interval(REMEMBERED)))
        .order(topic::pattern)
        .select(topic::pattern)
        .load(conn)?;
    if lately.is_empty() {
        return Ok(Vec::new());
    }
    let Patterns { served, declared } = patterns(conn, name)?;
    if !declared.is_empty() {
        return Ok(Vec::new());
    }
    let subscribed = subscribed(conn, name, false)?;
    let known: Vec<String> = served.into_iter().chain(subscribed).collect();
    let mut found = Vec::new();
    for topic in lately.into_iter().filter(|one| !matches_any(&known, one)) {
        found.push(WithoutSubscriber {
            nearest: nearest_pattern(&topic, known.iter().map(String::as_str)).map(str::to_owned),
            topic,
        });
    }
    Ok(found)
}

/// Whether any destination is registered.
pub(crate) fn has_endpoints(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    let any = all_endpoints(name).select(endpoint::name);
    select(exists(any)).get_result(conn)
}

/// The patterns of all endpoints. `with_all`: also `*`, which matches every topic.
///
/// Text: `unnest` of a column in FROM.
pub(crate) fn subscribed(
    conn: &mut PgConnection,
    name: &OutboxName,
    with_all: bool,
) -> QueryResult<Vec<String>> {
    let which = if with_all { "" } else { "WHERE pattern <> '*'" };
    unprepared_statement(format!(
        "SELECT DISTINCT pattern FROM {} d CROSS JOIN unnest(topics) pattern {which} ORDER BY 1",
        all_endpoints_text(name)
    ))
    .giving::<(Text,)>()
    .load::<(String,)>(conn)
    .map(|rows| rows.into_iter().map(|(pattern,)| pattern).collect())
}

/// What becomes of waiting messages that nothing keeps any more, once the recorded topics change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Freed {
    /// The topics of these messages.
    pub topics: Vec<String>,
    /// The messages.
    pub messages: i64,
    /// Those of them that end without a subscriber, unsent. The others go to endpoints, if their filters
    /// match.
    pub without_subscriber: i64,
}

/// Counts the waiting messages of these topics that name no destination, and those that no endpoint wants.
/// `wanted`: each topic with the patterns of endpoints that match it. An endpoint that does not get messages before it is
/// verified wants none; the default of the relays is not known here.
///
/// Text: `unnest`, and a subquery for each row.
pub(crate) fn count_freed(
    conn: &mut PgConnection,
    name: &OutboxName,
    topics: Vec<String>,
    wanted: &[(String, String)],
) -> QueryResult<Freed> {
    if topics.is_empty() {
        return Ok(Freed::default());
    }
    let (of, patterns): (Vec<&str>, Vec<&str>) = wanted
        .iter()
        .map(|(of, pattern)| (of.as_str(), pattern.as_str()))
        .unzip();
    let (messages, without_subscriber) = unprepared_statement(format!(
        "SELECT count(*), count(*) FILTER (WHERE NOT EXISTS (
                SELECT FROM unnest($2::text[], $3::text[]) AS wanted(topic, pattern)
                  JOIN {destination} d ON wanted.pattern = ANY(d.topics)
                 WHERE wanted.topic = o.topic AND d.enabled AND d.created_at <= o.created_at
                   AND (d.tenant_id IS NULL OR d.tenant_id = o.tenant_id)
                   AND (d.verified_at IS NOT NULL OR d.verification IS NULL OR d.verification NOT LIKE '%:skip')))
           FROM {outbox} o WHERE o.destination = '' AND o.topic = ANY($1)",
        destination = all_endpoints_text(name),
        outbox = name.outbox(),
    ))
    .bind::<Array<Text>, _>(&topics)
    .bind::<Array<Text>, _>(of)
    .bind::<Array<Text>, _>(patterns)
    .giving::<(BigInt, BigInt)>()
    .get_result::<(i64, i64)>(conn)?;
    Ok(Freed {
        topics,
        messages,
        without_subscriber,
    })
}

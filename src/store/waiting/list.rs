//! What waits, listed by what is known of it.
//!
//! Text: `unnest`, and a subquery for each row (LATERAL).

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use uuid::Uuid;

use crate::name::OutboxName;
use crate::status::Status;
use crate::store::looking::looking_briefly;
use crate::store::messages::{Content, MessageRecord, live};
use crate::store::place::{Place, from_micros};
use crate::store::searched::{ALL, Deadline, Searched};
use crate::store::streams::streams;

/// Which live messages. Everything given has to hold.
///
/// ```
/// use diesel_outbox::Status;
/// use diesel_outbox::admin::WaitingFilter;
///
/// let retrying = WaitingFilter {
///     topic: Some("order.paid".to_owned()),
///     status: Some(Status::Retrying),
///     ..WaitingFilter::default()
/// };
/// # let _ = retrying;
/// ```
#[derive(Debug, Clone, Default)]
pub struct WaitingFilter {
    /// This topic only.
    pub topic: Option<String>,
    /// Only those that name this destination; empty: that name none.
    pub destination: Option<String>,
    /// This tenant only.
    pub tenant_id: Option<Uuid>,
    /// This ordering key only.
    pub ordering_key: Option<String>,
    /// Only those in this state. Delivered and dead ones are not live.
    pub status: Option<Status>,
    /// Only those behind this place: what a page of the list goes on behind.
    pub after: Option<Place>,
}

/// Live messages in the order in which they are due, without payloads and headers.
///
/// Of a key or a tenant all are read, by an index. Otherwise each topic and destination is read in its order,
/// and no further than the list goes, unless a state is asked for that few are in.
pub(crate) fn list(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &WaitingFilter,
    limit: i64,
) -> QueryResult<Searched<MessageRecord>> {
    let deadline = Deadline::new();
    let nothing = |is_complete| Searched {
        rows: Vec::new(),
        is_complete,
    };
    let Some(left) = deadline.left(ALL) else {
        return Ok(nothing(false));
    };
    let found = looking_briefly(conn, left, |conn| {
        match filter.ordering_key.is_some() || filter.tenant_id.is_some() {
            true => by_key_or_tenant(conn, name, filter, limit),
            false => by_lane(conn, name, filter, limit),
        }
    })?;
    Ok(match found {
        Some(rows) => Searched {
            rows,
            is_complete: true,
        },
        None => nothing(false),
    })
}

/// What a filter asks of a live message `m`, by the parameters $1 to $4.
fn condition(filter: &WaitingFilter) -> String {
    let status = match filter.status {
        None => "true",
        Some(Status::Pending) => "m.locked_by IS NULL AND m.attempts = 0",
        Some(Status::Retrying) => "m.locked_by IS NULL AND m.attempts > 0",
        Some(Status::Sending) => "m.locked_by IS NOT NULL",
        Some(Status::Delivered | Status::Dead) => "false",
    };
    format!(
        "({status}) AND (m.available_at, m.sequence) > ($1, $2)
         AND ($3::uuid IS NULL OR m.tenant_id = $3) AND ($4::text IS NULL OR m.ordering_key = $4)"
    )
}

fn place(filter: &WaitingFilter) -> (PgTimestamp, i64) {
    filter
        .after
        .map_or((PgTimestamp(i64::MIN), i64::MIN), |place| {
            (from_micros(place.micros), place.sequence)
        })
}

fn by_key_or_tenant(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &WaitingFilter,
    limit: i64,
) -> QueryResult<Vec<MessageRecord>> {
    let (available_at, sequence) = place(filter);
    // Only what is given: a parameter that may be NULL hides the index.
    let index = match (&filter.ordering_key, filter.tenant_id) {
        (Some(_), _) => "m.ordering_key = $4",
        (None, _) => "m.tenant_id = $3",
    };
    shown(
        name,
        &format!(
            "SELECT m.sequence FROM {outbox} m
              WHERE {index} AND {condition}
                AND ($5::text IS NULL OR m.topic = $5) AND ($6::text IS NULL OR m.destination = $6)
              ORDER BY m.available_at, m.sequence LIMIT $7",
            outbox = name.outbox(),
            condition = condition(filter),
        ),
    )
    .bind::<Timestamptz, _>(available_at)
    .bind::<BigInt, _>(sequence)
    .bind::<Nullable<SqlUuid>, _>(filter.tenant_id)
    .bind::<Nullable<Text>, _>(&filter.ordering_key)
    .bind::<Nullable<Text>, _>(&filter.topic)
    .bind::<Nullable<Text>, _>(&filter.destination)
    .bind::<BigInt, _>(limit)
    .load(conn)
}

fn by_lane(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &WaitingFilter,
    limit: i64,
) -> QueryResult<Vec<MessageRecord>> {
    let mut lanes = streams(conn, name)?;
    lanes.retain(|lane| {
        let topic = &lane.stream.topic;
        filter.topic.as_ref().is_none_or(|one| *one == topic.topic)
            && filter
                .destination
                .as_ref()
                .is_none_or(|one| *one == topic.destination)
    });
    let topics: Vec<&str> = lanes.iter().map(|l| &*l.stream.topic.topic).collect();
    let destinations: Vec<&str> = lanes.iter().map(|l| &*l.stream.topic.destination).collect();
    let keyed: Vec<bool> = lanes.iter().map(|l| l.stream.is_keyed).collect();
    let of_lane = |is_keyed: bool| {
        let (which, index) = match is_keyed {
            true => ("t.is_keyed", "m.ordering_key IS NOT NULL"),
            false => ("NOT t.is_keyed", "m.ordering_key IS NULL"),
        };
        format!(
            "SELECT f.available_at, f.sequence
               FROM unnest($5::text[], $6::text[], $8::bool[]) AS t(topic, destination, is_keyed)
              CROSS JOIN LATERAL (
                SELECT m.available_at, m.sequence FROM {outbox} m
                 WHERE m.topic = t.topic AND m.destination = t.destination AND {index}
                   AND {condition}
                 ORDER BY m.available_at, m.sequence LIMIT $7
              ) f WHERE {which}",
            outbox = name.outbox(),
            condition = condition(filter),
        )
    };
    let (available_at, sequence) = place(filter);
    shown(
        name,
        &format!(
            "SELECT m.sequence FROM ({} UNION ALL {}) m ORDER BY m.available_at, m.sequence LIMIT $7",
            of_lane(false),
            of_lane(true),
        ),
    )
    .bind::<Timestamptz, _>(available_at)
    .bind::<BigInt, _>(sequence)
    .bind::<Nullable<SqlUuid>, _>(filter.tenant_id)
    .bind::<Nullable<Text>, _>(&filter.ordering_key)
    .bind::<Array<Text>, _>(topics)
    .bind::<Array<Text>, _>(destinations)
    .bind::<BigInt, _>(limit)
    .bind::<Array<Bool>, _>(keyed)
    .load(conn)
}

/// What is shown of the messages that `chosen` gives.
fn shown<'a>(
    name: &OutboxName,
    chosen: &str,
) -> diesel::query_builder::BoxedSqlQuery<'a, diesel::pg::Pg, diesel::query_builder::SqlQuery> {
    sql_query(format!(
        "{} WHERE m.sequence = ANY(ARRAY({chosen})) ORDER BY m.available_at, m.sequence",
        live(name, Content::Without),
    ))
    .into_boxed()
}

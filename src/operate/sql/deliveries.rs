//! The deliveries of one destination: waiting messages, dead letters, and delivered messages.
//!
//! Waiting messages are read by the index of the claim, topic by topic, and only as far as the page needs. Dead letters
//! have an index by destination. The ledger has no such index, because the index would cost every message. So the
//! ledger is searched from its end, for as long as a search may take.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use diesel::dsl::array;
use diesel::prelude::{
    BoolExpressionMethods, CombineDsl, ExpressionMethods, IntoSql, NullableExpressionMethods,
    QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, select};
use uuid::Uuid;

use super::dead;
use super::history;
use super::ledger::{self, DeliveryCount, Looked};
use super::messages::{self, Content, MessageRecord};
use super::replay::{self, SentAgain};
use super::waiting::is_so;
use super::why::{self, WaitReason};
use crate::endpoints::public_error::public_error;
use crate::endpoints::sql::filter::{equal, filter, is_of_registration};
use crate::endpoints::sql::recipient::Recipient;
use crate::endpoints::sql::rows::WhichEndpoint;
use crate::engine::claim::sql::claim::{self, ARRAYS_AT_ONCE, Sequences, Stream};
use crate::engine::claim::sql::streams::{is_of, streams_to};
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::operate::sql::place::Place;
use crate::operate::sql::selection::Selection;
use crate::outbox::sql::searched::{ALL, SearchDeadline};
use crate::schema::values::{as_micros, from_micros, to_micros};
use crate::sql::functions::{AnyOf, On, TimeAndSequence, all_of, clock_timestamp, given};
use crate::sql::looking::looking_briefly;
use crate::sql::statement::unprepared;
use crate::sql::table::{self, attempt, candidate, outbox};
use crate::status::Status;

/// If heavy writes let a search read only the end of the ledger, the next page starts this far back, where the ledger's
/// index works again.
const UNINDEXED: Duration = Duration::from_secs(60);
/// How long counting one window may take.
const TO_COUNT: Duration = Duration::from_millis(500);

filter! {
    /// Selects deliveries. All given conditions must hold.
    ///
    /// ```
    /// use diesel_outbox::Status;
    /// use diesel_outbox::endpoints::{Deliveries, DeliveryFilter};
    /// use std::time::{Duration, SystemTime};
    ///
    /// /// The next page of the dead letters of a tenant.
    /// fn next(page: &Deliveries, tenant: uuid::Uuid) -> DeliveryFilter {
    ///     DeliveryFilter::default().state(Status::Dead).tenant_id(tenant).after(page.next)
    /// }
    ///
    /// /// Payments of yesterday.
    /// fn yesterday() -> DeliveryFilter {
    ///     let (now, day) = (SystemTime::now(), Duration::from_secs(86_400));
    ///     let filter = DeliveryFilter::default().topic("order.paid".to_owned());
    ///     filter.since(now - 2 * day).until(now - day)
    /// }
    /// ```
    pub struct DeliveryFilter {
        /// Only this state.
        pub state: Status,
        /// Only this tenant.
        pub tenant_id: Uuid,
        /// Only this topic.
        pub topic: String,
        /// Only messages that were settled, or are due, at this time or later.
        pub since: SystemTime,
        /// Only messages that were settled, or are due, before this time.
        pub until: SystemTime,
        /// Only deliveries after this place: the next page ([`Deliveries::next`]).
        pub after: Place,
    }
}

/// A page of deliveries.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Deliveries {
    /// The newest deliveries first. A settled message sorts by the time of settling, a waiting message by the time of
    /// its next attempt.
    pub rows: Vec<Delivery>,
    /// Where the next page begins ([`DeliveryFilter::after`]). `None`: this is the last page. A search stops after two
    /// seconds, so a page may have fewer rows than requested and still not be the last.
    pub next: Option<Place>,
    /// `false`: rows of this page may be missing, because of heavy writes or because the search ran out of time.
    pub is_complete: bool,
}

/// One message for one destination.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Delivery {
    /// The message id, as the receiver sees it. Sending the message again takes this id.
    pub message_id: Uuid,
    /// The topic of the message.
    pub topic: String,
    /// The tenant of the message.
    pub tenant_id: Option<Uuid>,
    /// The state of the delivery.
    pub state: Status,
    /// The number of attempts.
    pub attempts: i32,
    /// The HTTP status of the last response.
    pub http_status: Option<i32>,
    /// Why the last attempt failed: the name of a [`ReasonCode`](crate::ReasonCode).
    pub reason: Option<String>,
    /// The last error, for operators: the text may reveal the network of the relay. Show customers
    /// [`public_error`](Self::public_error) instead.
    pub error: Option<String>,
    /// When the next attempt is due, RFC 3339, if it is due later. What else a message waits for is in
    /// [`waits`](Self::waits).
    pub next_attempt_at: Option<String>,
    /// Why the message is not sent yet; `None`: it is settled.
    pub waits: Option<WaitReason>,
    /// When the message was delivered or dead-lettered, RFC 3339.
    pub settled_at: Option<String>,
    /// When the message was enqueued, RFC 3339.
    pub created_at: String,
    /// The message can be sent again: it is dead, or delivered with its payload kept (`OUTBOX_LEDGER_PAYLOAD`).
    pub can_be_sent_again: bool,
    sequence: Sequence,
    place: Place,
}

impl Delivery {
    fn id(&self) -> (Sequence, Uuid) {
        (self.sequence, self.message_id)
    }

    /// Why the last attempt failed, in words for the customer, who can mend most of it: `your endpoint did not answer
    /// within 15 s`, `the certificate of acme.example has expired`. They reveal nothing about the network of the relay: a
    /// name without an address and a name with a forbidden address give the same text.
    ///
    /// ```
    /// use diesel_outbox::endpoints::Delivery;
    ///
    /// fn describe(delivery: &Delivery) -> String {
    ///     match (delivery.http_status, delivery.public_error()) {
    ///         (Some(status), Some(error)) => format!("{status}: {error}"),
    ///         (_, Some(error)) => error,
    ///         (_, None) => delivery.state.to_string(),
    ///     }
    /// }
    /// ```
    pub fn public_error(&self) -> Option<String> {
        let code = self.reason.as_deref()?.parse();
        Some(public_error(code.ok(), self.error.as_deref()))
    }
}

/// One attempt to deliver a message that has failed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FailedAttempt {
    /// The number of the attempt, from 1.
    pub attempt: Option<i32>,
    /// When the attempt ended, RFC 3339.
    pub happened_at: String,
    /// The duration of the send.
    pub took: Option<Duration>,
    /// The HTTP status of the response.
    pub http_status: Option<i32>,
    /// The beginning of the response.
    pub response: Option<String>,
    /// Why the attempt failed: the name of a [`ReasonCode`](crate::ReasonCode).
    pub reason: Option<String>,
    /// The error, for operators. Show customers [`public_error`](Self::public_error).
    pub error: Option<String>,
}

impl FailedAttempt {
    /// Why the attempt failed, in words for customers, like [`Delivery::public_error`].
    ///
    /// ```
    /// use diesel_outbox::endpoints::DeliveryDetails;
    ///
    /// fn errors(details: &DeliveryDetails) -> Vec<String> {
    ///     details.failed.iter().filter_map(|attempt| attempt.public_error()).collect()
    /// }
    /// ```
    pub fn public_error(&self) -> Option<String> {
        let code = self.reason.as_deref()?.parse();
        Some(public_error(code.ok(), self.error.as_deref()))
    }
}

/// One delivery: what was sent, and what came back.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeliveryDetails {
    /// The delivery, as in the list.
    pub delivery: Delivery,
    /// The payload, JSON; `None`: the ledger did not keep it.
    pub payload: Option<String>,
    /// The headers of the message, a JSON object; `None`: there are none, or the ledger did not keep them.
    pub headers: Option<String>,
    /// The beginning of the last response.
    pub response: Option<String>,
    /// The attempts that have failed, oldest first.
    pub failed: Vec<FailedAttempt>,
}

/// The deliveries to this destination, newest first.
pub(crate) fn deliveries(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
    filter: &DeliveryFilter,
    limit: usize,
) -> QueryResult<Deliveries> {
    let deadline = SearchDeadline::new();
    let is_another = |tenant| filter.tenant_id.is_some_and(|asked| asked != tenant);
    let to = Recipient::find(conn, name, which)?;
    let Some(to) = to.filter(|to| !to.tenant.is_some_and(is_another)) else {
        return Ok(Deliveries {
            rows: Vec::new(),
            next: None,
            is_complete: true,
        });
    };
    let end = filter.until.map(|until| Place::before(as_micros(until)));
    let filter = &DeliveryFilter {
        tenant_id: to.tenant.or(filter.tenant_id),
        after: [filter.after, end].into_iter().flatten().min(),
        ..filter.clone()
    };
    let (destination, registration) = (to.destination, to.registration);
    // One more row tells whether there is another page.
    let one_more = i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1);
    let asks = |state| filter.state.is_none_or(|asked| asked == state);
    let (mut rows, mut is_complete, mut looked) = (Vec::new(), true, Looked::AtAll);
    if [Status::Pending, Status::Sending, Status::Retrying]
        .into_iter()
        .any(asks)
    {
        match waiting(conn, name, to, filter, one_more, deadline)? {
            Some(found) => rows.extend(found),
            None => is_complete = false,
        }
    }
    if asks(Status::Dead) {
        let filter = Selection {
            destination: Some(destination.to_owned()),
            tenant_id: filter.tenant_id,
            topic: filter.topic.clone(),
            registration,
            since: filter.since,
            behind: filter.after,
            ..Selection::default()
        };
        let letters = dead::list(conn, name, &filter, one_more)?;
        rows.extend(letters.into_iter().map(Delivery::of_record));
    }
    if asks(Status::Delivered) {
        let filter = Selection {
            destination: Some(destination.to_owned()),
            tenant_id: filter.tenant_id,
            topic: filter.topic.clone(),
            registration,
            since: filter.since,
            status: Some(Status::Delivered),
            behind: filter.after,
            ..Selection::default()
        };
        let (found, at) = ledger::search(conn, name, &filter, one_more, deadline)?;
        rows.extend(found.into_iter().map(Delivery::of_record));
        looked = at;
    }
    let searched_from = match looked {
        Looked::AtAll => None,
        Looked::From(micros) => Some(micros),
        Looked::AtTheEnd => {
            is_complete = false;
            let begin = SystemTime::now().checked_sub(UNINDEXED);
            begin.map(as_micros)
        }
    };
    let (mut rows, next) = page(rows, limit, searched_from, filter.after);
    add_answers(conn, name, &mut rows)?;
    Ok(Deliveries {
        rows,
        next,
        is_complete,
    })
}

/// The first `limit` rows, and where the next page begins: never at a newer place than this page, which begins
/// `after` a place. `searched_from`, in microseconds: the rows include all deliveries since then. Older rows belong to a
/// later page.
fn page(
    mut rows: Vec<Delivery>,
    limit: usize,
    searched_from: Option<i64>,
    after: Option<Place>,
) -> (Vec<Delivery>, Option<Place>) {
    // A message may have been settled since the waiting messages were read.
    let is_settled = |row: &&Delivery| row.settled_at.is_some();
    let settled: HashSet<_> = rows.iter().filter(is_settled).map(Delivery::id).collect();
    rows.retain(|row| row.settled_at.is_some() || !settled.contains(&row.id()));
    rows.retain(|row| searched_from.is_none_or(|from| row.place.micros >= from));
    rows.sort_by_key(|row| std::cmp::Reverse(row.place));
    let next = match rows.len() > limit {
        true => {
            rows.truncate(limit);
            rows.last().map(|last| last.place)
        }
        false => searched_from.map(Place::before),
    };
    // A search that had no time left has read to just above `after`.
    let next = next.map(|next| after.map_or(next, |after| next.min(after)));
    (rows, next)
}

/// The messages that wait for this destination, latest due first. `None`: reading took too long. Takes at most about
/// half of the time, so that the ledger can be searched, too.
fn waiting(
    conn: &mut PgConnection,
    name: &OutboxName,
    to: Recipient<'_>,
    filter: &DeliveryFilter,
    limit: i64,
    deadline: SearchDeadline,
) -> QueryResult<Option<Vec<Delivery>>> {
    let last = Sought::Last(to.registration, filter, limit);
    let found = of_lanes(conn, name, to.destination, last, (deadline, ALL / 2))?;
    let Some(mut rows) = found else {
        return Ok(None);
    };
    rows.sort_by_key(|row| std::cmp::Reverse(row.place()));
    rows.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    if rows.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let reasons = why::wait_reasons_of(conn, name, to.destination, &rows)?;
    let rows = rows.into_iter().zip(reasons);
    Ok(Some(
        rows.map(|(row, waits)| Delivery::of_live(row, waits))
            .collect(),
    ))
}

/// What is sought in each lane of a destination.
#[derive(Clone, Copy)]
enum Sought<'a> {
    /// So many messages, latest due first.
    Last(Option<Uuid>, &'a DeliveryFilter, i64),
    /// The message with this id.
    Message(Uuid),
}

impl<'a> Sought<'a> {
    fn of(self, name: &OutboxName, lane: &'a Stream) -> Sequences<'a> {
        match self {
            Self::Last(registration, filter, limit) => {
                last_of(name, lane, registration, filter, limit)
            }
            Self::Message(id) => {
                let is_it = candidate::message_id.eq(id).and(is_of(lane));
                let ones = candidate::table(name.outbox()).filter(is_it);
                Box::new(array(ones.select(candidate::sequence)))
            }
        }
    }
}

/// The live messages that are sought in the lanes of this destination. `None`: reading took longer than `most`.
fn of_lanes(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    sought: Sought<'_>,
    (deadline, most): (SearchDeadline, Duration),
) -> QueryResult<Option<Vec<MessageRecord>>> {
    let Some(left) = deadline.left(most) else {
        return Ok(None);
    };
    let found = looking_briefly(conn, left, |conn| {
        let mut found: Vec<MessageRecord> = Vec::new();
        for lanes in streams_to(conn, name, destination)?.chunks(ARRAYS_AT_ONCE) {
            if deadline.left(ALL).is_none_or(|left| left < ALL - most) {
                return Ok(None);
            }
            let Some(all) = claim::concatenated(lanes.iter().map(|lane| sought.of(name, lane)))
            else {
                continue;
            };
            let is_one = Box::new(outbox::sequence.eq(AnyOf(all)));
            let of_lanes = messages::live(name, is_one, Content::Without);
            found.extend(unprepared(of_lanes).load::<MessageRecord>(conn)?);
        }
        Ok(Some(found))
    })?;
    Ok(found.flatten())
}

/// The messages settled in each of `windows` windows, oldest first; the last window ends now. `None`: counting took too
/// long.
pub(crate) fn counts(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
    window: Duration,
    windows: usize,
) -> QueryResult<Vec<Option<DeliveryCount>>> {
    let deadline = SearchDeadline::new();
    let Some(to) = Recipient::find(conn, name, which)? else {
        return Ok(Vec::new());
    };
    let micros = i64::try_from(window.as_micros()).unwrap_or(i64::MAX).max(1);
    let mut end = select(clock_timestamp()).get_result(conn).map(to_micros)?;
    let mut counts = vec![None; windows];
    // The latest window first: if the time runs out, the oldest windows stay uncounted.
    for count in counts.iter_mut().rev() {
        let Some(left) = deadline.left(TO_COUNT) else {
            break;
        };
        let begin = end.saturating_sub(micros);
        *count = looking_briefly(conn, left, |conn| {
            ledger::count(conn, name, to, (begin, end))
        })?;
        if count.is_none() {
            break;
        }
        end = begin;
    }
    Ok(counts)
}

/// The sequences of the last messages of a lane.
fn last_of<'a>(
    name: &OutboxName,
    lane: &'a Stream,
    registration: Option<Uuid>,
    filter: &'a DeliveryFilter,
    limit: i64,
) -> Sequences<'a> {
    let when = (candidate::available_at, candidate::sequence).into_sql::<TimeAndSequence>();
    let others = [
        Some(is_of(lane)),
        given(filter.state, is_so),
        given(filter.since, |time| {
            candidate::available_at.ge(from_micros(as_micros(time)))
        }),
        given(registration, |id| is_of_registration!(candidate, id)),
        given(filter.after, |place| when.lt(place.of_row())),
    ];
    let is_meant: On<'_, candidate::table> = all_of(
        equal!(candidate, filter: tenant_id topic)
            .into_iter()
            .chain(others),
    );
    let last = candidate::table(name.outbox())
        .filter(is_meant)
        .order((candidate::available_at.desc(), candidate::sequence.desc()))
        .limit(limit)
        .select(candidate::sequence);
    Box::new(array(last))
}

/// Adds the HTTP status of the last response to waiting messages, from the history.
fn add_answers(
    conn: &mut PgConnection,
    name: &OutboxName,
    rows: &mut [Delivery],
) -> QueryResult<()> {
    let was_tried = |row: &&Delivery| row.settled_at.is_none() && row.attempts > 0;
    let tried: Vec<&Delivery> = rows.iter().filter(was_tried).collect();
    if tried.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = tried.iter().map(|row| row.message_id).collect();
    let sequences: Vec<Sequence> = tried.iter().map(|row| row.sequence).collect();
    let answers = attempt::table(name.attempt())
        .filter(attempt::message_id.eq_any(ids))
        .filter(attempt::sequence.eq_any(sequences))
        .filter(attempt::event.eq("failed"))
        .order(attempt::happened_at)
        .select((
            (attempt::sequence, attempt::message_id),
            attempt::http_status,
        ));
    let answers: Vec<((Sequence, Uuid), Option<i32>)> = unprepared(answers).load(conn)?;
    // Ordered by time: the last attempt wins.
    let last: HashMap<(Sequence, Uuid), Option<i32>> = answers.into_iter().collect();
    for row in rows.iter_mut().filter(|row| row.settled_at.is_none()) {
        row.http_status = last.get(&row.id()).copied().flatten();
    }
    Ok(())
}

impl Delivery {
    fn of_record(row: MessageRecord) -> Self {
        Self::of_live(row, None)
    }

    /// A message that is not settled yet, and why it waits.
    fn of_live(row: MessageRecord, waits: Option<WaitReason>) -> Self {
        let next_attempt_at = match &waits {
            Some(WaitReason::NotDue { until }) => until.clone(),
            _ => None,
        };
        Self {
            place: row.place(),
            message_id: row.message_id,
            topic: row.topic,
            tenant_id: row.tenant_id,
            state: row.status,
            attempts: row.attempts,
            http_status: row.http_status,
            reason: row.reason,
            error: row.last_error,
            next_attempt_at,
            waits,
            created_at: row.created_at,
            can_be_sent_again: row.settled_at.is_some() && row.has_payload,
            settled_at: row.settled_at,
            sequence: row.sequence,
        }
    }
}

/// Sends a dead or delivered message of this endpoint there once more.
pub(crate) fn send_again(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
    message_id: Uuid,
    operator: &str,
) -> QueryResult<SentAgain> {
    let to = Recipient::find(conn, name, which)?;
    let Some(to) = to.filter(|to| to.registration.is_some()) else {
        return Ok(SentAgain::NotFound);
    };
    let letters = dead::of_delivery(conn, name, message_id, to)?;
    if !letters.is_empty() {
        // A letter that is not requeued already has its key in the outbox.
        dead::requeue_to(conn, name, &letters, to.destination, operator)?;
        return Ok(SentAgain::Yes);
    }
    if !tried(conn, name, message_id, to)?.is_empty() {
        return Ok(SentAgain::Yes);
    }
    replay::once_more(conn, name, to, message_id, operator)
}

/// One delivery of this destination. `None`: there is none, or the search for a message that was not tried yet took too
/// long.
pub(crate) fn details(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
    message_id: Uuid,
) -> QueryResult<Option<DeliveryDetails>> {
    let Some(to) = Recipient::find(conn, name, which)? else {
        return Ok(None);
    };
    let mut found = tried(conn, name, message_id, to)?;
    found.extend(ended(conn, name, message_id, to)?);
    if found.is_empty() {
        found = untried(conn, name, message_id, to)?;
    }
    // What waits, and then what was settled last.
    let order = |row: &MessageRecord| (row.settled_at.is_none(), row.settled_at.clone());
    let Some(row) = found.into_iter().max_by_key(order) else {
        return Ok(None);
    };
    let waits = match row.settled_at {
        Some(_) => None,
        None => {
            let of_row = std::slice::from_ref(&row);
            why::wait_reasons_of(conn, name, to.destination, of_row)?.pop()
        }
    };
    let failed = history::failed(conn, name, message_id, to)?;
    let failed = failed.into_iter().map(|entry| FailedAttempt {
        attempt: entry.attempt,
        happened_at: entry.happened_at,
        took: entry.took,
        http_status: entry.http_status,
        response: entry.response,
        reason: entry.reason,
        error: entry.error,
    });
    let mut details = DeliveryDetails {
        payload: row.payload.clone(),
        headers: row.headers.clone(),
        response: row.response.clone(),
        failed: failed.collect(),
        delivery: Delivery::of_live(row, waits.flatten()),
    };
    let last = details.failed.last();
    let delivery = &mut details.delivery;
    if delivery.settled_at.is_none() {
        delivery.http_status = last.and_then(|last| last.http_status);
        details.response = last.and_then(|last| last.response.clone());
    }
    Ok(Some(details))
}

/// The waiting messages with this id for this recipient that were tried or sent again before. The history leads to them:
/// the history has an index of message ids, and the outbox has none.
fn tried(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
    to: Recipient<'_>,
) -> QueryResult<Vec<MessageRecord>> {
    let known = attempt::table(name.attempt())
        .filter(to.history(message_id))
        .select(attempt::sequence);
    let known: Vec<i64> = unprepared(known).load(conn)?;
    if known.is_empty() {
        return Ok(Vec::new());
    }
    let is_known = outbox::sequence
        .eq_any(known)
        .and(outbox::message_id.eq(message_id));
    let is_one = Box::new(is_known.and(to.live()));
    unprepared(messages::live(name, is_one, Content::Whole)).load(conn)
}

/// The waiting messages with this id for this recipient that nothing else knows: they are searched for among all that wait
/// for the destination.
fn untried(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
    to: Recipient<'_>,
) -> QueryResult<Vec<MessageRecord>> {
    let (sought, time) = (Sought::Message(message_id), (SearchDeadline::new(), ALL));
    let found = of_lanes(conn, name, to.destination, sought, time)?;
    let sequences = found.unwrap_or_default().into_iter();
    let sequences: Vec<i64> = sequences.map(|one| one.sequence.0).collect();
    if sequences.is_empty() {
        return Ok(Vec::new());
    }
    let is_one = outbox::sequence.eq_any(sequences).and(to.live());
    unprepared(messages::live(name, Box::new(is_one), Content::Whole)).load(conn)
}

/// The dead letters and the deliveries with this id of this recipient.
fn ended(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: Uuid,
    to: Recipient<'_>,
) -> QueryResult<Vec<MessageRecord>> {
    let is_dead = table::dead::message_id.eq(message_id).and(to.letters());
    let is_delivered = table::ledger::message_id
        .eq(message_id)
        .and(table::ledger::status.eq(Status::Delivered.as_str()));
    let letters = messages::dead(name, Box::new(is_dead), Content::Whole);
    let delivered = messages::settled(
        name,
        Box::new(is_delivered.and(to.entries())),
        Content::Whole,
    );
    unprepared(letters.union_all(delivered)).load(conn)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A delivery that was settled or is due at this time.
    fn one(sequence: i64, micros: i64, state: Status) -> Delivery {
        let is_settled = matches!(state, Status::Delivered | Status::Dead);
        let at = Some(micros.to_string());
        Delivery {
            message_id: Uuid::nil(),
            topic: "order.paid".to_owned(),
            tenant_id: None,
            state,
            attempts: 1,
            http_status: None,
            reason: None,
            error: None,
            next_attempt_at: at.clone().filter(|_| !is_settled),
            waits: None,
            settled_at: at.filter(|_| is_settled),
            created_at: String::new(),
            can_be_sent_again: is_settled,
            sequence: Sequence(sequence),
            place: Place { micros, sequence },
        }
    }

    fn sequences(rows: &[Delivery]) -> Vec<i64> {
        rows.iter().map(|row| row.sequence.0).collect()
    }

    #[test]
    fn a_page_ends_where_the_ledger_was_searched_to() {
        let all = || {
            vec![
                one(1, 900, Status::Retrying),
                one(2, 500, Status::Delivered),
                one(3, 300, Status::Dead),
                one(4, 100, Status::Pending),
            ]
        };
        let (rows, next) = page(all(), 4, None, None);
        assert_eq!((sequences(&rows), next), (vec![1, 2, 3, 4], None));
        let (rows, next) = page(all(), 2, None, None);
        let after_the_second = all()[1].place;
        assert_eq!(
            (sequences(&rows), next),
            (vec![1, 2], Some(after_the_second))
        );
        let (rows, next) = page(all(), 4, Some(300), None);
        assert_eq!(sequences(&rows), [1, 2, 3]);
        let next = next.expect("there is more");
        assert!(all()[2].place > next && all()[3].place < next);
        // No row was found in time.
        let (rows, next) = page(Vec::new(), 4, Some(300), None);
        assert_eq!((rows.len(), next), (0, Some(Place::before(300))));
    }

    /// A search without time reads nothing: it has searched from just after the place where the page begins.
    #[test]
    fn a_page_never_continues_with_newer_deliveries() {
        let after = Place::before(300);
        let (_, next) = page(Vec::new(), 4, Some(301), Some(after));
        assert_eq!(next, Some(after));
        let (_, next) = page(Vec::new(), 4, Some(200), Some(after));
        assert_eq!(next, Some(Place::before(200)));
    }

    #[test]
    fn a_message_settled_while_it_is_read_is_shown_once() {
        let rows = vec![
            one(1, 900, Status::Sending),
            one(1, 500, Status::Delivered),
            one(2, 100, Status::Sending),
        ];
        let (rows, _) = page(rows, 9, None, None);
        assert_eq!(sequences(&rows), [1, 2]);
        assert_eq!(rows[0].state, Status::Delivered);
    }
}

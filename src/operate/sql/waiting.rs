//! Live messages that a selection has: list, count, retry, cancel.

use std::time::Duration;

use diesel::PgConnection;
use diesel::dsl::array;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl,
    RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::Bool;

use super::audit;
use super::history::{self, Event};
use super::messages::{self, Content, MessageRecord};
use super::selection::selected;
use crate::endpoints::sql::missed::looking_for;
use crate::engine::claim::sql::claim::{self, ARRAYS_AT_ONCE, Sequences, Stream};
use crate::engine::claim::sql::streams::{is_of, streams};
use crate::engine::serves::routes::matches_any;
use crate::message::Due;
use crate::name::OutboxName;
use crate::operate::sql::place::Place;
use crate::operate::sql::selection::{Selection, Several};
use crate::outbox::sql::searched::{ALL, SearchDeadline, Searched};
use crate::outbox::sql::waiting::{self, Changed, MessageRef, PartState};
use crate::schema::values::{as_micros, from_micros};
use crate::setup::sql::catalogue;
use crate::sql::functions::{AnyOf, On, TimeAndSequence, all_of, clock_timestamp, given};
use crate::sql::looking::{looking, looking_briefly};
use crate::sql::statement::unprepared;
use crate::sql::table::{candidate, outbox};
use crate::status::Status;

/// Tables up to this size (128 MiB in pages) are read in 100 to 200 ms.
const WHOLE_PAGES: i64 = 16_000;

/// Live messages in the order in which they are due, without payloads and headers.
///
/// Messages of a key or a tenant are all read, by an index. Otherwise, each topic and destination is read in order,
/// and only as far as the list needs. If few messages may be in the requested state, the whole table is read instead,
/// unless it is large.
pub(crate) fn list(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
) -> QueryResult<Searched<MessageRecord>> {
    let deadline = SearchDeadline::new();
    let nothing = |is_complete| Searched {
        rows: Vec::new(),
        is_complete,
    };
    let Some(left) = deadline.left(ALL) else {
        return Ok(nothing(false));
    };
    let found = looking_briefly(conn, left, |conn| {
        // An index finds all messages of a key or a tenant.
        if selection.ordering_key.is_some()
            || selection.tenant_id.is_some()
            || is_read_whole(conn, name, selection)?
        {
            let all = first(name, is_meant(selection), limit);
            return these(conn, name, [all], limit).map(Some);
        }
        of_lanes(conn, name, selection, limit, deadline)
    })?;
    Ok(match found.flatten() {
        Some(rows) => Searched {
            rows,
            is_complete: true,
        },
        None => nothing(false),
    })
}

type WaitingCondition<'a> = On<'a, candidate::table>;

/// Whether a live message is selected.
fn is_meant(selection: &Selection) -> WaitingCondition<'_> {
    let when = (candidate::available_at, candidate::sequence).into_sql::<TimeAndSequence>();
    let others = [
        given(selection.destination.as_deref(), |named| {
            let is_routed =
                (candidate::destination.eq("")).and(candidate::topic.eq_any(&selection.routed));
            candidate::destination.eq(named).or(is_routed)
        }),
        given(selection.status, is_so),
        given(selection.behind, |place| when.gt(place.of_row())),
    ];
    let own = selected!(candidate, selection, created_at, last_error_code);
    all_of(own.into_iter().chain(others))
}

pub(super) fn is_so(status: Status) -> WaitingCondition<'static> {
    let is_free = candidate::locked_by.is_null();
    match status {
        Status::Pending => Box::new(is_free.and(candidate::attempts.eq(0))),
        Status::Retrying => Box::new(is_free.and(candidate::attempts.gt(0))),
        Status::Sending => Box::new(candidate::locked_by.is_not_null()),
        Status::Delivered | Status::NoSubscriber | Status::Dead => {
            Box::new(false.into_sql::<Bool>())
        }
    }
}

/// Selects messages up to a place, in two conditions: an index scan ends at a sequence only among rows of one time.
fn no_later(place: Place) -> [WaitingCondition<'static>; 2] {
    let time = from_micros(place.micros);
    let at_that_time = candidate::available_at.eq(time);
    [
        Box::new(candidate::available_at.lt(time)),
        Box::new(at_that_time.and(candidate::sequence.le(place.sequence))),
    ]
}

/// Whether the whole table is read instead of its lanes: the table is not large, and few messages may be in the
/// requested state.
fn is_read_whole(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
) -> QueryResult<bool> {
    let may_be_rare = matches!(selection.status, Some(Status::Sending | Status::Retrying));
    Ok(may_be_rare
        && selection.topic.is_none()
        && catalogue::pages(conn, &name.outbox())? <= WHOLE_PAGES)
}

/// The lanes (a lane is a topic and a destination) that may have selected messages.
fn lanes(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
) -> QueryResult<Vec<Stream>> {
    let mut lanes: Vec<Stream> = streams(conn, name)?
        .into_iter()
        .map(|lane| lane.stream)
        .collect();
    let has_topic = |topic: &str| {
        let asked = selection.topic.as_ref();
        asked.is_none_or(|asked| matches_any(std::slice::from_ref(asked), topic))
    };
    let goes = |topic: &String, named: &str| match selection.destination.as_deref() {
        None => true,
        Some(asked) => asked == named || (named.is_empty() && selection.routed.contains(topic)),
    };
    lanes.retain(|Stream { topic: lane, .. }| {
        has_topic(&lane.topic) && goes(&lane.topic, &lane.destination)
    });
    Ok(lanes)
}

/// The first messages of all lanes together. `None`: the time ran out.
fn of_lanes(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
    deadline: SearchDeadline,
) -> QueryResult<Option<Vec<MessageRecord>>> {
    let most = usize::try_from(limit).unwrap_or(0);
    let mut rows: Vec<MessageRecord> = Vec::new();
    for lanes in lanes(conn, name, selection)?.chunks(ARRAYS_AT_ONCE) {
        if deadline.left(ALL).is_none() {
            return Ok(None);
        }
        let last = rows.last().filter(|_| rows.len() >= most);
        let last = last.map(MessageRecord::place);
        let first = |lane| {
            let is_one = move || is_of(lane).and(is_meant(selection));
            let parts: Vec<WaitingCondition<'_>> = match last {
                None => vec![Box::new(is_one())],
                Some(place) => no_later(place)
                    .into_iter()
                    .map(|part| -> WaitingCondition<'_> { Box::new(is_one().and(part)) })
                    .collect(),
            };
            parts.into_iter().map(|part| first(name, part, limit))
        };
        rows.extend(these(conn, name, lanes.iter().flat_map(first), limit)?);
        rows.sort_by_key(MessageRecord::place);
        rows.truncate(most);
    }
    Ok(Some(rows))
}

/// The sequences of the first selected messages.
fn first<'a>(name: &OutboxName, which: WaitingCondition<'a>, limit: i64) -> Sequences<'a> {
    let first = candidate::table(name.outbox())
        .filter(which)
        .order((candidate::available_at, candidate::sequence))
        .limit(limit)
        .select(candidate::sequence);
    Box::new(array(first))
}

/// The first messages among these sequences.
fn these<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: impl IntoIterator<Item = Sequences<'a>>,
    limit: i64,
) -> QueryResult<Vec<MessageRecord>> {
    let Some(all) = claim::concatenated(sequences.into_iter()) else {
        return Ok(Vec::new());
    };
    let is_one = Box::new(outbox::sequence.eq(AnyOf(all)));
    let first = messages::live(name, is_one, Content::Without)
        .order((outbox::available_at, outbox::sequence))
        .limit(limit);
    unprepared(first).load(conn)
}

/// What is done to all selected messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitingChange {
    /// Messages that wait after a failure become due.
    Retry,
    /// Waiting messages are cancelled.
    Cancel,
}

impl From<WaitingChange> for audit::Act {
    fn from(act: WaitingChange) -> Self {
        match act {
            WaitingChange::Retry => Self::RetryMessage,
            WaitingChange::Cancel => Self::CancelMessage,
        }
    }
}

impl WaitingChange {
    /// What ends a message leaves those that others get.
    pub(crate) fn several(self) -> Several {
        match self {
            Self::Retry => Several::Selected,
            Self::Cancel => Several::Left,
        }
    }

    /// Whether the act changes a message. A retried message is due, so it is not found again.
    fn changes(self) -> WaitingCondition<'static> {
        let is_free = candidate::locked_by.is_null();
        let has_failed = candidate::attempts
            .gt(0)
            .or(candidate::last_error_code.is_not_null());
        let waits = candidate::available_at.gt(clock_timestamp());
        match self {
            Self::Retry => Box::new(is_free.and(has_failed).and(waits)),
            Self::Cancel => Box::new(is_free),
        }
    }
}

/// Counts the messages that the act would change, within this time. `None`: there are too many to be counted.
pub(crate) fn count(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    act: WaitingChange,
    time: Option<Duration>,
) -> QueryResult<Option<i64>> {
    let these = candidate::table(name.outbox())
        .filter(is_meant(selection))
        .filter(act.changes())
        .count();
    looking_for(conn, time, |conn| unprepared(these).get_result(conn))
}

/// The first message that the act would change, in the order in which it changes them.
pub(crate) fn first_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    act: WaitingChange,
) -> QueryResult<Option<MessageRecord>> {
    let first = candidate::table(name.outbox())
        .filter(is_meant(selection))
        .filter(act.changes())
        .order(candidate::sequence)
        .limit(1)
        .select(candidate::sequence);
    let first: Vec<i64> = looking(conn, None, |conn| unprepared(first).load(conn))?;
    let is_one = Box::new(outbox::sequence.eq_any(first));
    let found = messages::live(name, is_one, Content::Without);
    Ok(unprepared(found).load(conn)?.pop())
}

/// Changes the next `most` messages after this sequence. Returns the last sequence that was found, and how many messages
/// were changed: a relay may have claimed some meanwhile. `None`: no message is left. `operator`: who acts, and why.
pub(crate) fn change(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    act: WaitingChange,
    (after, most): (i64, usize),
    operator: &str,
) -> QueryResult<Option<(i64, usize)>> {
    let next = candidate::table(name.outbox())
        .filter(is_meant(selection))
        .filter(act.changes())
        .filter(candidate::sequence.gt(after))
        .order(candidate::sequence)
        .limit(i64::try_from(most).unwrap_or(i64::MAX))
        .select(candidate::sequence);
    let found: Vec<i64> = looking(conn, None, |conn| unprepared(next).load(conn))?;
    let Some(last) = found.last().copied() else {
        return Ok(None);
    };
    let changed = match act {
        WaitingChange::Retry => retry(conn, name, found, operator)?,
        WaitingChange::Cancel => waiting::cancel_waiting(conn, name, &found, Some(operator))?,
    };
    Ok(Some((last, changed)))
}

/// Makes these messages due, and records who did. Returns how many.
fn retry(
    conn: &mut PgConnection,
    name: &OutboxName,
    live: Vec<i64>,
    operator: &str,
) -> QueryResult<usize> {
    let due = waiting::set_due(conn, name, live, Due::Now)?;
    let sequences: Vec<i64> = due.iter().map(|(sequence, _)| *sequence).collect();
    history::note_live(conn, name, &sequences, Event::Retried, operator)?;
    Ok(due.len())
}

/// Like [`retry`], for the message that `which` names.
pub(crate) fn retry_one(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    operator: &str,
) -> QueryResult<Changed> {
    let changed = waiting::reschedule(conn, name, which, Due::Now)?;
    let done = changed.parts.iter();
    let done = done.filter(|part| part.state == PartState::Done);
    let sequences: Vec<i64> = done.map(|part| part.sequence.0).collect();
    history::note_live(conn, name, &sequences, Event::Retried, operator)?;
    Ok(changed)
}

//! Removes the content of messages wherever it is. What happened to the messages remains in the ledger.

use std::collections::BTreeSet;
use std::fmt;

use diesel::dsl::{case_when, exists, not, sql};
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Bool, Text};
use diesel::{PgConnection, update};
use uuid::Uuid;

use super::dead::discard;
use super::forget::need;
use super::messages::LetterId;
use crate::endpoints::sql::filter::equal;
use crate::error::DatabaseError;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::outbox::sql::waiting::cancel_waiting;
use crate::setup::sql::inspect::has_feeds;
use crate::sql::functions::{Json, On, all_of, given, text_or};
use crate::sql::looking::looking;
use crate::sql::statement::unprepared;
use crate::sql::table::{attempt, dead, feed_event, ledger, outbox};
use crate::status::ReasonCode;

/// The most messages that one search finds.
pub(crate) const LOOK: usize = 100_000;

/// What [`expunge`](crate::admin::expunge) has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Expunged {
    /// Live rows cancelled: a message has one for each destination.
    pub cancelled: u64,
    /// Dead letters discarded.
    pub discarded: u64,
    /// Ledger entries blanked.
    pub ledger_entries: u64,
    /// Attempts blanked.
    pub attempts: u64,
    /// Events of feeds blanked. Their positions remain.
    pub feed_events: u64,
    /// Messages of which relays hold live rows, which remain. Call [`expunge`](crate::admin::expunge) for each once they
    /// are settled.
    pub left: BTreeSet<Uuid>,
}

impl Expunged {
    /// Whether the outbox has nothing of these messages.
    ///
    /// ```
    /// use diesel_outbox::admin::Expunged;
    ///
    /// assert!(Expunged::default().is_unknown());
    /// ```
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn add(&mut self, step: Self) {
        self.cancelled += step.cancelled;
        self.discarded += step.discarded;
        self.ledger_entries += step.ledger_entries;
        self.attempts += step.attempts;
        self.feed_events += step.feed_events;
        self.left.extend(step.left);
    }
}

/// One message, or whom or what messages are about: those of an ordering key or of a `ce-subject`, or a part of them.
///
/// ```
/// use diesel_outbox::admin::Subject;
/// # let (id, tenant) = (uuid::Uuid::nil(), uuid::Uuid::nil());
///
/// let one = Subject::message(id);
/// let all = Subject::key("customer-42");
/// let part = Subject::ce_subject("customers/42").topic("invoice.sent".to_owned()).tenant_id(tenant);
/// # let _ = (one, all, part);
/// ```
#[derive(Debug, Clone)]
pub struct Subject {
    message_id: Option<Uuid>,
    ordering_key: Option<String>,
    ce_subject: Option<String>,
    topic: Option<String>,
    tenant_id: Option<Uuid>,
}

impl Subject {
    fn any() -> Self {
        Self {
            message_id: None,
            ordering_key: None,
            ce_subject: None,
            topic: None,
            tenant_id: None,
        }
    }

    /// One message, by its id.
    pub fn message(id: Uuid) -> Self {
        Self {
            message_id: Some(id),
            ..Self::any()
        }
    }

    /// The messages with this ordering key.
    pub fn key(ordering_key: impl Into<String>) -> Self {
        Self {
            ordering_key: Some(ordering_key.into()),
            ..Self::any()
        }
    }

    /// The messages with this header `ce-subject`. The ledger has headers only together with payloads
    /// (`OUTBOX_LEDGER_PAYLOAD`), so entries without are not found.
    pub fn ce_subject(subject: impl Into<String>) -> Self {
        Self {
            ce_subject: Some(subject.into()),
            ..Self::any()
        }
    }

    /// Only this topic.
    #[must_use]
    pub fn topic(mut self, topic: impl Into<Option<String>>) -> Self {
        self.topic = topic.into();
        self
    }

    /// Only this tenant.
    #[must_use]
    pub fn tenant_id(mut self, tenant_id: impl Into<Option<Uuid>>) -> Self {
        self.tenant_id = tenant_id.into();
        self
    }
}

/// As it is recorded. A `ce-subject` is content, so it is not written.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.message_id, &self.ordering_key) {
            (Some(id), _) => write!(f, "{id}")?,
            (None, Some(key)) => write!(f, "key {key}")?,
            (None, None) => f.write_str("a subject")?,
        }
        if let Some(topic) = &self.topic {
            write!(f, ", topic {topic}")?;
        }
        match &self.tenant_id {
            Some(tenant) => write!(f, ", tenant {tenant}"),
            None => Ok(()),
        }
    }
}

/// A regular expression for headers, as JSON text, that have this `ce-subject`.
///
/// Not JSON operators: one row with an escape that PostgreSQL cannot read, such as `\u0000`, would end the search.
fn has_ce_subject(subject: &str) -> String {
    let mut pattern = r#""[cC][eE]-[sS][uU][bB][jJ][eE][cC][tT]"\s*:\s*""#.to_owned();
    for c in subject.chars() {
        if c.is_ascii_alphanumeric() || "-_:".contains(c) {
            pattern.push(c);
            continue;
        }
        let mut units = [0; 2];
        let escaped: String = c
            .encode_utf16(&mut units)
            .iter()
            .map(|unit| format!(r"\\u(?:{unit:04x}|{unit:04X})"))
            .collect();
        pattern.push_str("(?:");
        // In JSON, a quotation mark and a backslash are escaped always, a solidus sometimes.
        match c {
            '"' | '\\' => pattern.push_str(&format!(r"\\\{c}")),
            '/' => pattern.push_str(r"\\?/"),
            _ if c.is_ascii_punctuation() => pattern.extend(['\\', c]),
            _ => pattern.push(c),
        }
        pattern.push('|');
        pattern.push_str(&escaped);
        pattern.push(')');
    }
    pattern.push('"');
    pattern
}

/// Declares the searches for the messages of a subject in a table: in the order of their ids, after an id; and their
/// counts of rows.
macro_rules! looks {
    ($($table:ident: $look:ident $count:ident;)+) => {
        $(
            fn $look(
                conn: &mut PgConnection,
                name: &OutboxName,
                subject: &Subject,
                after: Option<Uuid>,
            ) -> QueryResult<Vec<Uuid>> {
                let found = $table::table(name.$table())
                    .filter(looks!(@is_meant $table, name, subject))
                    .filter(all_of([given(after, |after| $table::message_id.gt(after))]))
                    .order($table::message_id)
                    .distinct()
                    .limit(i64::try_from(LOOK).unwrap_or(i64::MAX))
                    .select($table::message_id);
                looking(conn, None, |conn| unprepared(found).load(conn))
            }

            fn $count(conn: &mut PgConnection, name: &OutboxName, subject: &Subject) -> QueryResult<u64> {
                let is_meant = looks!(@is_meant $table, name, subject);
                let rows = $table::table(name.$table()).filter(is_meant).count();
                let rows: i64 = looking(conn, None, |conn| unprepared(rows).get_result(conn))?;
                Ok(u64::try_from(rows).unwrap_or(0))
            }
        )+
    };
    (@is_meant ledger, $name:ident, $subject:ident) => {
        looks!(@is_of ledger, $subject).and(has_content($name))
    };
    (@is_meant feed_event, $name:ident, $subject:ident) => {
        looks!(@is_of feed_event, $subject).and(feed_event::payload.is_not_null())
    };
    (@is_meant $table:ident, $name:ident, $subject:ident) => {
        looks!(@is_of $table, $subject)
    };
    (@is_of $table:ident, $subject:ident) => {
        all_of(equal!($table, $subject: message_id topic tenant_id ordering_key).into_iter().chain([
            given($subject.ce_subject.as_deref(), |text| {
                sql::<Bool>("headers::text ~ ").bind::<Text, _>(has_ce_subject(text))
            }),
        ]))
    };
}

/// How a message ended of which `error` says who ended it and why. That is no content, and stays.
fn ended_by_hand() -> [&'static str; 2] {
    [ReasonCode::Cancelled, ReasonCode::ByHand].map(ReasonCode::as_str)
}

/// Whether an entry of the ledger, or the history of its message, has content.
fn has_content(name: &OutboxName) -> On<'static, ledger::table> {
    let attempts = attempt::table(name.attempt())
        .filter(attempt::message_id.eq(ledger::message_id))
        .filter(
            attempt::error
                .is_not_null()
                .or(attempt::response.is_not_null()),
        )
        .select(attempt::message_id);
    let is_by_hand = text_or(ledger::reason, "").eq_any(ended_by_hand());
    Box::new(
        ledger::payload
            .is_not_null()
            .or(ledger::headers.is_not_null())
            .or(ledger::response.is_not_null())
            .or(ledger::error.is_not_null().and(not(is_by_hand)))
            .or(exists(attempts)),
    )
}

looks! {
    outbox: live count_live;
    dead: letters count_letters;
    ledger: entries count_entries;
    feed_event: events count_events;
}

/// Events of feeds, if the outbox has their tables.
fn events_if_there(
    conn: &mut PgConnection,
    name: &OutboxName,
    subject: &Subject,
    after: Option<Uuid>,
) -> QueryResult<Vec<Uuid>> {
    match has_feeds(conn, name)? {
        true => events(conn, name, subject, after),
        false => Ok(Vec::new()),
    }
}

/// Finds messages of a subject, in the order of their ids, after an id; at most [`LOOK`].
type FindSubject =
    fn(&mut PgConnection, &OutboxName, &Subject, Option<Uuid>) -> QueryResult<Vec<Uuid>>;

/// The searches, in the order in which a message goes through the tables.
pub(crate) const LOOKS: [FindSubject; 4] = [live, letters, entries, events_if_there];

/// The rows of a subject: what an expunge of all its messages would do. Attempts are not counted.
pub(crate) fn count(
    conn: &mut PgConnection,
    name: &OutboxName,
    subject: &Subject,
) -> QueryResult<Expunged> {
    Ok(Expunged {
        cancelled: count_live(conn, name, subject)?,
        discarded: count_letters(conn, name, subject)?,
        ledger_entries: count_entries(conn, name, subject)?,
        feed_events: match has_feeds(conn, name)? {
            true => count_events(conn, name, subject)?,
            false => 0,
        },
        ..Expunged::default()
    })
}

/// Cancels the live rows of these messages, discards their dead letters, and blanks their entries, in the caller's
/// transaction.
pub(crate) fn expunge(
    conn: &mut PgConnection,
    name: &OutboxName,
    ids: &[Uuid],
    operator: &str,
) -> QueryResult<Expunged> {
    let rows = || outbox::table(name.outbox()).filter(outbox::message_id.eq_any(ids));
    let live: Vec<i64> = looking(conn, None, |conn| {
        unprepared(rows().select(outbox::sequence)).load(conn)
    })?;
    let cancelled = cancel_waiting(conn, name, &live, Some(operator))?;
    let left: Vec<Uuid> = if cancelled < live.len() {
        let left = rows().filter(outbox::sequence.eq_any(live));
        unprepared(left.select(outbox::message_id)).load(conn)?
    } else {
        Vec::new()
    };
    let letters = dead::table(name.dead()).filter(dead::message_id.eq_any(ids));
    let letters: Vec<(i64, Uuid)> = letters
        .select((dead::sequence, dead::message_id))
        .load(conn)?;
    let letter = |(sequence, message_id)| LetterId {
        sequence: Sequence(sequence),
        message_id,
    };
    let letters: Vec<LetterId> = letters.into_iter().map(letter).collect();
    let discarded = discard(conn, name, &letters, operator)?;
    // The digest stays: by it, the same key enqueued again is the same message.
    let entries = update(ledger::table(name.ledger()))
        .filter(ledger::message_id.eq_any(ids))
        .set((
            ledger::payload.eq(None::<Json<'_>>),
            ledger::headers.eq(None::<Json<'_>>),
            ledger::error.eq(case_when(
                text_or(ledger::reason, "").eq_any(ended_by_hand()),
                ledger::error,
            )),
            ledger::response.eq(None::<String>),
        ))
        .execute(conn)?;
    let attempts = update(attempt::table(name.attempt()))
        .filter(attempt::message_id.eq_any(ids))
        .set((
            attempt::error.eq(None::<String>),
            attempt::response.eq(None::<String>),
        ))
        .execute(conn)?;
    let events = match has_feeds(conn, name)? {
        true => update(feed_event::table(name.feed_event()))
            .filter(feed_event::message_id.eq_any(ids))
            .filter(feed_event::payload.is_not_null())
            .set((
                feed_event::payload.eq(None::<Json<'_>>),
                feed_event::headers.eq(None::<Json<'_>>),
            ))
            .execute(conn)?,
        false => 0,
    };
    Ok(Expunged {
        feed_events: events as u64,
        cancelled: cancelled as u64,
        discarded: discarded as u64,
        // Without those of the rows just cancelled, which never had content.
        ledger_entries: entries.saturating_sub(cancelled) as u64,
        attempts: attempts as u64,
        left: left.into_iter().collect(),
    })
}

/// Checks that this role may expunge messages. Only the owner has all of these rights.
pub(crate) fn check_rights(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<(), DatabaseError> {
    let mut needed = vec![
        (name.outbox(), "DELETE"),
        (name.dead(), "DELETE"),
        (name.attempt(), "UPDATE"),
        (name.ledger(), "UPDATE"),
    ];
    if has_feeds(conn, name)? {
        needed.push((name.feed_event(), "UPDATE"));
    }
    need(conn, name, "expunge messages", &needed)
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::sql::tests::Outbox;

    /// R75.
    #[test]
    fn a_ce_subject_is_found_however_its_json_is_written() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let is_of = |conn: &mut PgConnection, headers: &str, subject: &str| {
            let headers = headers.replace('\'', "''");
            conn.batch_execute(&format!(
                "TRUNCATE {table}; INSERT INTO {table} (topic, payload, headers) VALUES ('order.paid', '1', '{headers}')",
                table = name.outbox()
            ))
            .expect("a message");
            let found = live(conn, name, &Subject::ce_subject(subject), None).expect("found");
            found.len() == 1
        };
        for (headers, subject) in [
            (r#"{"ce-subject":"order/7"}"#, "order/7"),
            (r#"{"x": "1", "CE-Subject" : "order\/7"}"#, "order/7"),
            (r#"{"ce-subject":"order\u002f7"}"#, "order/7"),
            (r#"{"ce-subject":"K\u00f6ln \ud83d\ude00"}"#, "Köln 😀"),
            (r#"{"ce-subject":"K\u00F6ln \uD83D\uDE00"}"#, "Köln 😀"),
            (r#"{"ce-subject":"Köln 😀"}"#, "Köln 😀"),
            (r#"{"ce-subject":"a \"b\" \\ (.*)'"}"#, r#"a "b" \ (.*)'"#),
            (r#"{"x": "\u0000 \ud800", "ce-subject":"a"}"#, "a"),
        ] {
            assert!(is_of(conn, headers, subject), "{headers}");
        }
        for (headers, subject) in [
            (r#"{"ce-subject":"order/77"}"#, "order/7"),
            (r#"{"ce-subject":"Order/7"}"#, "order/7"),
            (r#"{"ce-subject":"abc"}"#, "a.c"),
            (r#"{"x-ce-subject":"a"}"#, "a"),
            (r#"{"x": "\"ce-subject\":\"a\""}"#, "a"),
            (r#"{"x": "ce-subject", "y": "a"}"#, "a"),
            ("{}", "a"),
        ] {
            assert!(!is_of(conn, headers, subject), "{headers}");
        }
    }
}

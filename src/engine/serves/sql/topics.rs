//! What is recorded of topics: those that relays have served, those that the application has declared, and those that
//! ended without a subscriber.

use std::time::Duration;

use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, QueryDsl, Queryable, RunQueryDsl, Selectable,
    SelectableHelper,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, delete, insert_into, update};

use crate::engine::serves::routes::{Serves, matches_any};
use crate::name::OutboxName;
use crate::own_topics::is_own;
use crate::schema::rfc3339::Rfc3339;
use crate::sql::functions::{On, clock_timestamp};
use crate::sql::looking::looking_briefly;
use crate::sql::table::topic;

/// The kind of the topics that an application has declared.
pub(crate) const DECLARED: &str = "declared";
/// The kind of the topics whose messages have ended without a subscriber.
pub(crate) const NO_SUBSCRIBER: &str = "no_subscriber";

/// What decides the fate of messages: relays read no others, of which there may be any number.
pub(crate) fn is_recorded() -> On<'static, topic::table> {
    Box::new(topic::kind.eq_any(["route", "handler", DECLARED]))
}

/// How long a look into the ledger may take.
pub(crate) const PATIENCE: Duration = Duration::from_millis(250);

/// Topics that are recorded.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, serde::Serialize)]
#[diesel(table_name = topic)]
#[non_exhaustive]
pub struct KnownTopic {
    /// The pattern of a route, the topic of a handler, or the declared pattern.
    pub pattern: String,
    /// `route` or `handler`: what a relay has served. `declared`: by the application. `no_subscriber`: messages of the topic
    /// have ended without a subscriber, and it never had one.
    pub kind: String,
    /// When a relay that serves them was first started, or when they were first declared or seen, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub first_served: String,
    /// When a relay that serves them was last started, or when they were last declared or seen, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub last_served: String,
}

impl KnownTopic {
    /// Whether a relay has served the topics.
    pub(crate) fn is_served(&self) -> bool {
        self.kind != DECLARED && self.kind != NO_SUBSCRIBER
    }
}

/// The recorded patterns that decide what becomes of a message that nobody wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Patterns {
    /// What a route or a handler of any relay has ever served.
    pub(crate) served: Vec<String>,
    /// What the application has declared. Empty: every topic is good.
    pub(crate) declared: Vec<String>,
}

impl Patterns {
    pub(crate) fn of<'a>(known: impl IntoIterator<Item = &'a KnownTopic>) -> Self {
        let mut patterns = Self::default();
        for one in known {
            if one.is_served() {
                patterns.served.push(one.pattern.clone());
            } else if one.kind == DECLARED {
                patterns.declared.push(one.pattern.clone());
            }
        }
        patterns
    }

    /// Whether a relay has ever served the topic.
    pub(crate) fn has_served(&self, topic: &str) -> bool {
        matches_any(&self.served, topic)
    }

    /// Whether topics are declared, and this one is not. The relay's own events need no declaration.
    pub(crate) fn is_undeclared(&self, topic: &str) -> bool {
        !self.declared.is_empty() && !is_own(topic) && !matches_any(&self.declared, topic)
    }

    /// Whether a message of this topic that no active relay serves, and that nobody wants, waits.
    pub(crate) fn keep(&self, topic: &str) -> bool {
        self.has_served(topic) || self.is_undeclared(topic)
    }
}

/// Records what a relay serves and declares. `only_declared`: the relay has served nothing yet. Waits for no row that a
/// person has locked, because the registration of a lease would wait with it: such a row keeps its time.
pub(crate) fn record(
    conn: &mut PgConnection,
    name: &OutboxName,
    serves: &Serves,
    only_declared: bool,
) -> QueryResult<()> {
    let mut topics = serves.topics();
    topics.retain(|(_, kind)| !only_declared || *kind == DECLARED);
    if topics.is_empty() {
        return Ok(());
    }
    let rows = || topic::table(name.topic());
    let recorded = rows().filter(is_recorded());
    let known: Vec<(String, String)> = recorded.select((topic::pattern, topic::kind)).load(conn)?;
    let is_known =
        |pattern: &str, kind: &str| known.iter().any(|one| one.0 == pattern && one.1 == kind);
    for (pattern, kind) in topics {
        if !is_known(&pattern, kind) {
            add(conn, name, &pattern, kind)?;
            continue;
        }
        let row = rows().filter(topic::pattern.eq(pattern.clone()));
        let row = row.filter(topic::kind.eq(kind)).select(topic::pattern);
        let free: Vec<String> = row.for_no_key_update().skip_locked().load(conn)?;
        update(rows())
            .filter(topic::pattern.eq_any(free))
            .filter(topic::kind.eq(kind))
            .set(topic::last_served.eq(clock_timestamp()))
            .execute(conn)?;
    }
    Ok(())
}

pub(crate) fn add(
    conn: &mut PgConnection,
    name: &OutboxName,
    pattern: &str,
    kind: &str,
) -> QueryResult<usize> {
    insert_into(topic::table(name.topic()))
        .values((topic::pattern.eq(pattern), topic::kind.eq(kind)))
        .on_conflict_do_nothing()
        .execute(conn)
}

/// Declares topics. Returns how many are new.
pub(crate) fn declare(
    conn: &mut PgConnection,
    name: &OutboxName,
    patterns: &[String],
) -> QueryResult<usize> {
    let mut new = 0;
    for pattern in patterns {
        new += add(conn, name, pattern, DECLARED)?;
    }
    Ok(new)
}

/// The recorded patterns.
pub(crate) fn patterns(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Patterns> {
    Ok(Patterns::of(&known(conn, name)?))
}

/// What relays have served and what is declared.
pub(crate) fn known(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<KnownTopic>> {
    topic::table(name.topic())
        .filter(is_recorded())
        .select(KnownTopic::as_select())
        .load(conn)
}

pub(crate) fn list(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<KnownTopic>> {
    topic::table(name.topic())
        .order((topic::pattern, topic::kind))
        .select(KnownTopic::as_select())
        .load(conn)
}

/// Forgets a pattern, of this kind or of any. Returns the number of forgotten rows.
pub(crate) fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    pattern: &str,
    kind: Option<&str>,
) -> QueryResult<usize> {
    let row = delete(topic::table(name.topic())).filter(topic::pattern.eq(pattern.to_owned()));
    match kind {
        Some(kind) => row.filter(topic::kind.eq(kind.to_owned())).execute(conn),
        None => row.execute(conn),
    }
}

/// What to do about waiting messages of a topic that is not declared, as an imperative.
pub(crate) fn correct_or_declare(topic: &str) -> String {
    format!(
        "correct the topic where messages are enqueued, or run `diesel-outbox topics declare '{topic}' --with-waiting`, which ends those that wait as no_subscriber"
    )
}

/// ` (did you mean "order.*"?)`, or nothing.
pub(crate) fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |nearest| {
        format!(" (did you mean {nearest:?}?)")
    })
}

/// Topics whose messages wait because the topic is not declared, although somebody has a pattern for
/// it; the first ten. `None`: the outbox is too large to look.
pub(crate) fn undeclared(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Option<Vec<(String, i64)>>> {
    use diesel::dsl::count_star;

    use crate::sql::table::outbox;
    use crate::status::ReasonCode;

    let waiting = outbox::table(name.outbox())
        .filter(
            outbox::last_error_code
                .eq(ReasonCode::UnknownTopic.as_str())
                .and(outbox::locked_by.is_null()),
        )
        .group_by(outbox::topic)
        .select((outbox::topic, count_star()))
        .order(outbox::topic)
        .limit(10);
    looking_briefly(conn, PATIENCE, |conn| waiting.load(conn))
}

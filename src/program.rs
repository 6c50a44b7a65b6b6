//! What the program `diesel-outbox`, its pages and the laboratory use. The feature `program` is for these packages only.
//!
//! **Outside of semantic versioning**: any release may change or remove an item of this module. The packages of one
//! release need each other's exact version.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::result::QueryResult;
use metrics::{counter, gauge};
use uuid::Uuid;

use crate::config::{Auth, Config, ConfigError, Destination, Proxy, Route};
use crate::endpoints::EndpointError;
use crate::endpoints::sql::rows;
use crate::endpoints::sql::served::Unserved;
use crate::engine::host::{RelayHandle, Stats};
use crate::error::DatabaseError;
#[cfg(feature = "http")]
use crate::http::HttpDispatcher;
use crate::metrics::{LOG_DROPPED, READY};
use crate::name::OutboxName;
use crate::operate::bulk::Bulk;
use crate::operate::sql::audit;
use crate::operate::sql::place::Place;
use crate::operate::sql::selection::Selection;
use crate::operate::waiting::Note;
use crate::outbox::sql::waiting::MessageRef;
use crate::sql::pinned::pinned;
use crate::status::ReasonCode;

pub use crate::builder::check as check_relay;
pub use crate::config::admin::Admin;
pub use crate::config::destination::PolicyOption;
pub use crate::config::environment::relevant_variables;
pub use crate::config::log_format::LogFormat;
pub use crate::config::secret::parse_secrets;
pub use crate::config::settings::{SETTINGS, Setting};
pub use crate::config::text::{parse_duration, wrong_pattern};
pub use crate::doctor::diagnose::{Finding, Severity, diagnose};
pub use crate::doctor::migrations::missing_rights;
pub use crate::doctor::sql::rights::printed as roles_sql;
pub use crate::endpoints::public_error::{PUBLIC_ERRORS, TOKEN_WORDS};
pub use crate::endpoints::sql::served::RefusedEndpoint;
pub use crate::endpoints::sql::subscribers::Freed;
pub use crate::engine::serves::sql::topics::KnownTopic;
#[cfg(feature = "http")]
pub use crate::feed::feeds::as_batch;
pub use crate::feed::feeds::{FeedAccess, FeedQuery, Feeds, FoundPage};
pub use crate::feed::page::{After, Discontinued, FeedEvent, FeedPage};
pub use crate::feed::sql::read::FeedRow;
pub use crate::feed::sql::state::{FeedState, ReaderState, WhichFeeds};
pub use crate::operate::acts::endpoint::{
    DISABLE, ENABLE, ENDPOINT_ACTS, EndpointAct, EndpointPreview, RECOVER, REMOVE, SENDING_ACTS,
    Sending, SendingAct, SentMessages, kept_for, rotate, send_again, while_disabled,
};
#[cfg(feature = "http")]
pub use crate::operate::acts::endpoint::{begin_test, begin_verification, refusal};
pub use crate::operate::acts::letters::LetterName;
pub use crate::operate::acts::message::{CANCEL, MessageAct, RESCHEDULE, SETTLE};
pub use crate::operate::acts::pause::{OPERATOR, PauseAnswer, Pausing, check_pause_reason, resume};
pub use crate::operate::acts::token::make_feed_token;
pub use crate::operate::acts::{ACTS, ActError, Choice, ManyAct, Performed, Preview, Words};
pub use crate::operate::chosen::{Chosen, WrongChoice, time as parse_time};
pub use crate::operate::counts::DepthGauges;
pub use crate::operate::dead_letters::{
    dead_groups, dead_letters, dead_letters_at, dead_letters_of,
};
pub use crate::operate::depths::activity;
pub use crate::operate::due::{DueTopic, count_due, due, work};
#[cfg(feature = "http")]
pub use crate::operate::endpoints::forward::Forward;
pub use crate::operate::keys::{blocked_keys, leases, refused_destinations};
pub use crate::operate::messages::{
    for_each_payload, history, history_of, key_messages, ledger, message,
};
pub use crate::operate::overview::{Overview, exact_overview, overview};
pub use crate::operate::server::{Connection, WakeUp, connect, server_version, wake_up};
pub use crate::operate::sql::activity::{Activity, Rates};
pub use crate::operate::sql::audit::{
    Act, Cost, OperatorAct, SEARCH_UNIT, hold_budget, is_budget_spent, may_make_many,
};
pub use crate::operate::sql::blocked::BlockedKey;
pub use crate::operate::sql::dead::DeadGroup;
pub use crate::operate::sql::history::HistoryEntry;
pub use crate::operate::sql::messages::{KeptIn, MessageRecord};
pub use crate::operate::sql::payloads::StoredPayload;
pub use crate::operate::sql::requests::{Keyed, Known};
pub use crate::operate::sql::status::{LeaseRow, Work};
pub use crate::operate::sql::troubles::{StatusCount, TroubleCount};
pub use crate::operate::states::{DestinationState, destinations as destination_states, held};
pub use crate::operate::tail::{Tail, TailFilter};
pub use crate::operate::topics::{
    LiveTopic, TopicChange, TopicError, change_topics, freed_by, known_topics, topics,
};
pub use crate::operate::waiting::{audited, wait_reasons_of, waiting};
pub use crate::outbox::sql::searched::Searched;
pub use crate::outbox::sql::seek::MessageKey;
pub use crate::setup::sql::migrate::{
    EndpointTables, migrate, printed as migration_sql, revert as revert_migrations,
};
pub use crate::sql::brief::limited;

/// What was asked about endpoints. An outbox without their tables has none.
///
/// # Errors
/// Any other error.
pub fn or_none<T: Default>(found: Result<T, EndpointError>) -> Result<T, EndpointError> {
    match found {
        Err(EndpointError::NoTables(_)) => Ok(T::default()),
        found => found,
    }
}

/// The settings of the admin page.
pub fn admin(config: &Config) -> &Admin {
    &config.admin
}

/// The format of log lines.
pub fn log_format(config: &Config) -> LogFormat {
    config.log_format
}

/// The settings on one line, without secrets.
pub fn summary(config: &Config) -> String {
    config.summary()
}

/// Sets a setting, or reads the file with its value, as the environment does.
///
/// # Errors
/// A [`ConfigError`] names the variable or the file.
pub fn set_variable(config: &mut Config, variable: &str, value: &str) -> Result<(), ConfigError> {
    config.set_variable(variable, value)
}

/// The named destinations, followed by the default destination if `OUTBOX_URL` is set.
pub fn all_destinations(config: &Config) -> Vec<Destination> {
    config.all_destinations()
}

/// All routes, and those of the default destination.
pub fn all_routes(config: &Config) -> Vec<Route> {
    config.all_routes()
}

/// The proxy of a destination.
///
/// # Errors
/// A [`ConfigError`] if the proxy has a user without a password, or the like.
pub fn proxy_of(config: &Config, destination: &Destination) -> Result<Proxy, ConfigError> {
    config.proxy_of(destination)
}

/// Whether the relay may have no other destinations than endpoints.
pub fn expects_endpoints(config: &Config) -> bool {
    config.expects_endpoints()
}

/// The URL of a destination without secrets.
pub fn shown_url(destination: &Destination) -> String {
    destination.shown_url()
}

/// The names of the destinations of messages with this topic and `destination`: the named destination or, if
/// `destination` is empty, the destinations that the topic is routed to. Handlers in the process are not included.
#[cfg(feature = "http")]
pub fn destinations_of<'a>(
    dispatcher: &'a HttpDispatcher,
    topic: &str,
    destination: &str,
) -> Vec<&'a str> {
    dispatcher.destinations_of(topic, destination)
}

/// What may be shown of authentication: the type, and the token URL and the client id, or the name of the header.
pub fn shown_auth(auth: &Auth) -> Vec<(&'static str, String)> {
    auth.shown()
}

/// The selection of the next page of a list: only what stands behind this place.
pub fn behind(selection: Selection, place: impl Into<Option<Place>>) -> Selection {
    selection.behind(place)
}

/// What an operator should do about messages that no relay serves, as an imperative: it keeps them. `waiting`: how many
/// wait; 0: not known.
pub fn next_step(why: &Unserved, waiting: i64) -> String {
    why.next_step(waiting)
}

/// The reason code of messages that no relay serves.
pub fn reason_of(why: &Unserved) -> ReasonCode {
    why.code()
}

/// Limits the reference to the message with this id, where several messages have a sequence.
pub fn with_id(which: MessageRef, message_id: Uuid) -> MessageRef {
    which.with_id(message_id)
}

/// The label of the relay that the current thread belongs to.
pub fn label_of_thread() -> Option<String> {
    let thread = std::thread::current();
    let (label, _) = thread.name()?.rsplit_once(" relay-")?;
    Some(label.to_owned())
}

/// Sets the metric that says whether a relay with this label is ready, while it does not run.
pub fn record_ready(config: &Config, label: &str, is_ready: bool) {
    let config = Config {
        label: Some(label.to_owned()),
        ..config.clone()
    };
    gauge!(READY, "outbox" => config.metrics_label()).set(f64::from(u8::from(is_ready)));
}

/// Sets the metric of the lines of the log that this process has dropped since its start.
pub fn record_dropped_lines(count: u64) {
    counter!(LOG_DROPPED).absolute(count);
}

/// What a relay's claims and settles cost since its start.
#[derive(Debug, Clone, Copy)]
pub struct Statements {
    /// Claims that found messages.
    pub claims: u64,
    /// The time that these claims took, in microseconds.
    pub claim_micros: u64,
    /// Statements that settled messages.
    pub settles: u64,
    /// Messages claimed together with the settle of their ordering key's previous message.
    pub continued: u64,
}

/// The statements of a relay.
pub fn statements(stats: &Stats) -> Statements {
    Statements {
        claims: stats.claims,
        claim_micros: stats.claim_micros,
        settles: stats.settles,
        continued: stats.continued,
    }
}

/// Reports a reload that failed, in the relay's health.
pub fn reload_failed(relay: &RelayHandle, error: impl std::fmt::Display) {
    relay.reload_failed(error);
}

/// Reports that the settings are being read again, in the relay's health if that lasts.
pub fn reload_begins(relay: &RelayHandle) {
    relay.reload_begins();
}

/// Records an act of an operator. `target`: on what; for a destination, exactly its name.
///
/// # Errors
/// The database refused or failed.
pub fn audit(
    conn: &mut PgConnection,
    name: &OutboxName,
    note: &Note,
    act: Act,
    target: &str,
) -> QueryResult<()> {
    pinned(conn, name, |conn, name| note.audit(conn, name, act, target))
}

/// The URL and the description of the endpoints among these, by name.
///
/// # Errors
/// The database refused or failed.
pub fn called(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &[&str],
) -> Result<HashMap<String, (String, Option<String>)>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        rows::called(conn, name, names)
    })?)
}

/// The note of a customer, whose tenant's budget pays for the act.
pub fn note_of_tenant(who: &str, why: &str, tenant: Uuid, cost: Cost) -> Note {
    Note::new(who, why).spending(tenant, cost)
}

/// A bulk change that gives up searching after this time.
pub fn searching_for(bulk: Bulk<'_>, time: Duration) -> Bulk<'_> {
    bulk.searching_until(Instant::now() + time)
}

/// Acts of operators, latest first, at most `limit`: those whose name, act or target contains the text, ignoring case. Each
/// with its place in the list; `before`: the place where a page begins.
///
/// # Errors
/// A [`DatabaseError`].
pub fn acts(
    conn: &mut PgConnection,
    name: &OutboxName,
    text: &str,
    before: Option<Place>,
    limit: i64,
) -> Result<Vec<(OperatorAct, Place)>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        audit::acts(conn, name, text, before, limit)
    })?)
}

//! Why a live message is not sent yet, and until when. Commands, the page, the library and tests ask here.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;

use diesel::dsl::not;
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Text};
use diesel::{PgConnection, select};

use super::messages::{self, Content, KeptIn, MessageRecord};
use crate::config::Rate;
use crate::endpoints::sql::rows::is_unverified;
use crate::endpoints::sql::served::{Served, Unserved, served};
use crate::endpoints::sql::silent::{SilentRelay, silent};
use crate::engine::lease::sql::lease::{is_not_over, leases};
use crate::engine::send::sql::pause::{self, BREAKER_OPEN, Pausable};
use crate::hand::Hand;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::schema::rfc3339::rfc3339;
use crate::schema::values::{from_micros, to_micros};
use crate::sql::absent::all_endpoints;
use crate::sql::functions::{On, all_of, clock_timestamp, given};
use crate::sql::statement::{unprepared, unprepared_statement};
use crate::sql::table::{endpoint, lease, outbox};
use crate::status::ReasonCode;
use crate::words::words;

/// Why a live message is not sent yet, and until when. The text of each reason begins with fixed words, such as
/// `behind 17 of its key (retrying)`.
///
/// ```
/// use diesel_outbox::admin::{Blocker, WaitReason};
/// use diesel_outbox::Sequence;
///
/// let reason = WaitReason::BehindKey { sequence: Sequence(17), blocker: Blocker::Retrying };
/// assert_eq!(reason.to_string(), "behind 17 of its key (retrying)");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitReason {
    /// The message is due later.
    NotDue {
        /// When the message is due, RFC 3339. `None`: never, until someone reschedules it.
        until: Option<String>,
    },
    /// An earlier message has the same ordering key.
    BehindKey {
        /// The first message of the key.
        sequence: Sequence,
        /// What the first message of the key waits for.
        blocker: Blocker,
    },
    /// The topic is paused.
    TopicPaused {
        /// Why the topic is paused.
        reason: String,
        /// The end of the pause, RFC 3339. `None`: until someone resumes the topic.
        until: Option<String>,
    },
    /// The destination is paused.
    DestinationPaused {
        /// The name of the destination.
        destination: String,
        /// Whose pause it is.
        by: Hand,
        /// Why the destination is paused.
        reason: String,
        /// The end of the pause, RFC 3339. `None`: until someone resumes the destination.
        until: Option<String>,
    },
    /// The endpoint is disabled.
    DestinationDisabled {
        /// The name of the destination.
        destination: String,
        /// Who has disabled the destination.
        by: Hand,
        /// Why the destination is disabled.
        reason: String,
    },
    /// The endpoint of the endpoint has not shown yet that it wants messages.
    NotVerified {
        /// The name of the destination.
        destination: String,
        /// Why the last try failed.
        error: Option<String>,
    },
    /// The circuit breaker of the destination is open.
    BreakerOpen {
        /// The name of the destination.
        destination: String,
        /// When the breaker lets a message through, RFC 3339.
        until: Option<String>,
    },
    /// The message is due, and a relay takes the message as soon as the destination has room.
    NoRoom {
        /// The name of the destination; empty if the relay decides it when it claims the message.
        destination: String,
        /// The rate limit of the destination, such as `1/h`.
        rate: Option<String>,
    },
    /// The relay could not send the message because of its proxy or its machine. It tries again on its own.
    Held {
        /// The name of the destination; empty if the relay decides it when it claims the message.
        destination: String,
        /// `PROXY` or `SHORTAGE`.
        reason: ReasonCode,
    },
    /// Relays are active, but none serves the message.
    NotServed {
        /// Why no relay serves the message.
        why: Unserved,
    },
    /// No relay is active, or only silent ones serve the message.
    NoRelay {
        /// A relay that runs with `OUTBOX_ENABLED=false`, if there is one.
        disabled: Option<String>,
        /// A relay that serves the message, and whose heartbeat has stopped.
        silent: Option<SilentRelay>,
    },
    /// The message has expired, and is dead-lettered (`EXPIRED`) once nothing else holds it up.
    Expired {
        /// What holds up the message.
        held_by: Box<WaitReason>,
    },
    /// A relay is sending the message, or holds it until the rate limit of the destination allows the send.
    Sending {
        /// When the relay claimed the message, RFC 3339.
        since: String,
        /// Whether the relay's lease has expired: another relay will take the message over.
        has_expired: bool,
        /// The relay, if its heartbeat has stopped: another relay will take the message over once the lease has expired.
        silent: Option<SilentRelay>,
        /// The rate limit of the destination, such as `1/h`.
        rate: Option<String>,
    },
}

words! {
    setting:
    /// The state of a message that blocks its ordering key.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Blocker {
        /// The message is due.
        Due = "due",
        /// The message waits for its next attempt.
        Retrying = "retrying",
        /// The message is a dead letter, until someone requeues or discards it.
        Dead = "dead",
        /// The message is due later.
        NotDue = "not due",
        /// A relay is sending the message.
        Sending = "sending",
    }
}

impl WaitReason {
    /// The kind of the reason, as one word: `not_due`, `behind_key`, `topic_paused`, `destination_paused`,
    /// `destination_disabled`, `not_verified`, `breaker_open`, `no_room`, `held`, `not_served`, `no_relay`, `expired` or `sending`.
    ///
    /// ```
    /// let reason = diesel_outbox::admin::WaitReason::NoRelay { disabled: None, silent: None };
    /// assert_eq!(reason.as_str(), "no_relay");
    /// ```
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::NotDue { .. } => "not_due",
            Self::BehindKey { .. } => "behind_key",
            Self::TopicPaused { .. } => "topic_paused",
            Self::DestinationPaused { .. } => "destination_paused",
            Self::DestinationDisabled { .. } => "destination_disabled",
            Self::NotVerified { .. } => "not_verified",
            Self::BreakerOpen { .. } => "breaker_open",
            Self::NoRoom { .. } => "no_room",
            Self::Held { .. } => "held",
            Self::NotServed { .. } => "not_served",
            Self::NoRelay { .. } => "no_relay",
            Self::Expired { .. } => "expired",
            Self::Sending { .. } => "sending",
        }
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pause = |until: &Option<String>| match until {
            Some(until) => format!("until {until}"),
            None => "until resumed".to_owned(),
        };
        match self {
            Self::NotDue { until: Some(until) } => write!(f, "not due until {until}"),
            Self::NotDue { until: None } => f.write_str("not due until rescheduled"),
            Self::BehindKey { sequence, blocker } => {
                write!(f, "behind {sequence} of its key ({blocker})")
            }
            Self::TopicPaused { reason, until } => {
                write!(f, "topic paused {}: {reason}", pause(until))
            }
            Self::DestinationPaused {
                destination,
                reason,
                until,
                ..
            } => {
                let until = pause(until);
                write!(f, "destination paused {until}: {destination}: {reason}")
            }
            Self::DestinationDisabled {
                destination,
                reason,
                ..
            } => write!(f, "destination disabled: {destination}: {reason}"),
            Self::NotVerified {
                destination,
                error: None,
            } => write!(f, "destination not verified: {destination}"),
            Self::NotVerified {
                destination,
                error: Some(error),
            } => write!(f, "destination not verified: {destination}: {error}"),
            Self::BreakerOpen { destination, until } => {
                write!(
                    f,
                    "destination breaker open {}: {destination}",
                    pause(until)
                )
            }
            Self::NoRoom { destination, .. } if destination.is_empty() => {
                f.write_str("destination no room")
            }
            Self::NoRoom {
                destination,
                rate: None,
            } => write!(f, "destination no room: {destination}"),
            Self::NoRoom {
                destination,
                rate: Some(rate),
            } => write!(
                f,
                "destination no room: {destination}: its rate limit is {rate}"
            ),
            Self::Held {
                destination,
                reason,
            } => {
                let what = match reason {
                    ReasonCode::Proxy => "the relay's proxy",
                    _ => "the shortage of the relay's machine",
                };
                write!(
                    f,
                    "held: {reason}: {destination}: mend {what}; the relay tries again on its own"
                )
            }
            Self::NotServed { why } => {
                write!(f, "no relay serves it: {why}; {}", why.next_step(1))
            }
            Self::NoRelay {
                silent: Some(silent),
                ..
            } => write!(f, "no relay: {silent}"),
            Self::NoRelay { disabled: None, .. } => f.write_str("no relay"),
            Self::NoRelay {
                disabled: Some(relay),
                ..
            } => write!(f, "no relay: OUTBOX_ENABLED is false at {relay}"),
            Self::Expired { held_by } => write!(
                f,
                "{held_by}; it has expired, and is dead-lettered (EXPIRED) after that"
            ),
            Self::Sending {
                since,
                silent: Some(silent),
                ..
            } => write!(f, "sending since {since}, but {silent}"),
            Self::Sending {
                since,
                has_expired: false,
                rate: None,
                ..
            } => write!(f, "sending since {since}"),
            Self::Sending {
                since,
                has_expired: false,
                rate: Some(rate),
                ..
            } => write!(
                f,
                "sending since {since}, or waiting for the rate limit of its destination: {rate}"
            ),
            Self::Sending {
                since,
                has_expired: true,
                ..
            } => write!(
                f,
                "sending since {since}, by a relay whose lease has expired"
            ),
        }
    }
}

/// A row of `outbox_pause` that is in force.
struct PauseFacts {
    by: Hand,
    reason: String,
    /// The end, in microseconds since 1970. `None`: until somebody ends the pause.
    until: Option<i64>,
}

/// What holds up every message of a topic and destination.
struct OfLane {
    reason: WaitReason,
    /// Until when, in microseconds since 1970, if somebody must change that or has set an end. `None`: not known.
    until: Option<i64>,
}

/// What the reason of a message depends on.
pub(crate) struct ReasonFacts<'a> {
    pub(crate) topic: &'a str,
    pub(crate) destination: &'a str,
    /// The lease that holds the message, and since when, RFC 3339.
    pub(crate) lease: Option<i64>,
    pub(crate) since: Option<&'a str>,
    /// When the message is due, in microseconds since 1970 and as RFC 3339.
    pub(crate) due: i64,
    pub(crate) available_at: Option<&'a str>,
    pub(crate) has_expired: bool,
    /// Why the last attempt failed.
    pub(crate) failed: Option<&'a str>,
    /// The message that blocks the key.
    pub(crate) first: Option<(Sequence, Blocker)>,
}

/// The facts that decide why messages wait.
#[derive(Default)]
pub(crate) struct WhyFacts {
    /// Microseconds since 1970.
    now: i64,
    leases: HashSet<i64>,
    /// `None`: a test's relay, which serves everything and ignores pauses.
    served: Option<Served>,
    pauses: HashMap<(String, String), PauseFacts>,
    /// The endpoints to which nothing is sent, and why.
    stopped: HashMap<String, WaitReason>,
    /// The rate limits of endpoints.
    rates: HashMap<String, String>,
    /// Of the leases, those of silent relays.
    silent: HashMap<i64, SilentRelay>,
}

impl WhyFacts {
    /// `names`: the destinations of the messages in question. `only`: the destination of all of them.
    pub(crate) fn load(
        conn: &mut PgConnection,
        name: &OutboxName,
        names: &BTreeSet<&str>,
        only: Option<&str>,
    ) -> QueryResult<Self> {
        let facts = Self::new(
            to_micros(select(clock_timestamp()).get_result(conn)?),
            valid_leases(conn, name)?,
            served(conn, name, names)?,
            pause::of_each(conn, name, only)?,
            stopped(conn, name, only)?,
            rates(conn, name, only)?,
        );
        let silent = silent(conn, name)?;
        Ok(Self { silent, ..facts })
    }

    pub(crate) fn new(
        now: i64,
        leases: HashSet<i64>,
        served: Served,
        pauses: Vec<pause::Paused>,
        stopped: HashMap<String, WaitReason>,
        rates: HashMap<String, String>,
    ) -> Self {
        let at = |left: std::time::Duration| {
            let micros = i64::try_from(left.as_micros()).unwrap_or(i64::MAX);
            now.saturating_add(micros)
        };
        // Of the pauses of several hands, the one that ends last.
        let mut pauses: Vec<_> = pauses.into_iter().filter(pause::Paused::is_on).collect();
        pauses.sort_by_key(pause::Paused::length);
        let pauses = pauses.into_iter().map(|row| {
            let until = row.left.map(at);
            let (by, reason) = (row.by, row.reason);
            ((row.kind, row.name), PauseFacts { by, reason, until })
        });
        Self {
            now,
            leases,
            served: Some(served),
            pauses: pauses.collect(),
            stopped,
            rates,
            silent: HashMap::new(),
        }
    }

    /// The facts of a test's transaction, in which no relay runs but the test's own.
    fn of_test(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Self> {
        Ok(Self {
            now: to_micros(select(clock_timestamp()).get_result(conn)?),
            leases: valid_leases(conn, name)?,
            ..Self::default()
        })
    }

    /// The destination of a message: the destination that it names, or the only one of its topic's route.
    pub(crate) fn goes_to<'a>(&'a self, topic: &str, destination: &'a str) -> &'a str {
        if !destination.is_empty() {
            return destination;
        }
        let served = self.served.as_ref();
        served
            .and_then(|served| served.only_destination(topic))
            .unwrap_or_default()
    }

    /// The rate limit of a destination.
    fn rate_of(&self, destination: &str) -> Option<String> {
        let registered = self.rates.get(destination).map(String::as_str);
        let rate = registered.or_else(|| self.served.as_ref()?.rate_of(destination));
        rate.map(str::to_owned)
    }

    /// What holds up every message of this topic and destination.
    pub(super) fn of_lane(&self, topic: &str, destination: &str) -> Option<WaitReason> {
        self.lane(topic, destination).map(|held| held.reason)
    }

    fn lane(&self, topic: &str, destination: &str) -> Option<OfLane> {
        let unknown = |reason| OfLane {
            reason,
            until: None,
        };
        let lasting = |reason, until: Option<i64>| OfLane {
            reason,
            until: Some(until.unwrap_or(i64::MAX)),
        };
        let shown = |until: &Option<i64>| until.map(|until| rfc3339(from_micros(until)));
        let pause_of = |kind: Pausable, name: &str| {
            self.pauses
                .get(&(kind.as_str().to_owned(), name.to_owned()))
        };
        if let Some(PauseFacts { reason, until, .. }) = pause_of(Pausable::Topic, topic) {
            let why = WaitReason::TopicPaused {
                reason: reason.clone(),
                until: shown(until),
            };
            return Some(lasting(why, *until));
        }
        let goes_to = self.goes_to(topic, destination);
        if let Some(PauseFacts { by, reason, until }) = pause_of(Pausable::Destination, goes_to) {
            let (destination, end) = (goes_to.to_owned(), shown(until));
            let why = match reason == BREAKER_OPEN {
                true => WaitReason::BreakerOpen {
                    destination,
                    until: end,
                },
                false => WaitReason::DestinationPaused {
                    destination,
                    by: *by,
                    reason: reason.clone(),
                    until: end,
                },
            };
            return Some(lasting(why, *until));
        }
        if let Some(reason) = self.stopped.get(destination) {
            return Some(match reason {
                WaitReason::DestinationDisabled { .. } => lasting(reason.clone(), None),
                _ => unknown(reason.clone()),
            });
        }
        let served = self.served.as_ref()?;
        if served.is_empty() {
            return Some(unknown(WaitReason::NoRelay {
                disabled: served.disabled().map(str::to_owned),
                silent: None,
            }));
        }
        if let Some(why) = served.unserved(topic, destination) {
            return Some(unknown(WaitReason::NotServed { why }));
        }
        let silent = served.silent(topic, destination, &self.silent)?;
        Some(unknown(WaitReason::NoRelay {
            disabled: None,
            silent: Some(silent.clone()),
        }))
    }

    /// Why this live message waits; `first` is the message that blocks its key.
    fn of(&self, record: &MessageRecord, first: Option<(Sequence, Blocker)>) -> WaitReason {
        let now = rfc3339(from_micros(self.now));
        self.reason(&ReasonFacts {
            topic: &record.topic,
            destination: &record.destination,
            lease: record.locked_by,
            since: record.locked_at.as_deref(),
            due: record.place().micros,
            available_at: record.available_at.as_deref(),
            has_expired: record.expires_at.as_ref().is_some_and(|at| *at <= now),
            failed: record.reason.as_deref(),
            first,
        })
    }

    pub(crate) fn reason(&self, message: &ReasonFacts<'_>) -> WaitReason {
        if let Some(lease) = message.lease {
            return WaitReason::Sending {
                since: message.since.unwrap_or_default().to_owned(),
                has_expired: !self.leases.contains(&lease),
                silent: self.silent.get(&lease).cloned(),
                rate: self.rate_of(self.goes_to(message.topic, message.destination)),
            };
        }
        let is_unknown = message.failed == Some(ReasonCode::UnknownTopic.as_str());
        if let (true, Some(served)) = (is_unknown, &self.served)
            && served.patterns().is_undeclared(message.topic)
        {
            return WaitReason::NotServed {
                why: served.unknown(message.topic),
            };
        }
        if message.due > self.now {
            let lane = self.lane(message.topic, message.destination);
            // What lasts longer would be the reason then.
            if let Some(held) = lane.filter(|held| held.until > Some(message.due)) {
                return held.reason;
            }
            let until = message.available_at.filter(|_| message.due != i64::MAX);
            let until = until.map(str::to_owned);
            return WaitReason::NotDue { until };
        }
        let behind = |(sequence, blocker)| WaitReason::BehindKey { sequence, blocker };
        let of_key = message.first.map(behind);
        let held_by = of_key.or_else(|| self.of_lane(message.topic, message.destination));
        match held_by {
            Some(held_by) if message.has_expired => WaitReason::Expired {
                held_by: Box::new(held_by),
            },
            Some(held_by) => held_by,
            None => self.of_free(message),
        }
    }

    /// Why a message waits that a relay may claim now.
    fn of_free(&self, message: &ReasonFacts<'_>) -> WaitReason {
        let destination = self.goes_to(message.topic, message.destination).to_owned();
        let reason = message.failed.and_then(|code| code.parse().ok());
        match reason {
            Some(reason @ (ReasonCode::Proxy | ReasonCode::Shortage)) => WaitReason::Held {
                destination,
                reason,
            },
            _ => WaitReason::NoRoom {
                rate: self.rate_of(&destination),
                destination,
            },
        }
    }

    fn of_all(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        records: &[MessageRecord],
    ) -> QueryResult<Vec<Option<WaitReason>>> {
        let first = self.first_of_keys(conn, name, records)?;
        let is_live = |record: &&MessageRecord| record.kept_in == KeptIn::Live;
        let reason = |record: &MessageRecord| {
            Some(record)
                .filter(is_live)
                .map(|record| self.of(record, first.get(&record.sequence.0).copied()))
        };
        Ok(records.iter().map(reason).collect())
    }

    /// The first message of the key of each keyed message, unless it is the message itself.
    ///
    /// Text: subqueries for each row (LATERAL). Each is a probe of an index: the same message would block a claim.
    fn first_of_keys(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        records: &[MessageRecord],
    ) -> QueryResult<HashMap<i64, (Sequence, Blocker)>> {
        let mut keyed = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for record in records {
            let Some(key) = record.ordering_key.as_deref() else {
                continue;
            };
            keyed.0.push(record.sequence.0);
            keyed.1.push(key);
            keyed.2.push(record.destination.as_str());
            keyed
                .3
                .push(self.goes_to(&record.topic, &record.destination));
            keyed.4.push(record.split_from.unwrap_or(record.sequence).0);
        }
        if keyed.0.is_empty() {
            return Ok(HashMap::new());
        }
        let rows: Vec<(i64, i64, String)> = unprepared_statement(format!(
            "SELECT r.sequence, first.sequence, first.state
               FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bigint[])
                    AS r(sequence, ordering_key, destination, goes_to, place)
              CROSS JOIN LATERAL (
                SELECT b.* FROM unnest(ARRAY[r.destination, '', r.goes_to]) AS of(destination)
                 CROSS JOIN LATERAL (
                    (SELECT o.sequence, coalesce(o.split_from, o.sequence) AS place,
                            CASE WHEN o.locked_by IS NOT NULL THEN 'sending'
                                 WHEN o.attempts > 0 THEN 'retrying'
                                 WHEN o.available_at > clock_timestamp() THEN 'not due'
                                 ELSE 'due' END AS state
                       FROM {outbox} o
                      WHERE o.ordering_key = r.ordering_key AND o.destination = of.destination
                        AND coalesce(o.split_from, o.sequence) < r.place
                      ORDER BY coalesce(o.split_from, o.sequence) LIMIT 1)
                    UNION ALL
                    (SELECT d.sequence, coalesce(d.split_from, d.sequence), 'dead'
                       FROM {dead} d
                      WHERE d.blocks_key AND d.ordering_key = r.ordering_key
                        AND d.named_destination = of.destination
                        AND coalesce(d.split_from, d.sequence) < r.place
                      ORDER BY coalesce(d.split_from, d.sequence) LIMIT 1)) b
                 ORDER BY b.place, b.sequence LIMIT 1) first",
            outbox = name.outbox(),
            dead = name.dead(),
        ))
        .bind::<Array<BigInt>, _>(&keyed.0)
        .bind::<Array<Text>, _>(&keyed.1)
        .bind::<Array<Text>, _>(&keyed.2)
        .bind::<Array<Text>, _>(&keyed.3)
        .bind::<Array<BigInt>, _>(&keyed.4)
        .giving::<(BigInt, BigInt, Text)>()
        .load(conn)?;
        let known = |word: &str| {
            Blocker::read(word)
                .map_err(|error| diesel::result::Error::DeserializationError(error.into()))
        };
        rows.into_iter()
            .map(|(sequence, first, state)| Ok((sequence, (Sequence(first), known(&state)?))))
            .collect()
    }
}

/// Name, whether it is enabled, who has disabled it and why, and why the last verification failed.
type Stopped = (
    String,
    bool,
    (Option<String>, Option<String>),
    Option<String>,
);

/// The endpoints to which nothing is sent, and why; with `only`, of this destination.
pub(crate) fn stopped(
    conn: &mut PgConnection,
    name: &OutboxName,
    only: Option<&str>,
) -> QueryResult<HashMap<String, WaitReason>> {
    let stopped: Vec<Stopped> = all_endpoints(name)
        .filter(not(endpoint::enabled).or(is_unverified()))
        .filter(is_only(only))
        .select((
            endpoint::name,
            endpoint::enabled,
            (endpoint::disabled_by, endpoint::disabled_reason),
            endpoint::verification_error,
        ))
        .load(conn)?;
    let reason = |(name, is_enabled, (by, reason), error): Stopped| {
        let destination = name.clone();
        let reason = match is_enabled {
            true => WaitReason::NotVerified { destination, error },
            false => WaitReason::DestinationDisabled {
                destination,
                by: Hand::of_column(by.as_deref()),
                reason: reason.unwrap_or_default(),
            },
        };
        (name, reason)
    };
    Ok(stopped.into_iter().map(reason).collect())
}

/// The row is this destination, or any.
fn is_only(only: Option<&str>) -> On<'_, endpoint::table> {
    all_of([given(only, |name| endpoint::name.eq(name))])
}

/// The rate limits of endpoints, by name; with `only`, of this destination.
fn rates(
    conn: &mut PgConnection,
    name: &OutboxName,
    only: Option<&str>,
) -> QueryResult<HashMap<String, String>> {
    let limited: Vec<(String, Option<String>, Option<String>)> = all_endpoints(name)
        .filter((endpoint::rate.is_not_null()).or(endpoint::allowed_rate.is_not_null()))
        .filter(is_only(only))
        .select((endpoint::name, endpoint::rate, endpoint::allowed_rate))
        .load(conn)?;
    let lower = |(name, own, allowed): (String, Option<String>, Option<String>)| {
        let own = own.and_then(|rate| rate.parse::<Rate>().ok());
        let allowed = allowed.and_then(|rate| Rate::asked(&rate).ok());
        let rates = [own, allowed].into_iter().flatten();
        let lower = rates.min_by(|a, b| a.per_second.total_cmp(&b.per_second));
        Some((name, lower?.to_string()))
    };
    Ok(limited.into_iter().filter_map(lower).collect())
}

fn valid_leases(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<HashSet<i64>> {
    let ids: Vec<i64> = leases(name)
        .filter(is_not_over())
        .select(lease::id)
        .load(conn)?;
    Ok(ids.into_iter().collect())
}

/// Why each message waits; `None`: the record is no live message.
pub(crate) fn wait_reasons(
    conn: &mut PgConnection,
    name: &OutboxName,
    records: &[MessageRecord],
) -> QueryResult<Vec<Option<WaitReason>>> {
    let names = records.iter().map(|one| one.destination.as_str()).collect();
    WhyFacts::load(conn, name, &names, None)?.of_all(conn, name, records)
}

/// Like [`wait_reasons`], for messages of one destination.
pub(crate) fn wait_reasons_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    records: &[MessageRecord],
) -> QueryResult<Vec<Option<WaitReason>>> {
    let names = BTreeSet::from([destination]);
    WhyFacts::load(conn, name, &names, Some(destination))?.of_all(conn, name, records)
}

/// Why each of these messages waits; `None`: the message is not live.
pub(crate) fn of_sequences(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[Sequence],
) -> QueryResult<Vec<Option<WaitReason>>> {
    let numbers: Vec<i64> = sequences.iter().map(|one| one.0).collect();
    let is_one = Box::new(outbox::sequence.eq_any(numbers));
    let live: Vec<MessageRecord> =
        unprepared(messages::live(name, is_one, Content::Without)).load(conn)?;
    let reasons = wait_reasons(conn, name, &live)?;
    let by_sequence: HashMap<Sequence, Option<WaitReason>> =
        live.iter().map(|one| one.sequence).zip(reasons).collect();
    let reason = |one: &Sequence| by_sequence.get(one).cloned().flatten();
    Ok(sequences.iter().map(reason).collect())
}

/// The due messages that a test's relay has not sent, except those that `ended` names, and why each waits.
pub(crate) fn due_in_test(
    conn: &mut PgConnection,
    name: &OutboxName,
    ended: &[i64],
) -> QueryResult<Vec<(MessageRecord, WaitReason)>> {
    let facts = WhyFacts::of_test(conn, name)?;
    let left = of_live(conn, name, &facts, ended)?.into_iter();
    Ok(left
        .filter(|(_, reason)| !matches!(reason, WaitReason::NotDue { .. }))
        .collect())
}

/// All live messages except these, and why each waits.
pub(crate) fn of_live(
    conn: &mut PgConnection,
    name: &OutboxName,
    facts: &WhyFacts,
    except: &[i64],
) -> QueryResult<Vec<(MessageRecord, WaitReason)>> {
    let is_other = Box::new(outbox::sequence.ne_all(except.to_vec()));
    let live = messages::live(name, is_other, Content::Without).order(outbox::sequence);
    let live: Vec<MessageRecord> = unprepared(live).load(conn)?;
    let reasons = facts.of_all(conn, name, &live)?;
    let all = live.into_iter().zip(reasons);
    Ok(all
        .filter_map(|(record, reason)| Some((record, reason?)))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_begins_with_its_fixed_words() {
        let until = || Some("2026-11-25T10:00:00Z".to_owned());
        let (destination, reason) = ("billing".to_owned(), "upgrade".to_owned());
        let of_billing = |until| WaitReason::DestinationPaused {
            by: Hand::Operator,
            destination: destination.clone(),
            reason: reason.clone(),
            until,
        };
        for (reason, text) in [
            (
                WaitReason::NotDue { until: until() },
                "not due until 2026-11-25T10:00:00Z",
            ),
            (
                WaitReason::BehindKey {
                    sequence: Sequence(7),
                    blocker: Blocker::NotDue,
                },
                "behind 7 of its key (not due)",
            ),
            (
                of_billing(until()),
                "destination paused until 2026-11-25T10:00:00Z: billing: upgrade",
            ),
            (
                of_billing(None),
                "destination paused until resumed: billing: upgrade",
            ),
            (
                WaitReason::NotServed {
                    why: Unserved::NoRoute,
                },
                "no relay serves it: no active relay has a route or a handler for this topic; add a route, or start the relay that has the handler",
            ),
            (
                WaitReason::NoRelay {
                    disabled: None,
                    silent: None,
                },
                "no relay",
            ),
            (
                WaitReason::Held {
                    destination: "billing".to_owned(),
                    reason: ReasonCode::Proxy,
                },
                "held: PROXY: billing: mend the relay's proxy; the relay tries again on its own",
            ),
            (
                WaitReason::Expired {
                    held_by: Box::new(of_billing(None)),
                },
                "destination paused until resumed: billing: upgrade; it has expired, and is dead-lettered (EXPIRED) after that",
            ),
            (
                WaitReason::Sending {
                    since: "T".to_owned(),
                    has_expired: false,
                    silent: None,
                    rate: None,
                },
                "sending since T",
            ),
            (
                WaitReason::Sending {
                    since: "T".to_owned(),
                    has_expired: false,
                    silent: None,
                    rate: Some("1/h".to_owned()),
                },
                "sending since T, or waiting for the rate limit of its destination: 1/h",
            ),
        ] {
            assert_eq!(reason.to_string(), text);
        }
        for one in [
            Blocker::Due,
            Blocker::Retrying,
            Blocker::Dead,
            Blocker::NotDue,
            Blocker::Sending,
        ] {
            assert_eq!(Blocker::read(&one.to_string()), Ok(one));
        }
    }
}

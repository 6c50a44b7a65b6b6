//! Which messages a list shows, or an act changes.

use std::fmt;
use std::time::SystemTime;

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::{PgConnection, RunQueryDsl, select};
use uuid::Uuid;

use super::depths;
use super::place::Place;
use crate::endpoints::sql::filter::escaped;
use crate::endpoints::sql::served::served;
use crate::endpoints::sql::subscribers::subscribed;
use crate::engine::serves::routes::matches_any;
use crate::name::OutboxName;
use crate::schema::values::system_time;
use crate::sql::functions::clock_timestamp;
use crate::status::{ReasonCode, Status};

macro_rules! selection {
    (
        $(#[$about:meta])*
        pub struct Selection {
            $($(#[doc = $doc:literal])+ $visible:vis $condition:ident: $Value:ty,)+
        }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Selection {
            $(pub(crate) $condition: Option<$Value>,)+
            /// The topics of live messages that name no destination and that routes send to the selected one.
            pub(crate) routed: Vec<String>,
            /// Those of them whose messages are left, because others get them, too.
            pub(crate) shared: Vec<String>,
        }

        impl Selection {
            $(
                $(#[doc = $doc])+
                #[must_use]
                $visible fn $condition(mut self, $condition: impl Into<Option<$Value>>) -> Self {
                    self.$condition = $condition.into();
                    self
                }
            )+
        }
    };
}

selection! {
    /// Selects messages: waiting ones, dead letters, or settled ones. All given conditions must hold; without any, all
    /// messages are selected.
    ///
    /// ```
    /// use diesel_outbox::{ReasonCode, Status};
    /// use diesel_outbox::admin::Selection;
    /// use std::time::{Duration, SystemTime};
    /// # let tenant = uuid::Uuid::nil();
    ///
    /// let selection = Selection::default()
    ///     .topic("order.*".to_owned())
    ///     .destination("billing".to_owned())
    ///     .tenant_id(tenant)
    ///     .ordering_key("order-42".to_owned())
    ///     .reason(ReasonCode::ServerError)
    ///     .status(Status::Retrying)
    ///     .since(SystemTime::now().checked_sub(Duration::from_secs(3600)))
    ///     .until(SystemTime::now());
    /// let some = Selection::default().sequences(vec![7, 8]);
    /// let again = Selection::default().idempotency_keys(vec!["order-42-paid".to_owned()]);
    /// # let _ = (selection, some, again);
    /// ```
    pub struct Selection {
        /// Only this topic, or topics of this pattern: `order.*`.
        pub topic: String,
        /// Only this destination. Of waiting messages: those that name it, and those that a route of an active relay sends
        /// there; an act that ends messages leaves those that other destinations get, too. Empty: messages that name
        /// none.
        pub destination: String,
        /// Only this tenant.
        pub tenant_id: Uuid,
        /// Only this ordering key.
        pub ordering_key: String,
        /// Only this reason: of the last failure of a waiting message, of a dead letter, of an entry of the ledger.
        pub reason: ReasonCode,
        /// Only this state.
        pub status: Status,
        /// Enqueued, dead-lettered or settled at this time or later.
        pub since: SystemTime,
        /// Enqueued, dead-lettered or settled before this time. A replay ends at its begin: it does not replay its own
        /// messages.
        pub until: SystemTime,
        /// Only these sequences; empty: any.
        pub sequences: Vec<i64>,
        /// Only these idempotency keys, or ids of messages without a key; empty: any.
        pub idempotency_keys: Vec<String>,
        /// Only this registration of the destination, or none.
        pub(crate) registration: Uuid,
        /// Only what was there at this time, by the same times as `until`.
        pub(crate) counted_at: SystemTime,
        /// Only what stands behind this place in the list: the next page.
        pub(crate) behind: Place,
    }
}

/// What becomes of a message that several destinations get, if only one of them is selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Several {
    Selected,
    Left,
}

impl Selection {
    /// Whether the selection has no condition.
    ///
    /// ```
    /// use diesel_outbox::admin::Selection;
    ///
    /// assert!(Selection::default().is_everything());
    /// assert!(!Selection::default().topic("order.*".to_owned()).is_everything());
    /// ```
    pub fn is_everything(&self) -> bool {
        let given = Self {
            sequences: self.sequences.clone().filter(|some| !some.is_empty()),
            idempotency_keys: self
                .idempotency_keys
                .clone()
                .filter(|some| !some.is_empty()),
            counted_at: None,
            behind: None,
            routed: Vec::new(),
            shared: Vec::new(),
            ..self.clone()
        };
        given == Self::default()
    }

    /// The selection, with the topics that routes send to its destination now.
    pub(crate) fn with_routed(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        several: Several,
    ) -> QueryResult<Self> {
        let mut all = self.clone();
        if let Some(to) = self.destination.as_deref().filter(|to| !to.is_empty()) {
            let served = served(conn, name, &Default::default())?;
            let lanes = depths::lanes(conn, name)?.into_iter();
            let unnamed = lanes.filter(|(_, named)| named.is_empty());
            let topics = unnamed.map(|(topic, _)| topic);
            let routed = topics.filter(|topic| served.is_routed_to(topic, to));
            // Of a relay that cannot be read, nobody knows where its routes lead.
            let wanted = match several {
                Several::Selected => Vec::new(),
                Several::Left => subscribed(conn, name, true)?,
            };
            let is_shared = |topic: &String| {
                let is_alone = served.only_destination(topic) == Some(to) && served.is_certain();
                several == Several::Left && (!is_alone || matches_any(&wanted, topic))
            };
            (all.shared, all.routed) = routed.partition(is_shared);
        }
        Ok(all)
    }
}

/// The conditions in words: `destination billing, since 2026-11-21T10:00:00Z`.
impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |time: SystemTime| humantime::format_rfc3339_seconds(time).to_string();
        let some = |values: Option<Vec<String>>| {
            values
                .filter(|some| !some.is_empty())
                .map(|some| some.join(" "))
        };
        let sequences = self.sequences.as_ref();
        let sequences = sequences.map(|some| some.iter().map(i64::to_string).collect());
        let conditions = [
            ("destination", self.destination.clone()),
            ("topic", self.topic.clone()),
            ("tenant", self.tenant_id.map(|id| id.to_string())),
            ("key", self.ordering_key.clone()),
            ("reason", self.reason.map(|reason| reason.to_string())),
            ("status", self.status.map(|status| status.to_string())),
            ("since", self.since.map(time)),
            ("until", self.until.map(time)),
            ("sequence", some(sequences)),
            ("idempotency key", some(self.idempotency_keys.clone())),
        ];
        let given = |(name, value): (&str, Option<String>)| Some(format!("{name} {}", value?));
        let given: Vec<String> = conditions.into_iter().filter_map(given).collect();
        f.write_str(&given.join(", "))
    }
}

/// The time of the database.
pub(crate) fn now(conn: &mut PgConnection) -> QueryResult<SystemTime> {
    let now: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
    Ok(system_time(now))
}

/// The pattern of a topic for LIKE, if it is one: `*` stands for any characters.
pub(super) fn like(topic: &str) -> Option<String> {
    topic
        .contains('*')
        .then(|| escaped(topic).replace('*', "%"))
}

/// Whether a row of the table is selected, apart from its destination, status and place. `$at`: the column of its time.
macro_rules! selected {
    ($table:ident, $selection:expr, $at:ident, $reason:ident) => {{
        use crate::operate::sql::selection::like;
        use crate::sql::functions::{On, given};
        use diesel::{BoolExpressionMethods as _, TextExpressionMethods as _};

        let selection = $selection;
        let is_of_topic = |topic: &String| -> On<'static, $table::table> {
            match like(topic) {
                Some(pattern) => Box::new($table::topic.like(pattern)),
                None => Box::new($table::topic.eq(topic.clone())),
            }
        };
        let keys = selection
            .idempotency_keys
            .as_ref()
            .filter(|keys| !keys.is_empty());
        let sequences = selection.sequences.as_ref().filter(|some| !some.is_empty());
        [
            given(selection.topic.as_ref(), is_of_topic),
            given(selection.tenant_id, |id| {
                $table::tenant_id.assume_not_null().eq(id)
            }),
            given(selection.ordering_key.as_ref(), |key| {
                $table::ordering_key.assume_not_null().eq(key)
            }),
            given(selection.reason, |reason| {
                $table::$reason.assume_not_null().eq(reason)
            }),
            given(selection.since, |time| {
                $table::$at.ge(from_micros(as_micros(time)))
            }),
            given(selection.until, |time| {
                $table::$at.lt(from_micros(as_micros(time)))
            }),
            given(selection.counted_at, |time| {
                $table::$at.lt(from_micros(as_micros(time)))
            }),
            given(sequences, |these| $table::sequence.eq_any(these)),
            given(keys, |keys| {
                let ids: Vec<uuid::Uuid> = keys.iter().filter_map(|key| key.parse().ok()).collect();
                let key = $table::idempotency_key;
                let has_id = key.is_null().and($table::message_id.eq_any(ids));
                key.assume_not_null().eq_any(keys).or(has_id)
            }),
            given(selection.registration, |id| {
                crate::endpoints::sql::filter::is_of_registration!($table, id)
            }),
        ]
    }};
}

pub(super) use selected;

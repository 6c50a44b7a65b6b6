//! The conditions of a selection that all tables of messages share.

use std::time::SystemTime;

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::{PgConnection, RunQueryDsl, select};

use crate::endpoints::sql::filter::escaped;
use crate::schema::values::system_time;
use crate::sql::functions::clock_timestamp;

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
            given(selection.as_of, |time| {
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

//! Since when a registered destination has failed, according to its row.
//!
//! The first failure after a success begins an episode (`failing_since`). A failure ten minutes later or more makes the
//! destination failing (`failing`): a destination that fails now and then is not worth a message to anybody. A success
//! ends the episode; so do a new URL, and disabling and enabling (a trigger). Relays change the row under its lock: so
//! of all relays, one sees each change, and writes the event in the same transaction.

use std::time::Duration;

use diesel::data_types::PgTimestamp;
use diesel::prelude::{
    ExpressionMethods, NullableExpressionMethods, OptionalExtension, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, update};

use crate::name::OutboxName;
use crate::store::destinations::{AsSeen, is_as_seen};
use crate::store::sql::clock_timestamp;
use crate::store::table::destination;

/// How long no send must have succeeded when a send fails, for the destination to be failing.
pub(crate) const FAILING_AFTER: Duration = Duration::from_secs(600);

/// What the row of a destination says about its failures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Failures {
    /// For how long the destination has failed; `None`: the last send has succeeded.
    pub(crate) lasts: Option<Duration>,
    pub(crate) is_failing: bool,
}

/// What begins with a change of the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Fails,
    Works,
}

impl Failures {
    /// After a failed send, the last of a relay that has failed for this time, or (`None`) after a successful one. Only
    /// the row knows of the successes of all relays: what it says decides whether the destination is failing.
    pub(crate) fn after(self, failed_for: Option<Duration>) -> Self {
        let Some(failed_for) = failed_for else {
            return Self::default();
        };
        Self {
            lasts: self.lasts.or(Some(failed_for)),
            is_failing: self.is_failing || self.lasts.is_some_and(|time| time >= FAILING_AFTER),
        }
    }

    pub(crate) fn turn_to(self, next: Self) -> Option<Turn> {
        match (self.is_failing, next.is_failing) {
            (false, true) => Some(Turn::Fails),
            (true, false) => Some(Turn::Works),
            _ => None,
        }
    }
}

/// The row after a relay has recorded what it has seen.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) failures: Failures,
    /// What has begun, and the first failure of the episode.
    pub(crate) turn: Option<(Turn, PgTimestamp)>,
}

/// Records that the destination has failed for this time at a relay, or (`None`) that it works. `None`: the row is gone,
/// or has changed since it was seen.
pub(crate) fn record(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
    failed_for: Option<Duration>,
) -> QueryResult<Option<Recorded>> {
    let table = || destination::table(name.destination());
    let found: Option<(Option<PgTimestamp>, bool, PgTimestamp)> = table()
        .filter(is_as_seen(seen))
        .for_no_key_update()
        .select((
            destination::failing_since,
            destination::failing,
            clock_timestamp(),
        ))
        .get_result(conn)
        .optional()?;
    let Some((since, is_failing, now)) = found else {
        return Ok(None);
    };
    let before = Failures {
        lasts: since.map(|since| between(since, now)),
        is_failing,
    };
    let failures = before.after(failed_for);
    let next_since = failures.lasts.map(|lasts| since.unwrap_or(ago(lasts, now)));
    if (next_since, failures.is_failing) != (since, is_failing) {
        update(table())
            .filter(destination::name.eq(seen.name))
            .set((
                destination::failing_since.eq(next_since),
                destination::failing.eq(failures.is_failing),
            ))
            .execute(conn)?;
    }
    let turn = before.turn_to(failures);
    Ok(Some(Recorded {
        failures,
        turn: turn.zip(since.or(next_since)),
    }))
}

/// The destinations that have failed since their last success.
pub(crate) fn all(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<(String, Failures)>> {
    let found = destination::table(name.destination())
        .filter(destination::failing_since.is_not_null())
        .select((
            destination::name,
            destination::failing_since.assume_not_null(),
            destination::failing,
            clock_timestamp(),
        ))
        .load::<(String, PgTimestamp, bool, PgTimestamp)>(conn)?;
    let of_row = |(name, since, is_failing, now)| {
        let lasts = Some(between(since, now));
        (name, Failures { lasts, is_failing })
    };
    Ok(found.into_iter().map(of_row).collect())
}

fn between(since: PgTimestamp, now: PgTimestamp) -> Duration {
    let micros = now.0.saturating_sub(since.0);
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn ago(time: Duration, now: PgTimestamp) -> PgTimestamp {
    let micros = i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    PgTimestamp(now.0.saturating_sub(micros))
}

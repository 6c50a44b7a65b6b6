//! Since when an endpoint has failed, according to its row.
//!
//! The first failure after a success begins an episode (`failing_since`). After ten minutes the endpoint is failing
//! (`failing`): an endpoint that fails now and then is not worth a message to anybody, nor is one that has refused a
//! message for good, unless it then fails again. A success ends the episode; so do a new URL, and disabling and enabling (a trigger). Relays change the row under its lock: so
//! of all relays, one sees each change, and writes the event in the same transaction.
//!
//! Why: docs/decisions.md#failing

use std::time::Duration;

use diesel::data_types::PgTimestamp;
use diesel::dsl::not;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, OptionalExtension,
    QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, update};

use super::rows::{AsSeen, is_as_seen};
use crate::name::OutboxName;
use crate::sql::absent::all_endpoints;
use crate::sql::functions::{On, all_of, clock_timestamp, given, interval};
use crate::sql::table::endpoint;
use crate::status::ReasonCode;

/// How long no send must have succeeded for the endpoint to be failing.
pub(crate) const FAILING_AFTER: Duration = Duration::from_secs(600);

/// What the row of an endpoint says about its failures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RowFailures {
    /// For how long the endpoint has failed; `None`: the last send has succeeded.
    pub(crate) lasts: Option<Duration>,
    pub(crate) is_failing: bool,
}

/// What begins with a change of the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EpisodeTurn {
    Fails,
    Works,
}

impl RowFailures {
    /// After a failed send, the last of a relay that has failed for this time, or (`None`) after a successful one. Only
    /// the row knows of the successes of all relays: what it says decides whether the endpoint is failing.
    pub(crate) fn after(self, failed_for: Option<Duration>) -> Self {
        let Some(failed_for) = failed_for else {
            return Self::default();
        };
        Self {
            lasts: self.lasts.or(Some(failed_for)),
            is_failing: self.is_failing || self.lasts.is_some_and(|time| time >= FAILING_AFTER),
        }
    }

    pub(crate) fn turn_to(self, next: Self) -> Option<EpisodeTurn> {
        match (self.is_failing, next.is_failing) {
            (false, true) => Some(EpisodeTurn::Fails),
            (true, false) => Some(EpisodeTurn::Works),
            _ => None,
        }
    }
}

/// The row after a relay has recorded what it has seen.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) failures: RowFailures,
    pub(crate) turn: Option<TurnedEpisode>,
}

/// What has begun, the first failure of the episode, and the reason if one has begun.
pub(crate) type TurnedEpisode = (EpisodeTurn, PgTimestamp, Option<ReasonCode>);

/// Records that the endpoint has failed for this time at a relay, last for this reason, or (`None`) that it works.
/// `None`: the row is gone, or has changed since it was seen.
pub(crate) fn record(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
    failed: Option<(Duration, ReasonCode)>,
) -> QueryResult<Option<Recorded>> {
    let (failed_for, reason) = failed.unzip();
    let table = || all_endpoints(name);
    let found: Option<(Option<PgTimestamp>, bool, PgTimestamp)> = table()
        .filter(is_as_seen(seen))
        .for_no_key_update()
        .select((
            endpoint::failing_since,
            endpoint::failing,
            clock_timestamp(),
        ))
        .get_result(conn)
        .optional()?;
    let Some((since, is_failing, now)) = found else {
        return Ok(None);
    };
    let before = RowFailures {
        lasts: since.map(|since| between(since, now)),
        is_failing,
    };
    let failures = before.after(failed_for);
    let next_since = failures.lasts.map(|lasts| since.unwrap_or(ago(lasts, now)));
    if (next_since, failures.is_failing) != (since, is_failing) {
        update(table())
            .filter(endpoint::name.eq(seen.name))
            .set((
                endpoint::failing_since.eq(next_since),
                endpoint::failing_reason.eq(reason),
                endpoint::failing.eq(failures.is_failing),
            ))
            .execute(conn)?;
    }
    let turn = (before.turn_to(failures).zip(since.or(next_since)))
        .map(|(turn, since)| (turn, since, reason));
    Ok(Some(Recorded { failures, turn }))
}

/// Nothing was sent to the endpoint since ten minutes of failures were over.
fn is_overdue() -> On<'static, endpoint::table> {
    let ten_minutes_ago = clock_timestamp().nullable() - interval(FAILING_AFTER);
    let has_passed = (endpoint::failing_since.le(ten_minutes_ago)).assume_not_null();
    let counts = endpoint::failing_reason
        .assume_not_null()
        .ne(ReasonCode::Rejected);
    let is_not_told = endpoint::enabled.and(not(endpoint::failing));
    Box::new(
        is_not_told
            .and(endpoint::failing_since.is_not_null())
            .and(has_passed)
            .and(counts),
    )
}

/// The number of these endpoints.
pub(crate) fn count_overdue(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<i64> {
    let overdue = all_endpoints(name).filter(is_overdue());
    overdue.count().get_result(conn)
}

/// Makes the endpoints failing to which nothing was sent since ten minutes of failures were over. Returns their names
/// and episodes. Passes over rows that others have locked.
pub(crate) fn record_overdue(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<(String, TurnedEpisode)>> {
    let table = || all_endpoints(name);
    let overdue: Vec<(String, PgTimestamp, String)> = table()
        .filter(is_overdue())
        .for_no_key_update()
        .skip_locked()
        .select((
            endpoint::name,
            endpoint::failing_since.assume_not_null(),
            endpoint::failing_reason.assume_not_null(),
        ))
        .load(conn)?;
    if overdue.is_empty() {
        return Ok(Vec::new());
    }
    let names = overdue.iter().map(|(name, ..)| name);
    update(table())
        .filter(endpoint::name.eq_any(names))
        .set(endpoint::failing.eq(true))
        .execute(conn)?;
    // A newer relay may have written a code that this one does not know.
    let turned = |(name, since, reason): (_, _, String)| {
        (name, (EpisodeTurn::Fails, since, reason.parse().ok()))
    };
    Ok(overdue.into_iter().map(turned).collect())
}

/// The endpoints that have failed since their last success: all, or with `only` those of these names.
pub(crate) fn all(
    conn: &mut PgConnection,
    name: &OutboxName,
    only: Option<&[&str]>,
) -> QueryResult<Vec<(String, RowFailures)>> {
    let is_meant = all_of([given(only, |names| endpoint::name.eq_any(names))]);
    let found = all_endpoints(name)
        .filter(endpoint::failing_since.is_not_null())
        .filter(is_meant)
        .select((
            endpoint::name,
            endpoint::failing_since.assume_not_null(),
            endpoint::failing,
            clock_timestamp(),
        ))
        .load::<(String, PgTimestamp, bool, PgTimestamp)>(conn)?;
    let of_row = |(name, since, is_failing, now)| {
        let lasts = Some(between(since, now));
        (name, RowFailures { lasts, is_failing })
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

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::sql::tests::Outbox;

    /// R65: a row that a newer relay has written kept all others from becoming failing.
    #[test]
    fn a_reason_that_is_not_known_holds_up_no_other_destination() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        conn.batch_execute(&format!(
            "INSERT INTO {} (name, url, failing_since, failing_reason) VALUES
                ('a', 'https://a.example', now() - interval '1 h', 'OF_TOMORROW'),
                ('b', 'https://b.example', now() - interval '1 h', 'TIMEOUT')",
            name.endpoint()
        ))
        .expect("rows");
        let mut found = record_overdue(conn, name).expect("they are failing");
        found.sort_by(|one, other| one.0.cmp(&other.0));
        let reasons = found
            .iter()
            .map(|(name, (_, _, reason))| (name.as_str(), *reason));
        let known = Some(ReasonCode::Timeout);
        assert_eq!(reasons.collect::<Vec<_>>(), [("a", None), ("b", known)]);
    }
}

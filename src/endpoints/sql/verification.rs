//! The tries to verify endpoints: one at a time for each, whatever the number of relays.

use std::collections::HashMap;
use std::time::Duration;

use diesel::dsl::sql;
use diesel::expression::SqlLiteral;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, OptionalExtension,
    QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::Bool;
use diesel::{Connection, PgConnection, PgSortExpressionMethods, update};

use super::own;
use super::rows::{AsSeen, disable_as_seen, is_as_seen};
use crate::config::{LONGEST_SEND, Rate};
use crate::endpoints::public_error::NOT_VERIFIED;
use crate::engine::send::sql::pause;
use crate::hand::Hand;
use crate::name::OutboxName;
use crate::sql::absent::all_endpoints;
use crate::sql::functions::{clock_timestamp, interval};
use crate::sql::table::endpoint;

/// How long after each failed try the next one is: three days together. The endpoint is then disabled.
const RETRIES: [Duration; 10] = [
    Duration::from_secs(10),
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(2 * 3600),
    Duration::from_secs(5 * 3600),
    Duration::from_secs(10 * 3600),
    Duration::from_secs(14 * 3600),
    Duration::from_secs(18 * 3600),
    Duration::from_secs(24 * 3600),
];
/// How long a try may take in addition to the timeout of its request.
const MARGIN: Duration = Duration::from_secs(5);

/// The most characters of a stored error.
const LONGEST_ERROR: usize = 512;

/// What follows a failed try.
#[derive(Debug)]
pub(crate) enum NextTry {
    Again(Duration),
    /// The endpoint is disabled, for this reason.
    Disabled(String),
    /// The endpoint has changed, or is verified.
    Changed,
}

/// Takes those of these endpoints whose next try is due, as they were seen, each with the timeout of a request, and that
/// `choose` chooses, given in the order of their tries. Returns their indices. Until a try must have ended, no other relay
/// takes the endpoint.
pub(crate) fn take(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: &[(AsSeen<'_>, Duration)],
    choose: impl FnOnce(Vec<usize>) -> Vec<usize>,
) -> QueryResult<Vec<usize>> {
    let names: HashMap<&str, usize> = (0..)
        .zip(seen)
        .map(|(index, (one, _))| (one.name, index))
        .collect();
    let due = || {
        let at = endpoint::verification_due;
        all_endpoints(name)
            .filter(endpoint::enabled)
            .filter(endpoint::verified_at.is_null())
            .filter(
                at.is_null()
                    .or(at.assume_not_null().le(clock_timestamp()))
                    .or(is_too_far()),
            )
            .order((at.asc().nulls_first(), endpoint::name))
            .select(endpoint::name)
    };
    let all: Vec<String> = due()
        .filter(endpoint::name.eq_any(names.keys().copied().collect::<Vec<_>>()))
        .load(conn)?;
    let index = |name: &String| names.get(name.as_str()).copied();
    let chosen = choose(all.iter().filter_map(index).collect());
    if chosen.is_empty() {
        return Ok(chosen);
    }
    conn.transaction(|conn| {
        // Another relay may have taken some since.
        let names: Vec<&str> = chosen.iter().map(|index| seen[*index].0.name).collect();
        let free: Vec<String> = due()
            .filter(endpoint::name.eq_any(names))
            .for_no_key_update()
            .skip_locked()
            .load(conn)?;
        let mut taken = Vec::new();
        for index in free.iter().filter_map(index) {
            let (one, timeout) = seen[index];
            if hold(conn, name, one, timeout)? {
                taken.push(index);
            }
        }
        Ok(taken)
    })
}

/// The next try lies further ahead than any can: the server's clock has gone back since it was written.
///
/// Text: an element of an array.
fn is_too_far() -> SqlLiteral<Bool> {
    let waits = RETRIES.map(|wait| wait.as_secs().to_string()).join(", ");
    let of_a_try = LONGEST_SEND.saturating_add(MARGIN).as_secs();
    sql(&format!(
        "verification_due > clock_timestamp() + interval '1 s' * ({of_a_try}
            + coalesce((ARRAY[{waits}])[verification_tries], 0))"
    ))
}

/// Keeps other relays from trying while this try lasts. `false`: the endpoint has changed.
pub(crate) fn hold(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
    timeout: Duration,
) -> QueryResult<bool> {
    let until = clock_timestamp() + interval(timeout.saturating_add(MARGIN));
    update(all_endpoints(name))
        .filter(is_as_seen(seen))
        .set(endpoint::verification_due.eq(until.nullable()))
        .execute(conn)
        .map(|count| count > 0)
}

/// Records that the endpoint wants messages, and how many, and closes its breaker. `false`: the endpoint has changed.
pub(crate) fn verified(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
    rate: Option<Rate>,
) -> QueryResult<bool> {
    let count = update(all_endpoints(name))
        .filter(is_as_seen(seen))
        .set((
            endpoint::verified_at.eq(clock_timestamp().nullable()),
            endpoint::allowed_rate.eq(rate.map(|rate| rate.to_string())),
            endpoint::verification_due.eq(None::<diesel::data_types::PgTimestamp>),
            endpoint::verification_tries.eq(0),
            endpoint::verification_error.eq(None::<&str>),
        ))
        .execute(conn)?;
    if count > 0 {
        pause::close_breaker(conn, name, seen.name)?;
    }
    Ok(count > 0)
}

/// Records a failed try. After the last one, or a refusal, the endpoint is disabled; `own_events`: with an event.
pub(crate) fn failed(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
    (error, is_final): (&str, bool),
    own_events: bool,
) -> QueryResult<NextTry> {
    let table = || all_endpoints(name);
    let error: String = error.chars().take(LONGEST_ERROR).collect();
    conn.transaction(|conn| {
        let tries: Option<i32> = table()
            .filter(is_as_seen(seen))
            .filter(endpoint::verified_at.is_null())
            .for_no_key_update()
            .select(endpoint::verification_tries)
            .get_result(conn)
            .optional()?;
        let Some(tries) = tries else {
            return Ok(NextTry::Changed);
        };
        let wait = usize::try_from(tries).ok();
        let wait = wait.and_then(|tries| RETRIES.get(tries));
        let wait = wait.filter(|_| !is_final);
        let due = clock_timestamp() + interval(wait.copied().unwrap_or_default());
        update(table())
            .filter(endpoint::name.eq(seen.name))
            .set((
                endpoint::verification_tries.eq(tries.saturating_add(1)),
                endpoint::verification_error.eq(&error),
                endpoint::verification_due.eq(due.nullable()),
            ))
            .execute(conn)?;
        if let Some(wait) = wait {
            return Ok(NextTry::Again(*wait));
        }
        let reason = format!("{NOT_VERIFIED}{error}");
        let why = (Hand::Relay, reason.as_str());
        let is_disabled = match own_events {
            true => own::disable(conn, name, seen, why, None)?,
            false => disable_as_seen(conn, name, seen, why, None)?,
        };
        Ok(match is_disabled {
            true => NextTry::Disabled(reason),
            false => NextTry::Changed,
        })
    })
}

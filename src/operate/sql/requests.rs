//! Requests of programs with an `Idempotency-Key`: the same request acts once, and gets the same answer again.

use std::time::{Duration, SystemTime};

use diesel::dsl::case_when;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, QueryDsl, RunQueryDsl, TextExpressionMethods,
};
use diesel::query_dsl::methods::FilterDsl;
use diesel::result::{Error, QueryResult};
use diesel::upsert::excluded;
use diesel::{
    NullableExpressionMethods, OptionalExtension, PgConnection, delete, insert_into, select, update,
};
use uuid::Uuid;

use crate::config::LONGEST_SEND;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::schema::values::{from_micros, system_time, to_micros};
use crate::sql::functions::{clock_timestamp, interval, pg_try_advisory_xact_lock};
use crate::sql::lock_number::lock_number;
use crate::sql::pinned::pinned;
use crate::sql::table::request as requests;

/// How long a request is known. `outbox_rotate` deletes older ones.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// How long a request without an answer is known: 15 minutes, longer than any send.
const UNANSWERED: Duration = LONGEST_SEND.saturating_mul(3);

/// A request with a key. Until it has its answer, the column of the answer has the time when the request was sent first, in
/// microseconds: what comes later is not for it.
#[derive(Debug, Clone, Copy)]
pub struct Keyed<'a> {
    /// Who has sent it. Each caller has keys of its own.
    pub caller: &'a str,
    /// The key.
    pub key: &'a str,
    /// Of all that makes it another request.
    pub digest: &'a [u8],
}

/// What is known of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// It may act, on what was there at this time, when it was sent first.
    New(SystemTime),
    /// It acts now, or the process that carried it out has ended. After 15 minutes it may act again.
    Running,
    /// The key was used for another request.
    Other,
    /// Its status and its answer.
    Answered(i32, String),
}

impl Keyed<'_> {
    /// Takes the request, if it is new: all others with the same key are refused until it has an [answer](Self::answer).
    ///
    /// # Errors
    /// A [`DatabaseError`].
    pub fn claim(self, conn: &mut PgConnection, name: &OutboxName) -> Result<Known, DatabaseError> {
        let Self {
            caller,
            key,
            digest,
        } = self;
        Ok(pinned(conn, name, |conn, name| {
            // Otherwise the insert would wait for a transaction that carries out the same request.
            let number = lock_number(&[&name.request().to_string(), caller, key]);
            if !select(pg_try_advisory_xact_lock(number)).get_result(conn)? {
                return Ok(Known::Running);
            }
            let now: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
            let is_older = |age| requests::at.le(clock_timestamp() - interval(age));
            let is_same = || requests::digest.eq(excluded(requests::digest));
            let continues = requests::status
                .is_null()
                .and(is_same())
                .and(requests::at.gt(clock_timestamp() - interval(KEPT)));
            let upsert = insert_into(requests::table(name.request()))
                .values((
                    requests::caller.eq(caller),
                    requests::key.eq(key),
                    requests::digest.eq(digest),
                    requests::answer.eq(to_micros(now).to_string()),
                ))
                .on_conflict((requests::caller, requests::key))
                .do_update()
                .set((
                    requests::digest.eq(excluded(requests::digest)),
                    requests::at.eq(excluded(requests::at)),
                    requests::status.eq(None::<i32>),
                    requests::answer.eq(case_when(continues, requests::answer)
                        .otherwise(excluded(requests::answer))),
                ));
            let has_ended = requests::status.is_null().and(is_older(UNANSWERED));
            let has_ended = has_ended.and(is_same());
            let is_old = is_older(KEPT).or(has_ended);
            let claimed = FilterDsl::filter(upsert, is_old).returning(requests::answer);
            let since: Option<Option<String>> = claimed.get_result(conn).optional()?;
            if let Some(since) = since {
                let since = since
                    .and_then(|micros| micros.parse().ok())
                    .map(from_micros);
                return Ok(Known::New(system_time(since.unwrap_or(now))));
            }
            let is_it = requests::caller.eq(caller).and(requests::key.eq(key));
            let known: (Vec<u8>, Option<i32>, Option<String>) =
                QueryDsl::filter(requests::table(name.request()), is_it)
                    .select((requests::digest, requests::status, requests::answer))
                    .get_result(conn)?;
            Ok::<_, Error>(match known {
                (known, ..) if known != digest => Known::Other,
                (_, Some(status), answer) => Known::Answered(status, answer.unwrap_or_default()),
                (_, None, _) => Known::Running,
            })
        })?)
    }

    /// Lets the request continue: it has not done all.
    ///
    /// # Errors
    /// A [`DatabaseError`].
    pub fn is_unfinished(
        self,
        conn: &mut PgConnection,
        name: &OutboxName,
    ) -> Result<(), DatabaseError> {
        pinned(conn, name, |conn, name| {
            let is_it = requests::caller
                .eq(self.caller)
                .and(requests::key.eq(self.key));
            update(requests::table(name.request()))
                .filter(is_it)
                .set(requests::at.eq(clock_timestamp() - interval(UNANSWERED)))
                .execute(conn)
        })?;
        Ok(())
    }

    /// Keeps the status and the answer. `None`: the request has not acted, and may do so again.
    ///
    /// # Errors
    /// A [`DatabaseError`].
    pub fn answer(
        self,
        conn: &mut PgConnection,
        name: &OutboxName,
        answer: Option<(u16, &str)>,
    ) -> Result<(), DatabaseError> {
        pinned(conn, name, |conn, name| {
            let table = requests::table(name.request());
            let is_it = requests::caller
                .eq(self.caller)
                .and(requests::key.eq(self.key));
            match answer {
                Some((status, answer)) => update(table)
                    .filter(is_it)
                    .set((
                        requests::status.eq(i32::from(status)),
                        requests::answer.eq(answer),
                    ))
                    .execute(conn),
                None => delete(table).filter(is_it).execute(conn),
            }
        })?;
        Ok(())
    }
}

/// Forgets the requests of a tenant, and those whose answers name the tenant.
pub(crate) fn forget(conn: &mut PgConnection, name: &OutboxName, tenant: Uuid) -> QueryResult<()> {
    let names_it = format!("%{tenant}%");
    let answer = requests::answer.assume_not_null();
    delete(requests::table(name.request()))
        .filter(
            requests::caller
                .like(names_it.clone())
                .or(answer.like(names_it)),
        )
        .execute(conn)
        .map(drop)
}

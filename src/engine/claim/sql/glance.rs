//! What a survey reads in one statement: an idle relay asks for little else.

use diesel::dsl::{array, exists, not, sql, sum};
use diesel::internal::table_macro::NoFromClause;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl,
    Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Nullable, Timestamptz};
use diesel::{PgConnection, select};

use super::claim::Reads;
use crate::engine::lease::sql::lease::{LeaseId, at_work, is_not_over, leases, stands_by};
use crate::engine::send::sql::pause::{PauseColumns, PausesRead, at_once, with_ends};
use crate::engine::serves::sql::topics::is_recorded;
use crate::name::OutboxName;
use crate::sql::functions::{
    On, clock_timestamp, hashtext, pg_postmaster_start_time, pg_try_advisory_xact_lock,
};
use crate::sql::table::{other_lease, topic};

type Alone<T> = On<'static, NoFromClause, T>;

/// The state of a relay, and of the leases of others.
// Why: docs/decisions.md#new-server
#[derive(Debug, Queryable)]
pub(crate) struct Glance {
    /// The database's clock.
    pub(crate) now: PgTimestamp,
    /// Whether the relay's lease is valid and the relay does not stand by.
    pub(crate) is_active: bool,
    /// The start time of the server, which tells one server from another.
    pub(crate) server: PgTimestamp,
    /// The ended leases.
    pub(crate) ended: Vec<i64>,
    /// Whether a lease is to be ended or shortened.
    pub(crate) is_any_over: bool,
}

/// Numbers that change with the members, and with what the relays of an outbox serve.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Queryable)]
pub(crate) struct Marks {
    pub(crate) destinations: Option<i64>,
    pub(crate) leases: Option<i64>,
    pub(crate) topics: Option<i64>,
}

/// Reads the leases only: no person or application locks their table.
pub(crate) fn at_leases(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: LeaseId,
) -> QueryResult<Glance> {
    select(of_leases(name, id)).get_result(conn)
}

/// Reads the leases, the pauses, and with `marks_of` the marks.
pub(crate) fn at_all(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: LeaseId,
    marks_of: Option<Option<&dyn Reads>>,
) -> QueryResult<(Glance, PausesRead, Option<Marks>)> {
    let asked = (of_leases(name, id), at_once(name));
    let (glance, pauses, marks): (Glance, Vec<PauseColumns>, _) = match marks_of {
        None => {
            let (glance, pauses) = select(asked).get_result(conn)?;
            (glance, pauses, None)
        }
        Some(read_to) => select((asked.0, asked.1, marks(name, read_to)))
            .get_result::<(_, _, Marks)>(conn)
            .map(|(glance, pauses, marks)| (glance, pauses, Some(marks)))?,
    };
    Ok((glance, with_ends(pauses), marks))
}

type AskedOfLeases = (
    Alone<Timestamptz>,
    Alone<Bool>,
    Alone<Timestamptz>,
    Alone<Array<BigInt>>,
    Alone<Bool>,
);

fn of_leases(name: &OutboxName, id: LeaseId) -> AskedOfLeases {
    let soon = clock_timestamp() + other_lease::takeover_after.assume_not_null();
    // No lock belongs to a lease without that time.
    let has_no_session = other_lease::takeover_after
        .is_not_null()
        .and(other_lease::expires_at.gt(soon))
        .and(pg_try_advisory_xact_lock(other_lease::id));
    let has_expired = (other_lease::expires_at.le(clock_timestamp()))
        .or(other_lease::id.ne(id.0).and(has_no_session));
    let over = other_lease::table(name.lease())
        .filter(not(other_lease::ended))
        .filter(has_expired)
        .select(other_lease::id);
    let ended = other_lease::table(name.lease())
        .filter(other_lease::ended)
        .order(other_lease::id)
        .select(other_lease::id);
    (
        Box::new(clock_timestamp()),
        Box::new(exists(at_work(name, id))),
        Box::new(pg_postmaster_start_time()),
        Box::new(array::<BigInt, _>(ended)),
        Box::new(exists(over)),
    )
}

type AskedOfMarks<'a> = (
    On<'a, NoFromClause, Nullable<BigInt>>,
    Alone<Nullable<BigInt>>,
    Alone<Nullable<BigInt>>,
);

/// Text: hashes of times and of JSON.
fn marks<'a>(name: &OutboxName, read_to: Option<&'a dyn Reads>) -> AskedOfMarks<'a> {
    let of_lease = "sum(pg_catalog.hashtext(pg_catalog.concat_ws(' ', lease.id, lease.serves, lease.refuses)))";
    let served = leases(name)
        .filter(is_not_over())
        .filter(not(stands_by(name)))
        .select(sql::<Nullable<BigInt>>(of_lease));
    let topics = topic::table(name.topic()).filter(is_recorded());
    let topics = topics.select(sum(hashtext(topic::pattern)));
    (
        match read_to {
            Some(read_to) => read_to.changed(name),
            None => Box::new(None::<i64>.into_sql::<Nullable<BigInt>>()),
        },
        Box::new(served.single_value()),
        Box::new(topics.single_value()),
    )
}

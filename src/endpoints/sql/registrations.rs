//! The records of the latest changes of endpoints. A trigger writes one for each changed row, with the number
//! of its transaction. A relay reads those of transactions that it has not seen.

use std::collections::BTreeSet;

use diesel::dsl::{not, sum};
use diesel::expression::{AppearsOnTable, Expression, SelectableExpression, ValidGrouping};
use diesel::internal::table_macro::NoFromClause;
use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl,
    RunQueryDsl, TextExpressionMethods,
};
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Nullable, Text, Timestamptz};
use diesel::{PgConnection, delete};

use crate::engine::claim::sql::claim::Reads;
use crate::name::OutboxName;
use crate::sql::absent::{all_endpoints, appeared};
use crate::sql::functions::{On, clock_timestamp, coalesce, hashtext};
use crate::sql::statement::statement;
use crate::sql::table::{endpoint, outbox, registration};

/// Up to where a relay has read the changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadTo {
    /// The transactions that were visible: an earlier number may become visible later.
    snapshot: String,
    /// The database's clock. Old secrets stop signing without a change of the row.
    at: PgTimestamp,
    /// The start time of the server. The numbers of another server say nothing.
    server: PgTimestamp,
}

impl ReadTo {
    /// Whether this was read from the server that was started at this time.
    pub(crate) fn is_of(&self, server: i64) -> bool {
        self.server.0 == server
    }

    /// Whether both were read from the same server.
    pub(crate) fn is_of_server_of(&self, other: &Self) -> bool {
        self.server == other.server
    }
}

/// Whether the transaction with this record was not visible to a relay.
// Why: docs/decisions.md#exact-registration
#[derive(ValidGrouping)]
struct IsNewRecord<'a>(&'a ReadTo);

impl Expression for IsNewRecord<'_> {
    type SqlType = Bool;
}

/// Used only where the table of records is.
impl<QS> AppearsOnTable<QS> for IsNewRecord<'_> {}

impl<QS> SelectableExpression<QS> for IsNewRecord<'_> {}

impl QueryId for IsNewRecord<'_> {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

impl QueryFragment<Pg> for IsNewRecord<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        // So that the index serves: a condition in OR would read all records.
        out.push_sql("(registration.xid >= CASE WHEN pg_catalog.pg_postmaster_start_time() = ");
        out.push_bind_param::<Timestamptz, _>(&self.0.server)?;
        out.push_sql(" THEN pg_catalog.pg_snapshot_xmin(CAST(");
        out.push_bind_param::<Text, _>(&self.0.snapshot)?;
        out.push_sql(" AS pg_catalog.pg_snapshot))::text::bigint ELSE 0 END AND (pg_catalog.pg_postmaster_start_time() <> ");
        out.push_bind_param::<Timestamptz, _>(&self.0.server)?;
        out.push_sql(" OR NOT pg_catalog.pg_visible_in_snapshot(registration.xid::text::pg_catalog.xid8, CAST(");
        out.push_bind_param::<Text, _>(&self.0.snapshot)?;
        out.push_sql(" AS pg_catalog.pg_snapshot))))");
        Ok(())
    }
}

/// A number for the set of these records: null if there are none. A function would need a type for every query.
macro_rules! number_of {
    ($name:expr, $is_meant:expr) => {
        registration::table($name.registration())
            .filter($is_meant)
            .select(sum(hashtext(
                registration::xid.cast::<Text>().concat(registration::name),
            )))
            .single_value()
    };
}

/// No row was read.
#[derive(Debug)]
pub(crate) struct Unread;

impl Reads for Unread {
    fn seen<'a>(&'a self, name: &OutboxName) -> On<'a, outbox::table, Nullable<BigInt>> {
        match name.has_endpoints() {
            // No message is decided before the rows are read.
            true => Box::new(Some(0).into_sql::<Nullable<BigInt>>()),
            // The tables may be created before a message that this claim takes.
            false => Box::new(appeared!(name.registration())),
        }
    }

    fn changed<'a>(&'a self, name: &OutboxName) -> On<'a, NoFromClause, Nullable<BigInt>> {
        match name.has_endpoints() {
            // They are read at the next look.
            true => Box::new(Some(0).into_sql::<Nullable<BigInt>>()),
            false => Box::new(appeared!(name.registration())),
        }
    }
}

impl Reads for ReadTo {
    fn seen<'a>(&'a self, name: &OutboxName) -> On<'a, outbox::table, Nullable<BigInt>> {
        match name.has_endpoints() {
            true => Box::new(number_of!(
                name,
                IsNewRecord(self).and(registration::is_new)
            )),
            false => Unread.seen(name),
        }
    }

    /// Also for old secrets that have stopped signing.
    fn changed<'a>(&'a self, name: &OutboxName) -> On<'a, NoFromClause, Nullable<BigInt>> {
        if !name.has_endpoints() {
            return Unread.changed(name);
        }
        let ended = all_endpoints(name)
            .filter(has_ended(self))
            .select(sum(hashtext(endpoint::name)));
        let ended = coalesce(ended.single_value(), 0);
        let changed = coalesce(number_of!(name, IsNewRecord(self)), 0);
        Box::new((changed + ended).nullable())
    }
}

/// The old secrets of the endpoint have stopped signing since.
fn has_ended(read_to: &ReadTo) -> On<'_, endpoint::table> {
    let until = endpoint::old_secrets_until.assume_not_null();
    let has_passed = until.le(clock_timestamp());
    Box::new(until.gt(read_to.at).and(has_passed))
}

/// Up to where a relay has read that reads everything after this. Text: a type that Diesel does not know.
pub(crate) fn now(conn: &mut PgConnection) -> QueryResult<ReadTo> {
    let (snapshot, at, server) = statement(
        "SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.clock_timestamp(), pg_catalog.pg_postmaster_start_time()",
    )
    .giving::<(Text, Timestamptz, Timestamptz)>()
    .get_result(conn)?;
    Ok(ReadTo {
        snapshot,
        at,
        server,
    })
}

/// The names of the endpoints that have changed since, each once.
pub(crate) fn names(
    conn: &mut PgConnection,
    name: &OutboxName,
    read_to: &ReadTo,
) -> QueryResult<BTreeSet<String>> {
    let changed = registration::table(name.registration()).filter(IsNewRecord(read_to));
    let mut names: BTreeSet<String> = changed
        .select(registration::name)
        .load(conn)?
        .into_iter()
        .collect();
    let ended = all_endpoints(name).filter(has_ended(read_to));
    names.extend(ended.select(endpoint::name).load::<String>(conn)?);
    Ok(names)
}

/// Deletes the records that were visible then: every relay has read them meanwhile. Returns what is visible now.
pub(crate) fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    then: Option<&ReadTo>,
) -> QueryResult<ReadTo> {
    if let Some(then) = then.filter(|_| name.has_endpoints()) {
        delete(registration::table(name.registration()))
            .filter(not(IsNewRecord(then)))
            .execute(conn)?;
    }
    now(conn)
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;
    use diesel::select;

    use super::*;
    use crate::sql::tests::Outbox;

    /// R57, R65: a look reads the changes of transactions that it has not seen, however many there were before, and however
    /// late one commits.
    #[test]
    fn a_look_reads_what_has_changed_since_the_last_one() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let table = name.endpoint();
        let insert = |names: &str| {
            format!(
                "INSERT INTO {table} (name, url) SELECT unnest('{{{names}}}'::text[]), 'https://a.example' ON CONFLICT DO NOTHING"
            )
        };
        let mut other = outbox.connect();
        other
            .batch_execute(&format!("BEGIN; {}", insert("late")))
            .expect("open");
        let first = now(conn).expect("a place");
        let new = |conn: &mut PgConnection, read_to: &ReadTo| {
            let names: Vec<String> = names(conn, name, read_to)
                .expect("names")
                .into_iter()
                .collect();
            names.join(" ")
        };
        let registered = |conn: &mut PgConnection, read_to: &ReadTo| -> Option<i64> {
            let number = number_of!(name, IsNewRecord(read_to).and(registration::is_new));
            select(number).get_result(conn).expect("a number")
        };
        assert_eq!(
            (new(conn, &first), registered(conn, &first)),
            (String::new(), None)
        );
        conn.batch_execute(&insert("a,b")).expect("rows");
        let one = registered(conn, &first);
        assert!(one.is_some());
        conn.batch_execute(&insert("a,b")).expect("no rows");
        assert_eq!(
            (new(conn, &first), registered(conn, &first)),
            ("a b".to_owned(), one)
        );
        let second = now(conn).expect("a place");
        assert_eq!(
            (new(conn, &second), registered(conn, &second)),
            (String::new(), None)
        );
        conn.batch_execute(&format!(
            "UPDATE {table} SET topics = '{{a}}' WHERE name = 'a'"
        ))
        .expect("changed");
        conn.batch_execute(&format!("DELETE FROM {table} WHERE name = 'b'"))
            .expect("removed");
        assert_eq!(
            (new(conn, &second), registered(conn, &second)),
            ("a b".to_owned(), None)
        );
        other.batch_execute("COMMIT").expect("committed late");
        assert_eq!(new(conn, &second), "a b late");
        assert!(registered(conn, &second).is_some());
        let third = now(conn).expect("a place");
        let lasts =
            format!("UPDATE {table} SET old_secrets_until = clock_timestamp() WHERE name = 'a'");
        conn.batch_execute(&lasts).expect("old secrets");
        let after = ReadTo {
            at: third.at,
            ..now(conn).expect("a place")
        };
        assert_eq!(
            new(conn, &after),
            "a",
            "its old secrets have stopped signing"
        );
        // After a failover, and in a copy of the database, numbers of transactions say nothing.
        let elsewhere = ReadTo {
            server: PgTimestamp(0),
            ..third.clone()
        };
        assert_eq!(new(conn, &elsewhere), "a b late");
        // Records that were there at the last look of the janitor are gone after the next one.
        let left = |conn: &mut PgConnection| -> i64 {
            registration::table(name.registration())
                .count()
                .get_result(conn)
                .expect("a count")
        };
        let before = forget(conn, name, None).expect("a place");
        conn.batch_execute(&insert("new")).expect("registered");
        assert!(left(conn) > 1);
        forget(conn, name, Some(&before)).expect("forgotten");
        assert_eq!(left(conn), 1, "a record that was not seen before stays");
    }
}

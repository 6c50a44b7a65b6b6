//! Forgets a tenant. Live messages, dead letters and the history are removed. The ledger keeps which messages were
//! settled and how; the tenant and the content are blanked.
//!
//! Each table is searched for the tenant's rows, which are then changed step by step.

use diesel::dsl::case_when;
use diesel::prelude::{
    BoolExpressionMethods, Connection, ExpressionMethods, IntoSql, NullableExpressionMethods,
    QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Nullable, Text, Uuid as SqlUuid};
use diesel::{PgConnection, delete, select, update};
use uuid::Uuid;

use crate::engine::send::sql::pause::is_named;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::outbox::sql::waiting::{cancel_waiting, free};
use crate::setup::sql::catalogue::has_table_privilege;
use crate::setup::sql::inspect::has_feeds;
use crate::sql::absent::{all_endpoints, all_endpoints_text};
use crate::sql::functions::{given, to_regclass};
use crate::sql::looking::looking;
use crate::sql::statement::{statement, unprepared, unprepared_statement};
use crate::sql::table::{attempt, dead, endpoint, feed, ledger, outbox, pause};

/// The most rows that one search finds.
pub(crate) const LOOK: i64 = 100_000;

/// Declares the searches for the tenant's rows of a table: in the order of a column, after a value.
macro_rules! looks {
    ($($(#[$doc:meta])* $look:ident: $table:ident.$column:ident as $value:ty, $rows:expr;)+) => {
        $(
            $(#[$doc])*
            pub(crate) fn $look(
                conn: &mut PgConnection,
                name: &OutboxName,
                tenant: Uuid,
                after: Option<$value>,
            ) -> QueryResult<Vec<$value>> {
                let rows: fn(&OutboxName) -> $table::table = $rows;
                let found = rows(name)
                    .filter($table::tenant_id.assume_not_null().eq(tenant))
                    .filter(crate::sql::functions::all_of([given(after, |after| {
                        $table::$column.gt(after)
                    })]))
                    .order($table::$column)
                    .limit(LOOK)
                    .select($table::$column);
                looking(conn, None, |conn| unprepared(found).load(conn))
            }
        )+
    };
}

looks! {
    /// Live messages.
    live: outbox.sequence as i64, |name| outbox::table(name.outbox());
    dead_letters: dead.sequence as i64, |name| dead::table(name.dead());
    /// Message ids of the history, one for each entry.
    attempts: attempt.message_id as Uuid, |name| attempt::table(name.attempt());
    /// Message ids of the ledger, one for each entry.
    entries: ledger.message_id as Uuid, |name| ledger::table(name.ledger());
    endpoints: endpoint.name as String, all_endpoints;
}

/// Removes these messages, except messages that a live relay holds. The ledger gets an entry for each, because no
/// message ends without an entry.
pub(crate) fn end_live(
    conn: &mut PgConnection,
    name: &OutboxName,
    _: Uuid,
    live: &[i64],
) -> QueryResult<usize> {
    conn.transaction(|conn| cancel_waiting(conn, name, live, None))
}

/// Removes these dead letters, and unblocks the ordering keys that they held.
pub(crate) fn remove_dead_letters(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    sequences: &[i64],
) -> QueryResult<usize> {
    conn.transaction(|conn| {
        let gone: Vec<(bool, Option<String>)> = delete(dead::table(name.dead()))
            .filter(dead::sequence.eq_any(sequences))
            .filter(dead::tenant_id.assume_not_null().eq(tenant))
            .returning((dead::blocks_key, dead::ordering_key))
            .load(conn)?;
        let count = gone.len();
        let held = gone
            .into_iter()
            .filter_map(|(blocks, key)| key.filter(|_| blocks));
        free(conn, name, held)?;
        Ok(count)
    })
}

pub(crate) fn remove_attempts(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    ids: &[Uuid],
) -> QueryResult<usize> {
    delete(attempt::table(name.attempt()))
        .filter(attempt::message_id.eq_any(ids))
        .filter(attempt::tenant_id.assume_not_null().eq(tenant))
        .execute(conn)
}

/// Blanks ledger entries. Sequence, message id, topic, status, reason code, HTTP status, attempts and times remain. The
/// destination remains, unless it is the tenant's own.
pub(crate) fn blank_entries(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    ids: &[Uuid],
) -> QueryResult<usize> {
    let of_tenant = || {
        all_endpoints(name)
            .filter(endpoint::tenant_id.assume_not_null().eq(tenant))
            .select(endpoint::name)
    };
    let nowhere = || "".into_sql::<Text>();
    update(ledger::table(name.ledger()))
        .filter(ledger::message_id.eq_any(ids))
        .filter(ledger::tenant_id.assume_not_null().eq(tenant))
        .set((
            ledger::tenant_id.eq(None::<Uuid>),
            ledger::destination.eq(
                case_when(ledger::destination.eq_any(of_tenant()), nowhere())
                    .otherwise(ledger::destination),
            ),
            ledger::named_destination.eq(case_when(
                ledger::named_destination.eq_any(of_tenant()),
                nowhere(),
            )
            .otherwise(ledger::named_destination)),
            ledger::ordering_key.eq(None::<String>),
            ledger::idempotency_key.eq(None::<String>),
            ledger::digest.eq(None::<Vec<u8>>),
            ledger::error.eq(None::<String>),
            ledger::response.eq(None::<String>),
            ledger::payload.eq(None::<crate::sql::functions::Json<'_>>),
            ledger::headers.eq(None::<crate::sql::functions::Json<'_>>),
        ))
        .execute(conn)
}

/// Events of feeds, by feed and position.
///
/// Text: Diesel has no comparison of rows.
pub(crate) fn events(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    after: Option<(String, i64)>,
) -> QueryResult<Vec<(String, i64)>> {
    if !has_feeds(conn, name)? {
        return Ok(Vec::new());
    }
    let (feed, position) = after.unzip();
    looking(conn, None, |conn| {
        unprepared_statement(format!(
            "SELECT feed, position FROM {} WHERE tenant_id = $1 AND ($2 IS NULL OR (feed, position) > ($2, $3))
              ORDER BY feed, position LIMIT $4",
            name.feed_event()
        ))
        .bind::<SqlUuid, _>(tenant)
        .bind::<Nullable<Text>, _>(feed)
        .bind::<Nullable<BigInt>, _>(position)
        .bind::<BigInt, _>(LOOK)
        .giving::<(Text, BigInt)>()
        .load(conn)
    })
}

/// Blanks these events, so that no feed has a gap. Those of the tenant's own feeds are removed: nobody reads them any more.
///
/// Text: Diesel has no UPDATE or DELETE with a join.
pub(crate) fn forget_events(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    keys: &[(String, i64)],
) -> QueryResult<usize> {
    let (feeds, positions): (Vec<&str>, Vec<i64>) =
        keys.iter().map(|(feed, at)| (feed.as_str(), *at)).unzip();
    statement(format!(
        "WITH these AS (SELECT * FROM unnest($1::text[], $2::bigint[]) t(feed, position)),
              own AS (SELECT name FROM {endpoints} d WHERE d.tenant_id = $3),
              removed AS (DELETE FROM {event} e USING these t
                           WHERE e.feed = t.feed AND e.position = t.position AND e.feed IN (SELECT name FROM own)),
              blanked AS (UPDATE {event} e SET payload = NULL, headers = NULL, ordering_key = NULL, tenant_id = NULL
                            FROM these t
                           WHERE e.feed = t.feed AND e.position = t.position AND e.feed NOT IN (SELECT name FROM own))
         SELECT 1",
        event = name.feed_event(),
        endpoints = all_endpoints_text(name),
    ))
    .bind::<Array<Text>, _>(feeds)
    .bind::<Array<BigInt>, _>(positions)
    .bind::<SqlUuid, _>(tenant)
    .execute(conn)?;
    Ok(keys.len())
}

/// Removes endpoints. The pauses that the trigger inserts for them are removed, too, unless a message
/// names the destination.
pub(crate) fn remove_endpoints(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    names: &[String],
) -> QueryResult<usize> {
    if !name.has_endpoints() {
        return Ok(0);
    }
    conn.transaction(|conn| {
        let gone: Vec<String> = delete(all_endpoints(name))
            .filter(endpoint::name.eq_any(names))
            .filter(endpoint::tenant_id.assume_not_null().eq(tenant))
            .returning(endpoint::name)
            .load(conn)?;
        let mut unnamed = Vec::new();
        for one in &gone {
            if !is_named(conn, name, one)? {
                unnamed.push(one);
            }
        }
        delete(pause::table(name.pause()))
            .filter(
                pause::kind
                    .eq_any(["destination", "removed"])
                    .and(pause::name.eq_any(unnamed)),
            )
            .execute(conn)?;
        if has_feeds(conn, name)? {
            delete(feed::table(name.feed()))
                .filter(feed::name.eq_any(&gone))
                .execute(conn)?;
        }
        Ok(gone.len())
    })
}

/// The number of live messages of the tenant.
pub(crate) fn count_live(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
) -> QueryResult<i64> {
    let live = outbox::table(name.outbox())
        .filter(outbox::tenant_id.assume_not_null().eq(tenant))
        .count();
    unprepared(live).get_result(conn)
}

/// Checks that this role may forget a tenant. Only the owner has all of these rights.
pub(crate) fn check_rights(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<(), DatabaseError> {
    let mut needed = vec![
        (name.outbox(), "DELETE"),
        (name.dead(), "DELETE"),
        (name.attempt(), "DELETE"),
        (name.ledger(), "UPDATE"),
        (name.pause(), "DELETE"),
        (name.audit(), "UPDATE"),
        (name.request(), "DELETE"),
    ];
    if name.has_endpoints() {
        needed.push((name.endpoint(), "DELETE"));
    }
    if has_feeds(conn, name)? {
        needed.extend([
            (name.feed_event(), "UPDATE"),
            (name.feed_event(), "DELETE"),
            (name.feed(), "DELETE"),
        ]);
    }
    need(conn, name, "forget the tenant", &needed)
}

/// Checks that this role has these rights on tables. `what` it cannot do otherwise.
pub(super) fn need(
    conn: &mut PgConnection,
    name: &OutboxName,
    what: &str,
    needed: &[(String, &str)],
) -> Result<(), DatabaseError> {
    let mut missing = Vec::new();
    for (table, privilege) in needed {
        let may: Option<bool> =
            select(has_table_privilege(to_regclass(table.as_str()), *privilege))
                .get_result(conn)?;
        // Null: the table does not exist, which the first search reports.
        if may == Some(false) {
            missing.push(format!("{privilege} on {table}"));
        }
    }
    match missing.is_empty() {
        true => Ok(()),
        false => Err(DatabaseError::Schema(format!(
            "cannot {what}: this needs the rights of the owner of the outbox {name}, and the role lacks {}",
            missing.join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;
    use diesel::dsl::sql;

    use super::*;
    use crate::endpoints::sql::removed::removed_of;
    use crate::sql::tests::Outbox;

    #[test]
    fn a_destination_is_removed_without_a_scan_of_the_outbox() {
        const LIVE: i64 = 20_000;
        let outbox = Outbox::new();
        let (conn, name, tenant) = (&mut outbox.connect(), &outbox.name, Uuid::now_v7());
        conn.batch_execute(&format!(
            "INSERT INTO {destination} (name, url, tenant_id)
             SELECT 'hook-' || n, 'https://a.example', '{tenant}' FROM generate_series(1, 20) n;
             INSERT INTO {table} (topic, payload) SELECT 'order.paid', '1' FROM generate_series(1, {LIVE});
             INSERT INTO {table} (topic, destination, payload) VALUES ('order.paid', 'hook-7', '1');
             ANALYZE {table}",
            destination = name.endpoint(),
            table = name.outbox()
        ))
        .expect("rows");
        let names = endpoints(conn, name, tenant, None).expect("names");
        let scanned = conn
            .transaction(|conn| {
                let removed = remove_endpoints(conn, name, tenant, &names)?;
                assert_eq!(removed, 20);
                select(sql::<BigInt>(&format!(
                    "pg_stat_get_xact_tuples_returned('{}'::regclass)",
                    name.outbox()
                )))
                .get_result::<i64>(conn)
            })
            .expect("removed");
        assert!(scanned < LIVE, "{scanned} rows were read in sequence");
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let left = removed_of(conn, name, &names).expect("marks");
        assert_eq!(left, ["hook-7"], "a message names this destination");
    }
}

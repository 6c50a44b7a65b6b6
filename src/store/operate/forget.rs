//! Forgetting a tenant. What waits and what is dead is removed, and the history with it. The ledger keeps which
//! messages were settled and how; whose they were and what they said is blanked.
//!
//! Each table is looked through for what is the tenant's, and then changed step by step.

use diesel::dsl::{case_when, not};
use diesel::prelude::{
    BoolExpressionMethods, Connection, ExpressionMethods, IntoSql, NullableExpressionMethods,
    QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::Text;
use diesel::{PgConnection, delete, select, update};
use uuid::Uuid;

use crate::name::OutboxName;
use crate::store::looking::looking;
use crate::store::sql::{given, has_table_privilege, to_regclass};
use crate::store::statement::planned_anew;
use crate::store::table::{attempt, dead, destination, ledger, outbox, pause};
use crate::store::write::waiting::{cancel_waiting, free};

/// Rows that one look finds at most.
pub(crate) const LOOK: i64 = 100_000;

/// Declares how the tenant's rows of a table are looked for: in the order of a column, from a value on.
macro_rules! looks {
    ($($(#[$doc:meta])* $look:ident: $table:ident.$column:ident as $value:ty;)+) => {
        $(
            $(#[$doc])*
            pub(crate) fn $look(
                conn: &mut PgConnection,
                name: &OutboxName,
                tenant: Uuid,
                after: Option<$value>,
            ) -> QueryResult<Vec<$value>> {
                let found = $table::table(name.$table())
                    .filter($table::tenant_id.assume_not_null().eq(tenant))
                    .filter(crate::store::sql::all_of([given(after, |after| {
                        $table::$column.gt(after)
                    })]))
                    .order($table::$column)
                    .limit(LOOK)
                    .select($table::$column);
                looking(conn, None, |conn| planned_anew(found).load(conn))
            }
        )+
    };
}

looks! {
    /// Live messages.
    live: outbox.sequence as i64;
    dead_letters: dead.sequence as i64;
    /// By the ids of their messages, each as often as it has rows.
    attempts: attempt.message_id as Uuid;
    /// As [`attempts`].
    entries: ledger.message_id as Uuid;
    destinations: destination.name as String;
}

/// Removes those of these messages that no live relay holds. The ledger gets an entry for each: no message ends
/// without one.
pub(crate) fn end_live(
    conn: &mut PgConnection,
    name: &OutboxName,
    _: Uuid,
    live: &[i64],
) -> QueryResult<usize> {
    conn.transaction(|conn| cancel_waiting(conn, name, live))
}

/// Lets the keys go on that they have held.
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

/// What is left of an entry: sequence, message id, topic, status, reason code, HTTP status, attempts and times, and
/// the destination where that is not the tenant's own.
pub(crate) fn blank_entries(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    ids: &[Uuid],
) -> QueryResult<usize> {
    let of_tenant = || {
        destination::table(name.destination())
            .filter(destination::tenant_id.assume_not_null().eq(tenant))
            .select(destination::name)
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
            ledger::payload.eq(None::<crate::store::sql::Json<'_>>),
        ))
        .execute(conn)
}

/// What the trigger notes of those that are removed goes, too, where no message names one.
pub(crate) fn remove_destinations(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    names: &[String],
) -> QueryResult<usize> {
    conn.transaction(|conn| {
        let gone: Vec<String> = delete(destination::table(name.destination()))
            .filter(destination::name.eq_any(names))
            .filter(destination::tenant_id.assume_not_null().eq(tenant))
            .returning(destination::name)
            .load(conn)?;
        let waited_for = outbox::table(name.outbox()).select(outbox::destination);
        delete(pause::table(name.pause()))
            .filter(pause::kind.eq("destination").and(pause::name.eq_any(&gone)))
            .filter(not(pause::name.eq_any(waited_for)))
            .execute(conn)?;
        Ok(gone.len())
    })
}

/// How many live messages the tenant has.
pub(crate) fn count_live(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
) -> QueryResult<i64> {
    let live = outbox::table(name.outbox())
        .filter(outbox::tenant_id.assume_not_null().eq(tenant))
        .count();
    planned_anew(live).get_result(conn)
}

/// Which rights on tables this role lacks for it: no role but the owner has them all.
pub(crate) fn missing(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<String>> {
    let needed = [
        (name.outbox(), "DELETE"),
        (name.dead(), "DELETE"),
        (name.attempt(), "DELETE"),
        (name.ledger(), "UPDATE"),
        (name.destination(), "DELETE"),
        (name.pause(), "DELETE"),
    ];
    let mut missing = Vec::new();
    for (table, privilege) in needed {
        let may: Option<bool> =
            select(has_table_privilege(to_regclass(table.as_str()), privilege)).get_result(conn)?;
        // Null: there is no such table, which the first look says.
        if may == Some(false) {
            missing.push(format!("{privilege} on {table}"));
        }
    }
    Ok(missing)
}

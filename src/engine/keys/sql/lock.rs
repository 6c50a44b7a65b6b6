//! The lock of keyed claims: a row of `outbox_lock`. Not an advisory lock, because any role may take those.

use diesel::prelude::{ExpressionMethods, OptionalExtension, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::{PgConnection, insert_into};

use crate::name::OutboxName;
use crate::sql::table::lock;

const KEYED: &str = "keyed";

/// Takes the lock until the transaction ends, or returns `false` at once. A separate statement, so that the claim sees
/// the changes of the lock's last holder.
// Why: docs/decisions.md#keyed-lock
pub(crate) fn try_lock(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    let row = lock::table(name.lock()).filter(lock::name.eq(KEYED));
    let row = row.select(lock::name).for_no_key_update().skip_locked();
    let locked: Option<String> = row.get_result(conn).optional()?;
    Ok(locked.is_some())
}

/// Inserts the row if it is missing: each relay does so before its first claim, and now and then.
pub(crate) fn keep_lock(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<usize> {
    insert_into(lock::table(name.lock()))
        .values(lock::name.eq(KEYED))
        .on_conflict_do_nothing()
        .execute(conn)
}

//! Claims on the connection of a test.

use diesel::result::QueryResult;
use diesel::{PgConnection, RunQueryDsl, select};

use crate::sql::functions::{current_setting, set_config};

/// Runs `work` with JIT compilation off, as on the relay's own connections. The planner misjudges a test's
/// uncommitted rows, and would compile each claim.
pub(crate) fn without_jit<T>(
    conn: &mut PgConnection,
    work: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    let value: String = select(current_setting("jit")).get_result(conn)?;
    let set = |conn: &mut PgConnection, value: &str| {
        select(set_config("jit", value, false)).execute(conn)
    };
    set(conn, "off")?;
    let worked = work(conn);
    // This fails in a failed transaction, whose end then restores the setting.
    let restored = set(conn, &value);
    let value = worked?;
    restored?;
    Ok(value)
}

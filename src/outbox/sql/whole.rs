//! A transaction around code of the application, which may panic.

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use diesel::connection::TransactionManager;
use diesel::pg::Pg;
use diesel::result::{Error, QueryResult};
use diesel::sql_types::Integer;
use diesel::{Connection, IntoSql, RunQueryDsl};

/// Runs `work` in a transaction, or in a savepoint of the open transaction. A panic rolls it back, too, and continues.
///
/// After a panic, Diesel leaves its transaction open. If the caller catches the panic and continues, the next COMMIT only
/// releases that savepoint, and whatever follows on the connection is lost without an error.
pub(crate) fn transaction<C: Connection, T, E: From<Error>>(
    conn: &mut C,
    work: impl FnOnce(&mut C) -> Result<T, E>,
) -> Result<T, E> {
    let mut panic = None;
    let done = conn.transaction(|conn| {
        let own = depth(conn)?;
        match catch_unwind(AssertUnwindSafe(|| work(conn))) {
            Ok(done) => done,
            Err(caught) => {
                panic = Some(caught);
                roll_back_to(conn, own)?;
                Err(Error::RollbackTransaction.into())
            }
        }
    });
    match panic {
        Some(panic) => resume_unwind(panic),
        None => done,
    }
}

/// The depth of nested transactions.
pub(crate) fn depth<C: Connection>(conn: &mut C) -> QueryResult<u32> {
    let status = C::TransactionManager::transaction_manager_status_mut(conn);
    let depth = status.transaction_depth();
    Ok(depth
        .map_err(|_| Error::BrokenTransactionManager)?
        .map_or(0, NonZeroU32::get))
}

/// Rolls back the transactions that a panic has left open.
pub(crate) fn roll_back_to<C: Connection>(conn: &mut C, depth: u32) -> QueryResult<()> {
    while self::depth(conn)? > depth {
        C::TransactionManager::rollback_transaction(conn)?;
    }
    Ok(())
}

/// Returns an error if a statement of the open transaction has failed. PostgreSQL would roll back at COMMIT, and
/// Diesel would report a commit.
pub(crate) fn check_transaction(conn: &mut impl Connection<Backend = Pg>) -> QueryResult<()> {
    diesel::select(1.into_sql::<Integer>())
        .execute(conn)
        .map(drop)
}

//! Forgetting a tenant.

use std::thread::sleep;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::result::QueryResult;
use uuid::Uuid;

use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::operate::forget as store;
use crate::store::pinned::pinned;

/// Rows that one transaction changes.
const STEP: usize = 1_000;
/// Between looks at what is under way.
const TICK: Duration = Duration::from_millis(100);

/// What [`forget`] has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Forgotten {
    /// Live messages that were removed.
    pub messages: u64,
    /// Dead letters that were removed.
    pub dead_letters: u64,
    /// Entries of the history that were removed.
    pub attempts: u64,
    /// Entries of the ledger that were blanked.
    pub ledger_entries: u64,
    /// Registered destinations that were removed.
    pub destinations: u64,
    /// Live messages that are there still: relays hold them. Forget again to be done with them.
    pub left: u64,
}

/// Removes what the outbox holds of a tenant. It cannot be undone.
///
/// | what | what becomes of it |
/// |---|---|
/// | live messages | Removed. The ledger gets an entry for each: `dead`, for the reason `CANCELLED` |
/// | dead letters, and the history of attempts | removed |
/// | the ledger | Blanked. It keeps sequence, message id, topic, status, reason code, HTTP status, attempts and times |
/// | the tenant's registered destinations | Removed, and their names blanked in the ledger |
///
/// - **Stop enqueueing for the tenant first.** Idempotency keys are blanked, because they may say who somebody is:
///   the same key enqueued again is a new message.
/// - Messages that a relay holds are waited for, for as long as `patience` says. Those that are not settled by then
///   are [`left`](Forgotten::left), and so are the tenant's registered destinations, until `forget` is called again.
/// - A thousand rows are changed in each transaction. `progress` is called after each, and while messages are
///   waited for. Where it returns `false`, `forget` ends there; calling it again goes on.
/// - What is the tenant's is told by [`tenant_id`](crate::NewMessage::tenant_id). Messages without one, log lines,
///   metrics and backups are not looked at.
/// - The role needs the rights of the outbox's owner: no relay may change the ledger.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// # use std::time::Duration;
/// # use uuid::Uuid;
/// fn leave(conn: &mut PgConnection, outbox: &OutboxName, tenant: Uuid) -> Result<bool, DatabaseError> {
///     let patience = Duration::from_secs(60);
///     let forgotten = admin::forget(conn, outbox, tenant, patience, |so_far| {
///         println!("{} entries of the ledger are blanked", so_far.ledger_entries);
///         true
///     })?;
///     Ok(forgotten.left == 0)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`]: [`Schema`](DatabaseError::Schema) where the role lacks rights, before anything is changed. What
/// was forgotten before another error stays forgotten.
pub fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    patience: Duration,
    mut progress: impl FnMut(&Forgotten) -> bool,
) -> Result<Forgotten, DatabaseError> {
    let missing = pinned(conn, name, store::missing)?;
    if !missing.is_empty() {
        return Err(DatabaseError::Schema(format!(
            "to forget a tenant needs the rights of the owner of the outbox {name}; this role has no {}",
            missing.join(", ")
        )));
    }
    let mut forgetting = Forgetting {
        conn,
        name,
        tenant,
        done: Forgotten::default(),
        progress: &mut progress,
    };
    forgetting.run(patience)?;
    Ok(forgetting.done)
}

/// How rows of a table are found, in the order of a column.
type Look<K> = fn(&mut PgConnection, &OutboxName, Uuid, Option<K>) -> QueryResult<Vec<K>>;
/// How they are changed. Returns how many were.
type Change<K> = fn(&mut PgConnection, &OutboxName, Uuid, &[K]) -> QueryResult<usize>;

/// It goes on, or was told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goes {
    On,
    NoFurther,
}

struct Forgetting<'a> {
    conn: &'a mut PgConnection,
    name: &'a OutboxName,
    tenant: Uuid,
    done: Forgotten,
    progress: &'a mut dyn FnMut(&Forgotten) -> bool,
}

impl Forgetting<'_> {
    /// Live messages first: what settles later would write into the tables that are done. Registered destinations
    /// last: their names are blanked in the ledger.
    fn run(&mut self, patience: Duration) -> Result<(), DatabaseError> {
        if self.live(patience)? == Goes::NoFurther
            || self.each(store::dead_letters, store::remove_dead_letters, |done| {
                &mut done.dead_letters
            })? == Goes::NoFurther
            || self.each(store::attempts, store::remove_attempts, |done| {
                &mut done.attempts
            })? == Goes::NoFurther
            || self.each(store::entries, store::blank_entries, |done| {
                &mut done.ledger_entries
            })? == Goes::NoFurther
            || self.count_left()? > 0
        {
            return Ok(());
        }
        self.each(store::destinations, store::remove_destinations, |done| {
            &mut done.destinations
        })?;
        Ok(())
    }

    /// Until none is left, or patience is.
    fn live(&mut self, patience: Duration) -> Result<Goes, DatabaseError> {
        let began = Instant::now();
        loop {
            let goes = self.each(store::live, store::end_live, |done| &mut done.messages)?;
            if goes == Goes::NoFurther || self.count_left()? == 0 || began.elapsed() >= patience {
                return Ok(goes);
            }
            if !(self.progress)(&self.done) {
                return Ok(Goes::NoFurther);
            }
            sleep(TICK);
        }
    }

    fn count_left(&mut self) -> Result<u64, DatabaseError> {
        let tenant = self.tenant;
        let left = pinned(self.conn, self.name, |conn, name| {
            store::count_live(conn, name, tenant)
        })?;
        self.done.left = u64::try_from(left).unwrap_or(0);
        Ok(self.done.left)
    }

    /// Looks through a table, and changes what is found, step by step.
    fn each<K: Clone>(
        &mut self,
        look: Look<K>,
        change: Change<K>,
        counted: fn(&mut Forgotten) -> &mut u64,
    ) -> Result<Goes, DatabaseError> {
        let tenant = self.tenant;
        let mut after = None;
        loop {
            let found = pinned(self.conn, self.name, |conn, name| {
                look(conn, name, tenant, after.take())
            })?;
            for step in found.chunks(STEP) {
                let changed = pinned(self.conn, self.name, |conn, name| {
                    change(conn, name, tenant, step)
                })?;
                *counted(&mut self.done) += changed as u64;
                if !(self.progress)(&self.done) {
                    return Ok(Goes::NoFurther);
                }
            }
            if i64::try_from(found.len()).unwrap_or(i64::MAX) < store::LOOK {
                return Ok(Goes::On);
            }
            after = found.last().cloned();
        }
    }
}

//! Forgets a tenant: removes the tenant's messages, and blanks the tenant's ledger entries.

use std::ops::ControlFlow;
use std::thread::sleep;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::result::QueryResult;
use uuid::Uuid;

use super::sql::audit::{self, Act};
use super::sql::{forget as store, requests};
use super::waiting::Note;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;

/// Rows that one transaction changes.
const STEP: usize = 1_000;
/// How long to wait before counting the messages that relays hold again.
const TICK: Duration = Duration::from_millis(100);

/// What [`forget`] has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Forgotten {
    /// Live messages removed.
    pub messages: u64,
    /// Dead letters removed.
    pub dead_letters: u64,
    /// History entries removed.
    pub attempts: u64,
    /// Ledger entries blanked.
    pub ledger_entries: u64,
    /// Events of feeds blanked, or removed with the feed.
    pub feed_events: u64,
    /// Endpoints removed.
    pub endpoints: u64,
    /// Live messages that remain because relays hold them. Call [`forget`] again to remove them.
    pub left: u64,
}

/// Removes everything that the outbox holds of a tenant. This cannot be undone.
///
/// | data | effect |
/// |---|---|
/// | live messages | Removed. The ledger gets an entry for each: `dead`, with the reason `CANCELLED` |
/// | dead letters, and the history of attempts | Removed |
/// | the ledger | Blanked. Sequence, message id, topic, status, reason code, HTTP status, attempts and times remain |
/// | events of feeds | Blanked: position, message id and topic remain. Those of the tenant's own feeds are removed |
/// | the tenant's endpoints | Removed, and their names blanked in the ledger and in `outbox_audit` |
/// | requests with an idempotency key | Removed, if the tenant has sent them or their answer names the tenant |
///
/// - **Stop enqueueing for the tenant first.** Idempotency keys are blanked, because they may identify a person:
///   the same key enqueued again is a new message.
/// - `forget` waits up to `patience` for messages that a relay holds. Messages that are not settled in time are
///   [`left`](Forgotten::left). Then the tenant's endpoints stay, too, until the next call.
/// - Each transaction changes 1,000 rows. `progress` is called after each transaction, and while `forget` waits for
///   messages. `forget` stops when `progress` returns `false`; the next call continues.
/// - The [`tenant_id`](crate::NewMessage::tenant_id) of a message decides. Messages without a tenant, log lines,
///   metrics and backups are not touched.
/// - The role needs the rights of the outbox's owner: no relay may change the ledger.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// # use std::time::Duration;
/// # use uuid::Uuid;
/// fn leave(conn: &mut PgConnection, outbox: &OutboxName, tenant: Uuid) -> Result<bool, DatabaseError> {
///     let patience = Duration::from_secs(60);
///     let note = admin::Note::new("alice", "the contract has ended");
///     let forgotten = admin::forget(conn, outbox, tenant, patience, &note, |so_far| {
///         println!("{} entries of the ledger are blanked", so_far.ledger_entries);
///         true
///     })?;
///     Ok(forgotten.left == 0)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`]: [`Schema`](DatabaseError::Schema) if the role lacks rights, before anything is changed. After
/// any other error, completed transactions stay.
pub fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
    patience: Duration,
    note: &Note,
    mut progress: impl FnMut(&Forgotten) -> bool,
) -> Result<Forgotten, DatabaseError> {
    pinned(conn, name, |conn, name| {
        store::check_rights(conn, name)?;
        note.audit(conn, name, Act::Forget, "a tenant")?;
        Ok::<_, DatabaseError>(())
    })?;
    let mut forgetting = ForgettingTenant {
        conn,
        name,
        tenant,
        done: Forgotten::default(),
        progress: &mut progress,
    };
    forgetting.run(patience)?;
    Ok(forgetting.done)
}

/// Finds the tenant's rows of a table, in the order of a column.
type FindRows<K> = fn(&mut PgConnection, &OutboxName, Uuid, Option<K>) -> QueryResult<Vec<K>>;
/// Changes the rows. Returns the number of changed rows.
type ChangeRows<K> = fn(&mut PgConnection, &OutboxName, Uuid, &[K]) -> QueryResult<usize>;

struct ForgettingTenant<'a> {
    conn: &'a mut PgConnection,
    name: &'a OutboxName,
    tenant: Uuid,
    done: Forgotten,
    progress: &'a mut dyn FnMut(&Forgotten) -> bool,
}

impl ForgettingTenant<'_> {
    /// Live messages come first: a message settled later would write into tables that are done. Endpoints come last: the ledger is blanked by their names.
    fn run(&mut self, patience: Duration) -> Result<(), DatabaseError> {
        if self.live(patience)?.is_break()
            || self
                .each(store::dead_letters, store::remove_dead_letters, |done| {
                    &mut done.dead_letters
                })?
                .is_break()
            || self
                .each(store::attempts, store::remove_attempts, |done| {
                    &mut done.attempts
                })?
                .is_break()
            || self
                .each(store::entries, store::blank_entries, |done| {
                    &mut done.ledger_entries
                })?
                .is_break()
            || self
                .each(store::events, store::forget_events, |done| {
                    &mut done.feed_events
                })?
                .is_break()
            || self.count_left()? > 0
        {
            return Ok(());
        }
        let tenant = self.tenant;
        pinned(self.conn, self.name, |conn, name| {
            audit::blank(conn, name, tenant)?;
            requests::forget(conn, name, tenant)
        })?;
        self.each(store::endpoints, store::remove_endpoints, |done| {
            &mut done.endpoints
        })
        .map(drop)
    }

    /// Removes live messages until none is left, or until `patience` has passed.
    fn live(&mut self, patience: Duration) -> Result<ControlFlow<()>, DatabaseError> {
        let began = Instant::now();
        loop {
            let goes = self.each(store::live, store::end_live, |done| &mut done.messages)?;
            if goes.is_break() || self.count_left()? == 0 || began.elapsed() >= patience {
                return Ok(goes);
            }
            if !(self.progress)(&self.done) {
                return Ok(ControlFlow::Break(()));
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

    /// Finds the tenant's rows of a table, and changes them step by step.
    fn each<K: Clone>(
        &mut self,
        look: FindRows<K>,
        change: ChangeRows<K>,
        counted: fn(&mut Forgotten) -> &mut u64,
    ) -> Result<ControlFlow<()>, DatabaseError> {
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
                    return Ok(ControlFlow::Break(()));
                }
            }
            if i64::try_from(found.len()).unwrap_or(i64::MAX) < store::LOOK {
                return Ok(ControlFlow::Continue(()));
            }
            after = found.last().cloned();
        }
    }
}

//! The record of operators' acts: who has done what, when and why. It is kept as long as the ledger.

use std::time::Duration;

use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, PgTextExpressionMethods, QueryDsl,
    Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{
    NullableExpressionMethods, PgConnection, TextExpressionMethods, insert_into, select, update,
};
use uuid::Uuid;

use crate::name::OutboxName;
use crate::schema::values::to_micros;
use crate::store::pinned::pinned;
use crate::store::place::{Place, Rfc3339};
use crate::store::sql::{
    TimeAndSequence, all_of, clock_timestamp, escaped, given, hashtextextended, interval,
    pg_advisory_xact_lock,
};
use crate::store::table::{audit as acts, destination};
use crate::words::words;

const MINUTE: Duration = Duration::from_secs(60);

words! {
    /// What an operator has done. The text is that of the command.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Act {
        /// Messages are due at once.
        RetryMessage = "message retry",
        /// Messages are not sent.
        CancelMessage = "message cancel",
        /// A message is due at another time.
        RescheduleMessage = "message reschedule",
        /// Messages are settled by hand.
        SettleMessage = "message settle",
        /// The content of a message is removed.
        ExpungeMessage = "message expunge",
        /// Dead letters are due again.
        RequeueDead = "dead requeue",
        /// Dead letters are deleted.
        DiscardDead = "dead discard",
        /// Delivered messages are enqueued again.
        Replay = "replay",
        /// Topics that no relay will serve again are forgotten.
        ForgetTopics = "topics forget",
        /// Topics of the application are declared.
        DeclareTopics = "topics declare",
        /// A tenant is forgotten.
        Forget = "forget",
        /// A destination or topic is paused.
        Pause = "pause",
        /// A pause has ended.
        Resume = "resume",
        /// A destination is registered or changed.
        PutDestination = "destination put",
        /// A destination is enabled.
        EnableDestination = "destination enable",
        /// A destination is disabled.
        DisableDestination = "destination disable",
        /// A destination is removed.
        RemoveDestination = "destination remove",
        /// A destination has a new secret.
        RotateDestination = "destination rotate",
        /// The secrets of destinations are encrypted with the newest key.
        EncryptDestinations = "destination encrypt",
        /// The endpoint of a destination is asked whether it wants messages.
        VerifyDestination = "destination verify",
        /// A destination gets an example.
        TestDestination = "destination test",
        /// A message is sent to a destination again.
        SendAgain = "destination send-again",
        /// A destination gets its dead letters, and perhaps what it missed.
        RecoverDestination = "destination recover",
        /// A destination gets what it missed.
        BackfillDestination = "destination backfill",
    }
}

/// An act, as it was recorded.
#[derive(Debug, Clone, Queryable)]
#[non_exhaustive]
pub struct OperatorAct {
    /// When, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub at: String,
    /// Who.
    pub who: String,
    /// What: the text of the command.
    pub act: String,
    /// On what.
    pub target: String,
    /// Why; empty: not said.
    pub why: String,
}

/// Acts whose name, act or target contains the text, latest first, and the place of each in this list.
pub(crate) fn acts(
    conn: &mut PgConnection,
    name: &OutboxName,
    text: &str,
    before: Option<Place>,
    limit: i64,
) -> QueryResult<Vec<(OperatorAct, Place)>> {
    let text = format!("%{}%", escaped(text));
    // Tells acts of the same time apart.
    let number = || hashtextextended(acts::who.concat(acts::act).concat(acts::target), 0);
    let is_at = (acts::at, number()).into_sql::<TimeAndSequence>();
    let has_text = (acts::who.ilike(text.clone()))
        .or(acts::act.ilike(text.clone()))
        .or(acts::target.ilike(text));
    let found = acts::table(name.audit())
        .filter(has_text)
        .filter(all_of([given(before, |place| is_at.lt(place.of_row()))]))
        .order((acts::at.desc(), number().desc()))
        .limit(limit)
        .select((
            (acts::at, acts::who, acts::act, acts::target, acts::why),
            (acts::at, number()),
        ))
        .load::<(OperatorAct, (PgTimestamp, i64))>(conn)?;
    let with_place = |(act, (at, sequence))| {
        let micros = to_micros(at);
        (act, Place { micros, sequence })
    };
    Ok(found.into_iter().map(with_place).collect())
}

/// How many requests were sent to endpoints for this tenant in the last minute: tests and verifications with the tenant in
/// their reason. Other transactions that count for the tenant wait until this one ends.
///
/// # Errors
/// Those of the database.
pub fn sent_lately(conn: &mut PgConnection, name: &OutboxName, tenant: Uuid) -> QueryResult<i64> {
    pinned(conn, name, |conn, name| {
        let number = hashtextextended(format!("{} {tenant}", name.audit()), 0);
        select(pg_advisory_xact_lock(number)).execute(conn)?;
        let sends = [Act::TestDestination, Act::VerifyDestination].map(Act::as_str);
        acts::table(name.audit())
            .filter(acts::at.gt(clock_timestamp() - interval(MINUTE)))
            .filter(
                acts::act
                    .eq_any(sends)
                    .and(acts::why.like(format!("%{tenant}%"))),
            )
            .count()
            .get_result(conn)
    })
}

/// Records an act. `target`: on what; for a destination, exactly its name.
pub(crate) fn audit(
    conn: &mut PgConnection,
    name: &OutboxName,
    act: Act,
    target: &str,
    (who, why): (&str, &str),
) -> QueryResult<()> {
    insert_into(acts::table(name.audit()))
        .values((
            acts::who.eq(who),
            acts::act.eq(act.as_str()),
            acts::target.eq(target),
            acts::why.eq(why),
        ))
        .execute(conn)
        .map(drop)
}

/// Blanks target and reason of acts that name the tenant or a destination of the tenant.
pub(crate) fn blank(conn: &mut PgConnection, name: &OutboxName, tenant: Uuid) -> QueryResult<()> {
    let of_tenant = destination::table(name.destination())
        .filter(destination::tenant_id.assume_not_null().eq(tenant))
        .select(destination::name);
    let tenant = format!("%{tenant}%");
    let names_it = acts::target.like(tenant.clone()).or(acts::why.like(tenant));
    update(acts::table(name.audit()))
        .filter(acts::target.eq_any(of_tenant).or(names_it))
        .set((acts::target.eq(""), acts::why.eq("")))
        .execute(conn)
        .map(drop)
}

//! The record of operators' acts: who has done what, when and why. It is kept as long as the ledger.

use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, PgTextExpressionMethods, QueryDsl, Queryable,
    RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{NullableExpressionMethods, PgConnection, TextExpressionMethods, insert_into, update};
use uuid::Uuid;

use crate::name::OutboxName;
use crate::store::place::Rfc3339;
use crate::store::sql::escaped;
use crate::store::table::{audit as acts, destination};

/// What an operator has done. The text is that of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Act {
    /// Messages are due at once.
    RetryMessage,
    /// Messages are not sent.
    CancelMessage,
    /// A message is due at another time.
    RescheduleMessage,
    /// Messages are settled by hand.
    SettleMessage,
    /// The content of a message is removed.
    ExpungeMessage,
    /// Dead letters are due again.
    RequeueDead,
    /// Dead letters are deleted.
    DiscardDead,
    /// Delivered messages are enqueued again.
    Replay,
    /// Topics that no relay will serve again are forgotten.
    ForgetTopics,
    /// A tenant is forgotten.
    Forget,
    /// A destination or topic is paused.
    Pause,
    /// A pause has ended.
    Resume,
    /// A destination is registered or changed.
    PutDestination,
    /// A destination is enabled.
    EnableDestination,
    /// A destination is disabled.
    DisableDestination,
    /// A destination is removed.
    RemoveDestination,
    /// A destination has a new secret.
    RotateDestination,
    /// The secrets of destinations are encrypted with the newest key.
    EncryptDestinations,
    /// The endpoint of a destination is asked whether it wants messages.
    VerifyDestination,
    /// A message is sent to a destination again.
    SendAgain,
    /// A destination gets its dead letters, and perhaps what it missed.
    RecoverDestination,
    /// A destination gets what it missed.
    BackfillDestination,
}

impl Act {
    fn as_str(self) -> &'static str {
        match self {
            Self::RetryMessage => "message retry",
            Self::CancelMessage => "message cancel",
            Self::RescheduleMessage => "message reschedule",
            Self::SettleMessage => "message settle",
            Self::ExpungeMessage => "message expunge",
            Self::RequeueDead => "dead requeue",
            Self::DiscardDead => "dead discard",
            Self::Replay => "replay",
            Self::ForgetTopics => "topics forget",
            Self::Forget => "forget",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::PutDestination => "destination put",
            Self::EnableDestination => "destination enable",
            Self::DisableDestination => "destination disable",
            Self::RemoveDestination => "destination remove",
            Self::RotateDestination => "destination rotate",
            Self::EncryptDestinations => "destination encrypt",
            Self::VerifyDestination => "destination verify",
            Self::SendAgain => "destination send-again",
            Self::RecoverDestination => "destination recover",
            Self::BackfillDestination => "destination backfill",
        }
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

/// Acts whose name, act or target contains the text, latest first.
pub(crate) fn acts(
    conn: &mut PgConnection,
    name: &OutboxName,
    text: &str,
    limit: i64,
) -> QueryResult<Vec<OperatorAct>> {
    let text = format!("%{}%", escaped(text));
    acts::table(name.audit())
        .filter(
            (acts::who.ilike(text.clone()))
                .or(acts::act.ilike(text.clone()))
                .or(acts::target.ilike(text)),
        )
        .order(acts::at.desc())
        .limit(limit)
        .select((acts::at, acts::who, acts::act, acts::target, acts::why))
        .load(conn)
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
    let names_it = acts::target.like(format!("%{tenant}%"));
    update(acts::table(name.audit()))
        .filter(acts::target.eq_any(of_tenant).or(names_it))
        .set((acts::target.eq(""), acts::why.eq("")))
        .execute(conn)
        .map(drop)
}

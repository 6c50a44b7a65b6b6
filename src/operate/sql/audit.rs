//! The record of operators' acts: who has done what, when and why. It is kept as long as the ledger.

use std::time::Duration;

use diesel::dsl::sql;
use diesel::expression::SqlLiteral;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, PgTextExpressionMethods, QueryDsl,
    Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable};
use diesel::{
    NullableExpressionMethods, PgConnection, TextExpressionMethods, insert_into, select, update,
};
use uuid::Uuid;

use crate::endpoints::sql::filter::escaped;
use crate::name::OutboxName;
use crate::operate::sql::place::Place;
use crate::schema::rfc3339::Rfc3339;
use crate::schema::values::to_micros;
use crate::sql::absent::all_endpoints;
use crate::sql::functions::{
    TimeAndSequence, all_of, clock_timestamp, given, hashtextextended, interval,
    pg_advisory_xact_lock, pg_try_advisory_xact_lock,
};
use crate::sql::lock_number::lock_number;
use crate::sql::pinned::pinned;
use crate::sql::table::{audit as acts, endpoint};
use crate::words::words;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

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
        PutEndpoint = "endpoint put",
        /// A destination is enabled.
        EnableEndpoint = "endpoint enable",
        /// A destination is disabled.
        DisableEndpoint = "endpoint disable",
        /// A destination is removed.
        RemoveEndpoint = "endpoint remove",
        /// A destination has a new secret.
        RotateEndpoint = "endpoint rotate",
        /// The secrets of destinations are encrypted with the newest key.
        EncryptEndpoints = "endpoint encrypt",
        /// The endpoint of a destination is asked whether it wants messages.
        VerifyEndpoint = "endpoint verify",
        /// A destination gets an example.
        TestEndpoint = "endpoint test",
        /// A message is sent to a destination again.
        SendAgain = "endpoint send-again",
        /// A destination gets its dead letters, and perhaps what it missed.
        RecoverEndpoint = "endpoint recover",
        /// A destination gets what it missed.
        BackfillEndpoint = "endpoint backfill",
        /// Readers of a feed get a token.
        MakeFeedToken = "feed token",
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

/// What a tenant may spend: so much in a minute, and in an hour. An act costs 1, a request to an endpoint 6, each
/// hundred messages that an act makes 1, and each fifth of a second that it searches for them 1. An act that has begun is
/// finished, and may spend more.
const BUDGET: [(Duration, i64); 2] = [(MINUTE, 60), (HOUR, 3_600)];

/// What an act of a tenant costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost {
    /// A change.
    Change,
    /// A change that sends a request to an endpoint.
    Request,
    /// A search for many messages that took so long, whatever it has found.
    Search(Duration),
}

/// The part of a search that costs as much as a change.
pub const SEARCH_UNIT: Duration = Duration::from_millis(200);

impl Cost {
    fn with_made(self, messages: usize) -> i64 {
        let own = match self {
            Self::Change => 1,
            Self::Request => 6,
            Self::Search(took) => {
                let units = took.as_millis() / SEARCH_UNIT.as_millis();
                i64::try_from(units).unwrap_or(i64::MAX).saturating_add(1)
            }
        };
        let messages = i64::try_from(messages).unwrap_or(i64::MAX);
        messages
            .saturating_add(99)
            .saturating_div(100)
            .saturating_add(own)
    }
}

/// Whether the budget of a tenant is spent: each act of a customer counts, over all processes.
///
/// # Errors
/// Those of the database.
pub fn is_budget_spent(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
) -> QueryResult<bool> {
    pinned(conn, name, |conn, name| {
        for (time, most) in BUDGET {
            let spent: Option<i64> = acts::table(name.audit())
                .filter(acts::at.gt(clock_timestamp() - interval(time)))
                .filter(acts::tenant_id.assume_not_null().eq(tenant))
                .select(sum_of_cost())
                .get_result(conn)?;
            if spent.unwrap_or(0) >= most {
                return Ok(true);
            }
        }
        Ok(false)
    })
}

/// Text: the sum of bigints is a numeric.
fn sum_of_cost() -> SqlLiteral<Nullable<BigInt>> {
    sql("pg_catalog.sum(cost)::bigint")
}

/// Waits for other transactions that spend from the budget of the tenant, until this one ends.
///
/// # Errors
/// Those of the database.
pub fn hold_budget(conn: &mut PgConnection, name: &OutboxName, tenant: Uuid) -> QueryResult<()> {
    let number = lock_number(&[&name.audit().to_string(), &tenant.to_string()]);
    select(pg_advisory_xact_lock(number))
        .execute(conn)
        .map(drop)
}

/// Whether a tenant may make or count many messages now: it has a budget left, and no other transaction does so for it. Its other
/// acts go on: this one may last, and has its cost at its end. So parallel ones would all begin with the same budget.
///
/// # Errors
/// Those of the database.
pub fn may_make_many(
    conn: &mut PgConnection,
    name: &OutboxName,
    tenant: Uuid,
) -> QueryResult<bool> {
    let number = lock_number(&[&name.audit().to_string(), &tenant.to_string(), "many"]);
    let is_alone: bool = select(pg_try_advisory_xact_lock(number)).get_result(conn)?;
    Ok(is_alone && !is_budget_spent(conn, name, tenant)?)
}

/// Records an act. `target`: on what; for a destination, exactly its name. `spent`: the tenant whose budget pays, and how
/// many messages the act has made.
pub(crate) fn audit(
    conn: &mut PgConnection,
    name: &OutboxName,
    act: Act,
    target: &str,
    (who, why): (&str, &str),
    spent: Option<(Uuid, Cost, usize)>,
) -> QueryResult<()> {
    let cost = spent.map_or(0, |(_, cost, made)| cost.with_made(made));
    insert_into(acts::table(name.audit()))
        .values((
            acts::who.eq(who),
            acts::act.eq(act.as_str()),
            acts::target.eq(target),
            acts::why.eq(why),
            acts::tenant_id.eq(spent.map(|(tenant, ..)| tenant)),
            acts::cost.eq(cost),
        ))
        .execute(conn)
        .map(drop)
}

/// Blanks target and reason of acts that name the tenant or a destination of the tenant.
pub(crate) fn blank(conn: &mut PgConnection, name: &OutboxName, tenant: Uuid) -> QueryResult<()> {
    let of_tenant = all_endpoints(name)
        .filter(endpoint::tenant_id.assume_not_null().eq(tenant))
        .select(endpoint::name);
    let text = format!("%{tenant}%");
    let names_it = (acts::target.like(text.clone()).or(acts::why.like(text)))
        .or(acts::tenant_id.assume_not_null().eq(tenant));
    update(acts::table(name.audit()))
        .filter(acts::target.eq_any(of_tenant).or(names_it))
        .set((
            acts::target.eq(""),
            acts::why.eq(""),
            acts::tenant_id.eq(None::<Uuid>),
        ))
        .execute(conn)
        .map(drop)
}

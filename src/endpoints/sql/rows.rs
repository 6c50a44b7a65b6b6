//! Endpoints: rows of `outbox_endpoint`.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::dsl::{count, not};
use diesel::prelude::{
    AggregateExpressionMethods, BoolExpressionMethods, ExpressionMethods,
    NullableExpressionMethods, OptionalExtension, QueryDsl, Queryable, RunQueryDsl, Selectable,
    SelectableHelper,
};
use diesel::query_dsl::methods::LoadQuery;
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::sql_types::{Array, BigInt, Text};
use diesel::{
    PgConnection, PgExpressionMethods, PgTextExpressionMethods, delete, insert_into, update,
};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use uuid::Uuid;

use super::paused;
use crate::config::{Auth, DeliveryPolicy, PolicyOption, Rate, Verification, words};
use crate::endpoints::endpoint::{Endpoint, EndpointKind, EndpointState};
use crate::endpoints::sql::filter::{escaped, filter};
use crate::hand::{Hand, PausedBy};
use crate::name::OutboxName;
use crate::schema::values::{from_micros, system_time};
use crate::setup::sql::catalogue::{pages_of, pg_relation_size};
use crate::sql::absent::{all_endpoints, all_endpoints_text};
use crate::sql::functions::{
    Json, MaybeJson, On, all_of, clock_timestamp, given, interval, length, to_regclass,
};
use crate::sql::statement::statement;
use crate::sql::table::endpoint;

/// The most secrets of one endpoint that sign at the same time.
const MOST_SECRETS: usize = 5;

filter! {
    /// Selects endpoints. All conditions that are set must hold.
    ///
    /// ```
    /// use diesel_outbox::endpoints::{EndpointFilter, EndpointState};
    /// # let tenant = uuid::Uuid::nil();
    ///
    /// let filter = EndpointFilter::default()
    ///     .tenant_id(tenant)
    ///     .enabled(true)
    ///     .state(EndpointState::Paused)
    ///     .failing(true)
    ///     .search("acme.example".to_owned())
    ///     .after("acme-1".to_owned());
    /// # let _ = filter;
    /// ```
    pub struct EndpointFilter {
        /// Only endpoints of this tenant.
        pub tenant_id: Uuid,
        /// `true`: only enabled endpoints; `false`: only disabled endpoints.
        pub enabled: bool,
        /// Only endpoints in this state.
        pub state: EndpointState,
        /// `true`: only endpoints that are failing (feeds: unread), or were when they were disabled; `false`: only the others.
        pub failing: bool,
        /// Only endpoints whose name, URL or description contains this text, ignoring case.
        pub search: String,
        /// Only endpoints whose names sort after this name: the last name of the previous page.
        pub after: String,
    }
}

#[derive(Queryable, Selectable)]
#[diesel(table_name = endpoint)]
struct StoredRow {
    name: String,
    kind: String,
    url: String,
    topics: Vec<String>,
    tenant_id: Option<Uuid>,
    #[diesel(deserialize_as = MaybeJson)]
    filter: Option<String>,
    enabled: bool,
    #[diesel(deserialize_as = MaybeJson)]
    headers: Option<String>,
    auth: Option<String>,
    mode: Option<String>,
    concurrency: Option<i32>,
    rate: Option<String>,
    timeout: Option<PgInterval>,
    #[diesel(deserialize_as = MaybeJson)]
    policy: Option<String>,
    description: Option<String>,
    disabled_reason: Option<String>,
    created_at: PgTimestamp,
    updated_at: PgTimestamp,
    failing_since: Option<PgTimestamp>,
    failing: bool,
    failing_reason: Option<String>,
    old_secrets_until: Option<PgTimestamp>,
    verification: Option<String>,
    verified_at: Option<PgTimestamp>,
    allowed_rate: Option<String>,
    verification_error: Option<String>,
    disabled_by: Option<String>,
    #[diesel(deserialize_as = MaybeJson)]
    set_by: Option<String>,
}

impl From<StoredRow> for Endpoint {
    fn from(row: StoredRow) -> Self {
        let mut problem = None;
        let headers = row
            .headers
            .and_then(|json| read("headers", headers(&json), &mut problem));
        let auth = row.auth.map(Auth::of_column).transpose();
        let auth = auth.unwrap_or_else(|error| {
            problem = problem.take().or(Some(error.to_string()));
            None
        });
        let filter =
            (row.filter).and_then(|json| read("filter", serde_json::from_str(&json), &mut problem));
        let mut policy = DeliveryPolicy {
            timeout: row.timeout.map(length),
            ..DeliveryPolicy::default()
        };
        let columns = [
            ("mode", row.mode.map(Value::from)),
            ("concurrency", row.concurrency.map(Value::from)),
            ("rate", row.rate.map(Value::from)),
        ];
        for (name, value) in columns {
            if let (Some(option), Some(value)) = (PolicyOption::named(name), value) {
                let set = option.set(&mut policy, name, value);
                problem = problem.or(set.err().map(|error| error.to_string()));
            }
        }
        if let Some(json) = row.policy {
            let read = policy.read_column(&json);
            problem = problem.or(read.err().map(|error| error.to_string()));
        }
        let verification = row.verification.unwrap_or_default();
        let verification = match verification.as_str() {
            "" => Some(Verification::None),
            word => read("verification", word.parse(), &mut problem),
        };
        let allowed_rate = row.allowed_rate;
        let allowed_rate =
            allowed_rate.and_then(|rate| read("allowed_rate", Rate::asked(&rate), &mut problem));
        let kind = read("kind", row.kind.parse(), &mut problem);
        let mut found = Self {
            kind: kind.unwrap_or_default(),
            topics: row.topics,
            tenant_id: row.tenant_id,
            filter,
            enabled: row.enabled,
            headers: headers.unwrap_or_default(),
            auth,
            policy,
            description: row.description,
            disabled_reason: row.disabled_reason,
            disabled_by: (!row.enabled).then(|| Hand::of_column(row.disabled_by.as_deref())),
            set_by: hands(row.set_by.as_deref()),
            created_at: Some(system_time(row.created_at)),
            updated_at: Some(system_time(row.updated_at)),
            failing_since: row.failing_since.map(system_time),
            failing: row.failing,
            failing_reason: row.failing_reason,
            old_secrets_until: row.old_secrets_until.map(system_time),
            verification: verification.unwrap_or_default(),
            verified_at: row.verified_at.map(system_time),
            allowed_rate,
            verification_error: row.verification_error,
            is_unread: problem.is_some(),
            ..Self::new(row.name, row.url)
        };
        found.problem = problem.or_else(|| found.check().err().map(|error| error.to_string()));
        found.set_state(None);
        found
    }
}

/// The value. If it cannot be read, `None`, and `problem` says why.
fn read<T, E: std::fmt::Display>(
    column: &str,
    value: Result<T, E>,
    problem: &mut Option<String>,
) -> Option<T> {
    let failed = |error: E| *problem = Some(format!("{column}: {error}"));
    value.map_err(failed).ok()
}

type SecretHeaders = Vec<(String, secrecy::SecretString)>;

fn headers(json: &str) -> Result<SecretHeaders, &'static str> {
    // The parser's own error would reveal part of a header value.
    let found: BTreeMap<String, String> =
        serde_json::from_str(json).map_err(|_| "not a JSON object of strings")?;
    Ok(found
        .into_iter()
        .map(|(name, value)| (name, value.into()))
        .collect())
}

/// Who has set which value. What is not understood was set by nobody.
fn hands(json: Option<&str>) -> BTreeMap<String, Hand> {
    let words = json.and_then(|json| serde_json::from_str::<BTreeMap<String, String>>(json).ok());
    let hand = |(name, word): (String, String)| Some((name, word.parse().ok()?));
    words
        .unwrap_or_default()
        .into_iter()
        .filter_map(hand)
        .collect()
}

#[cfg(feature = "relay")]
fn timestamp(time: SystemTime) -> PgTimestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    from_micros(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}

/// An endpoint by its name. With a tenant: only if the endpoint is the tenant's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WhichEndpoint<'a> {
    pub(crate) name: &'a str,
    pub(crate) tenant: Option<Uuid>,
}

fn is_it(which: WhichEndpoint<'_>) -> On<'_, endpoint::table> {
    all_of([
        given(Some(which.name), |name| endpoint::name.eq(name)),
        given(which.tenant, is_of_tenant),
    ])
}

fn is_of_tenant(tenant: Uuid) -> On<'static, endpoint::table> {
    Box::new(endpoint::tenant_id.assume_not_null().eq(tenant))
}

/// Whether the trigger `outbox_endpoint_most` refused an endpoint because its tenant has reached the limit.
pub(crate) fn exceeds_limit(error: &Error) -> bool {
    matches!(error, Error::DatabaseError(DatabaseErrorKind::CheckViolation, info)
        if info.constraint_name() == Some("outbox_endpoints_of_a_tenant"))
}

/// Which value of an endpoint the table has refused, and why. The names of its rules begin with the column.
pub(crate) fn refused_value(error: &Error) -> Option<(String, String)> {
    let Error::DatabaseError(kind, info) = error else {
        return None;
    };
    let rule = info
        .constraint_name()
        .filter(|_| matches!(kind, DatabaseErrorKind::CheckViolation))?;
    let (column, rule) = rule.strip_prefix("outbox_endpoint_")?.split_once('_')?;
    let reason = format!("refused by the table: {}", rule.replace('_', " "));
    Some((column.to_owned(), reason))
}

/// Inserts the endpoint with this secret and this authentication in its stored form. `false`: the name exists.
pub(crate) fn insert(
    conn: &mut PgConnection,
    name: &OutboxName,
    one: &Endpoint,
    (secret, auth): (Option<&str>, Option<&str>),
) -> QueryResult<bool> {
    let policy = &one.policy;
    let disabled_by = (!one.enabled).then(|| one.disabled_by.unwrap_or(Hand::Owner).as_str());
    insert_into(all_endpoints(name))
        .values((
            (
                endpoint::name.eq(&one.name),
                endpoint::kind.eq(one.kind.as_str()),
                endpoint::secret.eq(secret),
                endpoint::auth.eq(auth),
                endpoint::url.eq(&one.url),
                endpoint::topics.eq(&one.topics),
                endpoint::tenant_id.eq(one.tenant_id),
                endpoint::filter.eq(filter_column(one).as_deref().map(Json)),
                endpoint::headers.eq(headers_column(one).as_deref().map(Json)),
                endpoint::description.eq(&one.description),
            ),
            (
                endpoint::enabled.eq(one.enabled),
                endpoint::disabled_by.eq(disabled_by),
                endpoint::disabled_reason.eq(&one.disabled_reason),
            ),
            (
                endpoint::mode.eq(policy.mode.map(|mode| mode.to_string())),
                endpoint::concurrency.eq(concurrency_column(policy)),
                endpoint::rate.eq(policy.rate.map(|rate| rate.to_string())),
                endpoint::timeout.eq(policy.timeout.map(interval)),
                endpoint::policy.eq(policy.column().as_deref().map(Json)),
                endpoint::verification.eq(verification_column(one).as_deref()),
            ),
        ))
        .on_conflict(endpoint::name)
        .do_nothing()
        .execute(conn)
        .map(|count| count > 0)
}

fn filter_column(one: &Endpoint) -> Option<String> {
    one.filter.as_ref().map(ToString::to_string)
}

fn headers_column(one: &Endpoint) -> Option<String> {
    let headers: BTreeMap<&str, &str> = (one.headers.iter())
        .map(|(name, value)| (name.as_str(), value.expose_secret()))
        .collect();
    (!headers.is_empty()).then(|| serde_json::json!(headers).to_string())
}

fn concurrency_column(policy: &DeliveryPolicy) -> Option<i32> {
    let sends = policy.concurrency?;
    Some(i32::try_from(sends).unwrap_or(i32::MAX))
}

fn verification_column(one: &Endpoint) -> Option<String> {
    let verification = one.verification;
    (verification != Verification::None).then(|| verification.to_string())
}

/// The only row that a query finds, if there is one.
fn only<'a>(
    conn: &mut PgConnection,
    found: impl LoadQuery<'a, PgConnection, StoredRow>,
) -> QueryResult<Option<Endpoint>> {
    let row = found.get_result(conn).optional()?;
    Ok(row.map(Endpoint::from))
}

/// The row, locked until the end of the transaction.
pub(crate) fn lock(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
) -> QueryResult<Option<Endpoint>> {
    let found = all_endpoints(name).filter(is_it(which)).for_update();
    only(conn, found.select(StoredRow::as_select()))
}

/// Writes what has changed of a locked row, and nothing else: the columns of these values.
pub(crate) fn write(
    conn: &mut PgConnection,
    name: &OutboxName,
    one: &Endpoint,
    changed: &[&str],
    auth: Option<&str>,
) -> QueryResult<()> {
    let has = |value: &str| changed.contains(&value);
    let policy = &one.policy;
    let (filter, headers, options) = (filter_column(one), headers_column(one), policy.column());
    let is_of_policy =
        |name: &&str| PolicyOption::named(name).is_some_and(PolicyOption::is_of_column);
    let words: BTreeMap<&str, &str> = (one.set_by.iter())
        .map(|(name, by)| (name.as_str(), by.as_str()))
        .collect();
    let set_by = (!words.is_empty()).then(|| serde_json::json!(words).to_string());
    let is_set = changed.iter().any(|name| is_recorded(name));
    let disabled_by = one.disabled_by.map(Hand::as_str);
    update(all_endpoints(name))
        .filter(endpoint::name.eq(&one.name))
        .set((
            has("url").then(|| endpoint::url.eq(&one.url)),
            has("topics").then(|| endpoint::topics.eq(&one.topics)),
            has("tenant").then(|| endpoint::tenant_id.eq(one.tenant_id)),
            has("description").then(|| endpoint::description.eq(&one.description)),
            has("enabled").then(|| {
                (
                    endpoint::enabled.eq(one.enabled),
                    endpoint::disabled_by.eq(disabled_by),
                    endpoint::disabled_reason.eq(&one.disabled_reason),
                )
            }),
            has("filter").then(|| endpoint::filter.eq(filter.as_deref().map(Json))),
            has("headers").then(|| endpoint::headers.eq(headers.as_deref().map(Json))),
            has("auth").then(|| endpoint::auth.eq(auth)),
            has("verification").then(|| endpoint::verification.eq(verification_column(one))),
            has("mode").then(|| endpoint::mode.eq(policy.mode.map(|mode| mode.to_string()))),
            has("concurrency").then(|| endpoint::concurrency.eq(concurrency_column(policy))),
            has("rate").then(|| endpoint::rate.eq(policy.rate.map(|rate| rate.to_string()))),
            has("timeout").then(|| endpoint::timeout.eq(policy.timeout.map(interval))),
            changed
                .iter()
                .any(is_of_policy)
                .then(|| endpoint::policy.eq(options.as_deref().map(Json))),
            is_set.then(|| endpoint::set_by.eq(set_by.as_deref().map(Json))),
        ))
        .execute(conn)
        .map(drop)
}

/// The values of which the row says who has set them.
pub(crate) fn recorded() -> impl Iterator<Item = &'static str> {
    let options = PolicyOption::of_endpoints().map(|option| option.name);
    ["filter", "headers", "auth", "verification"]
        .into_iter()
        .chain(options)
}

/// Whether the row says who has set this value.
pub(crate) fn is_recorded(value: &str) -> bool {
    recorded().any(|name| name == value)
}

/// The names of the values that differ, as [`write`] takes them.
pub(crate) fn differing(before: &Endpoint, after: &Endpoint) -> Vec<&'static str> {
    let auth = |one: &Endpoint| {
        let auth = one.auth.as_ref();
        auth.map(|auth| auth.written().expose_secret().to_owned())
    };
    let disabled = |one: &Endpoint| {
        let why = (one.disabled_by, one.disabled_reason.clone());
        (!one.enabled).then_some(why)
    };
    let own = [
        ("url", before.url != after.url),
        ("topics", before.topics != after.topics),
        ("tenant", before.tenant_id != after.tenant_id),
        ("description", before.description != after.description),
        ("enabled", disabled(before) != disabled(after)),
        ("filter", before.filter != after.filter),
        ("headers", headers_column(before) != headers_column(after)),
        ("auth", auth(before) != auth(after)),
        ("verification", before.verification != after.verification),
    ];
    let own = own
        .into_iter()
        .filter_map(|(name, differs)| differs.then_some(name));
    let options = PolicyOption::of_endpoints()
        .filter(|option| option.value(&before.policy) != option.value(&after.policy))
        .map(|option| option.name);
    own.chain(options).collect()
}

/// Whether an endpoint of this name exists.
pub(crate) fn exists(conn: &mut PgConnection, name: &OutboxName, which: &str) -> QueryResult<bool> {
    let row = all_endpoints(name).filter(endpoint::name.eq(which));
    let found = row.select(endpoint::name).get_result::<String>(conn);
    Ok(found.optional()?.is_some())
}

/// Keeps the row until the end of the transaction. `false`: it does not exist.
pub(crate) fn hold(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
) -> QueryResult<bool> {
    let row = all_endpoints(name).filter(is_it(which));
    let row = row.select(endpoint::name).for_key_share();
    let row = row.get_result::<String>(conn).optional()?;
    Ok(row.is_some())
}

pub(crate) fn get(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
) -> QueryResult<Option<Endpoint>> {
    let found = all_endpoints(name).filter(is_it(which));
    only(conn, found.select(StoredRow::as_select()))
}

/// Endpoints, ordered by name.
pub(crate) fn list(
    conn: &mut PgConnection,
    name: &OutboxName,
    (filter, tenant): (&EndpointFilter, Option<Uuid>),
    limit: usize,
) -> QueryResult<Vec<Endpoint>> {
    let which: On<'_, endpoint::table> = all_of([
        given(tenant, is_of_tenant),
        given(filter.state, |state| is_in_state(name, state)),
        given(filter.tenant_id, is_of_tenant),
        given(filter.enabled, |enabled| endpoint::enabled.eq(enabled)),
        given(filter.failing, |failing| endpoint::failing.eq(failing)),
        given(filter.search.as_deref(), |text| {
            let text = format!("%{}%", escaped(text));
            let in_description = endpoint::description.assume_not_null().ilike(text.clone());
            (endpoint::name.ilike(text.clone()))
                .or(endpoint::url.ilike(text))
                .or(endpoint::description.is_not_null().and(in_description))
        }),
        given(filter.after.as_deref(), |after| endpoint::name.gt(after)),
    ]);
    let found = all_endpoints(name)
        .filter(which)
        .order(endpoint::name)
        .limit(i64::try_from(limit).unwrap_or(i64::MAX))
        .select(StoredRow::as_select())
        .load::<StoredRow>(conn)?;
    Ok(found.into_iter().map(Endpoint::from).collect())
}

/// The row is in this state.
fn is_in_state(name: &OutboxName, state: EndpointState) -> On<'static, endpoint::table> {
    let is_paused = || paused::is_paused(name);
    let may_send = || endpoint::enabled.and(not(is_unverified()));
    let fails = || may_send().and(not(is_paused())).and(endpoint::failing);
    let is_feed = || endpoint::kind.eq(EndpointKind::Feed.as_str());
    match state {
        EndpointState::Disabled => Box::new(not(endpoint::enabled)),
        EndpointState::Unverified => Box::new(endpoint::enabled.and(is_unverified())),
        EndpointState::Paused => Box::new(may_send().and(is_paused())),
        EndpointState::Failing => Box::new(fails().and(not(is_feed()))),
        EndpointState::Unread => Box::new(fails().and(is_feed())),
        EndpointState::Active => {
            Box::new(may_send().and(not(is_paused())).and(not(endpoint::failing)))
        }
    }
}

/// The number of endpoints in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointCounts {
    /// Active: messages are sent.
    pub working: i64,
    /// Enabled, but the endpoint has not shown yet that it wants messages: nothing is sent.
    pub unverified: i64,
    /// Enabled, but paused by an operator, by its owner, by its receiver or by its circuit breaker.
    pub paused: i64,
    /// Enabled, but no send has succeeded for ten minutes since the first failure.
    pub failing: i64,
    /// An enabled feed that has events, and that nobody reads.
    pub unread: i64,
    /// Disabled: nothing is sent.
    pub disabled: i64,
}

/// The number of endpoints in each state, and the sizes of these tables in pages: one statement, because
/// every relay asks it again and again.
pub(crate) fn counts_and_pages(
    conn: &mut PgConnection,
    name: &OutboxName,
    [one, other, third]: [&str; 3],
) -> QueryResult<(EndpointCounts, [i64; 3])> {
    let of = |state| count(endpoint::name).aggregate_filter(is_in_state(name, state));
    type RowCounts = (
        i64,
        i64,
        i64,
        i64,
        i64,
        i64,
        Option<i64>,
        Option<i64>,
        Option<i64>,
    );
    let (working, unverified, paused, failing, unread, disabled, one, other, third): RowCounts =
        all_endpoints(name)
            .select((
                of(EndpointState::Active),
                of(EndpointState::Unverified),
                of(EndpointState::Paused),
                of(EndpointState::Failing),
                of(EndpointState::Unread),
                of(EndpointState::Disabled),
                pages_of!(pg_relation_size(to_regclass(one))),
                pages_of!(pg_relation_size(to_regclass(other))),
                pages_of!(pg_relation_size(to_regclass(third))),
            ))
            .get_result(conn)?;
    let counts = EndpointCounts {
        working,
        unverified,
        paused,
        failing,
        unread,
        disabled,
    };
    Ok((counts, [one, other, third].map(Option::unwrap_or_default)))
}

/// Decides the state of each endpoint with its pauses.
pub(crate) fn read_states(
    conn: &mut PgConnection,
    name: &OutboxName,
    found: &mut [Endpoint],
) -> QueryResult<()> {
    let names: Vec<&str> = found.iter().map(|one| one.name.as_str()).collect();
    let mut pauses: HashMap<String, PausedBy> = paused::of_destinations(conn, name, &names)?;
    for one in found {
        let pause = pauses.remove(&one.name);
        one.set_state(pause);
    }
    Ok(())
}

/// Whether the endpoint has yet to show that it wants messages.
pub(crate) fn is_unverified() -> On<'static, endpoint::table> {
    let verification = endpoint::verification;
    let is_wanted = verification.assume_not_null().ne("none");
    Box::new((verification.is_not_null().and(is_wanted)).and(endpoint::verified_at.is_null()))
}

/// One version of a row: its name, and the time of its last change.
#[cfg(feature = "relay")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AsSeen<'a> {
    pub(crate) name: &'a str,
    pub(crate) updated_at: Option<SystemTime>,
}

/// The row as it was seen.
#[cfg(feature = "relay")]
pub(crate) fn is_as_seen(seen: AsSeen<'_>) -> On<'_, endpoint::table> {
    let seen_at = seen.updated_at.map(timestamp);
    let is_same = endpoint::updated_at.nullable().eq(seen_at);
    Box::new(endpoint::name.eq(seen.name).and(is_same.assume_not_null()))
}

/// Keeps the row as it was seen until the end of the transaction. `false`: it has changed.
#[cfg(feature = "relay")]
pub(crate) fn hold_as_seen(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
) -> QueryResult<bool> {
    let row = all_endpoints(name).filter(is_as_seen(seen));
    let row = row.select(endpoint::name).for_share();
    let row = row.get_result::<String>(conn).optional()?;
    Ok(row.is_some())
}

/// Disables the endpoint for this reason, if it is enabled and unchanged since it was seen and, with `failed_for`,
/// has failed for this time. `false`: the endpoint has changed, is already disabled, or is gone, or a send has
/// succeeded.
#[cfg(feature = "relay")]
pub(crate) fn disable_as_seen(
    conn: &mut PgConnection,
    name: &OutboxName,
    seen: AsSeen<'_>,
    (by, reason): (Hand, &str),
    failed_for: Option<Duration>,
) -> QueryResult<bool> {
    let fails: On<'_, endpoint::table> = all_of([given(failed_for, |time| {
        let since = endpoint::failing_since;
        let is_long = since
            .assume_not_null()
            .le(clock_timestamp() - interval(time));
        since.is_not_null().and(is_long)
    })]);
    update(all_endpoints(name))
        .filter(is_as_seen(seen))
        .filter(endpoint::enabled)
        .filter(fails)
        .set((
            endpoint::enabled.eq(false),
            endpoint::disabled_by.eq(by.as_str()),
            endpoint::disabled_reason.eq(reason),
        ))
        .execute(conn)
        .map(|count| count > 0)
}

/// The tenants of the endpoints among these that have one, by name.
pub(crate) fn tenants(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &[&str],
) -> QueryResult<HashMap<String, Uuid>> {
    let found: Vec<(String, Uuid)> = all_endpoints(name)
        .filter(endpoint::name.eq_any(names))
        .filter(endpoint::tenant_id.is_not_null())
        .select((endpoint::name, endpoint::tenant_id.assume_not_null()))
        .load(conn)?;
    Ok(found.into_iter().collect())
}

/// The URL and the description of the endpoints among these, by name.
pub(crate) fn called(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &[&str],
) -> QueryResult<HashMap<String, (String, Option<String>)>> {
    let found: Vec<(String, (String, Option<String>))> = all_endpoints(name)
        .filter(endpoint::name.eq_any(names))
        .select((endpoint::name, (endpoint::url, endpoint::description)))
        .load(conn)?;
    Ok(found.into_iter().collect())
}

/// The registration of the endpoint now.
pub(crate) fn registration(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
) -> QueryResult<Option<Uuid>> {
    all_endpoints(name)
        .filter(is_it(which))
        .select(endpoint::id)
        .get_result(conn)
        .optional()
}

/// Removes the endpoint. `false`: the endpoint does not exist.
pub(crate) fn remove(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
) -> QueryResult<bool> {
    delete(all_endpoints(name))
        .filter(is_it(which))
        .execute(conn)
        .map(|count| count > 0)
}

/// What a row keeps secret, plain or sealed.
#[derive(Queryable, Selectable)]
#[diesel(table_name = endpoint)]
pub(crate) struct Secrets {
    pub(crate) name: String,
    /// The secrets that sign, newest first.
    pub(crate) secret: Option<String>,
    pub(crate) auth: Option<String>,
}

/// The secrets of the endpoint.
pub(crate) fn secrets(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
) -> QueryResult<Option<Secrets>> {
    all_endpoints(name)
        .filter(is_it(which))
        .select(Secrets::as_select())
        .get_result(conn)
        .optional()
}

/// The secrets of these endpoints, ordered by name.
pub(crate) fn secrets_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &[&str],
) -> QueryResult<Vec<Secrets>> {
    all_endpoints(name)
        .filter(endpoint::name.eq_any(names))
        .order(endpoint::name)
        .select(Secrets::as_select())
        .load(conn)
}

/// The secrets of all endpoints whose names sort after this name, ordered by name.
pub(crate) fn secrets_behind(
    conn: &mut PgConnection,
    name: &OutboxName,
    after: &str,
    limit: i64,
) -> QueryResult<Vec<Secrets>> {
    all_endpoints(name)
        .filter(endpoint::name.gt(after))
        .order(endpoint::name)
        .limit(limit)
        .select(Secrets::as_select())
        .load(conn)
}

/// Replaces the secrets `before`. `false`: the endpoint does not exist, or its secrets have changed.
pub(crate) fn replace_secrets(
    conn: &mut PgConnection,
    name: &OutboxName,
    before: &Secrets,
    after: &Secrets,
) -> QueryResult<bool> {
    update(all_endpoints(name))
        .filter(endpoint::name.eq(&before.name))
        .filter(endpoint::secret.is_not_distinct_from(&before.secret))
        .filter(endpoint::auth.is_not_distinct_from(&before.auth))
        .set((
            endpoint::secret.eq(&after.secret),
            endpoint::auth.eq(&after.auth),
        ))
        .execute(conn)
        .map(|count| count > 0)
}

/// The number of rows, and the sum of their stamps. Both together show whether any row has changed.
pub(crate) type Stamp = (i64, i64);

/// A row's stamp: a number that changes when the row changes, and when its old secrets stop signing.
///
/// Text: a hash function of the server, and a time in microseconds.
const STAMP: &str = "hashtextextended(name, (extract(epoch FROM updated_at) * 1000000)::bigint
    + (coalesce(old_secrets_until > clock_timestamp(), true))::int)";

/// A number that changes when the row begins to fail, or works again. An endpoint that works has 0.
const FAILING_STAMP: &str =
    "coalesce(hashtextextended(name, (extract(epoch FROM failing_since) * 1000000)::bigint), 0)";

/// The stamp of the whole table, and the stamp of its failing endpoints.
///
/// Text: sums of hashes.
pub(crate) fn stamp(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<(Stamp, i64)> {
    let (count, stamp, failing) = statement(format!(
        "SELECT count(*), (coalesce(sum({STAMP}), 0) % 9223372036854775807)::bigint,
                (coalesce(sum({FAILING_STAMP}), 0) % 9223372036854775807)::bigint FROM {} d",
        all_endpoints_text(name)
    ))
    .giving::<(BigInt, BigInt, BigInt)>()
    .get_result(conn)?;
    Ok(((count, stamp), failing))
}

/// The stamp of each row, or with `only` of these, by name. Text: like [`stamp`].
pub(crate) fn stamps(
    conn: &mut PgConnection,
    name: &OutboxName,
    only: Option<&[&str]>,
) -> QueryResult<Vec<(String, i64)>> {
    let rows = format!("SELECT name, {STAMP} FROM {} d", all_endpoints_text(name));
    match only {
        None => statement(rows).giving::<(Text, BigInt)>().load(conn),
        Some(names) => statement(format!("{rows} WHERE name = ANY($1)"))
            .bind::<Array<Text>, _>(names)
            .giving::<(Text, BigInt)>()
            .load(conn),
    }
}

/// An endpoint as a relay knows it.
#[derive(Debug, Clone)]
pub(crate) struct EndpointRow {
    pub(crate) row: Endpoint,
    /// Tells this registration from others of the same name.
    pub(crate) id: Uuid,
    /// The secrets that sign now.
    pub(crate) secrets: Option<SecretString>,
}

/// Whether all secrets of an endpoint sign, not only the newest.
fn all_sign() -> On<'static, endpoint::table> {
    let until = endpoint::old_secrets_until;
    let lasts = until.assume_not_null().gt(clock_timestamp());
    Box::new(until.is_null().or(lasts))
}

/// The secrets in a column that sign now, newest first.
fn signing(column: &str, all_sign: bool) -> impl Iterator<Item = &str> {
    let most = if all_sign { usize::MAX } else { 1 };
    words(column).take(most)
}

/// The existing endpoints among `names`.
pub(crate) fn endpoint_rows(
    conn: &mut PgConnection,
    name: &OutboxName,
    names: &[String],
) -> QueryResult<Vec<EndpointRow>> {
    endpoint_rows_that(conn, name, Box::new(endpoint::name.eq_any(names)))
}

/// The endpoint, as a relay knows it.
pub(crate) fn endpoint_row(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
) -> QueryResult<Option<EndpointRow>> {
    Ok(endpoint_rows_that(conn, name, is_it(which))?.pop())
}

fn endpoint_rows_that(
    conn: &mut PgConnection,
    name: &OutboxName,
    is_meant: On<'_, endpoint::table>,
) -> QueryResult<Vec<EndpointRow>> {
    let found = all_endpoints(name)
        .filter(is_meant)
        .select((
            StoredRow::as_select(),
            endpoint::id,
            (endpoint::secret, all_sign()),
        ))
        .load::<(StoredRow, Uuid, (Option<String>, bool))>(conn)?;
    let of_row =
        |(row, id, (secrets, all_sign)): (StoredRow, Uuid, (Option<String>, bool))| EndpointRow {
            row: row.into(),
            id,
            secrets: secrets.map(|column| {
                let secrets: Vec<&str> = signing(&column, all_sign).collect();
                secrets.join(" ").into()
            }),
        };
    Ok(found.into_iter().map(of_row).collect())
}

/// Adds a new secret before the existing secrets, which keep signing for `keep`. `false`: the endpoint does not
/// exist. Needs a transaction.
pub(crate) fn rotate(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichEndpoint<'_>,
    new: &str,
    keep: Duration,
) -> QueryResult<bool> {
    let found: Option<(Option<String>, bool)> = all_endpoints(name)
        .filter(is_it(which))
        .for_update()
        .select((endpoint::secret, all_sign()))
        .get_result(conn)
        .optional()?;
    let Some((before, all_sign)) = found else {
        return Ok(false);
    };
    let before = before.unwrap_or_default();
    let secrets = [new].into_iter().chain(signing(&before, all_sign));
    let secrets: Vec<&str> = secrets.take(MOST_SECRETS).collect();
    update(all_endpoints(name))
        .filter(is_it(which))
        .set((
            endpoint::secret.eq(secrets.join(" ")),
            endpoint::old_secrets_until.eq((clock_timestamp() + interval(keep)).nullable()),
        ))
        .execute(conn)?;
    Ok(true)
}

//! The topics that relays have served. A message whose topic meets one waits for such a relay, also while none runs.

use diesel::prelude::{ExpressionMethods, QueryDsl, Queryable, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::{PgConnection, delete, insert_into, update};

use crate::name::OutboxName;
use crate::routes::Serves;
use crate::store::place::Rfc3339;
use crate::store::sql::clock_timestamp;
use crate::store::table::topic;

/// Topics that a route or a handler of any relay has served.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, serde::Serialize)]
#[non_exhaustive]
pub struct ServedTopic {
    /// The pattern of a route, or the topic of a handler.
    pub pattern: String,
    /// `route` or `handler`.
    pub kind: String,
    /// When a relay that serves them was first started, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub first_served: String,
    /// When a relay that serves them was last started, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub last_served: String,
}

/// Records what a relay serves. Waits for no row that a person has locked, because the registration of a lease would
/// wait with it: such a row keeps its time.
pub(crate) fn record(
    conn: &mut PgConnection,
    name: &OutboxName,
    serves: &Serves,
) -> QueryResult<()> {
    let rows = || topic::table(name.topic());
    let known: Vec<(String, String)> = rows().select((topic::pattern, topic::kind)).load(conn)?;
    let is_known =
        |pattern: &str, kind: &str| known.iter().any(|one| one.0 == pattern && one.1 == kind);
    for (pattern, kind) in serves.topics() {
        if !is_known(&pattern, kind) {
            insert_into(rows())
                .values((topic::pattern.eq(pattern), topic::kind.eq(kind)))
                .on_conflict_do_nothing()
                .execute(conn)?;
            continue;
        }
        let row = rows().filter(topic::pattern.eq(pattern.clone()));
        let row = row.filter(topic::kind.eq(kind)).select(topic::pattern);
        let free: Vec<String> = row.for_no_key_update().skip_locked().load(conn)?;
        update(rows())
            .filter(topic::pattern.eq_any(free))
            .filter(topic::kind.eq(kind))
            .set(topic::last_served.eq(clock_timestamp()))
            .execute(conn)?;
    }
    Ok(())
}

/// The patterns of all topics that any relay has ever served.
pub(super) fn patterns(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<String>> {
    let patterns = topic::table(name.topic()).select(topic::pattern);
    patterns.order(topic::pattern).load(conn)
}

pub(crate) fn list(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<ServedTopic>> {
    topic::table(name.topic())
        .order((topic::pattern, topic::kind))
        .select((
            topic::pattern,
            topic::kind,
            topic::first_served,
            topic::last_served,
        ))
        .load(conn)
}

/// Forgets a pattern, of this kind or of any. Returns the number of forgotten rows.
pub(crate) fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    pattern: &str,
    kind: Option<&str>,
) -> QueryResult<usize> {
    let row = delete(topic::table(name.topic())).filter(topic::pattern.eq(pattern.to_owned()));
    match kind {
        Some(kind) => row.filter(topic::kind.eq(kind.to_owned())).execute(conn),
        None => row.execute(conn),
    }
}

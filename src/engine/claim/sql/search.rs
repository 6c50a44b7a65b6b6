//! The queries of the searches for messages that claims of lanes do not find.

use diesel::PgConnection;
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl, SelectableHelper};
use diesel::result::QueryResult;

use super::claim::{Position, Stream, as_bigint, is_due, is_free};
use super::late::{LookForLate, late};
use super::page::{Free, PAGE, Page};
use super::unserved::expired;
use super::walk::{first_of, walk};
use crate::engine::keys::sql::ordered::Key;
use crate::name::OutboxName;
use crate::sql::range::Range;
use crate::sql::table::candidate;

/// What a search looks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ask {
    /// The expired messages of a stream, after a position.
    Expired(Stream, Position),
    /// Messages that were committed after claims had passed their positions.
    Late(LookForLate),
    /// The first messages of these keys.
    Keys(Vec<Key>),
    /// The first messages of all keys, from this key on.
    Walk(Key),
    /// The free messages in a range of sequences.
    Range(Range),
}

impl Ask {
    /// Whether the query may read much more than it returns.
    pub(crate) fn may_be_long(&self) -> bool {
        match self {
            Self::Late(_) | Self::Walk(_) | Self::Range(_) => true,
            Self::Expired(..) | Self::Keys(_) => false,
        }
    }
}

/// Finds messages that are due, and not held or held by one of the leases `expired`.
pub(crate) fn find(
    conn: &mut PgConnection,
    name: &OutboxName,
    leases: &[i64],
    ask: &Ask,
) -> QueryResult<Page> {
    match ask {
        Ask::Expired(stream, after) => expired(conn, name, stream, *after),
        Ask::Late(look) => late(conn, name, leases, *look),
        Ask::Keys(keys) => first_of(conn, name, leases, keys),
        Ask::Walk(from) => walk(conn, name, leases, from),
        Ask::Range(range) => free(conn, name, leases, *range),
    }
}

/// The first messages of the range that are due, and not held or held by an expired lease. They are found by the primary
/// key, so dead entries of other indexes do not slow the query.
fn free(
    conn: &mut PgConnection,
    name: &OutboxName,
    expired: &[i64],
    range: Range,
) -> QueryResult<Page> {
    let found = candidate::table(name.outbox())
        .filter(candidate::sequence.gt(range.after))
        .filter(candidate::sequence.le(range.upto))
        .filter(is_due())
        .filter(is_free(expired))
        .order(candidate::sequence)
        .limit(as_bigint(PAGE))
        .select(Free::as_select())
        .load(conn)?;
    Ok(Page::of_sequences(found))
}

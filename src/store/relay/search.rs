//! The queries of the searches for messages that claims of lanes do not find.

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::claim::{Position, Stream};
use super::late::{LookForLate, Writers, late};
use super::ordered::{Key, first_of, walk};
use super::patrol::{Free, free};
use super::unserved::expired;
use crate::name::OutboxName;
use crate::store::range::Range;

/// The most messages of a page.
pub(crate) const PAGE: usize = 500;

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

/// A part of what a search finds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) found: Vec<Free>,
    /// Where the next page begins; `None`: there are no more messages.
    pub(crate) next: Option<Place>,
    /// Only of a search for late messages.
    pub(crate) moment: Option<Moment>,
}

/// The place of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// At this key, which must be read again.
    Key(Key),
    After(i64),
    Behind(Position),
}

/// The state of the outbox at the moment of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    /// The last existing sequence; `None`: no message is newer than the known ones.
    pub(crate) newest: Option<i64>,
    pub(crate) writers: Writers,
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

impl Page {
    /// A page of at most [`PAGE`] messages, in the order of their sequences.
    pub(crate) fn of_sequences(found: Vec<Free>) -> Self {
        let last = found.get(PAGE - 1).map(|last| last.sequence);
        Self {
            found,
            next: last.map(Place::After),
            moment: None,
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

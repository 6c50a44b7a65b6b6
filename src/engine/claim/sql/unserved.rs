//! Expired messages that no relay serves.

use std::collections::HashMap;

use diesel::PgConnection;
use diesel::prelude::{
    ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl, SelectableHelper,
};
use diesel::result::QueryResult;
use diesel::sql_types::Text;

use super::claim::{Position, Stream, as_bigint, is_behind, is_due};
use super::page::{Free, PAGE, Page, SearchPlace};
use super::streams::is_of;
use crate::name::OutboxName;
use crate::sql::functions::{clock_timestamp, octet_length};
use crate::sql::statement::unprepared;
use crate::sql::table::{candidate, outbox};

/// The most messages that one call reads.
const READ: usize = 5_000;
/// The most bytes of the payloads that one call returns. The first message is returned whatever its size.
const MOST_BYTES: usize = 4 * 1024 * 1024;

/// The due messages of a stream, after a position, that have expired. Only due messages can be claimed.
pub(crate) fn expired(
    conn: &mut PgConnection,
    name: &OutboxName,
    stream: &Stream,
    after: Position,
) -> QueryResult<Page> {
    let first = candidate::table(name.outbox())
        .filter(is_of(stream))
        .filter(is_due())
        .filter(is_behind(after))
        .order((candidate::available_at, candidate::sequence))
        .limit(as_bigint(READ))
        .select((
            Free::as_select(),
            candidate::expires_at.le(clock_timestamp().nullable()),
        ));
    let read: Vec<(Free, Option<bool>)> = unprepared(first).load(conn)?;
    let mut is_cut = read.len() >= READ;
    let expired = read
        .iter()
        .filter(|(_, has_expired)| *has_expired == Some(true));
    let expired: Vec<i64> = expired.map(|(one, _)| one.sequence).take(PAGE).collect();
    let sizes = sizes(conn, name, &expired)?;
    let (mut found, mut last, mut bytes) = (Vec::new(), None, 0);
    for (one, has_expired) in read {
        let position = one.position();
        if has_expired == Some(true) {
            bytes += sizes.get(&one.sequence).copied().unwrap_or(0);
            let is_full = found.len() >= PAGE || bytes > MOST_BYTES;
            if is_full && !found.is_empty() {
                is_cut = true;
                break;
            }
            found.push(one);
        }
        last = Some(position);
    }
    Ok(Page {
        found,
        next: last.filter(|_| is_cut).map(SearchPlace::Behind),
        moment: None,
    })
}

/// The bytes of the payloads of these messages, if they still exist.
fn sizes(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
) -> QueryResult<HashMap<i64, usize>> {
    let sizes: Vec<(i64, i32)> = outbox::table(name.outbox())
        .filter(outbox::sequence.eq_any(sequences))
        .select((
            outbox::sequence,
            octet_length(outbox::payload.cast::<Text>()),
        ))
        .load(conn)?;
    let size = |(sequence, bytes)| (sequence, usize::try_from(bytes).unwrap_or(0));
    Ok(sizes.into_iter().map(size).collect())
}

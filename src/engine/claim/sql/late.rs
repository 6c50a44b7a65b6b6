//! Messages that were committed late. They are found by sequence, because their position in the claim order does not
//! show that they are new.

use diesel::PgConnection;
use diesel::dsl::{array, sql};
use diesel::expression::SqlLiteral;
use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, OptionalExtension, QueryDsl, Queryable,
    RunQueryDsl, Selectable,
};
use diesel::result::{Error, QueryResult};
use diesel::select;
use diesel::sql_types::{BigInt, Record};

use super::claim::{as_bigint, is_due, is_free};
use super::page::{ColumnsSql, Free, FreeColumns, Moment, PAGE, Page, Writers};
use crate::engine::keys::sql::ordered::is_first;
use crate::name::OutboxName;
use crate::sql::table::{candidate, other};

/// Where a query starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LookForLate {
    /// After this sequence; `None`: query only the writers and the newest sequence.
    pub(crate) behind: Option<i64>,
    /// Only messages due before this time, in microseconds. Claims find the others.
    pub(crate) due_before: i64,
    /// The last sequence that is already known.
    pub(crate) known: i64,
}

/// The first messages after a sequence that have long been due, are free, and have no live message before them
/// in their key. Transaction numbers and messages are from the same moment.
pub(crate) fn late(
    conn: &mut PgConnection,
    name: &OutboxName,
    expired: &[i64],
    look: LookForLate,
) -> QueryResult<Page> {
    let has_its_turn = is_first(name, Some(""));
    let columns = <Free as Selectable<Pg>>::construct_selection();
    let free = candidate::table(name.outbox())
        .filter(candidate::sequence.gt(look.behind.unwrap_or(i64::MAX)))
        .filter(candidate::available_at.lt(PgTimestamp(look.due_before)))
        .filter(is_due())
        .filter(is_free(expired))
        .filter(candidate::ordering_key.is_null().or(has_its_turn))
        .order(candidate::sequence)
        .limit(as_bigint(PAGE))
        .select(columns.into_sql::<Record<ColumnsSql>>());
    let newest = other::table(name.outbox())
        .filter(other::sequence.gt(look.known))
        .order(other::sequence.desc())
        .limit(1)
        .select(other::sequence)
        .single_value();
    let (oldest, next, newest, free) = select((
        number_of("pg_snapshot_xmin"),
        number_of("pg_snapshot_xmax"),
        newest,
        array(free),
    ))
    .get_result::<(i64, i64, Option<i64>, Vec<FreeColumns>)>(conn)?;
    let free = free.into_iter().map(Queryable::<ColumnsSql, Pg>::build);
    let free = free.collect::<Result<_, _>>();
    let writers = Writers { oldest, next };
    Ok(Page {
        moment: Some(Moment { newest, writers }),
        ..Page::of_sequences(free.map_err(Error::DeserializationError)?)
    })
}

/// The highest sequence, or 0 if there is no message.
pub(crate) fn newest(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<i64> {
    let newest = other::table(name.outbox())
        .order(other::sequence.desc())
        .select(other::sequence);
    Ok(newest.first(conn).optional()?.unwrap_or(0))
}

/// Text: Diesel has no type for transaction numbers.
fn number_of(bound: &str) -> SqlLiteral<BigInt> {
    sql(&format!(
        "pg_catalog.{bound}(pg_catalog.pg_current_snapshot())::pg_catalog.text::pg_catalog.int8"
    ))
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::sql::tests::Outbox;

    /// R8: the inserts of an open transaction are found once it has ended, even after others have inserted since. The
    /// transaction numbers show when it has ended.
    #[test]
    fn a_message_committed_late_is_found_after_the_last_settled_sequence() {
        let outbox = Outbox::new();
        let name = &outbox.name;
        let (mut relay, mut late_one, mut other) =
            (outbox.connect(), outbox.connect(), outbox.connect());
        let insert = |of: &str| {
            let outbox = name.outbox();
            format!("INSERT INTO {outbox} (topic, payload, ordering_key) VALUES ('t', '1', '{of}')")
        };
        let mut look = |behind, known| {
            let look = LookForLate {
                behind,
                due_before: i64::MAX,
                known,
            };
            let page = late(&mut relay, name, &[], look).expect("an answer");
            let moment = page.moment.expect("the state of the outbox");
            (page.found, moment)
        };
        let keys = |found: &(Vec<Free>, Moment)| -> Vec<String> {
            let keys = found.0.iter().filter_map(|one| one.ordering_key.clone());
            keys.collect()
        };
        late_one.batch_execute("BEGIN").expect("begun");
        late_one.batch_execute(&insert("late")).expect("inserted");
        let open = select(sql::<BigInt>("pg_current_xact_id()::text::bigint"));
        let open: i64 = open.get_result(&mut late_one).expect("a number");
        other.batch_execute(&insert("other")).expect("inserted");
        let found = look(Some(0), 0);
        assert_eq!(
            (keys(&found), found.1.newest),
            (vec!["other".to_owned()], Some(2))
        );
        assert!(found.1.writers.oldest <= open && open < found.1.writers.next);
        assert_eq!(look(None, 2).1.newest, None);
        late_one.batch_execute("COMMIT").expect("committed");
        let found = look(Some(0), 2);
        assert_eq!(keys(&found), ["late", "other"]);
        assert_eq!(keys(&look(Some(1), 2)), ["other"]);
    }
}

//! The records of the latest registrations of destinations: a trigger writes one for each statement that registers some.

use diesel::dsl::{not, sum};
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable};
use diesel::{PgConnection, delete};
use uuid::Uuid;

use crate::name::OutboxName;
use crate::store::sql::{On, hashtext, id_text};
use crate::store::table::{outbox, registration};

/// A number for the set of records; null: there are none. Whoever sees another number than a relay has read may see
/// destinations that the relay does not know.
pub(super) fn seen(name: &OutboxName) -> On<'static, outbox::table, Nullable<BigInt>> {
    let records = registration::table(name.registration());
    let number = records.select(sum(hashtext(id_text(registration::id))));
    Box::new(number.single_value())
}

/// The same number, by itself.
pub(crate) fn number(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Option<i64>> {
    let records = registration::table(name.registration());
    let number = records.select(sum(hashtext(id_text(registration::id))));
    number.get_result(conn)
}

/// Deletes these records, and returns the others.
pub(crate) fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    records: &[Uuid],
) -> QueryResult<Vec<Uuid>> {
    if !records.is_empty() {
        delete(registration::table(name.registration()))
            .filter(registration::id.eq_any(records))
            .execute(conn)?;
    }
    registration::table(name.registration())
        .filter(not(registration::id.eq_any(records)))
        .select(registration::id)
        .load(conn)
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::store::tests::Outbox;

    /// R57.
    #[test]
    fn each_statement_that_registers_leaves_one_record_until_it_is_forgotten() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let insert = |conn: &mut PgConnection, rows: &str| {
            let insert = format!(
                "INSERT INTO {} (name, url) VALUES {rows} ON CONFLICT DO NOTHING",
                name.destination()
            );
            conn.batch_execute(&insert).expect("rows");
            number(conn, name).expect("a number")
        };
        assert_eq!(number(conn, name), Ok(None));
        let two = "('a', 'https://a.example'), ('b', 'https://a.example')";
        let first = insert(conn, two);
        assert!(first.is_some());
        assert_eq!(insert(conn, two), first, "nothing was registered");
        let seen = forget(conn, name, &[]).expect("records");
        assert_eq!(seen.len(), 1);
        assert_ne!(insert(conn, "('c', 'https://a.example')"), first);
        let left = forget(conn, name, &seen).expect("forgotten");
        assert_eq!(left.len(), 1, "a record that was not seen before stays");
        assert_eq!(forget(conn, name, &left), Ok(Vec::new()));
        assert_eq!(number(conn, name), Ok(None));
    }
}

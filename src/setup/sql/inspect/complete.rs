//! Checks that an outbox has everything that this version uses.
//!
//! Text: PostgreSQL's catalogue.

use diesel::result::QueryResult;
use diesel::sql_types::{Array, Bool, Text};
use diesel::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, PgConnection, QueryDsl,
    RunQueryDsl, select,
};

use super::{columns, setting, table_exists};
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::setup::sql::catalogue::{
    format_type, pg_attribute, pg_class, pg_inherits, to_regprocedure,
};
use crate::sql::functions::to_regclass;
use crate::sql::looking::looking;
use crate::sql::statement::statement;
use crate::sql::table::{
    attempt, audit, dead, endpoint, feed, feed_event, feed_part, feed_reader, lease, ledger, lock,
    messages, outbox, part, pause, registration, request, topic,
};

/// The tables of an outbox and the view, by suffix, with the columns that this version uses.
// Why: docs/decisions.md#two-checks-of-the-schema
pub(crate) const TABLES_AND_VIEW: &[(&str, &[(&str, &str)])] = &[
    ("", outbox::COLUMNS),
    ("_part", part::COLUMNS),
    ("_ledger", ledger::COLUMNS),
    ("_attempt", attempt::COLUMNS),
    ("_dead", dead::COLUMNS),
    ("_lease", lease::COLUMNS),
    ("_lock", lock::COLUMNS),
    ("_pause", pause::COLUMNS),
    ("_topic", topic::COLUMNS),
    ("_audit", audit::COLUMNS),
    ("_request", request::COLUMNS),
    ("_endpoint", endpoint::COLUMNS),
    ("_registration", registration::COLUMNS),
    ("_feed", feed::COLUMNS),
    ("_feed_part", feed_part::COLUMNS),
    ("_feed_event", feed_event::COLUMNS),
    ("_feed_reader", feed_reader::COLUMNS),
    ("_messages", messages::COLUMNS),
];

/// The tables of endpoints, by suffix: an outbox may lack both.
const OF_ENDPOINTS: [&str; 2] = ["_endpoint", "_registration"];

/// Whether this table is one of those of endpoints.
pub(crate) fn is_of_endpoints(suffix: &str) -> bool {
    OF_ENDPOINTS.contains(&suffix)
}

/// Whether this table is one of those of feeds: an outbox may lack all of them.
pub(crate) fn is_of_feeds(suffix: &str) -> bool {
    suffix.starts_with("_feed")
}

/// Whether the outbox has the tables of feeds, or some of them.
pub(crate) fn has_feeds(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    let is_there = |table: String| to_regclass(table).is_not_null();
    select(is_there(name.feed()).or(is_there(name.feed_event()))).get_result(conn)
}

/// Whether this outbox may do without the table.
pub(crate) fn may_lack(name: &OutboxName, suffix: &str) -> bool {
    is_of_endpoints(suffix) && !name.has_endpoints()
}

/// Names and types of a table's columns.
fn columns_of(conn: &mut PgConnection, table: &str) -> QueryResult<Vec<(String, String)>> {
    let kind = format_type(pg_attribute::atttypid, None::<i32>);
    columns(table)
        .filter(pg_attribute::attnum.gt(0))
        .select((pg_attribute::attname, kind))
        .load(conn)
}

/// Describes a missing table or view, and how to create an empty one.
fn damaged(name: &OutboxName, suffix: &str) -> String {
    let part = format!("{name}{suffix}");
    if suffix == "_messages" {
        return format!(
            "the outbox {name} is damaged: the view {part} is missing. No data is lost: create the view with the CREATE VIEW that `diesel-outbox migrate --print` shows"
        );
    }
    if matches!(
        suffix,
        "_part"
            | "_ledger"
            | "_attempt"
            | "_topic"
            | "_audit"
            | "_endpoint"
            | "_feed"
            | "_feed_part"
            | "_feed_event"
            | "_feed_reader"
    ) {
        return format!(
            "the outbox {name} is damaged: the table {part} is missing. Restore it from a backup, or create an empty one with the statements that `diesel-outbox migrate --print` shows"
        );
    }
    // In the schema of the outbox, because the new table must be there.
    let spare = match name.to_string().split_once('.') {
        Some((schema, _)) => format!("{schema}.outbox_spare"),
        None => "outbox_spare".to_owned(),
    };
    let in_schema = |table: String| match table.split_once('.') {
        Some((schema, table)) => format!("\"{schema}\".\"{table}\""),
        None => format!("\"{table}\""),
    };
    let bare = part.rsplit('.').next().unwrap_or_default();
    format!(
        "the outbox {name} is damaged: the table {part} is missing. Restore it from a backup, or create an empty one: SELECT outbox_create('{spare}');{endpoints} ALTER INDEX {index} RENAME TO \"{bare}_pkey\"; ALTER TABLE {table} RENAME TO \"{bare}\"; SELECT outbox_drop('{spare}')",
        endpoints = match suffix {
            "_registration" => format!(" SELECT outbox_create_endpoints('{spare}');"),
            _ => String::new(),
        },
        index = in_schema(format!("{spare}{suffix}_pkey")),
        table = in_schema(format!("{spare}{suffix}")),
    )
}

/// The number of parts of each table of a ring (ledger, history, and events of feeds, divided by time), as in `outbox_create`.
const PARTS: u8 = 8;

/// The tables of rings by suffix, with the number of each part.
pub(crate) fn parts() -> impl Iterator<Item = (&'static str, u8)> {
    let of_table = |table| (0..PARTS).map(move |part| (table, part));
    ["_ledger", "_attempt", OF_EVENTS]
        .into_iter()
        .flat_map(of_table)
}

/// The table of the events of feeds.
const OF_EVENTS: &str = "_feed_event";

/// The functions that run with the rights of their owner, by suffix, with their types: they empty old parts of the ledger,
/// and blank old payloads.
pub(crate) const OF_OWNER: [&str; 2] = [
    "_rotate(interval)",
    "_blank(timestamptz, timestamptz, integer)",
];

/// The one of feeds: it empties old parts of their events.
pub(crate) const ROTATES_FEEDS: &str = "_feed_rotate(interval, bigint)";

/// A function of an outbox, by its suffix and types.
pub(crate) fn function(name: &OutboxName, suffixed: &str) -> String {
    let (suffix, types) = suffixed.split_once('(').unwrap_or((suffixed, ")"));
    format!("{}({types}", name.suffixed(suffix))
}

/// A part that is not attached to its table.
struct Lost {
    whole: String,
    part: String,
    number: u8,
    /// A table with the name of the part exists.
    is_detached: bool,
    /// The index of positions, of a part of the events of feeds.
    position: Option<String>,
}

impl Lost {
    fn what(&self) -> String {
        let is = match self.is_detached {
            true => "is detached from",
            false => "is missing from",
        };
        format!("{} {is} {}", self.part, self.whole)
    }

    fn cure(&self) -> String {
        let Self {
            whole,
            part,
            number,
            ..
        } = self;
        match self.is_detached {
            true => format!("ALTER TABLE {whole} ATTACH PARTITION {part} FOR VALUES IN ({number})"),
            false => {
                let create =
                    format!("CREATE TABLE {part} PARTITION OF {whole} FOR VALUES IN ({number})");
                match &self.position {
                    None => create,
                    // Which the whole cannot have: positions are unique in each part.
                    Some(index) => {
                        format!("{create}; CREATE UNIQUE INDEX {index} ON {part} (feed, position)")
                    }
                }
            }
        }
    }
}

/// The name of an index is without its schema where it is made.
fn index_of_positions(name: &OutboxName, number: u8) -> String {
    let index = name.suffixed(&format!("_feed_pos_{number}"));
    index.rsplit('.').next().unwrap_or_default().to_owned()
}

/// The parts of the ring that were dropped or detached.
fn lost_parts(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Lost>> {
    let is_of = |table| {
        let whole = to_regclass(name.suffixed(table));
        pg_inherits::inhparent.nullable().eq(whole)
    };
    let attached = pg_inherits::table
        .filter(is_of("_ledger").or(is_of("_attempt")).or(is_of(OF_EVENTS)))
        .select(pg_inherits::inhrelid);
    let attached: Vec<String> = pg_class::table
        .filter(pg_class::oid.eq_any(attached))
        .select(pg_class::relname)
        .load(conn)?;
    let has_feeds = has_feeds(conn, name)?;
    let mut lost = Vec::new();
    for (table, number) in parts().filter(|(table, _)| has_feeds || *table != OF_EVENTS) {
        let suffix = format!("{table}_{number}");
        if attached.iter().any(|part| part.ends_with(&suffix)) {
            continue;
        }
        let part = name.suffixed(&suffix);
        lost.push(Lost {
            whole: name.suffixed(table),
            is_detached: select(to_regclass(&part).is_not_null()).get_result(conn)?,
            part,
            number,
            position: (table == OF_EVENTS).then(|| index_of_positions(name, number)),
        });
    }
    Ok(lost)
}

/// Reports the lost parts of the ring, the effect, and how to create empty parts.
fn check_ring(conn: &mut PgConnection, name: &OutboxName) -> Result<(), DatabaseError> {
    let lost = lost_parts(conn, name)?;
    if lost.is_empty() {
        return Ok(());
    }
    let listed = |of: fn(&Lost) -> String| lost.iter().map(of).collect::<Vec<_>>().join("; ");
    Err(DatabaseError::Schema(format!(
        "the outbox {name} is damaged: {}. Relays write to each part in turn: without the part, they cannot record deliveries, and deliver messages again, or store no events of feeds. The records of a missing part are lost, unless a backup has them. The owner of the outbox fixes this with: {}",
        listed(Lost::what),
        listed(Lost::cure),
    )))
}

/// What is known about the migrations when a column is missing.
#[derive(Clone, Copy)]
enum KnownMigrations {
    /// One that is not applied may add the column.
    Unknown,
    /// None adds the column.
    AllApplied,
}

impl KnownMigrations {
    /// Describes the missing column of the table `name` + `suffix`, and what to do.
    fn missing(self, name: &OutboxName, suffix: &str, column: &str, kind: &str) -> String {
        let table = name.suffixed(suffix);
        match self {
            Self::Unknown => format!(
                "{table} has no column {column}: the table belongs to an older version, or to another application; run `diesel-outbox migrate` of this version"
            ),
            Self::AllApplied if suffix == "_messages" => format!(
                "{table} has no column {column}, although all migrations are applied. No data is lost: drop the view, and create the view with the CREATE VIEW that `diesel-outbox migrate --print` shows"
            ),
            Self::AllApplied => format!(
                "{table} has no column {column}, although all migrations are applied: the column was dropped, or the table belongs to another application. Restore the table from a backup, or add an empty column, with the default and the constraints that `diesel-outbox migrate --print` shows: ALTER TABLE {table} ADD COLUMN {column} {kind}"
            ),
        }
    }
}

/// Checks that the outbox exists and has everything that this version uses.
///
/// # Errors
/// [`DatabaseError::Schema`] names the missing part and says how to fix it.
pub(crate) fn check(conn: &mut PgConnection, name: &OutboxName) -> Result<(), DatabaseError> {
    check_after(conn, name, KnownMigrations::Unknown)
}

/// The same, when all migrations are applied.
///
/// # Errors
/// Those of [`check`].
pub(crate) fn check_migrated(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<(), DatabaseError> {
    check_after(conn, name, KnownMigrations::AllApplied)
}

fn check_after(
    conn: &mut PgConnection,
    name: &OutboxName,
    migrations: KnownMigrations,
) -> Result<(), DatabaseError> {
    // The server describes types and expressions by settings of the role.
    looking(conn, None, |conn| Ok(compare(conn, name, migrations)))?
}

fn compare(
    conn: &mut PgConnection,
    name: &OutboxName,
    migrations: KnownMigrations,
) -> Result<(), DatabaseError> {
    if !table_exists(conn, name)? {
        return Err(DatabaseError::Schema(format!(
            "there is no outbox \"{name}\" in this database: run `diesel-outbox migrate`, or put what `diesel-outbox migrate --print` prints into a migration of yours. If the outbox is in a schema outside the search path of the role, name the schema, as in shop.outbox (OUTBOX_TABLE); the role needs USAGE on that schema"
        )));
    }
    if setting(conn, "server_encoding")? == "SQL_ASCII" {
        let wrong = "the database has the encoding SQL_ASCII, which accepts any bytes as text: UTF8 is required";
        return Err(DatabaseError::Schema(wrong.to_owned()));
    }
    let has_feeds = has_feeds(conn, name)?;
    for (suffix, columns) in TABLES_AND_VIEW {
        if may_lack(name, suffix) || (is_of_feeds(suffix) && !has_feeds) {
            continue;
        }
        let table = name.suffixed(suffix);
        let found = columns_of(conn, &table)?;
        if found.is_empty() {
            return Err(DatabaseError::Schema(damaged(name, suffix)));
        }
        for (column, kind) in *columns {
            let wrong = match found.iter().find(|(name, _)| name == column) {
                Some((_, found)) if found == kind => continue,
                Some((_, found)) => format!(
                    "the column {column} of {table} has the type {found} instead of {kind}: the table belongs to another version, or to another application"
                ),
                None => migrations.missing(name, suffix, column, kind),
            };
            return Err(DatabaseError::Schema(wrong));
        }
    }
    check_ring(conn, name)?;
    for suffixed in OF_OWNER {
        let function = function(name, suffixed);
        let found = to_regprocedure(&function);
        if !select(found.is_not_null()).get_result::<bool>(conn)? {
            return Err(DatabaseError::Schema(format!(
                "the function {function} is missing: create it with the CREATE FUNCTION that `diesel-outbox migrate --print` shows"
            )));
        }
    }
    let is_unique: bool = statement(
        "SELECT EXISTS (
            SELECT FROM pg_index i
             WHERE i.indrelid = to_regclass($1) AND i.indisunique AND i.indisvalid
               AND pg_get_expr(i.indpred, i.indrelid) = '(idempotency_key IS NOT NULL)'
               AND (SELECT array_agg(a.attname::text ORDER BY a.attname::text) FROM pg_attribute a
                     WHERE a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey)) = $2::text[]
         )",
    )
    .bind::<Text, _>(name.outbox())
    .bind::<Array<Text>, _>(vec!["destination", "idempotency_key"])
    .giving::<Bool>()
    .get_result(conn)?;
    if !is_unique {
        return Err(DatabaseError::Schema(format!(
            "{} has no unique index on (idempotency_key, destination) WHERE idempotency_key IS NOT NULL: without this index, a message could be enqueued twice",
            name.outbox()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::tests::Outbox;

    #[test]
    fn every_column_of_every_table_is_looked_for() {
        let outbox = Outbox::new();
        let conn = &mut outbox.connect();
        for (suffix, columns) in TABLES_AND_VIEW
            .iter()
            .filter(|(suffix, _)| *suffix != "_messages")
        {
            let mut expected: Vec<String> =
                columns.iter().map(|(name, _)| (*name).to_owned()).collect();
            let found = columns_of(conn, &outbox.name.suffixed(suffix)).expect("columns");
            let mut found: Vec<String> = found.into_iter().map(|(name, _)| name).collect();
            expected.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, expected, "of outbox{suffix}");
        }
    }
}

//! SQL: retention of the ledger and of the history, and of payloads in the ledger.

use std::time::Duration;

use diesel::dsl::min;
use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Bool, Integer, Interval, Timestamptz};
use diesel::{PgConnection, QueryDsl, Queryable, RunQueryDsl, select};

use crate::name::OutboxName;
use crate::schema::values::{from_micros, to_micros};
use crate::sql::functions::{clock_timestamp, interval};
use crate::sql::statement::unprepared_statement;
use crate::sql::table::part;

/// The result of turning the ring.
#[derive(Debug, Queryable)]
pub(crate) struct Turned {
    /// The number of parts that were emptied.
    pub(crate) emptied: i32,
    /// Whether another transaction is reading an old part, which stays for now.
    pub(crate) is_in_use: bool,
}

/// Empties the parts of the ring whose entries are all older than `retention`, and opens another part when it is
/// time.
///
/// Text: the function's name is known only at run time.
pub(crate) fn rotate(
    conn: &mut PgConnection,
    name: &OutboxName,
    retention: Duration,
) -> QueryResult<Turned> {
    unprepared_statement(format!("SELECT * FROM {}($1)", name.rotate()))
        .bind::<Interval, _>(interval(retention))
        .giving::<(Integer, Bool)>()
        .get_result(conn)
}

/// The time span of the ledger that is blanked at once at first, and the shortest, in microseconds.
const FIRST_WINDOW: i64 = 60_000_000;
const SHORTEST_WINDOW: i64 = 1_000;

/// Blanks the payloads of the ledger from its oldest entries on. The time up to which all are blanked is only in memory:
/// after a restart, the ledger is read once more.
#[derive(Debug)]
pub(crate) struct Blanking {
    /// All entries settled before this time are blanked, in microseconds.
    from: i64,
    /// The time span to read at once. It grows and shrinks until it holds less than one step.
    window: i64,
}

impl Blanking {
    /// From the oldest part of the ledger on.
    pub(crate) fn new(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Self> {
        let oldest = part::table(name.part()).select(min(part::opened_at));
        let oldest: Option<PgTimestamp> = oldest.get_result(conn)?;
        Ok(Self {
            from: oldest.map_or(i64::MIN, to_micros),
            window: FIRST_WINDOW,
        })
    }

    /// Blanks at most `most` entries that are older than `age`. Returns how many, and whether all are blanked.
    ///
    /// Text: the function's name is known only at run time.
    pub(crate) fn step(
        &mut self,
        conn: &mut PgConnection,
        name: &OutboxName,
        age: Duration,
        most: i32,
    ) -> QueryResult<(i32, bool)> {
        let end = clock_timestamp() - interval(age);
        let end: PgTimestamp = select(end).get_result(conn)?;
        let end = to_micros(end);
        let to = self.from.saturating_add(self.window).min(end);
        let blanked: i32 =
            unprepared_statement(format!("SELECT {}($1, $2, $3)", name.suffixed("_blank")))
                .bind::<Timestamptz, _>(from_micros(self.from))
                .bind::<Timestamptz, _>(from_micros(to))
                .bind::<Integer, _>(most)
                .giving::<Integer>()
                .get_result(conn)?;
        if blanked < most {
            self.from = self.from.max(to);
            self.window = self.window.saturating_mul(2);
        } else {
            self.window = (self.window / 2).max(SHORTEST_WINDOW);
        }
        Ok((blanked, self.from >= end))
    }
}

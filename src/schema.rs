//! The tables of an outbox and its view, for typed queries of the application's own.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::schema::outbox_messages;
//!
//! # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
//! // How many messages of a topic are in which state.
//! let counts: Vec<(String, i64)> = outbox_messages::table
//!     .filter(outbox_messages::topic.eq("order.paid"))
//!     .group_by(outbox_messages::status)
//!     .select((outbox_messages::status, diesel::dsl::count_star()))
//!     .load(&mut conn)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`outbox_tables!`](crate::outbox_tables) declares the same for an outbox of another name or schema.
//!
//! # For reading
//! Reading changes nothing; a long transaction on the ledger or the view delays retention. What changes these tables is [`Outbox`](crate::Outbox), the relay and
//! [`admin`](crate::admin): they keep what belongs together together. (`INSERT` into `outbox` is for
//! everybody, as in plain SQL; the columns that have defaults may be left out.)
//!
//! The view `outbox_messages` shows every message with its status, and no payload. A message is in
//! `outbox` while it lives, in `outbox_dead` when it is dead (a cancelled one is in the ledger only), and what became of
//! it is in `outbox_ledger`; `outbox_attempt`, the history, has its failed attempts and what operators did with it.
//!
//! After a fan-out each part has a sequence of its own, and the message id stays. The ledger has an index of message
//! ids and of keys, and none of sequences.
//!
//! # Joins
//! For joins with the application's own tables, declare these in the application's crate, by one line.
//! (`allow_tables_to_appear_in_same_query!` takes tables of one crate only: Rust's orphan rule.)
//!
//! ```
//! use diesel::prelude::*;
//!
//! diesel_outbox::outbox_tables!(outbox);
//!
//! diesel::table! {
//!     orders (id) {
//!         id -> Int4,
//!         // The message id that `enqueue` returned.
//!         message -> Uuid,
//!     }
//! }
//! diesel::allow_tables_to_appear_in_same_query!(orders, outbox_messages);
//! diesel::allow_tables_to_appear_in_same_query!(orders, outbox_dead);
//!
//! // The state of each order's message.
//! fn states(conn: &mut PgConnection) -> QueryResult<Vec<(i32, String)>> {
//!     orders::table
//!         .inner_join(outbox_messages::table.on(outbox_messages::message_id.eq(orders::message)))
//!         .select((orders::id, outbox_messages::status))
//!         .load(conn)
//! }
//!
//! // Which orders' messages died, and of what.
//! fn dead(conn: &mut PgConnection) -> QueryResult<Vec<(i32, String)>> {
//!     orders::table
//!         .inner_join(outbox_dead::table.on(outbox_dead::message_id.eq(orders::message)))
//!         .select((orders::id, outbox_dead::reason))
//!         .load(conn)
//! }
//! ```
//!
//! Two calls of `allow_tables_to_appear_in_same_query!`, and not one with three tables: those of an
//! outbox are declared for one another already.
//!
//! Where Diesel's command line writes the application's `schema.rs`, let it leave these tables out: it fails at those
//! without a primary key (ledger and history), and would declare the others twice. In `diesel.toml`, under
//! `[print_schema]`: `filter = { except_tables = ["^outbox"] }`, and a pattern more for each outbox of another name.
//!
//! # Types
//! Columns have the types that they have in PostgreSQL. To load them, enable what you use of Diesel's
//! features: `uuid` for ids, `serde_json` for payloads and headers, `chrono` or `time` for
//! `Timestamptz`. Without the last two, select `created_at.at_time_zone("UTC")`: that is a `Timestamp`,
//! which loads as [`SystemTime`](std::time::SystemTime).

mod tables;
pub(crate) mod values;

pub use self::values::Jsonpath;

/// Declares the tables of an outbox and its view, as `diesel::table!` does, in the module where it
/// stands. The crate needs `diesel`.
///
/// ```
/// mod schema {
///     // `outbox`: what `diesel_outbox::schema` has already.
///     pub mod public {
///         diesel_outbox::outbox_tables!(outbox);
///     }
///     // `hrm.outbox`
///     pub mod hrm {
///         diesel_outbox::outbox_tables!(hrm.outbox);
///     }
///     // Another name: macros cannot put names together, so all eight are given, in this order.
///     diesel_outbox::outbox_tables!(
///         org_outbox: org_outbox_ledger, org_outbox_attempt, org_outbox_dead, org_outbox_lease,
///         org_outbox_pause, org_outbox_destination, org_outbox_messages
///     );
///     // … in another schema
///     pub mod billing {
///         diesel_outbox::outbox_tables!(
///             billing.events: events_ledger, events_attempt, events_dead, events_lease, events_pause,
///             events_destination, events_messages
///         );
///     }
/// }
/// # use schema::{org_outbox_messages, hrm};
/// ```
///
/// A name that does not belong to the first one is an error when the crate is compiled:
///
/// ```compile_fail
/// diesel_outbox::outbox_tables!(
///     org_outbox: org_outbox_ledger, org_outbox_attempt, hrm_outbox_dead, org_outbox_lease,
///     org_outbox_pause, org_outbox_destination, org_outbox_messages
/// );
/// ```
#[macro_export]
macro_rules! outbox_tables {
    (outbox) => {
        $crate::__outbox_tables!(
            (outbox) (outbox_ledger) (outbox_attempt) (outbox_dead) (outbox_lease) (outbox_pause)
            (outbox_destination) (outbox_messages)
            outbox outbox_ledger outbox_attempt outbox_dead outbox_lease outbox_pause outbox_destination
            outbox_messages
        );
    };
    ($schema:ident . outbox) => {
        $crate::outbox_tables!(
            $schema.outbox:
                outbox_ledger, outbox_attempt, outbox_dead, outbox_lease, outbox_pause,
                outbox_destination, outbox_messages
        );
    };
    (
        $outbox:ident :
        $ledger:ident, $attempt:ident, $dead:ident, $lease:ident, $pause:ident,
        $destination:ident, $messages:ident $(,)?
    ) => {
        $crate::__outbox_tables!(
            ($outbox) ($ledger) ($attempt) ($dead) ($lease) ($pause)
            ($destination) ($messages)
            $outbox $ledger $attempt $dead $lease $pause $destination $messages
        );
    };
    (
        $schema:ident . $outbox:ident :
        $ledger:ident, $attempt:ident, $dead:ident, $lease:ident, $pause:ident,
        $destination:ident, $messages:ident $(,)?
    ) => {
        $crate::__outbox_tables!(
            ($schema.$outbox) ($schema.$ledger) ($schema.$attempt) ($schema.$dead)
            ($schema.$lease) ($schema.$pause) ($schema.$destination) ($schema.$messages)
            $outbox $ledger $attempt $dead $lease $pause $destination $messages
        );
    };
}

outbox_tables!(outbox);

diesel::table! {
    /// The messages that were handled: the [`inbox`](crate::inbox), one for the database.
    outbox_inbox (source, message_id) {
        /// Who gives the ids.
        source -> diesel::sql_types::Text,
        /// The message's id.
        message_id -> diesel::sql_types::Text,
        /// When its handler was called.
        handled_at -> diesel::sql_types::Timestamptz,
    }
}

/// Which part of the ring the ledger and the history are written into. Nobody's but the library's.
mod ring {
    diesel::table! {
        outbox_part (part) {
            part -> diesel::sql_types::SmallInt,
            opened_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
            closed_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
        }
    }
}

pub(crate) use self::ring::outbox_part;

/// Fails at compile time unless each name is the outbox's with its suffix.
#[doc(hidden)]
pub const fn check_names(outbox: &str, names: &[(&str, &str)]) {
    let mut n = 0;
    while n < names.len() {
        let (name, suffix) = names[n];
        assert!(
            is_joined(name.as_bytes(), outbox.as_bytes(), suffix.as_bytes()),
            "outbox_tables!: after NAME: come NAME_ledger, NAME_attempt, NAME_dead, NAME_lease, NAME_pause, NAME_destination and NAME_messages"
        );
        n += 1;
    }
}

const fn is_joined(whole: &[u8], first: &[u8], second: &[u8]) -> bool {
    if whole.len() != first.len() + second.len() {
        return false;
    }
    let mut at = 0;
    while at < whole.len() {
        let expected = if at < first.len() {
            first[at]
        } else {
            second[at - first.len()]
        };
        if whole[at] != expected {
            return false;
        }
        at += 1;
    }
    true
}

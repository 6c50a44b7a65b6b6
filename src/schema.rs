//! The tables and the view of an outbox, for your own typed queries.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::schema::outbox_messages;
//!
//! # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
//! // The number of messages of a topic in each state.
//! let counts: Vec<(String, i64)> = outbox_messages::table
//!     .filter(outbox_messages::topic.eq("order.paid"))
//!     .group_by(outbox_messages::status)
//!     .select((outbox_messages::status, diesel::dsl::count_star()))
//!     .load(&mut conn)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`outbox_tables!`](crate::outbox_tables) declares the same tables for an outbox of another name or schema.
//!
//! # Reading and writing
//! You can read all tables and the view. A long transaction on the ledger or the view delays retention. You can also
//! insert into `outbox`, and omit the columns that have defaults. Leave all other changes to
//! [`Outbox`](crate::Outbox), the relay and [`admin`](crate::admin), which keep the tables consistent.
//!
//! The view `outbox_messages` shows every message with its status, but without its payload. Live messages are in
//! `outbox`, and dead letters in `outbox_dead`. Results are in `outbox_ledger`, including those of cancelled messages,
//! which are no dead letters. The history in `outbox_attempt` contains failed attempts and actions of operators.
//!
//! After a fan-out, each part has a sequence of its own and the same message id. The ledger has indexes of message ids
//! and idempotency keys, but not of sequences.
//!
//! # Joins
//! For joins with your own tables, declare the outbox's tables in your own crate, with one line. (Because of Rust's
//! orphan rule, `allow_tables_to_appear_in_same_query!` accepts only tables of the same crate.)
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
//! // The orders whose messages were dead-lettered, and the reasons.
//! fn dead(conn: &mut PgConnection) -> QueryResult<Vec<(i32, String)>> {
//!     orders::table
//!         .inner_join(outbox_dead::table.on(outbox_dead::message_id.eq(orders::message)))
//!         .select((orders::id, outbox_dead::reason))
//!         .load(conn)
//! }
//! ```
//!
//! Call `allow_tables_to_appear_in_same_query!` once for each table of the outbox, as here: the tables of an
//! outbox are already declared for one another.
//!
//! If Diesel's command line writes your `schema.rs`, exclude these tables. It fails on tables without a primary key
//! (ledger and history), and would declare the others twice. In `diesel.toml`, under `[print_schema]`, set
//! `filter = { except_tables = ["^outbox"] }`, with one more pattern for each outbox of another name.
//!
//! # Types
//! Columns have their PostgreSQL types. To load them, enable the Diesel features that you need: `uuid`
//! for ids, `serde_json` for payloads and headers, `chrono` or `time` for `Timestamptz`. Without `chrono` and
//! `time`, select `created_at.at_time_zone("UTC")`, a `Timestamp`, which loads as
//! [`SystemTime`](std::time::SystemTime).

#[cfg(any(feature = "http", feature = "operate", feature = "feeds"))]
pub(crate) mod instant;
pub(crate) mod rfc3339;
mod tables;
pub(crate) mod values;

/// Declares the tables and the view of an outbox in the current module, as `diesel::table!` does. The
/// crate needs `diesel`.
///
/// ```
/// mod schema {
///     // `outbox`: the same as in `diesel_outbox::schema`.
///     pub mod public {
///         diesel_outbox::outbox_tables!(outbox);
///     }
///     // `hrm.outbox`
///     pub mod hrm {
///         diesel_outbox::outbox_tables!(hrm.outbox);
///     }
///     // Another name: macros cannot build names, so give all eight names, in this order.
///     diesel_outbox::outbox_tables!(
///         org_outbox: org_outbox_ledger, org_outbox_attempt, org_outbox_dead, org_outbox_lease,
///         org_outbox_pause, org_outbox_endpoint, org_outbox_messages
///     );
///     // … in another schema
///     pub mod billing {
///         diesel_outbox::outbox_tables!(
///             billing.events: events_ledger, events_attempt, events_dead, events_lease, events_pause,
///             events_endpoint, events_messages
///         );
///     }
/// }
/// # use schema::{org_outbox_messages, hrm};
/// ```
///
/// A name that does not match the first name is a compile error:
///
/// ```compile_fail
/// diesel_outbox::outbox_tables!(
///     org_outbox: org_outbox_ledger, org_outbox_attempt, hrm_outbox_dead, org_outbox_lease,
///     org_outbox_pause, org_outbox_endpoint, org_outbox_messages
/// );
/// ```
#[macro_export]
macro_rules! outbox_tables {
    (outbox) => {
        $crate::__outbox_tables!(
            (outbox) (outbox_ledger) (outbox_attempt) (outbox_dead) (outbox_lease) (outbox_pause)
            (outbox_endpoint) (outbox_messages)
            outbox outbox_ledger outbox_attempt outbox_dead outbox_lease outbox_pause outbox_endpoint
            outbox_messages
        );
    };
    ($schema:ident . outbox) => {
        $crate::outbox_tables!(
            $schema.outbox:
                outbox_ledger, outbox_attempt, outbox_dead, outbox_lease, outbox_pause,
                outbox_endpoint, outbox_messages
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
    /// The [`inbox`](crate::inbox): handled messages. A database has one inbox.
    outbox_inbox (source, message_id) {
        /// The sender that assigns the ids.
        source -> diesel::sql_types::Text,
        /// The id of the message.
        message_id -> diesel::sql_types::Text,
        /// When the handler was called.
        handled_at -> diesel::sql_types::Timestamptz,
    }
}

diesel::table! {
    /// Where the consumers of feeds in this database continue (`feed::consume`). A database has one such table.
    outbox_feed_position (consumer, feed) {
        /// The consumer.
        consumer -> diesel::sql_types::Text,
        /// The feed: its URL, or the name that the consumer has for it.
        feed -> diesel::sql_types::Text,
        /// The cursor of the last event whose work is done; `begin`, `end` or a time: nothing was read yet.
        cursor -> diesel::sql_types::Text,
        /// When the cursor was written.
        updated_at -> diesel::sql_types::Timestamptz,
    }
}

/// Internal to the library: the parts of the ring into which the ledger and the history are written, the lock of claims,
/// the topics that relays have served, the acts of operators, the latest registrations and requests, and feeds.
mod internal {
    diesel::table! {
        outbox_lock (name) {
            name -> diesel::sql_types::Text,
        }
    }

    diesel::table! {
        outbox_part (part) {
            part -> diesel::sql_types::SmallInt,
            opened_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
            closed_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
        }
    }
    diesel::table! {
        outbox_audit (at) {
            at -> diesel::sql_types::Timestamptz,
            who -> diesel::sql_types::Text,
            act -> diesel::sql_types::Text,
            target -> diesel::sql_types::Text,
            why -> diesel::sql_types::Text,
            tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
            cost -> diesel::sql_types::BigInt,
        }
    }
    diesel::table! {
        outbox_request (caller, key) {
            caller -> diesel::sql_types::Text,
            key -> diesel::sql_types::Text,
            digest -> diesel::sql_types::Binary,
            at -> diesel::sql_types::Timestamptz,
            status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
            answer -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
        }
    }
    diesel::table! {
        outbox_registration (xid, name) {
            xid -> diesel::sql_types::BigInt,
            name -> diesel::sql_types::Text,
            is_new -> diesel::sql_types::Bool,
        }
    }
    diesel::table! {
        outbox_feed (name) {
            name -> diesel::sql_types::Text,
            registration -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
            base -> diesel::sql_types::BigInt,
            base_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
            base_stored_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
        }
    }
    diesel::table! {
        outbox_feed_part (part) {
            part -> diesel::sql_types::SmallInt,
            opened_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
            closed_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
        }
    }
    diesel::table! {
        outbox_feed_event (feed, position) {
            part -> diesel::sql_types::SmallInt,
            feed -> diesel::sql_types::Text,
            position -> diesel::sql_types::BigInt,
            message_id -> diesel::sql_types::Uuid,
            sequence -> diesel::sql_types::BigInt,
            topic -> diesel::sql_types::Text,
            payload -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
            headers -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
            ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
            tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
            created_at -> diesel::sql_types::Timestamptz,
            occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
            stored_at -> diesel::sql_types::Timestamptz,
        }
    }
    diesel::table! {
        outbox_feed_reader (feed, token_digest) {
            feed -> diesel::sql_types::Text,
            token_digest -> diesel::sql_types::Binary,
            created_at -> diesel::sql_types::Timestamptz,
            valid_until -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
            last_position -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
            last_read_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
        }
    }
    diesel::table! {
        outbox_topic (pattern, kind) {
            pattern -> diesel::sql_types::Text,
            kind -> diesel::sql_types::Text,
            first_served -> diesel::sql_types::Timestamptz,
            last_served -> diesel::sql_types::Timestamptz,
        }
    }
}

pub(crate) use self::internal::{
    outbox_audit, outbox_feed, outbox_feed_event, outbox_feed_part, outbox_feed_reader,
    outbox_lock, outbox_part, outbox_registration, outbox_request, outbox_topic,
};

/// Fails at compile time unless each name is the name of the outbox followed by the suffix.
#[doc(hidden)]
pub const fn check_names(outbox: &str, names: &[(&str, &str)]) {
    let mut n = 0;
    while n < names.len() {
        let (name, suffix) = names[n];
        assert!(
            is_joined(name.as_bytes(), outbox.as_bytes(), suffix.as_bytes()),
            "outbox_tables!: expected NAME: NAME_ledger, NAME_attempt, NAME_dead, NAME_lease, NAME_pause, NAME_endpoint, NAME_messages"
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

//! The minimal rights of each database role: printed as `GRANT` statements, and checked by a relay at its start.
//! `docs/roles.sql` is the output for the outbox of the default name.
//!
//! Text: PostgreSQL's catalogue.

use std::fmt::Write;

use diesel::sql_types::{Array, Bool, Text};
use diesel::{PgConnection, RunQueryDsl};

use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::setup::sql::inspect::{
    self, OF_OWNER, ROTATES_FEEDS, function, has_feeds, is_of_endpoints, is_of_feeds, may_lack,
};
use crate::setup::sql::migrate::EndpointTables;
use crate::sql::statement::{statement, unprepared_statement};

/// A table of an outbox by suffix, privileges, and the columns of the privileges (empty: the whole table). Privileges
/// and columns are lists in SQL.
type Right = (&'static str, &'static str, &'static str);

/// A role, what it does, and its rights, table by table.
struct Role {
    name: &'static str,
    what: &'static str,
    rights: &'static [Right],
}

const ENQUEUER: Role = Role {
    name: "outbox_enqueuer",
    what: "Enqueues (by the library and by plain SQL): inserts messages, and finds existing keys. It cannot
-- read topics or payloads. If plain SQL and the library write the same keys, the library has to
-- compute digests: then GRANT SELECT (topic, payload), too.",
    rights: &[
        ("", "INSERT", "message_id, topic, destination, payload, headers, ordering_key, \
            idempotency_key, digest, tenant_id, available_at, expires_at, occurred_at"),
        ("", "SELECT", "sequence, message_id, destination, idempotency_key, digest"),
    ],
};

const CANCELLER: Role = Role {
    name: "outbox_canceller",
    what: "Cancels and reschedules waiting messages (Outbox::cancel, Outbox::reschedule). GRANT it in addition
-- to outbox_enqueuer. It can remove any waiting message.",
    rights: &[
        ("", "DELETE", ""),
        (
            "",
            "SELECT",
            "sequence, message_id, topic, destination, payload, ordering_key, \
            idempotency_key, digest, tenant_id, available_at, created_at, occurred_at, \
            attempts, locked_by, split_from, registration",
        ),
        ("", "UPDATE", "available_at"),
        ("_ledger", "SELECT, INSERT", ""),
        ("_part", "SELECT", ""),
        (
            "_dead",
            "SELECT",
            "sequence, message_id, destination, named_destination, idempotency_key, \
            reason, split_from",
        ),
    ],
};

const REGISTRAR: Role = Role {
    name: "outbox_registrar",
    what:
        "Registers endpoints with their secrets (by Outbox::endpoints and by plain SQL), shows their
-- deliveries, sends messages again, and makes waiting messages due. GRANT it in addition to
-- outbox_enqueuer to an application whose customers register webhooks. It writes pauses, because
-- removing an endpoint inserts one. It can requeue any dead letter.",
    rights: &[
        (
            "",
            "SELECT",
            "sequence, message_id, topic, destination, ordering_key, idempotency_key, \
            tenant_id, available_at, expires_at, created_at, occurred_at, attempts, \
            locked_by, locked_at, last_error_code, last_error, split_from, registration",
        ),
        (
            "",
            "INSERT",
            "sequence, message_id, topic, destination, payload, headers, ordering_key, \
            idempotency_key, digest, tenant_id, expires_at, created_at, occurred_at, split_from, split_to, \
            registration",
        ),
        ("", "UPDATE", "available_at"),
        ("_ledger", "SELECT", ""),
        ("_attempt", "SELECT, INSERT", ""),
        ("_part", "SELECT", ""),
        ("_dead", "SELECT, DELETE", ""),
        ("_dead", "UPDATE", "blocks_key"),
        ("_lease", "SELECT", ""),
        ("_audit", "INSERT", ""),
        ("_audit", "SELECT", "at, tenant_id, cost"),
        ("_request", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_endpoint", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_pause", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_topic", "SELECT, INSERT", ""),
        ("_registration", "INSERT", ""),
        ("_feed", "SELECT, INSERT, UPDATE", ""),
        ("_feed_event", "SELECT", ""),
        ("_feed_reader", "SELECT, INSERT, UPDATE, DELETE", ""),
    ],
};

// No UPDATE of the ledger. Why: docs/decisions.md#forget
const RELAY: Role = Role {
    name: "outbox_relay",
    what: "Runs a relay, and all commands of an operator except migrate, forget and
-- message expunge. INSERT is for fan-outs and requeued
-- messages; UPDATE on one column of the dead letters allows locking them.",
    rights: &[
        ("", "SELECT, DELETE", ""),
        (
            "",
            "INSERT",
            "sequence, message_id, topic, destination, payload, headers, ordering_key, \
            idempotency_key, digest, tenant_id, available_at, expires_at, created_at, \
            occurred_at, attempts, last_attempt_at, last_error_code, last_error, split_from, split_to, \
            registration",
        ),
        (
            "",
            "UPDATE",
            "destination, available_at, expires_at, attempts, locked_by, locked_at, last_attempt_at, \
            last_error_code, last_error, split_to, registration",
        ),
        ("_ledger", "SELECT, INSERT", ""),
        ("_attempt", "SELECT, INSERT", ""),
        ("_part", "SELECT", ""),
        ("_dead", "SELECT, INSERT, DELETE", ""),
        ("_dead", "UPDATE", "blocks_key"),
        ("_lease", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_lock", "SELECT, INSERT, UPDATE", ""),
        ("_pause", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_topic", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_audit", "SELECT, INSERT", ""),
        ("_request", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_endpoint", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_registration", "SELECT, INSERT, DELETE", ""),
        ("_feed", "SELECT, INSERT, UPDATE", ""),
        ("_feed_event", "SELECT, INSERT", ""),
        ("_feed_part", "SELECT", ""),
        ("_feed_reader", "SELECT, INSERT, UPDATE, DELETE", ""),
        ("_messages", "SELECT", ""),
    ],
};

const READER: Role = Role {
    name: "outbox_reader",
    what: "Reads: status, dead list, pause list, the view. It cannot see payloads, headers, secrets or the URLs of
-- endpoints, which may have passwords, but it can see responses of receivers in dead letters.",
    rights: &[
        ("", "SELECT", "sequence, message_id, topic, destination, ordering_key, idempotency_key, \
            tenant_id, available_at, expires_at, created_at, occurred_at, attempts, \
            locked_by, locked_at, last_attempt_at, last_error_code, last_error, split_from, split_to, \
            registration"),
        ("_dead", "SELECT", "sequence, message_id, topic, destination, named_destination, ordering_key, \
            idempotency_key, tenant_id, available_at, expires_at, created_at, occurred_at, \
            attempts, reason, last_error, http_status, response, dead_lettered_at, split_from, split_to, blocks_key, \
            registration"),
        ("_lease", "SELECT", ""),
        ("_pause", "SELECT", ""),
        ("_topic", "SELECT", ""),
        ("_audit", "SELECT", ""),
        ("_endpoint", "SELECT", "name, kind, topics, tenant_id, filter, enabled, mode, concurrency, rate, \
            timeout, policy, description, disabled_reason, created_at, updated_at, failing_since, \
            failing_reason, failing, verification, verified_at, allowed_rate, verification_due, verification_tries, \
            disabled_by, set_by, verification_error, id"),
        ("_feed", "SELECT", ""),
        ("_feed_event", "SELECT", "feed, position, stored_at"),
        ("_feed_reader", "SELECT", "feed, created_at, valid_until, last_position, last_read_at"),
        ("_messages", "SELECT", ""),
    ],
};

/// SQL that creates six roles with minimal rights on the outbox `name`: to enqueue, to cancel, to register
/// destinations, to relay, to read, and to handle messages once with the [`inbox`](crate::inbox). With
/// [`EndpointTables::Always`] or [`EndpointTables::Feeds`]: only what an outbox needs that gets these tables later.
pub fn printed(name: &OutboxName, endpoints: EndpointTables) -> String {
    let roles: &[&Role] = match endpoints {
        EndpointTables::WithOutbox | EndpointTables::WithoutFeeds => {
            &[&ENQUEUER, &CANCELLER, &REGISTRAR, &RELAY, &READER]
        }
        EndpointTables::Never => &[&ENQUEUER, &CANCELLER, &RELAY, &READER],
        EndpointTables::Always => return printed_for_endpoints(name),
        EndpointTables::Feeds => return printed_for_feeds(name),
    };
    let mut sql = String::from(
        "-- Roles with minimal rights for one outbox.
--
-- They cannot log in: GRANT outbox_enqueuer TO the role of your application, and outbox_relay TO the
-- role of the relay. Roles belong to the server, not to a database: leave out the CREATE ROLE lines if
-- the roles exist.
",
    );
    let names: Vec<&str> = roles.iter().map(|role| role.name).collect();
    // Writing to a string cannot fail.
    for role in names.iter().chain(&["outbox_receiver"]) {
        let _ = writeln!(sql, "CREATE ROLE {role};");
    }
    if let Some(schema) = name.schema() {
        let _ = writeln!(
            sql,
            "\nGRANT USAGE ON SCHEMA {schema} TO {};",
            names.join(", ")
        );
    }
    for role in roles {
        let _ = writeln!(sql, "\n-- {}", role.what);
        let is_meant = |suffix: &str| match endpoints {
            EndpointTables::Never => !is_of_endpoints(suffix) && !is_of_feeds(suffix),
            EndpointTables::WithoutFeeds => !is_of_feeds(suffix),
            _ => true,
        };
        for of_table in role.tables().filter(|of_table| is_meant(of_table[0].0)) {
            let _ = writeln!(sql, "{};", role.granted(name, of_table));
        }
        // The default of message_id. Servers may revoke EXECUTE from PUBLIC.
        let inserts = |(table, what, _): &Right| table.is_empty() && *what == "INSERT";
        if role.rights.iter().any(inserts) {
            let _ = writeln!(
                sql,
                "GRANT EXECUTE ON FUNCTION outbox_message_id() TO {};",
                role.name
            );
        }
        if role.name == RELAY.name {
            let of_feeds = is_meant("_feed").then_some(ROTATES_FEEDS);
            for function in OF_OWNER.into_iter().chain(of_feeds) {
                let _ = writeln!(sql, "{};", grant_function(name, function, role.name));
            }
        }
        if [RELAY.name, READER.name].contains(&role.name) {
            let sequence = name.suffixed("_sequence_seq");
            let _ = writeln!(sql, "GRANT SELECT ON SEQUENCE {sequence} TO {};", role.name);
        }
    }
    sql.push_str(
        "
-- Handles each message once (inbox::once). The database has one inbox.
GRANT INSERT (source, message_id) ON outbox_inbox TO outbox_receiver;
-- Reads feeds, and keeps its positions (feed::consume).
GRANT SELECT, INSERT, UPDATE ON outbox_feed_position TO outbox_receiver;
-- If the relay cleans the inbox (OUTBOX_INBOX_RETENTION):
GRANT SELECT, DELETE ON outbox_inbox TO outbox_relay;
",
    );
    sql
}

/// The same for the tables of endpoints, in an outbox that gets them later: the other roles are there.
fn printed_for_endpoints(name: &OutboxName) -> String {
    let mut sql = format!(
        "-- The rights for endpoints, in an outbox that gets their tables later. Run this in the transaction that
-- creates the tables, so that running relays can read the tables at once. Leave out the CREATE ROLE line
-- if the role exists.
CREATE ROLE {};
",
        REGISTRAR.name
    );
    if let Some(schema) = name.schema() {
        let _ = writeln!(sql, "GRANT USAGE ON SCHEMA {schema} TO {};", REGISTRAR.name);
    }
    let _ = writeln!(sql, "\n-- {}", REGISTRAR.what);
    for of_table in REGISTRAR.tables().filter(|one| !is_of_feeds(one[0].0)) {
        let _ = writeln!(sql, "{};", REGISTRAR.granted(name, of_table));
    }
    let _ = writeln!(
        sql,
        "GRANT EXECUTE ON FUNCTION outbox_message_id() TO {};",
        REGISTRAR.name
    );
    sql.push('\n');
    for role in [&RELAY, &READER] {
        for of_table in role.tables().filter(|one| is_of_endpoints(one[0].0)) {
            let _ = writeln!(sql, "{};", role.granted(name, of_table));
        }
    }
    sql
}

/// The same for the tables of feeds.
fn printed_for_feeds(name: &OutboxName) -> String {
    let mut sql = "-- The rights for feeds, in an outbox that gets their tables later. Run this in the transaction that
-- creates the tables.
"
    .to_owned();
    for role in [&REGISTRAR, &RELAY, &READER] {
        for of_table in role.tables().filter(|one| is_of_feeds(one[0].0)) {
            let _ = writeln!(sql, "{};", role.granted(name, of_table));
        }
    }
    let _ = writeln!(sql, "{};", grant_function(name, ROTATES_FEEDS, RELAY.name));
    sql
}

impl Role {
    /// The rights, table by table.
    fn tables(&self) -> impl Iterator<Item = &'static [Right]> {
        self.rights.chunk_by(|(a, ..), (b, ..)| a == b)
    }

    /// The statement that grants these rights on a table.
    fn granted(&self, name: &OutboxName, of_table: &[Right]) -> String {
        let rights = of_table.iter().map(|(_, what, columns)| on(what, columns));
        let table = name.suffixed(of_table[0].0);
        wrapped(&grant(rights.collect(), &table, self.name))
    }
}

/// Privileges on these columns, or on the whole table.
fn on(privileges: &str, columns: &str) -> String {
    match columns {
        "" => privileges.to_owned(),
        columns => format!("{privileges} ({columns})"),
    }
}

fn grant(rights: Vec<String>, table: &str, role: &str) -> String {
    format!("GRANT {} ON {table} TO {role}", rights.join(", "))
}

fn grant_function(name: &OutboxName, suffixed: &str, role: &str) -> String {
    let function = function(name, suffixed);
    format!("GRANT EXECUTE ON FUNCTION {function} TO {role}")
}

/// Wraps a statement at spaces.
fn wrapped(statement: &str) -> String {
    let mut lines = String::new();
    let mut width = 0;
    for word in statement.split(' ') {
        if width + word.len() >= LINE {
            lines.push_str("\n   ");
            width = 3;
        }
        if width > 0 {
            lines.push(' ');
        }
        lines.push_str(word);
        width += word.len() + 1;
    }
    lines
}

/// The most characters in a line of printed SQL.
const LINE: usize = 100;

/// A right that the role of this connection lacks.
#[derive(diesel::Queryable)]
struct MissingRow {
    role: String,
    table_name: String,
    privilege: String,
    column: String,
}

/// The rights that a relay needs and the role of this connection lacks, as `GRANT` statements.
pub(crate) fn missing(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Vec<String>, DatabaseError> {
    let (mut tables, mut privileges, mut columns) = (Vec::new(), Vec::new(), Vec::new());
    let has_feeds = has_feeds(conn, name)?;
    let lacks = |suffix: &str| may_lack(name, suffix) || (is_of_feeds(suffix) && !has_feeds);
    let needed = RELAY.rights.iter().filter(|(suffix, ..)| !lacks(suffix));
    for (suffix, of_right, on) in needed {
        for privilege in of_right.split(", ") {
            for column in on.split(", ") {
                tables.push(name.suffixed(suffix));
                privileges.push(privilege);
                columns.push(column);
            }
        }
    }
    let rows: Vec<MissingRow> = unprepared_statement(
        "SELECT quote_ident(current_user) AS role, r.table_name, r.privilege, r.column
           FROM unnest($1::text[], $2::text[], $3::text[])
                WITH ORDINALITY AS r(table_name, privilege, \"column\", n)
          WHERE NOT CASE r.column
                WHEN '' THEN has_table_privilege(to_regclass(r.table_name), r.privilege)
                ELSE has_column_privilege(to_regclass(r.table_name), r.column, r.privilege) END
          ORDER BY r.n",
    )
    .bind::<Array<Text>, _>(&tables)
    .bind::<Array<Text>, _>(&privileges)
    .bind::<Array<Text>, _>(&columns)
    .giving::<(Text, Text, Text, Text)>()
    .load(conn)?;
    let of_tables = rows.chunk_by(|a, b| a.table_name == b.table_name);
    let mut missing: Vec<String> = of_tables.map(missing_of_table).collect();
    for suffixed in OF_OWNER
        .into_iter()
        .chain(has_feeds.then_some(ROTATES_FEEDS))
    {
        let (role, may): (String, bool) = statement(
            "SELECT quote_ident(current_user),
                    coalesce(has_function_privilege(to_regprocedure($1), 'EXECUTE'), false)",
        )
        .bind::<Text, _>(function(name, suffixed))
        .giving::<(Text, Bool)>()
        .get_result(conn)?;
        if !may {
            missing.push(grant_function(name, suffixed, &role));
        }
    }
    Ok(missing)
}

fn missing_of_table(rows: &[MissingRow]) -> String {
    let rights = rows
        .chunk_by(|a, b| a.privilege == b.privilege)
        .map(|of_privilege| {
            let columns = of_privilege.iter().map(|row| row.column.as_str());
            let columns: Vec<&str> = columns.collect();
            on(&of_privilege[0].privilege, &columns.join(", "))
        });
    grant(rights.collect(), &rows[0].table_name, &rows[0].role)
}

/// Checks that a relay can work here: the outbox has the right schema, and the role of this connection has all rights
/// of a relay. Without this check, a relay could send messages and then fail to record the result.
pub(crate) fn check_relay(conn: &mut PgConnection, name: &OutboxName) -> Result<(), DatabaseError> {
    inspect::check(conn, name)?;
    let missing = missing(conn, name)?;
    if missing.is_empty() {
        return Ok(());
    }
    Err(DatabaseError::Schema(format!(
        "the role of the database connection lacks rights that a relay needs: {}",
        missing.join("; ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_roles_are_the_printed_roles() {
        let documented = include_str!("../../../docs/roles.sql");
        let printed = printed(&OutboxName::default(), EndpointTables::WithOutbox);
        assert_eq!(documented, printed);
    }
}

//! Checks of the server: clock, transaction ids, connections, settings, search path, and a pooler in front.

use std::time::Duration;

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::{Finding, Findings, Severity};
use crate::config::Config;
use crate::doctor::sql::server;
use crate::engine::host::sql::connection::{self, StatementLimits};

/// Connections of a relay: claimer, heartbeat, janitor, listener, three settlers and the thread of filters. Two of the
/// settlers connect only if messages have ordering keys, and the thread of filters only if a message waits for filters.
const OF_A_RELAY: i64 = 8;

/// Seconds that two clocks may differ.
const CLOCK: f64 = 5.0;
/// Seconds from which receivers may refuse signatures: they usually tolerate five minutes.
const CLOCK_IS_WRONG: f64 = 240.0;

pub(super) fn clock(conn: &mut PgConnection, _: &Config) -> QueryResult<Vec<Finding>> {
    let (offset, error) = server::clock_offset(conn)?;
    Ok(judged_clock(offset, error))
}

fn judged_clock(offset: f64, error: f64) -> Vec<Finding> {
    let mut found = Findings::new("clock");
    let ahead = if offset > 0.0 { "behind" } else { "ahead of" };
    let what = format!(
        "this machine's clock is {:.3} s {ahead} the database's (± {error:.3} s)",
        offset.abs()
    );
    let advice = "synchronise both clocks (NTP): signatures use this machine's clock, everything else uses the database's";
    let least = offset.abs() - error;
    match least {
        least if least > CLOCK_IS_WRONG => {
            found.error(format!("{what}: receivers may refuse signatures"), advice)
        }
        least if least > CLOCK => found.warning(what.clone(), advice),
        _ => {}
    }
    found.or_ok(what)
}

pub(super) fn wraparound(conn: &mut PgConnection, _: &Config) -> QueryResult<Vec<Finding>> {
    let row = server::wraparound(conn)?;
    Ok(judged_wraparound(row.transactions.max(row.multixacts)))
}

fn judged_wraparound(used: f64) -> Vec<Finding> {
    let mut found = Findings::new("wraparound");
    let what = format!(
        "transaction ids are {:.0} % of the way to wraparound",
        used * 100.0
    );
    let advice = "fix what holds vacuum back (`snapshots`), then VACUUM (FREEZE) the databases and tables with the highest age(relfrozenxid)";
    match used {
        used if used > 0.7 => found.error(
            format!("{what}: the server will soon refuse writes"),
            advice,
        ),
        used if used > 0.4 => found.warning(what.clone(), advice),
        _ => {}
    }
    found.or_ok(what)
}

pub(super) fn connections(conn: &mut PgConnection, _: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("connections");
    let row = server::connections(conn)?;
    let needed = format!("a relay needs {OF_A_RELAY}");
    let (role, database) = (row.role, row.database);
    for (free, whose, advice) in [
        (
            Some(row.of_server),
            "of the server".to_owned(),
            "raise max_connections, or shrink the connection pools of applications".to_owned(),
        ),
        (
            row.of_role,
            format!("of the role {role}"),
            format!("ALTER ROLE {role} CONNECTION LIMIT -1"),
        ),
        (
            row.of_database,
            format!("of the database {database}"),
            format!("ALTER DATABASE {database} CONNECTION LIMIT -1"),
        ),
    ] {
        if let Some(free) = free.filter(|free| *free < OF_A_RELAY) {
            let what = format!(
                "only {} connections {whose} are free, and {needed}",
                free.max(0)
            );
            found.error(what, advice);
        }
    }
    Ok(found.or_ok(format!(
        "{} connections are free, and {needed}",
        row.of_server
    )))
}

/// Settings that can harm an outbox: the safe values, and the effect of any other value.
const SETTINGS: [(&str, &[&str], Severity, &str); 9] = [
    (
        "default_transaction_read_only",
        &["off"],
        Severity::Error,
        "nothing can be written",
    ),
    (
        "fsync",
        &["on"],
        Severity::Error,
        "a crash can corrupt the database",
    ),
    (
        "full_page_writes",
        &["on"],
        Severity::Warning,
        "a crash can corrupt pages",
    ),
    (
        "synchronous_commit",
        &["on", "remote_write", "remote_apply", "local"],
        Severity::Warning,
        "a crash can lose the last commits: messages, or the record that they were delivered",
    ),
    (
        "session_replication_role",
        &["origin", "local"],
        Severity::Warning,
        "triggers do not fire, so commits do not wake relays",
    ),
    (
        "idle_session_timeout",
        &["0"],
        Severity::Warning,
        "idle connections of the relay are closed, and opened again each time",
    ),
    (
        "transaction_timeout",
        &["0"],
        Severity::Warning,
        "long transactions that settle or clean are aborted",
    ),
    (
        "default_transaction_deferrable",
        &["off"],
        Severity::Warning,
        "transactions may wait before they start",
    ),
    (
        "zero_damaged_pages",
        &["off"],
        Severity::Error,
        "damaged pages are read as empty, which loses messages",
    ),
];

pub(super) fn settings(conn: &mut PgConnection, _: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("settings");
    if server::is_standby(conn)? {
        found.error(
            "the server is a standby: nothing can be written".to_owned(),
            "point DATABASE_URL at the primary (target_session_attrs=read-write finds it)",
        );
    }
    let names: Vec<&str> = SETTINGS.iter().map(|(name, ..)| *name).collect();
    for row in server::settings(conn, &names)? {
        let name = row.name.as_str();
        let known = SETTINGS.iter().find(|(setting, ..)| *setting == name);
        let Some((_, good, severity, why)) = known else {
            continue;
        };
        if good.contains(&row.setting.as_str()) {
            continue;
        }
        found.add(
            *severity,
            format!("{name} is {}: {why}", row.setting),
            Some(format!(
                "SELECT * FROM pg_settings WHERE name = '{name}' shows where it is set; change it there: ALTER ROLE … RESET {name}, ALTER DATABASE … RESET {name} or ALTER SYSTEM"
            )),
        );
    }
    Ok(found.or_ok("no unusual role or server settings"))
}

/// Finds other roles that can create functions and operators that sessions of this role may call.
pub(super) fn search_path(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("search_path");
    for creator in server::creators(conn, &config.table)? {
        let (schema, role) = (creator.schema, creator.role);
        found.error(
            format!(
                "{role} can create functions and operators in the schema {schema} of the search path, and statements of this role may call them with its rights. Relays and enqueueing are safe; other statements of your application may not be"
            ),
            format!("REVOKE CREATE ON SCHEMA {schema} FROM {role}"),
        );
    }
    Ok(found.or_ok("no other role can create objects in a schema of the search path"))
}

/// Checks whether DATABASE_URL leads through a pooler in transaction mode.
pub(super) fn pooler(config: &Config) -> Vec<Finding> {
    let mut found = Findings::new("pooler");
    let Some(url) = &config.database_url else {
        return Vec::new();
    };
    let limits = StatementLimits::of_caller(Duration::from_secs(10));
    match connection::connect(url, "check", limits) {
        Ok(connected) if connected.pooled.is_some() => {
            let what = "DATABASE_URL leads through a pooler in transaction mode: the relay sets its limits in each transaction and prepares no statements, which costs some speed";
            found.add(
                Severity::Ok,
                what.to_owned(),
                Some("give relays a direct DATABASE_URL for more speed; applications can stay behind the pooler".to_owned()),
            );
        }
        Ok(_) => {}
        Err(error) => found.warning(
            format!("could not open one more connection: {error}"),
            "see `connections`",
        ),
    }
    found.or_ok("no pooler in transaction mode")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_judged_by_what_they_differ_at_least() {
        let severity = |offset, error| judged_clock(offset, error)[0].severity;
        assert_eq!(severity(0.1, 0.2), Severity::Ok);
        assert_eq!(severity(-6.0, 2.0), Severity::Ok);
        assert_eq!(severity(-6.0, 0.01), Severity::Warning);
        assert_eq!(severity(300.0, 1.0), Severity::Error);
        assert!(
            judged_clock(300.0, 1.0)[0]
                .what
                .contains("300.000 s behind")
        );
    }

    #[test]
    fn transaction_ids_are_an_error_before_the_server_stops() {
        let severity = |used| judged_wraparound(used)[0].severity;
        assert_eq!(severity(0.1), Severity::Ok);
        assert_eq!(severity(0.5), Severity::Warning);
        assert_eq!(severity(0.8), Severity::Error);
    }
}

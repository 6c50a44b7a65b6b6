//! Checks of the outbox: vacuum and what holds it back, sequences, relays, and rows kept too long.

use std::time::Duration;

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::{Finding, Findings, Severity, ago, span};
use crate::config::Config;
use crate::doctor::sql::disabled::{Neglected, neglected, signed_in_binary};
use crate::doctor::sql::{server, snapshots, tables};
use crate::endpoints::sql::served::{self, RefusedEndpoint};
use crate::endpoints::sql::subscribers;
use crate::engine::serves::sql::topics;
use crate::engine::wake::sql::sleep_lock;
use crate::inbox::sql as receiving;
use crate::operate::sql::{agreement, status, troubles};
use crate::setup::sql::inspect::has_feeds;
use crate::sql::pinned::located_by_default;

/// Autovacuum lags if the dead rows exceed its threshold by this factor.
const LAG: f64 = 10.0;

/// The most transactions that a slot or a standby may hold back.
const HELD_TRANSACTIONS: i64 = 1_000_000;

/// How far the cleaner may be behind the retention.
const CLEANING: Duration = Duration::from_secs(6 * 3600);

/// Bytes above which an inbox without retention is a warning.
const LARGE_INBOX: i64 = 1 << 30;

pub(super) fn vacuum(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("vacuum");
    let settings = server::settings(conn, &["autovacuum", "track_counts"])?;
    for row in settings.iter().filter(|row| row.setting == "off") {
        found.error(
            format!(
                "{} is off on this server, so autovacuum does not run: tables and indexes grow without limit",
                row.name
            ),
            format!("ALTER SYSTEM SET {} = on; SELECT pg_reload_conf()", row.name),
        );
    }
    for row in tables::vacuum(conn, &config.table)? {
        let table = &row.table_name;
        if row.is_off {
            found.error(
                format!(
                    "autovacuum is off for {table}: the table and its indexes grow without limit"
                ),
                format!("ALTER TABLE {table} RESET (autovacuum_enabled)"),
            );
        }
        #[allow(clippy::cast_precision_loss, reason = "a comparison")]
        let lags = row.dead_rows as f64 > row.threshold * LAG;
        if lags {
            let last = match row.vacuumed_ago {
                Some(seconds) => format!("the last vacuum was {} ago", ago(seconds)),
                None => "the table has never been vacuumed".to_owned(),
            };
            found.warning(
                format!(
                    "{table} has {} dead rows, but autovacuum starts at {:.0}; {last}",
                    row.dead_rows, row.threshold
                ),
                format!("first fix the findings of `snapshots`; then VACUUM {table}, and raise autovacuum_max_workers or autovacuum_vacuum_cost_limit"),
            );
        }
    }
    Ok(found.or_ok("autovacuum is on and keeps up"))
}

pub(super) fn snapshots(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("snapshots");
    // No transaction of an outbox lasts as long as two leases.
    let age = config.lease * 2;
    for row in snapshots::held(conn, age, HELD_TRANSACTIONS)? {
        let (name, who) = (&row.name, &row.who);
        let since = format!(
            "{} transactions have started since, and vacuum cannot remove rows deleted since then",
            row.transactions
        );
        match row.kind.as_str() {
            "session" => found.warning(
                format!(
                    "process {name} ({who}) has had a transaction open for {}: {since}",
                    ago(row.seconds)
                ),
                format!("end the transaction in its application, or SELECT pg_terminate_backend({name})"),
            ),
            "prepared" => found.error(
                format!(
                    "the prepared transaction {name:?} ({who}) has been open for {}: {since}",
                    ago(row.seconds)
                ),
                format!(
                    "COMMIT PREPARED or ROLLBACK PREPARED '{}'",
                    name.replace('\'', "''")
                ),
            ),
            "slot" => found.warning(
                format!("the replication slot {name} ({who}) holds an old snapshot: {since}"),
                format!("let its standby catch up, or SELECT pg_drop_replication_slot('{name}')"),
            ),
            _ => found.warning(
                format!("the standby {name} ({who}) holds an old snapshot by hot_standby_feedback: {since}"),
                "end the long query on the standby, or set hot_standby_feedback = off there",
            ),
        }
    }
    let hidden = snapshots::hidden_sessions(conn)?;
    if hidden > 0 {
        found.add(
            Severity::Skipped,
            format!("{hidden} sessions of other roles are not visible to this role"),
            Some("GRANT pg_read_all_stats to this role".to_owned()),
        );
        return Ok(found.all);
    }
    Ok(found.or_ok(format!(
        "nothing holds a snapshot for longer than {}",
        span(age)
    )))
}

pub(super) fn sequence(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("sequence");
    let row = tables::sequence(conn, &config.table)?;
    let name = row.sequence_name.unwrap_or_default();
    let last = match row.is_readable {
        true => Some(tables::last_number(conn, &name)?),
        false => None,
    };
    let highest = row.highest.unwrap_or(0);
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    let used = last.unwrap_or(0).max(highest) as f64 / row.most.unwrap_or(i64::MAX) as f64;
    let advice =
        "create a new outbox, which has a new sequence: enqueue there, and let this outbox drain";
    let what = format!(
        "{:.1} % of {name} is used; when all is used, nothing can be enqueued",
        used * 100.0
    );
    match used {
        used if used > 0.9 => found.error(what, advice),
        used if used > 0.5 => found.warning(what, advice),
        _ => {}
    }
    if row.cycles {
        found.error(
            format!("{name} restarts at its end: sequences would be assigned twice"),
            format!("ALTER SEQUENCE {name} NO CYCLE"),
        );
    }
    match last {
        Some(last) if last < highest => found.error(
            format!(
                "the next number of {name} is {}, but message {highest} exists: inserts fail, or repeat numbers",
                last.saturating_add(1)
            ),
            // The ledger has no index by number, so only the cure reads it.
            format!(
                "SELECT setval('{}', greatest((SELECT max(sequence) FROM {}), (SELECT max(sequence) FROM {}), (SELECT max(sequence) FROM {})))",
                name.replace('\'', "''"),
                config.table.outbox(),
                config.table.dead(),
                config.table.ledger(),
            ),
        ),
        Some(_) => {}
        None => found.add(
            Severity::Skipped,
            format!("this role may not read {name}: nothing is known of its next number"),
            Some(format!("GRANT SELECT ON SEQUENCE {name} TO this role")),
        ),
    }
    Ok(found.or_ok(format!(
        "{:.1} % of the outbox's sequence is used",
        used * 100.0
    )))
}

/// Inserts that leave the message id to the table call `outbox_message_id` as the inserting role.
pub(super) fn inserts(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("inserts");
    for row in tables::without_id(conn, &config.table)? {
        let (role, function) = (row.role, row.function);
        found.error(
            format!("{role} may insert messages, but not call {function}: inserts without a message_id fail"),
            format!("GRANT EXECUTE ON FUNCTION {function} TO {role}"),
        );
    }
    Ok(found.or_ok("roles that may insert messages may also call outbox_message_id"))
}

pub(super) fn leases(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("leases");
    let leases = status::leases(conn, &config.table)?;
    let takes_over = |lease: &&status::LeaseRow| lease.is_alive() && lease.enabled;
    let alive = leases.iter().filter(takes_over).count();
    for lease in leases.iter().filter(|lease| lease.silent) {
        found.warning(
            format!(
                "the heartbeat of {} has stopped: the last one was {} ago; its lease {} expires in {}",
                lease.relay,
                ago(lease.renewed_seconds_ago),
                lease.id,
                ago(lease.seconds_left)
            ),
            match alive {
                0 => "no other relay is alive: start a relay: diesel-outbox run",
                _ => "another relay takes its messages over, at the latest when the lease expires",
            },
        );
    }
    for lease in leases.iter().filter(|lease| lease.seconds_left <= 0.0) {
        let what = format!(
            "the lease {} of {} expired {} ago",
            lease.id,
            lease.relay,
            ago(-lease.seconds_left)
        );
        match alive {
            0 if troubles::holds_none(conn, &config.table, lease.id)? => {
                found.add(Severity::Ok, format!("{what}; it holds no messages"), None)
            }
            0 => found.warning(
                format!("{what}, and no relay is alive to take over its messages"),
                "start a relay: diesel-outbox run",
            ),
            _ => found.add(
                Severity::Ok,
                format!("{what}; live relays have taken over its messages"),
                None,
            ),
        }
    }
    let removed = troubles::removed_leases(conn, &config.table)?;
    for (id, count) in removed.into_iter().flatten() {
        found.warning(
            format!(
                "the lease {id} locks messages ({count}), and somebody has removed its row from {}",
                config.table.lease()
            ),
            match alive {
                0 => "start a relay, which takes the messages over: diesel-outbox run",
                _ => "wait some seconds: a relay takes the messages over",
            },
        );
    }
    for one in sleep_lock::holders(conn, &config.table)? {
        found.warning(
            format!(
                "the session {} ({}) holds the lock of sleeping relays without a live lease: each commit notifies relays, and commits wait for one another",
                one.pid, one.who
            ),
            format!("SELECT pg_terminate_backend({})", one.pid),
        );
    }
    Ok(found.or_ok(match alive {
        0 => "no relay is registered".to_owned(),
        1 => "1 relay is alive".to_owned(),
        alive => format!("{alive} relays are alive"),
    }))
}

pub(super) fn ledger(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("ledger");
    let (table, age) = (
        config.table.ledger(),
        // An entry is removed with its whole part, and a part covers a sixth of the retention.
        config
            .retention
            .saturating_add(config.retention / 6)
            .saturating_add(CLEANING),
    );
    let Some(kept) = tables::kept(conn, &table, "settled_at", age)? else {
        return Ok(Vec::new());
    };
    if kept.has_older {
        let advice = match config.cleaner {
            true => {
                "relays with OUTBOX_CLEANER=true remove them: check that such a relay is alive, and that no long transaction reads the ledger"
            }
            false => "OUTBOX_CLEANER is false here: set it to true for at least one relay",
        };
        found.warning(
            format!(
                "{table} ({}) has entries that are hours older than OUTBOX_RETENTION ({})",
                kept.size,
                span(config.retention)
            ),
            advice,
        );
    }
    Ok(found.or_ok(format!("{}, nothing older than {}", kept.size, span(age))))
}

pub(super) fn inbox(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("inbox");
    let age = match config.inbox_retention {
        Some(retention) => retention.saturating_add(CLEANING),
        None => Duration::MAX,
    };
    let kept = match located_by_default(conn, receiving::TABLE)? {
        Some(table) => tables::kept(conn, &table, "handled_at", age)?,
        None => None,
    };
    let Some(kept) = kept else {
        return Ok(Vec::new());
    };
    if kept.has_older {
        found.warning(
            format!(
                "outbox_inbox ({}) has rows that are hours older than OUTBOX_INBOX_RETENTION",
                kept.size
            ),
            "relays with OUTBOX_CLEANER=true remove them: check that such a relay is alive and keeps up",
        );
    }
    if config.inbox_retention.is_none() && kept.bytes > LARGE_INBOX {
        found.warning(
            format!(
                "outbox_inbox takes {}, and nothing removes old rows",
                kept.size
            ),
            "set OUTBOX_INBOX_RETENTION to longer than a message can take to be redelivered",
        );
    }
    Ok(found.or_ok(kept.size))
}

/// Topics that may be misspelt.
pub(super) fn topics(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("topics");
    for one in subscribers::without_subscriber(conn, &config.table)? {
        found.warning(one.what(), one.next_step());
    }
    for (topic, count) in topics::undeclared(conn, &config.table)?.unwrap_or_default() {
        found.warning(
            format!("{count} messages of the topic {topic:?} wait (UNKNOWN_TOPIC): the topic is not declared, and nobody wants them"),
            topics::correct_or_declare(&topic),
        );
    }
    Ok(found.or_ok("no topic seems to be misspelt"))
}

/// Settings that the relays of an outbox must agree on.
pub(super) fn agreement(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("agreement");
    for one in agreement::differences(conn, &config.table, None)? {
        found.warning(
            format!("settings_differ: {one}"),
            "set the same value at all relays of the outbox",
        );
    }
    Ok(found.or_ok("the running relays agree on the settings that they share"))
}

/// Feeds that cannot be filled, and feeds that nobody reads.
pub(super) fn feeds(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("feeds");
    let name = &config.table;
    if !has_feeds(conn, name)? {
        if let Some(feed) = config.feeds.first() {
            found.error(
                format!(
                    "the settings have the feed {}, and the outbox {name} has no tables of feeds: its messages wait",
                    feed.name
                ),
                "`diesel-outbox migrate --with feeds` creates them",
            );
        }
        return Ok(found.or_ok(format!(
            "the outbox {name} has no tables of feeds, and needs none"
        )));
    }
    if let Some(one) = neglected(conn, &config.table, Neglected::Unread)? {
        found.warning(
            match one.count {
                1 => format!("nobody reads the feed {}, which has events", one.name),
                count => format!("nobody reads {count} feeds, which have events; the last is {}", one.name),
            },
            "`diesel-outbox feed show NAME` shows its readers; events are kept for OUTBOX_FEED_RETENTION",
        );
    }
    Ok(found.or_ok("no feed with events is unread"))
}

pub(super) fn endpoints(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("endpoints");
    let name = &config.table;
    if !name.has_endpoints() {
        return Ok(found.or_ok(format!(
            "the outbox {name} has no tables of endpoints, and needs none for other destinations: `diesel-outbox migrate --with endpoints` creates them"
        )));
    }
    if let Some(found_disabled) = neglected(conn, &config.table, Neglected::Disabled)? {
        let (count, name) = (found_disabled.count, found_disabled.name);
        let why = found_disabled
            .disabled
            .unwrap_or_else(|| "no reason is given".to_owned());
        found.warning(
            match count {
                1 => format!("the endpoint {name} is disabled and gets no new messages: {why}"),
                _ => format!("{count} endpoints are disabled and get no new messages; the last, {name}: {why}"),
            },
            "`diesel-outbox endpoint list --disabled` shows them; `diesel-outbox endpoint enable NAME` sends again",
        );
    }
    if let Some(one) = neglected(conn, &config.table, Neglected::Failing)? {
        found.warning(
            match one.count {
                1 => format!("the endpoint {} is failing", one.name),
                count => format!("{count} endpoints are failing; the last is {}", one.name),
            },
            "`diesel-outbox endpoint list --failing` shows them; `diesel-outbox endpoint deliveries NAME` shows why",
        );
    }
    if let Some(one) = neglected(conn, &config.table, Neglected::Unverified)? {
        let why = one.unverified.unwrap_or_else(|| "not tried yet".to_owned());
        found.warning(
            match one.count {
                1 => format!("the endpoint {} is not verified, and nothing is sent to it: {why}", one.name),
                count => format!("{count} endpoints are not verified, and nothing is sent to them; the last, {}: {why}", one.name),
            },
            "the receiver answers as its `verification` says; `diesel-outbox endpoint verify NAME` asks it now",
        );
    }
    if let Some((count, name)) = signed_in_binary(conn, &config.table, config.endpoint_mode)? {
        found.warning(
            format!("{count} endpoints get signed requests in binary mode, the first is {name}: the headers are not signed"),
            "set OUTBOX_ENDPOINT_MODE=structured, or the mode of the rows: `diesel-outbox endpoint put NAME --mode structured`",
        );
    }
    let refused = served::refused(conn, &config.table)?;
    let (served, waiting): (Vec<_>, Vec<_>) = refused.into_iter().partition(|one| one.is_served);
    let advice = "change the settings of a relay (OUTBOX_ENDPOINT_HTTPS_ONLY, OUTBOX_ENDPOINT_PUBLIC_ONLY, OUTBOX_ENDPOINT_PORTS, OUTBOX_SECRET_KEY), or the row";
    let example = |of: &[RefusedEndpoint]| {
        let one = of.first()?;
        let RefusedEndpoint {
            name, relay, why, ..
        } = one;
        Some(format!("for example {name}, refused by {relay}: {why}"))
    };
    if let Some(example) = example(&waiting) {
        found.error(
            format!(
                "no running relay serves {} endpoints, and their messages wait (endpoint_refused): {example}",
                waiting.len()
            ),
            advice,
        );
    }
    if let Some(example) = example(&served) {
        found.warning(
            format!(
                "a relay does not serve {} endpoints that other relays serve (endpoint_refused): {example}",
                served.len()
            ),
            advice,
        );
    }
    Ok(found.or_ok("no endpoint is disabled, failing, unverified or refused"))
}

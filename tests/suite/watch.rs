//! `status --watch`: on a terminal, in a pipe and for programs.

use std::process::Command;

use serde_json::{Value, json};

use crate::support::{Database, Running, eventually};

/// A script for `sh` in which `$BIN` is the binary, with settings for this outbox. The script writes its output to
/// stderr.
fn script(database: &Database, script: &str) -> Command {
    let binary = database.binary(&[]);
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    for (name, value) in binary.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.env("BIN", binary.get_program());
    command
}

fn lines(running: &Running) -> Vec<Value> {
    let log = running.log();
    log.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// R32: incoming and delivered messages show at once, for programs too; a signal is a clean end.
#[test]
fn watch_writes_a_line_of_json_each_time_with_rates() {
    let database = Database::new();
    let mut watch = Running::start(script(
        &database,
        "exec \"$BIN\" status --watch=0.1 --json 1>&2",
    ));
    eventually("two lines", || lines(&watch).len() >= 2);
    let first = lines(&watch)[0].clone();
    assert_eq!(first["counts"]["pending"], json!(0));
    assert_eq!(first["rates"], json!(null));
    database.enqueue_many(50);
    eventually("the new messages are shown", || {
        let lines = lines(&watch);
        let rate = |line: &Value| line["rates"]["enqueued_per_second"].as_f64().unwrap_or(0.0);
        lines.iter().any(|line| rate(line) > 0.0)
            && lines
                .iter()
                .any(|line| line["counts"]["pending"] == json!(50))
    });
    watch.signal("INT");
    assert_eq!(watch.wait().code(), Some(0));
}

/// R32: a database that goes away is reported, and found again.
#[test]
fn watch_continues_when_the_database_is_back() {
    let database = Database::new();
    let mut watch = Running::start(script(
        &database,
        "exec \"$BIN\" status --watch=0.1 --json 1>&2",
    ));
    eventually("a line", || !lines(&watch).is_empty());
    // The same as a missing database: a query fails, and the connection is dropped.
    database.execute("ALTER TABLE {o}_lease RENAME TO gone");
    let has_error = |line: &Value| line["error"].is_string();
    eventually("an error is shown", || lines(&watch).iter().any(has_error));
    let schema = database.schema();
    database.execute(&format!("ALTER TABLE {schema}.gone RENAME TO outbox_lease"));
    eventually("the status is shown again", || {
        lines(&watch).last().is_some_and(|line| !has_error(line))
    });
    watch.signal("TERM");
    assert_eq!(watch.wait().code(), Some(0));
}

#[test]
fn watch_in_a_pipe_appends_plain_text() {
    let database = Database::new();
    database.enqueue_many(3);
    let mut watch = Running::start(script(
        &database,
        "\"$BIN\" status --watch=0.1 2>&1 | head -n 60 1>&2",
    ));
    // The reader closes the pipe: that is a clean end as well.
    assert_eq!(watch.wait().code(), Some(0));
    let log = watch.log();
    assert!(!log.contains('\x1b'), "{log}");
    assert!(log.matches("pending 3, sending 0").count() >= 2, "{log}");
    assert!(log.contains("out 0/s"), "{log}");
}

/// R32: on a terminal each status is drawn over the one before.
#[test]
fn watch_draws_in_place_on_a_terminal() {
    let database = Database::new();
    database.enqueue_many(3);
    let file = std::env::temp_dir().join(format!("outbox-watch-{}", uuid::Uuid::now_v7()));
    let mut command = script(
        &database,
        "exec script -qefc 'echo $$ >\"$PID\"; exec \"$BIN\" status --watch=0.1' /dev/null 1>&2",
    );
    command.env("PID", &file);
    let mut watch = Running::start(command);
    let drawn = |watch: &Running| watch.log().matches("\x1b[H").count();
    eventually("the status is drawn three times", || drawn(&watch) >= 3);
    let log = watch.log();
    assert!(
        log.contains("Ctrl-C to stop") && log.contains("\x1b[J"),
        "{log}"
    );
    assert_eq!(log.matches("\x1b[2J").count(), 1);
    assert!(
        log.contains("oldest due"),
        "the terminal without a size: {log}"
    );
    let pid = std::fs::read_to_string(&file).expect("written");
    let status = Command::new("kill").args(["-INT", pid.trim()]).status();
    assert!(status.expect("kill runs").success());
    assert_eq!(watch.wait().code(), Some(0));
    std::fs::remove_file(&file).expect("removed");
}

#[test]
fn an_interval_that_is_none_is_refused() {
    let database = Database::new();
    for bad in ["--watch=0", "--watch=-1", "--watch=soon", "--watch=NaN"] {
        let finished = crate::support::finish(database.binary(&["status", bad])).code(2);
        assert!(finished.stderr.contains("seconds"), "{}", finished.stderr);
    }
}

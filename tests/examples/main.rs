//! Every single-file example runs as its first lines say and shows what they promise.

#[path = "../suite/fresh.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod fresh;
#[path = "../support.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use fresh::FreshDatabase;
use support::finish;

#[test]
fn quickstart_shows_the_message_that_arrived() {
    let database = FreshDatabase::new();
    assert_eq!(
        run(&database, "quickstart", &[]),
        "received: {\"order_id\":7,\"euro\":42}\n"
    );
    assert_eq!(database.number("SELECT count(*) FROM outbox"), 0);
}

#[test]
fn bulk_import_imports_once_and_a_bad_line_leaves_nothing() {
    let database = FreshDatabase::new();
    let printed = run(&database, "bulk-import", &[]);
    assert!(
        printed.contains("first run: 100000 new messages"),
        "{printed}"
    );
    assert!(printed.contains("second run: 0 new messages"), "{printed}");
    assert_eq!(database.number("SELECT count(*) FROM outbox"), 100_000);

    let database = FreshDatabase::new();
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.csv", database.name));
    std::fs::write(&file, "1,Ada\n2,Grace\nthree,Nobody\n").expect("written");
    let failed = finish(command(
        &database,
        "bulk-import",
        &[file.to_str().expect("a text")],
    ))
    .code(1);
    std::fs::remove_file(&file).expect("removed");
    assert!(failed.stderr.contains("line 3"), "{}", failed.stderr);
    assert_eq!(database.number("SELECT count(*) FROM outbox"), 0);
}

#[test]
fn handlers_greets_and_counts() {
    let database = FreshDatabase::new();
    assert_eq!(
        run(&database, "handlers", &[]),
        "greeted member 1\n2 members; delivered 3, retried 1, dead 1\n"
    );
}

/// The output of an example that runs against the database.
fn run(database: &FreshDatabase, example: &str, arguments: &[&str]) -> String {
    finish(command(database, example, arguments)).code(0).stdout
}

fn command(database: &FreshDatabase, example: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(built(example));
    command.env("DATABASE_URL", &database.url).args(arguments);
    command
}

/// Cargo puts built examples next to the tests' folder.
fn built(example: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let profile = test.ancestors().nth(2).expect("target/debug/deps/test");
    let path = profile.join("examples").join(example);
    assert!(
        path.exists(),
        "{} is missing: run `make test`, or `cargo build --examples`",
        path.display()
    );
    path
}

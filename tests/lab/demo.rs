//! `outbox-lab demo`, directly and as a command of `diesel-outbox`.

use std::path::Path;
use std::process::Command;

use url::Url;

use crate::fresh::FreshDatabase;
use crate::support::{PROGRAM, binary, finish};

const DELIVERED: &str = "every committed order was delivered; no rolled-back order was";

#[test]
fn the_demo_delivers_each_committed_order_and_leaves_nothing_behind() {
    let database = FreshDatabase::new();
    let mut command = binary(&["demo", "--orders", "8"]);
    command.env("DATABASE_URL", &database.url);
    let told = finish(command).code(0).stdout;
    assert!(told.contains(DELIVERED), "{told}");
    let left = "SELECT count(*) FROM pg_namespace WHERE nspname = 'diesel_outbox_demo'";
    assert_eq!(database.number(left), 0);
}

/// A build of the project has both programs in one folder.
#[test]
fn the_program_runs_the_demo_and_the_bench() {
    let program = Path::new(PROGRAM).with_file_name("diesel-outbox");
    assert!(
        program.exists(),
        "{} is missing: `cargo build` makes it",
        program.display()
    );
    let database = FreshDatabase::new();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command
            .env_clear()
            .env("DATABASE_URL", &database.url)
            .args(arguments);
        finish(command)
    };
    let demo = run(&["demo", "--orders", "4"]).code(0).stdout;
    assert!(demo.contains(DELIVERED), "{demo}");
    let report = run(&["--batch=7", "bench", "drain", "--messages=20", "--json"])
        .code(0)
        .json();
    assert_eq!(report["batch"], 7, "{report}");
    let refused = run(&["bench", "latency", "--rate=0"]).code(2).stderr;
    assert!(
        refused.contains("--rate and --paced-seconds must be at least 1"),
        "{refused}"
    );
}

#[test]
fn a_role_without_rights_learns_which_right_is_missing() {
    let database = FreshDatabase::new();
    let role = format!("{}_role", database.name);
    database.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'secret'"));
    let mut url = Url::parse(&database.url).expect("a URL");
    url.set_username(&role).expect("a name");
    url.set_password(Some("secret")).expect("a password");
    let mut command = binary(&["demo"]);
    command.env("DATABASE_URL", url.as_str());
    let error = finish(command).code(1).stderr;
    for said in [
        "permission denied for database",
        "needs CREATE on this database",
    ] {
        assert!(error.contains(said), "{error}");
    }
    database.execute(&format!("DROP ROLE {role}"));
}

//! `scripts/with-postgres`, which runs all these tests.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// A run that was killed together with its server leaves a folder whose server is gone.
#[test]
fn with_postgres_removes_the_leftovers_of_a_killed_run_and_continues() {
    let base = std::env::temp_dir().join(format!("t-{}", uuid::Uuid::now_v7().simple()));
    // A server of another run had a process id that an unrelated process has now.
    let mut innocent = Command::new("sleep").arg("600").spawn().expect("a process");
    // Larger than any process id.
    for (name, server) in [("gone", 999_999_999), ("other", innocent.id())] {
        let left = base.join(format!("with-postgres.{name}"));
        std::fs::create_dir_all(left.join("server/data")).expect("a folder");
        std::fs::create_dir_all(left.join("bin")).expect("a folder");
        std::fs::write(left.join("lock"), "").expect("a file");
        let file = left.join("server/data/postmaster.pid");
        std::fs::write(file, format!("{server}\n")).expect("a file");
        std::os::unix::fs::symlink("/bin/false", left.join("bin/pg_ctl")).expect("a link");
    }
    std::fs::set_permissions(&base, PermissionsExt::from_mode(0o755)).expect("its owner");

    let script =
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("scripts/with-postgres");
    let run = Command::new(script)
        .args(["sh", "-c", "echo \"$DATABASE_URL\""])
        .env("TMPDIR", &base)
        .output()
        .expect("the script");
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{}: {error}", run.status);
    let url = String::from_utf8_lossy(&run.stdout);
    assert!(url.starts_with("postgres://"), "{url}");
    let rest: Vec<_> = std::fs::read_dir(&base).expect("a folder").collect();
    assert!(rest.is_empty(), "{rest:?}");
    std::fs::remove_dir(&base).expect("an empty folder");
    let lives_on = innocent.try_wait().expect("its state").is_none();
    innocent.kill().expect("its end");
    innocent.wait().expect("its end");
    assert!(lives_on, "an innocent process was killed");
}

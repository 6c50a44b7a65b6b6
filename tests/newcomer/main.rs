//! A newcomer copies README's library quick start into a fresh project outside this repository. The project builds
//! and runs, and the message arrives. The files consist of README's own text, and README's commands run unchanged.
//! The test replaces only the database URL, the port and the crate's source (this checkout instead of a release).

#[path = "../suite/fresh.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod fresh;
mod readme;
#[path = "../support.rs"]
mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use fresh::FreshDatabase;
use readme::QuickStart;
use support::{Finished, PATIENCE, binary, eventually, finish};

const SHOWN_DATABASE: &str = "postgres://localhost/shop";
const SHOWN_PORT: &str = "8080";

#[test]
fn the_quick_start_of_readme_is_a_program_that_delivers() {
    let quick_start = QuickStart::read();
    let project = Project::new(&quick_start);
    let port = free_port();
    let receiver = ShownReceiver::start(&quick_start.receiver.replace(SHOWN_PORT, &port), &port);
    let run = quick_start.run.replace(SHOWN_PORT, &port);

    let begin = Instant::now();
    let database = FreshDatabase::new();
    let shown = project.shell("shop", &run.replace(SHOWN_DATABASE, &database.url));
    // Not `println!`: the test harness would capture the line.
    let _ = writeln!(
        std::io::stderr(),
        "newcomer: built, run and delivered in {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    assert_eq!(shown.stdout, "delivered: 1\n", "{}", shown.stderr);
    assert_eq!(receiver.next(), r#"order.paid  {"order_id":7,"euro":42}"#);
    assert!(
        readme::TEXT.contains(
            r#"prints `order.paid  {"order_id":7,"euro":42}`, the program `delivered: 1`"#
        )
    );
    assert_eq!(database.number("SELECT count(*) FROM orders WHERE paid"), 1);

    // The tables may come from `diesel-outbox migrate` instead, and the program may run twice.
    let migrated = FreshDatabase::new();
    assert!(readme::TEXT.contains("use `diesel-outbox migrate`"));
    let mut migrate = binary(&["migrate"]);
    migrate.env("DATABASE_URL", &migrated.url);
    finish(migrate).code(0);
    for _ in 0..2 {
        let shown = project.shell("shop", &run.replace(SHOWN_DATABASE, &migrated.url));
        assert_eq!(shown.stdout, "delivered: 1\n", "{}", shown.stderr);
        assert_eq!(receiver.next(), r#"order.paid  {"order_id":7,"euro":42}"#);
    }
}

/// The newcomer's project, removed when dropped. Cargo's output stays in the build folder.
struct Project {
    folder: PathBuf,
}

impl Project {
    fn new(quick_start: &QuickStart) -> Self {
        let folder =
            std::env::temp_dir().join(format!("newcomer-{}", uuid::Uuid::now_v7().simple()));
        std::fs::create_dir(&folder).expect("a folder");
        let project = Self { folder };
        project.shell("", &quick_start.new_project).code(0);

        let repository = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        std::fs::create_dir(project.folder.join(".cargo")).expect("a folder");
        project.write(
            ".cargo/config.toml",
            &format!("[patch.crates-io]\ndiesel-outbox = {{ path = {repository:?} }}\n"),
        );
        let manifest = project.read("shop/Cargo.toml");
        let manifest = manifest
            .strip_suffix("[dependencies]\n")
            .expect("cargo ends a new Cargo.toml with it");
        project.write(
            "shop/Cargo.toml",
            &format!("{manifest}{}", quick_start.dependencies),
        );
        project.write("shop/src/main.rs", &quick_start.program);
        // Other tests check newer versions of the dependencies.
        std::fs::copy(
            repository.join("Cargo.lock"),
            project.folder.join("shop/Cargo.lock"),
        )
        .expect("a copy");
        project
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.folder.join(file)).expect("a text")
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.folder.join(file), text).expect("written");
    }

    /// Runs a command from README in a folder of the project.
    fn shell(&self, folder: &str, script: &str) -> Finished {
        let mut command = shell(script);
        command.current_dir(self.folder.join(folder));
        // Shares the target folder of the examples that are projects of their own (`make examples`).
        command
            .env("CARGO_TARGET_DIR", build_folder().join("applications"))
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        finish(command)
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        // A temporary folder: leftovers do no harm.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// README's receiver, killed when dropped.
struct ShownReceiver {
    child: Child,
    lines: Receiver<String>,
}

impl ShownReceiver {
    fn start(script: &str, port: &str) -> Self {
        let mut child = shell(script)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("a shell");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (line_out, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test may have ended.
                let _ = line_out.send(line);
            }
        });
        let receiver = Self { child, lines };
        eventually("README's receiver listens", || {
            TcpStream::connect(format!("127.0.0.1:{port}")).is_ok()
        });
        receiver
    }

    /// The next body that the receiver prints.
    fn next(&self) -> String {
        self.lines
            .recv_timeout(PATIENCE)
            .expect("the receiver prints what arrives")
    }
}

impl Drop for ShownReceiver {
    fn drop(&mut self) {
        // Kills the shell and every process that it started.
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.child.wait();
    }
}

/// A shell whose `cargo` is the one that runs this test, and whose `diesel-outbox` is the one that is tested.
fn shell(script: &str) -> Command {
    let cargo = PathBuf::from(env!("CARGO"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = PathBuf::from(env!("CARGO_BIN_EXE_diesel-outbox"));
    let folders = [&cargo, &program].map(|one| one.parent().map(Path::to_owned));
    let path = std::env::join_paths(
        folders
            .into_iter()
            .flatten()
            .chain(std::env::split_paths(&path)),
    )
    .expect("a path");
    let mut command = Command::new("sh");
    command.args(["-ec", script]).env("PATH", path);
    command
}

/// Cargo's `target` folder.
fn build_folder() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("tmp is in the build's folder")
}

/// A port that no process listens on.
fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener
        .local_addr()
        .expect("an address")
        .port()
        .to_string()
}

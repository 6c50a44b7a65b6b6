//! `diesel-outbox demo` and `diesel-outbox bench`, which the program `outbox-lab` in the same folder runs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Finished, PROGRAM, finish};

/// A folder that contains `diesel-outbox`.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let name = uuid::Uuid::now_v7().simple().to_string();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir(&folder).expect("a folder");
        // A copy could not be started while another thread starts a process, which still has it open for writing.
        fs::hard_link(PROGRAM, folder.join("diesel-outbox")).expect("a link");
        Self(folder)
    }

    fn run(&self, arguments: &[&str]) -> Finished {
        let mut command = Command::new(self.0.join("diesel-outbox"));
        command.args(arguments);
        finish(command)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn outbox_lab_gets_all_arguments() {
    let folder = Folder::new();
    symlink("/bin/echo", folder.0.join("outbox-lab")).expect("a link");
    for arguments in [
        "bench",
        "bench --help",
        "bench -h",
        "demo --orders 5 --batch=7",
        "--batch 7 bench drain --messages=5 --json",
        "bench --url=http://127.0.0.1:1 ordered --keys 5,6",
    ] {
        let given: Vec<&str> = arguments.split(' ').collect();
        assert_eq!(folder.run(&given).code(0).stdout.trim_end(), arguments);
    }
}

#[test]
fn without_outbox_lab_the_error_says_how_to_get_it() {
    let folder = Folder::new();
    for command in ["bench", "demo"] {
        let error = folder.run(&[command, "--json"]).code(1).stderr;
        for said in ["outbox-lab does not exist", "cargo build --release"] {
            assert!(error.contains(said), "{error}");
        }
    }
}

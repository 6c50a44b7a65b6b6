//! `diesel-outbox demo` and `diesel-outbox bench`: the program `outbox-lab` runs them.
//!
//! A build of the whole project puts both programs into one folder. Packages and `cargo install` contain only this
//! program: whoever runs relays needs no benchmark.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, anyhow};

/// The program that demonstrates and measures, in the folder of this program.
const PROGRAM: &str = "outbox-lab";

/// The options of a command of `outbox-lab`, which alone knows them.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Options {
    /// Options of the command; --help lists them
    #[arg(
        value_name = "OPTIONS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    _options: Vec<OsString>,
}

/// Replaces this process with `outbox-lab`, with the same arguments.
pub(crate) fn run() -> Result<()> {
    let own = std::env::current_exe().context("cannot find the folder of this program")?;
    let program = own.with_file_name(PROGRAM);
    let error = Command::new(&program)
        .args(std::env::args_os().skip(1))
        .exec();
    if error.kind() != ErrorKind::NotFound {
        return Err(error).with_context(|| format!("cannot run {}", program.display()));
    }
    Err(anyhow!(
        "{} does not exist: `demo` and `bench` need the program {PROGRAM}, which is in no package. Build both programs from the source, {}: `cargo build --release`, then `target/release/diesel-outbox bench`",
        program.display(),
        env!("CARGO_PKG_REPOSITORY"),
    ))
}

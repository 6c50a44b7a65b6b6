//! Exit codes, and the error that a failed command prints.

use std::process::ExitCode;

use diesel_outbox::{BadBackoff, BadName, ConfigError, StartError, UnknownWord};

use crate::logging;

/// Failed while running.
const FAILED: u8 = 1;
/// Bad settings or usage. clap exits with the same code.
const USAGE: u8 = 2;

/// The exit code for the result of a command. Prints the error, after the name of the program. The last lines of the log
/// are written, or a second passes.
pub fn code(program: &str, result: anyhow::Result<()>) -> ExitCode {
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            logging::print_last(&format!("{program}: {}", with_advice(&error)));
            ExitCode::from(if is_usage(&error) { USAGE } else { FAILED })
        }
    };
    logging::flush();
    code
}

/// The reader of the output closed the pipe, as `head` does: no failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The error text, with advice if the database role lacks a right. Messages of a server in another language get no
/// advice.
pub(crate) fn with_advice(error: &anyhow::Error) -> String {
    let what = error.chain().find_map(|cause| {
        let text = cause.to_string();
        text.strip_prefix("permission denied for ")
            .map(str::to_owned)
    });
    let advice = match what.as_deref().and_then(|what| what.split(' ').next()) {
        None => "",
        Some("database") => ": the role needs CREATE on this database",
        Some("schema") => {
            ": the role needs USAGE on this schema, and CREATE to create an outbox in it"
        }
        Some(_) if what.as_deref() == Some("table outbox_migrations") => {
            ": run `diesel-outbox migrate` with the role that owns the outbox"
        }
        Some(_) => {
            "; `diesel-outbox migrate --print --roles` prints the rights of each role, `diesel-outbox check` the rights that a relay lacks"
        }
    };
    format!("{error:#}{advice}")
}

fn is_usage(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.is::<ConfigError>()
            || cause.is::<BadName>()
            || cause.is::<BadBackoff>()
            || cause.is::<UnknownWord>()
            || matches!(cause.downcast_ref(), Some(StartError::Config(_)))
    })
}

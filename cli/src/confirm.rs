//! Confirmation of large changes.

use std::io::{BufRead, IsTerminal};

use anyhow::{Result, bail};

/// Asks at the terminal whether this command may act, and says what becomes of the messages. Fails unless the operator confirms.
pub(crate) fn ask(command: &str, question: &str, becomes: &str) -> Result<()> {
    let mut answer = String::new();
    match std::io::stdin().is_terminal() {
        true => {
            eprint!("{question}? {becomes} [y/N] ");
            std::io::stdin().lock().read_line(&mut answer)?;
        }
        false => eprintln!("{command} asks for confirmation: without a terminal, give --yes"),
    }
    match answer.trim().to_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => bail!("nothing was changed: {becomes}"),
    }
}

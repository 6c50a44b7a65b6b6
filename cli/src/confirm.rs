//! Confirmation of large changes.

use std::io::{BufRead, IsTerminal};

use anyhow::{Result, bail};

/// Asks whether the act of this command may begin, and says what it would do. Fails unless the operator confirms.
pub(crate) fn ask(command: &str, question: &str, becomes: &str) -> Result<()> {
    let hint = format!("{command} asks for confirmation: without a terminal, give --yes");
    match confirmed(&format!("{question}? {becomes}"), &hint)? {
        true => Ok(()),
        false => bail!("nothing was changed: {becomes}"),
    }
}

/// Whether the operator confirms at the terminal. Without a terminal, prints `hint` and returns `false`.
pub(crate) fn confirmed(question: &str, hint: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        eprintln!("{hint}");
        return Ok(false);
    }
    eprint!("{question} [y/N] ");
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}

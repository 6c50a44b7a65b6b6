//! Confirmation of large changes.

use std::io::{BufRead, IsTerminal};

use anyhow::Result;

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

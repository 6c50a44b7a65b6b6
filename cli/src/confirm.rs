//! Asking before something large is done.

use std::io::{BufRead, IsTerminal};

use anyhow::Result;

/// Whether somebody at a terminal says yes. Without a terminal nobody can: `hint` says what to do then.
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

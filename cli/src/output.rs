//! Standard output: tables and JSON. A closed pipe is an error, not a panic.

use std::io::Write;

use anyhow::Result;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table};
use diesel_outbox_pages::text::{LONGEST_NAME, shortened};
use terminal_size::{Width, terminal_size_of};

/// The least width of a table, in characters.
const LEAST_WIDTH: u16 = 60;

/// Writes a line, and flushes.
///
/// # Errors
///
/// Standard output is closed.
pub fn line(text: impl std::fmt::Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Writes indented JSON.
///
/// # Errors
///
/// Standard output is closed.
pub fn json(value: &impl serde::Serialize) -> Result<()> {
    line(serde_json::to_string_pretty(value)?)
}

/// A table with these headings.
pub fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(headings);
    if let Some((Width(width), _)) = terminal_size_of(std::io::stdout()) {
        // Some tools create terminals of width 0: a table would have one letter per line.
        table.set_width(width.max(LEAST_WIDTH));
    }
    table
}

/// Text from a database or a receiver, without the characters that a terminal would obey: control characters, line
/// separators, and those that change the direction of text or are invisible.
pub(crate) fn shown(text: &str) -> String {
    let is_obeyed = |c: char| {
        c.is_control()
            || matches!(
                c,
                '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}' | '\u{200b}'..='\u{200f}'
            )
            || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}')
            || matches!(c, '\u{e0000}'..='\u{e007f}')
    };
    text.chars()
        .map(|c| if is_obeyed(c) { ' ' } else { c })
        .collect()
}

/// A name, shortened for a table row: names may have a kilobyte. JSON has the full name.
pub(crate) fn name(name: &str) -> String {
    shortened(&shown(name), LONGEST_NAME)
}

/// The first few names, and how many more there are.
pub(crate) fn names(all: &[String]) -> String {
    const FEW: usize = 8;
    let first: Vec<String> = all.iter().take(FEW).map(|one| name(one)).collect();
    let more = match all.len().saturating_sub(FEW) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", first.join(", "))
}

/// `31532.4` as `31,532`.
pub fn grouped(number: f64) -> String {
    indicatif::HumanCount(number.round() as u64).to_string()
}

/// `1 message`, `2 messages`.
pub(crate) fn counted(number: impl TryInto<u64>, one: &str, many: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    let word = if number == 1 { one } else { many };
    format!("{number} {word}")
}

/// A number of messages.
pub(crate) fn messages(number: impl TryInto<u64>) -> String {
    counted(number, "message", "messages")
}

/// A number of dead letters.
pub(crate) fn dead_letters(number: impl TryInto<u64>) -> String {
    counted(number, "dead letter", "dead letters")
}

/// Seconds in a readable unit: `3 s`, `12 min`, `4.2 h`, `9 d`.
pub(crate) fn age(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7_200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3_600.0),
        s => format!("{:.0} d", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_turns_the_direction_of_a_line_or_hides_in_it() {
        assert_eq!(shown("a\u{202e}b\u{2066}c\u{200b}d\u{1b}e"), "a b c d e");
        assert_eq!(
            shown("שלום عالم приём é 日本 🙂"),
            "שלום عالم приём é 日本 🙂"
        );
    }
}

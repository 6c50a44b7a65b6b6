//! Standard output: tables and JSON, and no panic when nobody reads.

use std::io::Write;

use anyhow::Result;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table};
use terminal_size::{Width, terminal_size_of};

/// Columns of a table, at least.
const LEAST_WIDTH: u16 = 60;
/// Characters of a name that a row of a table shows.
pub(crate) const LONGEST_NAME: usize = 80;

/// Writes a text and a line break.
pub(crate) fn line(text: impl std::fmt::Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Writes JSON for programs, indented for people who look at it.
pub(crate) fn json(value: &serde_json::Value) -> Result<()> {
    line(serde_json::to_string_pretty(value)?)
}

/// A table with these headings.
pub(crate) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(headings);
    if let Some((Width(width), _)) = terminal_size_of(std::io::stdout()) {
        // A terminal of no size, as some tools make them, would get a letter in each line.
        table.set_width(width.max(LEAST_WIDTH));
    }
    table
}

/// Text from a database or a receiver: a terminal obeys control characters.
pub(crate) fn shown(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// The beginning of a name, which may have a kilobyte, for a row of a table. JSON has all of it.
pub(crate) fn name(name: &str) -> String {
    shortened(&shown(name), LONGEST_NAME)
}

/// The beginning of a text of any length.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(most.saturating_sub(1)).collect();
    short.push('…');
    short
}

/// `31532.4` as `31,532`.
pub(crate) fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Seconds as people say them: `3 s`, `12 min`, `4.2 h`, `9 d`.
pub(crate) fn age(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7_200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3_600.0),
        s => format!("{:.0} d", s / 86_400.0),
    }
}

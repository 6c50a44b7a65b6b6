//! Reports as tables.

use comfy_table::{CellAlignment, Table};
use serde_json::Value;

use diesel_outbox_cli::output;

/// The format of a value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Unit {
    Word,
    Count,
    Micros,
    Millis,
    Bytes,
    Mebibytes,
    Percent,
    Ratio,
}

/// A value of a report, or `-` if there is none.
pub(super) fn shown(value: &Value, unit: Unit) -> String {
    if let (Unit::Word, Some(word)) = (unit, value.as_str()) {
        return word.to_owned();
    }
    let Some(number) = value.as_f64() else {
        return "-".to_owned();
    };
    match unit {
        Unit::Word | Unit::Count => output::grouped(number),
        Unit::Micros => format!("{number:.1} µs"),
        Unit::Millis => format!("{number:.1} ms"),
        Unit::Bytes => format!("{number:.0} bytes"),
        Unit::Mebibytes => format!("{number:.1} MiB"),
        Unit::Percent => format!("{:.1} %", 100.0 * number),
        Unit::Ratio => format!("{number:.2}"),
    }
}

/// A column: heading, key of the values, and format of the values.
pub(super) type Column = (&'static str, &'static str, Unit);

pub(super) const OWN_CPU: Column = (
    "own CPU per message",
    "own_cpu_us_per_message",
    Unit::Micros,
);

/// A row for each run of a report.
pub(super) fn runs(report: &Value, columns: &[Column]) -> Table {
    let headings: Vec<&str> = columns.iter().map(|(heading, _, _)| *heading).collect();
    let mut table = output::table(&headings);
    for run in report["runs"].as_array().into_iter().flatten() {
        table.add_row(
            columns
                .iter()
                .map(|(_, key, unit)| shown(&run[*key], *unit)),
        );
    }
    for (index, (_, _, unit)) in columns.iter().enumerate() {
        if let (Some(column), false) = (table.column_mut(index), matches!(unit, Unit::Word)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The settings that all numbers below the heading depend on.
pub(super) fn heading(report: &Value) -> String {
    format!(
        "{} bytes of payload, mode {}, {} senders, batches of {}",
        shown(&report["payload_bytes"], Unit::Count),
        shown(&report["mode"], Unit::Word),
        shown(&report["senders"], Unit::Count),
        shown(&report["batch"], Unit::Count),
    )
}

//! Tables, which become cards on narrow screens.

use maud::{Markup, html};

/// A column: its name and the kind of its content.
pub(crate) struct Column(pub(crate) &'static str, pub(crate) Kind);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    /// A text that needs no label on a card.
    Plain,
    /// A short text, laid out like a number.
    Short,
    /// A time, or words about a time.
    When,
    Number,
    /// A control, without a visible name.
    Control,
}

/// A table with a name for screen readers. The roles are explicit, because the layout as cards would drop the
/// implicit roles.
pub(crate) fn table(
    caption: &str,
    columns: &[Column],
    rows: impl IntoIterator<Item = Vec<Markup>>,
) -> Markup {
    let class = |kind: Kind| match kind {
        Kind::Text | Kind::Plain => None,
        Kind::Short => Some("short"),
        Kind::When => Some("when"),
        Kind::Number => Some("number"),
        Kind::Control => Some("control"),
    };
    html! {
        div.scroll {
            table role="table" aria-label=(caption) {
                thead role="rowgroup" {
                    tr role="row" {
                        @for Column(name, kind) in columns {
                            th role="columnheader" scope="col" class=[class(*kind)] {
                                @if *kind == Kind::Control { span.unseen { (name) } }
                                @else { (name) }
                            }
                        }
                    }
                }
                tbody role="rowgroup" {
                    @for row in rows {
                        tr role="row" {
                            @for (cell, Column(name, kind)) in row.iter().zip(columns) {
                                td role="cell" class=[class(*kind)]
                                    data-label=[is_named(*kind).then_some(*name)] { div { (cell) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A table, or what is said without rows.
pub(crate) fn table_or(
    none: &str,
    caption: &str,
    columns: &[Column],
    rows: impl IntoIterator<Item = Vec<Markup>>,
) -> Markup {
    let mut rows = rows.into_iter().peekable();
    match rows.peek() {
        None => html! { p.none role="status" { (none) } },
        Some(_) => table(caption, columns, rows),
    }
}

/// Whether a card shows a label for this column.
fn is_named(kind: Kind) -> bool {
    !matches!(kind, Kind::Plain | Kind::Control)
}

/// A number, dimmed if it is zero.
pub(super) fn number(text: &str) -> Markup {
    let class = (text == "0" || text == "–").then_some("quiet");
    html! { span class=[class] { (text) } }
}

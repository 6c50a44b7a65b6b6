//! Tables, which become cards where there is no room for columns.

use maud::{Markup, html};

/// A column: its name, and whether it has numbers.
pub(super) struct Column(pub(super) &'static str, pub(super) Kind);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    /// A text that needs no name beside it where there are no columns.
    Plain,
    /// A text as short as a number.
    Short,
    Number,
    /// A control, without a visible name.
    Control,
}

/// A table with a name for those who cannot see where it stands. The roles are said, because a table
/// that is shown as cards would lose them.
pub(super) fn table(caption: &str, columns: &[Column], rows: &[Vec<Markup>]) -> Markup {
    let class = |kind: Kind| match kind {
        Kind::Text | Kind::Plain => None,
        Kind::Short => Some("short"),
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

/// Whether a card says what this is.
fn is_named(kind: Kind) -> bool {
    !matches!(kind, Kind::Plain | Kind::Control)
}

/// A number that stands back where it is zero.
pub(super) fn number(text: &str) -> Markup {
    let class = (text == "0" || text == "–").then_some("quiet");
    html! { span class=[class] { (text) } }
}

//! The timeline of a message.

use maud::{Markup, html};

use super::words;

/// A step of a timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    /// `idle`, `wait`, `good` or `bad`.
    pub(super) kind: &'static str,
    pub(super) what: String,
    /// The time in RFC 3339; `None`: not recorded.
    pub(super) at: Option<String>,
    pub(super) more: String,
}

impl Step {
    pub(super) fn new(kind: &'static str, what: &str, at: Option<&str>, more: String) -> Self {
        Self {
            kind,
            what: what.to_owned(),
            at: at.map(str::to_owned),
            more,
        }
    }
}

pub(super) fn timeline(steps: &[Step]) -> Markup {
    html! {
        ol.timeline {
            @for step in steps {
                li class=(step.kind) {
                    span.what { (step.what) }
                    @if let Some(at) = &step.at { p { (words::moment(at)) } }
                    @if !step.more.is_empty() { p { (step.more) } }
                }
            }
        }
    }
}

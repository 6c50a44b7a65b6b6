//! Payloads, headers and responses, masked unless the guest may see them.

use maud::{Markup, html};

use super::mask;
use crate::Guest;

/// Longest text shown, in bytes: a browser must lay it out.
const MOST_BYTES: usize = 256 * 1024;

/// JSON, or only its keys.
pub(super) fn json(guest: &Guest, name: &str, text: &str) -> Markup {
    let shown = match guest.rights.payloads {
        true => mask::indented(cut(text)),
        false => mask::json(text),
    };
    html! {
        pre tabindex="0" role="region" aria-label={ (name) ", JSON" } { (shown) @if is_cut(guest, text) { "\n… and more" } }
    }
}

/// A receiver's response, or only its size.
pub(super) fn text(guest: &Guest, text: &str) -> Markup {
    let shown = match guest.rights.payloads {
        true => cut(text).to_owned(),
        false => mask::text(text),
    };
    html! {
        pre tabindex="0" role="region" aria-label="Response" { (shown) }
        @if !guest.rights.payloads {
            p.quiet { "The response is masked, like payloads. " code { "diesel-outbox message show" } " shows it." }
        }
    }
}

/// Explains why values are masked.
pub(super) fn hint(guest: &Guest) -> Markup {
    if guest.rights.payloads {
        return html! {};
    }
    html! { p.quiet { "Values are masked. OUTBOX_ADMIN_PAYLOADS=true, or the right to see payloads, shows them." } }
}

fn is_cut(guest: &Guest, text: &str) -> bool {
    guest.rights.payloads && text.len() > MOST_BYTES
}

pub(crate) fn cut(text: &str) -> &str {
    let mut end = MOST_BYTES.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

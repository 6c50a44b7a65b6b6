//! The frame of every page: menu, notices and footer.

use std::time::SystemTime;

use diesel_outbox::config::Config;
use diesel_outbox::program::{ACTS, while_disabled};
use http::StatusCode;
use maud::{DOCTYPE, Markup, html};

use super::{Visit, words};
use crate::Guest;
use crate::request::Form;
use crate::response::Response;

/// The pages in the menu, with their names.
const MENU: [(&str, &str); 9] = [
    ("/", "Overview"),
    ("/dead", "Dead letters"),
    ("/messages", "Messages"),
    ("/ledger", "Ledger"),
    ("/keys", "Keys"),
    ("/topics", "Topics"),
    ("/endpoints", "Endpoints"),
    ("/relays", "Relays"),
    ("/audit", "Acts"),
];

/// A page with the menu.
pub(super) struct Page<'a> {
    visit: Visit<'a>,
    title: &'a str,
    status: StatusCode,
    /// Whether the script refreshes the page every few seconds.
    is_live: bool,
}

impl<'a> Page<'a> {
    pub(super) fn new(visit: Visit<'a>, title: &'a str) -> Self {
        Self {
            visit,
            title,
            status: StatusCode::OK,
            is_live: false,
        }
    }

    pub(super) fn live(self, is_live: bool) -> Self {
        Self { is_live, ..self }
    }

    pub(super) fn status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    /// The page of a list whose filter is wrong.
    pub(super) fn refused(self, error: &str, form: &Markup) -> Response {
        let content = html! { h1 { (self.title) } p.refused role="alert" { (error) } (form) };
        self.status(StatusCode::BAD_REQUEST).answer(&content)
    }

    pub(super) fn answer(&self, content: &Markup) -> Response {
        let Visit { site, guest, .. } = self.visit;
        let now = SystemTime::now();
        let title = format!("{} – {}", self.title, site.config.table);
        let body = html! {
            a.skip href="#main" { "Skip to the content" }
            header.top {
                div.bar {
                    p.brand { a href="/" { (mark()) span { (site.config.table) } } }
                    (self.menu())
                    (self.who())
                }
            }
            @if !guest.rights.act {
                p.strip { "Read-only: changes are disabled." }
            }
            @if let Some(notice) = notice(&self.visit.request.query, &site.config) {
                p.notice role="status" data-notice { (notice) }
            }
            main id="main" tabindex="-1" { (content) }
            footer {
                p {
                    span id="as-of" data-live[self.is_live] { "As of " (words::clock(now)) " UTC" }
                    " " span id="reach" role="status" {}
                }
                @if self.is_live {
                    p { button.plain id="hold" type="button" aria-pressed="false" hidden { "Pause refreshing" } }
                }
                p { "diesel-outbox " (env!("CARGO_PKG_VERSION")) }
            }
        };
        document(self.status, &Head::of_operators(&title), &body)
    }

    fn menu(&self) -> Markup {
        let path = self.visit.request.path.as_str();
        let is_here = |page: &str| match page {
            "/" => path == "/",
            page => {
                path == page
                    || path
                        .strip_prefix(page)
                        .is_some_and(|rest| rest.starts_with('/'))
            }
        };
        html! {
            nav aria-label="Pages" {
                ul {
                    @for (page, name) in MENU {
                        li { a href=(page) aria-current=[is_here(page).then_some("page")] { (name) } }
                    }
                }
            }
        }
    }

    fn who(&self) -> Markup {
        let guest = self.visit.guest;
        if !guest.has_session {
            return html! {};
        }
        html! {
            form.who method="post" action="/logout" {
                (token(guest))
                span { span.quiet { "Logged in as " } (guest.who) }
                button.plain { "Log out" }
            }
        }
    }
}

/// The hidden field that every form of a guest sends back.
pub(super) fn token(guest: &Guest) -> Markup {
    html! { input type="hidden" name="form_token" value=(guest.form_token); }
}

/// Hidden fields of a form.
pub(super) fn hidden(fields: &[(&str, &str)]) -> Markup {
    html! { @for (name, value) in fields { input type="hidden" name=(name) value=(value); } }
}

/// The form of an act, with what it is about.
pub(super) fn act(guest: &Guest, path: &str, about: &[(&str, &str)], content: &Markup) -> Markup {
    html! {
        form.do method="post" action=(path) { (token(guest)) (hidden(about)) (content) }
    }
}

/// A section with a heading.
pub(super) fn section(id: &str, heading: &str, content: &Markup) -> Markup {
    html! {
        section.panel aria-labelledby=(id) {
            div.head { h2 id=(id) { (heading) } }
            (content)
        }
    }
}

/// The only section of a page, with the title of the page.
pub(crate) fn dialog(title: &str, content: &Markup) -> Markup {
    html! {
        section.panel {
            div.head { h1 { (title) } }
            div.body { (content) }
        }
    }
}

/// A list with its pages. `first`: the first page, if this is another one. `next`: the next page, and its name.
pub(super) fn list(
    (id, heading): (&str, &str),
    first: Option<String>,
    content: &Markup,
    next: Option<(&str, String)>,
) -> Markup {
    html! {
        section.panel aria-labelledby=(id) {
            div.head {
                h2 id=(id) { (heading) }
                @if let Some(first) = first { a href=(first) { "Back to the first page" } }
            }
            (content)
            @if let Some((name, next)) = next { div.actions { a.button.second href=(next) { (name) } } }
        }
    }
}

/// A page without the menu, for visitors who are not logged in.
pub(super) fn bare(status: StatusCode, title: &str, content: &Markup) -> Response {
    let body = html! { main.bare id="main" { p.brand { (mark()) span { "outbox" } } (content) } };
    document(status, &Head::of_operators(title), &body)
}

/// What differs in the heads of pages.
pub(crate) struct Head<'a> {
    pub(crate) language: &'a str,
    pub(crate) title: &'a str,
    pub(crate) script: Option<&'a str>,
}

impl<'a> Head<'a> {
    fn of_operators(title: &'a str) -> Self {
        Self {
            language: "en",
            title,
            script: Some("/assets/script.js"),
        }
    }
}

pub(crate) fn document(status: StatusCode, head: &Head<'_>, body: &Markup) -> Response {
    let page = html! {
        (DOCTYPE)
        html lang=(head.language) {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta name="robots" content="noindex";
                link rel="icon" href="/assets/icon.svg" type="image/svg+xml";
                link rel="stylesheet" href="/assets/style.css";
                @if let Some(script) = head.script { script src=(script) defer {} }
                title { (head.title) }
            }
            body { (body) }
        }
    };
    Response::html(status, page.into_string())
}

/// The logo: a box with an arrow that leaves it.
pub(crate) fn mark() -> Markup {
    html! {
        svg.mark viewBox="0 0 24 24" aria-hidden="true" {
            path d="M4 11v7a2 2 0 0 0 2 2h12a2 2 0 0 0 2-2v-7" {}
            path d="M12 15V4M7.5 8.5 12 4l4.5 4.5" {}
        }
    }
}

/// The notice about the change that redirected to this page. Only known values in the address produce a notice.
fn notice(query: &Form, config: &Config) -> Option<String> {
    let count: i64 = query
        .get("count")
        .and_then(|count| count.parse().ok())
        .unwrap_or(0);
    let messages = words::counted(count, "message is", "messages are");
    let done = query.get("done")?;
    let number = |name: &str| query.get(name)?.parse::<u64>().ok();
    if let Some(changed) = number("count")
        && let Some(notice) = of_act(done, changed, number("left").unwrap_or(0))
    {
        return Some(notice);
    }
    Some(match (done, count) {
        ("paused", _) => "Paused. Relays notice within a second.".to_owned(),
        ("paused_longer", _) => {
            "Nothing was changed: a pause at least as long was there, and stays. To replace it, resume first.".to_owned()
        }
        ("resumed", 0) => "Nothing to resume: the pause has already ended.".to_owned(),
        ("resumed", _) => "Resumed. If another pause is left, it is shown below.".to_owned(),
        ("cancelled", _) => {
            "The message was cancelled. The ledger records the cancellation.".to_owned()
        }
        ("rescheduled", _) => "The message was rescheduled.".to_owned(),
        ("settled_delivered", _) => "The message was settled as delivered.".to_owned(),
        ("settled_cancelled", _) => "The message was settled: it will not be sent.".to_owned(),
        ("in_flight", _) => {
            "Nothing was changed: the message is in flight. Try again when the attempt has ended."
                .to_owned()
        }
        ("ended_before", _) => {
            "Nothing was changed: the message was already settled, as shown below.".to_owned()
        }
        ("unknown", _) => "Nothing was changed: the message is no longer known.".to_owned(),
        ("nothing", _) => "No dead letters were selected.".to_owned(),
        ("enabled", _) => "Enabled. Relays notice within a second.".to_owned(),
        ("disabled", _) => format!("Disabled. {}", while_disabled(config)),
        ("registered", _) => "Registered. Relays notice within a second.".to_owned(),
        ("changed", _) => "Changed. Relays notice within a second.".to_owned(),
        ("removed", _) => {
            "Removed. Messages that waited for the endpoint are not sent, and end in the ledger."
                .to_owned()
        }
        ("sent_again", _) => "The message will be sent to this endpoint again.".to_owned(),
        ("recovered", _) => {
            format!("{messages} enqueued for this endpoint.")
        }
        ("recovering", _) => format!(
            "{messages} enqueued for this endpoint so far. There was no time for all: repeat the change, which continues."
        ),
        ("no_endpoint", _) => {
            "Nothing was changed: the endpoint does not exist, or has no such message.".to_owned()
        }
        _ => return None,
    })
}

/// What the last act has done, from the address that it led to.
fn of_act(done: &str, count: u64, left: u64) -> Option<String> {
    let mut acts = ACTS.iter().map(|act| act.words());
    let words = acts.find(|words| words.done == done)?;
    let rest = match left {
        0 => String::new(),
        left => format!(" {left} are left: repeat the act."),
    };
    Some(match count {
        0 => format!(
            "Nothing was {}: none is left, or the idempotency key is in the outbox again.{rest}",
            words.done
        ),
        1 => format!("1 {} was {}.{rest}", words.things.0, words.done),
        _ => {
            let count = words::count(i64::try_from(count).unwrap_or(i64::MAX), false);
            format!("{count} {} were {}.{rest}", words.things.1, words.done)
        }
    })
}

//! Changes of a registered destination.

use diesel_outbox::admin::Note;
use diesel_outbox::destinations::{DestinationTest, TestAnswer};
use diesel_outbox::program::{self, Act};
use http::StatusCode;
use maud::{Markup, html};
use uuid::Uuid;

use super::{on, page_of};
use crate::pages::layout::token;
use crate::pages::{Refusal, bad_request, content, link, plain, words};
use crate::{AUDIT, Guest, Request, Response, Site};

const LONGEST_REASON: usize = 200;
const SAY_WHY: &str = "Say why: the reason is the only explanation for later readers.";
/// The destination, or its message, does not exist.
const NOBODY: &str = "no_destination";

/// A change of a destination.
#[derive(Clone, Copy)]
pub(in crate::pages) enum Change<'a> {
    Enable,
    Disable { why: &'a str },
    Remove,
    SendAgain(Uuid),
}

impl Change<'_> {
    /// The act, what was requested, and what was done.
    fn words(self) -> (Act, &'static str, &'static str) {
        match self {
            Self::Enable => (Act::EnableDestination, "enable", "enabled"),
            Self::Disable { .. } => (Act::DisableDestination, "disable", "disabled"),
            Self::Remove => (Act::RemoveDestination, "remove", "removed"),
            Self::SendAgain(_) => (Act::SendAgain, "send-again", "sent_again"),
        }
    }

    /// `false`: there is no such destination or message.
    pub(in crate::pages) fn carry_out(
        self,
        site: &Site,
        guest: &Guest,
        name: &str,
    ) -> Result<bool, Refusal> {
        let (why, message) = match self {
            Self::Disable { why: "" } => return Err(Refusal::Invalid(SAY_WHY.to_owned())),
            Self::Disable { why } => (why.chars().take(LONGEST_REASON).collect(), String::new()),
            Self::SendAgain(id) => (String::new(), id.to_string()),
            Self::Enable | Self::Remove => (String::new(), String::new()),
        };
        let (act, what, became) = self.words();
        let note = Note::new(&guest.who, &why);
        let done = on(site, &site.changes, |conn, outbox, destinations| {
            program::audited(conn, outbox, &note, act, name, |conn| match self {
                Self::Enable => destinations.enable(conn, name),
                Self::Disable { .. } => destinations.disable(conn, name, &why),
                Self::Remove => destinations.remove(conn, name),
                Self::SendAgain(id) => destinations.send_again(conn, name, id),
            })
        });
        site.forget();
        match &done {
            Ok(is_there) => {
                let became = if *is_there { became } else { NOBODY };
                log::info!(target: AUDIT, event = "admin_destination", who = guest.who, peer:% = guest.peer, destination = name, what = what, message_id = message, why = why, became = became; "{:?} requested {what} of destination {name:?} on the admin page: {became}", guest.who);
            }
            Err(Refusal::Away(error)) => {
                log::warn!(target: AUDIT, event = "admin_destination", who = guest.who, peer:% = guest.peer, destination = name, what = what, error:% = format!("{error:#}"); "{:?} requested {what} of destination {name:?} on the admin page, which failed: {error:#}", guest.who);
            }
            Err(_) => {}
        }
        done
    }
}

pub(in crate::pages) fn answer(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let value = |name| form.get(name).unwrap_or_default().trim();
    let name = value("name");
    let change = match request.path.as_str() {
        "/destination/test" => return tested(site, guest, request, name),
        "/destination/remove" if value("sure") != "yes" => {
            return question(site, guest, request, name);
        }
        "/destination/remove" => Change::Remove,
        "/destination/enable" => Change::Enable,
        "/destination/disable" => Change::Disable {
            why: value("reason"),
        },
        _ => match value("message").parse() {
            Ok(id) => Change::SendAgain(id),
            Err(_) => {
                let why = "The message is missing or invalid.";
                return bad_request(site, guest, request, why);
            }
        },
    };
    let became = match change.carry_out(site, guest, name) {
        Ok(true) => change.words().2,
        Ok(false) => NOBODY,
        Err(refusal) => return refusal.page(site, guest, request),
    };
    let done = [("done", became)];
    Response::see_other(&match became {
        "removed" => link("/destinations", &done),
        _ => link("/destinations", &[[("name", name)], done].concat()),
    })
}

/// Sends a test event. No database connection is held during the send. `None`: there is no such destination.
pub(in crate::pages) fn test(
    site: &Site,
    guest: &Guest,
    name: &str,
) -> Result<Option<TestAnswer>, Refusal> {
    let test = on(site, &site.searches, |conn, _, destinations| {
        destinations.test(conn, name, &site.config)
    })?;
    let answer = test.map(DestinationTest::send);
    if let Some(answer) = &answer {
        let went_well = answer.went_well;
        log::info!(target: AUDIT, event = "admin_destination", who = guest.who, peer:% = guest.peer, destination = name, what = "test", went_well = went_well; "{:?} tested destination {name:?} on the admin page", guest.who);
    }
    Ok(answer)
}

/// Sends a test event and shows the response.
fn tested(site: &Site, guest: &Guest, request: &Request, name: &str) -> Response {
    let answer = match test(site, guest, name) {
        Ok(Some(answer)) => answer,
        Ok(None) => {
            let nobody = [("name", name), ("done", NOBODY)];
            return Response::see_other(&link("/destinations", &nobody));
        }
        Err(Refusal::Destination(error)) => {
            let why = format!("Nothing was sent: {error}.");
            return bad_request(site, guest, request, &why);
        }
        Err(refusal) => return refusal.page(site, guest, request),
    };
    let title = format!("Test of {name}");
    let content = html! {
        section.panel {
            div.head { h1 { "Test of " span.key { (words::name(name)) } } }
            div.body {
                (result(guest, &answer))
                p { a.button.second href=(page_of(name)) { "Back to the destination" } }
            }
        }
    };
    plain(site, guest, request, &title).answer(StatusCode::OK, &content)
}

fn result(guest: &Guest, answer: &TestAnswer) -> Markup {
    html! {
        dl.facts {
            dt { "Result" }
            dd {
                @if answer.went_well { span.badge.good { "succeeded" } } @else { span.badge.bad { "failed" } }
                @if let Some(reason) = answer.reason { " " (reason.as_str()) }
                @if let Some(error) = &answer.error { span.error { (words::shortened(error, 400)) } }
            }
            @if let Some(status) = answer.http_status { dt { "Response" } dd { "HTTP " (status) } }
            dt { "Duration" } dd { (words::duration(answer.took.as_secs_f64())) }
            dt { "Message id" } dd { (answer.message_id) }
        }
        @if let Some(body) = &answer.body { (content::text(guest, body)) }
    }
}

/// The confirmation page for a removal.
fn question(site: &Site, guest: &Guest, request: &Request, name: &str) -> Response {
    let title = format!("Remove {name}?");
    let content = html! {
        section.panel {
            div.head { h1 { "Remove " span.key { (words::name(name)) } "?" } }
            div.body {
                p { "Messages that wait for the destination are dead-lettered (" code { "DESTINATION_REMOVED" } "). Its signing secret is deleted permanently." }
                form.do method="post" action="/destination/remove" {
                    (token(guest))
                    input type="hidden" name="name" value=(name);
                    input type="hidden" name="sure" value="yes";
                    button.danger.sure { "Remove" }
                    a.button.second href=(page_of(name)) { "No, go back" }
                }
            }
        }
    };
    plain(site, guest, request, &title).answer(StatusCode::OK, &content)
}

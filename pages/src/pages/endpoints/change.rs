//! Changes of an endpoint.

use diesel_outbox::admin::Note;
use diesel_outbox::endpoints::{EndpointTest, TestAnswer};
use diesel_outbox::program::{self, Act};
use maud::{Markup, html};
use uuid::Uuid;

use super::{on, page_of};
use crate::pages::layout::{act, dialog};
use crate::pages::{Refusal, Visit, content, link, words};
use crate::response::Response;
use crate::{AUDIT, Guest};

const LONGEST_REASON: usize = 200;
const SAY_WHY: &str = "Say why: the reason is the only explanation for later readers.";
/// The endpoint, or its message, does not exist.
const NOBODY: &str = "no_endpoint";

/// A change of an endpoint.
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
            Self::Enable => (Act::EnableEndpoint, "enable", "enabled"),
            Self::Disable { .. } => (Act::DisableEndpoint, "disable", "disabled"),
            Self::Remove => (Act::RemoveEndpoint, "remove", "removed"),
            Self::SendAgain(_) => (Act::SendAgain, "send-again", "sent_again"),
        }
    }

    /// `false`: there is no such endpoint or message.
    pub(in crate::pages) fn carry_out(
        self,
        visit: &Visit<'_>,
        name: &str,
    ) -> Result<bool, Refusal> {
        let (why, message) = match self {
            Self::Disable { why: "" } => return Err(Refusal::Invalid(SAY_WHY.to_owned())),
            Self::Disable { why } => (why.chars().take(LONGEST_REASON).collect(), String::new()),
            Self::SendAgain(id) => (String::new(), id.to_string()),
            Self::Enable | Self::Remove => (String::new(), String::new()),
        };
        let (act, what, became) = self.words();
        let note = Note::new(&visit.guest.who, &why);
        let done = on(visit, &visit.site.changes, |conn, outbox, destinations| {
            program::audited(conn, outbox, &note, act, name, |conn| match self {
                Self::Enable => destinations.enable(conn, name),
                Self::Disable { .. } => destinations.disable(conn, name, &why),
                Self::Remove => destinations.remove(conn, name),
                Self::SendAgain(id) => destinations.send_again(conn, name, id),
            })
        });
        match &done {
            Ok(is_there) => {
                let became = if *is_there { became } else { NOBODY };
                let name = name.to_owned();
                visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_endpoint", who = who, peer:% = peer, destination = name, what = what, message_id = message, why = why, became = became; "{who:?} requested {what} of endpoint {name:?} on the admin page: {became}"));
            }
            Err(Refusal::Away(error)) => {
                log::warn!(target: AUDIT, event = "admin_endpoint", who = visit.guest.who, peer:% = visit.guest.peer, destination = name, what = what, error:% = format!("{error:#}"); "{:?} requested {what} of endpoint {name:?} on the admin page, which failed: {error:#}", visit.guest.who);
            }
            Err(_) => {}
        }
        done
    }
}

pub(in crate::pages) fn answer(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let name = visit.get("name");
    let change = match visit.request.path.as_str() {
        "/endpoint/remove" if visit.get("sure") != "yes" => return Ok(question(visit, name)),
        "/endpoint/remove" => Change::Remove,
        "/endpoint/enable" => Change::Enable,
        "/endpoint/disable" => Change::Disable {
            why: visit.get("reason"),
        },
        _ => match visit.get("message").parse() {
            Ok(id) => Change::SendAgain(id),
            Err(_) => {
                let why = "The message is missing or invalid.";
                return Err(Refusal::Invalid(why.to_owned()));
            }
        },
    };
    if !change.carry_out(visit, name)? {
        return Ok(nobody(name));
    }
    let done = [("done", change.words().2)];
    Ok(Response::see_other(&match change {
        Change::Remove => link("/endpoints", &done),
        _ => link("/endpoints", &[[("name", name)], done].concat()),
    }))
}

pub(super) fn nobody(name: &str) -> Response {
    let nobody = [("name", name), ("done", NOBODY)];
    Response::see_other(&link("/endpoints", &nobody))
}

/// Sends a test event. No database connection is held during the send. `None`: there is no such endpoint.
pub(in crate::pages) fn test(visit: &Visit<'_>, name: &str) -> Result<Option<TestAnswer>, Refusal> {
    let note = Note::new(&visit.guest.who, "");
    let test = on(visit, &visit.site.changes, |conn, outbox, destinations| {
        let test = destinations.test(conn, name, &visit.site.config)?;
        if test.is_some() {
            program::audit(conn, outbox, &note, Act::TestEndpoint, name)?;
        }
        Ok(test)
    })?;
    let answer = test.map(EndpointTest::send);
    if let Some(answer) = &answer {
        on(visit, &visit.site.changes, |conn, _, destinations| {
            destinations.record_test(conn, answer)
        })?;
        let went_well = answer.went_well;
        let name = name.to_owned();
        visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_endpoint", who = who, peer:% = peer, destination = name, what = "test", went_well = went_well; "{who:?} tested endpoint {name:?} on the admin page"));
    }
    Ok(answer)
}

/// Sends a test event and shows the response.
pub(in crate::pages) fn tested(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let name = visit.get("name");
    let answer = match test(visit, name) {
        Ok(Some(answer)) => answer,
        Ok(None) => return Ok(nobody(name)),
        Err(Refusal::Endpoint(error)) => {
            let why = format!("Nothing was sent: {error}.");
            return Err(Refusal::Invalid(why));
        }
        Err(refusal) => return Err(refusal),
    };
    let content = html! {
        (result(visit.guest, &answer))
        p { a.button.second href=(page_of(name)) { "Back to the endpoint" } }
    };
    let title = format!("Test of {name}");
    Ok(visit.page(&title).answer(&dialog(&title, &content)))
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
fn question(visit: &Visit<'_>, name: &str) -> Response {
    let buttons = html! {
        button.danger.sure { "Remove" }
        a.button.second href=(page_of(name)) { "No, go back" }
    };
    let about = [("name", name), ("sure", "yes")];
    let content = html! {
        p { "Messages that wait for the endpoint end in the ledger and are not sent (" code { "DESTINATION_REMOVED" } "). Its signing secret is deleted permanently." }
        (act(visit.guest, "/endpoint/remove", &about, &buttons))
    };
    let title = format!("Remove {name}?");
    visit.page(&title).answer(&dialog(&title, &content))
}

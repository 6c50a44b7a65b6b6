//! Changes of an endpoint.

use diesel_outbox::admin::Note;
use diesel_outbox::endpoints::{EndpointTest, TestAnswer};
use diesel_outbox::program::{self, ENDPOINT_ACTS, EndpointAct, EndpointPreview};
use maud::{Markup, html};
use uuid::Uuid;

use super::{on, page_of};
use crate::pages::acts::capital;
use crate::pages::layout::{act, dialog};
use crate::pages::{Refusal, Visit, content, link, words};
use crate::response::Response;
use crate::{AUDIT, Guest};

/// The endpoint, or its message, does not exist.
const NOBODY: &str = "no_endpoint";

/// What the act would do. `None`: there is no such endpoint.
pub(in crate::pages) fn preview(
    visit: &Visit<'_>,
    act: &EndpointAct,
    name: &str,
) -> Result<Option<EndpointPreview>, Refusal> {
    on(visit, &visit.site.changes, |conn, _, endpoints| {
        act.preview(conn, endpoints, name, &visit.site.config)
    })
}

/// Changes the endpoint. `false`: there is no such endpoint.
pub(in crate::pages) fn perform(
    visit: &Visit<'_>,
    act: &EndpointAct,
    name: &str,
    why: &str,
) -> Result<bool, Refusal> {
    let note = Note::new(&visit.guest.who, why);
    let done = on(visit, &visit.site.changes, |conn, _, endpoints| {
        act.perform(conn, endpoints, name, &note)
    });
    log(visit, (act.name, act.done), name, (why.trim(), ""), &done);
    done
}

/// Sends a delivered message or a dead letter to the endpoint once more. `false`: there is no such endpoint or message.
pub(in crate::pages) fn send_again(
    visit: &Visit<'_>,
    name: &str,
    id: Uuid,
    why: &str,
) -> Result<bool, Refusal> {
    let note = Note::new(&visit.guest.who, why);
    let done = on(visit, &visit.site.changes, |conn, _, endpoints| {
        program::send_again(conn, endpoints, name, id, &note)
    });
    let message = id.to_string();
    log(
        visit,
        ("send-again", "sent_again"),
        name,
        (why.trim(), &message),
        &done,
    );
    done
}

fn log(
    visit: &Visit<'_>,
    (what, became): (&'static str, &'static str),
    name: &str,
    (why, message): (&str, &str),
    done: &Result<bool, Refusal>,
) {
    match done {
        Ok(is_there) => {
            let became = if *is_there { became } else { NOBODY };
            let (name, why, message) = (name.to_owned(), why.to_owned(), message.to_owned());
            visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_endpoint", who = who, peer:% = peer, destination = name, what = what, message_id = message, why = why, became = became; "{who:?} requested {what} of endpoint {name:?} on the admin page: {became}"));
        }
        Err(Refusal::Away(error)) => {
            log::warn!(target: AUDIT, event = "admin_endpoint", who = visit.guest.who, peer:% = visit.guest.peer, destination = name, what = what, error:% = format!("{error:#}"); "{:?} requested {what} of endpoint {name:?} on the admin page, which failed: {error:#}", visit.guest.who);
        }
        Err(_) => {}
    }
}

pub(in crate::pages) fn answer(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let name = visit.get("name");
    let asked = visit.request.path.rsplit('/').next().unwrap_or_default();
    let (is_there, done) = match ENDPOINT_ACTS.iter().find(|act| act.name == asked) {
        Some(act) if act.ends && visit.get("sure") != "yes" => return question(visit, act, name),
        Some(act) => (perform(visit, act, name, visit.get("reason"))?, act.done),
        None => {
            let id = visit.get("message").parse();
            let id =
                id.map_err(|_| Refusal::Invalid("The message is missing or invalid.".to_owned()))?;
            (send_again(visit, name, id, visit.get("why"))?, "sent_again")
        }
    };
    if !is_there {
        return Ok(nobody(name));
    }
    let done = [("done", done)];
    Ok(Response::see_other(&match asked {
        "remove" => link("/endpoints", &done),
        _ => link("/endpoints", &[[("name", name)], done].concat()),
    }))
}

pub(super) fn nobody(name: &str) -> Response {
    let nobody = [("name", name), ("done", NOBODY)];
    Response::see_other(&link("/endpoints", &nobody))
}

/// Sends a test event. No database connection is held during the send. `None`: there is no such endpoint.
pub(in crate::pages) fn test(
    visit: &Visit<'_>,
    name: &str,
    why: &str,
) -> Result<Option<TestAnswer>, Refusal> {
    let note = Note::new(&visit.guest.who, why);
    let test = on(visit, &visit.site.changes, |conn, _, endpoints| {
        program::begin_test(conn, endpoints, name, &visit.site.config, &note)
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
    let answer = match test(visit, name, visit.get("why")) {
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

/// The confirmation page of an act that ends messages.
fn question(visit: &Visit<'_>, asked: &EndpointAct, name: &str) -> Result<Response, Refusal> {
    let Some(found) = preview(visit, asked, name)? else {
        return Ok(nobody(name));
    };
    let path = format!("/endpoint/{}", asked.name);
    let verb = capital(asked.name);
    let title = format!("{verb} {name}?");
    let buttons = html! {
        label.field { "Why" input name="reason" maxlength="200"; }
        button.danger.sure { (verb) }
        a.button.second href=(page_of(name)) { "No, go back" }
    };
    let about = [("name", name), ("sure", "yes")];
    let content = html! {
        p { (found.waiting_in_words()) }
        p { (found.becomes) }
        p { (asked.undo) }
        (act(visit.guest, &path, &about, &buttons))
    };
    Ok(visit.page(&title).answer(&dialog(&title, &content)))
}

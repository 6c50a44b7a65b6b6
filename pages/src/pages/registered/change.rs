//! Changes of a registered destination.

use diesel_outbox::admin::Note;
use diesel_outbox::destinations::{DestinationError, TestAnswer};
use diesel_outbox::program::{self, Act};
use http::StatusCode;
use maud::{Markup, html};

use super::{page_of, with};
use crate::pages::layout::token;
use crate::pages::{bad_request, content, database_away, link, plain, words};
use crate::{AUDIT, Guest, Request, Response, Site};

const LONGEST_REASON: usize = 200;

/// The result of a change, as stated in the address of the next page.
type Became = Result<&'static str, DestinationError>;

pub(in crate::pages) fn answer(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let value = |name| form.get(name).unwrap_or_default().trim();
    let name = value("name");
    let reason: String = value("reason").chars().take(LONGEST_REASON).collect();
    let message = value("message");
    let note = Note::new(&guest.who, &reason);
    let is_there = |there: bool, became| if there { became } else { "no_destination" };
    let became =
        |there: Result<bool, DestinationError>, became| there.map(|there| is_there(there, became));
    let done: anyhow::Result<Became> = match request.path.as_str() {
        "/destination/test" => return test(site, guest, request, name),
        "/destination/remove" if value("sure") != "yes" => {
            return question(site, guest, request, name);
        }
        "/destination/disable" if reason.is_empty() => {
            let why = "Say why: the reason is the only explanation for later readers.";
            return bad_request(site, guest, request, why);
        }
        "/destination/send-again" => {
            let Ok(id) = message.parse() else {
                return bad_request(site, guest, request, "The message is missing or invalid.");
            };
            site.changes.run(|conn, outbox| {
                with(site, outbox, |destinations| {
                    let sent =
                        program::audited(conn, outbox, &note, Act::SendAgain, name, |conn| {
                            destinations.send_again(conn, name, id)
                        });
                    became(sent, "sent_again")
                })
            })
        }
        path => site.changes.run(|conn, outbox| {
            let (act, word) = match path {
                "/destination/enable" => (Act::EnableDestination, "enabled"),
                "/destination/disable" => (Act::DisableDestination, "disabled"),
                _ => (Act::RemoveDestination, "removed"),
            };
            with(site, outbox, |destinations| {
                let changed = program::audited(conn, outbox, &note, act, name, |conn| match act {
                    Act::EnableDestination => destinations.enable(conn, name),
                    Act::DisableDestination => destinations.disable(conn, name, &reason),
                    _ => destinations.remove(conn, name),
                });
                became(changed, word)
            })
        }),
    };
    site.forget();
    let what = request.path.trim_start_matches("/destination/");
    match done {
        Ok(Ok(became)) => {
            log::info!(target: AUDIT, event = "admin_destination", who = guest.who, peer:% = guest.peer, destination = name, what = what, message_id = message, why = reason, became = became; "{:?} requested {what} of destination {name:?} on the admin page: {became}", guest.who);
            let done = [("done", became)];
            Response::see_other(&match became {
                "removed" => link("/destinations", &done),
                _ => link("/destinations", &[[("name", name)], done].concat()),
            })
        }
        Ok(Err(error)) => bad_request(site, guest, request, &format!("{error}.")),
        Err(error) => {
            log::warn!(target: AUDIT, event = "admin_destination", who = guest.who, peer:% = guest.peer, destination = name, what = what, error:% = format!("{error:#}"); "{:?} requested {what} of destination {name:?} on the admin page, which failed: {error:#}", guest.who);
            database_away(site, guest, request, &format!("{error:#}"))
        }
    }
}

/// Sends a test event and shows the response. No database connection is held during the send.
fn test(site: &Site, guest: &Guest, request: &Request, name: &str) -> Response {
    let test = site.searches.run(|conn, outbox| {
        with(site, outbox, |destinations| {
            destinations.test(conn, name, &site.config)
        })
    });
    let test = match test {
        Ok(Ok(Some(test))) => test,
        Ok(Ok(None)) => {
            let nobody = [("name", name), ("done", "no_destination")];
            return Response::see_other(&link("/destinations", &nobody));
        }
        Ok(Err(error)) => {
            let why = format!("Nothing was sent: {error}.");
            return bad_request(site, guest, request, &why);
        }
        Err(error) => return database_away(site, guest, request, &format!("{error:#}")),
    };
    let answer = test.send();
    let went_well = answer.went_well;
    log::info!(target: AUDIT, event = "admin_destination", who = guest.who, peer:% = guest.peer, destination = name, what = "test", went_well = went_well; "{:?} tested destination {name:?} on the admin page", guest.who);
    let title = format!("Test of {name}");
    let content = html! {
        section.panel {
            div.head { h1 { "Test of " span.key { (words::name(name)) } } }
            div.body {
                (tested(guest, &answer))
                p { a.button.second href=(page_of(name)) { "Back to the destination" } }
            }
        }
    };
    plain(site, guest, request, &title).answer(StatusCode::OK, &content)
}

fn tested(guest: &Guest, answer: &TestAnswer) -> Markup {
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

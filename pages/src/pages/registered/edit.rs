//! Registers and changes a destination, gives it a new secret, and verifies its endpoint.

use std::time::Duration;

use anyhow::Result;
use diesel_outbox::admin::Note;
use diesel_outbox::config::{SigningSecret, Verification};
use diesel_outbox::destinations::{DestinationError, RegisteredDestination};
use diesel_outbox::program::{self, Act};
use http::StatusCode;
use maud::{Markup, html};
use secrecy::ExposeSecret;

use super::{page_of, url, with};
use crate::pages::layout::token;
use crate::pages::{bad_request, database_away, link, missing, plain, tenant, words};
use crate::request::Form;
use crate::{AUDIT, Guest, Request, Response, Site};

const VERIFICATIONS: [Verification; 5] = [
    Verification::None,
    Verification::Challenge,
    Verification::ChallengeSkip,
    Verification::CloudEvents,
    Verification::CloudEventsSkip,
];

fn value<'a>(form: &'a Form, name: &str) -> &'a str {
    form.get(name).unwrap_or_default().trim()
}

/// The form for a new destination, or for the destination with this name.
pub(in crate::pages) fn show(site: &Site, guest: &Guest, request: &Request) -> Response {
    let name = value(&request.query, "name");
    if !guest.rights.act {
        return Response::text(StatusCode::FORBIDDEN, "you may look, but change nothing\n");
    }
    let found = site
        .searches
        .run(|conn, outbox| with(site, outbox, |destinations| destinations.get(conn, name)));
    let found = match found.and_then(|found| Ok(found?)) {
        Ok(None) if !name.is_empty() => {
            let words = format!("There is no registered destination {name:?}.");
            return missing(site, guest, request, &words, &html! {});
        }
        Ok(found) => found,
        Err(error) => return database_away(site, guest, request, &format!("{error:#}")),
    };
    let title = match &found {
        Some(_) => format!("Change {name}"),
        None => "Register a destination".to_owned(),
    };
    let content = html! {
        section.panel {
            div.head { h1 { (title) } }
            div.body { (form(guest, found.as_ref())) }
        }
    };
    plain(site, guest, request, &title).answer(StatusCode::OK, &content)
}

fn form(guest: &Guest, found: Option<&RegisteredDestination>) -> Markup {
    let one = found.cloned();
    let one = one.unwrap_or_else(|| RegisteredDestination::new("", ""));
    html! {
        form.stack method="post" action="/destination/put" {
            (token(guest))
            @match found {
                Some(_) => { input type="hidden" name="name" value=(one.name); input type="hidden" name="is" value="known"; }
                None => { label.field { "Name" input name="name" required maxlength="200"; } }
            }
            label.field { "URL" @if found.is_some() { " (empty: unchanged)" }
                input name="url" type="url" required[found.is_none()] placeholder=(if found.is_some() { url(guest, &one) } else { "https://example.com/hooks".to_owned() });
            }
            label.field { "Topics, one pattern a line" textarea name="topics" rows="3" required { (one.topics.join("\n")) } }
            label.field { "Tenant (empty: all)" input name="tenant" value=(one.tenant_id.map_or_else(String::new, |id| id.to_string())); }
            label.field { "Filter, a JSONPath (empty: all messages)" input name="filter" value=(one.filter.as_deref().unwrap_or_default()); }
            label.field { "Description" input name="description" value=(one.description.as_deref().unwrap_or_default()); }
            label.field { "Verification of the endpoint"
                select name="verification" {
                    @for word in VERIFICATIONS { option value=(word) selected[word == one.verification] { (word) } }
                }
            }
            p.quiet { "Headers, authentication, limits and retries stay as they are: " code { "diesel-outbox destination put" } " changes them." }
            div.do {
                button { @if found.is_some() { "Change" } @else { "Register" } }
                a.button.second href=(if found.is_some() { page_of(&one.name) } else { "/destinations".to_owned() }) { "Cancel" }
            }
        }
    }
}

/// The destination with the values of the form.
fn filled(form: &Form, mut one: RegisteredDestination) -> Result<RegisteredDestination, String> {
    let given = |name| Some(value(form, name).to_owned()).filter(|text| !text.is_empty());
    if let Some(url) = given("url") {
        one.url = url;
    }
    let topics = value(form, "topics").split([',', '\n']).map(str::trim);
    one.topics = topics
        .filter(|topic| !topic.is_empty())
        .map(str::to_owned)
        .collect();
    one.tenant_id = tenant(value(form, "tenant"))?;
    one.filter = given("filter");
    one.description = given("description");
    if let Some(word) = given("verification") {
        let word: Result<_, String> = word.parse();
        one.verification = word.map_err(|error| format!("verification: {error}"))?;
    }
    Ok(one)
}

/// Registers the destination, or changes it if the form knew it.
pub(in crate::pages) fn put(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let (name, is_known) = (value(&form, "name"), value(&form, "is") == "known");
    let secret = (!is_known).then(SigningSecret::random);
    let done = site.changes.run(|conn, outbox| {
        with(site, outbox, |destinations| {
            let one = match (destinations.get(conn, name)?, is_known) {
                (Some(one), true) => one,
                (None, false) => RegisteredDestination::new(name, ""),
                (Some(_), false) => {
                    return Ok(Err(format!("There is already a destination {name:?}.")));
                }
                (None, true) => return Ok(Err(format!("There is no destination {name:?}."))),
            };
            let mut one = match filled(&form, one) {
                Ok(one) => one,
                Err(why) => return Ok(Err(why)),
            };
            one.secret.clone_from(&secret);
            let note = Note::new(&guest.who, "");
            let put = |conn: &mut _| destinations.put(conn, &one).map(|()| true);
            program::audited(conn, outbox, &note, Act::PutDestination, name, put).map(Ok)
        })
    });
    let became = if is_known { "changed" } else { "registered" };
    match done {
        Ok(Ok(Ok(_))) => {}
        Ok(Ok(Err(why))) => return bad_request(site, guest, request, &why),
        other => return failed(site, guest, request, other.map(|done| done.map(drop))),
    }
    log(guest, name, became);
    site.forget();
    match secret {
        Some(secret) => {
            let title = format!("{name} is registered");
            only_now(site, guest, request, (name, &title), &secret)
        }
        None => Response::see_other(&link("/destinations", &[("name", name), ("done", became)])),
    }
}

/// Gives the destination a new secret. The older ones also sign for a while.
pub(in crate::pages) fn rotate(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let name = value(&form, "name");
    let keep: Duration = match humantime::parse_duration(value(&form, "keep")) {
        Ok(keep) => keep,
        Err(error) => {
            let why = format!("How long the older secrets sign: {error}.");
            return bad_request(site, guest, request, &why);
        }
    };
    let secret = SigningSecret::random();
    let note = Note::new(&guest.who, "");
    let done = site.changes.run(|conn, outbox| {
        with(site, outbox, |destinations| {
            program::audited(conn, outbox, &note, Act::RotateDestination, name, |conn| {
                destinations.rotate_to(conn, name, &secret, keep)
            })
        })
    });
    match done {
        Ok(Ok(true)) => {
            log(guest, name, "rotated");
            let title = format!("{name} has a new secret");
            only_now(site, guest, request, (name, &title), &secret)
        }
        Ok(Ok(false)) => no_destination(name),
        other => failed(site, guest, request, other.map(|done| done.map(drop))),
    }
}

/// Asks the endpoint whether it wants messages, and shows the answer. No database connection is held meanwhile.
pub(in crate::pages) fn verify(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let name = value(&form, "name");
    let check = site.searches.run(|conn, outbox| {
        with(site, outbox, |destinations| {
            destinations.verify(conn, name, &site.config)
        })
    });
    let answer = match check {
        Ok(Ok(Some(check))) => check.ask(),
        Ok(Ok(None)) => return no_destination(name),
        other => return failed(site, guest, request, other.map(|check| check.map(drop))),
    };
    let note = Note::new(&guest.who, "");
    let recorded = site.changes.run(|conn, outbox| {
        with(site, outbox, |destinations| {
            program::audited(conn, outbox, &note, Act::VerifyDestination, name, |conn| {
                destinations.record(conn, &answer)
            })
        })
    });
    if !matches!(recorded, Ok(Ok(_))) {
        return failed(site, guest, request, recorded.map(|done| done.map(drop)));
    }
    log(guest, name, "verification");
    site.forget();
    let title = format!("Verification of {name}");
    let content = html! {
        section.panel {
            div.head { h1 { (title) } }
            div.body {
                dl.facts {
                    dt { "Result" }
                    dd {
                        @if answer.is_verified { span.badge.good { "verified" } } @else { span.badge.bad { "not verified" } }
                        @if let Some(reason) = answer.reason { " " (reason.as_str()) }
                        @if let Some(error) = &answer.error { span.error { (words::shortened(error, 400)) } }
                    }
                    @if let Some(rate) = &answer.allowed_rate { dt { "Allowed rate" } dd { (rate) } }
                    dt { "Duration" } dd { (words::duration(answer.took.as_secs_f64())) }
                }
                p { a.button.second href=(page_of(name)) { "Back to the destination" } }
            }
        }
    };
    plain(site, guest, request, &title).answer(StatusCode::OK, &content)
}

/// The page that shows a new secret, to those who may see it.
fn only_now(
    site: &Site,
    guest: &Guest,
    request: &Request,
    (name, title): (&str, &str),
    secret: &SigningSecret,
) -> Response {
    let content = html! {
        section.panel {
            div.head { h1 { (title) } }
            div.body {
                @if guest.rights.secrets {
                    p { "The receiver verifies messages with this secret. No page shows it again." }
                    pre tabindex="0" role="region" aria-label="Secret" { (secret.written().expose_secret()) }
                } @else {
                    p { "You may not see the secret: " code { "diesel-outbox destination show --reveal" } " shows it." }
                }
                p { a.button.second href=(page_of(name)) { "To the destination" } }
            }
        }
    };
    plain(site, guest, request, title).answer(StatusCode::OK, &content)
}

fn no_destination(name: &str) -> Response {
    let nobody = [("name", name), ("done", "no_destination")];
    Response::see_other(&link("/destinations", &nobody))
}

fn failed(
    site: &Site,
    guest: &Guest,
    request: &Request,
    done: Result<Result<(), DestinationError>>,
) -> Response {
    match done.map(|done| done.map_err(|error| format!("{error}."))) {
        Ok(Err(why)) => bad_request(site, guest, request, &why),
        Ok(Ok(())) => bad_request(site, guest, request, "Nothing was changed."),
        Err(error) => database_away(site, guest, request, &format!("{error:#}")),
    }
}

fn log(guest: &Guest, name: &str, what: &str) {
    log::info!(target: AUDIT, event = "admin_destination", who = guest.who, peer:% = guest.peer, destination = name, what = what; "{:?} changed destination {name:?} on the admin page: {what}", guest.who);
}

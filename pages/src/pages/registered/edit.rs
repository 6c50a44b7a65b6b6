//! Registers and changes a destination, gives it a new secret, and verifies its endpoint.

use std::time::Duration;

use diesel_outbox::admin::Note;
use diesel_outbox::config::{SigningSecret, Verification};
use diesel_outbox::destinations::{EndpointAnswer, EndpointCheck, RegisteredDestination};
use diesel_outbox::program::{self, Act};
use http::StatusCode;
use maud::{Markup, html};
use schemars::JsonSchema;
use secrecy::ExposeSecret;
use serde::Deserialize;

use super::{get, no_destination, on, page_of, url};
use crate::pages::layout::token;
use crate::pages::{Refusal, link, plain, tenant, words};
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
    let found = match name {
        "" => None,
        name => match get(site, name) {
            Ok(found) => Some(found),
            Err(refusal) => return refusal.page(site, guest, request),
        },
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

/// What operators write of a destination. Absent: as it is. Empty: without the value.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(in crate::pages) struct Written {
    url: Option<String>,
    /// Patterns of topics.
    topics: Option<Vec<String>>,
    /// Only messages of this tenant.
    tenant: Option<String>,
    /// A JSONPath that payloads match.
    filter: Option<String>,
    description: Option<String>,
    /// How the endpoint shows that it wants messages: `none`, `challenge`, `cloudevents`; with `:skip`, messages do not
    /// wait for it.
    verification: Option<String>,
}

impl Written {
    fn of(form: &Form) -> Self {
        let given = |name| Some(value(form, name).to_owned());
        let topics = value(form, "topics").split([',', '\n']).map(str::trim);
        let topics = topics.filter(|topic| !topic.is_empty());
        Self {
            url: given("url").filter(|url| !url.is_empty()),
            topics: Some(topics.map(str::to_owned).collect()),
            tenant: given("tenant"),
            filter: given("filter"),
            description: given("description"),
            verification: given("verification").filter(|word| !word.is_empty()),
        }
    }

    fn write(self, one: &mut RegisteredDestination) -> Result<(), String> {
        let filled = |text: String| Some(text).filter(|text| !text.is_empty());
        if let Some(url) = self.url {
            one.url = url;
        }
        if let Some(topics) = self.topics {
            one.topics = topics;
        }
        if let Some(text) = self.tenant {
            one.tenant_id = tenant(&text)?;
        }
        if let Some(filter) = self.filter {
            one.filter = filled(filter);
        }
        if let Some(description) = self.description {
            one.description = filled(description);
        }
        if let Some(word) = self.verification {
            let word: Result<_, String> = word.parse();
            one.verification = word.map_err(|error| format!("verification: {error}"))?;
        }
        Ok(())
    }
}

/// Registers the destination, and returns its secret, or changes a known one.
pub(in crate::pages) fn write(
    site: &Site,
    guest: &Guest,
    name: &str,
    is_known: bool,
    written: Written,
) -> Result<Option<SigningSecret>, Refusal> {
    let secret = (!is_known).then(SigningSecret::random);
    let done = on(site, &site.changes, |conn, outbox, destinations| {
        let mut one = match (destinations.get(conn, name)?, is_known) {
            (Some(one), true) => one,
            (None, false) => RegisteredDestination::new(name, ""),
            (Some(_), false) => {
                let why = format!("There is already a destination {name:?}.");
                return Ok(Err(Refusal::Taken(why)));
            }
            (None, true) => return Ok(Err(no_destination(name))),
        };
        if let Err(why) = written.write(&mut one) {
            return Ok(Err(Refusal::Invalid(why)));
        }
        one.secret.clone_from(&secret);
        let note = Note::new(&guest.who, "");
        let put = |conn: &mut _| destinations.put(conn, &one).map(|()| true);
        program::audited(conn, outbox, &note, Act::PutDestination, name, put).map(Ok)
    })?;
    done?;
    log(guest, name, if is_known { "changed" } else { "registered" });
    site.forget();
    Ok(secret)
}

/// Registers the destination, or changes it if the form knew it.
pub(in crate::pages) fn put(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let (name, is_known) = (value(&form, "name"), value(&form, "is") == "known");
    match write(site, guest, name, is_known, Written::of(&form)) {
        Ok(Some(secret)) => {
            let title = format!("{name} is registered");
            only_now(site, guest, request, (name, &title), &secret)
        }
        Ok(None) => Response::see_other(&link(
            "/destinations",
            &[("name", name), ("done", "changed")],
        )),
        Err(refusal) => refusal.page(site, guest, request),
    }
}

/// Gives the destination a new secret. The older ones also sign for a while, such as `24h`. `None`: there is no such
/// destination.
pub(in crate::pages) fn new_secret(
    site: &Site,
    guest: &Guest,
    name: &str,
    keep: &str,
) -> Result<Option<SigningSecret>, Refusal> {
    let keep: Duration = humantime::parse_duration(keep)
        .map_err(|error| Refusal::Invalid(format!("How long the older secrets sign: {error}.")))?;
    let secret = SigningSecret::random();
    let note = Note::new(&guest.who, "");
    let done = on(site, &site.changes, |conn, outbox, destinations| {
        program::audited(conn, outbox, &note, Act::RotateDestination, name, |conn| {
            destinations.rotate_to(conn, name, &secret, keep)
        })
    })?;
    if done {
        log(guest, name, "rotated");
    }
    Ok(done.then_some(secret))
}

pub(in crate::pages) fn rotate(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let name = value(&form, "name");
    match new_secret(site, guest, name, value(&form, "keep")) {
        Ok(Some(secret)) => {
            let title = format!("{name} has a new secret");
            only_now(site, guest, request, (name, &title), &secret)
        }
        Ok(None) => nobody(name),
        Err(refusal) => refusal.page(site, guest, request),
    }
}

/// Asks the endpoint whether it wants messages. No database connection is held meanwhile. `None`: there is no such
/// destination.
pub(in crate::pages) fn ask(
    site: &Site,
    guest: &Guest,
    name: &str,
) -> Result<Option<EndpointAnswer>, Refusal> {
    let check = on(site, &site.searches, |conn, _, destinations| {
        destinations.verify(conn, name, &site.config)
    })?;
    let Some(answer) = check.map(EndpointCheck::ask) else {
        return Ok(None);
    };
    let note = Note::new(&guest.who, "");
    on(site, &site.changes, |conn, outbox, destinations| {
        program::audited(conn, outbox, &note, Act::VerifyDestination, name, |conn| {
            destinations.record(conn, &answer)
        })
    })?;
    log(guest, name, "verification");
    site.forget();
    Ok(Some(answer))
}

pub(in crate::pages) fn verify(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let name = value(&form, "name");
    let answer = match ask(site, guest, name) {
        Ok(Some(answer)) => answer,
        Ok(None) => return nobody(name),
        Err(refusal) => return refusal.page(site, guest, request),
    };
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

fn nobody(name: &str) -> Response {
    let nobody = [("name", name), ("done", "no_destination")];
    Response::see_other(&link("/destinations", &nobody))
}

fn log(guest: &Guest, name: &str, what: &str) {
    log::info!(target: AUDIT, event = "admin_destination", who = guest.who, peer:% = guest.peer, destination = name, what = what; "{:?} changed destination {name:?} on the admin page: {what}", guest.who);
}

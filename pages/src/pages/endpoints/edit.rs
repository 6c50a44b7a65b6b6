//! Registers and changes an endpoint, gives it a new secret, and verifies its endpoint.

use std::time::Duration;

use diesel_outbox::admin::Note;
use diesel_outbox::config::{SigningSecret, Verification};
use diesel_outbox::endpoints::{
    Endpoint, EndpointAnswer, EndpointCheck, EndpointFilter, EndpointKind,
};
use diesel_outbox::program::{self, Act};
use http::StatusCode;
use maud::{Markup, html};
use schemars::JsonSchema;
use secrecy::ExposeSecret;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::change::nobody;
use super::{get, no_endpoint, on, page_of, url};
use crate::api::given;
use crate::feeds::is_feed;
use crate::pages::layout::{dialog, token};
use crate::pages::{Refusal, Visit, link, tenant, words};
use crate::request::Form;
use crate::response::Response;
use crate::text::with_user_of;
use crate::{AUDIT, Guest};

const VERIFICATIONS: [Verification; 5] = [
    Verification::None,
    Verification::Challenge,
    Verification::ChallengeSkip,
    Verification::CloudEvents,
    Verification::CloudEventsSkip,
];

const KINDS: [(EndpointKind, &str); 2] = [
    (EndpointKind::Webhook, "Messages are posted to its URL."),
    (
        EndpointKind::Feed,
        "Consumers read it with a token. It has no URL.",
    ),
];

/// The form for a new endpoint, or for the endpoint with this name.
pub(in crate::pages) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    if !visit.guest.rights.act {
        let why = "you may look, but change nothing\n";
        return Ok(Response::text(StatusCode::FORBIDDEN, why));
    }
    let (found, title) = match visit.get("name") {
        "" => {
            // An outbox without endpoints has no form.
            on(visit, &visit.site.searches, |conn, _, endpoints| {
                endpoints.list(conn, &EndpointFilter::default(), 0)
            })?;
            (None, "Register an endpoint".to_owned())
        }
        name => (Some(get(visit, name)?), format!("Change {name}")),
    };
    let form = form(visit.guest, found.as_ref());
    Ok(visit.page(&title).answer(&dialog(&title, &form)))
}

fn form(guest: &Guest, found: Option<&Endpoint>) -> Markup {
    let one = found.cloned();
    let one = one.unwrap_or_else(|| Endpoint::new("", ""));
    html! {
        form.stack method="post" action="/endpoint/put" {
            (token(guest))
            @match found {
                Some(_) => { input type="hidden" name="name" value=(one.name); input type="hidden" name="is" value="known"; }
                None => {
                    label.field { "Name" input name="name" required maxlength="200"; }
                    fieldset {
                        @for (kind, about) in KINDS {
                            label {
                                input type="radio" name="kind" value=(kind) checked[kind == EndpointKind::Webhook];
                                " " strong { (kind) } " " span.quiet { (about) }
                            }
                        }
                    }
                }
            }
            @if !is_feed(&one) { label.field.of-webhook { "URL" @if found.is_some() { " (empty: unchanged)" }
                input name="url" type="url" placeholder=(if found.is_some() { url(guest, &one) } else { "https://example.com/hooks".to_owned() });
            } }
            label.field { "Topics, one pattern a line" textarea name="topics" rows="3" required { (one.topics.join("\n")) } }
            label.field { "Tenant (empty: all)" input name="tenant" value=(one.tenant_id.map_or_else(String::new, |id| id.to_string())); }
            label.field { "Filter, as JSON (empty: all messages)"
                textarea name="filter" rows="3" { @if let Some(filter) = &one.filter { (filter) } }
            }
            label.field { "Description" input name="description" value=(one.description.as_deref().unwrap_or_default()); }
            @if !is_feed(&one) { label.field.of-webhook { "Verification of the endpoint"
                select name="verification" {
                    @for word in VERIFICATIONS { option value=(word) selected[word == one.verification] { (word) } }
                }
            } }
            p.quiet { "Headers, authentication, limits and retries stay as they are: " code { "diesel-outbox endpoint put" } " changes them." }
            div.do {
                button { @if found.is_some() { "Change" } @else { "Register" } }
                a.button.second href=(if found.is_some() { page_of(&one.name) } else { "/endpoints".to_owned() }) { "Cancel" }
            }
        }
    }
}

/// What operators write of an endpoint. Absent: as it is. Empty: without the value.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(in crate::pages) struct Written {
    url: Option<String>,
    /// Patterns of topics.
    topics: Option<Vec<String>>,
    /// Only messages of this tenant.
    tenant: Option<String>,
    /// A filter that messages match; null: none.
    #[serde(deserialize_with = "given")]
    #[schemars(with = "Option<Map<String, Value>>")]
    filter: Option<Value>,
    description: Option<String>,
    /// How the endpoint shows that it wants messages: `none`, `challenge`, `cloudevents`; with `:skip`, messages do not
    /// wait for it.
    verification: Option<String>,
    /// Recorded with the act.
    why: String,
}

impl Written {
    fn of(form: &Form) -> Result<Self, Refusal> {
        let given = |name| Some(form.get(name).unwrap_or_default().trim().to_owned());
        let topics = form.get("topics").unwrap_or_default();
        let topics = topics.split([',', '\n']).map(str::trim);
        let topics = topics.filter(|topic| !topic.is_empty());
        let filter = match form.get("filter").unwrap_or_default().trim() {
            "" => Value::Null,
            text => serde_json::from_str(text)
                .map_err(|error| Refusal::Invalid(format!("filter: not JSON: {error}")))?,
        };
        Ok(Self {
            url: given("url").filter(|url| !url.is_empty()),
            topics: Some(topics.map(str::to_owned).collect()),
            tenant: given("tenant"),
            filter: Some(filter),
            description: given("description"),
            verification: given("verification").filter(|word| !word.is_empty()),
            why: form.get("why").unwrap_or_default().to_owned(),
        })
    }

    fn write(&self, one: &mut Endpoint) -> Result<(), String> {
        let filled = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        if let Some(url) = &self.url {
            one.url = with_user_of(url.clone(), &one.url);
        }
        if let Some(topics) = &self.topics {
            one.topics.clone_from(topics);
        }
        if let Some(text) = &self.tenant {
            one.tenant_id = tenant(text)?;
        }
        if let Some(filter) = &self.filter {
            one.filter = Some(filter.clone()).filter(|filter| !filter.is_null());
        }
        if let Some(description) = &self.description {
            one.description = filled(description);
        }
        if let Some(word) = &self.verification {
            let word: Result<_, String> = word.parse();
            one.verification = word.map_err(|error| format!("verification: {error}"))?;
        }
        Ok(())
    }
}

/// Registers an endpoint of the kind `new`, and returns its secret, if it has one; or changes a known endpoint.
pub(in crate::pages) fn write(
    visit: &Visit<'_>,
    name: &str,
    new: Option<EndpointKind>,
    written: Written,
) -> Result<Option<SigningSecret>, Refusal> {
    let secret = (new == Some(EndpointKind::Webhook)).then(SigningSecret::random);
    // What cannot be read is refused before anything is written.
    let mut tried = Endpoint::new(name, "");
    written.write(&mut tried).map_err(Refusal::Invalid)?;
    let done = on(visit, &visit.site.changes, |conn, outbox, destinations| {
        let note = Note::new(&visit.guest.who, &written.why);
        let mut refused = None;
        let written = program::audited(conn, outbox, &note, Act::PutEndpoint, name, |conn| {
            if let Some(kind) = new {
                if destinations.get(conn, name)?.is_some() {
                    let why = format!("There is already an endpoint {name:?}.");
                    refused = Some(Refusal::Taken(why));
                    return Ok(false);
                }
                let url = written.url.clone().unwrap_or_default();
                let new = Endpoint::new(name, url).configure(|new| {
                    new.kind = kind;
                    new.secret.clone_from(&secret);
                });
                destinations.put(conn, &new)?;
            }
            destinations.change(conn, name, |row| {
                let done = written.write(row);
                refused = done.err().map(Refusal::Invalid);
            })
        })?;
        Ok(match (refused, written) {
            (Some(refused), _) => Err(refused),
            (None, false) => Err(no_endpoint(name)),
            (None, true) => Ok(()),
        })
    })?;
    done?;
    log(visit, name, done_to(new));
    Ok(secret)
}

fn done_to(new: Option<EndpointKind>) -> &'static str {
    match new {
        Some(_) => "registered",
        None => "changed",
    }
}

/// The kind of a new endpoint; absent: a webhook.
pub(in crate::pages) fn kind(word: &str) -> Result<EndpointKind, Refusal> {
    match word {
        "" => Ok(EndpointKind::Webhook),
        word => word
            .parse()
            .map_err(|error| Refusal::Invalid(format!("kind: {error}"))),
    }
}

/// Registers the endpoint, or changes it if the form knew it.
pub(in crate::pages) fn put(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let name = visit.get("name");
    let new = match visit.get("is") {
        "known" => None,
        _ => Some(kind(visit.get("kind"))?),
    };
    let mut written = Written::of(visit.form)?;
    if new == Some(EndpointKind::Feed) {
        // The form has these fields for webhooks.
        (written.url, written.verification) = (None, None);
    }
    let done = [("name", name), ("done", done_to(new))];
    Ok(match write(visit, name, new, written)? {
        Some(secret) => only_now(visit, name, &format!("{name} is registered"), &secret),
        None => Response::see_other(&link("/endpoints", &done)),
    })
}

/// How long older secrets or tokens hold beside a new one.
pub(super) fn overlap(keep: &str) -> Result<Duration, Refusal> {
    program::parse_duration("keep", keep).map_err(|error| {
        Refusal::Invalid(format!("How long the older ones hold: {}.", error.reason()))
    })
}

/// Gives the endpoint a new secret. The older ones also sign for a while, such as `24h`. `None`: there is no such
/// endpoint.
pub(in crate::pages) fn new_secret(
    visit: &Visit<'_>,
    name: &str,
    keep: &str,
    why: &str,
) -> Result<Option<SigningSecret>, Refusal> {
    let keep = overlap(keep)?;
    let secret = SigningSecret::random();
    let note = Note::new(&visit.guest.who, why);
    let done = on(visit, &visit.site.changes, |conn, _, endpoints| {
        program::rotate(conn, endpoints, name, (&secret, keep), &note)
    })?;
    if done {
        log(visit, name, "rotated");
    }
    Ok(done.then_some(secret))
}

pub(in crate::pages) fn rotate(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let name = visit.get("name");
    Ok(
        match new_secret(visit, name, visit.get("keep"), visit.get("why"))? {
            Some(secret) => only_now(visit, name, &format!("{name} has a new secret"), &secret),
            None => nobody(name),
        },
    )
}

/// Asks the endpoint whether it wants messages. No database connection is held meanwhile. `None`: there is no such
/// endpoint.
pub(in crate::pages) fn ask(
    visit: &Visit<'_>,
    name: &str,
    why: &str,
) -> Result<Option<EndpointAnswer>, Refusal> {
    let note = Note::new(&visit.guest.who, why);
    let check = on(visit, &visit.site.changes, |conn, _, endpoints| {
        program::begin_verification(conn, endpoints, name, &visit.site.config, &note)
    })?;
    let Some(answer) = check.map(EndpointCheck::ask) else {
        return Ok(None);
    };
    on(visit, &visit.site.changes, |conn, _, endpoints| {
        endpoints.record(conn, &answer)
    })?;
    log(visit, name, "verification");
    Ok(Some(answer))
}

pub(in crate::pages) fn verify(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let name = visit.get("name");
    let Some(answer) = ask(visit, name, visit.get("why"))? else {
        return Ok(nobody(name));
    };
    let content = html! {
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
        p { a.button.second href=(page_of(name)) { "Back to the endpoint" } }
    };
    let title = format!("Verification of {name}");
    Ok(visit.page(&title).answer(&dialog(&title, &content)))
}

/// The page that shows a new secret, to those who may see it.
fn only_now(visit: &Visit<'_>, name: &str, title: &str, secret: &SigningSecret) -> Response {
    let content = html! {
        @if visit.guest.rights.secrets {
            p { "The receiver verifies messages with this secret. No page shows it again." }
            pre tabindex="0" role="region" aria-label="Secret" { (secret.written().expose_secret()) }
        } @else {
            p { "You may not see the secret: " code { "diesel-outbox endpoint show --reveal" } " shows it." }
        }
        p { a.button.second href=(page_of(name)) { "To the endpoint" } }
    };
    visit.page(title).answer(&dialog(title, &content))
}

fn log(visit: &Visit<'_>, name: &str, what: &'static str) {
    let name = name.to_owned();
    visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_endpoint", who = who, peer:% = peer, destination = name, what = what; "{who:?} changed endpoint {name:?} on the admin page: {what}"));
}

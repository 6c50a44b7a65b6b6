//! Changes of many messages: waiting messages are retried or cancelled, and a registered destination gets what it did not
//! get. Each asks for confirmation, with the count.

use std::time::{Duration, Instant, SystemTime};

use diesel::PgConnection;
use diesel_outbox::admin::{self, Bulk, Bulked, Note, WaitingFilter};
use diesel_outbox::destinations::{DestinationError, Recover};
use diesel_outbox::{DatabaseError, OutboxName};
use http::StatusCode;
use maud::html;

use super::layout::token;
use super::messages::waiting::Asked;
use super::registered::with;
use super::{bad_request, database_away, link, plain, words};
use crate::request::Form;
use crate::{AUDIT, Guest, Request, Response, Site};

/// After this time a change stops, so that the page answers. Sent again, it continues.
const LONGEST: Duration = Duration::from_secs(8);

/// A requested change of many messages.
enum Order<'a> {
    Retry(WaitingFilter),
    Cancel(WaitingFilter),
    Recover(&'a str, SystemTime, Recover),
    Backfill(&'a str, SystemTime),
}

/// What a change has done. The inner error is for the guest.
type Done = Result<Result<Option<Bulked>, DestinationError>, DatabaseError>;

impl<'a> Order<'a> {
    fn of(path: &str, form: &'a Form) -> Result<Self, String> {
        let name = form.get("name").unwrap_or_default();
        match path {
            "/messages/retry" => Asked::of(form).filter().map(Self::Retry),
            "/messages/cancel" => Asked::of(form).filter().map(Self::Cancel),
            "/destination/backfill" => Ok(Self::Backfill(name, since(form)?)),
            _ => {
                let what = match form.get("missing") {
                    Some(_) => Recover::AndMissed,
                    None => Recover::DeadLetters,
                };
                Ok(Self::Recover(name, since(form)?, what))
            }
        }
    }

    /// The question, with the counted messages, and the word for what was done.
    fn words(&self, messages: &str) -> (String, &'static str) {
        match self {
            Self::Retry(_) => (format!("Retry {messages} now?"), "retried"),
            Self::Cancel(_) => (format!("Cancel {messages}?"), "many_cancelled"),
            Self::Recover(name, ..) => (format!("Send {messages} to {name} again?"), "recovered"),
            Self::Backfill(name, _) => (format!("Send {messages} to {name}?"), "recovered"),
        }
    }

    /// The page that the request came from.
    fn back(&self, form: &Form) -> (&'static str, Vec<(&'static str, String)>) {
        let owned = |(name, value): (&'static str, &str)| (name, value.to_owned());
        match self {
            Self::Retry(_) | Self::Cancel(_) => {
                ("/messages", Asked::of(form).pairs().map(owned).to_vec())
            }
            Self::Recover(name, ..) | Self::Backfill(name, _) => {
                ("/destinations", vec![("name", (*name).to_owned())])
            }
        }
    }

    fn run(
        &self,
        site: &Site,
        conn: &mut PgConnection,
        outbox: &OutboxName,
        bulk: Bulk<'_>,
    ) -> Done {
        let all = |done: Bulked| Ok(Some(done));
        match self {
            Self::Retry(filter) => admin::retry_all(conn, outbox, filter, bulk).map(all),
            Self::Cancel(filter) => admin::cancel_all(conn, outbox, filter, bulk).map(all),
            Self::Recover(name, since, what) => with(site, outbox, |to| {
                to.recover(conn, name, *since, *what, bulk)
            }),
            Self::Backfill(name, since) => {
                with(site, outbox, |to| to.backfill(conn, name, *since, bulk))
            }
        }
    }
}

/// The time in a form: a duration as the time that long ago, or RFC 3339.
fn since(form: &Form) -> Result<SystemTime, String> {
    let text = form.get("since").unwrap_or_default().trim();
    let ago = humantime::parse_duration(text).ok();
    let before = ago.and_then(|ago| SystemTime::now().checked_sub(ago));
    let time = before.or_else(|| humantime::parse_rfc3339_weak(text).ok());
    time.ok_or_else(|| format!("{text:?} is not a time such as 24h (ago) or 2026-01-31T12:00:00Z"))
}

pub(super) fn answer(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let order = match Order::of(&request.path, &form) {
        Ok(order) => order,
        Err(error) => return bad_request(site, guest, request, &error),
    };
    let note = Note::new(&guest.who, form.get("reason").unwrap_or_default());
    let began = Instant::now();
    let is_sure = form.get("sure").is_some();
    let done = site.changes.run(|conn, outbox| {
        let bulk = Bulk::new(&note);
        let bulk = match is_sure {
            true => bulk.progress(|_| began.elapsed() < LONGEST),
            false => bulk.dry_run(),
        };
        order.run(site, conn, outbox, bulk)
    });
    let (path, back) = order.back(&form);
    let back: Vec<(&str, &str)> = back
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let done = match done {
        Ok(Ok(Some(done))) => done,
        Ok(Ok(None)) => {
            let nowhere = [back.as_slice(), &[("done", "no_destination")]].concat();
            return Response::see_other(&link(path, &nowhere));
        }
        Ok(Err(error)) => return bad_request(site, guest, request, &format!("{error}.")),
        Err(error) => return database_away(site, guest, request, &format!("{error:#}")),
    };
    if !is_sure {
        return question(site, guest, request, &order, &done, &link(path, &back));
    }
    site.forget();
    let (_, became) = order.words("");
    let count = done.changed.to_string();
    log::info!(target: AUDIT, event = "admin_many", who = guest.who, peer:% = guest.peer, what = request.path, count = done.changed, why:% = note; "{:?} changed many messages on the admin page ({}): {count}", guest.who, request.path);
    let done = [("done", became), ("count", count.as_str())];
    Response::see_other(&link(path, &[back.as_slice(), &done].concat()))
}

/// The confirmation page, which states how many messages the change affects.
fn question(
    site: &Site,
    guest: &Guest,
    request: &Request,
    order: &Order<'_>,
    found: &Bulked,
    back: &str,
) -> Response {
    let count = i64::try_from(found.changed).unwrap_or(i64::MAX);
    let lost = i64::try_from(found.without_payload).unwrap_or(i64::MAX);
    let (title, _) = order.words(&words::counted(count, "message", "messages"));
    let form = request.form();
    let fields = [
        "topic",
        "destination",
        "tenant",
        "key",
        "status",
        "name",
        "since",
        "missing",
        "reason",
    ];
    let given = fields
        .into_iter()
        .filter_map(|name| Some((name, form.get(name)?)));
    let content = html! {
        section.panel {
            div.head { h1 { (title) } }
            div.body {
                @if let Order::Retry(filter) | Order::Cancel(filter) = order {
                    p { "Filter: " strong { @if filter.to_string().is_empty() { "none" } @else { (filter) } } "." }
                }
                @if lost > 0 {
                    p.refused {
                        (words::counted(lost, "message is", "messages are"))
                        " not sent: the ledger has no payload of them (" code { "OUTBOX_LEDGER_PAYLOAD" } ")."
                    }
                }
                form.do method="post" action=(request.path) {
                    (token(guest))
                    input type="hidden" name="sure" value="yes";
                    @for (name, value) in given { input type="hidden" name=(name) value=(value); }
                    @if count > 0 { button.danger[matches!(order, Order::Cancel(_))] { "Yes, change " (words::count(count, false)) } }
                    a.button.second href=(back) { "No, go back" }
                }
            }
        }
    };
    plain(site, guest, request, &title).answer(StatusCode::OK, &content)
}

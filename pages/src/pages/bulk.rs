//! Changes of many messages: waiting messages are retried or cancelled, and a registered destination gets what it did not
//! get. Each asks for confirmation, with the count.

use std::time::{Duration, Instant, SystemTime};

use diesel_outbox::admin::{self, Bulk, Bulked, Note, WaitingFilter};
use diesel_outbox::destinations::Recover;
use http::StatusCode;
use maud::html;

use super::layout::token;
use super::messages::waiting::Asked;
use super::registered::on;
use super::{Refusal, bad_request, link, plain, words};
use crate::request::Form;
use crate::{AUDIT, Guest, Request, Response, Site};

/// After this time a change stops, so that the page answers. Sent again, it continues.
const LONGEST: Duration = Duration::from_secs(8);

/// A requested change of many messages.
pub(super) enum Order<'a> {
    Retry(WaitingFilter),
    Cancel(WaitingFilter),
    Recover(&'a str, SystemTime, Recover),
    Backfill(&'a str, SystemTime),
}

impl<'a> Order<'a> {
    fn of(path: &str, form: &'a Form) -> Result<Self, String> {
        let name = form.get("name").unwrap_or_default();
        let since = form.get("since").unwrap_or_default();
        match path {
            "/messages/retry" => Asked::of(form).filter().map(Self::Retry),
            "/messages/cancel" => Asked::of(form).filter().map(Self::Cancel),
            "/destination/backfill" => Ok(Self::Backfill(name, time(since)?)),
            _ => Self::recover(name, since, form.get("missing").is_some()),
        }
    }

    pub(super) fn recover(name: &'a str, since: &str, missing: bool) -> Result<Self, String> {
        let what = match missing {
            true => Recover::AndMissed,
            false => Recover::DeadLetters,
        };
        Ok(Self::Recover(name, time(since)?, what))
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

    /// Changes the messages, or only counts them. `None`: there is no such destination.
    pub(super) fn run(
        &self,
        site: &Site,
        guest: &Guest,
        why: &str,
        dry_run: bool,
    ) -> Result<Option<Bulked>, Refusal> {
        let note = Note::new(&guest.who, why);
        let began = Instant::now();
        let done = on(site, &site.changes, |conn, outbox, to| {
            let bulk = Bulk::new(&note);
            let bulk = match dry_run {
                true => bulk.dry_run(),
                false => bulk.progress(|_| began.elapsed() < LONGEST),
            };
            Ok(match self {
                Self::Retry(filter) => admin::retry_all(conn, outbox, filter, bulk).map(Some),
                Self::Cancel(filter) => admin::cancel_all(conn, outbox, filter, bulk).map(Some),
                Self::Recover(name, since, what) => {
                    return to.recover(conn, name, *since, *what, bulk).map(Ok);
                }
                Self::Backfill(name, since) => {
                    return to.backfill(conn, name, *since, bulk).map(Ok);
                }
            })
        })?;
        let done = done.map_err(|error| Refusal::Away(error.into()))?;
        if let Some(done) = done.as_ref().filter(|_| !dry_run) {
            site.forget();
            let (_, what) = self.words("");
            log::info!(target: AUDIT, event = "admin_many", who = guest.who, peer:% = guest.peer, what = what, count = done.changed, why:% = note; "{:?} changed many messages on the admin page ({what}): {}", guest.who, done.changed);
        }
        Ok(done)
    }
}

/// A duration as the time that long ago, or RFC 3339.
pub(super) fn time(text: &str) -> Result<SystemTime, String> {
    let text = text.trim();
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
    let is_sure = form.get("sure").is_some();
    let why = form.get("reason").unwrap_or_default();
    let done = order.run(site, guest, why, !is_sure);
    let (path, back) = order.back(&form);
    let back: Vec<(&str, &str)> = back
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let done = match done {
        Ok(Some(done)) => done,
        Ok(None) => {
            let nowhere = [back.as_slice(), &[("done", "no_destination")]].concat();
            return Response::see_other(&link(path, &nowhere));
        }
        Err(refusal) => return refusal.page(site, guest, request),
    };
    if !is_sure {
        return question(site, guest, request, &order, &done, &link(path, &back));
    }
    let (_, became) = order.words("");
    let count = done.changed.to_string();
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

//! Changes of many messages: waiting messages are retried or cancelled, and an endpoint gets what it did not
//! get. Each asks for confirmation, with the count.

use std::time::{Duration, Instant, SystemTime};

use diesel_outbox::admin::{self, Bulk, Bulked, Note, WaitingFilter};
use diesel_outbox::endpoints::Recover;
use maud::html;

use super::asked::{Asked, Wrong};
use super::endpoints::on;
use super::layout::{act, dialog, hidden};
use super::messages::waiting;
use super::{Refusal, Visit, link, words};
use crate::AUDIT;
use crate::request::Form;
use crate::response::Response;

/// After this time a change stops, so that the page answers. Sent again, it continues.
const LONGEST: Duration = Duration::from_secs(8);
/// What an order is about, besides the filter of messages.
const FIELDS: &[&str] = &["name", "since", "missing", "reason"];

/// A requested change of many messages.
pub(super) enum Order<'a> {
    Retry(WaitingFilter),
    Cancel(WaitingFilter),
    Recover(&'a str, SystemTime, Recover),
    Backfill(&'a str, SystemTime),
}

impl<'a> Order<'a> {
    fn of(path: &str, form: &'a Form) -> Result<Self, Wrong> {
        let name = form.get("name").unwrap_or_default();
        let since = form.get("since").unwrap_or_default();
        match path {
            "/messages/retry" => waiting::filter(form).map(Self::Retry),
            "/messages/cancel" => waiting::filter(form).map(Self::Cancel),
            "/endpoint/backfill" => Ok(Self::Backfill(name, self::since(since)?)),
            _ => Self::recover(name, since, form.get("missing").is_some()),
        }
    }

    pub(super) fn recover(name: &'a str, since: &str, missing: bool) -> Result<Self, Wrong> {
        let what = match missing {
            true => Recover::AndMissed,
            false => Recover::DeadLetters,
        };
        Ok(Self::Recover(name, self::since(since)?, what))
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

    /// The page that the request came from, with more values.
    fn back(&self, form: &Form, more: &[(&str, &str)]) -> String {
        match self {
            Self::Retry(_) | Self::Cancel(_) => {
                Asked::of(form, waiting::NAMES).link("/messages", more)
            }
            Self::Recover(name, ..) | Self::Backfill(name, _) => {
                link("/endpoints", &[&[("name", *name)], more].concat())
            }
        }
    }

    /// Changes the messages, or only counts them. `None`: there is no such destination.
    pub(super) fn run(
        &self,
        visit: &Visit<'_>,
        why: &str,
        dry_run: bool,
    ) -> Result<Option<Bulked>, Refusal> {
        let note = Note::new(&visit.guest.who, why);
        let began = Instant::now();
        let done = on(visit, &visit.site.changes, |conn, outbox, to| {
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
        if let Some(count) = done.as_ref().filter(|_| !dry_run).map(|done| done.changed) {
            let (_, what) = self.words("");
            visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_many", who = who, peer:% = peer, what = what, count = count, why:% = note; "{who:?} changed many messages on the admin page ({what}): {count}"));
        }
        Ok(done)
    }
}

/// Since when: a duration as the time that long ago, or RFC 3339.
pub(super) fn since(text: &str) -> Result<SystemTime, Wrong> {
    let text = text.trim();
    let ago = humantime::parse_duration(text).ok();
    let before = ago.and_then(|ago| SystemTime::now().checked_sub(ago));
    let time = before.or_else(|| humantime::parse_rfc3339_weak(text).ok());
    time.ok_or_else(|| Wrong {
        field: "since",
        what: format!("{text:?} is not a time such as 24h (ago) or 2026-01-31T12:00:00Z"),
    })
}

pub(super) fn answer(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let form = visit.form;
    let order = Order::of(&visit.request.path, form)?;
    let is_sure = form.get("sure").is_some();
    let Some(done) = order.run(visit, visit.get("reason"), !is_sure)? else {
        let nowhere = order.back(form, &[("done", "no_endpoint")]);
        return Ok(Response::see_other(&nowhere));
    };
    if !is_sure {
        return Ok(question(visit, &order, &done));
    }
    let (_, became) = order.words("");
    let count = done.changed.to_string();
    let done = [("done", became), ("count", count.as_str())];
    Ok(Response::see_other(&order.back(form, &done)))
}

/// The confirmation page, which states how many messages the change affects.
fn question(visit: &Visit<'_>, order: &Order<'_>, found: &Bulked) -> Response {
    let count = i64::try_from(found.changed).unwrap_or(i64::MAX);
    let lost = i64::try_from(found.without_payload).unwrap_or(i64::MAX);
    let (title, _) = order.words(&words::counted(count, "message", "messages"));
    let given = [waiting::NAMES, FIELDS].concat().into_iter();
    let given = given.filter_map(|name| Some((name, visit.form.get(name)?)));
    let form = html! {
        (hidden(&given.collect::<Vec<_>>()))
        @if count > 0 { button.danger[matches!(order, Order::Cancel(_))] { "Yes, change " (words::count(count, false)) } }
        a.button.second href=(order.back(visit.form, &[])) { "No, go back" }
    };
    let content = html! {
        @if let Order::Retry(filter) | Order::Cancel(filter) = order {
            p { "Filter: " strong { @if filter.to_string().is_empty() { "none" } @else { (filter) } } "." }
        }
        @if lost > 0 {
            p.refused {
                (words::counted(lost, "message is", "messages are"))
                " not sent: the ledger has no payload of them (" code { "OUTBOX_LEDGER_PAYLOAD" } ")."
            }
        }
        (act(visit.guest, &visit.request.path, &[("sure", "yes")], &form))
    };
    visit.page(&title).answer(&dialog(&title, &content))
}

//! An endpoint gets what it did not get. Asks for confirmation, with the count.

use std::time::{Instant, SystemTime};

use diesel::PgConnection;
use diesel_outbox::admin::{Bulk, Bulked, Note};
use diesel_outbox::endpoints::{Endpoints, Recover};
use diesel_outbox::program;
use maud::html;

use super::asked::Wrong;
use super::endpoints::{in_steps, on};
use super::layout::{act, dialog, hidden};
use super::{Refusal, Visit, link, words};
use crate::AUDIT;
use crate::database::{LONGEST_ACT, STATEMENT_TIMEOUT};
use crate::request::Form;
use crate::response::Response;

/// What an order is about, besides the filter of messages.
const FIELDS: &[&str] = &["name", "since", "missing", "why"];

/// A requested change of many messages.
pub(super) enum Order<'a> {
    Recover(&'a str, SystemTime, Recover),
    Backfill(&'a str, SystemTime),
}

impl<'a> Order<'a> {
    fn of(path: &str, form: &'a Form) -> Result<Self, Wrong> {
        let name = form.get("name").unwrap_or_default();
        let since = form.get("since").unwrap_or_default();
        match path {
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
            Self::Recover(name, ..) => (format!("Send {messages} to {name} again?"), "recovered"),
            Self::Backfill(name, _) => (format!("Send {messages} to {name}?"), "recovered"),
        }
    }

    /// The page that the request came from, with more values.
    fn back(&self, more: &[(&str, &str)]) -> String {
        match self {
            Self::Recover(name, ..) | Self::Backfill(name, _) => {
                link("/endpoints", &[&[("name", *name)], more].concat())
            }
        }
    }

    /// Changes the messages, or only counts them. `None`: there is no such destination. `true`: there was no time for all, and
    /// the same order continues.
    pub(super) fn run(
        &self,
        visit: &Visit<'_>,
        why: &str,
        dry_run: bool,
    ) -> Result<Option<(Bulked, bool)>, Refusal> {
        let note = Note::new(&visit.guest.who, why);
        let began = Instant::now();
        let perform = |conn: &mut PgConnection, to: Endpoints<'_>, bulk| match self {
            Self::Recover(name, since, what) => to.recover(conn, name, *since, *what, bulk),
            Self::Backfill(name, since) => to.backfill(conn, name, *since, bulk),
        };
        let bulk = Bulk::new(&note);
        let changes = &visit.site.changes;
        let done = match dry_run {
            true => on(visit, changes, |conn, _, to| {
                perform(conn, to, bulk.dry_run())
            })?,
            false => in_steps(visit, changes, |conn, to| {
                let bulk = bulk.statement_timeout(STATEMENT_TIMEOUT);
                perform(conn, to, bulk.progress(|_| began.elapsed() < LONGEST_ACT))
            })?,
        };
        if let Some(count) = done.as_ref().filter(|_| !dry_run).map(|done| done.changed) {
            let (_, what) = self.words("");
            visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_many", who = who, peer:% = peer, what = what, count = count, why:% = note; "{who:?} changed many messages on the admin page ({what}): {count}"));
        }
        let is_cut = !dry_run && began.elapsed() >= LONGEST_ACT;
        Ok(done.map(|done| (done, is_cut)))
    }

    /// How many messages wait for their next attempt at the endpoint: no order sends them.
    pub(super) fn retrying(&self, visit: &Visit<'_>) -> Result<Option<u64>, Refusal> {
        let (Self::Recover(name, ..) | Self::Backfill(name, _)) = self;
        on(visit, &visit.site.changes, |conn, _, endpoints| {
            program::retrying(conn, endpoints, name)
        })
    }
}

/// Since when: a duration as the time that long ago, or RFC 3339.
pub(super) fn since(text: &str) -> Result<SystemTime, Wrong> {
    let time = program::parse_time(text.trim());
    time.map_err(|what| Wrong {
        field: "since",
        what,
    })
}

pub(super) fn answer(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let form = visit.form;
    let order = Order::of(&visit.request.path, form)?;
    let is_sure = form.get("sure").is_some();
    let Some((done, is_cut)) = order.run(visit, visit.get("why"), !is_sure)? else {
        let nowhere = order.back(&[("done", "no_endpoint")]);
        return Ok(Response::see_other(&nowhere));
    };
    if !is_sure {
        return Ok(question(
            visit,
            &order,
            &done,
            order.retrying(visit)?.unwrap_or(0),
        ));
    }
    let became = if is_cut { "recovering" } else { "recovered" };
    let count = done.changed.to_string();
    let done = [("done", became), ("count", count.as_str())];
    Ok(Response::see_other(&order.back(&done)))
}

/// The confirmation page, which states how many messages the change affects.
fn question(visit: &Visit<'_>, order: &Order<'_>, found: &Bulked, retrying: u64) -> Response {
    let count = i64::try_from(found.changed).unwrap_or(i64::MAX);
    let lost = i64::try_from(found.without_payload).unwrap_or(i64::MAX);
    let (title, _) = order.words(&words::counted(count, "message", "messages"));
    let given = FIELDS.iter().copied();
    let given = given.filter_map(|name| Some((name, visit.form.get(name)?)));
    let form = html! {
        (hidden(&given.collect::<Vec<_>>()))
        @if count > 0 { button { "Yes, change " (words::count(count, false)) } }
        a.button.second href=(order.back(&[])) { "No, go back" }
    };
    let content = html! {
        @if lost > 0 {
            p.refused {
                (words::counted(lost, "message is", "messages are"))
                " not sent: the ledger has no payload of them (" code { "OUTBOX_LEDGER_PAYLOAD" } ")."
            }
        }
        @if retrying > 0 {
            p.quiet {
                (words::counted(i64::try_from(retrying).unwrap_or(i64::MAX), "other message waits", "other messages wait"))
                " for the next attempt, and keep their time: retry them in the list of waiting messages."
            }
        }
        (act(visit.guest, &visit.request.path, &[("sure", "yes")], &form))
    };
    visit.page(&title).answer(&dialog(&title, &content))
}

//! Requeueing and discarding dead letters. Discarding, and requeueing all that match, asks for confirmation.

use anyhow::Result;
use diesel::PgConnection;
use diesel_outbox::admin::{self, DeadFilter, LetterId, Note, Place};
use diesel_outbox::program::{self, MessageRecord};
use diesel_outbox::{DatabaseError, OutboxName};
use maud::html;

use super::{NAMES, filter, in_words};
use crate::AUDIT;
use crate::pages::asked::Asked;
use crate::pages::layout::{act, dialog};
use crate::pages::{Refusal, Visit, link, words};
use crate::request::Form;
use crate::response::Response;

/// Sequences named in a line of the audit log.
const NAMED: usize = 20;
/// Dead letters changed in one transaction.
const BATCH: usize = 1000;

/// A change to dead letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pages) enum Change {
    Requeue,
    Discard,
}

struct Words {
    path: &'static str,
    verb: &'static str,
    done: &'static str,
    /// In the audit log.
    event: &'static str,
}

impl Change {
    fn words(self) -> Words {
        match self {
            Self::Requeue => Words {
                path: "/dead/requeue",
                verb: "Requeue",
                done: "requeued",
                event: "admin_requeue",
            },
            Self::Discard => Words {
                path: "/dead/discard",
                verb: "Discard",
                done: "discarded",
                event: "admin_discard",
            },
        }
    }

    fn run(
        self,
        conn: &mut PgConnection,
        outbox: &OutboxName,
        letters: &[LetterId],
        note: &Note,
    ) -> Result<usize, DatabaseError> {
        match self {
            Self::Requeue => admin::requeue(conn, outbox, letters, note),
            Self::Discard => admin::discard(conn, outbox, letters, note),
        }
    }
}

/// A requested change to the selected dead letters, or to all that match the filter.
pub(in crate::pages) struct Order<'a> {
    change: Change,
    asked: Asked<'a>,
    is_all: bool,
    /// The idempotency key, if the request comes from the page of one dead letter instead of the list.
    of_letter: Option<String>,
    /// How many dead letters the visitor has confirmed.
    sure: Option<usize>,
    /// Excludes messages dead-lettered after the confirmation page was shown.
    before: Option<Place>,
    letters: Vec<LetterId>,
}

impl<'a> Order<'a> {
    fn of(form: &'a Form, change: Change) -> Self {
        let letters = form.all("letter").filter_map(|one| one.parse().ok());
        Self {
            change,
            asked: Asked::of(form, NAMES),
            is_all: form.get("all").is_some(),
            of_letter: form.get("key").map(str::to_owned),
            sure: form.get("sure").and_then(|count| count.parse().ok()),
            before: form.get("before").and_then(|place| place.parse().ok()),
            letters: letters.collect(),
        }
    }

    /// A change of these dead letters, or of all that match the filter; it needs no confirmation.
    pub(in crate::pages) fn sure(
        change: Change,
        asked: Asked<'a>,
        letters: Option<Vec<LetterId>>,
    ) -> Self {
        Self {
            change,
            asked,
            is_all: letters.is_none(),
            of_letter: None,
            sure: Some(usize::MAX),
            before: None,
            letters: letters.unwrap_or_default(),
        }
    }

    /// Finds the dead letters that match, if all of them are meant. Returns how many there are.
    pub(in crate::pages) fn find(&mut self, visit: &Visit<'_>) -> Result<usize, Refusal> {
        if self.is_all {
            let filter = filter(self.asked)?;
            (self.before, self.letters) = matching(visit, self, filter)?;
        }
        Ok(self.letters.len())
    }

    /// Changes the dead letters that were found, and returns how many.
    pub(in crate::pages) fn carry_out(&self, visit: &Visit<'_>) -> Result<usize, Refusal> {
        let (count, end) = carry_out(visit, self);
        let (change, asked) = (self.change, self.letters.len());
        let (event, verb, what) = (change.words().event, change.words().done, self.what());
        match end {
            Ok(()) => {
                visit.log(move |who, peer| log::info!(target: AUDIT, event = event, who = who, peer:% = peer, what = what, asked = asked, count = count; "{who:?} {verb} dead letters on the admin page: {count}"));
                Ok(count)
            }
            Err(error) => {
                log::warn!(target: AUDIT, event = event, who = visit.guest.who, peer:% = visit.guest.peer, what = what, asked = asked, count = count, error:% = format!("{error:#}"); "admin page: {count} of {asked} dead letters {verb}, then failed: {error:#}");
                let so_far = words::counted(count_of(count), "was", "were");
                Err(Refusal::Away(
                    error.context(format!("{so_far} {verb} before the error")),
                ))
            }
        }
    }

    /// Whether the change is confirmed. A discard of more dead letters than confirmed is not.
    fn is_sure(&self) -> bool {
        match (self.sure, self.change) {
            (None, Change::Requeue) => !self.is_all,
            (None, Change::Discard) => false,
            (Some(_), Change::Requeue) => true,
            (Some(count), Change::Discard) => self.letters.len() <= count,
        }
    }

    /// The page that the request came from.
    fn back(&self) -> String {
        match self.letters.as_slice() {
            [letter] if self.of_letter.is_some() => format!("/dead/{letter}"),
            _ => self.asked.link("/dead", &[]),
        }
    }

    /// The page to show next.
    fn next(&self, count: usize) -> String {
        let count = count.to_string();
        let done = [
            ("done", self.change.words().done),
            ("count", count.as_str()),
        ];
        match (self.change, &self.of_letter) {
            (Change::Requeue, Some(key)) => link(
                "/messages",
                &[[("q", key.as_str())].as_slice(), &done].concat(),
            ),
            _ => self.asked.link("/dead", &done),
        }
    }

    fn what(&self) -> String {
        if self.is_all {
            return in_words(self.asked);
        }
        let named: Vec<String> = self
            .letters
            .iter()
            .take(NAMED)
            .map(|letter| letter.sequence.to_string())
            .collect();
        let more = if self.letters.len() > NAMED {
            ", …"
        } else {
            ""
        };
        format!("sequence {}{more}", named.join(", "))
    }
}

pub(in crate::pages) fn requeue(visit: &Visit<'_>) -> Result<Response, Refusal> {
    answer(visit, Change::Requeue)
}

pub(in crate::pages) fn discard(visit: &Visit<'_>) -> Result<Response, Refusal> {
    answer(visit, Change::Discard)
}

fn answer(visit: &Visit<'_>, change: Change) -> Result<Response, Refusal> {
    let mut order = Order::of(visit.form, change);
    if order.find(visit)? == 0 && !order.is_all {
        let nothing = order.asked.link("/dead", &[("done", "nothing")]);
        return Ok(Response::see_other(&nothing));
    }
    if !order.is_sure() {
        return Ok(question(visit, &order));
    }
    let count = order.carry_out(visit)?;
    Ok(Response::see_other(&order.next(count)))
}

/// Applies the change in batches. Each batch is its own transaction and waits for its turn, so that other changes run
/// in between. Returns how many dead letters were changed.
fn carry_out(visit: &Visit<'_>, order: &Order<'_>) -> (usize, Result<()>) {
    let note = Note::new(&visit.guest.who, "");
    let mut count = 0;
    for batch in order.letters.chunks(BATCH) {
        let done = visit.run(&visit.site.changes, |conn, outbox| {
            order.change.run(conn, outbox, batch, &note)
        });
        match done {
            Ok(changed) => count += changed,
            Err(error) => return (count, Err(error)),
        }
    }
    (count, Ok(()))
}

fn count_of(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The dead letters that match, and the place right behind the latest.
fn matching(
    visit: &Visit<'_>,
    order: &Order<'_>,
    mut filter: DeadFilter,
) -> Result<(Option<Place>, Vec<LetterId>)> {
    let mut before = order.before;
    let mut is_found: Option<Vec<LetterId>> = None;
    let q = order.asked.get("q");
    if !q.is_empty() {
        let found = super::find(visit, q, &filter)?;
        let ids: Vec<LetterId> = found.iter().map(MessageRecord::id).collect();
        if ids.is_empty() {
            return Ok((None, Vec::new()));
        }
        let sequences: Vec<i64> = ids.iter().map(|letter| letter.sequence.0).collect();
        filter = filter.sequences(sequences);
        is_found = Some(ids);
    }
    visit.run(&visit.site.database, |conn, outbox| {
        if before.is_none() {
            let latest = program::dead_letters(conn, outbox, &filter, 1)?;
            before = latest.first().and_then(behind);
        }
        let filter = program::dead_before(filter.clone(), before);
        let mut letters = admin::matching_dead_letters(conn, outbox, &filter)?;
        if let Some(found) = &is_found {
            letters.retain(|letter| found.contains(letter));
        }
        Ok((before, letters))
    })
}

/// The place right behind this dead letter.
fn behind(letter: &MessageRecord) -> Option<Place> {
    let place = letter.place().to_string();
    let (time, _) = place.split_once('.')?;
    let sequence = letter.sequence.0.checked_add(1)?;
    format!("{time}.{sequence}").parse().ok()
}

/// The confirmation page, which states how many dead letters the change affects.
fn question(visit: &Visit<'_>, order: &Order<'_>) -> Response {
    let verb = order.change.words().verb;
    let count = count_of(order.letters.len());
    let letters = words::counted(count, "dead letter", "dead letters");
    let title = format!("{verb} {letters}?");
    let sure = count.to_string();
    let form = html! {
        (order.asked.hidden())
        @if let Some(key) = &order.of_letter { input type="hidden" name="key" value=(key); }
        @if order.is_all {
            input type="hidden" name="all" value="yes";
            @if let Some(before) = order.before { input type="hidden" name="before" value=(before); }
        } @else {
            @for letter in &order.letters { input type="hidden" name="letter" value=(letter); }
        }
        @if count > 0 && order.change == Change::Discard {
            button.danger.sure { "Discard " (letters) }
        } @else if count > 0 {
            button { "Requeue " (letters) }
        }
        a.button.second href=(order.back()) { "No, go back" }
    };
    let content = html! {
        @if order.is_all { p { "Filter: " strong { (in_words(order.asked)) } "." } }
        @else { p { "Selected: " strong { (order.what()) } "." } }
        @if order.sure.is_some() { p.refused { "More dead letters match than you confirmed." } }
        @if order.change == Change::Discard {
            p { "They are deleted permanently, with their payloads. The ledger still records them as dead." }
        } @else {
            p { "They become due at once, with attempts reset. A dead letter stays if its idempotency key is in the outbox again." }
        }
        (act(visit.guest, order.change.words().path, &[("sure", &sure)], &form))
    };
    visit.page(&title).answer(&dialog(&title, &content))
}

//! Acts that send an endpoint many messages: a question with the count, then the act.

use std::time::Instant;

use diesel_outbox::admin::{Bulk, Note};
use diesel_outbox::program::{SENDING_ACTS, Sending, SendingAct, SentMessages};
use maud::html;

use super::change::nobody;
use super::{in_steps, page_of};
use crate::AUDIT;
use crate::database::{LONGEST_ACT, STATEMENT_TIMEOUT};
use crate::pages::acts::capital;
use crate::pages::asked::Wrong;
use crate::pages::layout::{act, dialog, hidden};
use crate::pages::{Refusal, Visit, link, words};
use crate::response::Response;

/// Sends the messages, for some seconds, or counts them. `true`: there was no time for all, and the same act continues. `None`:
/// there is no such endpoint.
pub(in crate::pages) fn perform(
    visit: &Visit<'_>,
    act: &'static SendingAct,
    name: &str,
    sending: Sending,
    (why, dry_run): (&str, bool),
) -> Result<Option<(SentMessages, bool)>, Refusal> {
    let note = Note::new(&visit.guest.who, why);
    let began = Instant::now();
    let sent = in_steps(visit, &visit.site.changes, |conn, endpoints| {
        let bulk = Bulk::new(&note).statement_timeout(STATEMENT_TIMEOUT);
        let bulk = match dry_run {
            true => bulk.dry_run(),
            false => bulk.progress(|_| began.elapsed() < LONGEST_ACT),
        };
        act.perform(conn, endpoints, name, sending, bulk)
    })?;
    if let Some(sent) = sent.filter(|_| !dry_run) {
        let (name, count, what) = (name.to_owned(), sent.messages.changed, act.name);
        visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_many", who = who, peer:% = peer, destination = name, what = what, count = count, why:% = note; "{who:?} requested {what} of endpoint {name:?} on the admin page: {count} messages"));
    }
    let is_cut = !dry_run && began.elapsed() >= LONGEST_ACT;
    Ok(sent.map(|sent| (sent, is_cut)))
}

pub(in crate::pages) fn answer(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let asked = visit.request.path.rsplit('/').next().unwrap_or_default();
    let Some(act) = SENDING_ACTS.iter().find(|act| act.name == asked) else {
        return Err(Refusal::Missing("This action does not exist.".to_owned()));
    };
    let name = visit.get("name");
    let missing = visit.form.get("missing").is_some();
    let sending = act.read(visit.get("since"), missing).map_err(Wrong::from)?;
    let is_sure = visit.form.get("sure").is_some();
    let sent = perform(visit, act, name, sending, (visit.get("why"), !is_sure))?;
    let Some((sent, is_cut)) = sent else {
        return Ok(nobody(name));
    };
    if !is_sure {
        return Ok(question(visit, act, &sent));
    }
    let done = if is_cut { "recovering" } else { "recovered" };
    let count = sent.messages.changed.to_string();
    let done = [("name", name), ("done", done), ("count", &count)];
    Ok(Response::see_other(&link("/endpoints", &done)))
}

/// The confirmation page, which says how many messages the act sends, what becomes of them, and what it leaves.
fn question(visit: &Visit<'_>, asked: &SendingAct, found: &SentMessages) -> Response {
    let (name, verb) = (visit.get("name"), capital(asked.name));
    let count = i64::try_from(found.messages.changed).unwrap_or(i64::MAX);
    let messages = words::counted(count, "message", "messages");
    let title = format!("{verb} {messages} for {name}?");
    let fields = ["name", "since", "missing", "why"].into_iter();
    let given = fields.filter_map(|field| Some((field, visit.form.get(field)?)));
    let form = html! {
        (hidden(&given.collect::<Vec<_>>()))
        @if count > 0 { button { (verb) " " (messages) } }
        a.button.second href=(page_of(name)) { "No, go back" }
    };
    let content = html! {
        @for leaves in found.leaves(name) { p { (words::with_code(&leaves)) } }
        p { (words::with_code(SendingAct::BECOMES)) " " (words::with_code(SendingAct::UNDO)) }
        (act(visit.guest, &visit.request.path, &[("sure", "yes")], &form))
    };
    visit.page(&title).answer(&dialog(&title, &content))
}

//! Cancelling, rescheduling and settling a message by hand.

use diesel_outbox::admin::Note;
use diesel_outbox::program::{
    self, CANCEL, KeptIn, MessageAct, MessageRecord, RESCHEDULE, SETTLE, WrongChoice,
};
use diesel_outbox::{Answer, MessageRef, Sequence};
use maud::{Markup, html};

use crate::pages::asked::Wrong;
use crate::pages::layout::act;
use crate::pages::{Refusal, Visit, link};
use crate::request::Form;
use crate::response::Response;
use crate::{AUDIT, Guest};

fn asked(path: &str, form: &Form, why: &str) -> Result<MessageAct, WrongChoice> {
    let delay = form.get("in").filter(|delay| !delay.trim().is_empty());
    match path {
        "/message/cancel" => Ok(MessageAct::Cancel),
        "/message/reschedule" => MessageAct::reschedule(delay, None),
        _ => MessageAct::settle(form.get("verdict").unwrap_or_default(), why),
    }
}

pub(in crate::pages) fn perform(
    visit: &Visit<'_>,
    act: MessageAct,
    which: &MessageRef,
    sequence: i64,
    why: &str,
) -> anyhow::Result<Answer> {
    let note = Note::new(&visit.guest.who, why);
    let done = visit.run(&visit.site.changes, |conn, outbox| {
        act.perform(conn, outbox, which, &note)
    });
    let event = format!("admin_{}", act.words().name);
    match done.map(|changed| changed.answer()) {
        Ok(answer) => {
            let (became, why) = (act.became(answer), why.to_owned());
            visit.log(move |who, peer| log::info!(target: AUDIT, event:% = event, who = who, peer:% = peer, sequence = sequence, became = became, why = why; "admin page: change of message {sequence} requested by {who:?}: {became}"));
            Ok(answer)
        }
        Err(error) => {
            log::warn!(target: AUDIT, event:% = event, who = visit.guest.who, peer:% = visit.guest.peer, sequence = sequence, error:% = format!("{error:#}"); "admin page: cannot change message {sequence}: {error:#}");
            Err(error)
        }
    }
}

pub(in crate::pages) fn answer(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let Ok(sequence) = visit.get("sequence").parse() else {
        let why = "The message is missing or invalid.";
        return Err(Refusal::Invalid(why.to_owned()));
    };
    let why = visit.get("why");
    let act = asked(&visit.request.path, visit.form, why).map_err(Wrong::from)?;
    let mut which = MessageRef::from(Sequence(sequence)).at(visit.get("destination"));
    if let Ok(id) = visit.get("id").parse() {
        which = program::with_id(which, id);
    }
    let became = act.became(perform(visit, act, &which, sequence, why)?);
    let q = match visit.get("key") {
        "" => sequence.to_string(),
        key => key.to_owned(),
    };
    let place = link("/messages", &[("q", &q), ("done", &became)]);
    Ok(Response::see_other(&place))
}

/// The forms that change a live or dead message.
pub(in crate::pages) fn actions(guest: &Guest, record: &MessageRecord) -> Markup {
    let is_waiting = record.kept_in == KeptIn::Live && record.locked_by.is_none();
    if record.kept_in == KeptIn::Ledger {
        return html! {};
    }
    let to = match record.destination.as_str() {
        "" => String::new(),
        name => format!(" to {name}"),
    };
    let (sequence, id) = (record.sequence.to_string(), record.message_id.to_string());
    let about = [
        ("sequence", sequence.as_str()),
        ("id", &id),
        ("destination", &record.destination),
        ("key", &record.idempotency_key),
    ];
    let form = |path: &str, content: &Markup| act(guest, path, &about, content);
    html! {
        section.panel {
            div.head { h2 { "Change #" (record.sequence) (to) } }
            div.body {
                @if is_waiting {
                    (form("/message/reschedule", &html! {
                        label.field { "Due in (empty: now)" input name="in" placeholder="2h"; }
                        label.field { "Why" input name="why" maxlength="400"; }
                        button { "Reschedule" }
                        span.quiet { (RESCHEDULE.becomes) }
                    }))
                    (form("/message/cancel", &html! {
                        label.field { "Why" input name="why" maxlength="400"; }
                        button.danger { "Cancel" }
                        span.quiet { (CANCEL.becomes) " " (CANCEL.undo) }
                    }))
                }
                (form("/message/settle", &html! {
                    label.field { "Settle by hand"
                        select name="verdict" {
                            option value="delivered" { "Delivered by other means" }
                            option value="never" { "Not to be sent" }
                        }
                    }
                    label.field { "Why" input name="why" maxlength="400" required; }
                    button.danger { "Settle" }
                    span.quiet { (SETTLE.becomes) " " (SETTLE.undo) }
                }))
            }
        }
    }
}

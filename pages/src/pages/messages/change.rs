//! Cancelling, rescheduling and settling a message by hand.

use diesel_outbox::admin::{self, Note, Verdict};
use diesel_outbox::program::{self, KeptIn, MessageRecord};
use diesel_outbox::{Answer, Due, MessageRef, Sequence};
use maud::{Markup, html};

use crate::pages::layout::act;
use crate::pages::{Refusal, Visit, link};
use crate::request::Form;
use crate::response::Response;
use crate::{AUDIT, Guest};

/// A requested change to a message.
pub(in crate::pages) enum Order {
    Cancel,
    Reschedule(Due),
    Settle(Verdict),
}

impl Order {
    fn of(path: &str, form: &Form, why: &str) -> Result<Self, String> {
        match path {
            "/message/cancel" => Ok(Self::Cancel),
            "/message/reschedule" => due(form.get("in")).map(Self::Reschedule),
            _ => match form.get("verdict") {
                Some("delivered") => Self::settle(Verdict::Delivered, why),
                Some("never") => Self::settle(Verdict::NotToBeSent, why),
                _ => Err("Choose a result: delivered, or not to be sent.".to_owned()),
            },
        }
    }

    pub(in crate::pages) fn settle(verdict: Verdict, why: &str) -> Result<Self, String> {
        match why {
            "" => Err("Say why: the reason is the only explanation for later readers.".to_owned()),
            _ => Ok(Self::Settle(verdict)),
        }
    }

    pub(in crate::pages) fn carry_out(
        &self,
        visit: &Visit<'_>,
        which: &MessageRef,
        sequence: i64,
        why: &str,
    ) -> anyhow::Result<Answer> {
        let note = Note::new(&visit.guest.who, why);
        let done = visit.run(&visit.site.changes, |conn, outbox| match self {
            Self::Cancel => admin::cancel(conn, outbox, which, &note),
            Self::Reschedule(due) => admin::reschedule(conn, outbox, which, *due, &note),
            Self::Settle(verdict) => admin::settle(conn, outbox, which, *verdict, &note),
        });
        let (event, _) = self.words();
        match done.map(|changed| changed.answer()) {
            Ok(answer) => {
                let became = self.became(answer);
                let why = why.to_owned();
                visit.log(move |who, peer| log::info!(target: AUDIT, event = event, who = who, peer:% = peer, sequence = sequence, became = became, why = why; "admin page: change of message {sequence} requested by {who:?}: {became}"));
                Ok(answer)
            }
            Err(error) => {
                log::warn!(target: AUDIT, event = event, who = visit.guest.who, peer:% = visit.guest.peer, sequence = sequence, error:% = format!("{error:#}"); "admin page: cannot change message {sequence}: {error:#}");
                Err(error)
            }
        }
    }

    /// The result, as a word.
    pub(in crate::pages) fn became(&self, answer: Answer) -> &'static str {
        match answer {
            Answer::Done => self.words().1,
            Answer::InFlight => "in_flight",
            Answer::Unknown | Answer::Ambiguous => "unknown",
            _ => "ended_before",
        }
    }

    /// The event in the audit log, and the result in the address of the next page.
    fn words(&self) -> (&'static str, &'static str) {
        match self {
            Self::Cancel => ("admin_cancel", "cancelled"),
            Self::Reschedule(_) => ("admin_reschedule", "rescheduled"),
            Self::Settle(Verdict::Delivered) => ("admin_settle", "settled_delivered"),
            Self::Settle(Verdict::NotToBeSent) => ("admin_settle", "settled_cancelled"),
        }
    }
}

/// The new due time: now, unless a duration is given.
pub(in crate::pages) fn due(text: Option<&str>) -> Result<Due, String> {
    match text.map(str::trim) {
        None | Some("") => Ok(Due::Now),
        Some(text) => humantime::parse_duration(text)
            .map(Due::After)
            .map_err(|error| format!("{text:?} is not a duration such as 10min or 2h: {error}")),
    }
}

pub(in crate::pages) fn answer(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let Ok(sequence) = visit.get("sequence").parse() else {
        let why = "The message is missing or invalid.";
        return Err(Refusal::Invalid(why.to_owned()));
    };
    let why = visit.get("why");
    let order = Order::of(&visit.request.path, visit.form, why).map_err(Refusal::Invalid)?;
    let mut which = MessageRef::from(Sequence(sequence)).at(visit.get("destination"));
    if let Ok(id) = visit.get("id").parse() {
        which = program::with_id(which, id);
    }
    let became = order.became(order.carry_out(visit, &which, sequence, why)?);
    let q = match visit.get("key") {
        "" => sequence.to_string(),
        key => key.to_owned(),
    };
    let place = link("/messages", &[("q", &q), ("done", became)]);
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
                    }))
                    (form("/message/cancel", &html! {
                        label.field { "Why" input name="why" maxlength="400"; }
                        button.danger { "Cancel" }
                        span.quiet { "The message is neither sent nor dead-lettered. Its payload is deleted." }
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
                }))
            }
        }
    }
}

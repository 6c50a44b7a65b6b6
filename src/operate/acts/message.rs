//! Acts on one message, with their parameters: it ends unsent, is due at another time, or is settled by hand.

use diesel::PgConnection;

use crate::error::DatabaseError;
use crate::message::Due;
use crate::name::OutboxName;
use crate::operate::chosen::{WrongChoice, duration};
use crate::operate::waiting::{Note, Verdict, cancel, reschedule, settle};
use crate::outbox::sql::waiting::{Answer, Changed, MessageRef};
use crate::schema::instant::parse_time;

/// The words of an act on one message.
#[derive(Debug)]
pub struct MessageWords {
    /// The act, as an imperative: `reschedule`.
    pub name: &'static str,
    /// Its path in JSON.
    pub path: &'static str,
    /// What the act does, in a sentence.
    pub about: &'static str,
    /// What becomes of the message.
    pub becomes: &'static str,
    /// How to undo it.
    pub undo: &'static str,
}

/// The words of [`MessageAct::Cancel`].
pub static CANCEL: MessageWords = MessageWords {
    name: "cancel",
    path: "/messages/{sequence}/cancel",
    about: "Cancel a waiting message",
    becomes: "The message is neither sent nor dead-lettered. Its payload is deleted.",
    undo: "It cannot be undone: the application must enqueue the message again.",
};

/// The words of [`MessageAct::Reschedule`].
pub static RESCHEDULE: MessageWords = MessageWords {
    name: "reschedule",
    path: "/messages/{sequence}/reschedule",
    about: "Change the due time of a waiting message",
    becomes: "Attempts and expiry stay unchanged.",
    undo: "To undo it, reschedule the message again.",
};

/// The words of [`MessageAct::Settle`].
pub static SETTLE: MessageWords = MessageWords {
    name: "settle",
    path: "/messages/{sequence}/settle",
    about: "Settle a message or dead letter by hand: delivered by other means, or not to be sent",
    becomes: "The message is not sent. Its payload is deleted, and the ledger keeps who settled the message and why.",
    undo: "It cannot be undone.",
};

/// An act on one message.
#[derive(Debug, Clone, Copy)]
pub enum MessageAct {
    /// The message ends unsent.
    Cancel,
    /// The message is due at another time.
    Reschedule(Due),
    /// The message ends with this result.
    Settle(Verdict),
}

impl MessageAct {
    /// A message is due after this time, at this time, or now. An empty text is none of these: it may be a variable of a script.
    ///
    /// # Errors
    /// A [`WrongChoice`] of `in` or `at`.
    pub fn reschedule(delay: Option<&str>, at: Option<&str>) -> Result<Self, WrongChoice> {
        let due = match (delay, at) {
            (Some(delay), _) => Due::After(duration("in", delay)?),
            (None, Some(at)) => Due::At(parse_time(at).ok_or_else(|| {
                let why = format!("{at:?} is not a time such as 2026-01-31T12:00:00Z");
                WrongChoice::new("at", why)
            })?),
            (None, None) => Due::Now,
        };
        Ok(Self::Reschedule(due))
    }

    /// A message ends `delivered`, or `never` to be sent. Whoever settles it must say why.
    ///
    /// # Errors
    /// A [`WrongChoice`] of `verdict` or `why`.
    pub fn settle(verdict: &str, why: &str) -> Result<Self, WrongChoice> {
        let say_why = "Say why: the reason is the only explanation for later readers.";
        match verdict {
            _ if why.trim().is_empty() => Err(WrongChoice::new("why", say_why)),
            "delivered" => Ok(Self::Settle(Verdict::Delivered)),
            "never" => Ok(Self::Settle(Verdict::NotToBeSent)),
            _ => Err(WrongChoice::new(
                "verdict",
                "Choose a result: delivered, or never to be sent.",
            )),
        }
    }

    /// Its words.
    pub fn words(&self) -> &'static MessageWords {
        match self {
            Self::Cancel => &CANCEL,
            Self::Reschedule(_) => &RESCHEDULE,
            Self::Settle(_) => &SETTLE,
        }
    }

    /// What was done: `settled as delivered`.
    pub fn done(&self) -> &'static str {
        match self {
            Self::Cancel => "cancelled",
            Self::Reschedule(_) => "rescheduled",
            Self::Settle(Verdict::Delivered) => "settled as delivered",
            Self::Settle(Verdict::NotToBeSent) => "settled as cancelled",
        }
    }

    /// What became of the message, as a word.
    pub fn became(&self, answer: Answer) -> String {
        match answer {
            Answer::Done => self.done().replace(" as ", "_"),
            Answer::InFlight => "in_flight".to_owned(),
            Answer::Unknown | Answer::Ambiguous => "unknown".to_owned(),
            _ => "ended_before".to_owned(),
        }
    }

    /// Changes the message, and records who did and why.
    ///
    /// # Errors
    /// A [`DatabaseError`].
    pub fn perform(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &MessageRef,
        note: &Note,
    ) -> Result<Changed, DatabaseError> {
        match self {
            Self::Cancel => cancel(conn, name, which, note),
            Self::Reschedule(due) => reschedule(conn, name, which, *due, note),
            Self::Settle(verdict) => settle(conn, name, which, *verdict, note),
        }
    }
}

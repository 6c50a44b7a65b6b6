//! The timeline of a message, reconstructed from its rows.

use diesel_outbox::program::{HistoryEntry, MessageRecord};

use crate::pages::timeline::Step;
use crate::pages::words;

/// One row of a message: its state for one destination.
#[derive(Debug, Clone, Default)]
pub(super) struct Part {
    status: &'static str,
    destination: String,
    is_replay: bool,
    /// The history records who replayed the message.
    is_said_to_be_replayed: bool,
    attempts: i32,
    created_at: String,
    available_at: Option<String>,
    locked_by: Option<i64>,
    locked_at: Option<String>,
    settled_at: Option<String>,
    reason: Option<String>,
    error: Option<String>,
    http_status: Option<i32>,
}

impl Part {
    pub(super) fn of(record: &MessageRecord, history: &[HistoryEntry]) -> Self {
        Self {
            status: record.status.as_str(),
            is_said_to_be_replayed: crate::message::is_said_to_be_replayed(record, history),
            destination: record.destination.clone(),
            is_replay: record.replay_of().is_some(),
            attempts: record.attempts,
            created_at: record.created_at.clone(),
            available_at: record.available_at.clone(),
            locked_by: record.locked_by,
            locked_at: record.locked_at.clone(),
            settled_at: record.settled_at.clone(),
            reason: record.reason.clone(),
            error: record.last_error.clone(),
            http_status: record.http_status,
        }
    }

    fn to(&self) -> String {
        match self.destination.as_str() {
            "" => String::new(),
            name => format!(" to {name}"),
        }
    }

    fn attempts(&self) -> String {
        words::counted(i64::from(self.attempts), "attempt", "attempts")
    }

    fn failure(&self) -> String {
        let reason = self.reason.clone();
        let parts: Vec<String> = reason.into_iter().chain(self.error.clone()).collect();
        parts.join(": ")
    }

    /// The operator who decided, and why.
    fn note(&self) -> String {
        let note = self.error.as_deref();
        note.unwrap_or(crate::message::APPLICATION).to_owned()
    }

    fn steps(&self) -> Vec<Step> {
        match (self.status, &self.settled_at) {
            ("delivered", at) if self.reason.as_deref() == Some("BY_HAND") => {
                let what = format!("Settled by an operator as delivered{}", self.to());
                vec![Step::new("good", &what, at.as_deref(), self.note())]
            }
            ("dead", at) if self.reason.as_deref() == Some("CANCELLED") => {
                let what = format!("Cancelled after {}{}", self.attempts(), self.to());
                vec![Step::new("bad", &what, at.as_deref(), self.note())]
            }
            ("delivered", at) => {
                let response = self
                    .http_status
                    .map_or(String::new(), |status| format!(", HTTP {status}"));
                let more = format!("after {}{response}", self.attempts());
                vec![Step::new(
                    "good",
                    &format!("Delivered{}", self.to()),
                    at.as_deref(),
                    more,
                )]
            }
            ("no_subscriber", at) => {
                let what = "Settled without a send";
                let more = "no destination wants it".to_owned();
                vec![Step::new("wait", what, at.as_deref(), more)]
            }
            ("dead", at) => {
                let what = format!("Dead-lettered after {}{}", self.attempts(), self.to());
                vec![Step::new("bad", &what, at.as_deref(), self.failure())]
            }
            _ => self.live_steps(),
        }
    }

    /// The steps of a live message.
    fn live_steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.attempts > 0 {
            let what = format!("{}{} failed", self.attempts(), self.to());
            steps.push(Step::new("wait", &what, None, self.failure()));
        }
        if let Some(lease) = self.locked_by {
            let what = format!("Claimed under lease {lease} for delivery{}", self.to());
            steps.push(Step::new(
                "idle",
                &what,
                self.locked_at.as_deref(),
                String::new(),
            ));
        } else if let Some(at) = &self.available_at {
            let is_due = words::seconds_since(at).is_some_and(|seconds| seconds > 0.0);
            let what = match is_due {
                true => format!("Due for delivery{}", self.to()),
                false => format!("Delivery{} scheduled", self.to()),
            };
            // A message due since it was enqueued needs no step of its own.
            if !is_due || self.attempts > 0 || *at != self.created_at {
                steps.push(Step::new("idle", &what, Some(at), String::new()));
            }
        }
        steps
    }
}

/// An entry of the history table as a step.
fn step_of(entry: &HistoryEntry) -> Step {
    let (what, more) = crate::message::in_two(entry);
    let (first, rest) = what.split_at(what.chars().next().map_or(0, char::len_utf8));
    let kind = match entry.event.as_str() {
        "failed" => "wait",
        _ => "idle",
    };
    let what = first.to_uppercase() + rest;
    Step::new(kind, &what, Some(&entry.happened_at), more)
}

/// The steps of all rows and of the history table, ordered by time.
pub(super) fn steps(parts: &[Part], history: &[HistoryEntry]) -> Vec<Step> {
    let mut steps: Vec<Step> = history.iter().map(step_of).collect();
    for part in parts {
        let what = match part.is_replay {
            true => "Enqueued again as a replay",
            false => "Enqueued",
        };
        let enqueued = Step::new("idle", what, Some(&part.created_at), String::new());
        if !steps.contains(&enqueued) && !part.is_said_to_be_replayed {
            steps.push(enqueued);
        }
        steps.extend(part.steps());
    }
    // A step without a time stays behind the step that it follows.
    let mut last = None;
    let mut timed: Vec<(Option<std::time::SystemTime>, Step)> = Vec::new();
    for step in steps {
        let at = step
            .at
            .as_deref()
            .and_then(|at| humantime::parse_rfc3339_weak(at).ok());
        last = at.or(last);
        timed.push((last, step));
    }
    timed.sort_by_key(|(at, _)| *at);
    timed.into_iter().map(|(_, step)| step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EARLY: &str = "2026-01-01T10:00:00.000Z";
    const LATE: &str = "2026-01-01T10:00:09.000Z";

    fn part(status: &'static str, destination: &str) -> Part {
        Part {
            status,
            destination: destination.to_owned(),
            attempts: 2,
            created_at: EARLY.to_owned(),
            ..Part::default()
        }
    }

    fn words_of(parts: &[Part]) -> Vec<String> {
        steps(parts, &[])
            .into_iter()
            .map(|step| step.what)
            .collect()
    }

    #[test]
    fn parts_of_a_fan_out_are_enqueued_once() {
        let delivered = Part {
            settled_at: Some(LATE.to_owned()),
            ..part("delivered", "audit")
        };
        let waits = Part {
            available_at: Some("2999-01-01T00:00:00Z".to_owned()),
            ..part("retrying", "billing")
        };
        let expected = [
            "Enqueued",
            "2 attempts to billing failed",
            "Delivered to audit",
            "Delivery to billing scheduled",
        ];
        assert_eq!(words_of(&[waits, delivered]), expected);
    }

    #[test]
    fn a_dead_letter_says_why() {
        let dead = Part {
            settled_at: Some(LATE.to_owned()),
            reason: Some("GONE".to_owned()),
            error: Some("410".to_owned()),
            ..part("dead", "")
        };
        let all = steps(&[dead], &[]);
        assert_eq!(all.len(), 2);
        assert_eq!(
            (all[1].what.as_str(), all[1].more.as_str()),
            ("Dead-lettered after 2 attempts", "GONE: 410")
        );
    }

    #[test]
    fn a_message_settled_by_hand_shows_the_operator_and_the_reason() {
        for (status, reason, what) in [
            ("dead", "CANCELLED", "Cancelled after 2 attempts"),
            (
                "delivered",
                "BY_HAND",
                "Settled by an operator as delivered",
            ),
        ] {
            let part = Part {
                settled_at: Some(LATE.to_owned()),
                reason: Some(reason.to_owned()),
                error: Some("alice: by fax".to_owned()),
                ..part(status, "")
            };
            let last = steps(&[part], &[]).pop().expect("a step");
            assert_eq!(
                (last.what.as_str(), last.more.as_str()),
                (what, "alice: by fax")
            );
        }
    }

    #[test]
    fn a_claimed_message_says_by_whom_and_times_that_are_none_do_no_harm() {
        let claimed = Part {
            locked_by: Some(3),
            locked_at: Some("infinity".to_owned()),
            attempts: 0,
            ..part("sending", "")
        };
        assert_eq!(
            words_of(&[claimed]),
            ["Enqueued", "Claimed under lease 3 for delivery"]
        );
        assert!(steps(&[], &[]).is_empty());
    }
}

//! The answer to the first question, in one sentence, and why.

use diesel_outbox::admin::{Pause, Rates};
use maud::{Markup, html};

use super::{left, words};
use crate::admin::Site;
use crate::admin::history::Glance;

/// A message that has been due for longer is late: relays look twice a second.
pub(super) const LATE_SECONDS: f64 = 30.0;
/// Reasons that are listed.
const MOST_REASONS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Flowing,
    Idle,
    Waits,
    Stopped,
}

impl State {
    /// What the tab says.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Flowing => "Flowing",
            Self::Idle => "Idle",
            Self::Waits => "Something waits",
            Self::Stopped => "Not flowing",
        }
    }

    fn class(self) -> &'static str {
        match self {
            Self::Flowing => "flowing",
            Self::Idle => "idle",
            Self::Waits => "waits",
            Self::Stopped => "stopped",
        }
    }

    /// A sign for those who do not see the colour.
    fn sign(self) -> &'static str {
        match self {
            Self::Flowing => "M8 12.5l2.8 2.8L16 9.5",
            Self::Idle => "M8 12h8",
            Self::Waits => "M12 7.5V12l3 2",
            Self::Stopped => "M9 9l6 6M15 9l-6 6",
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) state: State,
    pub(super) sentence: String,
    pub(super) reasons: Vec<String>,
}

/// What the verdict is made of.
#[derive(Default)]
pub(super) struct Facts<'a> {
    pub(super) has_relay: bool,
    /// What the relay of this process says is wrong: it cannot work, or only worse than it could.
    pub(super) failures: Vec<String>,
    pub(super) warnings: Vec<String>,
    pub(super) pauses: &'a [Pause],
    pub(super) oldest_due: Option<(f64, String)>,
    pub(super) waiting: i64,
    pub(super) dead: i64,
    pub(super) rates: Option<Rates>,
}

impl Verdict {
    pub(super) fn of(
        site: &Site,
        glance: Option<&Glance>,
        rates: Option<Rates>,
        error: Option<&str>,
    ) -> Self {
        let mut facts = Facts::default();
        if let Some(relay) = &site.relay {
            let health = relay.health();
            let is_well = health.is_live() && health.is_ready();
            let problems = health.problems().iter().map(|problem| problem.what.clone());
            if is_well {
                facts.warnings.extend(problems);
            } else {
                facts.failures.extend(problems);
            }
        }
        if let Some(error) = error {
            return Self::blind(error, glance, &facts);
        }
        let Some(glance) = glance else {
            return Self::blind("nothing is known yet", None, &facts);
        };
        let lanes = glance.depths.lanes.iter();
        let due = lanes.filter_map(|lane| Some((lane.oldest_due_seconds?, lane)));
        let oldest = due.max_by(|one, other| one.0.total_cmp(&other.0));
        facts.has_relay = glance.has_relay();
        facts.pauses = &glance.pauses;
        facts.oldest_due = oldest.map(|(seconds, lane)| (seconds, lane.topic.clone()));
        facts.waiting = glance.depths.pending() + glance.depths.retrying();
        facts.dead = glance.depths.dead_letters();
        facts.rates = rates;
        Self::from_facts(facts)
    }

    /// Without a database.
    fn blind(error: &str, glance: Option<&Glance>, facts: &Facts<'_>) -> Self {
        let mut reasons = vec![format!("Error: {error}")];
        if let Some(glance) = glance {
            let time = words::clock(glance.at);
            reasons.push(format!(
                "The numbers below are of {time} UTC, when it last answered."
            ));
        }
        reasons.extend(facts.failures.iter().cloned());
        Self {
            state: State::Stopped,
            sentence: "Not known: the database does not answer.".to_owned(),
            reasons,
        }
    }

    fn from_facts(facts: Facts<'_>) -> Self {
        let late = facts
            .oldest_due
            .as_ref()
            .filter(|(seconds, _)| *seconds > LATE_SECONDS);
        let settled = facts.rates.map_or(0.0, |rates| rates.settled);
        let pauses = facts.pauses.iter().map(pause_reason);
        let (state, sentence, mut reasons) = if !facts.failures.is_empty() {
            let sentence = "Messages do not flow here: the relay of this process cannot work.";
            (State::Stopped, sentence.to_owned(), facts.failures)
        } else if !facts.has_relay {
            let sentence = match facts.waiting {
                0 => "No relay is at work. Nothing waits for one.".to_owned(),
                many => format!(
                    "Messages do not flow: no relay is at work, and {} for one.",
                    words::counted(many, "message waits", "messages wait")
                ),
            };
            let reason = "No relay holds a lease: start one, or look into its log.".to_owned();
            (State::Stopped, sentence, vec![reason])
        } else if let Some((seconds, topic)) = late {
            let sentence = format!(
                "Something waits: the oldest due message for {}.",
                words::duration(*seconds)
            );
            let mut reasons = vec![format!("It is of the topic {topic}.")];
            if settled > 0.0 {
                reasons.push(format!(
                    "Others flow: {} are settled a minute.",
                    words::per_minute(settled)
                ));
            }
            if facts.pauses.is_empty() {
                reasons.push(
                    "Nothing is paused: there is more than is sent in time, or a receiver is slow."
                        .to_owned(),
                );
            }
            reasons.extend(pauses);
            (State::Waits, sentence, reasons)
        } else if !facts.pauses.is_empty() {
            let sentence = match settled > 0.0 {
                true => "Messages flow, but not all of them.",
                false => "Something is paused, and nothing flows just now.",
            };
            (State::Waits, sentence.to_owned(), pauses.collect())
        } else if settled > 0.0 {
            let sentence = format!("Messages flow: {} a minute.", words::per_minute(settled));
            (State::Flowing, sentence, Vec::new())
        } else if facts.waiting > 0 && facts.oldest_due.is_none() {
            let sentence = format!(
                "Idle: {} for their time, and none is due.",
                words::counted(facts.waiting, "message waits", "messages wait")
            );
            (State::Idle, sentence, Vec::new())
        } else if facts.waiting > 0 {
            let sentence = format!(
                "Messages flow: {} on the way.",
                words::count(facts.waiting, false)
            );
            (State::Flowing, sentence, Vec::new())
        } else {
            (
                State::Idle,
                "Idle: nothing waits, and relays are ready.".to_owned(),
                Vec::new(),
            )
        };
        reasons.extend(facts.warnings);
        if let Some(rates) = facts.rates.filter(|rates| rates.died > 0.0) {
            reasons.push(format!(
                "Messages die: {} a minute.",
                words::per_minute(rates.died)
            ));
        } else if facts.dead > 0 {
            let letters = words::counted(facts.dead, "dead letter waits", "dead letters wait");
            reasons.push(format!("{letters} for somebody to look at."));
        }
        Self {
            state,
            sentence,
            reasons,
        }
    }

    pub(super) fn shown(&self) -> Markup {
        let more = self.reasons.len().saturating_sub(MOST_REASONS);
        html! {
            section class={ "verdict " (self.state.class()) } aria-label="Do messages flow?" {
                svg.sign viewBox="0 0 24 24" aria-hidden="true" {
                    circle cx="12" cy="12" r="9.5" {}
                    path d=(self.state.sign()) {}
                }
                div.words {
                    h1 { (self.sentence) }
                    @if !self.reasons.is_empty() {
                        ul {
                            @for reason in self.reasons.iter().take(MOST_REASONS) { li { (reason) } }
                            @if more > 0 { li { "and " (more) " more" } }
                        }
                    }
                }
            }
        }
    }
}

fn pause_reason(pause: &Pause) -> String {
    let Pause {
        kind, name, reason, ..
    } = pause;
    let left = left(pause);
    match reason.as_str() {
        "BREAKER_OPEN" => {
            format!("The circuit breaker of {name} is open, {left}: its receiver fails.")
        }
        _ => format!(
            "The {kind} {name} is paused, {left}: {}",
            words::shortened(reason, 200)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(facts: Facts<'_>) -> Verdict {
        Verdict::from_facts(facts)
    }

    fn working<'a>() -> Facts<'a> {
        Facts {
            has_relay: true,
            ..Facts::default()
        }
    }

    #[test]
    fn without_a_relay_nothing_flows() {
        let alone = verdict(Facts {
            waiting: 2,
            ..Facts::default()
        });
        assert_eq!(alone.state, State::Stopped);
        assert!(
            alone.sentence.contains("2 messages wait"),
            "{}",
            alone.sentence
        );
        assert_eq!(verdict(Facts::default()).state, State::Stopped);
    }

    #[test]
    fn what_is_late_comes_before_what_flows() {
        let late = verdict(Facts {
            oldest_due: Some((200.0, "order.paid".to_owned())),
            waiting: 7,
            ..working()
        });
        assert_eq!(late.state, State::Waits);
        assert_eq!(
            late.sentence,
            "Something waits: the oldest due message for 3 min 20 s."
        );
        assert!(late.reasons[0].contains("order.paid"));
    }

    #[test]
    fn the_relays_own_failures_come_first() {
        let failed = verdict(Facts {
            failures: vec!["the claimer hangs".to_owned()],
            ..working()
        });
        assert_eq!(
            (failed.state, failed.reasons[0].as_str()),
            (State::Stopped, "the claimer hangs")
        );
    }

    #[test]
    fn idle_is_when_nothing_is_due() {
        assert_eq!(verdict(working()).state, State::Idle);
        let delayed = verdict(Facts {
            waiting: 1,
            ..working()
        });
        assert_eq!(
            delayed.sentence,
            "Idle: 1 message waits for their time, and none is due."
        );
        let dead = verdict(Facts {
            dead: 3,
            ..working()
        });
        assert_eq!(
            dead.reasons,
            ["3 dead letters wait for somebody to look at."]
        );
        let moving = verdict(Facts {
            waiting: 5,
            oldest_due: Some((0.1, "order.paid".to_owned())),
            ..working()
        });
        assert_eq!(moving.state, State::Flowing);
    }

    #[test]
    fn without_a_database_it_says_so() {
        let blind = Verdict::blind("connection refused", None, &Facts::default());
        assert_eq!(blind.state, State::Stopped);
        assert_eq!(blind.reasons, ["Error: connection refused"]);
    }
}

//! The answer to the first question, in one sentence, and why.

use diesel_outbox::Status as MessageStatus;
use diesel_outbox::admin::{BlockedKey, LaneDepth, Pause, Rates};
use maud::{Markup, html};

use super::destinations::left;
use super::words;
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
    /// Destinations of this process whose threads are all sending.
    pub(super) busy: Vec<String>,
    pub(super) blocked_keys: &'a [BlockedKey],
    pub(super) oldest_due: Option<(f64, String)>,
    pub(super) waiting: i64,
    /// Those of them whose last send failed.
    pub(super) retrying: i64,
    pub(super) dead: i64,
    pub(super) rates: Option<Rates>,
    /// What was settled lately has died, all of it.
    pub(super) only_dies: bool,
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
            let destinations = relay.destinations().into_iter();
            let busy = destinations.filter(|one| one.threads > 0 && one.busy == one.threads);
            facts.busy.extend(busy.map(|one| one.name));
        }
        if let Some(error) = error {
            return Self::blind(error, glance, &facts);
        }
        let Some(glance) = glance else {
            return Self::blind("nothing is known yet", None, &facts);
        };
        if site.relay.is_none() {
            // A relay in this process has said so.
            facts
                .warnings
                .extend(glance.depths.unrouted().map(unrouted));
        }
        let lanes = glance.depths.lanes.iter();
        let due = lanes.filter_map(|lane| Some((lane.oldest_due_seconds?, lane)));
        let oldest = due.max_by(|one, other| one.0.total_cmp(&other.0));
        facts.has_relay = glance.has_relay();
        facts.pauses = &glance.pauses;
        facts.blocked_keys = &glance.blocked_keys;
        facts.oldest_due = oldest.map(|(seconds, lane)| (seconds, lane.topic.clone()));
        facts.waiting = glance.depths.pending() + glance.depths.retrying();
        facts.retrying = glance.depths.retrying();
        facts.dead = glance.depths.dead_letters();
        facts.rates = rates;
        facts.only_dies = rates.is_some_and(|one| one.died > 0.0 && one.died >= one.settled);
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
            sentence: "Not known: the outbox cannot be read.".to_owned(),
            reasons,
        }
    }

    fn from_facts(facts: Facts<'_>) -> Self {
        let warnings = facts.warnings.clone();
        let remarks = facts.remarks();
        let mut verdict = facts.judge();
        verdict.reasons.extend(warnings);
        verdict.reasons.extend(remarks);
        verdict
    }

    fn new(state: State, sentence: impl Into<String>, reasons: Vec<String>) -> Self {
        Self {
            state,
            sentence: sentence.into(),
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

impl Facts<'_> {
    /// The worst comes first.
    fn judge(self) -> Verdict {
        let settled = self.rates.map_or(0.0, |rates| rates.settled);
        let a_minute = words::per_minute(settled);
        let many = words::counted(self.waiting, "message waits", "messages wait");
        let pauses = || self.pauses.iter().map(pause_reason);
        if !self.failures.is_empty() {
            let sentence = "Messages do not flow here: the relay of this process cannot work.";
            return Verdict::new(State::Stopped, sentence, self.failures);
        }
        if !self.has_relay {
            let sentence = match self.waiting {
                0 => "No relay is at work. Nothing waits for one.".to_owned(),
                _ => format!("Messages do not flow: no relay is at work, and {many}."),
            };
            let reason = "No relay holds a lease: start one, or look into its log.";
            return Verdict::new(State::Stopped, sentence, vec![reason.to_owned()]);
        }
        if let Some((seconds, topic)) = self.oldest_due.as_ref().filter(|due| due.0 > LATE_SECONDS)
        {
            let age = words::duration(*seconds);
            let sentence = format!("Something waits: a message has been due for {age}.");
            let mut reasons = vec![format!("It is of the topic {topic}.")];
            if settled > 0.0 {
                reasons.push(format!("Settled in the last minute: {a_minute}."));
            }
            reasons.extend(self.why_late());
            reasons.extend(pauses());
            return Verdict::new(State::Waits, sentence, reasons);
        }
        if !self.pauses.is_empty() {
            let sentence = match settled > 0.0 {
                true => "Not all messages flow.",
                false => "Something is paused; nothing else flows just now.",
            };
            return Verdict::new(State::Waits, sentence, pauses().collect());
        }
        if self.only_dies {
            let sentence = "Messages die, and none is delivered.";
            return Verdict::new(State::Waits, sentence, Vec::new());
        }
        if settled <= 0.0 && self.retrying > 0 {
            let sentence = "Sends have failed, and none has succeeded in the last minute.";
            return Verdict::new(State::Waits, sentence, Vec::new());
        }
        let (state, sentence) = match (settled > 0.0, self.waiting, &self.oldest_due) {
            (true, _, _) => (
                State::Flowing,
                format!("Messages flow: {a_minute} a minute."),
            ),
            (false, 0, _) => (
                State::Idle,
                "Idle: nothing waits, and relays are ready.".to_owned(),
            ),
            (false, _, None) => (State::Idle, format!("Idle: {many} for a later time.")),
            (false, _, Some(_)) => (
                State::Flowing,
                "Messages flow: they are on their way.".to_owned(),
            ),
        };
        Verdict::new(state, sentence, Vec::new())
    }

    /// What may keep a message that no pause keeps.
    fn why_late(&self) -> Vec<String> {
        let busy = self.busy.iter();
        let mut reasons: Vec<String> = busy
            .map(|name| {
                format!("All threads of {name} are busy: its receiver is slow, or much comes in.")
            })
            .collect();
        let is_known =
            !reasons.is_empty() || !self.blocked_keys.is_empty() || !self.warnings.is_empty();
        if !is_known && self.pauses.is_empty() {
            reasons.push("Nothing is paused and no key is blocked: is a receiver slow?".to_owned());
        }
        reasons
    }

    /// What is worth a look, whatever flows.
    fn remarks(&self) -> Vec<String> {
        let mut remarks: Vec<String> = self.blocked_keys.iter().map(blocked).collect();
        if self.retrying > 0 {
            let many = words::counted(self.retrying, "message waits", "messages wait");
            remarks.push(format!("{many} for another attempt: the last one failed."));
        }
        if let Some(rates) = self.rates.filter(|rates| rates.died > 0.0) {
            let a_minute = words::per_minute(rates.died);
            remarks.push(format!("Messages die: {a_minute} a minute."));
        } else if self.dead > 0 {
            let letters = words::counted(self.dead, "dead letter waits", "dead letters wait");
            remarks.push(format!("{letters} for somebody to look at."));
        }
        remarks
    }
}

fn unrouted(lane: &LaneDepth) -> String {
    let waiting = lane.pending + lane.retrying;
    let many = words::counted(waiting, "message waits", "messages wait");
    let topic = words::shortened(&lane.topic, 100);
    let to = match lane.destination.as_str() {
        "" => String::new(),
        name => format!(" for the destination {}", words::shortened(name, 100)),
    };
    format!("No relay serves the topic {topic}{to}: {many} (NO_ROUTE).")
}

fn blocked(key: &BlockedKey) -> String {
    let behind = words::counted(key.waiting, "message waits", "messages wait");
    let more = if key.waiting_is_capped {
        " at least"
    } else {
        ""
    };
    let name = words::shortened(&key.ordering_key, 100);
    let first = match key.status {
        MessageStatus::Dead => format!("the dead letter #{}", key.sequence),
        _ => format!("the next attempt of #{}", key.sequence),
    };
    format!("{behind}{more} behind {first}, in the order of the key {name} (see Keys).")
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
mod tests;

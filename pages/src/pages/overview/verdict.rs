//! The verdict: one sentence on whether messages are being delivered, and the reasons.

use diesel_outbox::admin::{EndpointCounts, LaneDepth, Pausable, Pause};
use diesel_outbox::program::{self, BlockedKey, Rates};
use diesel_outbox::{ReasonCode, Status as MessageStatus};
use maud::{Markup, html};

use super::destinations::left;
use super::words;
use crate::Site;
use crate::history::Glance;
use crate::labels::Labels;
use crate::pause::in_words;

/// A message due for longer is late: relays poll twice a second.
pub(super) const LATE_SECONDS: f64 = 30.0;
/// Reasons listed.
const MOST_REASONS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Flowing,
    Idle,
    Waits,
    Stopped,
}

impl State {
    /// The title of the browser tab.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Flowing => "Flowing",
            Self::Idle => "Idle",
            Self::Waits => "Needs attention",
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

    /// A sign for visitors who cannot see the colour.
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

/// The facts behind the verdict.
#[derive(Default)]
pub(super) struct Facts<'a> {
    pub(super) has_relay: bool,
    /// A relay that runs with `OUTBOX_ENABLED=false`.
    pub(super) switched_off: Option<&'a str>,
    /// Problems reported by the relay in this process that stop it.
    pub(super) failures: Vec<String>,
    /// Problems that only degrade it.
    pub(super) warnings: Vec<String>,
    pub(super) pauses: &'a [Pause],
    pub(super) labels: Option<&'a Labels>,
    /// Destinations of this process whose threads are all sending.
    pub(super) busy: Vec<String>,
    pub(super) blocked_keys: &'a [BlockedKey],
    pub(super) oldest_due: Option<(f64, String)>,
    pub(super) waiting: i64,
    /// The waiting messages whose last send failed.
    pub(super) retrying: i64,
    pub(super) dead: i64,
    pub(super) endpoints: EndpointCounts,
    pub(super) rates: Option<Rates>,
    /// All messages settled in the last minute were dead-lettered.
    pub(super) all_dead_letters: bool,
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
            let destinations = program::destination_states(relay).into_iter();
            let busy = destinations.filter(|one| one.threads > 0 && one.busy == one.threads);
            facts.busy.extend(busy.map(|one| one.name));
        }
        if let Some(error) = error {
            return Self::blind(error, glance, &facts);
        }
        let Some(glance) = glance else {
            return Self::blind("no data yet", None, &facts);
        };
        if site.relay.is_none() {
            // A relay in this process reports unrouted topics itself.
            facts
                .warnings
                .extend(glance.depths.unrouted().map(unrouted));
        }
        let lanes = glance.depths.lanes.iter();
        let due = lanes.filter_map(|lane| Some((lane.oldest_due_seconds?, lane)));
        let oldest = due.max_by(|one, other| one.0.total_cmp(&other.0));
        facts.has_relay = glance.has_relay();
        facts.switched_off = glance.switched_off();
        facts.pauses = &glance.pauses;
        facts.labels = Some(&glance.labels);
        facts.blocked_keys = &glance.blocked_keys;
        facts.oldest_due = oldest.map(|(seconds, lane)| (seconds, lane.topic.clone()));
        facts.waiting = glance.depths.pending() + glance.depths.retrying();
        facts.retrying = glance.depths.retrying();
        facts.dead = glance.depths.dead_letters();
        facts.endpoints = glance.depths.endpoints;
        facts.rates = rates;
        facts.all_dead_letters =
            rates.is_some_and(|one| one.dead_lettered > 0.0 && one.dead_lettered >= one.settled);
        Self::from_facts(facts)
    }

    /// The verdict if the database fails.
    fn blind(error: &str, glance: Option<&Glance>, facts: &Facts<'_>) -> Self {
        let mut reasons = vec![format!("Error: {error}")];
        if let Some(glance) = glance {
            let time = words::clock(glance.at);
            reasons.push(format!(
                "The numbers below are from {time} UTC, when the database last responded."
            ));
        }
        reasons.extend(facts.failures.iter().cloned());
        Self {
            state: State::Stopped,
            sentence: "Status unknown: the outbox cannot be read.".to_owned(),
            reasons,
        }
    }

    fn from_facts(facts: Facts<'_>) -> Self {
        let warnings = facts.warnings.clone();
        let remarks = facts.remarks();
        // Last: an operator can do the least about them, and they may be many.
        let of_endpoints = facts.pauses_of(true);
        let mut verdict = facts.judge();
        verdict.reasons.extend(warnings);
        verdict.reasons.extend(remarks);
        verdict.reasons.extend(of_endpoints);
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
            section class={ "verdict " (self.state.class()) } aria-label="Status" {
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
    /// The worst state wins.
    fn judge(self) -> Verdict {
        let settled = self.rates.map_or(0.0, |rates| rates.settled);
        let a_minute = words::per_minute(settled);
        let many = words::counted(self.waiting, "message is waiting", "messages are waiting");
        let pauses = self.pauses_of(false);
        if !self.failures.is_empty() {
            let sentence = "The relay in this process cannot deliver messages.";
            return Verdict::new(State::Stopped, sentence, self.failures);
        }
        if !self.has_relay {
            let (state, reason) = match self.switched_off {
                Some(relay) => (
                    "The relay is switched off",
                    format!(
                        "The relay {relay} runs with OUTBOX_ENABLED=false, and claims no messages."
                    ),
                ),
                None => (
                    "No relay is running",
                    "No relay holds a lease: start a relay, or check its log.".to_owned(),
                ),
            };
            let sentence = match self.waiting {
                0 => format!("{state}. No messages are waiting."),
                _ => format!("{state}, and {many}."),
            };
            return Verdict::new(State::Stopped, sentence, vec![reason]);
        }
        if let Some((seconds, topic)) = self.oldest_due.as_ref().filter(|due| due.0 > LATE_SECONDS)
        {
            let age = words::duration(*seconds);
            let sentence = format!("Delayed: a message has been due for {age}.");
            let mut reasons = vec![format!("The message has the topic {topic}.")];
            if settled > 0.0 {
                reasons.push(format!("Settled in the last minute: {a_minute}."));
            }
            reasons.extend(self.why_late());
            reasons.extend(pauses);
            return Verdict::new(State::Waits, sentence, reasons);
        }
        if !self.pauses.is_empty() {
            let sentence = match settled > 0.0 {
                true => "Some messages are not being delivered.",
                false => "Some messages are paused, and no others were settled in the last minute.",
            };
            return Verdict::new(State::Waits, sentence, pauses);
        }
        if self.all_dead_letters {
            let sentence = "Messages are being dead-lettered, and none is delivered.";
            return Verdict::new(State::Waits, sentence, Vec::new());
        }
        if settled <= 0.0 && self.retrying > 0 {
            let sentence = "Sends are failing: none succeeded in the last minute.";
            return Verdict::new(State::Waits, sentence, Vec::new());
        }
        let (state, sentence) = match (settled > 0.0, self.waiting, &self.oldest_due) {
            (true, _, _) => (
                State::Flowing,
                format!("Messages are flowing: {a_minute} a minute."),
            ),
            (false, 0, _) => (
                State::Idle,
                "Idle: no messages are waiting, and a relay is ready.".to_owned(),
            ),
            (false, _, None) => (State::Idle, format!("Idle: {many}, none due yet.")),
            (false, _, Some(_)) => (
                State::Flowing,
                "Messages are flowing: some are due, and none is late.".to_owned(),
            ),
        };
        Verdict::new(state, sentence, Vec::new())
    }

    /// The pauses of endpoints, or all others.
    fn pauses_of(&self, is_registered: bool) -> Vec<String> {
        let has = |name: &str| self.labels.is_some_and(|labels| labels.has(name));
        let registered = |one: &Pause| one.kind == Pausable::Destination && has(&one.name);
        let pauses = self.pauses.iter();
        let pauses = pauses.filter(|one| registered(one) == is_registered);
        let label = |name: &str| {
            let label = self.labels.map(|labels| labels.label(name));
            label.unwrap_or_else(|| name.to_owned())
        };
        pauses
            .map(|pause| pause_reason(pause, &label(&pause.name)))
            .collect()
    }

    /// Possible reasons for a late message, apart from pauses.
    fn why_late(&self) -> Vec<String> {
        let busy = self.busy.iter();
        let mut reasons: Vec<String> = busy
            .map(|name| {
                format!(
                    "All threads of {name} are busy: the receiver is slow, or many messages arrive."
                )
            })
            .collect();
        let is_known =
            !reasons.is_empty() || !self.blocked_keys.is_empty() || !self.warnings.is_empty();
        if !is_known && self.pauses.is_empty() {
            reasons.push(
                "Nothing is paused and no key is blocked: a receiver may be slow.".to_owned(),
            );
        }
        reasons
    }

    /// Remarks for every verdict.
    fn remarks(&self) -> Vec<String> {
        let mut remarks: Vec<String> = self.blocked_keys.iter().map(blocked).collect();
        if self.retrying > 0 {
            let many = words::counted(self.retrying, "message is waiting", "messages are waiting");
            remarks.push(format!("{many} for a retry after a failed attempt."));
        }
        if let Some(rates) = self.rates.filter(|rates| rates.dead_lettered > 0.0) {
            let a_minute = words::per_minute(rates.dead_lettered);
            remarks.push(format!("{a_minute} messages a minute are dead-lettered."));
        } else if self.dead > 0 {
            let letters = words::counted(self.dead, "dead letter needs", "dead letters need");
            remarks.push(format!("{letters} review."));
        }
        for (count, state) in [
            (self.endpoints.failing, "failing"),
            (self.endpoints.unread, "unread"),
            (self.endpoints.paused, "paused"),
            (self.endpoints.unverified, "unverified"),
            (self.endpoints.disabled, "disabled"),
        ] {
            if count > 0 {
                let many = words::counted(count, "endpoint is", "endpoints are");
                remarks.push(format!("{many} {state} (see Endpoints)."));
            }
        }
        remarks
    }
}

fn unrouted(lane: &LaneDepth) -> String {
    let waiting = lane.pending + lane.retrying;
    let many = words::counted(waiting, "message is waiting", "messages are waiting");
    let topic = words::shortened(&lane.topic, 100);
    let to = match lane.destination.as_str() {
        "" => String::new(),
        name => format!(" for the destination {}", words::shortened(name, 100)),
    };
    let why = match &lane.unserved {
        None => String::new(),
        Some(why) => {
            let next = program::next_step(why, waiting);
            format!(" Reason: {why}. Next step: {next}.")
        }
    };
    let code = lane
        .unserved
        .as_ref()
        .map_or(ReasonCode::NoRoute, program::reason_of);
    format!("No relay serves the topic {topic}{to}: {many} ({code}).{why}")
}

fn blocked(key: &BlockedKey) -> String {
    let behind = words::counted(key.waiting, "message is waiting", "messages are waiting");
    let least = if key.waiting_is_capped {
        "at least "
    } else {
        ""
    };
    let name = words::shortened(&key.ordering_key, 100);
    let first = match key.status {
        MessageStatus::Dead => format!("the dead letter #{}", key.sequence),
        _ if key.waits.is_some() => format!(
            "#{} ({})",
            key.sequence,
            key.waits.as_deref().unwrap_or_default()
        ),
        _ => format!("the next attempt of #{}", key.sequence),
    };
    format!("Ordering key {name}: {least}{behind} behind {first} (see Keys).")
}

fn pause_reason(pause: &Pause, name: &str) -> String {
    let Pause { kind, reason, .. } = pause;
    let left = left(pause);
    match reason.as_str() {
        "BREAKER_OPEN" => {
            format!("The circuit breaker of {name} is open {left}: the receiver is failing.")
        }
        _ => format!(
            "The {} {name} is paused {left}: {}",
            kind.as_str(),
            words::shortened(&in_words(reason), 100)
        ),
    }
}

#[cfg(test)]
mod tests;

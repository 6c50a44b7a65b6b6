//! How a claimed message is settled or sent, by what becomes of it. Decided once, when the message is claimed; what
//! becomes of it, a roster says (`engine/directory.rs`).

use std::sync::Arc;
use std::time::Instant;

use super::sql::claim::{Batch, Claimed, KnownDelivery, TakenOver};
use crate::clock;
use crate::delivery::OnDead;
use crate::dispatch::Failure;
use crate::engine::directory::{At, Decided, Fate, Prefetched, Reading, Roster};
use crate::engine::host::shared::Shared;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::plan::room::Rooms;
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::Bulkhead;
use crate::engine::send::job::{Job, Terms, is_expired};
use crate::engine::send::run::joined;
use crate::engine::send::verdict::{Attempt, Retries, Verdict};
use crate::engine::settle::sql::settle::Claim;
use crate::engine::settle::sql::split::Parts;
use crate::log;
use crate::message::Message;
use crate::status::ReasonCode;

/// The facts that decide what claimed messages become.
pub(crate) struct Ways<'a> {
    pub(crate) bulkheads: &'a [Bulkhead],
    /// Whether dead letters of no destination block their ordering keys.
    pub(crate) on_dead: OnDead,
    pub(crate) roster: Arc<dyn Roster>,
    /// The room of members.
    pub(crate) rooms: Rooms,
    /// Tells people that a member may not get a message that it wants.
    pub(crate) doubted: &'a dyn Fn(&str, &Message),
    /// How new the roster is.
    pub(crate) reading: Reading,
    /// What the claim has seen of new members.
    pub(crate) seen: Option<i64>,
}

/// A message that this relay does not send has its verdict until it expires.
fn not_sent(verdict: Verdict, message: &Message, now: Instant) -> Verdict {
    match is_expired(message, now) {
        true => Verdict::expired(),
        false => verdict,
    }
}

impl Ways<'_> {
    /// Decides what becomes of a claimed message, and makes it a job. `Err`: members must be read first.
    pub(super) fn job(
        &mut self,
        claimed: Claimed,
        lease: LeaseId,
        now: Instant,
    ) -> Result<Job, Claimed> {
        let at = At {
            now,
            seen: self.seen,
            reading: self.reading,
            left: &|member| self.rooms.left(member),
        };
        let Decided { fate, doubtful } = self.roster.decide(&claimed.message, &at);
        if matches!(fate, Fate::Ask) {
            return Err(claimed);
        }
        for name in doubtful {
            (self.doubted)(&name, &claimed.message);
        }
        Ok(self.made(claimed, lease, now, fate))
    }

    /// Like [`job`](Self::job), when nothing can be read any more: such a message is released.
    pub(crate) fn last_job(&mut self, claimed: Claimed, lease: LeaseId, now: Instant) -> Job {
        self.job(claimed, lease, now)
            .unwrap_or_else(|claimed| self.made(claimed, lease, now, Fate::Ask))
    }

    fn made(&mut self, mut claimed: Claimed, lease: LeaseId, now: Instant, fate: Fate) -> Job {
        let roster = Arc::clone(&self.roster);
        let message = &claimed.message;
        let of_none = Terms {
            on_dead: self.on_dead,
            expires_after: None,
        };
        let unsent = |to, verdict| (to, None, Err((of_none, verdict)));
        let (to, member, sent) = match fate {
            Fate::Bulkhead(number) => (
                To::Bulkhead(number),
                None,
                Ok(&self.bulkheads[number].limits),
            ),
            Fate::Member(id, name, registration) => match roster.limits(id) {
                Some(limits) => (
                    match limits.is_feed {
                        true => To::Feed(id),
                        false => To::Member(id),
                    },
                    Some((name, Some(registration))),
                    Ok(limits),
                ),
                None => unsent(To::Nowhere, not_sent(Verdict::Released, message, now)),
            },
            Fate::Parts(parts) => {
                let on_dead = self.on_dead_of(&parts);
                let terms = Terms { on_dead, ..of_none };
                (To::Split, None, Err((terms, Verdict::Split(parts))))
            }
            Fate::Nobody => unsent(To::Split, Verdict::NoSubscriber),
            Fate::Waits(failure, wait) => {
                let verdict = Verdict::Retry(failure, wait, Attempt::NotCounted);
                unsent(To::Split, not_sent(verdict, message, now))
            }
            Fate::Dead(failure) => {
                let member = Some((message.destination.as_str().into(), None));
                let verdict = Verdict::Dead(failure, Attempt::NotCounted);
                (To::Split, member, Err((of_none, verdict)))
            }
            Fate::Elsewhere => unsent(To::Nowhere, not_sent(Verdict::Released, message, now)),
            Fate::Ask => unsent(To::Split, not_sent(Verdict::Released, message, now)),
        };
        let (terms, sent) = match sent {
            Ok(limits) if limits.is_feed => (limits.terms, Err(Verdict::Stored)),
            Ok(limits) => (limits.terms, Ok(&limits.retries)),
            Err((terms, verdict)) => (terms, Err(verdict)),
        };
        let mut unsent = unsent_of(&claimed, sent);
        terms.limit(&mut claimed.message);
        if matches!(unsent, Some(Verdict::Stored)) && is_expired(&claimed.message, now) {
            unsent = Some(Verdict::expired());
        }
        let (member, registration) = member.unzip();
        let job = Job {
            unsent,
            to,
            member,
            registration: registration.flatten(),
            terms,
            lease,
            message: claimed.message,
            behind: Vec::new(),
        };
        self.take_room(&job);
        job
    }

    /// Counts a message that is sent to a member.
    fn take_room(&mut self, job: &Job) {
        if let (To::Member(id), None) | (To::Feed(id), _) = (job.to, &job.unsent) {
            self.rooms.take(id);
        }
    }

    /// A message to be fanned out is a dead letter for all its destinations, so it blocks its key if it would at any of
    /// them.
    fn on_dead_of(&self, parts: &Parts) -> OnDead {
        let of_part = |name: &String| {
            let configured = self.bulkheads.iter().find(|one| *one.name == **name);
            let of_member = || self.roster.limits(self.roster.member(name)?);
            let limits = configured.map(|one| &one.limits).or_else(of_member);
            limits.map_or(self.on_dead, |limits| limits.terms.on_dead)
        };
        match parts.to.iter().any(|name| of_part(name) == OnDead::Block) {
            true => OnDead::Block,
            false => OnDead::Continue,
        }
    }
}

impl Job {
    /// Frees the payload and the headers of the message.
    pub(crate) fn unload(&mut self, bulkheads: &[Bulkhead]) {
        let message = &mut self.message;
        if let Some(bulkhead) = self.to.bulkhead(bulkheads) {
            bulkhead.unload(message);
        }
        (message.payload, message.headers) = (String::new(), None);
    }
}

impl Shared {
    /// Takes claimed messages in, with the rest of their runs, and decides where each message goes. `read`: reads the
    /// members, because the fate of these messages depends on that.
    pub(crate) fn took(
        &self,
        batch: Batch,
        lease: LeaseId,
        read: impl FnOnce(&[&Claimed]) -> Reading,
    ) -> Vec<Job> {
        let mut claimed = batch.claimed;
        let first = claimed.len();
        claimed.extend(batch.behind);
        self.count_claimed(&claimed);
        let mut jobs = self.decide(claimed, lease, batch.registrations, read);
        let claims = jobs.iter().map(|job| (Claim::of(&job.message), job.to));
        self.custody.began(lease, claims);
        let behind = jobs.split_off(first);
        joined(jobs, behind)
    }

    fn count_claimed(&self, claimed: &[Claimed]) {
        let is_taken_over = |one: &&Claimed| one.taken_over != TakenOver::No;
        let taken_over = claimed.iter().filter(is_taken_over).count() as u64;
        for Claimed { message, .. } in claimed.iter().filter(is_taken_over) {
            log::debug!(event = "taken_over", sequence = message.sequence.0, topic = message.topic, attempts = message.attempts; "took over message {} of {} from a relay that crashed or lost its lease ({} attempts so far)", message.message_id, message.topic, message.attempts);
        }
        if taken_over > 0 {
            log::warn!(event = "takeover", messages = taken_over; "took over {taken_over} messages from a relay that crashed or lost its lease: this relay continues with them");
        }
        let count = claimed.len() as u64;
        self.count(|stats| {
            stats.claimed += count;
            stats.taken_over += taken_over;
        });
        self.metrics.claimed.increment(count);
        self.metrics.taken_over.increment(taken_over);
    }

    fn decide(
        &self,
        claimed: Vec<Claimed>,
        lease: LeaseId,
        seen: Option<i64>,
        read: impl FnOnce(&[&Claimed]) -> Reading,
    ) -> Vec<Job> {
        let doubted = |name: &str, message: &Message| self.directory.doubted(name, message);
        let ways = |reading| Ways {
            bulkheads: &self.bulkheads,
            on_dead: self.settings.on_dead,
            roster: self.directory.roster(),
            rooms: self.rooms(),
            doubted: &doubted,
            reading,
            seen,
        };
        // Taken after the roster: a member that was registered later than this would count as one of a clock set back.
        let (mut known, mut now) = (ways(Reading::NotAsked), clock::now());
        let decided = claimed.into_iter().map(|one| known.job(one, lease, now));
        let decided: Vec<Result<Job, Claimed>> = decided.collect();
        let unsure = decided.iter().filter_map(|one| one.as_ref().err());
        let unsure: Vec<&Claimed> = unsure.collect();
        if !unsure.is_empty() {
            (known, now) = (ways(read(&unsure)), clock::now());
            for job in decided.iter().flatten() {
                known.take_room(job);
            }
        }
        let job = |one: Result<Job, _>| one.unwrap_or_else(|one| known.last_job(one, lease, now));
        let jobs: Vec<Job> = decided.into_iter().map(job).collect();
        for Job { to, message, .. } in &jobs {
            if let Some(bulkhead) = to.bulkhead(&self.bulkheads) {
                bulkhead.load(message);
            }
        }
        jobs
    }

    /// How many messages may be claimed for each member.
    pub(crate) fn rooms(&self) -> Rooms {
        let roster = self.directory.roster();
        if roster.is_empty() {
            return Rooms::default();
        }
        Rooms {
            roster: Some(roster),
            doors: self.directory.doors(),
            held: self.custody.of_ways(),
            batch: self.settings.batch,
        }
    }

    /// The lengths of the next claims for the members among these ways.
    pub(crate) fn prefetched(&self, ways: impl Iterator<Item = To>) -> Prefetched {
        let mut prefetched = Prefetched::new();
        for to in ways {
            if let To::Member(id) = to {
                let of_member = || self.directory.prefetch(id);
                prefetched.entry(id).or_insert_with(of_member);
            }
        }
        prefetched
    }
}

/// How to settle a message without a send; `None`: the message is sent. The ledger may know the message, and a message
/// that was taken over may have no attempt left.
// Why: docs/decisions.md#takeover
fn unsent_of(claimed: &Claimed, sent: Result<&Retries, Verdict>) -> Option<Verdict> {
    let message = &claimed.message;
    match claimed.known {
        KnownDelivery::No => {}
        KnownDelivery::Delivered(first) => return Some(Verdict::Deduplicated(first)),
        KnownDelivery::OtherContent(first) => {
            let error = format!(
                "a message with the same idempotency key but a different topic or payload was delivered before as {first}"
            );
            let failure = Failure::new(ReasonCode::IdempotencyConflict, error);
            return Some(Verdict::Dead(failure, Attempt::NotCounted));
        }
    }
    let retries = match sent {
        Ok(retries) => retries,
        Err(verdict) => return Some(verdict),
    };
    let error = "the relay that had claimed the message died or lost its lease";
    let abandoned = || Failure::new(ReasonCode::Abandoned, error);
    match claimed.taken_over {
        TakenOver::Again => Some(Verdict::of_failure(abandoned(), message.attempts, retries)),
        // The takeover used the last attempt that the destination allows.
        TakenOver::Once if message.attempts >= retries.max_attempts => {
            Some(Verdict::Dead(abandoned(), Attempt::NotCounted))
        }
        TakenOver::Once | TakenOver::No => None,
    }
}

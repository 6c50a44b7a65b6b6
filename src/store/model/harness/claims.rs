//! How a relay of a history finds messages and claims them.

use diesel::result::Error;
use diesel::{Connection, PgConnection};

use crate::store::relay::claim::{Claimant, Claimed, Lane, Position, Stream, Topic};
use crate::store::relay::lease::{self, LeaseId};
use crate::store::relay::ordered::{self, Candidate, Key};
use crate::store::relay::streams::streams;

use super::{Harness, LEASE};
use crate::store::model::expected::{MAX_ATTEMPTS, Message};
use crate::store::model::history::{Answer, Aside, Find};
use crate::store::model::promises::{Event, Kept};
use crate::store::model::system::goes_to;

/// Keys of one step of the walk.
const STEP: usize = 2;

impl Harness<'_> {
    /// Lets a relay work, unless it is in a transaction already. One that is dead starts anew.
    pub(super) fn with_relay(
        &mut self,
        number: usize,
        work: impl FnOnce(&mut Self, &mut PgConnection, LeaseId) -> Kept,
    ) -> Kept {
        let Some(mut conn) = self.relays[number].conn.take() else {
            return Ok(());
        };
        let result = self
            .lease_of(number, &mut conn)
            .and_then(|lease| work(self, &mut conn, lease));
        self.relays[number].conn = Some(conn);
        result
    }

    pub(super) fn lease_of(&mut self, number: usize, conn: &mut PgConnection) -> Kept<LeaseId> {
        if let Some(lease) = self.relays[number].lease {
            return Ok(lease);
        }
        let lease = lease::register(conn, self.name, "model", LEASE, false, None)?;
        self.relays[number].lease = Some(lease);
        Ok(lease)
    }

    /// The leases whose messages this relay may take: not what it has to settle itself.
    pub(super) fn expired(&self, number: usize) -> Vec<i64> {
        let relay = &self.relays[number];
        let is_own = |id: &i64| relay.jobs.iter().any(|job| job.lease.0 == *id);
        let ended = relay.ended.iter().copied();
        ended.filter(|id| !is_own(id)).collect()
    }

    pub(super) fn lanes(
        &self,
        conn: &mut PgConnection,
        number: usize,
        is_keyed: bool,
        room: usize,
        is_sweep: bool,
    ) -> Kept<Vec<Lane>> {
        let places = &self.relays[number].places;
        let found = streams(conn, self.name)?.into_iter();
        let streams = found.map(|found| found.stream);
        let lane = |stream: Stream| Lane {
            after: match places.get(&stream) {
                Some(place) if !is_sweep => *place,
                _ => Position::START,
            },
            stream,
            room,
        };
        let of_kind = streams.filter(|stream| stream.is_keyed == is_keyed);
        Ok(of_kind.map(lane).collect())
    }

    pub(super) fn claim(
        &mut self,
        number: usize,
        room: usize,
        is_sweep: bool,
        answer: Answer,
        meanwhile: &[Aside],
    ) -> Kept {
        self.with_relay(number, |this, conn, lease| {
            let lanes = this.lanes(conn, number, false, room, is_sweep)?;
            let (expired, as_of) = (this.expired(number), this.model.clock());
            let (system, name, claimant) = (this.system, this.name, claimant(lease, &expired));
            let mut aside = Ok(());
            let claimed = conn.transaction::<_, Error, _>(|conn| {
                let claimed = system.claim(conn, name, claimant, &lanes, room)?;
                aside = this.meanwhile(meanwhile);
                Ok(claimed)
            })?;
            aside?;
            this.take(number, lease, as_of, false, answer, claimed)
        })
    }

    pub(super) fn claim_keyed(
        &mut self,
        number: usize,
        find: Find,
        answer: Answer,
        meanwhile: &[Aside],
    ) -> Kept {
        self.with_relay(number, |this, conn, lease| {
            let expired = this.expired(number);
            let (system, name, claimant) = (this.system, this.name, claimant(lease, &expired));
            let candidates = this.find(conn, number, claimant, find)?;
            let as_of = this.model.clock();
            let mut aside = Ok(());
            let claimed = conn.transaction::<_, Error, _>(|conn| {
                let claimed = system.claim_keyed(conn, name, claimant, &candidates)?;
                aside = this.meanwhile(meanwhile);
                Ok(claimed)
            })?;
            aside?;
            this.model
                .note_if(claimed.is_none(), Event::AnotherRelayClaims);
            let claimed = claimed.unwrap_or_default();
            this.take(number, lease, as_of, true, answer, claimed)
        })
    }

    pub(super) fn find(
        &self,
        conn: &mut PgConnection,
        number: usize,
        claimant: Claimant<'_>,
        find: Find,
    ) -> Kept<Vec<Candidate>> {
        match find {
            Find::Due => {
                let lanes = self.lanes(conn, number, true, STEP, true)?;
                let topics = lanes.iter().map(|lane| &lane.stream.topic);
                let goes_to: Vec<&str> =
                    topics.map(|t| goes_to(&t.topic, &t.destination)).collect();
                let found = ordered::due(conn, self.name, claimant, &lanes, &goes_to)?;
                Ok(found.into_iter().flat_map(|lane| lane.candidates).collect())
            }
            Find::Walk => {
                let mut candidates = Vec::new();
                let mut from = Some(Key::default());
                while let Some(key) = from {
                    let page = ordered::walk(conn, self.name, claimant.expired, &key, STEP)?;
                    let heads = page.heads.iter();
                    candidates.extend(heads.map(|head| {
                        let Topic { topic, destination } = &head.topic;
                        candidate(head.sequence, topic, destination)
                    }));
                    from = page.last.filter(|last| *last != key);
                }
                // The last key of a page is looked at again.
                candidates.dedup_by_key(|candidate| candidate.sequence);
                Ok(candidates)
            }
            Find::Guess => {
                let live = self.model.live();
                let keyed = live.filter(|(_, message)| message.ordering_key.is_some());
                let guess = |(sequence, message): (i64, &Message)| {
                    candidate(sequence, message.topic, message.destination())
                };
                Ok(keyed.map(guess).collect())
            }
        }
    }

    pub(super) fn take(
        &mut self,
        number: usize,
        lease: LeaseId,
        as_of: u64,
        is_keyed: bool,
        answer: Answer,
        mut claimed: Vec<Claimed>,
    ) -> Kept {
        claimed.sort_unstable_by_key(|one| one.message.sequence);
        let jobs = self.model.claim(lease, as_of, is_keyed, &claimed)?;
        if answer == Answer::Lost {
            self.model.note_if(!jobs.is_empty(), Event::ClaimUnheard);
            return Ok(());
        }
        let relay = &mut self.relays[number];
        relay.jobs.extend(jobs);
        for one in &claimed {
            let place = relay
                .places
                .entry(stream_of(one))
                .or_insert(Position::START);
            *place = one.position.max(*place);
        }
        Ok(())
    }

    /// What others do while a transaction is open.
    pub(super) fn meanwhile(&mut self, asides: &[Aside]) -> Kept {
        asides.iter().try_for_each(|aside| match aside {
            Aside::Commit(producer) => self.end(self.open_from(*producer), true),
            Aside::Claim(relay) => self.claim(*relay, 3, true, Answer::Heard, &[]),
            Aside::ClaimKeyed(relay, find) => self.claim_keyed(*relay, *find, Answer::Heard, &[]),
        })
    }
}

pub(super) fn claimant(lease: LeaseId, expired: &[i64]) -> Claimant<'_> {
    Claimant {
        lease,
        expired,
        max_attempts: MAX_ATTEMPTS.unsigned_abs(),
        bytes: usize::MAX,
    }
}

fn candidate(sequence: i64, topic: &str, destination: &str) -> Candidate {
    Candidate {
        sequence,
        goes_to: goes_to(topic, destination).to_owned(),
    }
}

pub(in crate::store::model) fn stream_of(claimed: &Claimed) -> Stream {
    let message = &claimed.message;
    Stream {
        topic: Topic {
            topic: message.topic.clone(),
            destination: message.destination.clone(),
        },
        is_keyed: message.ordering_key.is_some(),
    }
}

//! What the relay looks around for: topics, leases that are over, pauses, and how it stands.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::kept_back::KeptBack;
use super::lanes::{SWEEP_SHARE, Seen};
use crate::store::relay::claim::Stream;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::streams::Found;

/// A look for streams that takes longer than this reads what is dead.
const SLOW: Duration = Duration::from_millis(50);
/// A slow look for all streams takes no more than so much of the time: that a stream has nothing any
/// more is no news.
const WHOLE_SHARE: u32 = 100;

/// A survey to be made.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::relay) struct Survey {
    pub(in crate::relay) streams: Streams,
    /// The look that it begins.
    pub(super) look: Look,
}

/// Which streams are looked for.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::relay) enum Streams {
    All,
    /// Those that are not among these.
    Beside(Vec<Stream>),
    /// Those of messages behind this sequence: a look for the others would take too long.
    Behind(i64),
}

/// What a survey has found.
#[derive(Debug, Default)]
pub(in crate::relay) struct Surveyed {
    /// `None`: the look for them took too long.
    pub(in crate::relay) streams: Option<Vec<Found>>,
    /// How long that look took.
    pub(in crate::relay) took: Duration,
    /// Leases that end soon, unless their relays come back.
    pub(in crate::relay) shortened: Vec<i64>,
    /// Leases that are over.
    pub(in crate::relay) ended: Vec<i64>,
    /// Leases whose messages are still on their way here.
    pub(in crate::relay) held: HashSet<LeaseId>,
    /// No other relay has to do the work.
    pub(in crate::relay) is_active: bool,
    /// What the database's clock showed, in microseconds.
    pub(in crate::relay) time: i64,
    /// What tells the server from another.
    pub(in crate::relay) server: i64,
    pub(in crate::relay) kept_back: KeptBack,
}

/// A look at all lanes, which may take several claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Look {
    /// The last question before the last survey.
    pub(super) question: u64,
    pub(super) began: Instant,
    pub(super) nothing_in_flight: bool,
    pub(super) found_nothing: bool,
}

/// How long the last looks for streams took.
#[derive(Debug, Default)]
pub(super) struct Looks {
    for_all: Option<(Instant, Duration)>,
    beside_known: Option<(Instant, Duration)>,
    /// The last one was left out.
    is_owed: bool,
}

impl Looks {
    /// Looks for all streams. Where an old snapshot makes that slow, it looks beside the known ones instead; and where
    /// that is slow, too, at the messages behind `newest`, and beside the known ones only now and then, unless somebody
    /// waits for an answer.
    pub(super) fn next(
        &mut self,
        now: Instant,
        known: impl FnOnce() -> Vec<Stream>,
        is_asked: bool,
        newest: i64,
        moment: Duration,
    ) -> Streams {
        let is_fast = |took| took < SLOW.min(moment);
        let is_due = |last: Option<(Instant, Duration)>, share| {
            last.is_none_or(|(at, took)| {
                is_fast(took) || now.saturating_duration_since(at) >= share * took
            })
        };
        let is_all = is_due(self.for_all, WHOLE_SHARE);
        self.is_owed = !is_all && !is_asked && !is_due(self.beside_known, SWEEP_SHARE);
        match (is_all, self.is_owed) {
            (true, _) => Streams::All,
            (false, true) => Streams::Behind(newest),
            (false, false) => Streams::Beside(known()),
        }
    }

    /// Learns from a look what it costs. `found` is `None` where it took too long.
    pub(super) fn learn(
        &mut self,
        now: Instant,
        looked: &Streams,
        found: Option<Vec<Found>>,
        took: Duration,
    ) -> Seen {
        let is_slow = match looked {
            Streams::All => {
                self.for_all = Some((now, took));
                took >= SLOW || found.is_none()
            }
            Streams::Beside(_) => {
                self.beside_known = Some((now, took));
                took >= SLOW || found.is_none()
            }
            Streams::Behind(_) => true,
        };
        Seen {
            is_all: *looked == Streams::All && found.is_some(),
            slow: is_slow.then_some(took),
            found: found.unwrap_or_default(),
        }
    }

    /// When a look is due that was left out: what was told of meanwhile may be in a stream that is not known.
    pub(super) fn owed_at(&self) -> Option<Instant> {
        let (at, took) = self.beside_known.filter(|_| self.is_owed)?;
        Some(at + SWEEP_SHARE * took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R9: what was told of meanwhile may be in a stream that is not known, and nobody tells of it again.
    #[test]
    fn a_look_that_was_left_out_is_owed_until_it_may_be_made() {
        let (now, moment) = (Instant::now(), Duration::from_millis(250));
        let mut looks = Looks::default();
        let next =
            |looks: &mut Looks, now, is_asked| looks.next(now, Vec::new, is_asked, 7, moment);
        assert_eq!(next(&mut looks, now, false), Streams::All);
        let slow = Duration::from_millis(200);
        looks.learn(now, &Streams::All, Some(Vec::new()), slow);
        let beside = next(&mut looks, now, false);
        assert_eq!(beside, Streams::Beside(Vec::new()));
        assert_eq!(looks.owed_at(), None, "it is made");
        looks.learn(now, &beside, Some(Vec::new()), slow);
        assert_eq!(next(&mut looks, now, true), beside, "somebody asks");
        assert_eq!(next(&mut looks, now, false), Streams::Behind(7));
        assert_eq!(looks.owed_at(), Some(now + SWEEP_SHARE * slow));
        let later = now + SWEEP_SHARE * slow;
        assert_eq!(next(&mut looks, later, false), beside);
        let later = now + WHOLE_SHARE * slow;
        assert_eq!(next(&mut looks, later, false), Streams::All);
    }
}

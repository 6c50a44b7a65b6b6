//! What the claimer looks around for: topics, leases that are over, pauses, and how its relay stands.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::Claimer;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::relay::database_clock::DatabaseClock;
use crate::relay::lanes::{News, SWEEP_SHARE, Seen};
use crate::relay::pauses;
use crate::store::brief::briefly;
use crate::store::relay::claim::Stream;
use crate::store::relay::lease::{self, LeaseId};
use crate::store::relay::pause;
use crate::store::relay::streams::{streams, streams_beside};

/// How often, at least, topics and expired leases are looked for.
const SURVEY_INTERVAL: Duration = Duration::from_secs(1);

/// A look for streams that takes longer than this reads what is dead.
const SLOW: Duration = Duration::from_millis(50);
/// A slow look for all streams takes no more than so much of the time: that a stream has nothing any
/// more is no news.
const WHOLE_SHARE: u32 = 100;

/// How long the last looks for streams took.
#[derive(Debug, Default)]
pub(super) struct Looks {
    for_all: Option<(Instant, Duration)>,
    beside_known: Option<(Instant, Duration)>,
    /// The last one was left out.
    is_owed: bool,
    /// The last one took too long.
    is_cut: bool,
}

impl Looks {
    /// Looks for all streams. Where an old snapshot makes that slow, it looks beside the known ones
    /// instead; and where that is slow, too, only now and then, unless somebody waits for an answer.
    fn look(
        &mut self,
        conn: &mut PgConnection,
        name: &OutboxName,
        known: &[Stream],
        is_asked: bool,
        moment: Duration,
    ) -> QueryResult<Seen> {
        let is_fast = |took| took < SLOW.min(moment);
        let is_due = |last: Option<(Instant, Duration)>, share| {
            last.is_none_or(|(at, took)| is_fast(took) || at.elapsed() >= share * took)
        };
        let is_all = is_due(self.for_all, WHOLE_SHARE);
        self.is_owed = !is_all && !is_asked && !is_due(self.beside_known, SWEEP_SHARE);
        if self.is_owed {
            return Ok(Seen::default());
        }
        let began = Instant::now();
        let found = briefly(conn, moment, |conn| match is_all {
            true => streams(conn, name),
            false => streams_beside(conn, name, known),
        })?;
        let took = began.elapsed();
        let last = match is_all {
            true => &mut self.for_all,
            false => &mut self.beside_known,
        };
        *last = Some((Instant::now(), took));
        self.is_cut = found.is_none();
        let slow = (took >= SLOW || self.is_cut).then_some(took);
        Ok(Seen {
            found: found.unwrap_or_default(),
            is_all: is_all && !self.is_cut,
            slow,
        })
    }

    /// When a look is due that was left out: what was told of meanwhile may be in a stream that is not known.
    pub(super) fn owed_at(&self) -> Option<Instant> {
        let (at, took) = self.beside_known.filter(|_| self.is_owed)?;
        Some(at + SWEEP_SHARE * took)
    }
}

/// A look at all lanes, which may take several claims.
#[derive(Debug)]
pub(super) struct Look {
    /// The last question before the last survey.
    pub(super) question: u64,
    pub(super) began: Instant,
    pub(super) nothing_in_flight: bool,
    pub(super) found_nothing: bool,
}

impl Claimer<'_> {
    /// Every lane may have something again, as far as the last survey has seen lanes.
    pub(super) fn begin_look(&mut self) {
        self.lanes.begin_look();
        self.look = Look {
            question: self.look.question,
            began: Instant::now(),
            nothing_in_flight: self.shared.is_nothing_in_flight(),
            found_nothing: true,
        };
    }

    /// Looks for topics, for leases that are over and for pauses, where that was not done lately.
    /// Begins a new look, unless one is under way that has found nothing yet.
    pub(super) fn survey(&mut self, lease: LeaseId) -> Result<(), DatabaseError> {
        let is_recent = self
            .surveyed
            .is_some_and(|at| at.elapsed() < SURVEY_INTERVAL);
        if is_recent {
            return Ok(());
        }
        let question = self.shared.idle().question();
        let nothing_in_flight = self.shared.is_nothing_in_flight();
        let began = Instant::now();
        let name = &self.shared.config.table;
        let is_asked = self.shared.idle().is_asked();
        let moment = self.shared.moment();
        let (looks, known_streams) = (&mut self.looks, self.lanes.streams());
        let surveyed = self.session.run(|conn| {
            let seen = looks.look(conn, name, &known_streams, is_asked, moment)?;
            let ended = lease::ended(conn, name)?;
            let standing = lease::standing(conn, name, lease)?;
            let clock = DatabaseClock::new(standing.now, Instant::now());
            let paused = pause::all(conn, name)?;
            Ok((seen, standing, clock, ended, paused))
        });
        if surveyed.is_err() {
            // What was found is lost: it is looked for anew, however long that takes.
            self.looks = Looks::default();
        }
        let (seen, standing, clock, ended, paused) = surveyed?;
        let is_first = self.ended.is_none();
        let before = self.ended.take().unwrap_or_default();
        let is_new = |id: &&i64| !before.contains(id);
        let newly_ended: Vec<i64> = ended.iter().filter(is_new).copied().collect();
        if self.looks.is_cut {
            self.patrol.want();
        }
        self.clock = clock;
        self.stand(standing.is_active);
        let kept_back = pauses::learn(self.shared, &paused);
        // A look of many lanes that has found nothing may take longer than a survey is good for: it
        // goes on, or it would never end. What a dead relay held may be in any lane.
        let is_new_look =
            self.surveyed.is_none() || !self.look.found_nothing || !newly_ended.is_empty();
        if !newly_ended.is_empty() {
            self.lanes.forget_places();
            self.walk.restart();
        }
        // Those that had ended before this relay began are no news.
        for id in newly_ended.iter().filter(|_| !is_first) {
            log::warn!(event = "lease_expired", lease = id; "a relay's lease is over: what it held is taken over");
        }
        // What this process itself still has to write down, under a lease that it has lost, is
        // not taken from it.
        let mut expired = ended.clone();
        self.ended = Some(ended);
        let is_undone = |id| self.undoing.as_ref().is_some_and(|one| one.is_of(id));
        expired.retain(|id| !self.shared.holds_under(LeaseId(*id)) && !is_undone(LeaseId(*id)));
        let vanished = self
            .shared
            .vanished
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        expired.extend(vanished.iter());
        drop(vanished);
        let has_news = self.lanes.take_over(seen, &self.shared.routes, &self.clock);
        if has_news == News::Nowhere {
            self.shared.count_now();
        }
        self.shared.set_has_parts(self.lanes.has_keyed_parts());
        let paused = kept_back.topics.iter().cloned();
        self.shared.set_closed_topics(paused, self.lanes.nowhere());
        self.lanes.keep_back(kept_back);
        if is_new_look {
            self.lanes.begin_look();
            self.look = Look {
                question,
                began,
                nothing_in_flight,
                found_nothing: true,
            };
        }
        self.expired = expired;
        self.surveyed = Some(Instant::now());
        Ok(())
    }

    /// Says so when this relay becomes, or ceases to be, the one that works.
    fn stand(&mut self, is_active: bool) {
        if is_active == self.is_active || !self.shared.config.single_active {
            return;
        }
        self.is_active = is_active;
        self.shared.progress.set_standing_by(!is_active);
        if is_active {
            log::info!(event = "active", outbox:% = self.shared.config.table; "this relay does the work now");
            self.lanes.forget_places();
        } else {
            self.shared.stay_awake();
            log::info!(event = "standby", outbox:% = self.shared.config.table; "another relay does the work: standing by");
        }
    }
}
